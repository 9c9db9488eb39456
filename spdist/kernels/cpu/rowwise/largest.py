"""The largest values of rows of C, made without most of the others (CPU, Numba).

A row of many products is added up without marks for the columns that were hit: the other columns hold the semiring's
zero, and the scan for values above a bar passes over them. The bar is at the zero or just below the threshold; once the
n largest values so far are known, it is the smallest of these. If the threshold is not above the zero and fewer than n
values are, the row is made again with marks. The row is made tile by tile, so that the totals stay in the L2 cache.

Under a threshold most products can be left out. A part of a row is the products of one entry of A; it adds at most its
value times the peak of its row of B. Parts that together stay far below the threshold are left out at first, long ones
before short ones: a column that the others bring close enough is a candidate, and candidates are summed up again from
all parts, in the order of A's entries. A candidate is searched in each part, which pays if parts are long and few: rows
of many short parts are made whole. Bounds of partial sums skip lists in the same way in the search of all similar
pairs: R. Bayardo, Y. Ma, R. Srikant, "Scaling Up All Pairs Similarity Search", WWW 2007.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import (
    ForbiddenMask,
    ProductArguments,
    RowExtent,
    RowRanges,
    RowsOut,
    Selection,
    Window,
    Words,
)
from spdist.kernels.cpu.numba_compile import add_product, compiled, inlined, part, tight, zero_of
from spdist.kernels.cpu.workspace import WINDOW
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

DENSE_SPAN = 8
"""Columns per product up to which scanning all columns of a row is quicker than marking those that were hit."""
TILE = np.uintp(1 << 15)
"""Columns of a tile: its totals take 256 KiB, half of a small L2 cache."""
RUN = np.uintp(8)
"""Successive entries of a row of B: if the last is in the tile, all are."""
MOST_PLACES = 1 << 12
"""Entries of A's row up to which tiles are made: a place in a row of B is kept for each."""
STRIDE = np.uintp(32)
"""Columns that the scan tests together; at most `workspace.PADDING`."""
MOST_ORDERED = 1 << 8
"""Entries of A's row up to which parts of it are left out at first."""
LEFT_OUT = 0.65
"""Share of the threshold that the parts left out may add together."""
GAIN = 2
"""Products of a row to one that is added in spite of parts left out, and to one added while columns are searched."""
SEARCH = 32
"""Products that are added while one column is searched in a row of B."""
FEW = 4
"""Candidates of a row that pays, at least."""


@tight
def sift_down(heap: ValueArray, root: np.uintp, n: np.uintp, value: Any) -> None:
    """Put `value` at `root` or below it, so that the first `n` values are a heap again, smallest first."""
    child = np.uintp(2) * root + np.uintp(1)
    while child < n:
        if child + np.uintp(1) < n and heap[child + np.uintp(1)] < heap[child]:
            child += np.uintp(1)
        if value <= heap[child]:
            break
        heap[root] = heap[child]
        root, child = child, np.uintp(2) * child + np.uintp(1)
    heap[root] = value


@compiled
def find_peaks(indptr: Int64Array, data: ValueArray, peaks: ValueArray) -> None:
    """Write the largest magnitude of each row, 0 without entries; NaN if a row has one."""
    for row in range(len(peaks)):
        peak = peaks.dtype.type(0)
        for p in range(np.uintp(indptr[row]), np.uintp(indptr[row + 1])):
            size = abs(data[p])
            if size > peak or size != size:
                peak = size
        peaks[row] = peak


@part
def make_largest(
    product: ProductArguments, extent: RowExtent, forbidden: ForbiddenMask | None, selection: Selection,
    peaks: ValueArray | None, window: Window, c: RowsOut,
) -> Any:  # fmt: skip
    """Make a row from place 0 on, without most values that are not kept; return whether it was made, and its entries.

    `peaks`: the field of `selection`, as an argument: None leaves code out.
    """
    span = extent.last - extent.first + 1
    if peaks is not None and span <= WINDOW:
        done, n = make_candidates(product, extent, selection, peaks, window, c)
        if done:
            return True, n
    fits = extent.parts <= len(selection.places) or span <= WINDOW
    if not selection.has_bar or not fits or span > DENSE_SPAN * extent.products:
        return False, np.uintp(0)
    n = make_dense(product, extent, forbidden, selection, window.totals, c)
    return n >= selection.top or selection.skips_below, n


@part
def make_candidates(
    product: ProductArguments, extent: RowExtent, selection: Selection, peaks: ValueArray, window: Window, c: RowsOut
) -> Any:  # fmt: skip
    """Make a row whose columns fit the window from its candidates; return whether that pays, and the entries.

    Pre: values are added by plus and times; all totals and marks are 0, before and after.
    """
    a, b, row, first, order = product.a, product.b, extent.row, np.uintp(extent.first), selection.places
    begin, end = np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])
    parts, least = end - begin, np.float64(selection.least)
    if parts > MOST_ORDERED:
        return False, np.uintp(0)
    most_searched = np.uintp(extent.products) // np.uintp(GAIN)
    if searched(b, a.indices, begin, end, np.uintp(FEW)) > most_searched:
        return False, np.uintp(0)
    whole = order_parts(product, begin, end, peaks, order, selection.costs)
    slack = np.float64(8 * parts + 16) * selection.epsilon * whole  # of all roundings of a sum
    if whole + slack < least:
        return True, np.uintp(0)
    left_out, products, head = 0.0, np.uintp(extent.products), np.uintp(0)
    while head < parts:
        k = np.uintp(a.indices[order[head]])
        bound = left_out + abs(np.float64(a.data[order[head]])) * np.float64(peaks[k])
        if not bound <= LEFT_OUT * least:
            break
        left_out, products, head = bound, products - np.uintp(b.stops[k] - b.starts[k]), head + np.uintp(1)
    if np.uintp(GAIN) * products > np.uintp(extent.products):
        return False, np.uintp(0)
    hit = np.uintp(0)
    for i in range(head, parts):
        k, value = np.uintp(a.indices[order[i]]), a.data[order[i]]
        for q in range(np.uintp(b.starts[k]), np.uintp(b.stops[k])):
            j = np.uintp(b.indices[q]) - first
            if window.hits[j] == np.uint8(0):
                window.hits[j] = np.uint8(1)
                c.indices[hit] = j
                hit += np.uintp(1)
            window.totals[j] += value * b.data[q]
    found, zero = np.uintp(0), window.totals.dtype.type(0)
    for t in range(hit):
        j = np.uintp(c.indices[t])
        if not np.float64(window.totals[j]) + left_out + slack < least:
            c.indices[found] = j
            found += np.uintp(1)
        else:
            window.totals[j] = zero
        window.hits[j] = np.uint8(0)
    pays = searched(b, a.indices, begin, end, found) <= most_searched
    near = np.uintp(0)
    for t in range(found):
        j = np.uintp(c.indices[t])
        most = np.float64(window.totals[j]) + left_out + slack
        window.totals[j] = zero
        if pays and may_reach(product, order, head, peaks, j + first, most, least):
            c.indices[near] = j + first
            near += np.uintp(1)
    if not pays:
        return False, np.uintp(0)
    sort_columns(c.indices, near)
    n = np.uintp(0)
    for t in range(near):
        total = sum_column(product, begin, end, np.uintp(c.indices[t]), window.totals)
        if total >= selection.least:
            c.indices[n] = c.indices[t]
            c.data[n] = total
            n += np.uintp(1)
    return True, n


@inlined
def searched(b: RowRanges, parts: IndexArray, begin: np.uintp, end: np.uintp, candidates: np.uintp) -> Any:
    """Return the products that are added while candidates are searched in a row's parts: all of a part at most."""
    found = np.uintp(0)
    for p in range(begin, end):
        k = np.uintp(parts[p])
        found += min(np.uintp(b.stops[k] - b.starts[k]), np.uintp(SEARCH) * candidates)
    return found


@part
def may_reach(
    product: ProductArguments,
    order: Words,
    head: np.uintp,
    peaks: ValueArray,
    column: np.uintp,
    most: float,
    least: float,
) -> Any:
    """Return whether a column may reach `least`: its sum is at most `most`, where the first `head` parts are bounds."""
    a, b = product.a, product.b
    while head > np.uintp(0) and not most < least:
        head -= np.uintp(1)
        k, value = np.uintp(a.indices[order[head]]), np.float64(a.data[order[head]])
        q = find_column(b, k, column)
        most -= abs(value) * np.float64(peaks[k])
        if q < np.uintp(b.stops[k]):
            most += value * np.float64(b.data[q])
    return not most < least


@inlined
def order_parts(
    product: ProductArguments, begin: np.uintp, end: np.uintp, peaks: ValueArray, order: Any, costs: Any
) -> Any:  # fmt: skip
    """Order the entries ``[begin, end)`` of A by what they add at most for each product; return the sum of all.

    `order`: becomes their places. `costs`: overwritten.
    """
    whole = 0.0
    for p in range(begin, end):
        k = np.uintp(product.a.indices[p])
        most = abs(np.float64(product.a.data[p])) * np.float64(peaks[k])
        cost = most / np.float64(product.b.stops[k] - product.b.starts[k] + 1)
        whole += most
        at = p - begin
        while at > np.uintp(0) and costs[at - np.uintp(1)] > cost:
            costs[at], order[at] = costs[at - np.uintp(1)], order[at - np.uintp(1)]
            at -= np.uintp(1)
        costs[at], order[at] = cost, p
    return whole


@tight
def sort_columns(columns: IndexArray, n: np.uintp) -> None:
    """Sort the first `n` columns, which are few."""
    for t in range(np.uintp(1), n):
        column, at = columns[t], np.uintp(t)
        while at > np.uintp(0) and columns[at - np.uintp(1)] > column:
            columns[at] = columns[at - np.uintp(1)]
            at -= np.uintp(1)
        columns[at] = column


@inlined
def find_column(b: RowRanges, k: np.uintp, column: np.uintp) -> Any:
    """Return the place of a column in a row of B, or the end of the row."""
    low, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
    high = stop
    while low < high:
        middle = (low + high) >> np.uintp(1)
        if np.uintp(b.indices[middle]) < column:
            low = middle + np.uintp(1)
        else:
            high = middle
    return low if low < stop and np.uintp(b.indices[low]) == column else stop


@part
def sum_column(product: ProductArguments, begin: np.uintp, end: np.uintp, column: np.uintp, like: ValueArray) -> Any:
    """Sum up one column of a row from entries ``[begin, end)`` of A, in their order; `like` has the dtype."""
    a, b = product.a, product.b
    total = zero_of(like, product.ring)
    for p in range(begin, end):
        k = np.uintp(a.indices[p])
        q = find_column(b, k, column)
        if q < np.uintp(b.stops[k]):
            total = add_product(total, a.data[p], b.data[q], product.ring)
    return total


@inlined
def clear_forbidden(
    totals: ValueArray, forbidden: IndexArray, at: np.uintp, stop: np.uintp, origin: np.uintp, limit: np.uintp,
    zero: Any,
) -> Any:  # fmt: skip
    """Clear the totals of columns ``[origin, limit)`` that are forbidden; return the place of the next one.

    `forbidden`: ascending columns; those from place `at` on are looked at.
    """
    while at < stop and np.uintp(forbidden[at]) < limit:
        if np.uintp(forbidden[at]) >= origin:
            totals[np.uintp(forbidden[at]) - origin] = zero
        at += np.uintp(1)
    return at


@part
def make_dense(
    product: ProductArguments, extent: RowExtent, forbidden: ForbiddenMask | None, selection: Selection,
    totals: ValueArray, c: RowsOut,
) -> Any:  # fmt: skip
    """Make a row tile by tile, without values that are not among its largest above the bar; return how many are left.

    Pre: all totals are the semiring's zero, before and after. A row of more than `places` parts fits `totals`.
    """
    a, b, row, places, heap = product.a, product.b, extent.row, selection.places, selection.heap
    begin, end = np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])
    first, columns = np.uintp(extent.first), np.uintp(extent.last - extent.first + 1)
    width = min(columns, TILE) if end - begin <= len(places) else columns
    for p in range(begin, end if width < columns else begin):
        places[p - begin] = b.starts[np.uintp(a.indices[p])]
    at = held = mask = mask_stop = np.uintp(0)
    bar, zero = selection.bar, zero_of(totals, product.ring)
    if forbidden is not None:
        mask, mask_stop = np.uintp(forbidden.indptr[row]), np.uintp(forbidden.indptr[row + np.uintp(1)])
    for tile in range(np.uintp(0), columns, width):
        origin, limit = first + tile, first + tile + width
        for p in range(begin, end):
            k, value = np.uintp(a.indices[p]), a.data[p]
            q = places[p - begin] if width < columns else np.uintp(b.starts[k])
            stop = np.uintp(b.stops[k])
            while q + RUN <= stop and np.uintp(b.indices[q + RUN - np.uintp(1)]) < limit:
                for r in range(q, q + RUN):
                    j = np.uintp(b.indices[r]) - origin
                    totals[j] = add_product(totals[j], value, b.data[r], product.ring)
                q += RUN
            while q < stop and np.uintp(b.indices[q]) < limit:
                j = np.uintp(b.indices[q]) - origin
                totals[j] = add_product(totals[j], value, b.data[q], product.ring)
                q += np.uintp(1)
            if width < columns:
                places[p - begin] = q
        wide = min(width, columns - tile)
        if forbidden is not None:
            mask = clear_forbidden(totals, forbidden.indices, mask, mask_stop, origin, origin + wide, zero)
        at, held, bar = scan(totals, origin, wide, bar, selection.top, heap, held, c, at, zero)
    return at


@inlined
def scan(
    totals: ValueArray, first: np.uintp, columns: np.uintp, bar: Any, top: int, heap: ValueArray, held: np.uintp,
    c: RowsOut, at: np.uintp, zero: Any,
) -> Any:  # fmt: skip
    """Move the totals above the bar to C from place `at` on, and clear all; return `at`, `held` and the bar after it.

    `totals`: of `columns` columns, rounded up to `STRIDE`; the first is column `first`. `heap`: the `held` largest
    of the row; if they are `top`, the bar is the smallest of them.
    """
    for t in range(np.uintp(0), columns, STRIDE):
        reach = np.uint8(0)
        for u in range(t, t + STRIDE):
            reach |= np.uint8(totals[u] > bar)
        if reach != np.uint8(0):
            for u in range(t, t + STRIDE):
                value = totals[u]
                if value > bar:
                    c.indices[at] = u + first
                    c.data[at] = value
                    at += np.uintp(1)
                    if held < top:
                        heap[held] = value
                        held += np.uintp(1)
                        if held < top:
                            continue
                        for back in range(held):
                            root = held - np.uintp(1) - back
                            sift_down(heap, root, held, heap[root])
                    else:
                        sift_down(heap, np.uintp(0), held, value)
                    bar = heap[0]
        for u in range(t, t + STRIDE):
            totals[u] = zero
    return at, held, bar
