"""Co-occurrence: columns of an incidence matrix that share rows, counted or by pointwise mutual information."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np

from spdist.applications.operands import opened, parts, place_of_result
from spdist.applications.pairs import multiply_pairs
from spdist.errors import InputError
from spdist.jobs.report import Callbacks
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.semirings import Semiring
from spdist.options import ApplicationKeywords, ExecutionOptions, lists_keywords, options_of
from spdist.storage.foreign import versions

Measure = Literal["count", "pmi"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


@lists_keywords(ApplicationKeywords)
@versions.watched()
def cooccurrence(
    a: Any,
    out: str | Path | None = None,
    *,
    measure: Measure = "count",
    threshold: float | None = None,
    top_n: int | None = None,
    triangle: str | None = None,
    check: bool = False,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[ApplicationKeywords],
) -> Any:
    """Count the rows that columns share, ``A.T @ A`` over plus_pair.

    Parameters
    ----------
    a : (n, m) scipy.sparse matrix or array; or path, URL or StoredMatrix
        A row for each text, basket or gene, and an entry where it holds an item; values do not count.
    out : str or Path, optional
        Where to store C; required for a stored matrix.
    measure : {"count", "pmi"}
        The number of rows that items i and j share, or log(shared * rows / (rows of i * rows of j)) [1]_. With
        the logarithm, a `threshold` of 0 keeps pairs that occur together more often than by chance.
    threshold : float, optional
        Least value to keep.
    top_n : int, optional
        Number of items to keep for each item, largest values first. An item is not counted with itself.
    triangle : {"upper"}, optional
        Store each pair once, above the diagonal.
    check : bool
        Verify a stored C at the end.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security, resume, overwrite, steal, names
        As in `multiply`.

    Returns
    -------
    (m, m) csr_array or Report
        In memory if the matrix is; the report of a stored C.

    Raises
    ------
    InputError
        If an argument is wrong; nothing has been written.
    SpdistError
        If the run failed.

    References
    ----------
    .. [1] K. Church, P. Hanks, "Word association norms, mutual information, and lexicography", Computational
       Linguistics 16(1), 1990.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> baskets = sp.csr_array([[1, 1, 0], [1, 1, 1]])
    >>> cooccurrence(baskets).toarray()
    array([[0, 2, 1],
           [2, 0, 1],
           [1, 1, 0]])
    """
    (execution,) = options_of(cooccurrence, keywords, ExecutionOptions)
    execution.check()
    if measure not in MEASURES:
        raise InputError(f"measure={measure!r} is not one of {', '.join(MEASURES)}")
    ProductSpec(top_n=top_n, threshold=threshold, triangle=triangle)  # raises for invalid values
    matrix = opened(a, "counts")
    place = place_of_result(out, matrix, "counts")
    options = {"threshold": threshold, "top_n": top_n, "triangle": triangle}
    options |= {"semiring": "plus_pair"} if measure == "count" else _mutual_information(matrix)
    return multiply_pairs(matrix, place, options, keywords, by_columns=True, check=check, callbacks=callbacks)


def _mutual_information(matrix: Any) -> dict[str, Any]:
    """Return semiring and epilogue of pointwise mutual information."""
    counts = np.zeros(matrix.shape[1])
    for _, rows in parts(matrix):
        counts += np.bincount(rows.indices, minlength=matrix.shape[1])
    counts = np.maximum(counts, 1)
    factors = {"rows": 1 / counts, "columns": matrix.shape[0] / counts}
    return {"semiring": PAIRS, "epilogue": Epilogue(**factors, apply=_logarithm, cuda="log(x)")}


def _add(x: Any, y: Any) -> Any:
    return x + y


def _pair(x: Any, y: Any) -> Any:
    return 1.0


def _logarithm(x: Any) -> Any:
    return math.log(x)


PAIRS = Semiring(_add, _pair, dtype=np.float64, reads="", name="plus_pair as float64", cuda=("x + y", "1"))
"""Counts as float64, which may become fractions."""
