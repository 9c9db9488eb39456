"""Rows of C by sorting their products: small rows together by rank, longer ones by radix."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import Batch, ForbiddenMask, ProductArguments, RowExtent, RowsOut, SortBuffers
from spdist.kernels.cpu.masks import first_at_least, is_forbidden
from spdist.kernels.cpu.numba_compile import add_product, fold, inlined, tight, zero_of
from spdist.kernels.cpu.rowwise.instructions import LANES, count_below
from spdist.kernels.cpu.workspace import RANK_PRODUCTS, SORT_PRODUCTS
from spdist.kernels.semirings import Semiring

RANK_BITS = RANK_PRODUCTS.bit_length() - 1
"""Bits of a product's number within a small row."""
RANK_SPAN = 1 << (31 - RANK_BITS)
"""Columns that fit into a key of the rank sort together with the number."""
SORT_BITS = SORT_PRODUCTS.bit_length() - 1
"""Bits of a product's number in the radix sort."""
SORT_SPAN = 1 << (63 - SORT_BITS)
"""Columns that fit into a key of the radix sort together with the number."""
PADDING = np.int32(np.iinfo(np.int32).max)
"""Key of the unused lanes: it sorts last."""


@inlined
def expand_small(
    product: ProductArguments, extent: RowExtent, batch: Batch, count: np.uintp, slot: np.uintp,
    forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Expand a small row into the batch, which has `count` rows, from `slot` on; return the next free slot.

    A key is column and place, so keys differ and equal columns keep their order.
    """
    a, b, row = product.a, product.b, extent.row
    keys, values, sizes, firsts = batch.keys, batch.values, batch.sizes, batch.firsts
    first, n = np.uintp(extent.first), np.uintp(extent.products)
    sizes[count], firsts[count] = n, first
    for lane in range(np.uintp(LANES)):
        keys[slot + (n & ~np.uintp(LANES - 1)) + lane] = PADDING
    t = np.uintp(0)
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        for q in range(np.uintp(b.starts[k]), np.uintp(b.stops[k])):
            if is_forbidden(forbidden, b.indices[q]):
                continue
            keys[slot + t] = ((np.uintp(b.indices[q]) - first) << np.uintp(RANK_BITS)) | t
            values[slot + t] = add_product(zero_of(values, product.ring), value, b.data[q], product.ring)
            t += np.uintp(1)
    if forbidden is not None:
        sizes[count] = t
        for u in range(t, n):
            keys[slot + u] = PADDING
        n = t
    return slot + ((n + np.uintp(LANES - 1)) & ~np.uintp(LANES - 1))


@tight
def sort_batch(batch: Batch, rows: np.uintp) -> Any:
    """Sort the rows of a batch: a product's place is the number of smaller keys; return how many products there are."""
    keys, ordered, sizes = batch.keys, batch.ordered, batch.sizes
    slot, done = np.uintp(0), np.uintp(0)
    for row in range(rows):
        n = np.uintp(sizes[row])
        for t in range(slot, slot + n):
            key = keys[t]
            rank = done
            for u in range(slot, slot + n, np.uintp(LANES)):
                rank += count_below(keys, u, key)
            column = (row << np.uintp(31 - RANK_BITS)) | (np.uintp(key) >> np.uintp(RANK_BITS))
            ordered[rank] = (column << np.uintp(SORT_BITS)) | t
        done += n
        slot += (n + np.uintp(LANES - 1)) & ~np.uintp(LANES - 1)
    return done


@tight
def flush_batch(batch: Batch, rows: np.uintp, c: RowsOut, row: Any, at: np.uintp, ring: Semiring | None) -> Any:
    """Sort and sum the rows of a batch into C; `row` is the number of the first of them.

    Returns the next place, behind the first row that did not fit if not all do; and the rows that fit.
    """
    _, ordered, values, sizes, firsts, ends = batch
    n = sort_batch(batch, rows)
    start = at
    zero = zero_of(values, ring)
    total, previous = zero, np.uintp(1) << np.uintp(63)
    at -= np.uintp(1)
    for t in range(n):
        column = ordered[t] >> np.uintp(SORT_BITS)
        value = values[ordered[t] & np.uintp(SORT_PRODUCTS - 1)]
        fresh = column != previous
        before = zero if fresh else total
        total = fold(before, value, ring)
        at += np.uintp(fresh)
        place = min(at, c.capacity)
        owner = column >> np.uintp(31 - RANK_BITS)
        c.indices[place] = (column & np.uintp(RANK_SPAN - 1)) + firsts[owner]
        c.data[place] = total
        ends[owner] = at + np.uintp(1)
        previous = column
    end = start
    for r in range(rows):
        if sizes[r] != 0:
            end = ends[r]
        if end > c.capacity:
            return end, r
        c.ends[row + r] = end
    return end, rows


@tight
def expand_strip(
    product: ProductArguments, row: int, first: np.uintp, end: np.uintp, sorting: SortBuffers,
    forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Expand a row's products with columns in ``[first, end)``; return how many, or more than fit if they do not."""
    a, b, keys, values, ring = product.a, product.b, sorting.keys, sorting.values, product.ring
    n = np.uintp(0)
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        stop = np.uintp(b.stops[k])
        q = first_at_least(b.indices, np.uintp(b.starts[k]), stop, first)
        while q < stop and np.uintp(b.indices[q]) < end:
            q += np.uintp(1)
            if is_forbidden(forbidden, b.indices[q - np.uintp(1)]):
                continue
            if n == np.uintp(SORT_PRODUCTS):
                return n + np.uintp(1)
            keys[0, n] = ((np.uintp(b.indices[q - np.uintp(1)]) - first) << np.uintp(SORT_BITS)) | n
            values[n] = add_product(zero_of(values, ring), value, b.data[q - np.uintp(1)], ring)
            n += np.uintp(1)
    return n


@tight
def radix_sort(sorting: SortBuffers, n: np.uintp, columns: np.uintp) -> Any:
    """Sort n keys in row 0 by column, stably, least digit first; return which row of keys holds the result."""
    keys, bins = sorting.keys, sorting.bins
    most = np.uintp(8) if n < np.uintp(2048) else np.uintp(11)
    bits = np.uintp(1)
    while (columns - np.uintp(1)) >> bits != np.uintp(0):
        bits += np.uintp(1)
    passes = (bits + most - np.uintp(1)) // most
    digit = (bits + passes - np.uintp(1)) // passes
    mask = (np.uintp(1) << digit) - np.uintp(1)
    side = np.uintp(0)
    for t in range(passes):
        shift = np.uintp(SORT_BITS) + t * digit
        for u in range(mask + np.uintp(1)):
            bins[u] = 0
        for u in range(n):
            bins[(keys[side, u] >> shift) & mask] += 1
        start = np.int32(0)
        for u in range(mask + np.uintp(1)):
            start, bins[u] = start + bins[u], start
        for u in range(n):
            d = (keys[side, u] >> shift) & mask
            keys[side ^ np.uintp(1), np.uintp(bins[d])] = keys[side, u]
            bins[d] += 1
        side ^= np.uintp(1)
    return side


@tight
def compress(
    sorting: SortBuffers, side: np.uintp, n: np.uintp, first: np.uintp, c: RowsOut, at: np.uintp, ring: Semiring | None
) -> Any:
    """Sum the n sorted products in row `side` into C, without a branch; return the next place.

    Key 0 is column `first`.
    """
    keys, values = sorting.keys, sorting.values
    zero = zero_of(values, ring)
    total, previous = zero, np.uintp(1) << np.uintp(63)
    at -= np.uintp(1)
    for t in range(n):
        column = keys[side, t] >> np.uintp(SORT_BITS)
        value = values[keys[side, t] & np.uintp(SORT_PRODUCTS - 1)]
        fresh = column != previous
        before = zero if fresh else total
        total = fold(before, value, ring)
        at += np.uintp(fresh)
        place = min(at, c.capacity)
        c.indices[place] = column + first
        c.data[place] = total
        previous = column
    return at + np.uintp(1)
