"""Reductions of a product that is never whole: rows of C are made some at a time, reduced, and thrown away."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import SEMIRINGS
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype

REDUCTIONS = ("sum", "row_sums", "column_sums", "trace", "nnz", "row_nnz", "frobenius")
"""Those that a name says all of; the other is "histogram"."""
SLICE_PRODUCTS = 1 << 23
"""Products of the rows of C that a thread holds at a time, at the most, but for longer rows."""


ENTRIES = 1 << 20
"""Entries that are squared at a time, and columns that are added up without a sort."""


@dataclass(frozen=True)
class Histogram:
    """Numbers of entries of C by their values; `edges` are finite and rise."""

    edges: tuple[float, ...]


Reduction: TypeAlias = str | Histogram
"""Of `REDUCTIONS`, or a histogram."""


@dataclass(frozen=True)
class Part:
    """What some rows come to.

    Attributes
    ----------
    values : array
        One number; or one for each row; or, with `columns`, one for each of these; or one for each bin.
    columns : (n,) int64, optional
        Rising.
    """

    values: ValueArray
    columns: Int64Array | None = None


def reduction_of(what: str, bins: Any = None) -> Reduction:
    """Return the reduction of a name; with `bins`, the edges of a histogram.

    Raises
    ------
    InputError
        If there is none, or `bins` are no edges, or are for another.
    """
    if what not in (*REDUCTIONS, "histogram"):
        raise InputError(f"reduction {what!r} is not one of {', '.join(REDUCTIONS)}, histogram")
    if what != "histogram":
        if bins is not None:
            raise InputError(f"bins are for a histogram, not for {what!r}")
        return what
    try:
        edges = np.asarray(bins, np.float64)
    except (TypeError, ValueError):
        edges = np.zeros(0)
    if edges.ndim != 1 or len(edges) < 2 or not np.isfinite(edges).all() or (np.diff(edges) <= 0).any():
        raise InputError(f"bins={bins!r}: a histogram needs two edges or more, finite and rising, such as [0, 0.5, 1]")
    return Histogram(tuple(edges.tolist()))


def check_values(what: Reduction, dtype: np.dtype[Any]) -> None:
    """Refuse to count complex values by bins.

    Raises
    ------
    MatrixError
    """
    if isinstance(what, Histogram) and dtype.kind == "c":
        raise MatrixError(f"values of dtype {dtype} have no order, which a histogram needs: pass real ones")


def spec_for(what: Reduction, spec: ProductSpec) -> ProductSpec:
    """Return the options under which fewest products are made for a reduction."""
    if what in ("nnz", "row_nnz") and not spec.finishes:
        return replace(spec, semiring=SEMIRINGS["any_pair"])
    return spec


def is_linear(what: Reduction, spec: ProductSpec, dtype: np.dtype[Any]) -> bool:
    """Whether it needs no product: sums of rows or columns of A @ B are products with vectors of ones.

    Not of short integers, whose entries wrap before they are added up, nor of bools.
    """
    exact = dtype.kind in "fc" or (dtype.kind in "iu" and dtype.itemsize == 8)
    return what in ("sum", "row_sums", "column_sums") and spec.plain and exact


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return what NumPy adds values of a dtype up in."""
    found: np.dtype[Any] = np.add.reduce(np.zeros(1, dtype)).dtype
    return found


def of_rows(what: Reduction, c: CSR, first: int) -> Part:
    """Reduce some rows of C, of which `first` is the first."""
    kind = sum_dtype(c.dtype)
    if isinstance(what, Histogram):
        from spdist.kernels.cpu.histogram import histogram  # with Numba

        return Part(histogram(c.data, np.array(what.edges)))
    if what == "row_sums":
        filled = np.flatnonzero(np.diff(c.indptr))
        sums = np.zeros(c.nrows, kind)
        if len(filled):
            sums[filled] = np.add.reduceat(c.data, c.indptr[filled], dtype=kind)
        return Part(sums)
    if what == "column_sums":
        return _column_sums(c, kind)
    if what == "row_nnz":
        return Part(np.diff(c.indptr))
    if what == "nnz":
        return Part(np.array([c.nnz]))
    if what == "frobenius":
        pieces = [c.data[at : at + ENTRIES] for at in range(0, c.nnz, ENTRIES)]
        squares = [np.square(np.abs(piece).astype(np.float64)).sum() for piece in pieces]
        return Part(np.array([np.sum(squares, dtype=np.float64)]))
    values = c.data[_on_diagonal(c, first)] if what == "trace" else c.data
    return Part(np.array([np.add.reduce(values, dtype=kind)]))


def _column_sums(c: CSR, kind: np.dtype[Any]) -> Part:
    """Return the sums of the columns that occur; without a sort, unless these are few among many."""
    if c.ncols <= max(4 * c.nnz, ENTRIES):
        sums, touched = np.zeros(c.ncols, kind), np.zeros(c.ncols, np.bool_)
        np.add.at(sums, c.indices, c.data)
        touched[c.indices] = True
        columns = np.flatnonzero(touched)
        return Part(sums[columns], columns)
    columns, at = np.unique(c.indices, return_inverse=True)
    sums = np.zeros(len(columns), kind)
    np.add.at(sums, at, c.data)
    return Part(sums, columns.astype(np.int64))


def _on_diagonal(c: CSR, first: int) -> Int64Array:
    """Return the places of entries on the diagonal; the rows of `c` begin with row `first`."""
    lengths = np.diff(c.indptr)
    found = [
        at + np.flatnonzero(c.indices[at : at + n] == row)
        for row, at, n in zip(range(first, first + c.nrows), c.indptr[:-1], lengths, strict=True)
        if n
    ]
    return np.concatenate([np.zeros(0, np.int64), *found])


def together(what: Reduction, parts: Sequence[Part]) -> Part:
    """Return what successive rows come to together."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    if what in ("row_sums", "row_nnz"):
        return Part(values)
    if isinstance(what, Histogram):
        return Part(np.sum([part.values for part in parts], axis=0))
    if what != "column_sums":
        return Part(np.add.reduce(values, keepdims=True))
    columns, at = np.unique(np.concatenate([part.columns for part in parts if part.columns is not None]), False, True)
    sums = np.zeros(len(columns), values.dtype)
    np.add.at(sums, at, values)
    return Part(sums, columns)


def result(what: Reduction, part: Part, ncols: int) -> Any:
    """Return the reduction of all rows: a number or an array."""
    if what == "column_sums":
        out = np.zeros(ncols, part.values.dtype)
        out[part.columns] = part.values
        return out
    if what in ("row_sums", "row_nnz") or isinstance(what, Histogram):
        return part.values
    return np.sqrt(part.values[0]) if what == "frobenius" else part.values[0]


def reduce_linear(
    what: Reduction, a: Iterable[CSR], b: Iterable[CSR], shapes: tuple[tuple[int, int], tuple[int, int]],
    dtype: np.dtype[Any],
) -> Any:  # fmt: skip
    """Return sums of A @ B without a product.

    Parameters
    ----------
    what : {"sum", "row_sums", "column_sums"}
    a, b : iterables of CSR
        Successive rows. With "column_sums" A is read first, else B.
    shapes : (shape of A, shape of B)
    dtype : dtype
        Of the sums.
    """
    if what == "column_sums":
        weights = _times_ones_from_left(a, shapes[0], dtype)
        out, at = np.zeros(shapes[1][1], dtype), 0
        for rows in b:
            out += rows.to_scipy().astype(dtype, copy=False).T @ weights[at : at + rows.nrows]
            at += rows.nrows
        return out
    sums = [rows.to_scipy().astype(dtype, copy=False) @ np.ones(rows.ncols, dtype) for rows in b]
    vector = np.concatenate([np.zeros(0, dtype), *sums])
    row_sums = [rows.to_scipy().astype(dtype, copy=False) @ vector for rows in a]
    out = np.concatenate([np.zeros(0, dtype), *row_sums])
    return out if what == "row_sums" else out.sum()


def _times_ones_from_left(blocks: Iterable[CSR], shape: tuple[int, int], dtype: np.dtype[Any]) -> ValueArray:
    out = np.zeros(shape[1], dtype)
    for rows in blocks:
        out += rows.to_scipy().astype(dtype, copy=False).T @ np.ones(rows.nrows, dtype)
    return out


def reduce_product(what: Reduction, a: CSR, b: CSR, *, threads: int, spec: ProductSpec) -> Any:
    """Return a reduction of what the options make of ``a @ b``, both in memory.

    Parameters
    ----------
    what : Reduction
    a, b : CSR
        Canonical.
    threads : int
        Each holds the C of at most `SLICE_PRODUCTS` products, or of one row.
    spec : ProductSpec
    """
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    spec.check((a.nrows, b.ncols), dtype)
    if is_linear(what, spec, dtype):
        return reduce_linear(what, [a], [b], (a.shape, b.shape), dtype)
    spec = spec_for(what, spec)
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    if what == "trace" and not spec.fused:
        spec = replace(spec, mask=diagonal(0, a.nrows, b.ncols))
    if "b" in spec.semiring.reads:  # once, and not for each slice
        b = CSR(b.indptr, b.indices.astype(index_dtype(b.ncols), copy=False), b.data.astype(dtype, copy=False), b.shape)
    reduce_slice = functools.partial(_reduce_slice, what, a, b, spec)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(reduce_slice, *zip(*_slices(a, b), strict=True)))
    return result(what, together(what, parts), b.ncols)


def _reduce_slice(what: Reduction, a: CSR, b: CSR, spec: ProductSpec, start: int, stop: int) -> Part:
    c = cpu.multiply(a.rows(start, stop), b, spec=spec.of_rows(start, stop))
    return of_rows(what, c, start)


def _slices(a: CSR, b: CSR) -> list[tuple[int, int]]:
    """Return ranges of rows of about `SLICE_PRODUCTS` products."""
    running = np.cumsum(cpu.row_products(a, np.diff(b.indptr)))
    total = int(running[-1]) if len(running) else 0
    goals = np.arange(SLICE_PRODUCTS, total, SLICE_PRODUCTS)
    cuts = np.unique([0, *np.searchsorted(running, goals).tolist(), a.nrows])
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)) or [(0, 0)]


def diagonal(start: int, stop: int, ncols: int) -> CSR:
    """Return rows ``[start:stop)`` of the pattern of an identity of `ncols` columns."""
    inside = min(max(ncols - start, 0), stop - start)
    indptr = np.minimum(np.arange(stop - start + 1, dtype=np.int64), inside)
    indices = np.arange(start, start + inside).astype(index_dtype(ncols))
    return CSR(indptr, indices, indices, (stop - start, ncols))
