"""Blocks of rows of A: what is counted of each, and how consecutive rows are cut into blocks that fit.

Where the rows of B that a block needs bound nothing, NumPy cuts, unless Numba is loaded: it takes long to load. The
blocks are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.scheduler.planner.stored_rows import Lengths

FIRST_STAMP = 1
"""Number of the first block: rows of B that no block has needed are stamped with 0."""

BlockTable = npt.NDArray[np.void]
"""One-dimensional array of `BLOCK_RECORD`."""


class BlockRecord(NamedTuple):
    """Rows ``[start:stop)`` of A and the sums over them."""

    start: int
    stop: int
    products: int  # multiply-adds
    nnz: int  # expected entries of C
    a_bytes: int  # bytes of A's rows and of the mask's rows
    b_bytes: int  # bytes of the distinct rows of B that A's columns name; 0 if B is resident
    b_chunks: int  # Zarr chunks of B in which those rows lie; 0 if B is resident
    uncut_nnz: int  # expected entries of C before top-n cuts its rows
    longest: int  # most entries that a row of C may have before top-n cuts it, whatever was expected


BLOCK_RECORD = np.dtype([(name, np.int64) for name in BlockRecord._fields])
"""`BlockRecord` as a structured dtype."""


def block_table(records: Iterable[BlockRecord] = ()) -> BlockTable:
    """Return a table of these records.

    Examples
    --------
    >>> records = BlockRecord(0, 2, 5, 4, 64, 0, 0, 4, 3), BlockRecord(2, 3, 1, 1, 32, 0, 0, 1, 1)
    >>> table = block_table(records)
    >>> table["products"].tolist()
    [5, 1]
    """
    return np.array([tuple(record) for record in records], BLOCK_RECORD)


def block_records(table: BlockTable) -> list[BlockRecord]:
    """Return the records of a table as tuples of Python integers.

    Examples
    --------
    >>> block_records(block_table([BlockRecord(0, 2, 5, 4, 64, 0, 0, 4, 3)]))[0].products
    5
    """
    rows: list[tuple[Any, ...]] = table.tolist()
    return [BlockRecord(*row) for row in rows]


def joined_records(first: BlockRecord, second: BlockRecord) -> BlockRecord:
    """Join two neighbouring blocks into one.

    `first, second`: `second` begins at the row where `first` ends.
    Returns with the sums of both, and the longer of their longest rows. Rows and Zarr chunks of B that both blocks need
    count twice.

    Examples
    --------
    >>> joined_records(BlockRecord(0, 2, 5, 4, 64, 0, 0, 4, 3), BlockRecord(2, 3, 1, 1, 32, 0, 0, 1, 1))[:4]
    (0, 3, 6, 5)
    """
    sums = BlockRecord(*(sum(both) for both in zip(first, second, strict=True)))
    return sums._replace(start=first.start, stop=second.stop, longest=max(first.longest, second.longest))


class BlockCosts(NamedTuple):
    """Bytes of each part of a block, and the bounds that end one."""

    # bytes of one entry
    a_entry: int
    b_entry: int
    # bytes of one row besides its entries
    b_row: int
    c_entry: int
    c_row: int
    # shape of C
    nrows: int
    ncols: int
    budget: int  # most bytes of a block
    max_products: int  # most products of a block
    mask_entry: int
    inside: bool  # whether the mask says where C may have entries; otherwise it says where C has none
    top_n: int  # entries of C that are kept of each row
    b_resident: bool  # whether all of B is resident: its bytes do not count toward `budget` then
    upper: bool  # whether C is an upper triangle


class ExpectedRows(NamedTuple):
    """Figures from which the number of entries in a row of C is estimated."""

    # of `estimate.Estimate`
    ratio: npt.NDArray[np.float64]
    share: npt.NDArray[np.float64]
    mask_lengths: Lengths  # (nrows,) integers, or (0,) without a mask: entries of the mask's rows


class RowsOfA(NamedTuple):
    """Consecutive rows of A: their offsets, their columns, and the number of the first row."""

    offsets: Int64Array
    columns: ValueArray
    first: int


class RowsOfB(NamedTuple):
    """Row lengths of B, and which rows and Zarr chunks the current block needs."""

    lengths: Lengths  # (nrows of B,) integers
    # (nrows of B,) uint32: number of the block that needed the row last, so that each row counts once a block
    stamps: npt.NDArray[np.uint32]
    rows_per_chunk: int  # rows of B in one Zarr chunk, on average
    chunk_stamps: npt.NDArray[np.uint32]  # (chunks,) uint32: number of the block that needed the Zarr chunk last


class Position(NamedTuple):
    """Where a scan stands."""

    block: BlockTable  # (1,) of `BLOCK_RECORD`: the block that is not closed yet; its `stop` is not set
    counts: Int64Array  # (2,) int64: number of that block, and how many forced starts lie behind


class BlockCutter:
    """Cuts rows that arrive in order: feed it ranges of rows, take the closed blocks.

    `b_lengths`: (nrows of B,) integers.
    `b_chunks`: Zarr chunks of B's columns.
    `forced`: (n,) int64: rows at which blocks must start. If there are any, the bounds end no block.
    `row`: the first row.
    `cut`: of `cut_kernel`; without it NumPy cuts, which needs a resident B.
    """

    def __init__(
        self,
        costs: BlockCosts,
        expected: ExpectedRows,
        b_lengths: Lengths,
        b_chunks: int,
        forced: Int64Array,
        row: int = 0,
        cut: Callable[..., int] | None = None,
    ) -> None:
        rows_per_chunk = max(1, -(-len(b_lengths) // max(b_chunks, 1)))
        chunk_stamps = np.zeros(len(b_lengths) // rows_per_chunk + 1, np.uint32)
        self._b = RowsOfB(b_lengths, np.zeros(len(b_lengths), np.uint32), rows_per_chunk, chunk_stamps)
        self._costs, self._expected, self._forced, self._row = costs, expected, forced, row
        self._position = Position(np.zeros(1, BLOCK_RECORD), np.array([FIRST_STAMP, 0]))
        self._position.block["start"] = row
        self._cut = cut
        self._columns = np.array([len(b_lengths), -1])  # least and greatest of the current block, if NumPy cuts

    def feed(self, offsets: Int64Array, columns: ValueArray) -> BlockTable:
        """Add the next rows; return the blocks that they close."""
        rows = RowsOfA(offsets, columns, self._row)
        self._row += len(offsets) - 1
        if self._cut is None:
            return self._cut_by_numpy(rows)
        out = np.empty(len(offsets), BLOCK_RECORD)
        closed = self._cut(rows, self._b, self._expected, self._costs, self._forced, self._position, out)
        return out[:closed].copy()  # a view would keep all of `out` in memory

    def close(self) -> BlockTable:
        """Return the last block; none if there were no rows."""
        if self._columns[1] >= 0:
            self._count_rows_of_b()
        last = self._position.block.copy()
        last["stop"] = self._row
        return last[: int(self._row > last["start"][0])]

    def _cut_by_numpy(self, a: RowsOfA) -> BlockTable:
        """Add the next rows as `cut_kernel` does; return the blocks that they close."""
        sums, block, first = RowSums.of(a, self._b.lengths, self._expected, self._costs), self._position.block, 0
        starts, closed = a.offsets - a.offsets[0], [block[:0]]
        while True:
            end = self._first_of_next(sums, first, a.first)
            sums.add_to(block, first, end)
            needed = a.columns[starts[first] : starts[end]]
            if len(needed):
                self._b.stamps[needed] = self._position.counts[0]
                low, high = self._columns
                self._columns[:] = min(low, needed.min()), max(high, needed.max())
            if end == len(starts) - 1:
                return np.concatenate(closed)
            self._count_rows_of_b()
            block["stop"] = a.first + end
            closed.append(block.copy())
            block[:] = 0
            block["start"] = a.first + end
            self._position.counts[0] += 1
            self._columns[:] = len(self._b.lengths), -1
            first = end

    def _first_of_next(self, sums: RowSums, first: int, row: int) -> int:
        """Return the first row of `sums` that begins the next block, from `first` on; their number if none does.

        `row`: number of the first row of `sums`.
        """
        block, costs, count = self._position.block[0], self._costs, len(sums.bound)
        if len(self._forced):
            behind = int(self._position.counts[1])
            if behind == len(self._forced) or self._forced[behind] >= row + count:
                return count
            self._position.counts[1] += 1
            return int(self._forced[behind]) - row
        least = max(first, int(block["start"]) + 1 - row)  # a block has one row at least
        products = costs.max_products - int(block["products"]) + sums.products[first]
        end = int(np.searchsorted(sums.products, products, "right")) - 1
        fixed = sums.a_bytes + costs.c_row * np.arange(row, row + count + 1)  # of A, and of C's rows
        room = costs.budget - int(block["a_bytes"]) + sums.a_bytes[first] + costs.c_row * int(block["start"])
        entries = int(block["nnz"]) - sums.nnz[first] + sums.nnz
        end = min(end, int(np.searchsorted(fixed + costs.c_entry * entries, room, "right")) - 1, count)
        longest = np.maximum.accumulate(np.maximum(sums.bound[first:end], int(block["longest"])))
        whole = fixed[first + 1 : end + 1] + costs.c_entry * np.minimum(longest, costs.top_n)
        return min(max(least, min(end, first + int(np.searchsorted(whole, room, "right")))), count)

    def _count_rows_of_b(self) -> None:
        """Count the rows and Zarr chunks of B that the current block needs."""
        low, high = self._columns.tolist()
        needed = low + np.flatnonzero(self._b.stamps[low : high + 1] == self._position.counts[0])
        lengths, block = self._b.lengths[needed], self._position.block
        block["b_bytes"] = int(lengths.sum(dtype=np.int64)) * self._costs.b_entry + len(needed) * self._costs.b_row
        block["b_chunks"] = len(np.unique(needed // self._b.rows_per_chunk))


class RowSums(NamedTuple):
    """Sums over the rows before each of some consecutive rows, (rows + 1,) int64, and a bound for each row."""

    products: Int64Array
    nnz: Int64Array
    a_bytes: Int64Array
    uncut_nnz: Int64Array
    bound: Int64Array  # (rows,) int64: entries that a row of C may have

    @staticmethod
    def of(a: RowsOfA, lengths: Lengths, expected: ExpectedRows, costs: BlockCosts) -> RowSums:
        """Count rows of A, as `cut_kernel` does one by one."""
        offsets = a.offsets - a.offsets[0]
        rows = np.arange(a.first, a.first + len(offsets) - 1)
        products = np.diff(_sums(lengths[a.columns])[offsets])
        most = np.maximum(costs.ncols - rows, 0) if costs.upper else costs.ncols
        bound = np.minimum(products, most)
        ratio = expected.ratio[np.log2(np.maximum(products, 1)).astype(np.int64)]
        nnz = np.where(products, np.minimum((products * ratio).astype(np.int64) + 1, products), 0)
        nnz = np.minimum(nnz, costs.ncols)
        a_bytes = np.diff(offsets) * costs.a_entry + 16
        if len(expected.mask_lengths):
            masked = expected.mask_lengths[rows].astype(np.int64)
            left = masked if costs.inside else costs.ncols - masked
            nnz, bound = np.minimum(nnz, left), np.maximum(np.minimum(bound, left), 0)
            a_bytes += masked * costs.mask_entry + 8
        shares = expected.share[:, rows * expected.share.shape[1] // max(costs.nrows, 1)]
        made, uncut = np.ceil(shares * (products, nnz)).astype(np.int64)
        return RowSums(_sums(made), _sums(np.minimum(uncut, costs.top_n)), _sums(a_bytes), _sums(uncut), bound)

    def add_to(self, block: BlockTable, first: int, end: int) -> None:
        """Add rows ``[first:end)`` to the one block of a table."""
        for name in ("products", "nnz", "a_bytes", "uncut_nnz"):
            sums = getattr(self, name)
            block[name] += sums[end] - sums[first]
        block["longest"] = max(block["longest"][0], self.bound[first:end].max(initial=0))


def _sums(values: npt.NDArray[Any]) -> Int64Array:
    """Return the sums of the values before each, and of all."""
    out = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, dtype=np.int64, out=out[1:])
    return out
