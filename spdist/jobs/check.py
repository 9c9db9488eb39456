"""Verify a stored product: by Freivalds' check, or by making rows again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Unpack

from spdist.errors import InputError, VerificationError
from spdist.foundation import phases
from spdist.jobs.operands import (
    MatrixLike,
    open_operand,
    resolved,
    stored_spec,
    transposed_copies,
    with_transposed_shape,
)
from spdist.jobs.report import Callbacks, Report
from spdist.matrices.checks import check_product_shapes
from spdist.options import CheckKeywords, ProductOptions
from spdist.storage.lock import hold_target
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import StoredProductSpec
from spdist.verification.result import Verification

Matrices = tuple[StoredMatrix, StoredMatrix, StoredMatrix]
"""A, B and C."""


def verify(
    matrices: tuple[MatrixLike, MatrixLike, MatrixLike], product: ProductOptions, **options: Unpack[CheckKeywords]
) -> Verification:
    """Verify C; `spdist.verify` describes it.

    Parameters
    ----------
    matrices : (A, B, C), each a path, URL or StoredMatrix
    product : ProductOptions
        The options that C was made with. Transposed copies of A and B lie next to C for as long as the check runs.
    **options
        As `spdist.options.CheckKeywords`.

    Returns
    -------
    Verification

    Raises
    ------
    InputError
        If matrices or options do not fit, or C was made by columns; with transposes, if a run writes C or nothing may
        be written next to it.
    CorruptError
        If a Zarr chunk is missing or altered.
    """
    operands, product = resolved(matrices[:2], product)
    spec = stored_spec(product)
    c = open_operand(matrices[2])
    if c.facts.get("product", {}).get("axis") == 0:
        raise InputError(
            f"{c.url} was computed by columns, with axis=0, but this check recomputes rows: verify it by the call that "
            f"computed it, with --axis 0 --resume --verify (resume=True, check=True), which computes nothing again"
        )
    if c.is_known_canonical:
        c.fingerprint()  # a Zarr chunk that is damaged is named before any product is made
    flags = product.transpose_a, product.transpose_b
    with _transposed((open_operand(operands[0]), open_operand(operands[1])), flags, c) as (a, b):
        return _verify((a, b, c), spec, **options)


@contextlib.contextmanager
def _transposed(
    operands: tuple[StoredMatrix, StoredMatrix], flags: tuple[bool, bool], c: StoredMatrix
) -> Iterator[tuple[StoredMatrix, StoredMatrix]]:
    """Yield A and B, each transposed if its flag says so; copies lie next to C, which is held meanwhile."""
    if not any(flags):
        yield operands
        return
    a, b = (with_transposed_shape(m) if flag else m for m, flag in zip(operands, flags, strict=True))
    check_product_shapes(a.shape, b.shape)  # before the copies are made
    with hold_target(c.url), transposed_copies(c.url, *zip(operands, flags, strict=True)) as copies:
        yield copies


def _verify(matrices: Matrices, spec: StoredProductSpec, **options: Any) -> Verification:
    from spdist.verification.freivalds import verify as verify_plain  # loads scipy.sparse
    from spdist.verification.recompute_sample import verify_by_recomputing

    if spec.plain:
        return verify_plain(*matrices, **options)
    return verify_by_recomputing(*matrices, spec, **options)


def verified(
    report: Report, matrices: Matrices, spec: StoredProductSpec, callbacks: Callbacks, name: str = ""
) -> Report:
    """Verify C, and return the report with the findings.

    `matrices`: (StoredMatrix, StoredMatrix, StoredMatrix): A, B and C.
    `callbacks`: its `verifying` is called.
    `name`: name of C in an error; by default its URL.
    Returns with `verification`.
    Raises `VerificationError` if C is false.
    """
    with phases.during("verify"):
        found = _verify(matrices, spec, progress=callbacks.verifying)
    if not found.ok:
        raise VerificationError(f"{name or matrices[2].url} is not A @ B: {found.reason}; it is kept for inspection")
    return replace(report, verification=found.to_json())
