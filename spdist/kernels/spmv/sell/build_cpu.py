"""Convert a matrix to SELL-C-sigma on the CPU, by the steps of `build.cu` on the GPU; compiled by Numba."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from spdist.errors import MatrixError
from spdist.kernels.cpu.numba_compile import compiled, inlined
from spdist.kernels.cuda import constants
from spdist.kernels.spmv.parallel import in_parallel
from spdist.kernels.spmv.sell.chunks_cpu import (
    BASES,
    NARROW_PADDING,
    PADDING,
    ColumnArrays,
    base_room,
    block_rows,
    read_chunk,
    round_up,
    row_at,
)
from spdist.kernels.spmv.sell.format import (
    BLOCK_NARROW,
    BLOCK_WIDE,
    CPU_LONG,
    DIAGONAL,
    FEW_LISTS,
    NARROW,
    WIDE,
    Chunk,
    SellArrays,
    chunk_kinds,
    index_places,
    new_chunks,
    value_places,
)
from spdist.kernels.spmv.sell.layout import CPU_PIECE, Placement, cut_long_rows, list_places, no_long_rows, sort_groups
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

NO_DIAGONAL, MOST_FULL, DIAGONALS = constants.SELL_NO_DIAGONAL, constants.SELL_MOST_FULL, constants.SELL_DIAGONALS
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio."""
MOST_LANES = 32
"""Most lanes of a chunk: a diagonal's lanes are bits of 32-bit numbers."""


@inlined
def is_blocked(block: int, row: int, nrows: int, indptr: IndexArray, indices: IndexArray) -> Any:
    """Whether a row is one of `block` equal rows whose columns form aligned runs of `block`."""
    leader = row - row % block
    begin, lead = indptr[row], indptr[leader]
    length = indptr[row + 1] - begin
    if leader + block > nrows or length % block != 0 or indptr[leader + 1] - lead != length:
        return False
    for k in range(0, length, block):
        column = indices[lead + k]
        if column % block != 0:
            return False
        for e in range(block):
            if indices[begin + k + e] != column + e:
                return False
    return True


class SourceRows(NamedTuple):
    """The pattern of the `CSR` that is stored, and the order of its rows."""

    indptr: IndexArray
    indices: IndexArray
    rows: IndexArray  # (npositions,) int32: row at each position; empty if positions are rows


class RowCursors(NamedTuple):
    """Positions of a reader in the rows of a chunk."""

    next: Int64Array  # (lanes,): next entry of each row
    end: Int64Array  # (lanes,): end of each row


class ChunkShape(NamedTuple):
    """Forms in which chunks may be stored."""

    lanes: int
    block: int
    nrows: int
    value_bytes: int
    allowed: int  # bit 0 allows 16-bit offsets, bit 1 diagonals; see `sell.ALLOWED`


class SharedLists(NamedTuple):
    """Chunks that share the list of their diagonals."""

    owners: IndexArray  # (nchunks,) int32: chunk that owns the indices of each chunk; empty if each owns its indices
    shared: bool  # whether to write the chunks that share indices; their owners must have been written
    differ: Int64Array  # (1,): set to 1 if the diagonals of a chunk are not the diagonals of its owner


@inlined
def next_diagonal(count: int, first: int, indices: IndexArray, cursors: RowCursors) -> Any:
    """Return the least diagonal with a next entry of rows from `first` on; `NO_DIAGONAL` if all rows have ended."""
    least = NO_DIAGONAL
    for r in range(count):
        if cursors.next[r] < cursors.end[r]:
            least = min(least, indices[cursors.next[r]] - (first + r))
    return least


@inlined
def start_rows(first: int, count: int, source: SourceRows, cursors: RowCursors) -> None:
    """Set the cursor of each of a chunk's `count` rows, from position `first` on, to its first entry."""
    for r in range(count):
        row = row_at(first + r, source.rows)
        cursors.next[r], cursors.end[r] = source.indptr[row], source.indptr[row + 1]


@inlined
def hashed(number: np.uint64, diagonal: int, mask: int) -> Any:
    """Return the hash of a list of diagonals with one more pair: a diagonal, column less row, and a mask of rows."""
    pair = np.uint64(mask << 32 | diagonal & 0xFFFFFFFF)
    number = (number ^ pair) * HASH_FACTOR
    return number ^ number >> np.uint64(32)


@inlined
def count_diagonals(first: int, count: int, most: int, indices: IndexArray, cursors: RowCursors) -> Any:
    """Count the diagonals of a chunk's rows, `most` at most, and hash their list; cursors move from `start_rows` on.

    Returns the count, ``most + 1`` if there are more, and a hash that is not negative, or -1 if there are more.
    """
    number = np.uint64(0)
    for found in range(most + 1):
        diagonal, mask = next_diagonal(count, first, indices, cursors), 0
        if diagonal == NO_DIAGONAL:
            return found, np.int64(number >> np.uint64(1))
        for r in range(count):
            if cursors.next[r] < cursors.end[r] and indices[cursors.next[r]] - (first + r) == diagonal:
                mask |= 1 << r
                cursors.next[r] += 1
        number = hashed(number, diagonal, mask)
    return most + 1, np.int64(-1)


@inlined
def diagonal_room(width: int) -> Any:
    """Return the 32-bit numbers of a chunk's diagonals, padded."""
    return 2 * round_up(width, DIAGONALS)


@inlined
def slot_span(slot: int, unit: int, threads: int, count: int, indices: IndexArray, cursors: RowCursors) -> Any:
    """Return the lowest and the highest block column of a slot; the lowest is `NO_DIAGONAL` if all rows have ended.

    `unit`: side of a block; 1 for entries. `threads`: lanes of a row. `count`: rows of the chunk.
    """
    low, high, step = NO_DIAGONAL, -1, threads * unit
    for r in range(count):
        begin = cursors.next[r] + slot * step
        for k in range(begin, min(begin + step, cursors.end[r]), unit):
            low, high = min(low, indices[k] // unit), max(high, indices[k] // unit)
    return low, high


@inlined
def spans_fit(width: int, unit: int, threads: int, count: int, indices: IndexArray, cursors: RowCursors) -> Any:
    """Whether 16-bit offsets from one base reach all columns of each of `width` slots."""
    for slot in range(width):
        low, high = slot_span(slot, unit, threads, count, indices, cursors)
        if high - low >= NARROW_PADDING:
            return False
    return True


@compiled
def analyse(
    start: int, stop: int, shape: ChunkShape, source: SourceRows, chunks: Int64Array, sizes: Int64Array,
    cursors: RowCursors,
) -> None:  # fmt: skip
    """Find the width and the kind of chunks ``[start, stop)``, and write them to `chunks`.

    `sizes`: (4, nchunks): receives the elements of each chunk in `values`, `wide` and `narrow`, and the hash of its
    diagonals or -1.
    """
    lanes, block, nrows, value_bytes, allowed = shape
    indptr, indices, rows = source
    for at in range(start, stop):
        chunk = read_chunk(chunks, at)
        first, threads, count = chunk.first, 1 << chunk.log_threads, chunk.count
        width, least, blocked = 0, NO_DIAGONAL, block > 1 and threads == 1
        start_rows(first, count, source, cursors)
        for r in range(count):
            length = cursors.end[r] - cursors.next[r]
            width, least = max(width, -(-length // threads)), min(least, length // threads)
            if blocked:
                row = row_at(first + r, rows)
                blocked = (first + r) % block == row % block and is_blocked(block, row, nrows, indptr, indices)
        unit = block if blocked else 1
        width, least = width // unit, least // unit if count * threads == lanes else 0
        near = allowed & 1 == 1 and spans_fit(width, unit, threads, count, indices, cursors)
        kind = (BLOCK_NARROW if near else BLOCK_WIDE) if blocked else NARROW if near else WIDE
        sizes[3, at] = -1
        if allowed & 2 and threads == 1 and not blocked:
            most = width * lanes * (value_bytes + (2 if near else 4)) // (lanes * value_bytes + 8)
            found, number = count_diagonals(first, count, most, indices, cursors)
            if found <= most:
                kind, width, sizes[3, at] = DIAGONAL, found, number
        narrow, places = kind in (NARROW, BLOCK_NARROW), width * (block_rows(lanes, block) if blocked else lanes)
        chunks[at, 2] = first | width << 32
        chunks[at, 3] = (kind | chunk.log_threads << 4 | count << 8 | min(least, MOST_FULL) << 16) << 32
        sizes[0, at] = width * lanes * unit
        sizes[1, at] = diagonal_room(width) if kind == DIAGONAL else 0 if narrow else round_up(places, 4)
        sizes[2, at] = base_room(width) + round_up(places, 2 * BASES) if narrow else 0


@inlined
def fill_diagonals(
    chunk: Chunk, indices: IndexArray, data: ValueArray, out: SellArrays, shared: bool, cursors: RowCursors
) -> Any:
    """Write a chunk of diagonals; return False if its list differs from the shared list at its place.

    `out`: receives the values, and in `wide` a diagonal and a mask of lanes for each slot. `shared`: whether another
    chunk has written the list: it is then compared, not written. `cursors`: as `start_rows` sets them; they move.
    """
    first, count, lanes, wide = chunk.first, chunk.count, out.lanes, out.wide
    at, end = cursors
    same = True
    for slot in range(chunk.width):
        diagonal, mask = next_diagonal(count, first, indices, cursors), 0
        for r in range(lanes):
            has = r < count and at[r] < end[r] and indices[at[r]] - (first + r) == diagonal
            out.values[chunk.values + slot * lanes + r] = data[at[r]] if has else 0
            if has:
                mask |= 1 << r
                at[r] += 1
        pair, bits = chunk.index + 2 * slot, np.int32(np.uint32(mask))
        if shared:
            same = same and wide[pair] == diagonal and wide[pair + 1] == bits
        else:
            wide[pair], wide[pair + 1] = diagonal, bits
    return same


@inlined
def fill_bases(unit: int, chunk: Chunk, indices: IndexArray, bases: IndexArray, cursors: RowCursors) -> None:
    """Write the base of each of a chunk's slots: its lowest block column; blocks have `unit` rows and columns."""
    threads = 1 << chunk.log_threads
    for slot in range(chunk.width):
        bases[chunk.index // 2 + slot] = slot_span(slot, unit, threads, chunk.count, indices, cursors)[0]


@inlined
def fill_entries(
    unit: int, chunk: Chunk, indices: IndexArray, data: ValueArray, out: SellArrays, columns: ColumnArrays,
    cursors: RowCursors,
) -> None:  # fmt: skip
    """Write a chunk of entries, or of dense blocks; `unit` is the side of a block, 1 for entries.

    `columns`: receives columns or offsets; holds the bases of offsets.
    """
    place, to, first, width, count = chunk.values, chunk.index, chunk.first, chunk.width, chunk.count
    (index, bases, padding), lanes, threads = columns, out.lanes, 1 << chunk.log_threads
    places, offsets = lanes if unit == 1 else block_rows(lanes, unit), to + (base_room(width) if len(bases) else 0)
    for i in range(width * places):
        index[offsets + i] = padding
    for i in range(width * lanes * unit):
        out.values[place + i] = 0
    for r in range(count):
        row_place = r * threads if unit == 1 else (first % unit + r) // unit
        for number in range((cursors.end[r] - cursors.next[r]) // unit):
            k, slot, lane = cursors.next[r] + number * unit, number // threads, number % threads
            base = np.int64(bases[to // 2 + slot]) if len(bases) else 0
            index[offsets + slot * places + row_place + lane] = indices[k] // unit - base
            for e in range(unit):
                out.values[place + (slot * unit + e) * lanes + r * threads + lane] = data[k + e]


@compiled
def fill(
    start: int, stop: int, source: SourceRows, data: ValueArray, out: SellArrays, lists: SharedLists,
    cursors: RowCursors,
) -> None:  # fmt: skip
    """Write values and indices of the chunks in ``[start, stop)`` that own their indices, or that share them."""
    indices, chunks, owners = source.indices, out.chunks, lists.owners
    wide, narrow = ColumnArrays(out.wide, out.bases[:0], PADDING), ColumnArrays(out.narrow, out.bases, NARROW_PADDING)
    for at in range(start, stop):
        owner = np.int64(owners[at]) if len(owners) else at
        if (owner != at) != lists.shared:
            continue
        chunk = read_chunk(chunks, at)
        start_rows(chunk.first, chunk.count, source, cursors)
        unit = out.block if chunk.kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        if chunk.kind == DIAGONAL:
            as_wide = chunks[owner, 2] >> 32 == chunk.width
            if not as_wide or not fill_diagonals(chunk, indices, data, out, lists.shared, cursors):
                lists.differ[0] = 1
        elif chunk.kind in (WIDE, BLOCK_WIDE):
            fill_entries(unit, chunk, indices, data, out, wide, cursors)
        else:
            fill_bases(unit, chunk, indices, out.bases, cursors)
            fill_entries(unit, chunk, indices, data, out, narrow, cursors)


class Builder:
    """The steps of `sell.build` for a matrix on the host."""

    def __init__(self, a: CSR, lanes: int, height: int, threads: int) -> None:
        if lanes > MOST_LANES:
            raise MatrixError(f"a chunk has up to {MOST_LANES} lanes, not {lanes}")
        self.a, self.lanes, self.height, self.threads = a, lanes, height or lanes, threads
        self.lengths = np.diff(a.indptr)

    def find_block(self) -> int:
        """Return 1: the CPU gains nothing from dense blocks."""
        return 1

    def has_long_rows(self) -> bool:
        """Whether rows stay in CSR."""
        return bool((self.lengths > CPU_LONG).any())

    def place(self, sigma: int | Literal["auto"], block: int, entry_bytes: int) -> Placement:
        """Choose sigma if it is "auto", sort the rows in groups of `block`, and cut them into chunks."""
        kept = np.flatnonzero(self.lengths <= CPU_LONG) if self.has_long_rows() else None
        rest = self.lengths if kept is None else self.lengths[kept]
        sigma, order = sort_groups(rest, sigma, self.height, block, entry_bytes)
        rows = order if kept is None else kept if order is None else kept[order]
        first = np.arange(0, len(rest), self.height)
        log_threads = (self.lanes // self.height).bit_length() - 1
        chunks = new_chunks(first, np.minimum(len(rest) - first, self.height), log_threads)
        return Placement(chunks, None if rows is None else rows.astype(np.int32), sigma)

    def long_rows(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Return the rows that stay in CSR, cut into pieces."""
        if not self.has_long_rows():
            return no_long_rows(np, dtype)
        rows = np.flatnonzero(self.lengths > CPU_LONG)
        counts = self.lengths[rows].astype(np.int64)
        indptr, pieces, row_pieces = cut_long_rows(counts, self.a.nnz, CPU_PIECE)
        entry = np.arange(indptr[-1]) + np.repeat(self.a.indptr[rows] - indptr[:-1], counts)
        indices, data = self.a.indices[entry].astype(np.int32), self.a.data[entry].astype(dtype)
        return rows.astype(np.int32), indptr, indices, data, pieces, row_pieces

    def fill(self, placed: Placement, block: int, dtype: np.dtype[Any], allowed: int) -> tuple[Any, ...]:
        """Find each chunk's width and kind, and where its arrays are; return values and indices of all chunks."""
        sizes = self._analyse(placed.chunks, placed.rows, block, dtype, allowed)
        owners, kept = share_lists(sizes)
        filled: tuple[Any, ...] | None = self._fill(placed.chunks, placed.rows, block, dtype, kept, owners)
        return filled or self._fill(placed.chunks, placed.rows, block, dtype, sizes, None)  # two lists of one hash

    def _analyse(
        self, chunks: Int64Array, rows: IndexArray | None, block: int, dtype: np.dtype[Any], allowed: int
    ) -> Any:
        """Set width and kind of each chunk; return the sizes of its arrays, and the hash of its diagonals."""
        sizes = np.empty((4, len(chunks)), np.int64)
        shape = ChunkShape(self.lanes, block, self.a.nrows, dtype.itemsize, allowed)
        source = SourceRows(self.a.indptr, self.a.indices, or_empty(rows))

        def work(start: int, stop: int) -> None:
            analyse(start, stop, shape, source, chunks, sizes, RowCursors(*np.empty((2, MOST_LANES), np.int64)))

        in_parallel(work, np.arange(1, len(chunks) + 1), self.threads)
        return sizes

    def _fill(
        self, chunks: Int64Array, rows: IndexArray | None, block: int, dtype: np.dtype[Any], sizes: Int64Array,
        owners: IndexArray | None,
    ) -> Any:  # fmt: skip
        """Place each chunk's arrays behind the arrays of the chunk before it, and write them.

        Return None if a chunk's diagonals are not the diagonals of its owner.
        """
        ends = np.cumsum(sizes[:3], axis=1)
        totals = ends[:, -1].tolist() if len(chunks) else (0, 0, 0)
        narrow = np.isin(chunk_kinds(chunks), (NARROW, BLOCK_NARROW))
        places = ends - sizes[:3]
        value_places(chunks)[:] = places[0]
        index_places(chunks)[:] = np.where(narrow, places[2], places[1] if owners is None else places[1, owners])
        filled = np.empty(totals[0], dtype), np.zeros(totals[1], np.int32), np.zeros(totals[2], np.uint16)
        source, differ = SourceRows(self.a.indptr, self.a.indices, or_empty(rows)), np.zeros(1, np.int64)
        out = SellArrays(self.lanes, block, chunks, *filled, filled[2].view(np.int32), source.rows)

        def work(shared: bool, start: int, stop: int) -> None:
            lists, cursors = SharedLists(or_empty(owners), shared, differ), np.empty((2, MOST_LANES), np.int64)
            fill(start, stop, source, self.a.data, out, lists, RowCursors(*cursors))

        for shared in (False,) if owners is None else (False, True):
            in_parallel(functools.partial(work, shared), value_places(chunks) + 1, self.threads)
        return None if differ[0] else filled


def share_lists(sizes: Int64Array) -> tuple[Any, Any]:
    """Find chunks whose lists of diagonals have equal hashes; `fill` compares the lists.

    `sizes`: (4, nchunks): elements of each chunk's values, of its indices in `wide` and in `narrow`; the hash of its
    list, -1 for none.
    Returns (nchunks,) owners: the first chunk with the same list; the chunk itself if it has none, or if another list's
    hash took its place; None if few chunks have lists. And the sizes, with nothing in `wide` for chunks that share
    another chunk's list.
    """
    nchunks, hashes = sizes.shape[1], sizes[3]
    own, listed = np.arange(nchunks, dtype=np.int32), hashes >= 0
    if np.count_nonzero(listed) <= FEW_LISTS * nchunks:
        return None, sizes
    places = hashes & (list_places(nchunks) - 1)
    first = np.full(list_places(nchunks), nchunks, np.int32)
    np.minimum.at(first, places[listed], own[listed])
    found = np.where(listed, first[places], own)
    owners = np.where(hashes[found] == hashes, found, own)
    kept = sizes.copy()
    kept[1] *= owners == own
    return owners, kept


def or_empty(array: IndexArray | None) -> Any:
    """Return an array, or an empty one for None: compiled code then has one type for both."""
    return np.empty(0, np.int32) if array is None else array
