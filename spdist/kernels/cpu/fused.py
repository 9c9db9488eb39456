"""Rows of C under a mask, or cut to a threshold and their largest entries as soon as they are made (CPU, Numba).

Each row is made in a buffer of its own, and only the entries that are kept go to C. The n-th largest value comes from a
heap of n values, through which the row passes once. A second pass copies the larger values, and the first of the equal
ones. Entries stay in the order of columns, so that no sort follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import (
    AllowedMask,
    CsrArrays,
    EpilogueArguments,
    ForbiddenMask,
    ProductArguments,
    RowCuts,
    RowExtent,
    RowsOut,
    Selection,
    Workspace,
)
from spdist.kernels.cpu.masks import fill_table, multiply_inside
from spdist.kernels.cpu.numba_compile import compiled, inlined, part, tight
from spdist.kernels.cpu.rowwise.largest import make_largest, sift_down
from spdist.kernels.cpu.rowwise.multiply import enter_rows, is_small, multiply_row, prefetch_rows, row_extent
from spdist.kernels.cpu.rowwise.sorting import expand_small, flush_batch
from spdist.matrices.dtypes import IndexArray, ValueArray

MASK_GAIN = np.uintp(8)
"""Products per column of a forbidden row from which C's row is made whole and its forbidden entries are dropped."""


@tight
def find_cut(values: ValueArray, n: np.uintp, least: Any, top: int, heap: ValueArray) -> Any:
    """Return the smallest of the first `n` values to keep, and how many entries equal to it to keep.

    `least`: smaller values are not kept. `top`: most entries to keep. `heap`: (top,), overwritten.
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
def finish_row(row: RowsOut, n: np.uintp, number: int, epilogue: EpilogueArguments | None) -> Any:
    """Scale, map and normalise the `n` values of a row in place, and drop zeros; return how many entries are left."""
    if epilogue is None:
        return n
    for t in range(n):
        scale(row.data, t, epilogue.rows, number)
        scale(row.data, t, epilogue.columns, row.indices[t])
        apply(row.data, t, epilogue.function)
    if epilogue.norm > 0:
        size = norm_of(row.data, n, epilogue.norm)
        if size > 0:
            for t in range(n):
                row.data[t] /= size
    if not epilogue.drop_zeros:
        return n
    left = np.uintp(0)
    for t in range(n):
        if row.data[t] != 0:
            row.indices[left] = row.indices[t]
            row.data[left] = row.data[t]
            left += np.uintp(1)
    return left


@inlined
def scale(values: ValueArray, at: int, factors: ValueArray | None, number: int) -> None:
    """Multiply a value by a factor, in place; without factors the compiled code is empty."""
    if factors is not None:
        values[at] *= factors[number]


@inlined
def apply(values: ValueArray, at: int, function: Callable[[Any], Any] | None) -> None:
    """Replace a value by a function of it; without a function the compiled code is empty."""
    if function is not None:
        values[at] = function(values[at])


@inlined
def norm_of(values: ValueArray, n: np.uintp, norm: int) -> Any:
    """Return the norm of the first `n` values; `norm` is 1 more than the position in `product_spec.NORMS`."""
    size = 0.0
    for t in range(n):
        value = abs(values[t])
        size = max(size, value) if norm == 3 else size + (value if norm == 1 else value * value)
    return np.sqrt(size) if norm == 2 else size


@part
def keep_row(row: RowsOut, n: np.uintp, selection: Selection | None, c: RowsOut, at: np.uintp) -> Any:
    """Copy the entries to keep of the `n` entries of a row to C from place `at` on; return the next place.

    Places from the capacity on are counted, but all written to one spare entry.
    """
    if selection is None:
        fits = at + n <= c.capacity
        for t in range(n if fits else np.uintp(0)):
            c.indices[at + t] = row.indices[t]
            c.data[at + t] = row.data[t]
        return at + n
    least, top, heap = selection.least, selection.top, selection.heap
    cut, equal = (least, n) if n <= top else find_cut(row.data, n, least, top, heap)
    for t in range(n):
        value = row.data[t]
        if value >= cut:
            if value == cut:
                if equal == np.uintp(0):
                    continue
                equal -= np.uintp(1)
            place = min(at, c.capacity)
            c.indices[place] = row.indices[t]
            c.data[place] = value
            at += np.uintp(1)
    return at


@part
def make_row(
    product: ProductArguments, row: int, forbidden: ForbiddenMask | None, selection: Selection | None, work: Workspace,
    c: RowsOut,
) -> Any:  # fmt: skip
    """Make one row of C from place 0 on, without its forbidden columns; return its entries. `c` has room for the row.

    Values that `selection` leaves out anyway may be missing. Looking up a product in the mask costs more than adding
    it. If the mask's row is far shorter than the products, its entries are dropped afterwards.
    """
    extent = row_extent(product.a, product.b, row)
    none, n = np.uintp(0), np.uintp(0)
    if extent.products == 0:
        return none
    if selection is not None and not is_small(extent):
        done, n = make_largest(product, extent, forbidden, selection, selection.peaks, work.window, c)
        if done:
            return n
    if forbidden is not None:
        start, stop = np.uintp(forbidden.indptr[row]), np.uintp(forbidden.indptr[row + np.uintp(1)])
        if MASK_GAIN * (stop - start) > np.uintp(extent.products):
            forbidden.shift[0] = fill_table(forbidden.keys, forbidden.places, forbidden.indices, start, stop)
            return make_whole(product, extent, forbidden, work, c)
        return drop_forbidden(c, make_whole(product, extent, None, work, c), forbidden.indices, start, stop)
    return make_whole(product, extent, None, work, c)


@part
def make_whole(
    product: ProductArguments, extent: RowExtent, forbidden: ForbiddenMask | None, work: Workspace, c: RowsOut
) -> Any:
    """Make all entries of one row of C from place 0 on, without its forbidden columns; return how many."""
    none = np.uintp(0)
    if is_small(extent):
        expand_small(product, extent, work.batch, none, none, forbidden)
        return flush_batch(work.batch, np.uintp(1), c, none, none, product.ring)[0]
    return multiply_row(product, extent, work, c, none, forbidden, product.wide)


@inlined
def drop_forbidden(c: RowsOut, n: np.uintp, forbidden: IndexArray, start: np.uintp, stop: np.uintp) -> Any:
    """Move the first `n` entries of a row that are not ``forbidden[start:stop]`` to the front; return how many."""
    left = np.uintp(0)
    for t in range(n):
        while start < stop and forbidden[start] < c.indices[t]:
            start += np.uintp(1)
        if start == stop or forbidden[start] != c.indices[t]:
            c.indices[left] = c.indices[t]
            c.data[left] = c.data[t]
            left += np.uintp(1)
    return left


@inlined
def make_under_mask(
    product: ProductArguments, row: int, cuts: RowCuts, allowed: AllowedMask | None, forbidden: ForbiddenMask | None,
    work: Workspace, c: RowsOut,
) -> Any:  # fmt: skip
    """Make one row of C under a mask, from place 0 on; return its entries.

    `allowed, forbidden`: the fields of `cuts`, as arguments: None leaves code out.
    """
    if allowed is not None:
        return multiply_inside(product, row, allowed, work, c, product.wide)
    return make_row(product, row, forbidden, cuts.selection, work, c)


@part
def fused_rows(
    product: ProductArguments, cuts: RowCuts, start: int, stop: int, work: Workspace, row_buffer: RowsOut, c: RowsOut
) -> Any:
    """Make rows ``[start, stop)`` of C, under a mask and cut, until C is full; return as `rowwise.multiply_rows` does.

    Entries that are cut do not count. `row_buffer`: room for the longest row before it is cut, and for one end.
    """
    at, origin, last = np.uintp(0), np.uintp(start), np.uintp(stop)
    for row in range(origin, last):
        if product.prefetches:
            prefetch_rows(product.a, product.b, row, last)
        enter_rows(product.a, product.b, row, cuts.diagonal)
        n = make_under_mask(product, row, cuts, cuts.allowed, cuts.forbidden, work, row_buffer)
        n = finish_row(row_buffer, n, row, cuts.epilogue)
        at = keep_row(row_buffer, n, cuts.selection, c, at)
        if at > c.capacity:
            return np.int64(row - origin), np.int64(at)
        c.ends[row - origin] = at
    return stop - start, np.int64(at)


@compiled
def cut_rows(
    c: CsrArrays, epilogue: EpilogueArguments | None, selection: Selection | None, row_buffer: RowsOut
) -> None:
    """Apply epilogue, threshold and top-n to the rows of a sum of products; entries that are kept move to the front.

    `row_buffer`: room for the longest row.
    """
    at, start = np.uintp(0), np.uintp(0)
    out = RowsOut(c.indices, c.data, c.indptr, np.uintp(len(c.indices)))
    for row in range(len(c.indptr) - 1):
        stop = np.uintp(c.indptr[row + 1])
        for t in range(start, stop):
            row_buffer.indices[t - start] = c.indices[t]
            row_buffer.data[t - start] = c.data[t]
        n = finish_row(row_buffer, stop - start, row, epilogue)
        at = keep_row(row_buffer, n, selection, out, at)
        c.indptr[row + 1] = at
        start = stop
