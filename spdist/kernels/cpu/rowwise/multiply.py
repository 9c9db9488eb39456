"""Row-by-row multiply on the CPU, compiled by Numba (`numba_engine` calls it).

Each row of C is made on its own, by the first of these methods that suits it:

copy
    One row of B takes part: scale it.
rank sort
    At most `RANK_PRODUCTS` products, far apart: expand them, place each by counting the smaller keys 16 at a time,
    sum equal columns. No branch depends on the data.
window
    Products fit in a span of `WINDOW` columns: a dense accumulator over the span (Gustavson [1]_), a byte for each
    column that was hit and a byte for each 64 columns. Reading the bytes back, 64 at a time, gives the columns in order
    without a sort, and clears them for the next row. The marks are bytes, not bits: a bit needs a read before its
    write, and with runs of neighbouring columns every read would wait for the write before it.
radix sort
    Up to `SORT_PRODUCTS` products in a wider span: expand, stable radix sort of the columns, sum equal columns.
strips
    All other rows: cut the row into strips of columns narrow enough for one of the two methods above.

Every method adds the products of an entry in the order of k, to a zero, one rounding each: the same bits as SciPy.
Row k of B is its entries ``[starts[k], stops[k])``. If only the upper triangle of C is wanted, starts move on from row
to row, to the first column that is not left of the diagonal: entries before it are never read again. A semiring
replaces plus and times by its own operators, which are compiled in. The methods also take a mask whose columns C is
kept out of (`fused`). Columns are unsigned numbers, for which Numba omits its test for negative indices.

References
----------
.. [1] F. Gustavson, "Two Fast Algorithms for Sparse Matrices: Multiplication and Permuted Transposition", ACM TOMS
   4(3), 1978.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import (
    CsrArrays,
    ForbiddenMask,
    ProductArguments,
    RowExtent,
    RowRanges,
    RowsOut,
    Workspace,
)
from spdist.kernels.cpu.masks import first_at_least, is_forbidden
from spdist.kernels.cpu.numba_compile import add_product, inlined, part, zero_of
from spdist.kernels.cpu.rowwise.instructions import prefetch
from spdist.kernels.cpu.rowwise.sorting import (
    RANK_SPAN,
    SORT_SPAN,
    compress,
    expand_small,
    expand_strip,
    flush_batch,
    radix_sort,
)
from spdist.kernels.cpu.rowwise.window import accumulate, accumulate_strip, gather
from spdist.kernels.cpu.workspace import BATCH_ROWS, BATCH_SLOTS, RANK_PRODUCTS, SORT_PRODUCTS, WINDOW

TINY_ROW = 16
"""Products up to which a row is always sorted in a batch."""
SPARSE_SMALL = 1024
"""Columns per product from which a row of up to `RANK_PRODUCTS` is sorted in a batch."""
MOST_PREFETCHES = np.uintp(32)
"""Entries of a row of A for which B is prefetched."""
LARGEST = (1 << 63) - 1
"""Of int64; code that asks NumPy for it inside a kernel is loaded with all of Numba's linear algebra."""


@inlined
def row_extent(a: CsrArrays, b: RowRanges, row: int) -> Any:
    """Return products, columns and parts of a row, without making it."""
    products, first, last, parts = np.int64(0), np.int64(LARGEST), np.int64(-1), 0
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k = np.uintp(a.indices[p])
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        if start < stop:
            products += np.int64(stop - start)
            first = min(first, np.int64(b.indices[start]))
            last = max(last, np.int64(b.indices[stop - np.uintp(1)]))
            parts += 1
    return RowExtent(row, products, first, last, parts)


@part
def enter_rows(a: CsrArrays, b: RowRanges, row: int, diagonal: int | None) -> None:
    """Move the starts of the rows of B that a row of A uses to their first column from the diagonal on.

    Rows of A come in rising order. In A @ A.T each entry of a row moves a start by one. `diagonal`: column of the
    diagonal in row 0. If None, the compiled code is empty.
    """
    if diagonal is not None:
        first = np.uintp(diagonal) + row
        for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
            k = np.uintp(a.indices[p])
            start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
            if start < stop and np.uintp(b.indices[start]) < first:
                start += np.uintp(1)
                if start < stop and np.uintp(b.indices[start]) < first:
                    start = first_at_least(b.indices, start + np.uintp(1), stop, first)
                b.starts[k] = start


@inlined
def prefetch_rows(a: CsrArrays, b: RowRanges, row: int, stop: np.uintp) -> None:
    """Prefetch the entries of B for row + 2 and the starts for row + 4: small random rows mostly wait for memory."""
    far = min(row + np.uintp(4), stop - np.uintp(1))
    begin, end = np.uintp(a.indptr[far]), np.uintp(a.indptr[far + np.uintp(1)])
    for p in range(begin, min(end, begin + MOST_PREFETCHES)):
        prefetch(b.starts, np.uintp(a.indices[p]))
    near = min(row + np.uintp(2), stop - np.uintp(1))
    begin, end = np.uintp(a.indptr[near]), np.uintp(a.indptr[near + np.uintp(1)])
    for p in range(begin, min(end, begin + MOST_PREFETCHES)):
        start = np.uintp(b.starts[np.uintp(a.indices[p])])
        prefetch(b.indices, start)
        prefetch(b.data, start)


@inlined
def copy_row(product: ProductArguments, row: int, c: RowsOut, at: np.uintp, forbidden: ForbiddenMask | None) -> Any:
    """Write a row of C that has products with only one row of B, from place `at` on; return the next place."""
    a, b, ring = product.a, product.b, product.ring
    zero = zero_of(c.data, ring)
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        if forbidden is not None:
            for q in range(start, stop):
                if not is_forbidden(forbidden, b.indices[q]):
                    place = min(at, c.capacity)
                    c.indices[place] = b.indices[q]
                    c.data[place] = add_product(zero, value, b.data[q], ring)
                    at += np.uintp(1)
            continue
        if at + (stop - start) <= c.capacity:
            for q in range(start, stop):
                c.indices[at + (q - start)] = b.indices[q]
                c.data[at + (q - start)] = add_product(zero, value, b.data[q], ring)
        at += stop - start
    return at


@part
def multiply_strips(
    product: ProductArguments, extent: RowExtent, work: Workspace, c: RowsOut, at: np.uintp,
    forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Make a row strip by strip, each as wide as `SORT_PRODUCTS` products or `WINDOW` columns allow."""
    (window, sorting, _), row, ring = work, extent.row, product.ring
    first, last = np.uintp(extent.first), np.uintp(extent.last)
    width = np.uintp(min(np.float64(SORT_SPAN), (last - first) / extent.products * (SORT_PRODUCTS / 2)))
    end = first
    while end <= last:
        width = max(width, np.uintp(WINDOW))
        start, end = end, min(last + np.uintp(1), end + width)
        if width == np.uintp(WINDOW):
            accumulate_strip(product, row, start, end, window, forbidden)
            at = gather(window, start, end - start, c, at, ring)
            continue
        n = expand_strip(product, row, start, end, sorting, forbidden)
        if n > np.uintp(SORT_PRODUCTS):
            end = start
            width >>= np.uintp(1)
            continue
        side = radix_sort(sorting, n, end - start)
        at = compress(sorting, side, n, start, c, at, ring)
        if n < np.uintp(SORT_PRODUCTS // 4):
            width = min(width << np.uintp(1), np.uintp(SORT_SPAN))
    return at


@inlined
def multiply_row(
    product: ProductArguments, extent: RowExtent, work: Workspace, c: RowsOut, at: np.uintp,
    forbidden: ForbiddenMask | None, wide: bool | None,
) -> Any:  # fmt: skip
    """Make one row, without the columns in `forbidden`, by the method that suits it; return the next place in C.

    `wide`: the field of `product`, as an argument: None leaves code out.
    """
    row, products, low, high, parts = extent
    if parts == 1:
        return copy_row(product, row, c, at, forbidden)
    first, n, span = np.uintp(low), np.uintp(products), np.uintp(high - low + 1)
    if wide is None or span <= np.uintp(WINDOW):
        accumulate(product, row, first, work.window, forbidden)
        return gather(work.window, first, span, c, at, product.ring)
    if n <= np.uintp(SORT_PRODUCTS) and span < np.uintp(SORT_SPAN):
        n = expand_strip(product, row, first, first + span, work.sorting, forbidden)
        side = radix_sort(work.sorting, n, span)
        return compress(work.sorting, side, n, first, c, at, product.ring)
    return multiply_strips(product, extent, work, c, at, forbidden)


@inlined
def is_small(extent: RowExtent) -> Any:
    """Whether a row is better sorted in a batch of small rows."""
    _, products, first, last, _ = extent
    if products > RANK_PRODUCTS or last - first >= RANK_SPAN:
        return False
    return products <= TINY_ROW or last - first > SPARSE_SMALL * products


@part
def multiply_rows(
    product: ProductArguments, start: int, stop: int, work: Workspace, c: RowsOut, diagonal: int | None
) -> Any:
    """Make rows ``[start, stop)`` of C until C is full; ends of `c` are numbered from row `start`.

    All totals of `work` are the semiring's zero, before and after. `diagonal`: the first wanted column of row 0, one
    more for each row after it; None for whole rows.
    Returns the number of whole rows made, and the entries of these and, if C is full, of the first row that did not
    fit.
    """
    at, last = np.uintp(0), np.uintp(stop)
    origin = np.uintp(start)
    count, slot = np.uintp(0), np.uintp(0)
    a, b, ring = product.a, product.b, product.ring
    for row in range(origin, last):
        if product.prefetches:
            prefetch_rows(a, b, row, last)
        enter_rows(a, b, row, diagonal)
        extent = row_extent(a, b, row)
        small = is_small(extent)
        if count > np.uintp(0) and (not small or count == np.uintp(BATCH_ROWS) or slot > np.uintp(BATCH_SLOTS)):
            at, fit = flush_batch(work.batch, count, c, row - count - origin, at, ring)
            if fit < count:
                return np.int64(row - count - origin + fit), np.int64(at)
            count, slot = np.uintp(0), np.uintp(0)
        if small:
            slot = expand_small(product, extent, work.batch, count, slot, None)
            count += np.uintp(1)
            continue
        at = multiply_row(product, extent, work, c, at, None, product.wide)
        if at > c.capacity:
            return np.int64(row - origin), np.int64(at)
        c.ends[row - origin] = at
    if count > np.uintp(0):
        at, fit = flush_batch(work.batch, count, c, last - count - origin, at, ring)
        return np.int64(last - count - origin + fit), np.int64(at)
    return stop - start, np.int64(at)
