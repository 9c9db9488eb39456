"""Many small products on the GPU as one: matrices along the diagonals of A and B, whose product is taken apart again.

A product of a thousand rows takes the GPU some microseconds, and its launches and waits far longer.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from spdist.kernels.cuda.module import c_type, module, value_type
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu.analysis import address
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, Int64Array

FILE = "batch_gpu/batch.cu"
MOST_ENTRIES = 1 << 18
"""Entries of both operands from which a product is made by itself."""
JOINED_ENTRIES = 1 << 25
"""Entries of the operands that are joined, at most."""
ALIGNED = 64
"""Entries to whose multiples a matrix's arrays are aligned, as if they were allocated by themselves."""


def kernel_names(value: str, index: str, pointer: str) -> tuple[str, ...]:
    """Return the name expressions of all kernels, for C types of values, columns and offsets."""
    return tuple(f"batch_{step}<{value}, {index}, {pointer}>" for step in ("join", "part"))


def groups(pairs: list[tuple[CSR, CSR]]) -> list[list[int]]:
    """Return the numbers of products to make at once: of one dtype, and small; a product of another kind is alone."""
    kinds = {id(m): (m.dtype.char, m.indices.dtype.char, m.indptr.dtype.char) for pair in pairs for m in pair}
    found: list[list[int]] = []
    entries, columns, kind = 0, 0, None
    for number, (a, b) in enumerate(pairs):
        size, wide, this = a.nnz + b.nnz, max(*a.shape, *b.shape), kinds[id(a)]
        joins = size <= MOST_ENTRIES and a.ncols == b.nrows and this == kinds[id(b)]
        if joins and this == kind and entries + size <= JOINED_ENTRIES and columns + wide < INT32_MAX:
            found[-1].append(number)
        else:
            found.append([number])
            entries, columns = 0, 0
        entries, columns, kind = entries + size, columns + wide, this if joins else None
    return found


def multiply(pairs: list[tuple[CSR, CSR]], *, deterministic: bool = False) -> list[CSR] | None:
    """Return the products of a group; None if an operand's arrays do not fit together.

    Raises as `rowwise_gpu.multiply` does.
    """
    import cupy

    bad = cupy.zeros(1, np.uint64)
    left = _joined([a for a, _ in pairs], bad)
    right = left if all(a is b for a, b in pairs) else _joined([b for _, b in pairs], bad)
    c = rowwise_gpu.multiply(left, right, deterministic=deterministic)
    rows = _starts([a.nrows for a, _ in pairs])
    ends = c.indptr[cupy.asarray(rows)].get()
    return None if bad.get()[0] else _parted(c, [(a.nrows, b.ncols) for a, b in pairs], rows, ends)


def _joined(members: list[CSR], bad: Any) -> CSR:
    """Put matrices along the diagonal of one."""
    import cupy

    sizes = np.array([(m.nrows, m.ncols, m.nnz) for m in members], np.int64)
    starts = np.cumsum(sizes, axis=0) - sizes
    nrows, ncols, nnz = (int(total) for total in sizes.sum(axis=0))
    addresses = np.array([[address(array) for array in (m.indptr, m.indices, m.data)] for m in members], np.int64)
    table = cupy.asarray(np.concatenate([addresses, sizes, starts], axis=1))
    first = members[0]
    out = (
        cupy.empty(nrows + 1, first.indptr.dtype),
        cupy.empty(nnz, first.indices.dtype),
        cupy.empty(nnz, first.dtype),
    )
    _launch("join", first, len(members), (table, *out, bad))
    return CSR(*out, (nrows, ncols))


def _parted(c: CSR, shapes: list[tuple[int, int]], rows: Int64Array, ends: Int64Array) -> list[CSR]:
    """Return the matrices of a product, each with its own arrays, cut from memory of all."""
    import cupy

    counts = np.diff(ends)
    places, columns = _starts(-(-counts // ALIGNED) * ALIGNED), _starts([ncols for _, ncols in shapes])
    nrows = np.array([nrows for nrows, _ in shapes])
    offsets = _starts(-(-(nrows + 1) // ALIGNED) * ALIGNED)
    table = cupy.asarray(np.stack([nrows, rows[:-1], columns[:-1], offsets[:-1], places[:-1]], axis=1).astype(np.int64))
    arrays = [
        cupy.empty(int(size), array.dtype)
        for size, array in ((offsets[-1], c.indptr), (places[-1], c.indices), (places[-1], c.data))
    ]
    _launch("part", c, len(shapes), (table, c.indptr, c.indices, c.data, *arrays))
    indptr = _pieces(arrays[0], (nrows + 1).tolist(), offsets.tolist())
    indices, data = (_pieces(array, counts.tolist(), places.tolist()) for array in arrays[1:])
    return list(map(CSR, indptr, indices, data, shapes))


def _pieces(array: Any, sizes: list[int], starts: list[int]) -> list[Any]:
    """Return parts of an array as new arrays: CuPy's slices take half as long again."""
    import cupy

    make, memory, dtype, itemsize = cupy.ndarray, array.data, array.dtype, array.dtype.itemsize
    return [make((size,), dtype, memory + start * itemsize) for size, start in zip(sizes, starts, strict=False)]


def _starts(sizes: Any) -> Int64Array:
    """Return the sums of the sizes before each, and of all."""
    return np.fromiter(itertools.accumulate(sizes, initial=0), np.int64)


def _launch(step: str, m: CSR, count: int, arguments: tuple[Any, ...]) -> None:
    types = value_type(np.dtype(m.dtype)), *(c_type(np.dtype(array.dtype)) for array in (m.indices, m.indptr))
    names = kernel_names(*types)
    module(FILE, names)(next(name for name in names if f"_{step}<" in name), count, 256, arguments)
