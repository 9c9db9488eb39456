"""Masks on the CPU: a row of C confined to a row of the mask, and the test that keeps a row of C out of one.

Confined, a row is made at the places of the mask's row, which are in the order of columns: no accumulator over all
columns, and no sort. Each row of B is met by whichever is shorter: each of its columns is looked up in a hash table of
the mask's row, or each column of the mask is searched for in it. Products outside the mask are never multiplied.

References
----------
S. Milakovic, O. Selvitopi, I. Nisa, Z. Budimlic, A. Buluc, "Parallel Algorithms for Masked Sparse Matrix-Matrix
Products", ICPP 2022: what masked accumulators gain, and that the best depends on the density of the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.jit import add_product, inlined, part, zero_of
from spdist.kernels.workspace import TABLE_SLOTS

EMPTY = -1
SEARCH_GAIN = np.uintp(16)
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


@part
def multiply_inside(a: Any, b: Any, row: Any, mask: Any, c: Any, ring: Any) -> Any:
    """Make one row of C inside a row of the mask, from place 0 on; return its entries.

    Parameters
    ----------
    a, b : (indptr, indices, data)
    mask : (indptr, indices, keys, places, totals, hits)
        Keys and places for `fill_table`; totals and hits for each place of the longest row, all the semiring's zero and
        0, before and after.
    c : (indices, data, ...)
    ring : None or Semiring
    """
    _, columns, keys, places, totals, hits = mask
    first, last = np.uintp(mask[0][row]), np.uintp(mask[0][row + np.uintp(1)])
    n = last - first
    if n == np.uintp(0):
        return n
    shift = np.uint64(0)
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        start, stop = np.uintp(b[0][k]), np.uintp(b[0][k + np.uintp(1)])
        if stop - start > SEARCH_GAIN * n:
            for t in range(n):
                start = first_at_least(b[1], start, stop, np.uintp(columns[first + t]))
                if start == stop:
                    break
                if b[1][start] == columns[first + t]:
                    totals[t] = add_product(totals[t], value, b[2][start], ring)
                    hits[t] = 1
            continue
        if shift == np.uint64(0):
            shift = fill_table(keys, places, columns, first, last)
        for q in range(start, stop):
            slot = find_slot(keys, b[1][q], shift)
            if keys[slot] != EMPTY:
                t = np.uintp(places[slot])
                totals[t] = add_product(totals[t], value, b[2][q], ring)
                hits[t] = 1
    return collect(columns, first, n, totals, hits, c, ring)


@inlined
def collect(columns: Any, first: Any, n: Any, totals: Any, hits: Any, c: Any, ring: Any) -> Any:
    """Move what was hit of the first `n` totals to C from place 0 on, and clear them; return how many there are."""
    at = np.uintp(0)
    for t in range(n):
        if hits[t] != 0:
            c[0][at] = columns[first + t]
            c[1][at] = totals[t]
            totals[t] = zero_of(totals, ring)
            hits[t] = 0
            at += np.uintp(1)
    return at
