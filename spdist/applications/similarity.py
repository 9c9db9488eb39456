"""The most similar rows of each row: texts by their words, users by what they rated, cells by their genes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import scipy.sparse as sp

from spdist import api
from spdist.applications.operands import check_values, copy_of, mode_of, opened, parts, place_of_result, scratch
from spdist.errors import InputError
from spdist.jobs.report import Callbacks
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR
from spdist.options import (
    ApplicationKeywords,
    ExecutionOptions,
    TargetKeywords,
    WhereKeywords,
    lists,
    options_of,
    select,
)
from spdist.storage.lock import hold_target
from spdist.storage.matrix import StoredMatrix

METRICS = ("cosine", "inner_product")


@lists(ApplicationKeywords)
def similarity(
    a: Any,
    out: str | Path | None = None,
    *,
    top_n: int = 10,
    threshold: float = 0.0,
    metric: str = "cosine",
    check: bool = False,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[ApplicationKeywords],
) -> Any:
    """Find the most similar rows of each row; the matrix of all similarities is never whole.

    Parameters
    ----------
    a : (n, m) scipy.sparse matrix or array; or path, URL or StoredMatrix
        A row for each text, user or cell; real and finite.
    out : str or Path, optional
        Where to store C; required for a stored matrix.
    top_n : int
        Rows that are kept for each row: the most similar. A row is not compared with itself.
    threshold : float
        Least similarity. Rows that share nothing are never similar.
    metric : {"cosine", "inner_product"}
        Inner products of rows, with rows scaled to length 1 first for the cosine.
    check : bool
        Verify a stored C at the end.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security, resume, overwrite, steal
        As in `multiply`.

    Returns
    -------
    (n, n) csr_array or Report
        The similarity of rows i and j in row i and column j, in memory if the matrix is; the report of a stored C.

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
    >>> similarity(sp.csr_array([[1.0, 0.0], [2.0, 0.1], [0.0, 3.0]]), top_n=1).toarray().round(2)
    array([[0.  , 1.  , 0.  ],
           [1.  , 0.  , 0.  ],
           [0.  , 0.05, 0.  ]])
    """
    (execution,) = options_of(similarity, keywords, ExecutionOptions)
    execution.check()
    if metric not in METRICS:
        raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    ProductSpec(top_n=top_n, threshold=threshold)  # refuses what they cannot be
    matrix = opened(a, "similarities")
    place = place_of_result(out, matrix, "similarities")
    check_values(matrix, np.isfinite, "finite real values")
    dtype = matrix.dtype if matrix.dtype.kind == "f" or metric != "cosine" else np.dtype(np.float64)
    least = np.finfo(dtype).tiny if dtype.kind == "f" else 1  # what shares nothing is not similar
    options: dict[str, Any] = {"top_n": top_n, "threshold": max(threshold, float(least)), "complement": True}
    options |= {"transpose_b": True, **select(keywords, WhereKeywords)}
    itself = sp.eye_array(matrix.shape[0], dtype=bool).tocsr()
    if not isinstance(matrix, StoredMatrix):
        rows = matrix if metric != "cosine" else _unit_rows(next(parts(matrix))[1], dtype).to_scipy()
        c = api.matmul(rows, rows, mask=itself, **options)
        return c if out is None else api.save(out, c, **mode_of(keywords))
    options |= {"check": check, "callbacks": callbacks, **select(keywords, TargetKeywords)}
    with hold_target(place, steal=keywords.get("steal", False)), scratch(place, "unit", "itself") as (unit, mask):
        rows = matrix if metric != "cosine" else copy_of(matrix, unit, lambda _, m: _unit_rows(m, dtype), dtype)
        return api.multiply(rows, rows, place, mask=api.save(mask, itself), **options)


def _unit_rows(rows: CSR, dtype: np.dtype[Any]) -> CSR:
    """Return rows scaled to length 1; rows of zeros stay."""
    values = rows.data.astype(np.float64)
    lengths = np.diff(rows.indptr)
    of_row = np.repeat(np.arange(rows.nrows), lengths)
    squares = np.bincount(of_row, values * values, minlength=rows.nrows)
    factors = 1 / np.sqrt(np.where(squares > 0, squares, 1))
    return CSR(rows.indptr, rows.indices, (values * factors[of_row]).astype(dtype), rows.shape)
