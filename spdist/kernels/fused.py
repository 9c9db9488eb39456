"""Rows of C under a mask, or cut to a threshold and their largest entries as soon as they are made (CPU, Numba).

A row is made in a buffer of its own, and only what is kept of it goes to C. The n-th largest value comes from a heap of
n values, which the row passes through once; a second pass copies what is larger, and of what is equal the first: they
are in the order of columns, so that no sort follows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.jit import compiled, part
from spdist.kernels.masks import fill_table, multiply_inside
from spdist.kernels.rowwise import expand_small, fetch_ahead, flush_batch, is_small, multiply_row, row_extent


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
    least, top, heap = keep
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
def make_row(a: Any, b: Any, row: Any, outside: Any, work: Any, c: Any, ring: Any, wide: Any) -> Any:
    """Make one whole row of C, or of it what is outside a row of the mask, from place 0 on; return its entries."""
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
    return multiply_row(a, b, row, extent, work, c, none, room, ring, outside, wide)


@compiled
def fused_rows(
    a: Any, b: Any, inside: Any, outside: Any, keep: Any, start: int, stop: int,
    work: Any, row_buffer: Any, c: Any, capacity: int, ahead: bool, ring: Any, wide: Any,
) -> Any:  # fmt: skip
    """Make rows ``[start, stop)`` of C, under a mask and cut, until `capacity` entries are full.

    Parameters
    ----------
    a, b : (indptr, indices, data)
    inside, outside : None or (indptr, indices, ...)
        The mask that rows are confined to, or kept out of, with what `masks.multiply_inside` or `masks.excluded` need;
        one of them at most. What is None is left out of the compiled code, here and below.
    keep : None or (least, top, heap)
        What `find_cut` takes.
    work : (window, sorting, batch)
        As for `rowwise.multiply_rows`.
    row_buffer : (indices, data, ends)
        For the longest row before it is cut, one spare entry, and one end.
    c, capacity, ahead, ring, wide
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
        if inside is None:
            n = make_row(a, b, row, outside, work, row_buffer, ring, wide)
        else:
            n = multiply_inside(a, b, row, inside, row_buffer, ring)
        at = keep_row(row_buffer, n, keep, c, at, limit)
        if at > limit:
            return np.int64(row - origin), np.int64(at)
        c[2][row - origin] = at
    return stop - start, np.int64(at)
