"""Row-by-row multiply on the CPU whose rows come in any order of columns (`numba_engine` calls it).

An entry has its place in C as soon as its first product is met, so that nothing is sorted. Each row is made by the
first of these methods that suits it:

copy
    One row of B takes part: scale it.
hash table
    Products are few and far apart: write them to C, then add products of equal columns, which a hash table finds. The
    table lies in the fastest cache, and is not cleared for each row.
window
    Products fit in a span of `WINDOW` columns: a dense accumulator over the span (Gustavson [1]_). C's columns, in the
    order in which they are met, say where the totals are, and what to clear.
strips
    All other rows are sorted, as `multiply_strips` describes: their products cost more than the sort.

Entries come in the order in which their columns are met, or sorted if made in strips. Products of an entry are added in
the order of k. Neither depends on the number of threads. Hash table and window give the same row; the compression ratio
of the row before says which is quicker.

References
----------
.. [1] F. Gustavson, "Two Fast Algorithms for Sparse Matrices: Multiplication and Permuted Transposition", ACM TOMS
   4(3), 1978.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import ProductArguments, RowExtent, RowsOut, Window, Words, Workspace
from spdist.kernels.cpu.masks import first_slot
from spdist.kernels.cpu.numba_compile import add_product, fold, inlined, part, tight, zero_of
from spdist.kernels.cpu.rowwise.multiply import copy_row, enter_rows, multiply_strips, prefetch_rows, row_extent
from spdist.kernels.cpu.workspace import BATCH_SLOTS, SORT_PRODUCTS, WINDOW
from spdist.kernels.semirings import Semiring

SLOTS = 8
"""Slots of a hash table for each product, while there is room: most searches end at the first slot."""
LEAST_SLOTS = 2
"""Least slots of a hash table for each product."""
SPARSE = 64
"""Columns per product from which a hash table is quicker than a window."""
FEW_REPEATS = 1.125
"""Compression ratio up to which a hash table is quicker than a window. If columns are met again, the window has them in
the cache."""
MANY_REPEATS = 4.0
"""Compression ratio from which the processor foresees well enough whether columns are new."""


@part
def multiply_unsorted_rows(
    product: ProductArguments, start: int, stop: int, work: Workspace, c: RowsOut, diagonal: int | None
) -> Any:
    """Make rows ``[start, stop)`` of C, their entries in any order, until a row might not fit.

    Returns the number of whole rows made, and their entries with, if C may be full, a bound on the entries of the next
    row.
    """
    at, origin, last, compression = np.uintp(0), np.uintp(start), np.uintp(stop), 1.0
    clear(work.batch.ordered)
    for row in range(origin, last):
        if product.prefetches:
            prefetch_rows(product.a, product.b, row, last)
        enter_rows(product.a, product.b, row, diagonal)
        extent = row_extent(product.a, product.b, row)
        if extent.products > 0:
            most = np.uintp(min(extent.products, extent.last - extent.first + 1))
            if at + most > c.capacity:
                return np.int64(row - origin), np.int64(at + most)
            begin = at
            at = multiply_unsorted_row(product, extent, work, c, at, product.wide, compression)
            compression = np.float64(extent.products) / np.float64(at - begin)
        c.ends[row - origin] = at
    return stop - start, np.int64(at)


@inlined
def multiply_unsorted_row(
    product: ProductArguments, extent: RowExtent, work: Workspace, c: RowsOut, at: np.uintp, wide: bool | None,
    compression: float,
) -> Any:  # fmt: skip
    """Make one row, of one product at least, by the method that suits it; return the next place in C.

    There is room for the products of the row, or for all columns of its span. `wide`: the field of `product`, as an
    argument: None leaves code out. `compression`: compression ratio of the row before.
    """
    row, products, low, high, parts = extent
    if parts == 1:
        return copy_row(product, row, c, at, None)
    first, n, span = np.uintp(low), np.uintp(products), np.uintp(high - low + 1)
    slots = np.uintp(LEAST_SLOTS) * n
    is_narrow = wide is None or span <= np.uintp(WINDOW)
    is_sparse = compression <= FEW_REPEATS and span > np.uintp(SPARSE) * n
    if slots <= np.uintp(BATCH_SLOTS) and (is_sparse or not is_narrow):
        return hash_row(product, row, work.batch.ordered, c, at)
    if is_narrow:
        if compression > MANY_REPEATS:
            end = accumulate_repeats(product, row, first, work.window, c, at)
        else:
            end = accumulate_all(product, row, first, work.window, c, at)
        return take_totals(work.window, first, c, at, end, product.ring)
    if slots <= np.uintp(SORT_PRODUCTS):
        clear(work.sorting.keys[0][: 1 << table_bits(n, SORT_PRODUCTS)])
        return hash_row(product, row, work.sorting.keys[0], c, at)
    return multiply_strips(product, extent, work, c, at, None)


@inlined
def clear(table: Words) -> None:
    """Empty a hash table."""
    for slot in range(np.uintp(len(table))):
        table[slot] = 0


@inlined
def table_bits(entries: np.uintp, most: int) -> Any:
    """Return how many bits number the slots that a hash table uses: `SLOTS` for each entry, at most `most` in all."""
    bits = np.uint64(5)
    while (np.uint64(1) << bits) < np.uint64(SLOTS) * np.uint64(entries) and (np.uint64(2) << bits) <= np.uint64(most):
        bits += np.uint64(1)
    return bits


@inlined
def hash_row(product: ProductArguments, row: int, table: Words, c: RowsOut, at: np.uintp) -> Any:
    """Make one row by a hash table; return the next place in C, which has room for all products.

    All products are written first, without a branch on their columns: the processor fetches rows of B meanwhile.
    """
    a, b, ring = product.a, product.b, product.ring
    end, zero = at, zero_of(c.data, ring)
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        for q in range(start, stop):
            c.indices[end + (q - start)] = b.indices[q]
            c.data[end + (q - start)] = add_product(zero, value, b.data[q], ring)
        end += stop - start
    return merge_columns(c, at, end, table, ring)


@tight
def merge_columns(c: RowsOut, at: np.uintp, end: np.uintp, table: Words, ring: Semiring | None) -> Any:
    """Add entries ``[at, end)`` of C to the first of their column, and close the gaps; return the end of what is left.

    A slot of the table holds the place of a column in C, counted from 1. It is empty if this place lies before the row:
    what earlier rows left needs no clearing. Whether a column is new decides no branch, which the processor could not
    foresee.
    Pre: the table has at least `LEAST_SLOTS` for each entry, and slots that are used are empty.
    """
    bits = table_bits(end - at, len(table))
    shift, last = np.uint64(64) - bits, (np.uintp(1) << bits) - np.uintp(1)
    left, zero = at, zero_of(c.data, ring)
    for place in range(at, end):
        column, value = c.indices[place], c.data[place]
        slot = first_slot(np.uintp(column), shift)
        while (table[slot] > at) & (c.indices[max(table[slot], at + np.uintp(1)) - np.uintp(1)] != column):
            slot = (slot + np.uintp(1)) & last
        is_new, found = table[slot] <= at, table[slot] - np.uintp(1)
        to = left if is_new else found
        total = c.data[to]
        c.data[to] = fold(zero if is_new else total, value, ring)
        c.indices[to] = column
        table[slot] = to + np.uintp(1)
        left += np.uintp(is_new)
    return left


@inlined
def accumulate_all(
    product: ProductArguments, row: int, first: np.uintp, window: Window, c: RowsOut, at: np.uintp
) -> Any:
    """Add a row's products to the window, and write their columns to C as they are met; return the columns' end.

    Each product writes its column: whether it is new decides no branch, which could not be foreseen.
    """
    a, b, (totals, hits, _) = product.a, product.b, window
    end = at
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        for q in range(np.uintp(b.starts[k]), np.uintp(b.stops[k])):
            j = np.uintp(b.indices[q]) - first
            c.indices[end] = b.indices[q]
            end += np.uintp(hits[j] == 0)
            hits[j] = 1
            totals[j] = add_product(totals[j], value, b.data[q], product.ring)
    return end


@inlined
def accumulate_repeats(
    product: ProductArguments, row: int, first: np.uintp, window: Window, c: RowsOut, at: np.uintp
) -> Any:
    """Do as `accumulate_all`, with a branch: columns that are met again, as most are, write nothing but their total."""
    a, b, (totals, hits, _) = product.a, product.b, window
    end = at
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        for q in range(np.uintp(b.starts[k]), np.uintp(b.stops[k])):
            j = np.uintp(b.indices[q]) - first
            if hits[j] == 0:
                c.indices[end] = b.indices[q]
                end += np.uintp(1)
                hits[j] = 1
            totals[j] = add_product(totals[j], value, b.data[q], product.ring)
    return end


@inlined
def take_totals(window: Window, first: np.uintp, c: RowsOut, at: np.uintp, end: np.uintp, ring: Semiring | None) -> Any:
    """Move the totals of a row's columns, which are in C, to C, and clear the window; return the end of the row."""
    totals, hits, _ = window
    zero = zero_of(totals, ring)
    for place in range(at, end):
        j = np.uintp(c.indices[place]) - first
        c.data[place] = totals[j]
        totals[j] = zero
        hits[j] = 0
    return end
