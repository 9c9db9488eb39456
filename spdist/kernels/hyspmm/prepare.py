"""The CPU stage of hySpMM, compiled by Numba: imported when it is first needed.

A prepared block holds rows of A and the rows of B that their entries ask for: one for each entry, in the order of the
entries (duplicated), or each of them once (distinct). Threads take block after block without the interpreter's lock.
They write prepared blocks to a ring of memory, in the order of the blocks; the caller frees the memory in that order.

Arguments are plain tuples of arrays: Numba's cache on disk would hold the classes of named ones.

References
----------
X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015, algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from spdist.kernels.cpu.numba_compile import compiled, inlined, instruction
from spdist.kernels.cpu.rowwise import lowest_bit
from spdist.kernels.hyspmm import workspace
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

if TYPE_CHECKING:
    from numba.core.base import BaseContext

Integer: TypeAlias = int | np.int64
"""An integer of a caller in Python, or of a compiled caller."""
CsrArrays: TypeAlias = tuple[IndexArray, IndexArray, ValueArray]
"""Offsets, columns and values of a matrix."""
Counted: TypeAlias = tuple[Int64Array, ...]
"""The three arrays of `plan.CountedProducts`."""
Bits: TypeAlias = npt.NDArray[np.uint64]
"""A bit for each row of B, 64 a word."""
Places: TypeAlias = npt.NDArray[np.uint32]
"""For each word of `Bits`, the number of marked rows before it."""

ONE = np.uint64(1)
WORD = np.uint64(64)

TAKEN, NEXT, RESERVED, FREED, CLOSED = range(0, 40, 8)
"""Words of the state that threads share, each on a cache line of its own: number of blocks taken, number of the block
that reserves its room next, bytes of the ring reserved and freed since the start, and whether to stop."""
STATE = 48
"""64-bit words of the state."""
PLACE, B_ROWS, B_ENTRIES, LENGTHS = range(4)
"""Words of a block's report: its place in the ring, rows and entries of its B, then the rows of each group."""
TABLE = 1026
"""Length of the table from products to groups; rows of more products are in the last group."""
RISE = 6
"""Each block may be larger than the one before by one part in this many, up to the budget: all threads begin at once,
and a thread takes several times as long to prepare a block as the GPU to multiply it."""
NAP = 20
"""Microseconds that a thread sleeps while the ring is full."""

sent_offsets = compiled(workspace.sent_offsets)
usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, value=args[0])
    return builder.gep(array.data, [args[1]])


@instruction
def ones(context: BaseContext, bits: types.Type) -> Any:
    """Count the set bits of a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@instruction
def atomic_add(context: BaseContext, words: types.Type, at: types.Type, value: types.Type) -> Any:
    """Add `value` to the word at place `at`, and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(words, types.intp, types.int64), generate


@instruction
def atomic_load(context: BaseContext, words: types.Type, at: types.Type) -> Any:
    """Read the word at place `at`, which another thread writes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature, args), "seq_cst", 8)

    return types.int64(words, types.intp), generate


@instruction
def atomic_store(context: BaseContext, words: types.Type, at: types.Type, value: types.Type) -> Any:
    """Write the word at place `at`, which another thread reads; it sees earlier writes of this thread then."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(context, builder, signature, args), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), generate


@compiled
def survey(indptr: IndexArray, indices: IndexArray) -> Any:
    """Return the least and the greatest column, and whether rows are canonical, in one pass over one entry at least.

    In canonical rows, columns fail to rise only where a row begins. The pass counts such places among all entries, and
    among the first entries of rows: the counts must be equal.

    Parameters
    ----------
    indptr, indices : arrays of int
        If offsets do not start at 0, fall, or do not end at the entries, the result is 0, -1 and False.
    """
    entries, falls = len(indices), np.int64(0)
    if indptr[0] != 0 or indptr[-1] != entries:
        return np.int64(0), np.int64(-1), False
    low = high = indices[0]
    for at in range(1, entries):
        low, high = min(low, indices[at]), max(high, indices[at])
        falls += indices[at] <= indices[at - 1]
    before = indptr[0]
    for row in range(1, len(indptr) - 1):
        start = indptr[row]
        if start < before or start > entries:
            return np.int64(0), np.int64(-1), False
        if before < start < entries:
            falls -= indices[start] <= indices[start - 1]
        before = start
    return np.int64(low), np.int64(high), falls == 0


@compiled
def count_products(
    a: tuple[IndexArray, IndexArray],
    b_indptr: IndexArray,
    start: Integer,
    stop: Integer,
    entry_bytes: Integer,
    product_bytes: Integer,
    ends: Int64Array,
) -> Any:
    """Count the products of rows [start, stop) of A, summed up in ``ends[row + 1]`` from 0 on.

    Parameters
    ----------
    a : (offsets, columns)
    b_indptr : (nrows of B + 1,) int
    start, stop : int
    entry_bytes, product_bytes : int
        Device bytes that an entry of A and a product take.
    ends : (nrows + 1,) int64

    Returns
    -------
    products, most, row : int
        Sum of the products, most bytes that a row takes, and that row; or -1, 0 and a row whose offsets or columns are
        out of range.
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
        total += products
        ends[row + np.uintp(1)] = total
        taken = np.int64(last - first) * entry_bytes + products * product_bytes
        if taken > most:
            most, widest = taken, np.int64(row)
    return total, most, widest


@inlined
def products_before(counted: Counted, row: Integer) -> Any:
    """Return the products of all rows before `row`, given counts by parts, each from 0 on."""
    ends, starts, bases = counted
    if row == 0:
        return np.int64(0)
    part = 0
    while starts[part + 1] < row:
        part += 1
    return ends[row] + bases[part]


@compiled
def cut(
    counted: Counted,
    a_indptr: IndexArray,
    budget: Integer,
    first_budget: Integer,
    most: Integer,
    costs: tuple[int, int, int],
    cuts: Int64Array,
) -> Any:
    """Cut the rows into blocks within bounds on bytes, entries and products, of one row at least; return their number.

    Parameters
    ----------
    counted : Counted
    a_indptr : (nrows + 1,) int64
    budget, first_budget : int
        Most bytes of a block and of the first block; in between, each block may take a little more than the last one.
    most : int
        Most products, and most entries, of a block.
    costs : (int, int, int)
        Bytes of a row, an entry and a product.
    cuts : (nrows + 1,) int64
        Gets the first row of each block, then the number of rows.
    """
    nrows = np.int64(len(a_indptr) - 1)
    start, number = np.int64(0), np.int64(0)
    cuts[0] = 0
    allowed = first_budget
    while start < nrows:
        before = products_before(counted, start)
        low, high = start + 1, nrows
        while low < high:
            middle = (low + high + 1) // 2
            products, entries = products_before(counted, middle) - before, a_indptr[middle] - a_indptr[start]
            taken = (middle - start) * costs[0] + entries * costs[1] + products * costs[2]
            if taken <= allowed and products <= most and entries <= most:
                low = middle
            else:
                high = middle - 1
        start = low
        number += 1
        cuts[number] = start
        allowed = min(allowed + allowed // RISE, budget)
    return number


@compiled
def longest_row(indptr: IndexArray) -> Any:
    """Return the entries of the longest row; 0 if there are no rows."""
    most = np.int64(0)
    for row in range(np.uintp(len(indptr) - 1)):
        most = max(most, np.int64(indptr[row + np.uintp(1)]) - np.int64(indptr[row]))
    return most


@compiled
def first_bad_row(indptr: IndexArray, start: Integer, stop: Integer, nnz: Integer) -> Any:
    """Return the first of rows [start, stop) whose offsets fall or exceed `nnz`; -1 if there is none.

    Parameters
    ----------
    indptr : (nrows + 1,) int
    start, stop, nnz : int
    """
    for row in range(np.uintp(start), np.uintp(stop)):
        last = indptr[row + np.uintp(1)]
        if last < indptr[row] or last > nnz:
            return np.int64(row)
    return np.int64(-1)


@compiled
def copy_offsets(indptr: IndexArray, start: Integer, offsets: IndexArray) -> None:
    """Copy the offsets of rows from `start` on, counted from that row's offset."""
    first = np.uintp(start)
    for row in range(np.uintp(len(offsets))):
        offsets[row] = indptr[first + row] - indptr[first]


@compiled
def mark_rows(a_indices: IndexArray, first: Integer, last: Integer, nrows: Integer, bits: Bits) -> Any:
    """Set the bit of each row of B that the entries [first, last) of A ask for; return the range of words touched.

    If the column of an entry is out of range, return -1 and that entry.

    Parameters
    ----------
    a_indices : (nnz of A,) int
    first, last, nrows : int
        Entries of A; rows of B.
    bits : Bits
    """
    low, high, end = np.uint64(len(bits)), np.uint64(0), np.uint64(nrows)
    for at in range(np.uintp(first), np.uintp(last)):
        k = np.uint64(np.int64(a_indices[at]))
        if k >= end:
            return np.int64(-1), np.int64(at)
        word = k >> np.uint64(6)
        bits[word] |= ONE << (k & np.uint64(63))
        low, high = min(low, word), max(high, word + ONE)
    return np.int64(min(low, high)), np.int64(high)


@compiled
def copy_columns(source: IndexArray, low: Integer, columns: IndexArray) -> Any:
    """Copy the columns of one entry of A or more, less `low`; return the least and the greatest column read."""
    least = greatest = source[0]
    for at in range(np.uintp(len(source))):
        k = source[at]
        least, greatest = min(least, k), max(greatest, k)
        columns[at] = k - low
    return least, greatest


@inlined
def next_run(bits: np.uint64, base: np.uint64) -> Any:
    """Return the first run of set bits of a word: its first row, the row after its last, and the bits after the run."""
    start = lowest_bit(bits)
    filled = bits | ((ONE << start) - ONE)
    if filled + ONE == np.uint64(0):
        return base + start, base + WORD, np.uint64(0)
    stop = lowest_bit(~filled)
    return base + start, base + stop, bits & ~((ONE << stop) - ONE)


@compiled
def number_rows(bits: Bits, places: Places, low: Integer, high: Integer, b_indptr: IndexArray) -> Any:
    """Give the marked rows of B numbers from 0 on; return how many rows are marked, and how many entries they have.

    Parameters
    ----------
    bits : Bits
    places : Places
        Gets the first number of each word of `bits`.
    low, high : int
        Words ``[low:high)`` of `bits` that have marks.
    b_indptr : (nrows of B + 1,) int
        If its offsets fall or exceed the last one, -1 entries are returned.
    """
    rows: Any = np.uint64(0)
    entries, end, sound = np.int64(0), b_indptr[len(b_indptr) - 1], True
    for word in range(np.uintp(low), np.uintp(high)):
        left = bits[word]
        places[word] = rows
        rows += ones(left)
        while left:
            first, last, left = next_run(left, np.uint64(word) * WORD)
            sound &= 0 <= b_indptr[first] <= b_indptr[last] <= end
            entries += b_indptr[last] - b_indptr[first]
    return np.int64(rows), entries if sound else np.int64(-1)


@compiled
def send_rows(a: CsrArrays, counted: Counted, table: npt.NDArray[np.uint8], start: Integer, stop: Integer,
              values: ValueArray, value_at: Integer, pointers: IndexArray, entries_at: Integer, products_at: Integer,
              lengths: Int64Array) -> None:  # fmt: skip
    """Copy the values of rows [start, stop) of A, and write the first entry and the first product of each row.

    Parameters
    ----------
    a, counted, start, stop
        A, its counted products, and its rows to send.
    table : (TABLE,) uint8
        Group of each number of products.
    values, value_at, pointers, entries_at, products_at
        Where values, first entries and first products are written: arrays, and the first place in them of each.
    lengths : int64
        Gets the rows of each group added.
    """
    first, part = a[0][start], 0
    ends, starts, bases = counted
    base = products_before(counted, start)
    before = np.int64(0)
    pointers[entries_at] = 0
    pointers[products_at] = 0
    for row in range(np.uintp(start), np.uintp(stop)):
        at: Any = np.uintp(1) + row - np.uintp(start)
        while starts[part + 1] < np.int64(row) + 1:
            part += 1
        products = ends[row + np.uintp(1)] + bases[part] - base
        pointers[np.uintp(entries_at) + at] = a[0][row + np.uintp(1)] - first
        pointers[np.uintp(products_at) + at] = products
        lengths[table[np.uintp(min(products - before, np.int64(TABLE - 1)))]] += 1
        before = products
    for at in range(np.uintp(a[0][stop] - first)):
        values[np.uintp(value_at) + at] = a[2][np.uintp(first) + at]


@inlined
def copy_rows(
    b: CsrArrays,
    source: Integer,
    stop: Integer,
    columns: IndexArray,
    column_at: Integer,
    values: ValueArray,
    value_at: Integer,
    width: Integer,
) -> None:
    """Copy entries [source, stop) of B, each of `width` values, to the entries from `column_at` and `value_at` on."""
    for j in range(np.uintp(stop - source)):
        columns[np.uintp(column_at) + j] = b[1][np.uintp(source) + j]
    target, first = np.uintp(value_at) * np.uintp(width), np.uintp(source) * np.uintp(width)
    for j in range(np.uintp(stop - source) * np.uintp(width)):
        values[target + j] = b[2][first + j]


@compiled
def send_distinct(a_indices: IndexArray, first: Integer, last: Integer, b: CsrArrays, bits: Bits, places: Places,
                  low: Integer, high: Integer, numbers: IndexArray, number_at: Integer, starts: IndexArray,
                  start_at: Integer, columns: IndexArray, column_at: Integer, values: ValueArray, value_at: Integer,
                  width: Integer) -> None:  # fmt: skip
    """Replace the columns of entries [first, last) of A by row numbers, copy the marked rows of B, clear the marks.

    Parameters
    ----------
    a_indices, first, last, b
        Columns of A, its entries to send, and B.
    bits, places, low, high
        From `mark_rows` and `number_rows`. Rows of B are copied in order.
    numbers, number_at, starts, start_at, columns, column_at, values, value_at
        Where row numbers, starts of rows, columns and values are written: arrays, and the first place in each.
    width : int
        Values of an entry of B, side by side.
    """
    for at in range(np.uintp(last - first)):
        k: Any = np.uint64(a_indices[np.uintp(first) + at])
        word = k >> np.uint64(6)
        number = np.uint64(places[word]) + ones(bits[word] & ((ONE << (k & np.uint64(63))) - ONE))
        numbers[np.uintp(number_at) + at] = number
    row: Any = np.uintp(start_at)
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
            copy_rows(b, source, stop, columns, column_at + out, values, value_at + out, width)
            out += stop - source
    starts[row] = out


@compiled
def send_duplicated(a_indices: IndexArray, first: Integer, last: Integer, b: CsrArrays, starts: IndexArray,
                    start_at: Integer, columns: IndexArray, column_at: Integer, values: ValueArray,
                    value_at: Integer) -> None:  # fmt: skip
    """Copy the row of B of each of the entries [first, last) of A, in order, and write where each copy starts.

    Parameters
    ----------
    a_indices, first, last, b, starts, start_at, columns, column_at, values, value_at
        As for `send_distinct`.
    """
    out: Any = np.int64(0)
    for at in range(np.uintp(first), np.uintp(last)):
        k = np.uintp(a_indices[at])
        source, stop = b[0][k], b[0][k + np.uintp(1)]
        starts[np.uintp(start_at) + at - np.uintp(first)] = out
        copy_rows(b, source, stop, columns, column_at + out, values, value_at + out, 1)
        out += stop - source
    starts[np.uintp(start_at) + np.uintp(last - first)] = out


@compiled
def reserve_room(state: Int64Array, number: Integer, size: Integer, room: Integer) -> Any:
    """Reserve bytes of the ring after all earlier blocks have; return their place, or -1 if the ring is closed.

    Places are counted on without wrapping around; a block that does not fit before the ring's end starts at its
    beginning.

    Parameters
    ----------
    state : (STATE,) int64
    number, size, room : int
        Number of the block, its bytes, and bytes of the ring.
    """
    while atomic_load(state, NEXT) != number:
        if atomic_load(state, CLOSED):
            return np.int64(-1)
        sched_yield()
    used = atomic_load(state, RESERVED)
    begin = used
    if begin % room + size > room:
        begin += room - begin % room
    while True:
        freed = atomic_load(state, FREED)
        if begin + size - freed <= room or freed == used:  # or all is free, with the bytes skipped at the ring's end
            break
        if atomic_load(state, CLOSED):
            return np.int64(-1)
        usleep(NAP)
    atomic_store(state, RESERVED, begin + size)
    atomic_store(state, NEXT, number + 1)
    return begin


@compiled
def prepare_blocks(a: CsrArrays, b: CsrArrays, counted: Counted, cuts: Int64Array, distinct: bool,
                   sizes: tuple[int, int, int], table: npt.NDArray[np.uint8], state: Int64Array, ready: Int64Array,
                   reports: Int64Array, ring: tuple[IndexArray, ...], room: Integer, bits: Bits,
                   places: Places) -> None:  # fmt: skip
    """Prepare blocks until none is left; several threads call this at once.

    Parameters
    ----------
    a, b, counted, cuts
        Operands, A's counted products, and the first row of each block.
    distinct : bool
    sizes : (int, int, int)
        Bytes of a value, a column and an offset.
    table : (TABLE,) uint8
        Group of each number of products.
    state, ready, reports : int64 arrays
        Shared by the threads. A block and its report may be read once ``ready[number]`` is 1.
    ring : tuple of arrays
        Four views of the same `room` bytes: as values, columns, offsets and row numbers.
    room : int
    bits, places
        Scratch memory of this thread; `bits` are zero.
    """
    values, columns, pointers, numbers = ring
    while not atomic_load(state, CLOSED):
        number = atomic_add(state, TAKEN, 1)
        if number >= len(cuts) - 1:
            return
        start, stop = cuts[number], cuts[number + 1]
        first, last = a[0][start], a[0][stop]
        rows, entries = last - first, products_before(counted, stop) - products_before(counted, start)
        low, high = np.int64(0), np.int64(0)
        if distinct:
            low, high = mark_rows(a[1], first, last, len(b[0]) - 1, bits)
            rows, entries = number_rows(bits, places, low, high, b[0])
        offsets = sent_offsets(stop - start, last - first, rows, entries, distinct, sizes[0], sizes[1], sizes[2])
        begin = reserve_room(state, number, offsets[7], room)
        if begin < 0:
            return
        at = begin % room
        value_at, column_at = (at + offsets[1]) // sizes[0], (at + offsets[2]) // sizes[1]
        start_at = (at + offsets[3]) // sizes[2]
        if distinct:
            number_at = (at + offsets[6]) // 4
            send_distinct(a[1], first, last, b, bits, places, low, high, numbers, number_at, pointers, start_at,
                          columns, column_at, values, value_at, 1)  # fmt: skip
        else:
            send_duplicated(a[1], first, last, b, pointers, start_at, columns, column_at, values, value_at)
        entries_at, products_at = (at + offsets[4]) // sizes[2], (at + offsets[5]) // sizes[2]
        send_rows(a, counted, table, start, stop, values, at // sizes[0], pointers, entries_at, products_at,
                  reports[number, LENGTHS:])  # fmt: skip
        reports[number, PLACE] = begin
        reports[number, B_ROWS] = rows
        reports[number, B_ENTRIES] = entries
        atomic_store(ready, number, 1)


@compiled
def wait_ready(ready: Int64Array, number: Integer, tries: Integer) -> bool:
    """Look at most `tries` times whether a block is ready, and return whether it is.

    Parameters
    ----------
    ready : (blocks,) int64
    number, tries : int
    """
    for _ in range(tries):
        if atomic_load(ready, number):
            return True
        sched_yield()
    return False


@compiled
def free_place(state: Int64Array, end: Integer) -> None:
    """Free the ring's bytes before place `end`, counted on without wrapping around."""
    atomic_store(state, FREED, end)


@compiled
def close(state: Int64Array) -> None:
    """Ask the threads to stop."""
    atomic_store(state, CLOSED, 1)


@compiled
def shift(local: IndexArray, start: Integer, stop: Integer, place: Integer, indptr: IndexArray) -> None:
    """Turn the ends of rows [start, stop) inside their block into offsets of C, where the block starts at `place`."""
    for row in range(np.uintp(start), np.uintp(stop)):
        indptr[row + np.uintp(1)] = place + local[row]
