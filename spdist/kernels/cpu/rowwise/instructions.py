"""Instructions that Numba does not generate from loops: vector compares, prefetches, and atomic reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from spdist.kernels.cpu.numba_compile import instruction

LANES = 16
"""int32 keys that one vector instruction compares."""


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
    """Return how many of the `LANES` first int32 keys in ``keys[at:]`` are below `key`."""

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
    """Ask the processor to fetch ``array[at]``, and do not wait for it; places outside of the array do no harm."""

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


@instruction
def fetch_add(context: Any, array: types.Type, at: types.Type, value: types.Type) -> Any:
    """Add to int64 ``array[at]`` in one step, whatever other threads do, and return the number that was there."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        return builder.atomic_rmw("add", builder.gep(array.data, [args[1]]), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@instruction
def load(context: Any, array: types.Type, at: types.Type) -> Any:
    """Return int64 ``array[at]`` as the last thread to `store` there left it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        return builder.load_atomic(builder.gep(array.data, [args[1]]), "seq_cst", 8)

    return types.int64(array, types.intp), generate


@instruction
def store(context: Any, array: types.Type, at: types.Type, value: types.Type) -> Any:
    """Set int64 ``array[at]``; a thread that loads it sees all that this thread wrote before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        builder.store_atomic(args[2], builder.gep(array.data, [args[1]]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), generate


@instruction
def compare_and_swap(context: Any, array: types.Type, at: types.Type, old: types.Type, new: types.Type) -> Any:
    """Set int64 ``array[at]`` to `new` in one step if it is `old`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        builder.cmpxchg(builder.gep(array.data, [args[1]]), args[2], args[3], "seq_cst", "seq_cst")
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64, types.int64), generate


yield_core = types.ExternalFunction("sched_yield", types.int32())
"""Let another thread have the core for a moment."""
