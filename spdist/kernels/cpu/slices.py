"""Rows of C made by several threads in slices, which are placed in C without a lock (CPU, Numba).

Rows are cut into slices of about equal numbers of products. A thread takes the next slice from an atomic counter, makes
it in scratch memory that fits its cache, and publishes how many entries it has. The frontier is the first slice that is
not counted: slices before it have a known position in C, and their makers copy them there. A thread whose slice has to
wait makes the next one, as long as its scratch memory has room. A slice that may be larger than the scratch memory is
made in place, once the frontier has come to it.

Rows are made by the same code in the same order of products for any number of threads, so that C has the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cpu.arrays import ProductArguments, RowCuts, RowsOut, Workspace
from spdist.kernels.cpu.fused import fused_rows
from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.kernels.cpu.rowwise.instructions import compare_and_swap, fetch_add, load, store, yield_core
from spdist.kernels.cpu.rowwise.multiply import multiply_rows
from spdist.kernels.cpu.rowwise.unsorted import multiply_unsorted_rows
from spdist.matrices.dtypes import IndexArray, Int64Array

LINE = 8
"""int64 numbers of a cache line: counters that several threads write lie on lines of their own."""
NEXT, FRONTIER, FULL, ROWS, NEEDED = (LINE * i for i in range(5))
"""Counters of a queue: the next slice to take, the first one that is not counted, whether C is full or the caller
stopped, rows that fit in a full C, and the entries of those rows and of the first that did not fit."""
COUNTERS = 5 * LINE
FIRST, LAST, AT = range(3)
"""State of a thread: its waiting slices are ``waiting[:, FIRST:LAST]``, its scratch memory is free from AT on."""
MOST_WAITING = 256
"""Most slices of a thread that wait to be placed."""
TURNS = 512
"""Slices after which a kernel returns to Python, where Ctrl-C is noticed and threads wait for each other."""


class SliceQueue(NamedTuple):
    """The slices of a product, shared by all threads."""

    rows: Int64Array  # (slices + 1,): first row of each slice, and the row after the last slice
    products: Int64Array  # (slices,)
    counts: Int64Array  # (slices,): entries of each slice; -1 until they are known
    offsets: Int64Array  # (slices + 1,): entries of C before each slice, known up to the frontier
    counters: Int64Array  # (COUNTERS,)
    longest: int  # bound on the entries of a row of C


class SliceBuffers(NamedTuple):
    """What one thread makes slices with."""

    work: Workspace
    row: RowsOut  # room for one row before it is cut
    scratch: RowsOut  # room for slices that wait to be placed; its ends are not used
    waiting: Int64Array
    """(2, MOST_WAITING): numbers of the slices that wait, and where in the scratch memory each begins."""
    state: Int64Array  # (3,): FIRST, LAST and AT


def new_queue(rows: Int64Array, products: Int64Array, longest: int) -> SliceQueue:
    """Return a queue of slices that nobody has taken; `longest` bounds the entries of a row of C.

    `rows`: (slices + 1,): first row of each slice, and the row after the last slice.
    """
    n = len(products)
    counters = np.zeros(COUNTERS, np.int64)
    return SliceQueue(rows, products, np.full(n, -1, np.int64), np.zeros(n + 1, np.int64), counters, longest)


@compiled
def cut_slices(
    a_indptr: Int64Array,
    a_indices: IndexArray,
    b_indptr: Int64Array,
    start: int,
    stop: int,
    most: int,
    cuts: Int64Array,
) -> Any:  # fmt: skip
    """Cut rows ``[start, stop)`` into slices of at most `most` products, or of one row; return the most of a row.

    `cuts`: (2, stop - start): becomes the first row of each slice, and its products.
    """
    slices, begin, total, longest = 0, start, np.int64(0), np.int64(0)
    for row in range(start, stop):
        n = np.int64(0)
        for p in range(np.uintp(a_indptr[row]), np.uintp(a_indptr[row + 1])):
            k = np.uintp(a_indices[p])
            n += b_indptr[k + np.uintp(1)] - b_indptr[k]
        if row > begin and total + n > most:
            cuts[0, slices], cuts[1, slices] = begin, total
            slices, begin, total = slices + 1, row, np.int64(0)
        total += n
        longest = max(longest, n)
    if begin < stop:
        cuts[0, slices], cuts[1, slices] = begin, total
        slices += 1
    return slices, longest


@part
def publish(queue: SliceQueue, i: int, count: int) -> None:
    """Say how many entries slice `i` has, and move the frontier over all slices that are counted.

    Several threads may compute the offset of one slice: all write the same number.
    """
    store(queue.counts, i, count)
    while True:
        frontier = load(queue.counters, FRONTIER)
        if frontier == len(queue.counts):
            return
        entries = load(queue.counts, frontier)
        if entries < 0:
            return
        store(queue.offsets, frontier + 1, load(queue.offsets, frontier) + entries)
        compare_and_swap(queue.counters, FRONTIER, frontier, frontier + 1)


@part
def note_full(queue: SliceQueue, rows: int, needed: int) -> None:
    """Say that C is full after `rows` rows; these and the next one have `needed` entries."""
    store(queue.counters, ROWS, rows)
    store(queue.counters, NEEDED, needed)
    store(queue.counters, FULL, 1)


@part
def place(queue: SliceQueue, i: int, scratch: RowsOut, at: int, c: RowsOut) -> None:
    """Copy slice `i`, which is before the frontier, from place `at` of the scratch memory to C, as far as it fits.

    `c.ends`: in: offsets within the slice; out: offsets in C.
    """
    offset, n = load(queue.offsets, i), load(queue.counts, i)
    first, rows = queue.rows[i] - queue.rows[0], queue.rows[i + 1] - queue.rows[i]
    room = np.int64(c.capacity) - offset
    if room < 0:
        return
    if n > room:
        rows = 0
        while c.ends[first + rows] <= room:
            rows += 1
        note_full(queue, first + rows, offset + c.ends[first + rows])
        n = c.ends[first + rows - 1] if rows else 0
    to, begin = np.uintp(offset), np.uintp(at)
    for t in range(np.uintp(n)):
        c.indices[to + t] = scratch.indices[begin + t]
    for t in range(np.uintp(n)):
        c.data[to + t] = scratch.data[begin + t]
    for row in range(np.uintp(first), np.uintp(first + rows)):
        c.ends[row] += offset


@part
def place_counted(queue: SliceQueue, buffers: SliceBuffers, c: RowsOut) -> None:
    """Place the waiting slices whose position is known."""
    waiting, state = buffers.waiting, buffers.state
    frontier = load(queue.counters, FRONTIER)
    while state[FIRST] < state[LAST] and waiting[0, state[FIRST]] < frontier:
        place(queue, waiting[0, state[FIRST]], buffers.scratch, waiting[1, state[FIRST]], c)
        state[FIRST] += 1
    if state[FIRST] == state[LAST]:
        state[FIRST] = state[LAST] = state[AT] = 0


@part
def place_all(queue: SliceQueue, buffers: SliceBuffers, c: RowsOut) -> None:
    """Place all waiting slices, as soon as the other threads have counted the slices before them."""
    place_counted(queue, buffers, c)
    while buffers.state[LAST] > 0:
        yield_core()
        place_counted(queue, buffers, c)


@part
def room_for(queue: SliceQueue, i: int, buffers: SliceBuffers, c: RowsOut) -> Any:
    """Return where to make slice `i`, and whether this is its place in C; makes room for it first."""
    first, last = queue.rows[i] - queue.rows[0], queue.rows[i + 1] - queue.rows[0]
    ends, state, scratch = c.ends[first:last], buffers.state, buffers.scratch
    bound, longest = queue.products[i], max(queue.longest, 1)
    if last - first < bound // longest:  # a product of both could overflow
        bound = (last - first) * longest
    if bound > np.int64(scratch.capacity) - state[AT] or state[LAST] == MOST_WAITING:
        place_all(queue, buffers, c)
    at = state[AT]
    if bound <= np.int64(scratch.capacity) - at:
        return RowsOut(scratch.indices[at:], scratch.data[at:], ends, scratch.capacity - np.uint64(at)), False
    while load(queue.counters, FRONTIER) < i:
        yield_core()
    offset = min(load(queue.offsets, i), np.int64(c.capacity))
    return RowsOut(c.indices[offset:], c.data[offset:], ends, c.capacity - np.uint64(offset)), True


@compiled
def multiply_slices(
    product: ProductArguments, cuts: RowCuts | None, queue: SliceQueue, buffers: SliceBuffers, c: RowsOut,
    diagonal: int | None, unsorted: bool | None,
) -> Any:  # fmt: skip
    """Make up to `TURNS` slices and place them; return whether there may be more.

    `cuts`: None makes whole rows; the other way is then left out of the compiled code. `c`: room for all rows; the
    kernels of all threads write to it. `diagonal`: as for `multiply_rows`; `cuts` has a diagonal of its own.
    `unsorted`: whether whole rows may come in any order of columns; None leaves that code out.
    """
    for _ in range(TURNS):
        i = fetch_add(queue.counters, NEXT, 1) if load(queue.counters, FULL) == 0 else len(queue.counts)
        if i >= len(queue.counts):
            break
        start, stop = queue.rows[i], queue.rows[i + 1]
        out, in_place = room_for(queue, i, buffers, c)
        if unsorted is not None:
            rows, needed = multiply_unsorted_rows(product, start, stop, buffers.work, out, diagonal)
        elif cuts is None:
            rows, needed = multiply_rows(product, start, stop, buffers.work, out, diagonal)
        else:
            rows, needed = fused_rows(product, cuts, start, stop, buffers.work, buffers.row, out)
        if in_place:
            finish_in_place(queue, i, rows, needed, c)
            publish(queue, i, needed)
            continue
        state = buffers.state
        buffers.waiting[0, state[LAST]], buffers.waiting[1, state[LAST]] = i, state[AT]
        state[LAST] += 1
        state[AT] += needed
        publish(queue, i, needed)
        place_counted(queue, buffers, c)
    place_all(queue, buffers, c)
    return load(queue.counters, FULL) == 0 and load(queue.counters, NEXT) < len(queue.counts)


@part
def finish_in_place(queue: SliceQueue, i: int, rows: int, needed: int, c: RowsOut) -> None:
    """Count the ends of a slice that was made in its place from C's first entry on, and say if it filled C.

    `needed`: entries of the slice's `rows` rows that fit and of the first that did not.
    """
    offset, first = load(queue.offsets, i), queue.rows[i] - queue.rows[0]
    if offset > np.int64(c.capacity):
        return  # C is full before this slice
    for row in range(first, first + rows):
        c.ends[row] += offset
    if rows < queue.rows[i + 1] - queue.rows[i]:
        note_full(queue, first + rows, offset + needed)
