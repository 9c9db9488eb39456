"""Rows of C in a dense accumulator over a span of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import ForbiddenMask, ProductArguments, RowsOut, Window
from spdist.kernels.cpu.masks import first_at_least, is_forbidden
from spdist.kernels.cpu.numba_compile import add_product, inlined, tight, zero_of
from spdist.kernels.cpu.rowwise.instructions import lowest_bit, marks64
from spdist.kernels.semirings import Semiring


@inlined
def accumulate(
    product: ProductArguments, row: int, first: np.uintp, window: Window, forbidden: ForbiddenMask | None
) -> None:
    """Add a row's products to the window that begins at column `first`; all of them must fall into it."""
    a, b, (totals, hits, hits64) = product.a, product.b, window
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        for q in range(np.uintp(b.starts[k]), np.uintp(b.stops[k])):
            if is_forbidden(forbidden, b.indices[q]):
                continue
            j = np.uintp(b.indices[q]) - first
            totals[j] = add_product(totals[j], value, b.data[q], product.ring)
            hits[j] = 1
            hits64[j >> np.uintp(6)] = 1


@tight
def accumulate_strip(
    product: ProductArguments, row: int, first: np.uintp, end: np.uintp, window: Window,
    forbidden: ForbiddenMask | None,
) -> None:  # fmt: skip
    """Add a row's products with columns in ``[first, end)`` to the window."""
    a, b, (totals, hits, hits64) = product.a, product.b, window
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        stop = np.uintp(b.stops[k])
        q = first_at_least(b.indices, np.uintp(b.starts[k]), stop, first)
        while q < stop and np.uintp(b.indices[q]) < end:
            if not is_forbidden(forbidden, b.indices[q]):
                j = np.uintp(b.indices[q]) - first
                totals[j] = add_product(totals[j], value, b.data[q], product.ring)
                hits[j] = 1
                hits64[j >> np.uintp(6)] = 1
            q += np.uintp(1)


@inlined
def gather(window: Window, first: np.uintp, columns: np.uintp, c: RowsOut, at: np.uintp, ring: Semiring | None) -> Any:
    """Move the window's entries to C from place `at` on, in order of columns, and clear it; return the next place.

    Places from the capacity on are counted, but all written to one spare entry.
    """
    totals, hits, hits64 = window
    for t in range(np.uintp(0), (columns + np.uintp(63)) >> np.uintp(6), np.uintp(64)):
        blocks = marks64(hits64, t)
        while blocks != np.uint64(0):
            block = t + lowest_bit(blocks)
            blocks &= blocks - np.uint64(1)
            hits64[block] = 0
            start = block << np.uintp(6)
            entries = marks64(hits, start)
            for u in range(np.uintp(64)):
                hits[start + u] = 0
            while entries != np.uint64(0):
                j = start + lowest_bit(entries)
                entries &= entries - np.uint64(1)
                place = min(at, c.capacity)
                c.indices[place] = j + first
                c.data[place] = totals[j]
                totals[j] = zero_of(totals, ring)
                at += np.uintp(1)
    return at
