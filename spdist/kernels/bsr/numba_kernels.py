"""Block-sparse multiply on the CPU, compiled by Numba for each block size; imported when it is needed.

The pattern of C is given. For each block row of C, a table has the place in C of each block column, and every product
of two blocks is added there. Block sizes are lengths of tuples, which are part of Numba's types, so that the product of
two blocks compiles to straight code on vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from spdist.kernels.cpu.numba_compile import compiled, instruction
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

if TYPE_CHECKING:
    from numba.core.base import BaseContext

CsrArrays: TypeAlias = tuple[IndexArray, IndexArray, ValueArray]
"""Offsets, block columns, and values as one array."""

IN_REGISTERS = 64
"""Values of a block of B up to which all its rows are loaded to registers before the first is used."""


@instruction
def add_blocks(
    context: BaseContext,
    a: types.Array,
    p: types.Type,
    b: types.Array,
    q: types.Type,
    c: types.Array,
    at: types.Type,
    sizes: Any,
) -> Any:
    """Add the product of the block of A at p and the block of B at q to the block of C at `at`, in the order of k.

    Places count values. Each row of a block is one vector. B and C have one dtype; A has it too, or a less precise one.
    `sizes`: their lengths are r, s and t, for blocks of r x s times s x t.
    """
    r, s, t = (len(size) for size in sizes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [context.make_array(signature.args[n])(context, builder, value=args[n]) for n in (0, 2, 4)]
        factor, row = _VectorRow(context, builder, a.dtype, 1), _VectorRow(context, builder, c.dtype, t)
        a_data, b_data, c_data = (
            builder.bitcast(array.data, kind.scalar.as_pointer())
            for array, kind in zip(arrays, (factor, row, row), strict=True)
        )
        b_rows = [row.load(b_data, args[3], k * t) for k in range(s)] if s * t <= IN_REGISTERS else None
        for i in range(r):
            total = row.load(c_data, args[5], i * t)
            for k in range(s):
                right = b_rows[k] if b_rows else row.load(b_data, args[3], k * t)
                total = row.add(total, row.scale(factor.number(a_data, args[1], i * s + k), right))
            builder.store(total, row.place(c_data, args[5], i * t), align=row.align)
        return context.get_dummy_value()

    return types.void(a, types.uintp, b, types.uintp, c, types.uintp, sizes), generate


class _VectorRow:
    """LLVM code for one row of a block: a vector; of complex values, of real and imaginary parts in turn."""

    def __init__(self, context: Any, builder: Any, dtype: Any, length: int) -> None:
        self.builder, self.parts = builder, 2 if isinstance(dtype, types.Complex) else 1
        self.scalar = context.get_data_type(dtype.underlying_float if self.parts == 2 else dtype)
        self.length = length * self.parts
        self.vector = ir.VectorType(self.scalar, self.length)
        self.align = context.get_abi_sizeof(self.scalar)
        if isinstance(dtype, types.Boolean):
            self.add, self.times = builder.or_, builder.and_
        elif isinstance(self.scalar, (ir.FloatType, ir.DoubleType)):
            self.add, self.times = builder.fadd, builder.fmul
        else:
            self.add, self.times = builder.add, builder.mul

    def place(self, data: Any, at: Any, offset: int) -> Any:
        """Return a pointer to the row that starts `offset` values after `at`."""
        number = self.builder.add(at, ir.IntType(64)(offset))
        scaled = self.builder.mul(number, ir.IntType(64)(self.parts))
        return self.builder.bitcast(self.builder.gep(data, [scaled]), self.vector.as_pointer())

    def load(self, data: Any, at: Any, offset: int) -> Any:
        """Load the row that starts `offset` values after `at`."""
        return self.builder.load(self.place(data, at, offset), align=self.align)

    def number(self, data: Any, at: Any, offset: int) -> list[Any]:
        """Load the parts of the value that lies `offset` values after `at`."""
        start = self.builder.bitcast(self.place(data, at, offset), self.scalar.as_pointer())
        return [self.builder.load(self.builder.gep(start, [ir.IntType(64)(n)])) for n in range(self.parts)]

    def scale(self, number: list[Any], row: Any) -> Any:
        """Return a row times a scalar, which may be less precise."""
        parts = [part if part.type == self.scalar else self.builder.fpext(part, self.scalar) for part in number]
        if self.parts == 1:
            return self.times(self._all_lanes(parts), row)
        swap = ir.Constant(ir.VectorType(ir.IntType(32), self.length), [n ^ 1 for n in range(self.length)])
        swapped = self.builder.shuffle_vector(row, row, swap)
        rotated = self._all_lanes([self.builder.fneg(parts[1]), parts[1]])
        return self.add(self.times(self._all_lanes(parts[:1]), row), self.times(rotated, swapped))

    def _all_lanes(self, values: list[Any]) -> Any:
        """Return a vector that repeats the values in turn."""
        few = ir.Constant(ir.VectorType(self.scalar, len(values)), ir.Undefined)
        for lane, value in enumerate(values):
            few = self.builder.insert_element(few, value, ir.IntType(32)(lane))
        lanes = [n % len(values) for n in range(self.length)]
        return self.builder.shuffle_vector(few, few, ir.Constant(ir.VectorType(ir.IntType(32), self.length), lanes))


@compiled
def multiply_rows(
    a: CsrArrays,
    b: CsrArrays,
    start: int,
    stop: int,
    places: Int64Array,
    c: CsrArrays,
    sizes: tuple[tuple[int, ...], ...],
) -> None:
    """Write the values of block rows ``[start, stop)`` of C; `places` is scratch memory, (block columns of C,).

    `sizes`: their lengths are r, s and t, for blocks of r x s times s x t.
    """
    r, s, t = len(sizes[0]), len(sizes[1]), len(sizes[2])
    for row in range(np.uintp(start), np.uintp(stop)):
        first, last = np.uintp(c[0][row]), np.uintp(c[0][row + np.uintp(1)])
        for block in range(first, last):
            places[np.uintp(c[1][block])] = block
        c[2][first * np.uintp(r * t) : last * np.uintp(r * t)] = 0
        for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
            k = np.uintp(a[1][p])
            for q in range(np.uintp(b[0][k]), np.uintp(b[0][k + np.uintp(1)])):
                at = np.uintp(places[np.uintp(b[1][q])]) * np.uintp(r * t)
                add_blocks(a[2], p * np.uintp(r * s), b[2], q * np.uintp(s * t), c[2], at, sizes)


@compiled
def multiply_columns(
    a: CsrArrays, start: int, stop: int, x: ValueArray, y: ValueArray, sizes: tuple[tuple[int, ...], ...]
) -> None:
    """Write block rows ``[start, stop)`` of a block matrix times a dense one of few columns.

    `x, y`: flat, by rows. `sizes`: their lengths are r and s, for blocks of r x s, and the number of columns.
    """
    r, s, t = len(sizes[0]), len(sizes[1]), len(sizes[2])
    for row in range(np.uintp(start), np.uintp(stop)):
        at = row * np.uintp(r * t)
        y[at : at + np.uintp(r * t)] = 0
        for p in range(np.uintp(a[0][row]), np.uintp(a[0][row + np.uintp(1)])):
            add_blocks(a[2], p * np.uintp(r * s), x, np.uintp(a[1][p]) * np.uintp(s * t), y, at, sizes)
