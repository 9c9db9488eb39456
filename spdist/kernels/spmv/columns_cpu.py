"""Products of a CSR with a dense matrix of several columns on the CPU, compiled by Numba.

A row's sums for up to 32 columns stay in vector registers while its entries pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from spdist.kernels.cpu.numba_compile import compiled, instruction
from spdist.kernels.spmv.parallel import in_parallel, threads_for
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, ValueArray

TILES = 32, 8, 4, 2, 1
"""Columns that are summed at a time: a kernel's loop for each."""
SUMS_AT_ONCE = 8
"""Columns that a thread sums about as quickly as one."""


class Factors(NamedTuple):
    """A CSR, and the columns that it is multiplied with."""

    indptr: IndexArray
    indices: IndexArray
    data: ValueArray
    x: ValueArray  # (ncols * columns,)
    columns: int
    y: ValueArray  # (nrows * columns,)


@instruction
def sum_tile(typing: Any, tile: types.Type, factors: types.Type, row: types.Type, column: types.Type) -> Any:
    """Write a row's sums for the columns from `column` on, as many as `tile`, a tuple, is long."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
        fields: Any = signature.args[1]
        parts = cgutils.unpack_tuple(builder, args[1])
        indptr, indices, data, x, columns, y = (
            context.make_array(kind)(context, builder, value=part) if isinstance(kind, types.Array) else part
            for kind, part in zip(fields, parts, strict=True)
        )
        word, (row, column) = ir.IntType(64), args[2:]
        element, count = x.data.type.pointee, len(signature.args[0])
        vector, size = ir.VectorType(element, count), context.get_abi_sizeof(x.data.type.pointee)
        none, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), count), None)

        def load(array: Any, at: ir.Value) -> Any:
            found = builder.load(builder.gep(array.data, [at]))
            is_narrow = isinstance(found.type, ir.IntType) and found.type.width < word.width
            return builder.zext(found, word) if is_narrow else found

        def tile_of(array: Any, line: ir.Value) -> Any:
            at = builder.add(builder.mul(line, columns), column)
            return builder.bitcast(builder.gep(array.data, [at]), vector.as_pointer())

        total = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
        builder.store(ir.Constant(vector, None), total)
        begin, end = load(indptr, row), load(indptr, builder.add(row, word(1)))
        with cgutils.for_range_slice(builder, begin, end, word(1)) as (at, _):
            value = load(data, at)
            value = value if value.type == element else builder.fpext(value, element)
            factor = builder.load(tile_of(x, load(indices, at)), align=size)
            same = builder.shuffle_vector(builder.insert_element(none, value, ir.IntType(32)(0)), none, first)
            builder.store(builder.fadd(builder.load(total), builder.fmul(same, factor)), total)
        builder.store(builder.load(total), tile_of(y, row), align=size)
        return context.get_dummy_value()

    return types.void(tile, factors, types.intp, types.intp), generate


@compiled
def multiply_rows(start: int, stop: int, tiles: Any, factors: Factors) -> None:
    """Write rows ``[start, stop)`` of the product; `tiles`: a tuple as long as each of `TILES`."""
    t32, t8, t4, t2, t1 = tiles
    columns = factors.columns
    for row in range(start, stop):
        column = 0
        while column + 32 <= columns:
            sum_tile(t32, factors, row, column)
            column += 32
        while column + 8 <= columns:
            sum_tile(t8, factors, row, column)
            column += 8
        if column + 4 <= columns:
            sum_tile(t4, factors, row, column)
            column += 4
        if column + 2 <= columns:
            sum_tile(t2, factors, row, column)
            column += 2
        if column < columns:
            sum_tile(t1, factors, row, column)


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix whose rows are multiplied with several columns at a time."""

    matrix: CSR

    def multiply(self, x: ValueArray, out: ValueArray | None, threads: int) -> ValueArray:
        """Return ``a @ x`` for x of shape (ncols, k) in C order, of the dtype of the sums."""
        m, columns = self.matrix, x.shape[1]
        y = np.empty((m.nrows, columns), x.dtype) if out is None else out
        factors = Factors(m.indptr, m.indices, m.data, x.reshape(-1), columns, y.reshape(-1))
        tiles = tuple((0,) * tile for tile in TILES)

        def work(start: int, stop: int) -> None:
            multiply_rows(start, stop, tiles, factors)

        in_parallel(work, m.indptr[1:], threads_for(m.nnz * max(1, columns // SUMS_AT_ONCE), threads))
        return y
