"""The CPU stage of hySpMM, compiled by Numba: `hyspmm` imports it when it is first needed.

A block of rows of A is put together with the rows of B that its entries ask for, in the order of the entries
(duplicated), or each of them once (distinct). No function holds the interpreter's lock, so that threads prepare several
blocks at once.

References
----------
X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from spdist.kernels.rowwise import compiled, inlined, instruction, lowest_bit

ONE = np.uint64(1)
WORD = np.uint64(64)


@instruction
def ones(context: Any, bits: Any) -> Any:
    """Return how many bits of a number are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@compiled
def row_products(a: Any, b_indptr: Any, start: Any, stop: Any, entry_bytes: Any, product_bytes: Any, out: Any) -> Any:
    """Count the products of rows [start, stop) of A, given as offsets and columns.

    Returned are their sum, the most bytes that a row takes, and which row that is; or -1, 0 and a row whose offsets or
    columns do not fit.
    """
    total, most, widest = np.int64(0), np.int64(-1), np.int64(start)
    nrows_b, nnz_a = np.uintp(len(b_indptr) - 1), np.uintp(len(a[1]))
    for row in range(np.uintp(start), np.uintp(stop)):
        first, last = np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])
        if last < first or last > nnz_a:
            return np.int64(-1), np.int64(0), np.int64(row)
        products = np.int64(0)
        for at in range(first, last):
            k = np.uintp(np.int64(a[1][at]))
            if k >= nrows_b or b_indptr[k + np.uintp(1)] < b_indptr[k]:
                return np.int64(-1), np.int64(0), np.int64(row)
            products += b_indptr[k + np.uintp(1)] - b_indptr[k]
        out[row] = products
        total += products
        taken = np.int64(last - first) * entry_bytes + products * product_bytes
        if taken > most:
            most, widest = taken, np.int64(row)
    return total, most, widest


@compiled
def cut(products: Any, a_indptr: Any, start: Any, budget: Any, most: Any, row_bytes: Any, entry_bytes: Any,
        product_bytes: Any) -> Any:  # fmt: skip
    """Return the end of the longest block from `start` on that takes at most `budget` bytes and `most` products.

    The block has one row at least, whatever that takes. Returned with it: its products.
    """
    total = np.int64(0)
    taken = np.int64(0)
    row = np.uintp(start)
    nrows = np.uintp(len(a_indptr) - 1)
    while row < nrows:
        entries = a_indptr[row + np.uintp(1)] - a_indptr[row]
        taken += row_bytes + entries * entry_bytes + products[row] * product_bytes
        full = taken > budget or total + products[row] > most or a_indptr[row + np.uintp(1)] - a_indptr[start] > most
        if full and row > np.uintp(start):
            break
        total += products[row]
        row += np.uintp(1)
    return np.int64(row), total


@compiled
def mark_rows(a_indices: Any, first: Any, last: Any, bits: Any) -> Any:
    """Set the bit of each row of B that the entries [first, last) of A ask for; return the range of words touched."""
    low, high = np.uint64(len(bits)), np.uint64(0)
    for at in range(np.uintp(first), np.uintp(last)):
        k = np.uint64(a_indices[at])
        word = k >> np.uint64(6)
        bits[word] |= ONE << (k & np.uint64(63))
        low, high = min(low, word), max(high, word + ONE)
    return np.int64(min(low, high)), np.int64(high)


@inlined
def next_run(bits: Any, base: Any) -> Any:
    """Return the first and the last row of the first run of set bits of a word, and the bits after it."""
    start = lowest_bit(bits)
    filled = bits | ((ONE << start) - ONE)
    if filled + ONE == np.uint64(0):
        return base + start, base + WORD, np.uint64(0)
    stop = lowest_bit(~filled)
    return base + start, base + stop, bits & ~((ONE << stop) - ONE)


@compiled
def number_rows(bits: Any, places: Any, low: Any, high: Any, b_indptr: Any) -> Any:
    """Give the marked rows of B numbers from 0 on, one for each word of `bits`; return how many, and their entries."""
    rows: Any = np.uint64(0)
    entries: Any = np.int64(0)
    for word in range(np.uintp(low), np.uintp(high)):
        left = bits[word]
        places[word] = rows
        rows += ones(left)
        while left:
            first, last, left = next_run(left, np.uint64(word) * WORD)
            entries += b_indptr[last] - b_indptr[first]
    return np.int64(rows), entries


@compiled
def copy_rows(a_indptr: Any, a_data: Any, products: Any, start: Any, stop: Any, a_values: Any, row_entries: Any,
              row_products: Any) -> None:  # fmt: skip
    """Copy the values of rows [start, stop) of A, and where entries and products of each row start in the block."""
    first = a_indptr[start]
    total = np.int64(0)
    row_entries[0] = 0
    row_products[0] = 0
    for row in range(np.uintp(start), np.uintp(stop)):
        total += products[row]
        row_entries[row - np.uintp(start) + np.uintp(1)] = a_indptr[row + np.uintp(1)] - first
        row_products[row - np.uintp(start) + np.uintp(1)] = total
    for at in range(np.uintp(a_indptr[stop] - first)):
        a_values[at] = a_data[np.uintp(first) + at]


@compiled
def send_distinct(a_indices: Any, first: Any, last: Any, b: Any, bits: Any, places: Any, low: Any, high: Any,
                  a_rows: Any, starts: Any, columns: Any, values: Any) -> None:  # fmt: skip
    """Renumber the columns of entries [first, last) of A, copy the marked rows of B in order, and clear the marks."""
    for at in range(np.uintp(last - first)):
        k = np.uint64(a_indices[np.uintp(first) + at])
        word = k >> np.uint64(6)
        a_rows[at] = np.uint64(places[word]) + ones(bits[word] & ((ONE << (k & np.uint64(63))) - ONE))
    row: Any = np.uintp(0)
    out: Any = np.int64(0)
    for word in range(np.uintp(low), np.uintp(high)):
        left = bits[word]
        bits[word] = np.uint64(0)
        while left:
            begin, end, left = next_run(left, np.uint64(word) * WORD)
            source, stop = b[0][begin], b[0][end]
            for k in range(begin, end):
                starts[row] = out + b[0][k] - source
                row += np.uintp(1)
            for j in range(np.uintp(stop - source)):
                columns[np.uintp(out) + j] = b[1][np.uintp(source) + j]
            for j in range(np.uintp(stop - source)):
                values[np.uintp(out) + j] = b[2][np.uintp(source) + j]
            out += stop - source
    starts[row] = out


@compiled
def send_duplicated(a_indices: Any, first: Any, last: Any, b: Any, starts: Any, columns: Any, values: Any) -> None:
    """Copy the row of B of each of the entries [first, last) of A, in order; the starts are sums of repeat counts."""
    out: Any = np.uintp(0)
    for at in range(np.uintp(first), np.uintp(last)):
        k = np.uintp(a_indices[at])
        source, stop = np.uintp(b[0][k]), np.uintp(b[0][k + np.uintp(1)])
        starts[at - np.uintp(first)] = out
        for j in range(stop - source):
            columns[out + j] = b[1][source + j]
        for j in range(stop - source):
            values[out + j] = b[2][source + j]
        out += stop - source
    starts[np.uintp(last - first)] = out


@compiled
def count_lengths(products: Any, start: Any, stop: Any, limits: Any, counts: Any) -> None:
    """Count the rows in [start, stop) whose products are at most each limit and above the one before; none has 0."""
    for row in range(np.uintp(start), np.uintp(stop)):
        if products[row] > 0:
            group = np.uintp(0)
            while products[row] > limits[group]:
                group += np.uintp(1)
            counts[group] += 1
