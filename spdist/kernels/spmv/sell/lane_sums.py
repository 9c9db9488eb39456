"""Sums over the slots of a SELL chunk in vector registers: LLVM code that Numba does not generate from loops.

The sums of a chunk stay in vector registers, eight lanes in each, while its slots pass from first to last: any C that
is a multiple of eight is read in the order in which it lies, also C = 32, which the GPU reads. If columns have 32 bits,
the elements of x are prefetched: with short rows a processor by itself has few loads in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from spdist.kernels.cpu.numba_compile import instruction
from spdist.matrices.dtypes import IndexArray, ValueArray

GROUP = 8
"""Lanes that are summed at a time."""
STREAM_AHEAD = 512
"""Entries in advance at which values and indices are prefetched."""
COLUMNS_AHEAD = 128
"""Entries in advance at which the elements of x at 32-bit columns are prefetched."""


class SumsOut(NamedTuple):
    """Places to which the sums of a chunk's lanes are written."""

    sums: ValueArray  # (lanes,): takes the sums if `place` is -1
    y: ValueArray  # (nrows,): takes the sums otherwise, from `place` on
    place: int


class EntrySlots(NamedTuple):
    """The slots of a chunk of entries."""

    values: ValueArray  # values of all chunks
    at: np.uintp  # first value of this chunk
    columns: IndexArray  # columns of all chunks, or their offsets from the bases
    to: np.uintp  # first column or offset of this chunk
    bases: IndexArray  # base of each slot; empty if there are no offsets
    base_at: np.uintp  # first base of this chunk


class DiagonalSlots(NamedTuple):
    """The slots of a chunk of diagonals."""

    values: ValueArray  # values of all chunks
    at: np.uintp  # first value of this chunk
    wide: IndexArray  # A diagonal and a mask of lanes for each slot of all chunks
    to: np.uintp  # first diagonal of this chunk
    first: np.uintp  # the chunk's first row


def _load(builder: ir.IRBuilder, array: Any, at: ir.Value, count: int) -> Any:
    """Build the load of `count` elements of a Numba array from a place on."""
    element = array.data.type.pointee
    pointer = builder.gep(array.data, [at])
    if count == 1:
        return builder.load(pointer)
    wide = builder.bitcast(pointer, ir.VectorType(element, count).as_pointer())
    return builder.load(wide, align=max(element.width // 8 if isinstance(element, ir.IntType) else 4, 1))


def _prefetch(builder: ir.IRBuilder, array: Any, at: ir.Value) -> None:
    """Build the prefetch of an element of a Numba array; a place outside the array is harmless."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    pointer = builder.bitcast(builder.gep(array.data, [at]), byte)
    builder.call(prefetch, [pointer, number(0), number(3), number(1)])  # to read, into all caches, data


def _prefetch_stream(builder: ir.IRBuilder, array: Any, at: ir.Value) -> None:
    """Build the prefetch of later elements of an array that is read from its start to its end."""
    _prefetch(builder, array, builder.add(at, ir.IntType(64)(STREAM_AHEAD)))


def _prefetch_x(builder: ir.IRBuilder, index: Any, place: ir.Value, x: Any) -> None:
    """Build the prefetches of elements of x for later columns, of this chunk or the next.

    Columns of 32 bits lie anywhere, and x waits for memory: more loads are then under way at a time than the processor
    finds by itself, because it stops at the end of a short chunk. All elements of `index` are treated as columns.
    """
    word = ir.IntType(64)
    later, last = builder.add(place, word(COLUMNS_AHEAD)), builder.sub(index.nitems, word(GROUP))
    later = builder.select(builder.icmp_signed("<", later, last), later, last)
    for lane in range(GROUP):
        column = _load(builder, index, builder.add(later, word(lane)), 1)
        _prefetch(builder, x, builder.zext(column, word))


def _widened(builder: ir.IRBuilder, vector: ir.Value, element: ir.Type) -> Any:
    """Build the conversion of a vector of floats to another kind of float."""
    wanted = ir.VectorType(element, GROUP)
    return vector if vector.type == wanted else builder.fpext(vector, wanted)


def _opened(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> Any:
    """Return an argument as its parts: the fields of a tuple, the members of an array, a number itself."""
    if isinstance(kind, types.BaseTuple):
        fields: Any = kind
        parts = cgutils.unpack_tuple(builder, value)
        return [_opened(context, builder, field, part) for field, part in zip(fields, parts, strict=True)]
    return context.make_array(kind)(context, builder, value=value) if isinstance(kind, types.Array) else value


def _sum_loop(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value], products: Any) -> Any:
    """Build the sums over slots of products(slot), of `GROUP` lanes each in a vector register, and write them.

    The first three arguments are a tuple as long as there are such groups, a `SumsOut`, and the number of slots.
    """
    opened = [_opened(context, builder, kind, arg) for kind, arg in zip(signature.args, args, strict=True)]
    (sums, y, place), slots = opened[1:3]
    vector = ir.VectorType(sums.data.type.pointee, GROUP)
    totals = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(len(signature.args[0]))]
    with cgutils.for_range(builder, slots) as loop:
        for total, parts in zip(totals, products(opened[3:], loop.index, len(totals)), strict=True):
            value, factor = (_widened(builder, part, vector.element) for part in parts)
            builder.store(builder.fadd(builder.load(total), builder.fmul(value, factor)), total)
    elsewhere = builder.icmp_signed("<", place, ir.IntType(64)(0))
    target = builder.select(elsewhere, sums.data, builder.gep(y.data, [place]))
    for number, total in enumerate(totals):
        pointer = builder.gep(target, [ir.IntType(64)(number * GROUP)])
        builder.store(builder.load(total), builder.bitcast(pointer, vector.as_pointer()), align=4)
    return context.get_dummy_value()


@instruction
def sum_entries(
    typing: Any, groups: types.Type, out: types.Type, slots: types.Type, entries: types.Type, x: types.Type
) -> Any:
    """Write the sums of all lanes over the first slots of a chunk, which hold no padding.

    `groups`: as long as the chunk has groups of `GROUP` lanes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        word = ir.IntType(64)

        def gathered(index: Any, place: ir.Value, low: ir.Value, x: Any) -> Any:
            factor = ir.Constant(ir.VectorType(x.data.type.pointee, GROUP), ir.Undefined)
            for lane in range(GROUP):
                column = _load(builder, index, builder.add(place, word(lane)), 1)
                element = _load(builder, x, builder.add(low, builder.zext(column, word)), 1)
                factor = builder.insert_element(factor, element, ir.IntType(32)(lane))
            return factor

        def products(given: Any, slot: Any, count: int) -> Any:
            (values, at, index, to, bases, base_at), x = given
            base = cgutils.alloca_once_value(builder, word(0))
            with builder.if_then(builder.icmp_signed("!=", bases.nitems, word(0))):
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

    return types.void(groups, out, types.uintp, entries, x), generate


@instruction
def sum_diagonals(
    typing: Any, groups: types.Type, out: types.Type, slots: types.Type, diagonals: types.Type, x: types.Type
) -> Any:
    """Write the sums of all lanes over a chunk of diagonals; elements of x for lanes without an entry are not read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        word = ir.IntType(64)

        def masked(array: Any, place: ir.Value, mask: Any) -> Any:
            vector = ir.VectorType(array.data.type.pointee, GROUP)
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(vector, [byte, ir.IntType(32), mask.type, vector])
            name = f"llvm.masked.load.v{GROUP}{vector.element.intrinsic_name}.p0"
            load = cgutils.get_or_insert_function(builder.module, kind, name)
            pointer = builder.bitcast(builder.gep(array.data, [place]), byte)
            return builder.call(load, [pointer, ir.IntType(32)(4), mask, ir.Constant(vector, None)])

        def products(given: Any, slot: Any, count: int) -> Any:
            (values, at, wide, to, first), x = given
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

    return types.void(groups, out, types.uintp, diagonals, x), generate
