"""Products of a matrix with its transpose, without the diagonal: similarities of pairs of rows or columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    other: Any = None, with_own: bool = False, change: tuple[Sequence[Change], np.dtype[Any]] | None = None,
    last: tuple[CSR, CSR] | None = None, check: bool = False, callbacks: Callbacks | None = None,
) -> Any:  # fmt: skip
    """Multiply a matrix by its transpose, or by another one's.

    `place`: where C goes, normalised; empty if it stays in memory.
    `options`: of the product: semiring, epilogue, threshold, top-n, triangle; a mask, if `with_own`.
    `by_columns`: whether pairs are columns, ``A.T @ A``, or rows, ``A @ A.T``.
    `other`: a matrix that lies where `matrix` does, whose rows are the second ones of pairs.
    `with_own`: whether C has the diagonal, where it is of pairs of one matrix.
    `change`: (callables, dtype), optional: change rows before they are multiplied, to values of this dtype; one for
    both operands, or one for each.
    `last`: a row to add to the first and to the second operand, after the change.
    `check, callbacks`: as in `multiply`.
    Returns C in memory if the matrix is in memory, else the report of a stored C.
    """
    both = [matrix] if other is None and last is None else [matrix, matrix if other is None else other]
    changes = [] if change is None else [change[0][min(at, len(change[0]) - 1)] for at in range(len(both))]
    first, second = (int(both[at].shape[1 if by_columns else 0]) for at in (0, -1))
    check_axes(place, (first, second))
    itself = sp.eye_array(first, dtype=bool).tocsr() if other is None and not with_own else None
    side = {"transpose_a" if by_columns else "transpose_b": True}
    every = {**options, **side, "complement": itself is not None, **select(keywords, WhereKeywords)}
    if not isinstance(matrix, StoredMatrix):
        rows = (
            both
            if change is None
            else [changed(next(parts(m))[1]).to_scipy() for m, changed in zip(both, changes, strict=True)]
        )
        if last is not None:
            rows = [sp.vstack([m, end.to_scipy()], format="csr") for m, end in zip(rows, last, strict=True)]
        c = sp.csr_array(api.matmul(rows[0], rows[-1], **every | ({} if itself is None else {"mask": itself})))
        return api.save(place, c, **mode_of(keywords)) if place else c
    every |= {"check": check, "callbacks": callbacks, **select(keywords, TargetKeywords)}
    wanted = "changed", "changed-other", "itself"
    with hold_target(place, steal=keywords.get("steal", False)), scratch(place, *wanted) as (*copies, mask):
        if change is not None:
            _, dtype = change
            names = keywords.get("names", True)
            both = [
                copy_of(m, copy, _of_rows(changed), dtype, names, end)
                for m, changed, copy, end in zip(both, changes, copies, last or (None, None), strict=False)
            ]
        if itself is not None:
            every["mask"] = api.save(mask, itself)
        return api.multiply(both[0], both[-1], place, **every)


def _of_rows(changed: Change) -> Callable[[int, CSR], CSR]:
    """Return a change of rows wherever they are."""
    return lambda _, rows: changed(rows)
