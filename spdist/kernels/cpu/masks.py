"""Masks on the CPU: a row of C confined to a row of the mask, and the test that keeps a row of C out of one.

If a row is confined to a mask, its columns are known in order before it is made: nothing is sorted, and only those
columns of an accumulator are touched. Each row of B is met from the shorter side. Either each of its columns is looked
up in the mask's row, which is marked in the accumulator's window, or held by a hash table if it spans more columns. Or
each column of the mask is searched for in the row of B. No product outside the mask is added up, sorted or stored.

References
----------
S. Milakovic, O. Selvitopi, I. Nisa, Z. Budimlic, A. Buluc, "Parallel Algorithms for Masked Sparse Matrix-Matrix
Products", ICPP 2022: what masked accumulators gain, and that the best depends on the density of the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import (
    AllowedMask,
    Bytes,
    ForbiddenMask,
    MaskRow,
    ProductArguments,
    RowsOut,
    Window,
    Workspace,
)
from spdist.kernels.cpu.numba_compile import add_product, inlined, part, tight, zero_of
from spdist.kernels.cpu.workspace import TABLE_SLOTS, WINDOW
from spdist.matrices.dtypes import IndexArray, ValueArray

EMPTY = -1
ALLOWED = 1
HIT = 2
SEARCH_GAIN = np.uintp(32)
"""Entries of a row of B for each entry of the mask's row, from which the row of B is searched instead of read."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio (Fibonacci hashing): columns in a regular pattern spread evenly."""


@inlined
def first_slot(column: np.uintp, shift: np.uint64) -> Any:
    """Return where the search for a column starts; `shift` is from `fill_table`."""
    return np.uintp((np.uint64(column) * MULTIPLIER) >> np.uint64(shift))


@tight
def fill_table(keys: IndexArray, places: IndexArray, columns: IndexArray, start: np.uintp, stop: np.uintp) -> Any:
    """Enter a row of a mask, entries ``[start, stop)``, into a hash table; return the shift of the hash.

    The table uses only as many slots as the row needs, at least `TABLE_SLOTS` for each column, so that clearing it
    costs no more than the row. Places are counted from `start`.
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
def find_slot(keys: IndexArray, column: np.uintp, shift: np.uint64) -> Any:
    """Return the slot that holds a column, or an empty one if none does."""
    last = (np.uintp(1) << (np.uint64(64) - np.uint64(shift))) - np.uintp(1)
    slot = first_slot(column, shift)
    while keys[slot] != column and keys[slot] != EMPTY:
        slot = (slot + np.uintp(1)) & last
    return slot


@inlined
def is_forbidden(forbidden: ForbiddenMask | None, column: np.uintp) -> Any:
    """Whether the row of the mask that C is kept out of has a column; without a mask the compiled code has no test."""
    if forbidden is None:
        return False
    keys = forbidden.keys
    return keys[find_slot(keys, column, forbidden.shift[0])] != EMPTY


@tight
def first_at_least(indices: IndexArray, start: np.uintp, stop: np.uintp, column: np.uintp) -> Any:
    """Return the first place in ``indices[start:stop]``, which rise, with a column of at least `column`; or `stop`."""
    while start < stop:
        middle = (start + stop) >> np.uintp(1)
        if np.uintp(indices[middle]) < column:
            start = middle + np.uintp(1)
        else:
            stop = middle
    return start


@inlined
def search_row(
    product: ProductArguments, k: np.uintp, value: Any, mask: MaskRow, base: np.uintp | None, totals: ValueArray,
    hits: Bytes,
) -> None:  # fmt: skip
    """Add the products of value and a long row k of B by searching the row for each of the mask's columns.

    Totals and hits are numbered by the column less `base`, or by the place in the mask's row if `base` is None.
    """
    b, (columns, first, n) = product.b, mask
    start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
    for t in range(n):
        column = np.uintp(columns[first + t])
        start = first_at_least(b.indices, start, stop, column)
        if start == stop:
            break
        if np.uintp(b.indices[start]) == column:
            j = t if base is None else column - base
            totals[j] = add_product(totals[j], value, b.data[start], product.ring)
            hits[j] = HIT


@part
def inside_window(product: ProductArguments, row: int, allowed: AllowedMask, window: Window, c: RowsOut) -> Any:
    """Make one row of C inside a row of the mask that fits the window, from place 0 on; return its entries.

    A column's mark selects between two values, not between two branches: the processor would mispredict the branch for
    most marked columns, and a misprediction costs more than a product.
    """
    a, b, ring, columns, (totals, hits, _) = product.a, product.b, product.ring, allowed.indices, window
    first, last = np.uintp(allowed.indptr[row]), np.uintp(allowed.indptr[row + np.uintp(1)])
    base = np.uintp(0) if product.wide is None else np.uintp(columns[first])
    span = np.uintp(columns[last - np.uintp(1)]) + np.uintp(1) - base
    for t in range(first, last):
        hits[np.uintp(columns[t]) - base] = ALLOWED
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        if stop - start > SEARCH_GAIN * (last - first):
            search_row(product, k, value, MaskRow(columns, first, last - first), base, totals, hits)
            continue
        for q in range(start, stop):
            j = np.uintp(b.indices[q]) - base
            if product.wide is None or j < span:
                marked, before = hits[j] != 0, totals[j]
                after = add_product(before, value, b.data[q], ring)
                totals[j] = after if marked else before
                hits[j] = HIT * np.uint8(marked)
    at = np.uintp(0)
    for t in range(first, last):
        j = np.uintp(columns[t]) - base
        if hits[j] == HIT:
            c.indices[at] = columns[t]
            c.data[at] = totals[j]
            totals[j] = zero_of(totals, ring)
            at += np.uintp(1)
        hits[j] = 0
    return at


@part
def inside_table(product: ProductArguments, row: int, allowed: AllowedMask, c: RowsOut) -> Any:
    """Make one row of C inside a row of the mask, of any columns, from place 0 on; return its entries."""
    a, b, ring = product.a, product.b, product.ring
    _, columns, keys, places, totals, hits = allowed
    first, last = np.uintp(allowed.indptr[row]), np.uintp(allowed.indptr[row + np.uintp(1)])
    n, shift = last - first, np.uint64(0)
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        if stop - start > SEARCH_GAIN * n:
            search_row(product, k, value, MaskRow(columns, first, n), None, totals, hits)
            continue
        if shift == np.uint64(0):
            shift = fill_table(keys, places, columns, first, last)
        for q in range(start, stop):
            slot = find_slot(keys, b.indices[q], shift)
            if keys[slot] != EMPTY:
                j = np.uintp(places[slot])
                totals[j] = add_product(totals[j], value, b.data[q], ring)
                hits[j] = HIT
    at = np.uintp(0)
    for t in range(n):
        if hits[t] != 0:
            c.indices[at] = columns[first + t]
            c.data[at] = totals[t]
            totals[t] = zero_of(totals, ring)
            hits[t] = 0
            at += np.uintp(1)
    return at


@inlined
def multiply_inside(
    product: ProductArguments, row: int, allowed: AllowedMask, work: Workspace, c: RowsOut, wide: bool | None
) -> Any:
    """Make one row of C inside a row of the mask, from place 0 on; return its entries.

    `wide`: the field of `product`, as an argument: None leaves code out.
    """
    first, last = np.uintp(allowed.indptr[row]), np.uintp(allowed.indptr[row + np.uintp(1)])
    if first == last:
        return first - last
    if wide is None or allowed.indices[last - np.uintp(1)] - allowed.indices[first] < WINDOW:
        return inside_window(product, row, allowed, work.window, c)
    return inside_table(product, row, allowed, c)
