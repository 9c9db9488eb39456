"""Row-wise sparse multiply on the CPU, compiled by Numba; `cpu` imports it when it is first needed.

Each row of C is made on its own, by the first of these methods that suits it:

copy
    One row of B takes part: scale it.
rank sort
    At most `RANK_PRODUCTS` products, far apart: expand them, place each by counting the smaller keys 16 at a time,
    sum equal columns. No branch depends on the data.
window
    Products fit in a span of `WINDOW` columns: a dense accumulator over the span (Gustavson), a byte for each column
    that was hit and a byte for each 64 columns. Reading the bytes back, 64 at a time, gives the columns sorted with no
    sort, and clears them for the next row. Bytes, not bits: a bit needs a read before its write, and with runs of
    neighbouring columns every read would wait for the write before it.
radix sort
    Up to `SORT_PRODUCTS` products in a wider span: expand, stable radix sort of the columns, sum equal columns.
strips
    What is left: the row is cut into strips of columns narrow enough for one of the two methods above.

Every method adds the products of an entry in the order of k, to a zero, one rounding each: the same bits as SciPy.
Row k of B is ``[starts[k], stops[k])`` of its entries. Where only the upper triangle of C is wanted, starts move on
from row to row, to the first column that is not left of the diagonal: what lies before is never looked at again.
A semiring puts its own operators in the place of plus and times; they are compiled in. The methods also take a table of
columns to keep out of, for masks: see `fused`.
Columns are handled as unsigned numbers, for which Numba leaves out its test for negative ones.

References
----------
F. Gustavson, "Two Fast Algorithms for Sparse Matrices: Multiplication and Permuted Transposition", ACM TOMS 4(3), 1978.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from spdist.kernels.cpu.masks import excluded, first_at_least
from spdist.kernels.cpu.numba_compile import add_product, compiled, fold, inlined, instruction, part, zero_of
from spdist.kernels.cpu.workspace import BATCH_ROWS, BATCH_SLOTS, RANK_PRODUCTS, SORT_PRODUCTS, WINDOW

LANES = 16
RANK_BITS = RANK_PRODUCTS.bit_length() - 1
RANK_SPAN = 1 << (31 - RANK_BITS)
SORT_BITS = SORT_PRODUCTS.bit_length() - 1
SORT_SPAN = 1 << (63 - SORT_BITS)
TINY_ROW = 16
SPARSE_SMALL = 1024
PADDING = np.int32(np.iinfo(np.int32).max)


@instruction
def hits64(context: Any, marks: Any, at: Any) -> Any:
    """Return the 64 bytes ``marks[at:at + 64]`` as 64 bits, bit j set if byte j is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        marks = context.make_array(signature.args[0])(context, builder, value=args[0])
        vector = ir.VectorType(ir.IntType(8), 64)
        start = builder.bitcast(builder.gep(marks.data, [args[1]]), vector.as_pointer())
        hits = builder.icmp_unsigned("!=", builder.load(start, align=1), ir.Constant(vector, None))
        return builder.bitcast(hits, ir.IntType(64))

    return types.uint64(marks, types.uintp), generate


@instruction
def count_below(context: Any, keys: Any, at: Any, key: Any) -> Any:
    """Return how many of the `LANES` int32 in ``keys[at:]`` are below `key`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
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
def lowest_bit(context: Any, bits: Any) -> Any:
    """Return the place of the lowest set bit of a number that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@instruction
def prefetch(context: Any, array: Any, at: Any) -> Any:
    """Ask the processor to fetch ``array[at]``, and do not wait for it; any `at` is safe."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
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
def row_extent(a: Any, b: Any, row: Any) -> Any:
    """Return a row's products, its first and last column of C, and how many rows of B take part."""
    products, first, last, parts = np.int64(0), np.int64(np.iinfo(np.int64).max), np.int64(-1), 0
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k = np.uintp(a[1][p])
        start, stop = np.uintp(b[0][k]), np.uintp(b[3][k])
        if start < stop:
            products += np.int64(stop - start)
            first = min(first, np.int64(b[1][start]))
            last = max(last, np.int64(b[1][stop - np.uintp(1)]))
            parts += 1
    return products, first, last, parts


@part
def enter_rows(a: Any, b: Any, row: Any, diagonal: Any) -> None:
    """Move the starts of the rows of B that a row of A asks for to their first column from `diagonal` on.

    Rows of A come in rising order. In A @ A.T each of them moves a start by one.
    """
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k = np.uintp(a[1][p])
        start, stop = np.uintp(b[0][k]), np.uintp(b[3][k])
        if start < stop and np.uintp(b[1][start]) < diagonal:
            start += np.uintp(1)
            if start < stop and np.uintp(b[1][start]) < diagonal:
                start = first_at_least(b[1], start + np.uintp(1), stop, diagonal)
            b[0][k] = start


@inlined
def fetch_ahead(a: Any, b: Any, row: Any, stop: Any) -> None:
    """Start fetching what row + 2 and row + 4 need of B: with small random rows the wait for memory is all there is."""
    far = min(row + np.uintp(4), stop - np.uintp(1))
    for p in range(np.uintp(a[0][far]), min(np.uintp(a[0][far + np.uintp(1)]), np.uintp(a[0][far]) + np.uintp(32))):
        prefetch(b[0], np.uintp(a[1][p]))
    near = min(row + np.uintp(2), stop - np.uintp(1))
    for p in range(np.uintp(a[0][near]), min(np.uintp(a[0][near + np.uintp(1)]), np.uintp(a[0][near]) + np.uintp(32))):
        start = np.uintp(b[0][np.uintp(a[1][p])])
        prefetch(b[1], start)
        prefetch(b[2], start)


@inlined
def accumulate(a: Any, b: Any, row: Any, first: Any, window: Any, ring: Any, outside: Any) -> None:
    """Add a row's products to the window, whose first column is `first`; all of them must fall inside."""
    total, hit, hit64 = window
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        for q in range(np.uintp(b[0][k]), np.uintp(b[3][k])):
            if excluded(outside, b[1][q]):
                continue
            j = np.uintp(b[1][q]) - first
            total[j] = add_product(total[j], value, b[2][q], ring)
            hit[j] = 1
            hit64[j >> np.uintp(6)] = 1


@part
def accumulate_strip(a: Any, b: Any, row: Any, first: Any, end: Any, window: Any, ring: Any, outside: Any) -> None:
    """Add a row's products with columns in ``[first, end)`` to the window."""
    total, hit, hit64 = window
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        stop = np.uintp(b[3][k])
        q = first_at_least(b[1], np.uintp(b[0][k]), stop, first)
        while q < stop and np.uintp(b[1][q]) < end:
            if not excluded(outside, b[1][q]):
                j = np.uintp(b[1][q]) - first
                total[j] = add_product(total[j], value, b[2][q], ring)
                hit[j] = 1
                hit64[j >> np.uintp(6)] = 1
            q += np.uintp(1)


@inlined
def gather(window: Any, first: Any, columns: Any, c: Any, at: Any, capacity: Any, ring: Any) -> Any:
    """Move the window's entries to C from place `at` on, in order of columns, and clear it; return the next place.

    Places from `capacity` on are counted, but all written to one spare entry.
    """
    total, hit, hit64 = window
    for t in range(np.uintp(0), (columns + np.uintp(63)) >> np.uintp(6), np.uintp(64)):
        blocks = hits64(hit64, t)
        while blocks != np.uint64(0):
            block = t + lowest_bit(blocks)
            blocks &= blocks - np.uint64(1)
            hit64[block] = 0
            start = block << np.uintp(6)
            entries = hits64(hit, start)
            for u in range(np.uintp(64)):
                hit[start + u] = 0
            while entries != np.uint64(0):
                j = start + lowest_bit(entries)
                entries &= entries - np.uint64(1)
                place = min(at, capacity)
                c[0][place] = j + first
                c[1][place] = total[j]
                total[j] = zero_of(total, ring)
                at += np.uintp(1)
    return at


@inlined
def copy_row(a: Any, b: Any, row: Any, c: Any, at: Any, capacity: Any, ring: Any, outside: Any) -> Any:
    """Write a row of C that only one row of B takes part in; return the next place."""
    zero = zero_of(c[1], ring)
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        start, stop = np.uintp(b[0][k]), np.uintp(b[3][k])
        if outside is not None:
            for q in range(start, stop):
                if not excluded(outside, b[1][q]):
                    place = min(at, capacity)
                    c[0][place] = b[1][q]
                    c[1][place] = add_product(zero, value, b[2][q], ring)
                    at += np.uintp(1)
            continue
        if at + (stop - start) <= capacity:
            for q in range(start, stop):
                c[0][at + (q - start)] = b[1][q]
                c[1][at + (q - start)] = add_product(zero, value, b[2][q], ring)
        at += stop - start
    return at


@inlined
def expand_small(
    a: Any, b: Any, row: Any, extent: Any, batch: Any, count: Any, slot: Any, ring: Any, outside: Any
) -> Any:
    """Expand a small row into the batch as its row number `count`, from `slot` on; return the next free slot.

    A key is column and place, so keys differ and equal columns keep their order.
    """
    keys, values, sizes, firsts = batch[0], batch[2], batch[3], batch[4]
    first, n = np.uintp(extent[1]), np.uintp(extent[0])
    sizes[count], firsts[count] = n, first
    for lane in range(np.uintp(LANES)):
        keys[slot + (n & ~np.uintp(LANES - 1)) + lane] = PADDING
    t = np.uintp(0)
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        for q in range(np.uintp(b[0][k]), np.uintp(b[3][k])):
            if excluded(outside, b[1][q]):
                continue
            keys[slot + t] = ((np.uintp(b[1][q]) - first) << np.uintp(RANK_BITS)) | t
            values[slot + t] = add_product(zero_of(values, ring), value, b[2][q], ring)
            t += np.uintp(1)
    if outside is not None:
        sizes[count] = t
        for u in range(t, n):
            keys[slot + u] = PADDING
        n = t
    return slot + ((n + np.uintp(LANES - 1)) & ~np.uintp(LANES - 1))


@part
def sort_batch(batch: Any, rows: Any) -> Any:
    """Sort the rows of a batch: an entry's place is the number of smaller keys; return how many there are."""
    keys, ordered, sizes = batch[0], batch[1], batch[3]
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
def flush_batch(batch: Any, rows: Any, c: Any, row: Any, at: Any, capacity: Any, ring: Any) -> Any:
    """Sort and sum a batch of `rows` rows into C, whose first is `row`, from place `at` on.

    Return the next place and how many rows fit; if not all did, the place counts the first that did not as well.
    """
    ordered, values, sizes, firsts, ends = batch[1], batch[2], batch[3], batch[4], batch[5]
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
        place = min(at, capacity)
        owner = column >> np.uintp(31 - RANK_BITS)
        c[0][place] = (column & np.uintp(RANK_SPAN - 1)) + firsts[owner]
        c[1][place] = total
        ends[owner] = at + np.uintp(1)
        previous = column
    end = start
    for r in range(rows):
        if sizes[r] != 0:
            end = ends[r]
        if end > capacity:
            return end, r
        c[2][row + r] = end
    return end, rows


@part
def expand_strip(a: Any, b: Any, row: Any, first: Any, end: Any, sorting: Any, ring: Any, outside: Any) -> Any:
    """Expand a row's products with columns in ``[first, end)``; return how many, or more than fit if they do not."""
    keys, values = sorting[0], sorting[1]
    n = np.uintp(0)
    for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
        k, value = np.uintp(a[1][p]), a[2][p]
        stop = np.uintp(b[3][k])
        q = first_at_least(b[1], np.uintp(b[0][k]), stop, first)
        while q < stop and np.uintp(b[1][q]) < end:
            q += np.uintp(1)
            if excluded(outside, b[1][q - np.uintp(1)]):
                continue
            if n == np.uintp(SORT_PRODUCTS):
                return n + np.uintp(1)
            keys[0, n] = ((np.uintp(b[1][q - np.uintp(1)]) - first) << np.uintp(SORT_BITS)) | n
            values[n] = add_product(zero_of(values, ring), value, b[2][q - np.uintp(1)], ring)
            n += np.uintp(1)
    return n


@part
def radix_sort(sorting: Any, n: Any, columns: Any) -> Any:
    """Sort the first `n` keys by column, stably, least digit first; return which row of keys holds the result."""
    keys, bins = sorting[0], sorting[2]
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
def compress(sorting: Any, side: Any, n: Any, first: Any, c: Any, at: Any, capacity: Any, ring: Any) -> Any:
    """Sum the sorted products of each column into C from place `at` on, without a branch; return the next place."""
    keys, values = sorting[0], sorting[1]
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
        place = min(at, capacity)
        c[0][place] = column + first
        c[1][place] = total
        previous = column
    return at + np.uintp(1)


@part
def multiply_strips(
    a: Any,
    b: Any,
    row: Any,
    first: Any,
    last: Any,
    products: Any,
    work: Any,
    c: Any,
    at: Any,
    capacity: Any,
    ring: Any,
    outside: Any,
) -> Any:
    """Make a row strip by strip, each as wide as `SORT_PRODUCTS` products or `WINDOW` columns allow."""
    window, sorting = work[0], work[1]
    width = np.uintp(min(np.float64(SORT_SPAN), (last - first) / products * (SORT_PRODUCTS / 2)))
    end = first
    while end <= last:
        width = max(width, np.uintp(WINDOW))
        start, end = end, min(last + np.uintp(1), end + width)
        if width == np.uintp(WINDOW):
            accumulate_strip(a, b, row, start, end, window, ring, outside)
            at = gather(window, start, end - start, c, at, capacity, ring)
            continue
        n = expand_strip(a, b, row, start, end, sorting, ring, outside)
        if n > np.uintp(SORT_PRODUCTS):
            end = start
            width >>= np.uintp(1)
            continue
        side = radix_sort(sorting, n, end - start)
        at = compress(sorting, side, n, start, c, at, capacity, ring)
        if n < np.uintp(SORT_PRODUCTS // 4):
            width = min(width << np.uintp(1), np.uintp(SORT_SPAN))
    return at


@inlined
def multiply_row(
    a: Any,
    b: Any,
    row: Any,
    extent: Any,
    work: Any,
    c: Any,
    at: Any,
    capacity: Any,
    ring: Any,
    outside: Any,
    wide: Any,
) -> Any:
    """Make one row, without the columns in `outside`, by the method that suits it; return the next place in C."""
    products, low, high, parts = extent
    if parts == 1:
        return copy_row(a, b, row, c, at, capacity, ring, outside)
    first, n, span = np.uintp(low), np.uintp(products), np.uintp(high - low + 1)
    if wide is None or span <= np.uintp(WINDOW):
        accumulate(a, b, row, first, work[0], ring, outside)
        return gather(work[0], first, span, c, at, capacity, ring)
    if n <= np.uintp(SORT_PRODUCTS) and span < np.uintp(SORT_SPAN):
        n = expand_strip(a, b, row, first, first + span, work[1], ring, outside)
        side = radix_sort(work[1], n, span)
        return compress(work[1], side, n, first, c, at, capacity, ring)
    return multiply_strips(a, b, row, first, np.uintp(high), products, work, c, at, capacity, ring, outside)


@inlined
def is_small(extent: Any) -> Any:
    """Whether a row is better sorted in a batch of small rows."""
    products, first, last, _ = extent
    if products > RANK_PRODUCTS or last - first >= RANK_SPAN:
        return False
    return products <= TINY_ROW or last - first > SPARSE_SMALL * products


@compiled
def multiply_rows(
    a: Any, b: Any, start: int, stop: int, work: Any, c: Any, capacity: int, ahead: bool, ring: Any, wide: Any,
    diagonal: Any,
) -> Any:  # fmt: skip
    """Make rows ``[start, stop)`` of C until `capacity` entries are full.

    Parameters
    ----------
    a : (indptr, indices, data)
    b : (starts, indices, data, stops)
        Of its rows; starts are moved if `diagonal` is not None.
    work : (window, sorting, batch)
        As `cpu.new_work` makes it; all of the window is the semiring's zero, before and after.
    c : (indices, data, ends)
        Indices and data with one spare entry after `capacity`; ends[i] becomes the entries in the first i + 1 rows.
    ahead : bool
        Whether to fetch rows of B ahead.
    ring : None or Semiring
        None for plus and times.
    wide : None or True
        None if C has no more than `WINDOW` columns: a kernel that takes half as long to compile.
    diagonal : None or int
        The first column that is wanted of row 0, one more of each row after it; None for whole rows.

    Returns
    -------
    rows : int
        Whole rows made.
    needed : int
        Entries of those rows and, if `capacity` stopped them, of the row that did not fit.
    """
    at, limit, last = np.uintp(0), np.uintp(capacity), np.uintp(stop)
    origin = np.uintp(start)
    count, slot = np.uintp(0), np.uintp(0)
    for row in range(origin, last):
        if ahead:
            fetch_ahead(a, b, row, last)
        if diagonal is not None:
            enter_rows(a, b, row, np.uintp(diagonal) + row)
        extent = row_extent(a, b, row)
        small = is_small(extent)
        if count > np.uintp(0) and (not small or count == np.uintp(BATCH_ROWS) or slot > np.uintp(BATCH_SLOTS)):
            at, fit = flush_batch(work[2], count, c, row - count - origin, at, limit, ring)
            if fit < count:
                return np.int64(row - count - origin + fit), np.int64(at)
            count, slot = np.uintp(0), np.uintp(0)
        if small:
            slot = expand_small(a, b, row, extent, work[2], count, slot, ring, None)
            count += np.uintp(1)
            continue
        at = multiply_row(a, b, row, extent, work, c, at, limit, ring, None, wide)
        if at > limit:
            return np.int64(row - origin), np.int64(at)
        c[2][row - origin] = at
    if count > np.uintp(0):
        at, fit = flush_batch(work[2], count, c, last - count - origin, at, limit, ring)
        return np.int64(last - count - origin + fit), np.int64(at)
    return stop - start, np.int64(at)


@compiled
def slice_stop(a_indptr: Any, a_indices: Any, b_indptr: Any, start: int, stop: int, most: int) -> Any:
    """Return the end of the longest run of rows from `start` with at most `most` products (one row at least).

    Also returns its products.
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
