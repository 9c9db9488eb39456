"""Correlations and covariances of columns, without a dense copy of the matrix.

The centred columns ``x - m 1`` would be dense. Their products are ``X.T @ X - n m m.T``: the second term is the product
of one more row, ``sqrt(n) m``, with its negative. So a product of two sparse matrices gives all pairs, and top-n,
threshold and memory limit hold as for any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, get_args

import numpy as np
import scipy.sparse as sp

from spdist.applications.files import beside, imported
from spdist.applications.operands import check_same_place, check_values, opened, parts, place_of_result
from spdist.applications.pairs import multiply_pairs
from spdist.errors import InputError
from spdist.jobs.report import Callbacks
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype
from spdist.options import ExecutionOptions, TaskKeywords, lists_keywords, options_of
from spdist.storage.foreign import versions

Comoment = Literal["correlation", "covariance"]
MEASURES: tuple[Comoment, ...] = get_args(Comoment)


@lists_keywords(TaskKeywords)
@versions.watched()
def correlation(
    a: Any,
    out: str | Path | None = None,
    *,
    other: Any = None,
    mask: Any = None,
    measure: Comoment = "correlation",
    top_n: int | None = None,
    threshold: float | None = None,
    triangle: str | None = None,
    check: bool = False,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[TaskKeywords],
) -> Any:
    """Correlate the columns of a matrix, or with another one's; entries that are not stored count as zeros.

    All pairs of columns are compared, those without a common row too: C has up to m^2 entries, unless `mask`, `top_n`
    or `threshold` cut it. Rows of A are the observations, as in `pandas.DataFrame.corr`.

    Parameters
    ----------
    a : (n, m) scipy.sparse matrix or array; path, URL or StoredMatrix; or path of a list of edges or another file
        Real and finite; at least two rows. A file is imported to a temporary matrix beside C.
    out : str or Path, optional
        Where to store C; required for a stored matrix and for a file. Rows and columns have the names of A's columns.
    other : (n, k) matrix, optional
        Its columns are the second ones of pairs: row i of both matrices is the same observation. It is where A is, in
        memory or stored; C is then m x k, and each pair is compared.
    mask : (m, m) or (m, k) matrix, optional
        The pairs to compare are its entries, those on the diagonal too. It is where A is.
    measure : {"correlation", "covariance"}
        Pearson's correlation, or the covariance with n - 1 in the denominator. A column of equal values has no
        correlations: its row is empty.
    top_n : int, optional
        Number of columns to keep for each column, largest values first. A column is then not compared with itself,
        except where `mask` has the pair.
    threshold : float, optional
        Least value to keep. A column is then not compared with itself, except where `mask` has the pair.
    triangle : {"upper"}, optional
        Store each pair of different columns of one matrix once, above the diagonal.
    check : bool
        Verify a stored C at the end.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security, resume, overwrite, steal, names
        As in `multiply`.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    (m, m) or (m, k) csr_array or Report
        Float64; in memory if the matrix is; the report of a stored C.

    Raises
    ------
    InputError
        If an argument is wrong; nothing has been written.
    MatrixError
        If a value is complex, infinite or not a number.
    SpdistError
        If the run failed.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> correlation(sp.csr_array([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 2.0]])).toarray().round(2)
    array([[ 1.  ,  0.87, -0.87],
           [ 0.87,  1.  , -1.  ],
           [-0.87, -1.  ,  1.  ]])
    """
    (execution,) = options_of(correlation, keywords, ExecutionOptions)
    execution.check()
    if measure not in MEASURES:
        raise InputError(f"measure={measure!r} is not one of {', '.join(MEASURES)}")
    ProductSpec(top_n=top_n, threshold=threshold, triangle=triangle)  # raises for invalid values
    if other is not None and triangle is not None:
        raise InputError(f"triangle={triangle!r}: pairs of two matrices' columns have no triangle; leave it out")
    with imported(a, beside(out, "correlations", keywords), keywords, duplicates="sum") as operand:
        matrix = opened(operand, "correlations")
        place = place_of_result(out, matrix, "correlations")
        if matrix.shape[0] < 2:
            raise InputError(f"a matrix of {matrix.shape[0]} rows has no correlations: at least two are needed")
        second = None if other is None else _second(other, matrix)
        both = (matrix,) if second is None else (matrix, second)
        for m in both:
            check_values(m, np.isfinite, "finite real values")
        moments = [_moments(m, measure) for m in both]
        whole = (top_n, threshold, triangle) == (None, None, None)
        return multiply_pairs(
            matrix, place, {"mask": mask, "top_n": top_n, "threshold": threshold, "triangle": triangle}, keywords,
            by_columns=True, other=second, with_own=whole or mask is not None,
            change=([m.scaled for m in moments], np.dtype(np.float64)), last=(moments[0].row(1), moments[-1].row(-1)),
            check=check, callbacks=callbacks,
        )  # fmt: skip


def _second(other: Any, first: Any) -> Any:
    """Return the matrix whose columns are the second ones of pairs, opened and checked."""
    second = opened(other, "correlations")
    check_same_place(first, second)
    if second.shape[0] != first.shape[0]:
        raise InputError(
            f"{first.shape[0]:,} rows and {second.shape[0]:,} rows are not the same observations: correlation takes "
            f"matrices of equally many rows"
        )
    return second


class _Moments(NamedTuple):
    """What makes products of columns the wanted ones."""

    shift: Any  # (ncols,): to take from the values of each column: the mean of one without zeros, which loses no digits
    scale: Any  # (ncols,): factor of each column; 0 leaves it out
    mean: Any  # (ncols,): the means of the columns then, times the root of the number of rows

    def scaled(self, rows: CSR) -> CSR:
        """Return rows with their columns shifted and scaled, without columns of factor 0."""
        m = sp.csr_array(
            ((rows.data - self.shift[rows.indices]) * self.scale[rows.indices], rows.indices, rows.indptr),
            shape=rows.shape,
        )
        m.eliminate_zeros()
        return CSR(m.indptr.astype(np.int64), m.indices.astype(rows.indices.dtype), m.data, rows.shape)

    def row(self, sign: int) -> CSR:
        """Return the row whose products with its negative are what centring takes away."""
        columns = np.flatnonzero(self.mean)
        indices = columns.astype(index_dtype(len(self.mean)))
        return CSR(np.array([0, len(columns)], np.int64), indices, sign * self.mean[columns], (1, len(self.mean)))


def _moments(matrix: Any, measure: Comoment) -> _Moments:
    """Read a matrix twice: for the means of its columns, then for their deviations from these."""
    nrows, ncols = matrix.shape
    total, there, squares = np.zeros(ncols), np.zeros(ncols), np.zeros(ncols)
    for _, rows in parts(matrix):
        total += np.bincount(rows.indices, rows.data, ncols)
        there += np.bincount(rows.indices, minlength=ncols)
    mean = total / nrows
    if measure == "covariance":
        scale = np.full(ncols, 1 / np.sqrt(nrows - 1))
    else:
        for _, rows in parts(matrix):
            squares += np.bincount(rows.indices, (rows.data - mean[rows.indices]) ** 2, ncols)
        squares += (nrows - there) * mean**2
        varies = squares > nrows * (nrows * np.finfo(np.float64).eps * mean) ** 2  # not by rounding of the mean alone
        scale = np.where(varies, 1 / np.sqrt(np.where(varies, squares, 1)), 0)
    shift = np.where(there == nrows, mean, 0)
    return _Moments(shift, scale, scale * (mean - shift) * np.sqrt(nrows))
