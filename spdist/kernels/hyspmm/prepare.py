"""The CPU stage of hySpMM, compiled by Numba: imported when it is first needed.

A prepared block holds rows of A and the rows of B that their entries refer to: one for each entry, in the order of the
entries (duplicated), or each row once (distinct). Threads prepare one block after the other without the interpreter's
lock. They write blocks to a ring of memory in the order of block numbers; the caller frees the memory in that order.

References
----------
X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015, algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from spdist.kernels.cpu.arrays import CsrArrays, Integer
from spdist.kernels.cpu.numba_compile import compiled, inlined
from spdist.kernels.hyspmm import workspace
from spdist.kernels.hyspmm.ring import (
    CLOSED,
    TAKEN,
    Ring,
    SharedState,
    atomic_add,
    atomic_load,
    atomic_store,
    reserve_room,
)
from spdist.kernels.hyspmm.rows_of_b import (
    Bits,
    MarkedRows,
    Places,
    RowCopies,
    mark_rows,
    number_rows,
    send_distinct,
    send_duplicated,
)
from spdist.kernels.hyspmm.workspace import BlockSizes, ItemBytes
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

Counted: TypeAlias = tuple[Int64Array, ...]
"""The three arrays of `plan.CountedProducts`."""

PLACE, B_ROWS, B_ENTRIES, LENGTHS = range(4)
"""Words of a block's report: its place in the ring, rows and entries of its B, then the rows of each group."""
TABLE = 1026
"""Length of the table from products to groups; rows of more products are in the last group."""
RISE = 6
"""Each block may be larger than the one before by 1 / `RISE`, up to the budget: all threads start at the same time, and
preparing a block takes a thread several times as long as multiplying it takes the GPU."""

sent_offsets = compiled(workspace.sent_offsets)


class BlockCuts(NamedTuple):
    """How A is cut into blocks, and how blocks are sent."""

    counted: Counted
    cuts: Int64Array  # (blocks + 1,): first row of each block, and the number of rows
    distinct: bool  # whether each row of B is sent once
    types: ItemBytes
    table: npt.NDArray[np.uint8]  # (TABLE,): group of each number of products


class BlockOfA(NamedTuple):
    """The arrays to which a block of A is written; each starts at the block's first element."""

    values: ValueArray
    entries: IndexArray  # first entry of each row
    products: IndexArray  # first product of each row
    lengths: Int64Array  # number of rows of each group, to be increased


@compiled
def count_products(
    a: tuple[IndexArray, IndexArray],
    b_indptr: IndexArray,
    start: Integer,
    stop: Integer,
    entry_bytes: Integer,
    product_bytes: Integer,
    ends: Int64Array,
) -> Any:
    """Count the products of rows [start, stop) of A, given by offsets and columns, summed up in ``ends[row + 1]``.

    `entry_bytes, product_bytes`: device bytes that an entry of A and a product take.
    Returns the sum of the products, most bytes that a row takes, and that row; or -1, 0 and a row whose offsets or
    columns are out of range.
    """
    total, most, widest = np.int64(0), np.int64(-1), np.int64(start)
    nrows_b, nnz_a = np.uintp(len(b_indptr) - 1), np.uintp(len(a[1]))
    for row in range(np.uintp(start), np.uintp(stop)):
        first, last = np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])
        if last < first or last > nnz_a:
            return np.int64(-1), np.int64(0), np.int64(row)
        products = np.int64(0)
        for at in range(first, last):
            k = np.uintp(np.int64(a[1][at]))
            if k >= nrows_b or b_indptr[k + np.uintp(1)] < b_indptr[k]:
                return np.int64(-1), np.int64(0), np.int64(row)
            products += b_indptr[k + np.uintp(1)] - b_indptr[k]
        total += products
        ends[row + np.uintp(1)] = total
        taken = np.int64(last - first) * entry_bytes + products * product_bytes
        if taken > most:
            most, widest = taken, np.int64(row)
    return total, most, widest


@inlined
def products_before(counted: Counted, row: Integer) -> Any:
    """Return the products of all rows before a row, from counts by parts."""
    ends, starts, bases = counted
    if row == 0:
        return np.int64(0)
    part = 0
    while starts[part + 1] < row:
        part += 1
    return ends[row] + bases[part]


@compiled
def cut(
    counted: Counted,
    a_indptr: IndexArray,
    budget: Integer,
    first_budget: Integer,
    most: Integer,
    costs: tuple[int, int, int],
    cuts: Int64Array,
) -> Any:
    """Cut the rows into blocks within bounds on bytes, entries and products, of one row at least; return their number.

    `budget, first_budget`: most bytes of a block and of the first block; in between, each block may take a little more
    than the last one. `most`: most products, and most entries, of a block. `costs`: bytes of a row, an entry and a
    product. `cuts`: receives the first row of each block, then the number of rows.
    """
    nrows = np.int64(len(a_indptr) - 1)
    start, number = np.int64(0), np.int64(0)
    cuts[0] = 0
    allowed = first_budget
    while start < nrows:
        before = products_before(counted, start)
        low, high = start + 1, nrows
        while low < high:
            middle = (low + high + 1) // 2
            products, entries = products_before(counted, middle) - before, a_indptr[middle] - a_indptr[start]
            taken = (middle - start) * costs[0] + entries * costs[1] + products * costs[2]
            if taken <= allowed and products <= most and entries <= most:
                low = middle
            else:
                high = middle - 1
        start = low
        number += 1
        cuts[number] = start
        allowed = min(allowed + allowed // RISE, budget)
    return number


@compiled
def send_rows(
    a: CsrArrays, counted: Counted, table: npt.NDArray[np.uint8], start: Integer, stop: Integer, out: BlockOfA
) -> None:
    """Copy the values of rows [start, stop) of A, and write the first entry and the first product of each row.

    `table`: (TABLE,): group of each number of products.
    """
    first, part = a.indptr[start], 0
    ends, starts, bases = counted
    base = products_before(counted, start)
    before = np.int64(0)
    out.entries[0] = 0
    out.products[0] = 0
    for row in range(np.uintp(start), np.uintp(stop)):
        at: Any = np.uintp(1) + row - np.uintp(start)
        while starts[part + 1] < np.int64(row) + 1:
            part += 1
        products = ends[row + np.uintp(1)] + bases[part] - base
        out.entries[at] = a.indptr[row + np.uintp(1)] - first
        out.products[at] = products
        out.lengths[table[np.uintp(min(products - before, np.int64(TABLE - 1)))]] += 1
        before = products
    for at in range(np.uintp(a.indptr[stop] - first)):
        out.values[at] = a.data[np.uintp(first) + at]


@inlined
def copies_at(ring: Ring, at: Integer, offsets: tuple[int, ...], types: ItemBytes) -> RowCopies:
    """Return where in the ring the rows of B of a block that starts at byte `at` go; `offsets` from `sent_offsets`."""
    starts, columns = ring.pointers[(at + offsets[3]) // types.pointer_bytes :], (at + offsets[2]) // types.index_bytes
    return RowCopies(starts, ring.columns[columns:], ring.values[(at + offsets[1]) // types.value_bytes :], 1)


@inlined
def block_at(ring: Ring, at: Integer, offsets: tuple[int, ...], types: ItemBytes, lengths: Int64Array) -> BlockOfA:
    """Return where in the ring a block's rows of A go; the rows of each group are added to `lengths`."""
    entries, products = (at + offsets[4]) // types.pointer_bytes, (at + offsets[5]) // types.pointer_bytes
    values = ring.values[at // types.value_bytes :]
    return BlockOfA(values, ring.pointers[entries:], ring.pointers[products:], lengths)


@compiled
def prepare_blocks(
    a: CsrArrays, b: CsrArrays, cuts: BlockCuts, shared: SharedState, ring: Ring, bits: Bits, places: Places
) -> None:
    """Prepare blocks until none is left; several threads call this at once.

    `bits, places`: scratch memory of this thread; `bits` are zero.
    """
    state, types = shared.words, cuts.types
    while not atomic_load(state, CLOSED):
        number = atomic_add(state, TAKEN, 1)
        if number >= len(cuts.cuts) - 1:
            return
        start, stop = cuts.cuts[number], cuts.cuts[number + 1]
        first, last = a.indptr[start], a.indptr[stop]
        products = products_before(cuts.counted, stop) - products_before(cuts.counted, start)
        rows, entries = last - first, products
        low, high = np.int64(0), np.int64(0)
        if cuts.distinct:
            low, high = mark_rows(a.indices, first, last, len(b.indptr) - 1, bits)
            rows, entries = number_rows(bits, places, low, high, b.indptr)
        offsets = sent_offsets(BlockSizes(stop - start, last - first, products, rows, entries, cuts.distinct), types)
        begin = reserve_room(state, number, offsets[7], ring.room)
        if begin < 0:
            return
        at = begin % ring.room
        out = copies_at(ring, at, offsets, types)
        if cuts.distinct:
            numbers = ring.numbers[(at + offsets[6]) // 4 :]
            send_distinct(a.indices[first:last], b, MarkedRows(bits, places, low, high), numbers, out)
        else:
            send_duplicated(a.indices[first:last], b, out)
        block = block_at(ring, at, offsets, types, shared.reports[number, LENGTHS:])
        send_rows(a, cuts.counted, cuts.table, start, stop, block)
        shared.reports[number, PLACE] = begin
        shared.reports[number, B_ROWS] = rows
        shared.reports[number, B_ENTRIES] = entries
        atomic_store(shared.ready, number, 1)


@compiled
def shift(local: IndexArray, start: Integer, stop: Integer, place: Integer, indptr: IndexArray) -> None:
    """Turn the ends of rows [start, stop) inside their block, whose offset in C is `place`, into offsets of C."""
    for row in range(np.uintp(start), np.uintp(stop)):
        indptr[row + np.uintp(1)] = place + local[row]
