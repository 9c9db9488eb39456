"""Row-wise sparse multiply on the CPU, compiled by Numba (`numba_engine` calls it).

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

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from spdist.kernels.cpu.arrays import (
    Batch,
    CsrArrays,
    ForbiddenMask,
    RowRanges,
    RowsOut,
    SortBuffers,
    Window,
    Workspace,
)
from spdist.kernels.cpu.masks import first_at_least, is_forbidden
from spdist.kernels.cpu.numba_compile import add_product, compiled, fold, inlined, instruction, part, zero_of
from spdist.kernels.cpu.workspace import BATCH_ROWS, BATCH_SLOTS, RANK_PRODUCTS, SORT_PRODUCTS, WINDOW
from spdist.kernels.semirings import Semiring
from spdist.matrices.dtypes import IndexArray

LANES = 16
"""int32 keys that one vector instruction compares."""
RANK_BITS = RANK_PRODUCTS.bit_length() - 1
"""Bits of a product's number within a small row."""
RANK_SPAN = 1 << (31 - RANK_BITS)
"""Columns that fit into a key of the rank sort beside the number."""
SORT_BITS = SORT_PRODUCTS.bit_length() - 1
"""Bits of a product's number in the radix sort."""
SORT_SPAN = 1 << (63 - SORT_BITS)
"""Columns that fit into a key of the radix sort beside the number."""
TINY_ROW = 16
"""Products up to which a row is always sorted in a batch."""
SPARSE_SMALL = 1024
"""Columns per product from which a row of up to `RANK_PRODUCTS` is sorted in a batch."""
PADDING = np.int32(np.iinfo(np.int32).max)
"""Key of the unused lanes: it sorts last."""
MOST_PREFETCHES = np.uintp(32)
"""Entries of a row of A for which B is prefetched."""


@instruction
def marks64(context: Any, marks: types.Type, at: types.Type) -> Any:
    """Return the 64 bytes ``marks[at:at + 64]`` as 64 bits, bit j set if byte j is not 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        marks = context.make_array(signature.args[0])(context, builder, value=args[0])
        vector = ir.VectorType(ir.IntType(8), 64)
        start = builder.bitcast(builder.gep(marks.data, [args[1]]), vector.as_pointer())
        hits = builder.icmp_unsigned("!=", builder.load(start, align=1), ir.Constant(vector, None))
        return builder.bitcast(hits, ir.IntType(64))

    return types.uint64(marks, types.uintp), generate


@instruction
def count_below(context: Any, keys: types.Type, at: types.Type, key: types.Type) -> Any:
    """Return how many of the `LANES` int32 in ``keys[at:]`` are below `key`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        keys = context.make_array(signature.args[0])(context, builder, value=args[0])
        vector = ir.VectorType(ir.IntType(32), LANES)
        start = builder.bitcast(builder.gep(keys.data, [args[1]]), vector.as_pointer())
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), args[2], ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        all_lanes = builder.shuffle_vector(one, one, lanes)
        below = builder.icmp_signed("<", builder.load(start, align=4), all_lanes)
        bits = builder.zext(builder.bitcast(below, ir.IntType(LANES)), ir.IntType(64))
        return builder.ctpop(bits)

    return types.uint64(keys, types.uintp, types.int32), generate


@instruction
def lowest_bit(context: Any, bits: types.Type) -> Any:
    """Return the place of the lowest set bit of a number that is not 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@instruction
def prefetch(context: Any, array: types.Type, at: types.Type) -> Any:
    """Ask the processor to fetch ``array[at]``, and do not wait for it; any `at` is safe."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = builder.bitcast(builder.gep(array.data, [args[1]]), byte)
        builder.call(function, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


@inlined
def row_extent(a: CsrArrays, b: RowRanges, row: int) -> Any:
    """Return how many products a row has, its first and last column of C, and how many rows of B take part."""
    products, first, last, parts = np.int64(0), np.int64(np.iinfo(np.int64).max), np.int64(-1), 0
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k = np.uintp(a.indices[p])
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        if start < stop:
            products += np.int64(stop - start)
            first = min(first, np.int64(b.indices[start]))
            last = max(last, np.int64(b.indices[stop - np.uintp(1)]))
            parts += 1
    return products, first, last, parts


@part
def enter_rows(a: CsrArrays, b: RowRanges, row: int, diagonal: np.uintp) -> None:
    """Move the starts of the rows of B that a row of A uses to their first column from `diagonal` on.

    Rows of A come in rising order. In A @ A.T each entry of a row moves a start by one.
    """
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k = np.uintp(a.indices[p])
        start, stop = np.uintp(b.starts[k]), np.uintp(b.stops[k])
        if start < stop and np.uintp(b.indices[start]) < diagonal:
            start += np.uintp(1)
            if start < stop and np.uintp(b.indices[start]) < diagonal:
                start = first_at_least(b.indices, start + np.uintp(1), stop, diagonal)
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
def accumulate(
    a: CsrArrays, b: RowRanges, row: int, first: np.uintp, window: Window, ring: Semiring | None,
    forbidden: ForbiddenMask | None,
) -> None:  # fmt: skip
    """Add a row's products to the window, whose first column is `first`; all of them must fall into it."""
    totals, hits, hits64 = window
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        for q in range(np.uintp(b.starts[k]), np.uintp(b.stops[k])):
            if is_forbidden(forbidden, b.indices[q]):
                continue
            j = np.uintp(b.indices[q]) - first
            totals[j] = add_product(totals[j], value, b.data[q], ring)
            hits[j] = 1
            hits64[j >> np.uintp(6)] = 1


@part
def accumulate_strip(
    a: CsrArrays, b: RowRanges, row: int, first: np.uintp, end: np.uintp, window: Window, ring: Semiring | None,
    forbidden: ForbiddenMask | None,
) -> None:  # fmt: skip
    """Add a row's products with columns in ``[first, end)`` to the window."""
    totals, hits, hits64 = window
    for p in range(np.uintp(a.indptr[row]), np.uintp(a.indptr[row + np.uintp(1)])):
        k, value = np.uintp(a.indices[p]), a.data[p]
        stop = np.uintp(b.stops[k])
        q = first_at_least(b.indices, np.uintp(b.starts[k]), stop, first)
        while q < stop and np.uintp(b.indices[q]) < end:
            if not is_forbidden(forbidden, b.indices[q]):
                j = np.uintp(b.indices[q]) - first
                totals[j] = add_product(totals[j], value, b.data[q], ring)
                hits[j] = 1
                hits64[j >> np.uintp(6)] = 1
            q += np.uintp(1)


@inlined
def gather(window: Window, first: np.uintp, columns: np.uintp, c: RowsOut, at: np.uintp, ring: Semiring | None) -> Any:
    """Move the window's entries to C from place `at` on, in order of columns, and clear it; return the next place.

    Places from the capacity on are counted, but all written to one spare entry.

    Parameters
    ----------
    window : Window
    first, columns : int
        The window's first column, and number of its columns.
    c : RowsOut
    at : int
        First place in C.
    ring : Semiring or None
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


@inlined
def copy_row(
    a: CsrArrays, b: RowRanges, row: int, c: RowsOut, at: np.uintp, ring: Semiring | None,
    forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Write a row of C that has products with only one row of B; return the next place."""
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


@inlined
def expand_small(
    a: CsrArrays, b: RowRanges, row: int, extent: tuple[int, int, int, int], batch: Batch, count: np.uintp,
    slot: np.uintp, ring: Semiring | None, forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Expand a small row into the batch as its row number `count`, from `slot` on; return the next free slot.

    A key is column and place, so keys differ and equal columns keep their order.
    """
    keys, values, sizes, firsts = batch.keys, batch.values, batch.sizes, batch.firsts
    first, n = np.uintp(extent[1]), np.uintp(extent[0])
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
            values[slot + t] = add_product(zero_of(values, ring), value, b.data[q], ring)
            t += np.uintp(1)
    if forbidden is not None:
        sizes[count] = t
        for u in range(t, n):
            keys[slot + u] = PADDING
        n = t
    return slot + ((n + np.uintp(LANES - 1)) & ~np.uintp(LANES - 1))


@part
def sort_batch(batch: Batch, rows: np.uintp) -> Any:
    """Sort the rows of a batch: an entry's place is the number of smaller keys; return how many there are."""
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


@part
def flush_batch(batch: Batch, rows: np.uintp, c: RowsOut, row: Any, at: np.uintp, ring: Semiring | None) -> Any:
    """Sort and sum a batch of `rows` rows into C, whose first is `row`, from place `at` on.

    Return the next place and how many rows fit; if not all fit, the place counts the first that did not fit as well.
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


@part
def expand_strip(
    a: CsrArrays, b: RowRanges, row: int, first: np.uintp, end: np.uintp, sorting: SortBuffers, ring: Semiring | None,
    forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Expand a row's products with columns in ``[first, end)``; return how many, or more than fit if they do not."""
    keys, values = sorting.keys, sorting.values
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


@part
def radix_sort(sorting: SortBuffers, n: np.uintp, columns: np.uintp) -> Any:
    """Sort the first `n` keys by column, stably, least digit first; return which row of keys holds the result."""
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


@part
def compress(
    sorting: SortBuffers, side: np.uintp, n: np.uintp, first: np.uintp, c: RowsOut, at: np.uintp, ring: Semiring | None
) -> Any:
    """Sum the sorted products of each column into C from place `at` on, without a branch; return the next place."""
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


@part
def multiply_strips(
    a: CsrArrays, b: RowRanges, row: int, first: np.uintp, last: np.uintp, products: int, work: Workspace, c: RowsOut,
    at: np.uintp, ring: Semiring | None, forbidden: ForbiddenMask | None,
) -> Any:  # fmt: skip
    """Make a row strip by strip, each as wide as `SORT_PRODUCTS` products or `WINDOW` columns allow."""
    window, sorting = work.window, work.sorting
    width = np.uintp(min(np.float64(SORT_SPAN), (last - first) / products * (SORT_PRODUCTS / 2)))
    end = first
    while end <= last:
        width = max(width, np.uintp(WINDOW))
        start, end = end, min(last + np.uintp(1), end + width)
        if width == np.uintp(WINDOW):
            accumulate_strip(a, b, row, start, end, window, ring, forbidden)
            at = gather(window, start, end - start, c, at, ring)
            continue
        n = expand_strip(a, b, row, start, end, sorting, ring, forbidden)
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
    a: CsrArrays, b: RowRanges, row: int, extent: tuple[int, int, int, int], work: Workspace, c: RowsOut, at: np.uintp,
    ring: Semiring | None, forbidden: ForbiddenMask | None, wide: bool | None,
) -> Any:  # fmt: skip
    """Make one row, without the columns in `forbidden`, by the method that suits it; return the next place in C.

    Parameters
    ----------
    a, b, work, c, ring, wide
        As for `multiply_rows`.
    row : int
        Row of A.
    extent : tuple of int
        As `row_extent` returns it.
    at : int
        First place in C.
    forbidden : ForbiddenMask or None
    """
    products, low, high, parts = extent
    if parts == 1:
        return copy_row(a, b, row, c, at, ring, forbidden)
    first, n, span = np.uintp(low), np.uintp(products), np.uintp(high - low + 1)
    if wide is None or span <= np.uintp(WINDOW):
        accumulate(a, b, row, first, work.window, ring, forbidden)
        return gather(work.window, first, span, c, at, ring)
    if n <= np.uintp(SORT_PRODUCTS) and span < np.uintp(SORT_SPAN):
        n = expand_strip(a, b, row, first, first + span, work.sorting, ring, forbidden)
        side = radix_sort(work.sorting, n, span)
        return compress(work.sorting, side, n, first, c, at, ring)
    return multiply_strips(a, b, row, first, np.uintp(high), products, work, c, at, ring, forbidden)


@inlined
def is_small(extent: tuple[int, int, int, int]) -> Any:
    """Whether a row is better sorted in a batch of small rows."""
    products, first, last, _ = extent
    if products > RANK_PRODUCTS or last - first >= RANK_SPAN:
        return False
    return products <= TINY_ROW or last - first > SPARSE_SMALL * products


@compiled
def multiply_rows(
    a: CsrArrays, b: RowRanges, start: int, stop: int, work: Workspace, c: RowsOut, prefetches: bool,
    ring: Semiring | None, wide: bool | None, diagonal: int | None,
) -> Any:  # fmt: skip
    """Make rows ``[start, stop)`` of C until C is full.

    Parameters
    ----------
    a : CsrArrays
    b : RowRanges
        Starts are moved if `diagonal` is not None.
    start, stop : int
    work : Workspace
        As `numba_engine.new_workspace` makes it; all totals are the semiring's zero, before and after.
    c : RowsOut
        Its ends are numbered from row `start`.
    prefetches : bool
        Whether to prefetch rows of B.
    ring : None or Semiring
        None for plus and times.
    wide : None or True
        None if C has no more than `WINDOW` columns: such a kernel takes half as long to compile.
    diagonal : None or int
        The first wanted column of row 0, one more for each row after it; None for whole rows.

    Returns
    -------
    rows : int
        Whole rows made.
    needed : int
        Entries of those rows and, if C is full, of the first row that did not fit.
    """
    at, last = np.uintp(0), np.uintp(stop)
    origin = np.uintp(start)
    count, slot = np.uintp(0), np.uintp(0)
    for row in range(origin, last):
        if prefetches:
            prefetch_rows(a, b, row, last)
        if diagonal is not None:
            enter_rows(a, b, row, np.uintp(diagonal) + row)
        extent = row_extent(a, b, row)
        small = is_small(extent)
        if count > np.uintp(0) and (not small or count == np.uintp(BATCH_ROWS) or slot > np.uintp(BATCH_SLOTS)):
            at, fit = flush_batch(work.batch, count, c, row - count - origin, at, ring)
            if fit < count:
                return np.int64(row - count - origin + fit), np.int64(at)
            count, slot = np.uintp(0), np.uintp(0)
        if small:
            slot = expand_small(a, b, row, extent, work.batch, count, slot, ring, None)
            count += np.uintp(1)
            continue
        at = multiply_row(a, b, row, extent, work, c, at, ring, None, wide)
        if at > c.capacity:
            return np.int64(row - origin), np.int64(at)
        c.ends[row - origin] = at
    if count > np.uintp(0):
        at, fit = flush_batch(work.batch, count, c, last - count - origin, at, ring)
        return np.int64(last - count - origin + fit), np.int64(at)
    return stop - start, np.int64(at)


@compiled
def slice_stop(
    a_indptr: IndexArray, a_indices: IndexArray, b_indptr: IndexArray, start: int, stop: int, most: int
) -> Any:
    """Return the end of the longest run of rows with at most `most` products, at least one row, and its products.

    Parameters
    ----------
    a_indptr, a_indices, b_indptr
        CSR arrays of A and of B.
    start, stop, most : int
    """
    products = np.int64(0)
    for row in range(np.uintp(start), np.uintp(stop)):
        n = np.int64(0)
        for p in range(np.uintp(a_indptr[row]), np.uintp(a_indptr[row + np.uintp(1)])):
            k = np.uintp(a_indices[p])
            n += b_indptr[k + np.uintp(1)] - b_indptr[k]
        if products + n > most and row > np.uintp(start):
            return np.int64(row), products
        products += n
    return stop, products
