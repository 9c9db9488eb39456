"""Products of a matrix in SELL-C-sigma with vectors on the CPU, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.kernels.cpu.numba_compile import compiled, inlined
from spdist.kernels.spmv.parallel import PARALLEL_ENTRIES, in_parallel
from spdist.kernels.spmv.sell.build_cpu import or_empty
from spdist.kernels.spmv.sell.chunks_cpu import (
    NARROW_PADDING,
    PADDING,
    base_room,
    entry_of,
    list_entries,
    read_chunk,
    row_at,
)
from spdist.kernels.spmv.sell.format import BLOCK_NARROW, BLOCK_WIDE, DIAGONAL, WIDE, Chunk, Sell, value_places
from spdist.kernels.spmv.sell.lane_sums import GROUP, sum_diagonals, sum_entries
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, index_dtype


@inlined
def add_slots(
    total: Any, slots: int, step: np.uintp, at: np.uintp, to: np.uintp, base_at: np.uintp, bases: IndexArray,
    padding: int, values: ValueArray, index: IndexArray, x: ValueArray,
) -> Any:  # fmt: skip
    """Return `total` with the products of a lane's slots added, up to its first padding.

    Parameters
    ----------
    total : number
    slots, step : int
        Most slots, and the elements from one to the next.
    at, to, base_at : int
        First element in `values`, in `index` and in `bases`.
    bases : (n,) int32
        Base of each slot; empty if `index` holds columns.
    padding : int
        Index of an unused slot.
    values, index, x : array
    """
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
    """Write the sums of a chunk's lanes to their rows of y.

    Parameters
    ----------
    first, count : int
        Position of the first row, and number of rows.
    rows : (npositions,) int32
        Row at each position; empty if positions are rows.
    sums : (lanes,) float
    y : (nrows,) float
    """
    for i in range(count):
        y[np.uintp(rows[np.uintp(first + i)]) if len(rows) else np.uintp(first + i)] = sums[i]


@inlined
def entry_chunk(
    groups: tuple[int, ...], chunk: Chunk, direct: int, bases: IndexArray, padding: int, rows: IndexArray,
    values: ValueArray, index: IndexArray, x: ValueArray, y: ValueArray, sums: ValueArray, bases_or_none: IndexArray,
) -> None:  # fmt: skip
    """Multiply a chunk of entries, a lane a row.

    Parameters
    ----------
    groups : tuple
        As long as the chunk has groups of `GROUP` lanes.
    chunk : Chunk
    direct : int
        First row in y if the chunk's rows are consecutive and fill all lanes, else -1.
    bases, bases_or_none : (n,) int32
        A view of `narrow`; the second is empty if `index` holds columns.
    padding : int
        Index of an unused slot.
    rows, values, x, y, sums
        As for `multiply_chunks`.
    index : (n,) int32 or uint16
        `wide` or `narrow`.
    """
    place, to, width = chunk.values, chunk.index, chunk.width
    lanes, base_at = len(groups) * GROUP, np.uintp(to // 2)
    full = chunk.full
    to += base_room(width) if len(bases_or_none) else 0
    sum_entries(groups, sums, y, direct, np.uintp(full), values, np.uintp(place), index, np.uintp(to), bases, base_at,
                len(bases_or_none) > 0, x)  # fmt: skip
    if direct < 0:
        store(chunk.first, chunk.count, rows, sums, y)
    if full < width:
        done = full * lanes
        for r in range(chunk.count):
            row = np.uintp(row_at(chunk.first + r, rows))
            y[row] = add_slots(
                y[row], width - full, np.uintp(lanes), np.uintp(place + done + r), np.uintp(to + done + r),
                base_at + np.uintp(full), bases_or_none, padding, values, index, x,
            )  # fmt: skip


@compiled
def multiply_chunks(
    start: int, stop: int, groups: tuple[int, ...], chunks: Int64Array, values: ValueArray, wide: IndexArray,
    narrow: IndexArray, bases: IndexArray, rows: IndexArray, x: ValueArray, y: ValueArray, sums: ValueArray,
) -> None:  # fmt: skip
    """Multiply chunks ``[start, stop)`` of real numbers, a lane a row and without dense blocks, with one column of x.

    Parameters
    ----------
    start, stop : int
    groups : tuple
        As long as a chunk has groups of `GROUP` lanes.
    chunks, values, wide, narrow, rows
        The fields of `Sell`; `rows` is empty if positions are rows.
    bases : (n,) int32
        A view of `narrow`.
    x, y : (ncols,), (nrows,) float
    sums : (lanes,) float
        Scratch.
    """
    for at in range(start, stop):
        chunk = read_chunk(chunks, at)
        direct = -1 if len(rows) or chunk.count < len(groups) * GROUP else chunk.first
        if chunk.kind == DIAGONAL:
            sum_diagonals(groups, sums, y, direct, np.uintp(chunk.width), values, np.uintp(chunk.values), wide,
                          np.uintp(chunk.index), np.uintp(chunk.first), x)  # fmt: skip
            if direct < 0:
                store(chunk.first, chunk.count, rows, sums, y)
        elif chunk.kind == WIDE:
            entry_chunk(groups, chunk, direct, bases, PADDING, rows, values, wide, x, y, sums, bases[:0])
        else:
            entry_chunk(groups, chunk, direct, bases, NARROW_PADDING, rows, values, narrow, x, y, sums, bases)


@compiled
def multiply_columns(
    zero: Any, start: int, stop: int, lanes: int, block: int, chunks: Int64Array, values: ValueArray, wide: IndexArray,
    narrow: IndexArray, bases: IndexArray, rows: IndexArray, x: ValueArray, y: ValueArray,
) -> None:  # fmt: skip
    """Add the products of chunks ``[start, stop)`` of any kind with all columns of x to y.

    Parameters
    ----------
    zero : number
        0 in the dtype of x.
    start, stop : int
    lanes, block, chunks, values, wide, narrow, rows
        The fields of `Sell`; `rows` is empty if positions are rows.
    bases : (n,) int32
        A view of `narrow`.
    x, y : (ncols, k), (nrows, k)
    """
    for at in range(start, stop):
        chunk = read_chunk(chunks, at)
        unit = block if chunk.kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        for lane in range(chunk.count << chunk.log_threads):
            row = row_at(chunk.first + (lane >> chunk.log_threads), rows)
            for slot in range(chunk.width):
                column = entry_of(block, lanes, lane, slot, chunk, wide, narrow, bases)
                if column < 0:
                    continue
                for e in range(unit):
                    value = values[chunk.values + (slot * unit + e) * lanes + lane]
                    for k in range(x.shape[1]):
                        y[row, k] += value * x[column + e, k]


@compiled
def multiply_pieces(
    start: int, stop: int, pieces: IndexArray, indices: IndexArray, data: ValueArray, bases: IndexArray, x: ValueArray,
    partial: ValueArray, sums: ValueArray,
) -> None:  # fmt: skip
    """Sum pieces ``[start:stop)`` of long rows of real numbers, `GROUP` entries at a time.

    Parameters
    ----------
    start, stop : int
    pieces, indices, data
        The fields `pieces`, `long_indices` and `long_data` of `Sell`.
    bases : (0,) int32
        Not read.
    x : (ncols,) float
    partial : (npieces,) float
        Takes the sum of each piece.
    sums : (GROUP,) float
        Scratch.
    """
    for piece in range(start, stop):
        begin, end = pieces[piece], pieces[piece + 1]
        slots = (end - begin) // GROUP
        sum_entries((0,), sums, partial, -1, np.uintp(slots), data, np.uintp(begin), indices, np.uintp(begin), bases,
                    np.uintp(0), False, x)  # fmt: skip
        total = sums[0]
        for lane in range(1, GROUP):
            total += sums[lane]
        for at in range(begin + slots * GROUP, end):
            total += data[at] * x[indices[at]]
        partial[piece] = total


@compiled
def multiply_piece_columns(
    zero: Any, start: int, stop: int, pieces: IndexArray, indices: IndexArray, data: ValueArray, x: ValueArray,
    partial: ValueArray,
) -> None:  # fmt: skip
    """Sum pieces ``[start:stop)`` of long rows into ``partial[piece, column]``.

    Parameters
    ----------
    zero : number
        0 in the dtype of x.
    start, stop : int
    pieces, indices, data
        The fields `pieces`, `long_indices` and `long_data` of `Sell`.
    x, partial : (ncols, k), (npieces, k)
    """
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
    """Return ``a @ x`` on the CPU.

    Parameters
    ----------
    a : Sell
    x : (ncols,) or (ncols, k)
        C order, of the dtype in which products are summed.
    out : (nrows,) or (nrows, k) or None
        Takes the result.
    threads : int
        Most threads; small matrices take one.
    """
    y = np.zeros((a.shape[0], *x.shape[1:]), x.dtype) if out is None else out
    threads = threads if a.nnz * (x.shape[1] if x.ndim == 2 else 1) >= PARALLEL_ENTRIES else 1
    zero = x.dtype.type(0)
    rows, bases = or_empty(a.rows), a.narrow.view(np.int32)
    plain = x.ndim == 1 and x.dtype.kind == "f" and a.lanes % GROUP == 0 and a.block == 1 and y.flags.c_contiguous
    if plain and not a.shares_rows:

        def work(start: int, stop: int) -> None:
            sums, groups = np.empty(a.lanes, x.dtype), (0,) * (a.lanes // GROUP)
            multiply_chunks(start, stop, groups, a.chunks, a.values, a.wide, a.narrow, bases, rows, x, y, sums)
    else:
        y[...] = 0

        def work(start: int, stop: int) -> None:
            multiply_columns(zero, start, stop, a.lanes, a.block, a.chunks, a.values, a.wide, a.narrow, bases, rows,
                             _two(x), _two(y))  # fmt: skip

    in_parallel(work, value_places(a.chunks), threads)
    if len(a.long_rows):
        _multiply_long(a, x, y, zero, threads)
    return y


def _multiply_long(a: Sell, x: ValueArray, y: ValueArray, zero: Any, threads: int) -> None:
    partial = np.empty((len(a.pieces) - 1, *x.shape[1:]), x.dtype)
    if x.ndim == 1 and x.dtype.kind == "f":

        def work(start: int, stop: int) -> None:
            multiply_pieces(start, stop, a.pieces, a.long_indices, a.long_data, a.long_indices[:0], x, partial,
                            np.empty(GROUP, x.dtype))  # fmt: skip
    else:

        def work(start: int, stop: int) -> None:
            multiply_piece_columns(zero, start, stop, a.pieces, a.long_indices, a.long_data, _two(x), _two(partial))

    in_parallel(work, a.pieces[1:], threads)
    y[a.long_rows] = np.add.reduceat(partial, a.row_pieces[:-1], axis=0)


def _two(x: ValueArray) -> ValueArray:
    return x[:, None] if x.ndim == 1 else x


def to_csr(a: Sell) -> CSR:
    """Return the matrix as canonical CSR; see `sell.to_csr`."""
    rows, columns = np.empty((2, len(a.values)), np.int64)
    data = np.empty(len(a.values), a.dtype)
    n = list_entries(a.lanes, a.block, a.chunks, a.values, a.wide, a.narrow, a.narrow.view(np.int32),
                     or_empty(a.rows), rows, columns, data)  # fmt: skip
    rows = np.append(rows[:n], np.repeat(a.long_rows, np.diff(a.long_indptr)))
    columns, data = np.append(columns[:n], a.long_indices), np.append(data[:n], a.long_data)
    m = sp.coo_matrix((data, (rows, columns)), shape=a.shape).tocsr()
    m.sum_duplicates()
    return CSR(m.indptr.astype(np.int64), m.indices.astype(index_dtype(a.shape[1])), m.data, a.shape)
