"""Reductions of a product that is never whole: their names, their partial results, and how these combine.

Whoever makes rows of C reduces them to a `PartialReduction` (on the CPU `cpu.reduce.reduce_rows`), combines the partial
results of successive rows, and takes the final value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import SEMIRINGS
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype

REDUCTIONS = ("sum", "row_sums", "column_sums", "trace", "nnz", "row_nnz", "frobenius")
"""Names of the reductions without parameters. "histogram" has edges, and is a `Histogram`."""


@dataclass(frozen=True)
class Histogram:
    """Number of entries of C in each bin."""

    # finite and rising; bin i holds ``edges[i] <= x < edges[i + 1]``, the last bin also its upper edge
    edges: tuple[float, ...]


Reduction: TypeAlias = str | Histogram
"""One of `REDUCTIONS`, or a histogram."""


@dataclass(frozen=True)
class PartialReduction:
    """The reduction of some rows of C."""

    # one number for "sum", "trace", "nnz" and "frobenius" (the sum of squares); one number for each row, for each of
    # `columns`, or for each bin for the others
    values: ValueArray
    columns: Int64Array | None = None  # (n,) int64, optional: rising; for "column_sums" alone


def reduction_of(name: str, bins: npt.ArrayLike | None = None) -> Reduction:
    """Return the reduction of a name in `REDUCTIONS`, or "histogram" with the edges of its bins, finite and rising.

    Raises `InputError` if there is no such reduction, `bins` are no edges, or `bins` are given for another reduction.
    """
    if name not in (*REDUCTIONS, "histogram"):
        raise InputError(f"reduction {name!r} is not one of {', '.join(REDUCTIONS)}, histogram")
    if name != "histogram":
        if bins is not None:
            raise InputError(f"bins are for a histogram, not for {name!r}")
        return name
    try:
        edges = np.asarray(bins, np.float64)
    except (TypeError, ValueError):
        edges = np.zeros(0)
    if edges.ndim != 1 or len(edges) < 2 or not np.isfinite(edges).all() or (np.diff(edges) <= 0).any():
        raise InputError(f"bins={bins!r}: a histogram needs two edges or more, finite and rising, such as [0, 0.5, 1]")
    return Histogram(tuple(edges.tolist()))


def check_values(reduction: Reduction, dtype: np.dtype[Any]) -> None:
    """Raise `MatrixError` if complex values are to be counted by bins."""
    if isinstance(reduction, Histogram) and dtype.kind == "c":
        raise MatrixError(f"values of dtype {dtype} have no order, which a histogram needs: pass real ones")


def spec_for(reduction: Reduction, spec: ProductSpec) -> ProductSpec:
    """Return the cheapest specification that gives the same reduction: counts need no values."""
    if reduction in ("nnz", "row_nnz") and not spec.finishes:
        return replace(spec, semiring=SEMIRINGS["any_pair"])
    return spec


def is_linear(reduction: Reduction, spec: ProductSpec, dtype: np.dtype[Any]) -> bool:
    """Whether the reduction needs no sparse product: row and column sums of A @ B are products with vectors of ones.

    Entries of short integers wrap before they are added up, and bools do not add: these need the product.
    """
    exact = dtype.kind in "fc" or (dtype.kind in "iu" and dtype.itemsize == 8)
    return reduction in ("sum", "row_sums", "column_sums") and spec.plain and exact


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which NumPy adds up values of `dtype`."""
    found: np.dtype[Any] = np.add.reduce(np.zeros(1, dtype)).dtype
    return found


def combine(reduction: Reduction, partials: Sequence[PartialReduction]) -> PartialReduction:
    """Combine the partial results of successive row blocks, one at least, in their order."""
    if len(partials) == 1:
        return partials[0]
    values = np.concatenate([partial.values for partial in partials])
    if reduction in ("row_sums", "row_nnz"):
        return PartialReduction(values)
    if isinstance(reduction, Histogram):
        return PartialReduction(np.sum([partial.values for partial in partials], axis=0))
    if reduction != "column_sums":
        return PartialReduction(np.add.reduce(values, keepdims=True))
    occurring = np.concatenate([partial.columns for partial in partials if partial.columns is not None])
    columns, at = np.unique(occurring, return_inverse=True)
    sums = np.zeros(len(columns), values.dtype)
    np.add.at(sums, at, values)
    return PartialReduction(sums, columns)


def final_value(reduction: Reduction, partial: PartialReduction, ncols: int) -> Any:
    """Return the reduction of C from the partial result of all its rows.

    The result has the shape (nrows,), (ncols,) or (bins,) for reductions by row, column or bin; else it is a number.
    """
    if reduction == "column_sums":
        out = np.zeros(ncols, partial.values.dtype)
        out[partial.columns] = partial.values
        return out
    if reduction in ("row_sums", "row_nnz") or isinstance(reduction, Histogram):
        return partial.values
    return np.sqrt(partial.values[0]) if reduction == "frobenius" else partial.values[0]


def diagonal_pattern(start: int, stop: int, ncols: int) -> CSR:
    """Return rows ``[start, stop)`` of the pattern of an identity of `ncols` columns: the mask of a trace.

    Rows from `ncols` on are empty.
    """
    entries = min(max(ncols - start, 0), stop - start)
    indptr = np.minimum(np.arange(stop - start + 1, dtype=np.int64), entries)
    indices = np.arange(start, start + entries).astype(index_dtype(ncols))
    return CSR(indptr, indices, indices, (stop - start, ncols))
