"""Carry out reductions on the CPU: make some rows of C, reduce them, and discard them before the next rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from spdist.kernels.cpu.multiply import multiply
from spdist.kernels.cpu.product_counts import row_products
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import (
    Histogram,
    PartialReduction,
    Reduction,
    combine,
    diagonal_pattern,
    final_value,
    is_linear,
    spec_for,
    sum_dtype,
)
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype

SLICE_PRODUCTS = 1 << 23
"""Most products of the rows of C that a thread holds at a time; one longer row is held alone."""
SQUARED_ENTRIES = 1 << 20
"""Entries of C that are squared at a time."""
DENSE_COLUMNS = 1 << 20
"""Columns up to which column sums use a dense array, however few columns occur."""


def reduce_rows(reduction: Reduction, c: CSR, first_row: int) -> PartialReduction:
    """Reduce some rows of C; the first one is row `first_row`."""
    dtype = sum_dtype(c.dtype)
    if isinstance(reduction, Histogram):
        from spdist.kernels.cpu.finished.histogram import histogram  # loads Numba

        return PartialReduction(histogram(c.data, np.array(reduction.edges)))
    if reduction == "row_sums":
        nonempty = np.flatnonzero(np.diff(c.indptr))
        sums = np.zeros(c.nrows, dtype)
        if len(nonempty):
            sums[nonempty] = np.add.reduceat(c.data, c.indptr[nonempty], dtype=dtype)
        return PartialReduction(sums)
    if reduction == "column_sums":
        return _column_sums(c, dtype)
    if reduction == "row_nnz":
        return PartialReduction(np.diff(c.indptr))
    if reduction == "nnz":
        return PartialReduction(np.array([c.nnz]))
    if reduction == "frobenius":
        pieces = [c.data[at : at + SQUARED_ENTRIES] for at in range(0, c.nnz, SQUARED_ENTRIES)]
        squares = [np.square(np.abs(piece).astype(np.float64)).sum() for piece in pieces]
        return PartialReduction(np.array([np.sum(squares, dtype=np.float64)]))
    values = c.data[_diagonal_entries(c, first_row)] if reduction == "trace" else c.data
    return PartialReduction(np.array([np.add.reduce(values, dtype=dtype)]))


def _column_sums(c: CSR, dtype: np.dtype[Any]) -> PartialReduction:
    """Return the sums of the columns that occur; sort the columns only if few of very many occur."""
    if c.ncols <= max(4 * c.nnz, DENSE_COLUMNS):
        sums, occurs = np.zeros(c.ncols, dtype), np.zeros(c.ncols, np.bool_)
        np.add.at(sums, c.indices, c.data)
        occurs[c.indices] = True
        columns = np.flatnonzero(occurs)
        return PartialReduction(sums[columns], columns)
    columns, at = np.unique(c.indices, return_inverse=True)
    sums = np.zeros(len(columns), dtype)
    np.add.at(sums, at, c.data)
    return PartialReduction(sums, columns.astype(np.int64))


def _diagonal_entries(c: CSR, first_row: int) -> Int64Array:
    """Return the positions in ``c.data`` of the entries on the diagonal; `c` begins with row `first_row` of C."""
    lengths = np.diff(c.indptr)
    found = [
        at + np.flatnonzero(c.indices[at : at + n] == row)
        for row, at, n in zip(range(first_row, first_row + c.nrows), c.indptr[:-1], lengths, strict=True)
        if n
    ]
    return np.concatenate([np.zeros(0, np.int64), *found])


def reduce_linear(
    reduction: Reduction, a: Iterable[CSR], b: Iterable[CSR], shapes: tuple[tuple[int, int], tuple[int, int]],
    dtype: np.dtype[Any],
) -> Any:  # fmt: skip
    """Return sums of ``A @ B``, of all of it, rows or columns, from products with vectors of ones, without making C.

    `a, b`: successive row blocks; "column_sums" reads A first, the others read B first. `shapes`: of A and of B.
    """
    if reduction == "column_sums":
        weights = _column_sums_of_blocks(a, shapes[0][1], dtype)
        out, at = np.zeros(shapes[1][1], dtype), 0
        for rows in b:
            out += rows.to_scipy().astype(dtype, copy=False).T @ weights[at : at + rows.nrows]
            at += rows.nrows
        return out
    sums = [rows.to_scipy().astype(dtype, copy=False) @ np.ones(rows.ncols, dtype) for rows in b]
    vector = np.concatenate([np.zeros(0, dtype), *sums])
    row_sums = [rows.to_scipy().astype(dtype, copy=False) @ vector for rows in a]
    out = np.concatenate([np.zeros(0, dtype), *row_sums])
    return out if reduction == "row_sums" else out.sum()


def _column_sums_of_blocks(blocks: Iterable[CSR], ncols: int, dtype: np.dtype[Any]) -> ValueArray:
    out = np.zeros(ncols, dtype)
    for rows in blocks:
        out += rows.to_scipy().astype(dtype, copy=False).T @ np.ones(rows.nrows, dtype)
    return out


def reduce_product(reduction: Reduction, a: CSR, b: CSR, *, threads: int, spec: ProductSpec) -> Any:
    """Return a reduction of the product of two canonical matrices in memory, as `reduction_spec.final_value` has it.

    Each thread holds the C of at most `SLICE_PRODUCTS` products, or of one row. Raises as `multiply.multiply` does.
    """
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    spec.check((a.nrows, b.ncols), dtype)
    if is_linear(reduction, spec, dtype):
        return reduce_linear(reduction, [a], [b], (a.shape, b.shape), dtype)
    spec = spec_for(reduction, spec)
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    if reduction == "trace" and not spec.fused:
        spec = replace(spec, mask=diagonal_pattern(0, a.nrows, b.ncols))
    if "b" in spec.semiring.reads:  # convert B once, not once a slice
        b = CSR(b.indptr, b.indices.astype(index_dtype(b.ncols), copy=False), b.data.astype(dtype, copy=False), b.shape)
    reduce_slice = functools.partial(_reduce_slice, reduction, a, b, spec)
    with ThreadPoolExecutor(threads) as pool:
        partials = list(pool.map(reduce_slice, *zip(*_row_slices(a, b), strict=True)))
    return final_value(reduction, combine(reduction, partials), b.ncols)


def _reduce_slice(reduction: Reduction, a: CSR, b: CSR, spec: ProductSpec, start: int, stop: int) -> PartialReduction:
    c = multiply(a.rows(start, stop), b, spec=spec.of_rows(start, stop))
    return reduce_rows(reduction, c, start)


def _row_slices(a: CSR, b: CSR) -> list[tuple[int, int]]:
    """Return ranges of rows of about `SLICE_PRODUCTS` products each."""
    running = np.cumsum(row_products(a, np.diff(b.indptr)))
    total = int(running[-1]) if len(running) else 0
    goals = np.arange(SLICE_PRODUCTS, total, SLICE_PRODUCTS)
    cuts = np.unique([0, *np.searchsorted(running, goals).tolist(), a.nrows])
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)) or [(0, 0)]
