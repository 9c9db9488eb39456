"""Products of a matrix in SELL-C-sigma with vectors on the CPU, compiled by Numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from spdist.kernels.cpu.numba_compile import compiled, inlined
from spdist.kernels.spmv.parallel import in_parallel, threads_for
from spdist.kernels.spmv.sell.chunks_cpu import (
    NARROW_PADDING,
    PADDING,
    ColumnArrays,
    base_room,
    entry_of,
    list_entries,
    read_chunk,
    row_at,
)
from spdist.kernels.spmv.sell.format import (
    BLOCK_NARROW,
    BLOCK_WIDE,
    DIAGONAL,
    WIDE,
    Chunk,
    Sell,
    SellArrays,
    value_places,
)
from spdist.kernels.spmv.sell.lane_sums import GROUP, DiagonalSlots, EntrySlots, SumsOut, sum_diagonals, sum_entries
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, index_dtype


class LongRows(NamedTuple):
    """The long rows of a `Sell`."""

    pieces: Int64Array  # (npieces + 1,): where each piece starts
    indices: IndexArray
    data: ValueArray


@inlined
def add_slots(total: Any, slots: int, step: np.uintp, first: EntrySlots, padding: int, x: ValueArray) -> Any:
    """Return `total` with the products of a lane's slots added, up to its first padding.

    `slots, step`: most slots, and the elements from one to the next. `padding`: index of an unused slot.
    """
    values, at, index, to, bases, base_at = first
    base = np.uintp(0)
    for _ in range(slots):
        column = index[to]
        if column == padding:
            break
        if len(bases):
            base = np.uintp(bases[base_at])
            base_at += np.uintp(1)
        total += values[at] * x[base + np.uintp(column)]
        at += step
        to += step
    return total


@inlined
def store(first: int, count: int, rows: IndexArray, sums: ValueArray, y: ValueArray) -> None:
    """Write the sums of a chunk's lanes to their rows of y; `rows` is empty if positions are rows."""
    for i in range(count):
        y[np.uintp(rows[np.uintp(first + i)]) if len(rows) else np.uintp(first + i)] = sums[i]


@inlined
def entry_chunk(
    groups: tuple[int, ...], chunk: Chunk, a: SellArrays, columns: ColumnArrays, x: ValueArray, out: SumsOut
) -> None:
    """Multiply a chunk of entries, a lane a row; `groups` is as long as the chunk has groups of `GROUP` lanes.

    `out`: its place is -1 unless the chunk's rows are consecutive and fill all lanes.
    """
    index, bases, padding = columns
    width, full, lanes = chunk.width, chunk.full, len(groups) * GROUP
    to, base_at = chunk.index + (base_room(width) if len(bases) else 0), np.uintp(chunk.index // 2)
    slots = EntrySlots(a.values, np.uintp(chunk.values), index, np.uintp(to), bases, base_at)
    sum_entries(groups, out, np.uintp(full), slots, x)
    if out.place < 0:
        store(chunk.first, chunk.count, a.rows, out.sums, out.y)
    if full < width:
        value_at, to, base_at = chunk.values + full * lanes, to + full * lanes, base_at + np.uintp(full)
        for r in range(chunk.count):
            row = np.uintp(row_at(chunk.first + r, a.rows))
            first = EntrySlots(a.values, np.uintp(value_at + r), index, np.uintp(to + r), bases, base_at)
            out.y[row] = add_slots(out.y[row], width - full, np.uintp(lanes), first, padding, x)


@compiled
def multiply_chunks(
    start: int, stop: int, groups: tuple[int, ...], a: SellArrays, x: ValueArray, y: ValueArray, sums: ValueArray
) -> None:
    """Multiply chunks ``[start, stop)`` of real numbers, a lane a row and without dense blocks, with one column of x.

    `groups`: as long as a chunk has groups of `GROUP` lanes. `sums`: (lanes,): scratch.
    """
    wide, narrow = ColumnArrays(a.wide, a.bases[:0], PADDING), ColumnArrays(a.narrow, a.bases, NARROW_PADDING)
    for at in range(start, stop):
        chunk = read_chunk(a.chunks, at)
        out = SumsOut(sums, y, -1 if len(a.rows) or chunk.count < len(groups) * GROUP else chunk.first)
        if chunk.kind == DIAGONAL:
            first = np.uintp(chunk.first)
            slots = DiagonalSlots(a.values, np.uintp(chunk.values), a.wide, np.uintp(chunk.index), first)
            sum_diagonals(groups, out, np.uintp(chunk.width), slots, x)
            if out.place < 0:
                store(chunk.first, chunk.count, a.rows, sums, y)
        elif chunk.kind == WIDE:
            entry_chunk(groups, chunk, a, wide, x, out)
        else:
            entry_chunk(groups, chunk, a, narrow, x, out)


@compiled
def multiply_columns(start: int, stop: int, a: SellArrays, x: ValueArray, y: ValueArray) -> None:
    """Add the products of chunks ``[start, stop)`` of any kind with all columns of x to y."""
    for at in range(start, stop):
        chunk = read_chunk(a.chunks, at)
        unit = a.block if chunk.kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        for lane in range(chunk.count << chunk.log_threads):
            row = row_at(chunk.first + (lane >> chunk.log_threads), a.rows)
            for slot in range(chunk.width):
                column = entry_of(a, chunk, lane, slot)
                if column < 0:
                    continue
                for e in range(unit):
                    value = a.values[chunk.values + (slot * unit + e) * a.lanes + lane]
                    for k in range(x.shape[1]):
                        y[row, k] += value * x[column + e, k]


@compiled
def multiply_pieces(
    start: int, stop: int, long: LongRows, x: ValueArray, partial: ValueArray, sums: ValueArray
) -> None:
    """Sum pieces ``[start:stop)`` of long rows of real numbers, `GROUP` entries at a time, into `partial`, (npieces,).

    `sums`: (GROUP,): scratch.
    """
    pieces, indices, data = long
    none = indices[:0]
    for piece in range(start, stop):
        begin, end = pieces[piece], pieces[piece + 1]
        slots = (end - begin) // GROUP
        entries = EntrySlots(data, np.uintp(begin), indices, np.uintp(begin), none, np.uintp(0))
        sum_entries((0,), SumsOut(sums, partial, -1), np.uintp(slots), entries, x)
        total = sums[0]
        for lane in range(1, GROUP):
            total += sums[lane]
        for at in range(begin + slots * GROUP, end):
            total += data[at] * x[indices[at]]
        partial[piece] = total


@compiled
def multiply_piece_columns(
    zero: Any, start: int, stop: int, long: LongRows, x: ValueArray, partial: ValueArray
) -> None:
    """Sum pieces ``[start:stop)`` of long rows into ``partial[piece, column]``; `zero` has the dtype of x."""
    pieces, indices, data = long
    for piece in range(start, stop):
        begin, end = pieces[piece], pieces[piece + 1]
        for k in range(x.shape[1]):
            a = b = c = d = zero
            whole = begin + (end - begin) // 4 * 4
            for at in range(begin, whole, 4):
                a += data[at] * x[indices[at], k]
                b += data[at + 1] * x[indices[at + 1], k]
                c += data[at + 2] * x[indices[at + 2], k]
                d += data[at + 3] * x[indices[at + 3], k]
            for at in range(whole, end):
                a += data[at] * x[indices[at], k]
            partial[piece, k] = (a + b) + (c + d)


def multiply(a: Sell, x: ValueArray, out: ValueArray | None, threads: int) -> ValueArray:
    """Return ``a @ x`` on the CPU, for x of shape (ncols,) or (ncols, k) in C order; small matrices take one thread."""
    y = np.zeros((a.shape[0], *x.shape[1:]), x.dtype) if out is None else out
    if x.shape[1:] == (1,):
        multiply(a, x[:, 0], y[:, 0], threads)
        return y
    threads = threads_for(a.nnz * (x.shape[1] if x.ndim == 2 else 1), threads)
    plain = x.ndim == 1 and x.dtype.kind == "f" and a.lanes % GROUP == 0 and a.block == 1 and y.flags.c_contiguous
    if plain and not a.shares_rows:

        def work(start: int, stop: int) -> None:
            sums, groups = np.empty(a.lanes, x.dtype), (0,) * (a.lanes // GROUP)
            multiply_chunks(start, stop, groups, a.arrays, x, y, sums)
    else:
        y[...] = 0

        def work(start: int, stop: int) -> None:
            multiply_columns(start, stop, a.arrays, _two(x), _two(y))

    in_parallel(work, value_places(a.chunks), threads)
    if len(a.long_rows):
        _multiply_long(a, x, y, threads)
    return y


def _multiply_long(a: Sell, x: ValueArray, y: ValueArray, threads: int) -> None:
    long, zero = LongRows(a.pieces, a.long_indices, a.long_data), x.dtype.type(0)
    partial = np.empty((len(a.pieces) - 1, *x.shape[1:]), x.dtype)
    if x.ndim == 1 and x.dtype.kind == "f":

        def work(start: int, stop: int) -> None:
            multiply_pieces(start, stop, long, x, partial, np.empty(GROUP, x.dtype))
    else:

        def work(start: int, stop: int) -> None:
            multiply_piece_columns(zero, start, stop, long, _two(x), _two(partial))

    in_parallel(work, a.pieces[1:], threads)
    y[a.long_rows] = np.add.reduceat(partial, a.row_pieces[:-1], axis=0)


def _two(x: ValueArray) -> ValueArray:
    return x[:, None] if x.ndim == 1 else x


def to_csr(a: Sell) -> CSR:
    """Return the matrix as canonical CSR; see `sell.to_csr`."""
    rows, columns = np.empty((2, len(a.values)), np.int64)
    data = np.empty(len(a.values), a.dtype)
    n = list_entries(a.arrays, rows, columns, data)
    rows = np.append(rows[:n], np.repeat(a.long_rows, np.diff(a.long_indptr)))
    columns, data = np.append(columns[:n], a.long_indices), np.append(data[:n], a.long_data)
    m = sp.coo_matrix((data, (rows, columns)), shape=a.shape).tocsr()
    m.sum_duplicates()
    return CSR(m.indptr.astype(np.int64), m.indices.astype(index_dtype(a.shape[1])), m.data, a.shape)
