"""Stored matrices added, multiplied entry by entry, and changed row by row, without a product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import scipy.sparse as sp

from spdist.errors import MatrixError
from spdist.jobs.operands import open_factors, open_operand
from spdist.kernels.cpu.multiply import cut
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.semirings import PLUS_TIMES, Semiring, find
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype, result_dtype
from spdist.options import lists_keywords, options_of
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.foreign import versions
from spdist.storage.foreign.checked import checked
from spdist.storage.matrix import StoredMatrix, open_matrix, refuse_blocks
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter

PART_ENTRIES = 1 << 22
"""Entries of both matrices that are held at a time, longer rows apart."""
OFFSETS = 1 << 20
"""Rows whose offsets are held at a time."""


class ElementwiseKeywords(TypedDict, total=False):
    """Keywords of calls that store a matrix by entries."""

    overwrite: bool
    steal: bool
    names: bool


@lists_keywords(ElementwiseKeywords)
def ewise_add(
    a: Any, b: Any, out: str | Path, *, semiring: str | Semiring = "plus_times", **keywords: Unpack[ElementwiseKeywords]
) -> StoredMatrix:
    """Add two stored matrices, larger than memory or not; the result has an entry where either has one.

    Parameters
    ----------
    a, b : path, URL or StoredMatrix
        Of one shape.
    out : str or Path
        Where to store the sum.
    semiring : str or Semiring
        Its addition is used where both have an entry: "min_plus" keeps the smaller value, "max_plus" the larger.
    overwrite, steal, names
        As in `multiply`.

    Returns
    -------
    StoredMatrix
        Of NumPy's result type. Entries that cancel stay, as zeros.

    Raises
    ------
    InputError
        If `out` exists and `overwrite` is false, or a matrix is stored in blocks.
    MatrixError
        If the shapes differ.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.csr_array([[1, 2], [0, 0]]), overwrite=True)
    >>> b = spdist.save("memory://B.zarr", sp.csr_array([[5, 0], [0, 3]]), overwrite=True)
    >>> ewise_add(a, b, "memory://C.zarr", overwrite=True).to_scipy().toarray()
    array([[6, 2],
           [0, 3]])
    """
    options_of(ewise_add, keywords)
    spec = ProductSpec(find(semiring))
    from spdist.kernels.cpu.finished.merge import merge  # loads Numba

    return _combined(a, b, out, "sum", lambda p, q: merge(p, q, spec), keywords)


@lists_keywords(ElementwiseKeywords)
def ewise_mult(a: Any, b: Any, out: str | Path, **keywords: Unpack[ElementwiseKeywords]) -> StoredMatrix:
    """Multiply two stored matrices entry by entry; the result has an entry where both have one.

    Parameters
    ----------
    a, b, out, overwrite, steal, names
        As for `ewise_add`.

    Returns
    -------
    StoredMatrix
        Of NumPy's result type. Zeros stay.

    Raises
    ------
    InputError, MatrixError
        As for `ewise_add`.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.csr_array([[1, 2], [0, 0]]), overwrite=True)
    >>> b = spdist.save("memory://B.zarr", sp.csr_array([[5, 0], [0, 3]]), overwrite=True)
    >>> ewise_mult(a, b, "memory://C.zarr", overwrite=True).to_scipy().toarray()
    array([[5, 0],
           [0, 0]])
    """
    options_of(ewise_mult, keywords)
    return _combined(a, b, out, "product", _intersection, keywords)


@lists_keywords(ElementwiseKeywords)
@versions.watched()
def apply(
    a: Any,
    out: str | Path,
    *,
    epilogue: Epilogue | None = None,
    threshold: float | None = None,
    top_n: int | None = None,
    **keywords: Unpack[ElementwiseKeywords],
) -> StoredMatrix:
    """Scale, map, normalise and cut the rows of a stored matrix.

    Parameters
    ----------
    a : path, URL or StoredMatrix
    out : str or Path
        Where to store the result.
    epilogue, threshold, top_n
        As in `spgemm`, in this order.
    overwrite, steal, names
        As for `ewise_add`.

    Returns
    -------
    StoredMatrix
        Of A's shape and dtype.

    Raises
    ------
    InputError
        If an option cannot be, `out` exists and `overwrite` is false, or A is stored in blocks.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.csr_array([[1.0, 3.0], [0.0, 2.0]]), overwrite=True)
    >>> apply(a, "memory://C.zarr", epilogue=spdist.Epilogue(normalize="l1"), overwrite=True).to_scipy().toarray()
    array([[0.25, 0.75],
           [0.  , 1.  ]])
    """
    options_of(apply, keywords)
    spec = ProductSpec(PLUS_TIMES, epilogue=epilogue, threshold=threshold, top_n=top_n)
    matrix = checked(open_operand(a))
    refuse_blocks("rows that are changed", matrix)
    if epilogue is not None:
        epilogue.check(matrix.shape, matrix.dtype)
    parts = (cut(_own(rows), spec.of_rows(start, start + rows.nrows)) for start, (rows,) in _parts(matrix))
    return _stored(out, matrix, matrix.dtype, parts, "apply", keywords)


@versions.watched()
def _combined(a: Any, b: Any, out: str | Path, what: str, combine: Any, keywords: ElementwiseKeywords) -> StoredMatrix:
    """Store what a function makes of the rows of two matrices."""
    left, right = open_factors(a, b)
    refuse_blocks(f"{what}s by entries", left, right)
    if left.shape != right.shape:
        raise MatrixError(
            f"{left.url} is {left.nrows:,} x {left.ncols:,} and {right.url} {right.nrows:,} x {right.ncols:,}: for a "
            f"{what} by entries they need one shape"
        )
    dtype = result_dtype(left.dtype, right.dtype)
    parts = (combine(*(_of_dtype(rows, dtype) for rows in pair)) for _, pair in _parts(left, right))
    return _stored(out, left, dtype, parts, what, keywords, right.names)


def _stored(
    out: str | Path, like: StoredMatrix, dtype: np.dtype[Any], parts: Iterator[CSR], command: str,
    keywords: ElementwiseKeywords, other: AxisNames = NO_NAMES,
) -> StoredMatrix:  # fmt: skip
    """Store rows as a matrix that has the columns of another and its names, or other names where it has none."""
    overwrite, steal = keywords.get("overwrite", False), keywords.get("steal", False)
    with staged_matrix(out, overwrite=overwrite, steal=steal, shape=like.shape) as stage:
        names = names_for(stage.target, like.names.filled(other)) if keywords.get("names", True) else NO_NAMES
        writer = MatrixWriter(stage.url, like.ncols, dtype, {"provenance": {"command": command}}, names)
        for rows in parts:
            writer.append(rows)
        writer.close()
    return open_matrix(out)


def _parts(*matrices: StoredMatrix) -> Iterator[tuple[int, list[CSR]]]:
    """Yield the first row and the same rows of each matrix, as many as have about `PART_ENTRIES` entries."""
    nrows = matrices[0].nrows
    for first in range(0, nrows, OFFSETS):
        last = min(first + OFFSETS, nrows)
        held = np.sum([m.read_indptr(first, last) for m in matrices], axis=0)
        start = first
        while start < last:
            most = held[start - first] + PART_ENTRIES
            stop = min(max(first + int(np.searchsorted(held, most, side="right")) - 1, start + 1), last)
            yield start, [m.rows(start, stop) for m in matrices]
            start = stop


def _of_dtype(rows: CSR, dtype: np.dtype[Any]) -> CSR:
    return CSR(rows.indptr, rows.indices, rows.data.astype(dtype, copy=False), rows.shape)


def _own(rows: CSR) -> CSR:
    """Return rows whose arrays may be written to."""
    indptr, indices, data = (np.require(x, requirements="W") for x in (rows.indptr, rows.indices, rows.data))
    return CSR(indptr, indices, data, rows.shape)


def _intersection(p: CSR, q: CSR) -> CSR:
    """Return the products of entries that both have; SciPy would drop zeros."""
    in_p, in_q = (_places(one, other) for one, other in ((p, q), (q, p)))
    data = p.data[in_p.data - 1] * q.data[in_q.data - 1]
    return CSR(in_p.indptr.astype(np.int64), in_p.indices.astype(index_dtype(p.ncols)), data, p.shape)


def _places(one: CSR, other: CSR) -> Any:
    """Return, where both have an entry, its place in `one`, counted from 1."""
    numbered = CSR(one.indptr, one.indices, np.arange(1, one.nnz + 1), one.shape).to_scipy()
    ones = CSR(other.indptr, other.indices, np.ones(other.nnz, np.int64), other.shape).to_scipy()
    found = sp.csr_array(numbered.multiply(ones))
    found.sort_indices()
    return found
