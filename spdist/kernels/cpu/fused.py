"""Rows of C under a mask, or cut to a threshold and their largest entries as soon as they are made (CPU, Numba).

A row is made in a buffer of its own, and only what is kept of it goes to C. The n-th largest value comes from a heap of
n values, which the row passes through once; a second pass copies what is larger, and of what is equal the first: they
are in the order of columns, so that no sort follows.

Where the threshold is above the semiring's zero, a row of many products is added up without a note of the columns that
were hit: those that were not hold zero, and the scan for what reaches the threshold passes over them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.masks import excluded, fill_table, multiply_inside
from spdist.kernels.cpu.numba_compile import add_product, compiled, inlined, part, zero_of
from spdist.kernels.cpu.rowwise import (
    enter_rows,
    expand_small,
    fetch_ahead,
    flush_batch,
    is_small,
    multiply_row,
    row_extent,
)
from spdist.kernels.cpu.workspace import WINDOW

DENSE_SPAN = 8
"""Columns per product up to which the scan is quicker than marks."""
MASK_GAIN = np.uintp(8)
"""Products per column of the mask from which a row is made whole, and what is inside the mask dropped."""
STRIDE = np.uintp(32)
"""Columns that the scan looks at together; at most `workspace.PADDING`."""


@part
def sift_down(heap: Any, root: Any, n: Any, value: Any) -> None:
    """Put `value` at `root` or below it, so that the first `n` values are a heap again, the smallest first."""
    child = np.uintp(2) * root + np.uintp(1)
    while child < n:
        if child + np.uintp(1) < n and heap[child + np.uintp(1)] < heap[child]:
            child += np.uintp(1)
        if value <= heap[child]:
            break
        heap[root] = heap[child]
        root, child = child, np.uintp(2) * child + np.uintp(1)
    heap[root] = value


@part
def find_cut(values: Any, n: Any, least: Any, top: Any, heap: Any) -> Any:
    """Find the smallest value that is kept of the first `n`, and how many that are equal to it.

    Parameters
    ----------
    values : array
    least : value
        Nothing below is kept.
    top : int
        Entries to keep.
    heap : array of `top` values
    """
    held = np.uintp(0)
    at = np.uintp(0)
    while at < n and held < top:
        if values[at] >= least:
            heap[held] = values[at]
            held += np.uintp(1)
        at += np.uintp(1)
    if at == n:
        return least, n
    for back in range(held):
        root = held - np.uintp(1) - back
        sift_down(heap, root, held, heap[root])
    for t in range(at, n):
        if values[t] > heap[0]:
            sift_down(heap, np.uintp(0), held, values[t])
    equal = np.uintp(0)
    for t in range(held):
        equal += np.uintp(heap[t] == heap[0])
    return heap[0], equal


@part
def finish_row(row: Any, n: Any, number: Any, rows: Any, columns: Any, function: Any, norm: Any, drop: Any) -> Any:
    """Scale, map and normalise the `n` values of a row in place, and drop zeros; return the entries left.

    Parameters
    ----------
    row : (indices, data, ...)
    number : int
        Of the row in `rows`.
    rows, columns : None or array
    function : None or compiled function
    norm : int
        0 for none, else 1 more than the place in `options.NORMS`.
    drop : bool
    """
    for t in range(n):
        if rows is not None:
            row[1][t] *= rows[number]
        if columns is not None:
            row[1][t] *= columns[row[0][t]]
        if function is not None:
            row[1][t] = function(row[1][t])
    if norm > 0:
        size = norm_of(row[1], n, norm)
        if size > 0:
            for t in range(n):
                row[1][t] /= size
    if not drop:
        return n
    left = np.uintp(0)
    for t in range(n):
        if row[1][t] != 0:
            row[0][left] = row[0][t]
            row[1][left] = row[1][t]
            left += np.uintp(1)
    return left


@inlined
def norm_of(values: Any, n: Any, norm: Any) -> Any:
    """Return the norm of the first `n` values."""
    size = 0.0
    for t in range(n):
        value = abs(values[t])
        size = max(size, value) if norm == 3 else size + (value if norm == 1 else value * value)
    return np.sqrt(size) if norm == 2 else size


@part
def keep_row(row: Any, n: Any, keep: Any, c: Any, at: Any, capacity: Any) -> Any:
    """Copy what is kept of the `n` entries of a row to C from place `at` on; return the next place.

    Places from `capacity` on are counted, but all written to one spare entry.
    """
    if keep is None:
        fits = at + n <= capacity
        for t in range(n if fits else np.uintp(0)):
            c[0][at + t] = row[0][t]
            c[1][at + t] = row[1][t]
        return at + n
    least, top, heap, _ = keep
    cut, equal = (least, n) if n <= top else find_cut(row[1], n, least, top, heap)
    for t in range(n):
        value = row[1][t]
        if value >= cut:
            if value == cut:
                if equal == np.uintp(0):
                    continue
                equal -= np.uintp(1)
            place = min(at, capacity)
            c[0][place] = row[0][t]
            c[1][place] = value
            at += np.uintp(1)
    return at


@part
def make_dense(
    a: Any, b: Any, row: Any, first: Any, columns: Any, outside: Any, least: Any, totals: Any, c: Any, ring: Any
) -> Any:
    """Make a row whose `columns` columns from `first` on fit the window; return the entries, from `least` up.

    Pre: `least` is above the semiring's zero; all totals are zero, before and after.
    """
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        for q in range(np.uintp(b[0][k]), np.uintp(b[3][k])):
            if not excluded(outside, b[1][q]):
                j = np.uintp(b[1][q]) - first
                totals[j] = add_product(totals[j], value, b[2][q], ring)
    return scan(totals, first, columns, least, c, zero_of(totals, ring))


@inlined
def scan(totals: Any, first: Any, columns: Any, least: Any, c: Any, zero: Any) -> Any:
    """Move the totals from `least` up to C from place 0 on, and clear all; return how many there are."""
    at = np.uintp(0)
    for t in range(np.uintp(0), columns, STRIDE):
        reach = np.uint8(0)
        for u in range(t, t + STRIDE):
            reach |= np.uint8(totals[u] >= least)
        if reach != np.uint8(0):
            for u in range(t, t + STRIDE):
                if totals[u] >= least:
                    c[0][at] = u + first
                    c[1][at] = totals[u]
                    at += np.uintp(1)
        for u in range(t, t + STRIDE):
            totals[u] = zero
    return at


@part
def make_row(a: Any, b: Any, row: Any, outside: Any, keep: Any, work: Any, c: Any, ring: Any, wide: Any) -> Any:
    """Make one row of C, or of it what is outside a row of the mask, from place 0 on; return its entries.

    What `keep` leaves out anyway may be missing.
    """
    extent = row_extent(a, b, row)
    none, room = np.uintp(0), np.uintp(len(c[0]) - 1)
    if extent[0] == 0:
        return none
    if outside is not None:
        start, stop = np.uintp(outside[0][row]), np.uintp(outside[0][row + np.uintp(1)])
        outside[4][0] = fill_table(outside[2], outside[3], outside[1], start, stop)
    if is_small(extent):
        expand_small(a, b, row, extent, work[2], none, none, ring, outside)
        return flush_batch(work[2], np.uintp(1), c, none, none, room, ring)[0]
    if keep is not None:
        span = extent[2] - extent[1] + 1
        if keep[3] and span <= WINDOW and span <= DENSE_SPAN * extent[0]:
            first = np.uintp(extent[1])
            return make_dense(a, b, row, first, np.uintp(span), outside, keep[0], work[0][0], c, ring)
    return multiply_row(a, b, row, extent, work, c, none, room, ring, outside, wide)


@part
def make_outside(a: Any, b: Any, row: Any, outside: Any, keep: Any, work: Any, c: Any, ring: Any, wide: Any) -> Any:
    """Make what is outside a row of the mask of one row of C, from place 0 on; return its entries.

    To ask of each product whether it is outside costs more than to add it up. Where the mask's row is far shorter than
    the products, the row is made whole, and what is inside is passed over afterwards.
    """
    start, stop = np.uintp(outside[0][row]), np.uintp(outside[0][row + np.uintp(1)])
    if MASK_GAIN * (stop - start) > np.uintp(row_extent(a, b, row)[0]):
        return make_row(a, b, row, outside, keep, work, c, ring, wide)
    n = make_row(a, b, row, None, keep, work, c, ring, wide)
    left = np.uintp(0)
    for t in range(n):
        while start < stop and outside[1][start] < c[0][t]:
            start += np.uintp(1)
        if start == stop or outside[1][start] != c[0][t]:
            c[0][left] = c[0][t]
            c[1][left] = c[1][t]
            left += np.uintp(1)
    return left


@compiled
def fused_rows(
    a: Any, b: Any, inside: Any, outside: Any, finish: Any, keep: Any, start: int, stop: int,
    work: Any, row_buffer: Any, c: Any, capacity: int, ahead: bool, ring: Any, wide: Any, diagonal: Any,
) -> Any:  # fmt: skip
    """Make rows ``[start, stop)`` of C, under a mask and cut, until `capacity` entries are full.

    Parameters
    ----------
    a, b
        As for `rowwise.multiply_rows`.
    inside, outside : None or (indptr, indices, ...)
        The mask that rows are confined to, or kept out of, with what `masks.multiply_inside` or `masks.excluded` need;
        one of them at most. What is None is left out of the compiled code, here and below.
    finish : None or (rows, columns, function, norm, drop)
        As `finish_row` takes them.
    keep : None or (least, top, heap, above)
        What `find_cut` takes, and whether what is below `least` may be left out while a row is made, because `least` is
        above the semiring's zero and values are final.
    work : (window, sorting, batch)
        As for `rowwise.multiply_rows`.
    row_buffer : (indices, data, ends)
        For the longest row before it is cut, one spare entry, and one end.
    c, capacity, ahead, ring, wide, diagonal
        As for `rowwise.multiply_rows`.

    Returns
    -------
    rows, needed : int
        As of `rowwise.multiply_rows`; entries are counted as they are kept.
    """
    at, limit, origin, last = np.uintp(0), np.uintp(capacity), np.uintp(start), np.uintp(stop)
    for row in range(origin, last):
        if ahead:
            fetch_ahead(a, b, row, last)
        if diagonal is not None:
            enter_rows(a, b, row, np.uintp(diagonal) + row)
        if inside is None:
            if outside is None:
                n = make_row(a, b, row, None, keep, work, row_buffer, ring, wide)
            else:
                n = make_outside(a, b, row, outside, keep, work, row_buffer, ring, wide)
        else:
            n = multiply_inside(a, b, row, inside, work, row_buffer, ring, wide)
        if finish is not None:
            n = finish_row(row_buffer, n, row, *finish)
        at = keep_row(row_buffer, n, keep, c, at, limit)
        if at > limit:
            return np.int64(row - origin), np.int64(at)
        c[2][row - origin] = at
    return stop - start, np.int64(at)


@compiled
def cut_rows(c: Any, finish: Any, keep: Any, row_buffer: Any) -> None:
    """Make of the rows of a sum of products what `fused_rows` makes of a product's, in place.

    Parameters
    ----------
    c : (indptr, indices, data)
        What is kept moves to the front.
    finish, keep
        As for `fused_rows`.
    row_buffer : (indices, data)
        For the longest row.
    """
    at, start, capacity = np.uintp(0), np.uintp(0), np.uintp(len(c[1]))
    for row in range(len(c[0]) - 1):
        stop = np.uintp(c[0][row + 1])
        for t in range(start, stop):
            row_buffer[0][t - start] = c[1][t]
            row_buffer[1][t - start] = c[2][t]
        n = stop - start
        if finish is not None:
            n = finish_row(row_buffer, n, row, *finish)
        at = keep_row(row_buffer, n, keep, (c[1], c[2]), at, capacity)
        c[0][row + 1] = at
        start = stop
