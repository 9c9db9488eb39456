"""SELL-C-sigma on the CPU, compiled by Numba: the same arrays, the same steps, as on the GPU in `sell.cu`.

The sums of a chunk stay in vector registers, eight lanes in each, while its slots pass from first to last: any C that
is a multiple of eight is read in the order in which it lies, C = 32 too, which the GPU reads. Where columns have 32
bits the elements of x are fetched ahead: a processor by itself has few loads under way where rows are short.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from spdist.errors import MatrixError
from spdist.kernels.cpu.numba_compile import compiled, inlined, instruction
from spdist.kernels.cuda import constants
from spdist.kernels.spmv.sell_format import (
    BLOCK_NARROW,
    BLOCK_WIDE,
    CPU_LONG,
    DIAGONAL,
    FEW_LISTS,
    NARROW,
    WIDE,
    Placed,
    Sell,
    cut_long_rows,
    list_places,
    no_long_rows,
    sort_groups,
)
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, ValueArray, index_dtype

PADDING, NARROW_PADDING, NO_DIAGONAL = constants.SELL_PADDING, constants.SELL_NARROW_PADDING, constants.SELL_NO_DIAGONAL
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
MOST_FULL = constants.SELL_MOST_FULL
BASES, DIAGONALS = constants.SELL_BASES, constants.SELL_DIAGONALS
"""Bases of slots, and pairs of a diagonal and its lanes, are padded to multiples of so many."""
GROUP = 8
"""Lanes that are summed at a time."""
STREAM_AHEAD, COLUMNS_AHEAD = 512, 128
"""Entries by which values and indices, and the elements of x that columns of 32 bits ask for, are fetched ahead."""
MOST_LANES = 32
PARALLEL_ENTRIES = 1 << 19
"""Entries below which a second thread costs more than it gains."""
PART, MOST_PARTS = 1 << 18, 16
"""Weight of a range that a thread takes at a time, at least; ranges, unless there are more threads."""


@inlined
def block_rows(lanes: Any, block: Any) -> Any:
    """Return how many block rows `lanes` rows meet at most."""
    return lanes // block if lanes % block == 0 else lanes // block + 2


@inlined
def is_blocked(block: Any, row: Any, nrows: Any, indptr: Any, indices: Any) -> Any:
    """Whether a row is one of `block` equal ones made of aligned runs of `block` columns."""
    leader = row - row % block
    begin, lead = indptr[row], indptr[leader]
    length = indptr[row + 1] - begin
    if leader + block > nrows or length % block != 0 or indptr[leader + 1] - lead != length:
        return False
    for k in range(0, length, block):
        column = indices[lead + k]
        if column % block != 0:
            return False
        for e in range(block):
            if indices[begin + k + e] != column + e:
                return False
    return True


@inlined
def row_at(position: Any, rows: Any) -> Any:
    """Return the row at a position; `rows` is empty where positions are rows."""
    return np.int64(rows[position]) if len(rows) else position


@inlined
def next_diagonal(count: Any, first: Any, indices: Any, cursor: Any, end: Any) -> Any:
    """Return the least diagonal among those that the lanes come to next."""
    least = NO_DIAGONAL
    for r in range(count):
        if cursor[r] < end[r]:
            least = min(least, indices[cursor[r]] - (first + r))
    return least


@inlined
def start_rows(first: Any, count: Any, rows: Any, indptr: Any, cursor: Any, end: Any) -> None:
    """Set the bounds of each of a chunk's rows."""
    for r in range(count):
        row = row_at(first + r, rows)
        cursor[r], end[r] = indptr[row], indptr[row + 1]


@inlined
def hashed(number: Any, diagonal: Any, mask: Any) -> Any:
    """Return the hash of a list of diagonals with one more pair."""
    pair = np.uint64(mask << 32 | diagonal & 0xFFFFFFFF)
    number = (number ^ pair) * HASH_FACTOR
    return number ^ number >> np.uint64(32)


@inlined
def count_diagonals(first: Any, count: Any, most: Any, indices: Any, cursor: Any, end: Any) -> Any:
    """Return how many diagonals a chunk's rows have, more than `most` if that is so, and the hash of their list."""
    number = np.uint64(0)
    for found in range(most + 1):
        diagonal, mask = next_diagonal(count, first, indices, cursor, end), 0
        if diagonal == NO_DIAGONAL:
            return found, np.int64(number >> np.uint64(1))
        for r in range(count):
            if cursor[r] < end[r] and indices[cursor[r]] - (first + r) == diagonal:
                mask |= 1 << r
                cursor[r] += 1
        number = hashed(number, diagonal, mask)
    return most + 1, np.int64(-1)


@inlined
def round_up(a: Any, b: Any) -> Any:
    """Return the least multiple of b that is not below a."""
    return (a + b - 1) // b * b


@inlined
def base_room(width: Any) -> Any:
    """Return the 16-bit numbers before the offsets of a chunk: its slots' bases, padded."""
    return 2 * round_up(width, BASES)


@inlined
def diagonal_room(width: Any) -> Any:
    """Return the 32-bit numbers of a chunk's diagonals, padded."""
    return 2 * round_up(width, DIAGONALS)


@inlined
def slot_span(slot: Any, unit: Any, threads: Any, count: Any, indices: Any, cursor: Any, end: Any) -> Any:
    """Return the lowest and highest block column of a slot; the lowest is `NO_DIAGONAL` where all rows have ended."""
    low, high = NO_DIAGONAL, -1
    for r in range(count):
        for k in range(cursor[r] + slot * threads * unit, min(cursor[r] + (slot + 1) * threads * unit, end[r]), unit):
            low, high = min(low, indices[k] // unit), max(high, indices[k] // unit)
    return low, high


@inlined
def spans_fit(width: Any, unit: Any, threads: Any, count: Any, indices: Any, cursor: Any, end: Any) -> Any:
    """Whether the columns of each slot lie within 16 bits."""
    for slot in range(width):
        low, high = slot_span(slot, unit, threads, count, indices, cursor, end)
        if high - low >= NARROW_PADDING:
            return False
    return True


@compiled
def analyse(start: Any, stop: Any, shape: Any, allowed: Any, indptr: Any, indices: Any, rows: Any, chunks: Any,
            sizes: Any, cursor: Any, end: Any) -> None:  # fmt: skip
    """Find width and kind of chunks ``[start:stop)``; `shape` is (lanes, block, nrows, bytes of a value)."""
    lanes, block, nrows, value_bytes = shape
    for at in range(start, stop):
        first, code = chunks[at, 2], chunks[at, 3] >> 32
        threads, count = 1 << (code >> 4 & 15), code >> 8 & 255
        width, least, blocked = 0, NO_DIAGONAL, block > 1 and threads == 1
        start_rows(first, count, rows, indptr, cursor, end)
        for r in range(count):
            length = end[r] - cursor[r]
            width, least = max(width, -(-length // threads)), min(least, length // threads)
            if blocked:
                row = row_at(first + r, rows)
                blocked = (first + r) % block == row % block and is_blocked(block, row, nrows, indptr, indices)
        unit = block if blocked else 1
        width, least = width // unit, least // unit if count * threads == lanes else 0
        near = allowed & 1 == 1 and spans_fit(width, unit, threads, count, indices, cursor, end)
        kind = (BLOCK_NARROW if near else BLOCK_WIDE) if blocked else NARROW if near else WIDE
        sizes[3, at] = -1
        if allowed & 2 and threads == 1 and not blocked:
            most = width * lanes * (value_bytes + (2 if near else 4)) // (lanes * value_bytes + 8)
            found, number = count_diagonals(first, count, most, indices, cursor, end)
            if found <= most:
                kind, width, sizes[3, at] = DIAGONAL, found, number
        narrow, places = kind in (NARROW, BLOCK_NARROW), width * (block_rows(lanes, block) if blocked else lanes)
        chunks[at, 2] = first | width << 32
        chunks[at, 3] = (kind | (code & 0xFFF0) | min(least, MOST_FULL) << 16) << 32
        sizes[0, at] = width * lanes * unit
        sizes[1, at] = diagonal_room(width) if kind == DIAGONAL else 0 if narrow else round_up(places, 4)
        sizes[2, at] = base_room(width) + round_up(places, 2 * BASES) if narrow else 0


@inlined
def fill_diagonals(lanes: Any, chunk: Any, indices: Any, data: Any, values: Any, wide: Any, shared: Any, cursor: Any,
                   end: Any) -> Any:  # fmt: skip
    """Write a chunk of pieces of diagonals; a list that is `shared` has been written: return whether it is the same."""
    place, index, first, width, count = chunk
    same = True
    for slot in range(width):
        diagonal, mask = next_diagonal(count, first, indices, cursor, end), 0
        for r in range(lanes):
            has = r < count and cursor[r] < end[r] and indices[cursor[r]] - (first + r) == diagonal
            values[place + slot * lanes + r] = data[cursor[r]] if has else 0
            if has:
                mask |= 1 << r
                cursor[r] += 1
        pair, bits = index + 2 * slot, np.int32(np.uint32(mask))
        if shared:
            same = same and wide[pair] == diagonal and wide[pair + 1] == bits
        else:
            wide[pair], wide[pair + 1] = diagonal, bits
    return same


@inlined
def fill_bases(unit: Any, threads: Any, chunk: Any, indices: Any, bases: Any, cursor: Any, end: Any) -> None:
    """Write the bases of a chunk's slots; `bases` is `narrow` as 32-bit numbers."""
    _, to, _, width, count = chunk
    for slot in range(width):
        bases[to // 2 + slot] = slot_span(slot, unit, threads, count, indices, cursor, end)[0]


@inlined
def fill_entries(lanes: Any, threads: Any, block: Any, chunk: Any, indices: Any, data: Any, values: Any, index: Any,
                 bases: Any, padding: Any, cursor: Any, end: Any) -> None:  # fmt: skip
    """Write a chunk of entries, or of blocks; `bases` is empty where columns are not offsets."""
    place, to, first, width, count = chunk
    places, offsets = lanes if block == 1 else block_rows(lanes, block), to + (base_room(width) if len(bases) else 0)
    for i in range(width * places):
        index[offsets + i] = padding
    for i in range(width * lanes * block):
        values[place + i] = 0
    for r in range(count):
        row_place = r * threads if block == 1 else (first % block + r) // block
        for number in range((end[r] - cursor[r]) // block):
            k, slot, lane = cursor[r] + number * block, number // threads, number % threads
            base = np.int64(bases[to // 2 + slot]) if len(bases) else 0
            index[offsets + slot * places + row_place + lane] = indices[k] // block - base
            for e in range(block):
                values[place + (slot * block + e) * lanes + r * threads + lane] = data[k + e]


@compiled
def fill(start: Any, stop: Any, lanes: Any, block: Any, indptr: Any, indices: Any, data: Any, rows: Any, owners: Any,
         shared: Any, chunks: Any, values: Any, wide: Any, narrow: Any, bases: Any, differ: Any, cursor: Any,
         end: Any) -> None:  # fmt: skip
    """Write values and indices of chunks ``[start:stop)``; `narrow` and `bases` share their memory.

    Of those that own their indices, or of those that do not, `shared`; `owners` is empty where all do. ``differ[0]`` is
    set if a list of diagonals is not that of its owner.
    """
    none = bases[:0]
    for at in range(start, stop):
        owner = np.int64(owners[at]) if len(owners) else at
        if (owner != at) != shared:
            continue
        code = chunks[at, 3] >> 32
        kind, threads, count = code & 15, 1 << (code >> 4 & 15), code >> 8 & 255
        chunk = chunks[at, 0], chunks[at, 1], chunks[at, 2] & 0xFFFFFFFF, chunks[at, 2] >> 32, count
        start_rows(chunk[2], count, rows, indptr, cursor, end)
        unit = block if kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        if kind == DIAGONAL:
            as_wide = chunks[owner, 2] >> 32 == chunk[3]
            if not as_wide or not fill_diagonals(lanes, chunk, indices, data, values, wide, shared, cursor, end):
                differ[0] = 1
        elif kind in (WIDE, BLOCK_WIDE):
            fill_entries(lanes, threads, unit, chunk, indices, data, values, wide, none, PADDING, cursor, end)
        else:
            fill_bases(unit, threads, chunk, indices, bases, cursor, end)
            fill_entries(lanes, threads, unit, chunk, indices, data, values, narrow, bases, NARROW_PADDING, cursor, end)


# -- products ----------------------------------------------------------------------------------------------------------


def _load(builder: Any, array: Any, at: Any, count: int) -> Any:
    """Build the load of `count` elements of a Numba array from a place on."""
    element = array.data.type.pointee
    pointer = builder.gep(array.data, [at])
    if count == 1:
        return builder.load(pointer)
    wide = builder.bitcast(pointer, ir.VectorType(element, count).as_pointer())
    return builder.load(wide, align=max(element.width // 8 if isinstance(element, ir.IntType) else 4, 1))


def _prefetch(builder: Any, array: Any, at: Any) -> None:
    """Build the prefetch of an element of a Numba array; a place outside of it does no harm."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    pointer = builder.bitcast(builder.gep(array.data, [at]), byte)
    builder.call(prefetch, [pointer, number(0), number(3), number(1)])  # to read, into all caches, data


def _prefetch_stream(builder: Any, array: Any, at: Any) -> None:
    """Build the prefetch of what is read later of an array that is read from its start to its end."""
    _prefetch(builder, array, builder.add(at, ir.IntType(64)(STREAM_AHEAD)))


def _prefetch_x(builder: Any, index: Any, place: Any, x: Any) -> None:
    """Build the prefetches of the elements of x that columns further on ask for, of this chunk or of the next.

    Columns of 32 bits lie anywhere, and x waits for memory: more loads are then under way at a time than the processor
    finds by itself, which stops where a short chunk ends. All that `index` holds is taken for columns.
    """
    word = ir.IntType(64)
    later, last = builder.add(place, word(COLUMNS_AHEAD)), builder.sub(index.nitems, word(GROUP))
    later = builder.select(builder.icmp_signed("<", later, last), later, last)
    for lane in range(GROUP):
        column = _load(builder, index, builder.add(later, word(lane)), 1)
        _prefetch(builder, x, builder.zext(column, word))


def _widened(builder: Any, vector: Any, element: Any) -> Any:
    """Build the conversion of a vector of floats to another kind of float."""
    wanted = ir.VectorType(element, GROUP)
    return vector if vector.type == wanted else builder.fpext(vector, wanted)


def _sum_loop(context: Any, builder: Any, signature: Any, args: Any, products: Any) -> Any:
    """Build the sums over slots of products(slot), of `GROUP` lanes each in a vector register, and write them.

    The first five arguments are a tuple as long as there are such groups, `sums`, `y`, a place in y or -1 for `sums`,
    and how many slots there are.
    """
    arrays = [
        context.make_array(kind)(context, builder, value=arg) if isinstance(kind, types.Array) else arg
        for kind, arg in zip(signature.args, args, strict=True)
    ]
    sums, y, place, slots = arrays[1:5]
    vector = ir.VectorType(sums.data.type.pointee, GROUP)
    totals = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(len(signature.args[0]))]
    with cgutils.for_range(builder, slots) as loop:
        for total, parts in zip(totals, products(arrays[5:], loop.index, len(totals)), strict=True):
            value, factor = (_widened(builder, part, vector.element) for part in parts)
            builder.store(builder.fadd(builder.load(total), builder.fmul(value, factor)), total)
    elsewhere = builder.icmp_signed("<", place, ir.IntType(64)(0))
    target = builder.select(elsewhere, sums.data, builder.gep(y.data, [place]))
    for number, total in enumerate(totals):
        pointer = builder.gep(target, [ir.IntType(64)(number * GROUP)])
        builder.store(builder.load(total), builder.bitcast(pointer, vector.as_pointer()), align=4)
    return context.get_dummy_value()


@instruction
def sum_entries(typing: Any, groups: Any, sums: Any, y: Any, place: Any, slots: Any, values: Any, at: Any, index: Any,
                to: Any, bases: Any, base_at: Any, based: Any, x: Any) -> Any:  # fmt: skip
    """Write the sums of all lanes over slots without padding; each column is an offset where `based`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)

        def gathered(index: Any, place: Any, low: Any, x: Any) -> Any:
            factor = ir.Constant(ir.VectorType(x.data.type.pointee, GROUP), ir.Undefined)
            for lane in range(GROUP):
                column = _load(builder, index, builder.add(place, word(lane)), 1)
                element = _load(builder, x, builder.add(low, builder.zext(column, word)), 1)
                factor = builder.insert_element(factor, element, ir.IntType(32)(lane))
            return factor

        def products(given: Any, slot: Any, count: int) -> Any:
            values, at, index, to, bases, base_at, based, x = given
            base = cgutils.alloca_once_value(builder, word(0))
            with builder.if_then(based):
                low = _load(builder, bases, builder.add(base_at, slot), 1)
                builder.store(builder.zext(low, word), base)
            low = builder.load(base)
            for number in range(count):
                ahead = builder.add(builder.mul(slot, word(count * GROUP)), word(number * GROUP))
                value_at, place = builder.add(at, ahead), builder.add(to, ahead)
                _prefetch_stream(builder, values, value_at)
                _prefetch_stream(builder, index, place)
                if index.data.type.pointee.width == 32:
                    _prefetch_x(builder, index, place, x)
                yield _load(builder, values, value_at, GROUP), gathered(index, place, low, x)

        return _sum_loop(context, builder, signature, args, products)

    number = types.uintp
    given = groups, sums, y, types.intp, number, values, number, index, number, bases, number, types.boolean, x
    return types.void(*given), generate


@instruction
def sum_diagonals(typing: Any, groups: Any, sums: Any, y: Any, place: Any, slots: Any, values: Any, at: Any, wide: Any,
                  to: Any, first: Any, x: Any) -> Any:  # fmt: skip
    """Write the sums of all lanes over pieces of diagonals; lanes that have none are not read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)

        def masked(array: Any, place: Any, mask: Any) -> Any:
            vector = ir.VectorType(array.data.type.pointee, GROUP)
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(vector, [byte, ir.IntType(32), mask.type, vector])
            name = f"llvm.masked.load.v{GROUP}{vector.element.intrinsic_name}.p0"
            load = cgutils.get_or_insert_function(builder.module, kind, name)
            pointer = builder.bitcast(builder.gep(array.data, [place]), byte)
            return builder.call(load, [pointer, ir.IntType(32)(4), mask, ir.Constant(vector, None)])

        def products(given: Any, slot: Any, count: int) -> Any:
            values, at, wide, to, first, x = given
            pair = builder.add(to, builder.shl(slot, word(1)))
            column = builder.add(first, builder.sext(_load(builder, wide, pair, 1), word))
            lanes = _load(builder, wide, builder.add(pair, word(1)), 1)
            for number in range(count):
                lane = number * GROUP
                value_at = builder.add(at, builder.add(builder.mul(slot, word(count * GROUP)), word(lane)))
                _prefetch_stream(builder, values, value_at)
                bits = builder.trunc(builder.lshr(lanes, lanes.type(lane)), ir.IntType(GROUP))
                mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), GROUP))
                yield masked(values, value_at, mask), masked(x, builder.add(column, word(lane)), mask)

        return _sum_loop(context, builder, signature, args, products)

    number = types.uintp
    return types.void(groups, sums, y, types.intp, number, values, number, wide, number, number, x), generate


@inlined
def add_slots(total: Any, slots: Any, step: Any, at: Any, to: Any, base_at: Any, bases: Any, padding: Any, values: Any,
              index: Any, x: Any) -> Any:  # fmt: skip
    """Return `total` with a lane's slots added up to its padding; `bases` is empty where columns are no offsets."""
    base = np.uintp(0)
    for _ in range(slots):
        column = index[to]
        if column == padding:
            break
        if len(bases):
            base = np.uintp(bases[base_at])
            base_at += np.uintp(1)
        total += values[at] * x[base + np.uintp(column)]
        at += step
        to += step
    return total


@inlined
def store(first: Any, count: Any, rows: Any, sums: Any, y: Any) -> None:
    """Write the sums of a chunk's lanes, the first of which serves the row at position `first`."""
    for i in range(count):
        y[np.uintp(rows[np.uintp(first + i)]) if len(rows) else np.uintp(first + i)] = sums[i]


@inlined
def entry_chunk(groups: Any, chunk: Any, full: Any, direct: Any, bases: Any, padding: Any, rows: Any, values: Any,
                index: Any, x: Any, y: Any, sums: Any, bases_or_none: Any) -> None:  # fmt: skip
    """Multiply a chunk of entries, a lane a row."""
    place, to, first, width, count = chunk
    lanes, base_at = len(groups) * GROUP, np.uintp(to // 2)
    to += base_room(width) if len(bases_or_none) else 0
    sum_entries(groups, sums, y, direct, np.uintp(full), values, np.uintp(place), index, np.uintp(to), bases, base_at,
                len(bases_or_none) > 0, x)  # fmt: skip
    if direct < 0:
        store(first, count, rows, sums, y)
    if full < width:
        done = full * lanes
        for r in range(count):
            row = np.uintp(row_at(first + r, rows))
            y[row] = add_slots(
                y[row], width - full, np.uintp(lanes), np.uintp(place + done + r), np.uintp(to + done + r),
                base_at + np.uintp(full), bases_or_none, padding, values, index, x,
            )  # fmt: skip


@compiled
def multiply_chunks(start: Any, stop: Any, groups: Any, chunks: Any, values: Any, wide: Any, narrow: Any, bases: Any,
                    rows: Any, x: Any, y: Any, sums: Any) -> None:  # fmt: skip
    """Multiply chunks ``[start:stop)`` of real numbers, a lane a row, none in blocks, with one column of x.

    `groups` is a tuple as long as there are groups of lanes in a chunk, `sums` room for their sums.
    """
    for at in range(start, stop):
        code = chunks[at, 3] >> 32
        kind, count, full = code & 15, code >> 8 & 255, code >> 16
        chunk = chunks[at, 0], chunks[at, 1], chunks[at, 2] & 0xFFFFFFFF, chunks[at, 2] >> 32, count
        direct = -1 if len(rows) or count < len(groups) * GROUP else chunk[2]
        if kind == DIAGONAL:
            sum_diagonals(groups, sums, y, direct, np.uintp(chunk[3]), values, np.uintp(chunk[0]), wide,
                          np.uintp(chunk[1]), np.uintp(chunk[2]), x)  # fmt: skip
            if direct < 0:
                store(chunk[2], count, rows, sums, y)
        elif kind == WIDE:
            entry_chunk(groups, chunk, full, direct, bases, PADDING, rows, values, wide, x, y, sums, bases[:0])
        else:
            entry_chunk(groups, chunk, full, direct, bases, NARROW_PADDING, rows, values, narrow, x, y, sums, bases)


@inlined
def entry_of(kind: Any, block: Any, lanes: Any, lane: Any, slot: Any, chunk: Any, wide: Any, narrow: Any,
             bases: Any) -> Any:  # fmt: skip
    """Return the first column of a lane's slot, -1 if it is padding."""
    _, to, first, width, _ = chunk
    if kind == DIAGONAL:
        has = np.uint32(wide[to + 2 * slot + 1]) >> np.uint32(lane) & np.uint32(1)
        return first + lane + wide[to + 2 * slot] if has else np.int64(-1)
    blocked = kind in (BLOCK_WIDE, BLOCK_NARROW)
    place = slot * block_rows(lanes, block) + (first % block + lane) // block if blocked else slot * lanes + lane
    unit = block if blocked else 1
    if kind in (WIDE, BLOCK_WIDE):
        column = np.int64(wide[to + place])
        return column * unit if column >= 0 else column
    offset = np.int64(narrow[to + base_room(width) + place])
    return np.int64(-1) if offset == NARROW_PADDING else (bases[to // 2 + slot] + offset) * unit


@compiled
def multiply_columns(zero: Any, start: Any, stop: Any, lanes: Any, block: Any, chunks: Any, values: Any, wide: Any,
                     narrow: Any, bases: Any, rows: Any, x: Any, y: Any) -> None:  # fmt: skip
    """Multiply chunks ``[start:stop)`` of any kind with all columns of a two-dimensional x; y is zero."""
    for at in range(start, stop):
        code = chunks[at, 3] >> 32
        kind, log_threads, count = code & 15, code >> 4 & 15, code >> 8 & 255
        chunk = chunks[at, 0], chunks[at, 1], chunks[at, 2] & 0xFFFFFFFF, chunks[at, 2] >> 32, count
        unit = block if kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        for lane in range(count << log_threads):
            row = row_at(chunk[2] + (lane >> log_threads), rows)
            for slot in range(chunk[3]):
                column = entry_of(kind, block, lanes, lane, slot, chunk, wide, narrow, bases)
                if column < 0:
                    continue
                for e in range(unit):
                    value = values[chunk[0] + (slot * unit + e) * lanes + lane]
                    for k in range(x.shape[1]):
                        y[row, k] += value * x[column + e, k]


@compiled
def multiply_pieces(start: Any, stop: Any, pieces: Any, indices: Any, data: Any, bases: Any, x: Any, partial: Any,
                    sums: Any) -> None:  # fmt: skip
    """Sum pieces ``[start:stop)`` of long rows of real numbers, `GROUP` entries at a time."""
    for piece in range(start, stop):
        begin, end = pieces[piece], pieces[piece + 1]
        slots = (end - begin) // GROUP
        sum_entries((0,), sums, partial, -1, np.uintp(slots), data, np.uintp(begin), indices, np.uintp(begin), bases,
                    np.uintp(0), False, x)  # fmt: skip
        total = sums[0]
        for lane in range(1, GROUP):
            total += sums[lane]
        for at in range(begin + slots * GROUP, end):
            total += data[at] * x[indices[at]]
        partial[piece] = total


@compiled
def multiply_piece_columns(zero: Any, start: Any, stop: Any, pieces: Any, indices: Any, data: Any, x: Any,
                           partial: Any) -> None:  # fmt: skip
    """Sum pieces ``[start:stop)`` of long rows into ``partial[piece, column]``."""
    for piece in range(start, stop):
        begin, end = pieces[piece], pieces[piece + 1]
        for k in range(x.shape[1]):
            a = b = c = d = zero
            whole = begin + (end - begin) // 4 * 4
            for at in range(begin, whole, 4):
                a += data[at] * x[indices[at], k]
                b += data[at + 1] * x[indices[at + 1], k]
                c += data[at + 2] * x[indices[at + 2], k]
                d += data[at + 3] * x[indices[at + 3], k]
            for at in range(whole, end):
                a += data[at] * x[indices[at], k]
            partial[piece, k] = (a + b) + (c + d)


@compiled
def list_entries(lanes: Any, block: Any, chunks: Any, values: Any, wide: Any, narrow: Any, bases: Any, rows: Any,
                 out_rows: Any, out_columns: Any, out_values: Any) -> Any:  # fmt: skip
    """Write all entries of all chunks as (row, column, value); return how many there are."""
    found = 0
    for at in range(len(chunks)):
        code = chunks[at, 3] >> 32
        kind, log_threads, count = code & 15, code >> 4 & 15, code >> 8 & 255
        chunk = chunks[at, 0], chunks[at, 1], chunks[at, 2] & 0xFFFFFFFF, chunks[at, 2] >> 32, count
        unit = block if kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        for lane in range(count << log_threads):
            for slot in range(chunk[3]):
                column = entry_of(kind, block, lanes, lane, slot, chunk, wide, narrow, bases)
                for e in range(unit if column >= 0 else 0):
                    out_rows[found] = row_at(chunk[2] + (lane >> log_threads), rows)
                    out_columns[found] = column + e
                    out_values[found] = values[chunk[0] + (slot * unit + e) * lanes + lane]
                    found += 1
    return found


# -- what calls them ---------------------------------------------------------------------------------------------------


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="spdist-sell")


def in_parallel(work: Callable[[int, int], None], ends: IndexArray, threads: int) -> None:
    """Call ``work(start, stop)`` for ranges of about equal weight; ``ends[i]`` is the weight of items up to i.

    There are more ranges than threads where they are not too small, and threads take them as they come: on a machine
    that others use too one core may do twice the work of another. The caller takes part, and does not wait for a thread
    that has not begun when nothing is left.
    """
    count = len(ends)
    if threads <= 1 or count < 2 * threads:
        if count:
            work(0, count)
        return
    parts = max(threads, min(MOST_PARTS, int(ends[-1]) // PART, count))
    cuts = (bisect.bisect_left(ends, ends[-1] * part / parts) for part in range(1, parts))
    left = deque(itertools.pairwise((0, *cuts, count)))
    others = [_pool(threads).submit(_share, i, work, left) for i in range(1, threads)]
    _share(0, work, left)
    for other in others:
        if not other.cancel():
            other.result()


def _share(number: int, work: Callable[[int, int], None], left: deque[tuple[int, int]]) -> None:
    """Call ``work(start, stop)`` for ranges until none is left, beginning on a core of this thread's own.

    Threads that sleep between products were seen to wake on one core and share it for milliseconds, the others idle.
    The thread moves to its core and is free again at once, for the system to move where that is busy.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(cores)[(os.getpid() + number) % len(cores)]})
        os.sched_setaffinity(0, cores)
    while left:
        try:
            start, stop = left.popleft()
        except IndexError:  # another thread was quicker
            return
        if start < stop:
            work(start, stop)


class Builder:
    """The steps of `sell.build` for a matrix on the host."""

    def __init__(self, a: CSR, lanes: int, height: int, threads: int) -> None:
        if lanes > MOST_LANES:
            raise MatrixError(f"a chunk has up to {MOST_LANES} lanes, not {lanes}")
        self.a, self.lanes, self.height, self.threads = a, lanes, height or lanes, threads
        self.lengths = np.diff(a.indptr)

    def find_block(self) -> int:
        """Return 1: the CPU gains nothing by dense blocks."""
        return 1

    def has_long_rows(self) -> bool:
        """Whether rows stay in CSR."""
        return bool((self.lengths > CPU_LONG).any())

    def place(self, sigma: int | Literal["auto"], block: int, entry_bytes: int) -> Placed:
        """Choose sigma where it is "auto", sort the rows in groups of `block`, and cut them into chunks."""
        kept = np.flatnonzero(self.lengths <= CPU_LONG) if self.has_long_rows() else None
        rest = self.lengths if kept is None else self.lengths[kept]
        sigma, order = sort_groups(rest, sigma, self.height, block, entry_bytes)
        rows = order if kept is None else kept if order is None else kept[order]
        first = np.arange(0, len(rest), self.height)
        chunks = np.zeros((len(first), 4), np.int64)
        log_threads = (self.lanes // self.height).bit_length() - 1
        chunks[:, 2] = first
        chunks[:, 3] = (np.minimum(len(rest) - first, self.height) << 8 | log_threads << 4) << 32
        return Placed(chunks, None if rows is None else rows.astype(np.int32), sigma)

    def long_rows(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Return the rows that stay in CSR, cut into pieces."""
        if not self.has_long_rows():
            return no_long_rows(np, dtype)
        rows = np.flatnonzero(self.lengths > CPU_LONG)
        counts = self.lengths[rows].astype(np.int64)
        indptr, pieces, row_pieces = cut_long_rows(counts, self.a.nnz)
        entry = np.arange(indptr[-1]) + np.repeat(self.a.indptr[rows] - indptr[:-1], counts)
        indices, data = self.a.indices[entry].astype(np.int32), self.a.data[entry].astype(dtype)
        return rows.astype(np.int32), indptr, indices, data, pieces, row_pieces

    def fill(self, placed: Placed, block: int, dtype: np.dtype[Any], allowed: int) -> tuple[Any, ...]:
        """Find each chunk's width and kind, and where its arrays are; return values and indices of all chunks."""
        sizes = self._analyse(placed.chunks, placed.rows, block, dtype, allowed)
        owners, kept = share_lists(sizes)
        filled: tuple[Any, ...] | None = self._fill(placed.chunks, placed.rows, block, dtype, kept, owners)
        return filled or self._fill(placed.chunks, placed.rows, block, dtype, sizes, None)  # two lists of one hash

    def _analyse(self, chunks: Any, rows: Any, block: int, dtype: np.dtype[Any], allowed: int) -> Any:
        """Set width and kind of each chunk; return the sizes of its arrays, and the hash of its diagonals."""
        sizes = np.empty((4, len(chunks)), np.int64)
        shape = self.lanes, block, self.a.nrows, dtype.itemsize

        def work(start: int, stop: int) -> None:
            cursor, end = np.empty((2, MOST_LANES), np.int64)
            analyse(
                start, stop, shape, allowed, self.a.indptr, self.a.indices, _or_empty(rows), chunks, sizes, cursor, end
            )

        in_parallel(work, np.arange(1, len(chunks) + 1), self.threads)
        return sizes

    def _fill(self, chunks: Any, rows: Any, block: int, dtype: np.dtype[Any], sizes: Any, owners: Any) -> Any:
        """Place each chunk's arrays behind those of the chunks before, and write them.

        None if a chunk's diagonals are not those of its owner.
        """
        ends = np.cumsum(sizes[:3], axis=1)
        totals = ends[:, -1].tolist() if len(chunks) else (0, 0, 0)
        narrow = np.isin(chunks[:, 3] >> 32 & 15, (NARROW, BLOCK_NARROW))
        places = ends - sizes[:3]
        chunks[:, 0] = places[0]
        chunks[:, 1] = np.where(narrow, places[2], places[1] if owners is None else places[1, owners])
        filled = np.empty(totals[0], dtype), np.zeros(totals[1], np.int32), np.zeros(totals[2], np.uint16)
        bases, differ = filled[2].view(np.int32), np.zeros(1, np.int64)

        def work(shared: bool, start: int, stop: int) -> None:
            cursor, end = np.empty((2, MOST_LANES), np.int64)
            fill(start, stop, self.lanes, block, self.a.indptr, self.a.indices, self.a.data, _or_empty(rows),
                 _or_empty(owners), shared, chunks, filled[0], filled[1], filled[2], bases, differ, cursor,
                 end)  # fmt: skip

        for shared in (False,) if owners is None else (False, True):
            in_parallel(functools.partial(work, shared), chunks[:, 0] + 1, self.threads)
        return None if differ[0] else filled


def share_lists(sizes: Any) -> tuple[Any, Any]:
    """Find chunks whose lists of diagonals are equal, as far as hashes tell: `fill` compares the lists.

    Parameters
    ----------
    sizes : (4, nchunks) int64
        Elements of each chunk's values, of its indices in `wide` and in `narrow`; the hash of its list, -1 for none.

    Returns
    -------
    owners : (nchunks,) int32 or None
        The first chunk with the list of each; itself where it has none, or where another list's hash took its place.
        None where few chunks have lists.
    sizes : (4, nchunks) int64
        The same with nothing in `wide` for those whose list is another's.
    """
    nchunks, hashes = sizes.shape[1], sizes[3]
    own, listed = np.arange(nchunks, dtype=np.int32), hashes >= 0
    if np.count_nonzero(listed) <= FEW_LISTS * nchunks:
        return None, sizes
    places = hashes & (list_places(nchunks) - 1)
    first = np.full(list_places(nchunks), nchunks, np.int32)
    np.minimum.at(first, places[listed], own[listed])
    found = np.where(listed, first[places], own)
    owners = np.where(hashes[found] == hashes, found, own)
    kept = sizes.copy()
    kept[1] *= owners == own
    return owners, kept


def _two(x: ValueArray) -> ValueArray:
    return x[:, None] if x.ndim == 1 else x


def _or_empty(array: Any) -> Any:
    return np.empty(0, np.int32) if array is None else array


def multiply(a: Sell, x: ValueArray, out: Any, threads: int) -> ValueArray:
    """Return ``a @ x``; see `sell.multiply`."""
    y = np.zeros((a.shape[0], *x.shape[1:]), x.dtype) if out is None else out
    threads = threads if a.nnz * (x.shape[1] if x.ndim == 2 else 1) >= PARALLEL_ENTRIES else 1
    zero = x.dtype.type(0)
    rows, bases = _or_empty(a.rows), a.narrow.view(np.int32)
    plain = x.ndim == 1 and x.dtype.kind == "f" and a.lanes % GROUP == 0 and a.block == 1 and y.flags.c_contiguous
    if plain and not a.shares_rows:

        def work(start: int, stop: int) -> None:
            sums, groups = np.empty(a.lanes, x.dtype), (0,) * (a.lanes // GROUP)
            multiply_chunks(start, stop, groups, a.chunks, a.values, a.wide, a.narrow, bases, rows, x, y, sums)
    else:
        y[...] = 0

        def work(start: int, stop: int) -> None:
            multiply_columns(zero, start, stop, a.lanes, a.block, a.chunks, a.values, a.wide, a.narrow, bases, rows,
                             _two(x), _two(y))  # fmt: skip

    in_parallel(work, a.chunks[:, 0], threads)
    if len(a.long_rows):
        _multiply_long(a, x, y, zero, threads)
    return y


def _multiply_long(a: Sell, x: ValueArray, y: ValueArray, zero: Any, threads: int) -> None:
    partial = np.empty((len(a.pieces) - 1, *x.shape[1:]), x.dtype)
    if x.ndim == 1 and x.dtype.kind == "f":

        def work(start: int, stop: int) -> None:
            multiply_pieces(start, stop, a.pieces, a.long_indices, a.long_data, a.long_indices[:0], x, partial,
                            np.empty(GROUP, x.dtype))  # fmt: skip
    else:

        def work(start: int, stop: int) -> None:
            multiply_piece_columns(zero, start, stop, a.pieces, a.long_indices, a.long_data, _two(x), _two(partial))

    in_parallel(work, a.pieces[1:], threads)
    y[a.long_rows] = np.add.reduceat(partial, a.row_pieces[:-1], axis=0)


def to_csr(a: Sell) -> CSR:
    """Return the matrix as canonical CSR; see `sell.to_csr`."""
    import scipy.sparse as sp

    rows, columns = np.empty((2, len(a.values)), np.int64)
    data = np.empty(len(a.values), a.dtype)
    n = list_entries(a.lanes, a.block, a.chunks, a.values, a.wide, a.narrow, a.narrow.view(np.int32),
                     _or_empty(a.rows), rows, columns, data)  # fmt: skip
    rows = np.append(rows[:n], np.repeat(a.long_rows, np.diff(a.long_indptr)))
    columns, data = np.append(columns[:n], a.long_indices), np.append(data[:n], a.long_data)
    m = sp.coo_matrix((data, (rows, columns)), shape=a.shape).tocsr()
    m.sum_duplicates()
    return CSR(m.indptr.astype(np.int64), m.indices.astype(index_dtype(a.shape[1])), m.data, a.shape)
