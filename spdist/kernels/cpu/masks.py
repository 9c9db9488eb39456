"""Masks on the CPU: a row of C confined to a row of the mask, and the test that keeps a row of C out of one.

Confined, the columns of a row are known before it is made, and in order: nothing is sorted, and of an accumulator only
those columns are touched. Each row of B is met by whichever is shorter: each of its columns is looked up in the mask's
row, marked in the accumulator's window or entered in a hash table if it spans more; or each column of the mask is
searched for in the row of B. Nothing outside the mask is added up, sorted or stored.

References
----------
S. Milakovic, O. Selvitopi, I. Nisa, Z. Budimlic, A. Buluc, "Parallel Algorithms for Masked Sparse Matrix-Matrix
Products", ICPP 2022: what masked accumulators gain, and that the best depends on the density of the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import add_product, inlined, part, zero_of
from spdist.kernels.cpu.workspace import TABLE_SLOTS, WINDOW

EMPTY = -1
ALLOWED = 1
HIT = 2
SEARCH_GAIN = np.uintp(32)
"""A row of B this many times as long as the mask's row is searched; a shorter one is read."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio (Fibonacci hashing): columns in a regular pattern spread evenly."""


@inlined
def first_slot(column: Any, shift: Any) -> Any:
    """Return where the search for a column starts."""
    return np.uintp((np.uint64(column) * MULTIPLIER) >> np.uint64(shift))


@part
def fill_table(keys: Any, places: Any, columns: Any, start: Any, stop: Any) -> Any:
    """Enter ``columns[start:stop]`` into the table with their places from `start` on; return the shift of its hash.

    The table is as large as the row asks for, `TABLE_SLOTS` times its length or more, so that clearing it costs no more
    than the row.
    """
    bits = np.uint64(4)
    while (np.uintp(1) << bits) < np.uintp(TABLE_SLOTS) * (stop - start):
        bits += np.uint64(1)
    shift, last = np.uint64(64) - bits, (np.uintp(1) << bits) - np.uintp(1)
    for slot in range(last + np.uintp(1)):
        keys[slot] = EMPTY
    for p in range(start, stop):
        slot = first_slot(columns[p], shift)
        while keys[slot] != EMPTY:
            slot = (slot + np.uintp(1)) & last
        keys[slot] = columns[p]
        places[slot] = p - start
    return shift


@inlined
def find_slot(keys: Any, column: Any, shift: Any) -> Any:
    """Return the slot that holds a column, or an empty one if none does."""
    last = (np.uintp(1) << (np.uint64(64) - np.uint64(shift))) - np.uintp(1)
    slot = first_slot(column, shift)
    while keys[slot] != column and keys[slot] != EMPTY:
        slot = (slot + np.uintp(1)) & last
    return slot


@inlined
def excluded(outside: Any, column: Any) -> Any:
    """Whether a column is in the mask's row that C is kept out of; never if `outside` is None (decided when compiled).

    Otherwise `outside` is (indptr, indices, keys, places, shift), with the row in its table and an array for the shift.
    """
    if outside is None:
        return False
    keys = outside[2]
    return keys[find_slot(keys, column, outside[4][0])] != EMPTY


@part
def first_at_least(indices: Any, start: Any, stop: Any, column: Any) -> Any:
    """Return the first place in the sorted ``indices[start:stop]`` whose column is not below `column`, else `stop`."""
    while start < stop:
        middle = (start + stop) >> np.uintp(1)
        if np.uintp(indices[middle]) < column:
            start = middle + np.uintp(1)
        else:
            stop = middle
    return start


@inlined
def search_row(
    b: Any, k: Any, value: Any, columns: Any, first: Any, n: Any, base: Any, totals: Any, hits: Any, ring: Any
) -> None:
    """Add the products of a long row of B by searching it for each of the mask's `n` columns.

    Totals and hits are by the column less `base`, or by the place in the mask's row if `base` is None.
    """
    start, stop = np.uintp(b[0][k]), np.uintp(b[3][k])
    for t in range(n):
        column = np.uintp(columns[first + t])
        start = first_at_least(b[1], start, stop, column)
        if start == stop:
            break
        if np.uintp(b[1][start]) == column:
            j = t if base is None else column - base
            totals[j] = add_product(totals[j], value, b[2][start], ring)
            hits[j] = HIT


@part
def inside_window(a: Any, b: Any, row: Any, mask: Any, window: Any, c: Any, ring: Any, wide: Any) -> Any:
    """Make one row of C inside a row of the mask that fits the window, from place 0 on; return its entries.

    Whether a column is marked decides between two values, not between two branches: the processor would guess the
    branch wrong for most columns that are marked, and a guess costs more than a product.
    """
    columns, (totals, hits, _) = mask[1], window
    first, last = np.uintp(mask[0][row]), np.uintp(mask[0][row + np.uintp(1)])
    base = np.uintp(0) if wide is None else np.uintp(columns[first])
    span = np.uintp(columns[last - np.uintp(1)]) + np.uintp(1) - base
    for t in range(first, last):
        hits[np.uintp(columns[t]) - base] = ALLOWED
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        start, stop = np.uintp(b[0][k]), np.uintp(b[3][k])
        if stop - start > SEARCH_GAIN * (last - first):
            search_row(b, k, value, columns, first, last - first, base, totals, hits, ring)
            continue
        for q in range(start, stop):
            j = np.uintp(b[1][q]) - base
            if wide is None or j < span:
                allowed, before = hits[j] != 0, totals[j]
                after = add_product(before, value, b[2][q], ring)
                totals[j] = after if allowed else before
                hits[j] = HIT * np.uint8(allowed)
    at = np.uintp(0)
    for t in range(first, last):
        j = np.uintp(columns[t]) - base
        if hits[j] == HIT:
            c[0][at] = columns[t]
            c[1][at] = totals[j]
            totals[j] = zero_of(totals, ring)
            at += np.uintp(1)
        hits[j] = 0
    return at


@part
def inside_table(a: Any, b: Any, row: Any, mask: Any, c: Any, ring: Any) -> Any:
    """Make one row of C inside a row of the mask, of any columns, from place 0 on; return its entries."""
    _, columns, keys, places, totals, hits = mask
    first, last = np.uintp(mask[0][row]), np.uintp(mask[0][row + np.uintp(1)])
    n, shift = last - first, np.uint64(0)
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        start, stop = np.uintp(b[0][k]), np.uintp(b[3][k])
        if stop - start > SEARCH_GAIN * n:
            search_row(b, k, value, columns, first, n, None, totals, hits, ring)
            continue
        if shift == np.uint64(0):
            shift = fill_table(keys, places, columns, first, last)
        for q in range(start, stop):
            slot = find_slot(keys, b[1][q], shift)
            if keys[slot] != EMPTY:
                j = np.uintp(places[slot])
                totals[j] = add_product(totals[j], value, b[2][q], ring)
                hits[j] = HIT
    at = np.uintp(0)
    for t in range(n):
        if hits[t] != 0:
            c[0][at] = columns[first + t]
            c[1][at] = totals[t]
            totals[t] = zero_of(totals, ring)
            hits[t] = 0
            at += np.uintp(1)
    return at


@inlined
def multiply_inside(a: Any, b: Any, row: Any, mask: Any, work: Any, c: Any, ring: Any, wide: Any) -> Any:
    """Make one row of C inside a row of the mask, from place 0 on; return its entries.

    Parameters
    ----------
    a, b
        As for `rowwise.multiply_rows`.
    mask : (indptr, indices, keys, places, totals, hits)
        Keys and places for `fill_table`; totals and hits for each place of the longest row, all the semiring's zero and
        0, before and after.
    work : (window, ...)
        As for `rowwise.multiply_rows`.
    c : (indices, data, ...)
    ring : None or Semiring
    wide : None or True
        None if C has no more than `WINDOW` columns.
    """
    first, last = np.uintp(mask[0][row]), np.uintp(mask[0][row + np.uintp(1)])
    if first == last:
        return first - last
    if wide is None or mask[1][last - np.uintp(1)] - mask[1][first] < WINDOW:
        return inside_window(a, b, row, mask, work[0], c, ring, wide)
    return inside_table(a, b, row, mask, c, ring)
