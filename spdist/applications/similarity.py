"""The most similar rows of each row: texts by their words, users by what they rated, cells by their genes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np

from spdist.applications.files import beside, imported
from spdist.applications.operands import check_same_place, check_values, opened, place_of_result
from spdist.applications.pairs import multiply_pairs
from spdist.errors import InputError
from spdist.jobs.report import Callbacks
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR
from spdist.options import ExecutionOptions, TaskKeywords, lists_keywords, options_of
from spdist.storage.foreign import versions

Metric = Literal["cosine", "inner_product"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@lists_keywords(TaskKeywords)
@versions.watched()
def similarity(
    a: Any,
    out: Any = None,
    *,
    corpus: Any = None,
    top_n: int = 10,
    threshold: float = 0.0,
    metric: Metric = "cosine",
    check: bool = False,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[TaskKeywords],
) -> Any:
    """Find the most similar rows of each row, among the others or in a corpus; all similarities are never whole.

    Parameters
    ----------
    a : (n, m) scipy.sparse matrix or array; path, URL or StoredMatrix; or path of a list of edges or another file
        A row for each text, user or cell; real and finite. A file is imported to a temporary matrix beside C; of
        several edges from one vertex to another, the sum counts.
    out : str or Path, optional
        Where to store C; required for a stored matrix and for a file. C has the names of the rows. A matrix in this
        place is the corpus.
    corpus : (k, m) matrix, in memory if `a` is, else stored, optional
        Rows that are searched in place of the rows of `a`.
    top_n : int
        Number of rows to keep for each row, most similar first. Without a corpus, a row is not compared with itself.
    threshold : float
        Least similarity. Rows that share nothing are never similar.
    metric : {"cosine", "inner_product"}
        Inner products of rows, with rows scaled to length 1 first for the cosine.
    check : bool
        Verify a stored C at the end.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security, resume, overwrite, steal, names
        As in `multiply`.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    (n, n) or (n, k) csr_array or Report
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
    if out is not None and not isinstance(out, str | Path) and corpus is None:
        out, corpus = None, out
    (execution,) = options_of(similarity, keywords, ExecutionOptions)
    execution.check()
    if metric not in METRICS:
        raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    ProductSpec(top_n=top_n, threshold=threshold)  # raises for invalid values
    with imported(a, beside(out, "similarities", keywords), keywords, duplicates="sum") as operand:
        matrix = opened(operand, "similarities")
        other = None if corpus is None else _corpus(corpus, matrix)
        place = place_of_result(out, matrix, "similarities")
        for rows in (matrix,) if other is None else (matrix, other):
            check_values(rows, np.isfinite, "finite real values")
        dtype = matrix.dtype if other is None else np.result_type(matrix.dtype, other.dtype)
        dtype = dtype if dtype.kind == "f" or metric != "cosine" else np.dtype(np.float64)
        least = np.finfo(dtype).tiny if dtype.kind == "f" else 1  # rows that share nothing are not similar
        options = {"top_n": top_n, "threshold": max(threshold, float(least))}
        change = None if metric != "cosine" else ([lambda rows: _unit_rows(rows, dtype)], dtype)
        return multiply_pairs(
            matrix, place, options, keywords, other=other, change=change, check=check, callbacks=callbacks
        )


def _corpus(corpus: Any, queries: Any) -> Any:
    """Return the rows to search, where the queries are: in memory, or stored."""
    other = opened(corpus, "similarities")
    check_same_place(queries, other)
    if other.shape[1] != queries.shape[1]:
        raise InputError(f"rows of {queries.shape[1]:,} columns cannot be compared with rows of {other.shape[1]:,}")
    return other


def _unit_rows(rows: CSR, dtype: np.dtype[Any]) -> CSR:
    """Return rows scaled to length 1; rows of zeros stay."""
    values = rows.data.astype(np.float64)
    lengths = np.diff(rows.indptr)
    of_row = np.repeat(np.arange(rows.nrows), lengths)
    squares = np.bincount(of_row, values * values, minlength=rows.nrows)
    factors = 1 / np.sqrt(np.where(squares > 0, squares, 1))
    return CSR(rows.indptr, rows.indices, (values * factors[of_row]).astype(dtype), rows.shape)
