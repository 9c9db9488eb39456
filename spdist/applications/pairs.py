"""Products of a matrix with its transpose, without the diagonal: similarities of pairs of rows or columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.operands import copy_of, mode_of, parts, scratch
from spdist.jobs.report import Callbacks
from spdist.matrices.csr import CSR
from spdist.options import ApplicationKeywords, TargetKeywords, WhereKeywords, select
from spdist.storage.lock import hold_target
from spdist.storage.matrix import StoredMatrix
from spdist.storage.names.anndata_frames import check_axes

Change = Callable[[CSR], CSR]


def multiply_pairs(
    matrix: Any, place: str, options: dict[str, Any], keywords: ApplicationKeywords, *, by_columns: bool = False,
    change: tuple[Change, np.dtype[Any]] | None = None, check: bool = False, callbacks: Callbacks | None = None,
) -> Any:  # fmt: skip
    """Multiply a matrix by its transpose, except for the diagonal.

    `place`: where C goes, normalised; empty if it stays in memory.
    `options`: of the product: semiring, epilogue, threshold, top-n, triangle.
    `by_columns`: whether pairs are columns, ``A.T @ A``, or rows, ``A @ A.T``.
    `change`: (callable, dtype), optional: changes rows before they are multiplied, to values of this dtype.
    `check, callbacks`: as in `multiply`.
    Returns C in memory if the matrix is in memory, else the report of a stored C.
    """
    count = int(matrix.shape[1 if by_columns else 0])
    check_axes(place, (count, count))
    itself = sp.eye_array(count, dtype=bool).tocsr()
    side = {"transpose_a" if by_columns else "transpose_b": True}
    every = {**options, **side, "complement": True, **select(keywords, WhereKeywords)}
    if not isinstance(matrix, StoredMatrix):
        rows = matrix if change is None else change[0](next(parts(matrix))[1]).to_scipy()
        c = sp.csr_array(api.matmul(rows, rows, mask=itself, **every))
        return api.save(place, c, **mode_of(keywords)) if place else c
    every |= {"check": check, "callbacks": callbacks, **select(keywords, TargetKeywords)}
    with hold_target(place, steal=keywords.get("steal", False)), scratch(place, "changed", "itself") as (copy, mask):
        rows = matrix
        if change is not None:
            changed, dtype = change
            rows = copy_of(matrix, copy, lambda _, m: changed(m), dtype, keywords.get("names", True))
        return api.multiply(rows, rows, place, mask=api.save(mask, itself), **every)
