"""Multiply two stored matrices: build the request, then make C by rows or by columns."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from spdist.errors import InputError
from spdist.foundation import phases
from spdist.jobs.by_columns import multiply_by_columns
from spdist.jobs.by_rows import multiply_by_rows
from spdist.jobs.operands import MatrixLike, open_factors, resolved, stored_spec
from spdist.jobs.part import multiply_part
from spdist.jobs.predicting.run_time import record_seen
from spdist.jobs.report import Callbacks, Report, record_density, record_phases
from spdist.jobs.reports.density import density_maps
from spdist.jobs.reports.run_report import reported
from spdist.jobs.request import ProductRequest
from spdist.kernels.product_spec import is_by_columns
from spdist.options import ExecutionOptions, OutputOptions, ProductOptions
from spdist.scheduler.planner.plan import Plan
from spdist.storage.foreign import versions
from spdist.storage.foreign.parents import refresh_parent_metadata
from spdist.storage.names.anndata_frames import check_axes
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.stores.registry import normalise


def multiply(
    operands: tuple[MatrixLike, MatrixLike],
    target: str | Path,
    product: ProductOptions,
    execution: ExecutionOptions,
    output: OutputOptions,
    callbacks: Callbacks | None = None,
) -> Report:
    """Multiply two stored matrices and store the product; `spdist.multiply` describes it.

    Parameters
    ----------
    operands : (A, B), each a path, URL or StoredMatrix
    target : str or Path
        Where C goes.
    product : ProductOptions
    execution : ExecutionOptions
    output : OutputOptions
    callbacks : Callbacks, optional

    Returns
    -------
    Report

    Raises
    ------
    InputError
        If an argument is wrong; nothing has been written.
    SpdistError
        If the run failed; durable blocks stay.
    VerificationError
        If C was verified and found false.
    """
    plans: list[Plan] = []
    callbacks = (callbacks or Callbacks()).with_planned(plans.append)
    with phases.clocked() as clock, versions.watched(), reported(output) as written:
        report = _multiply(operands, target, product, execution, written, callbacks)
        if written.record is not None and report.blocks:
            record_density(written.record, density_maps(*resolved(operands, product)[0], target))
            record_phases(written.record, clock)
        report = replace(report, phases=clock.seconds())
    if clock.is_of_process and plans and execution.workers is None and execution.scheduler is None:
        record_seen(report, plans[-1])
    return report


def _multiply(
    operands: tuple[MatrixLike, MatrixLike],
    target: str | Path,
    product: ProductOptions,
    execution: ExecutionOptions,
    output: OutputOptions,
    callbacks: Callbacks,
) -> Report:
    """Multiply, by rows or by columns."""
    begin = time.perf_counter()
    operands, product = resolved(operands, product)
    execution.check()
    by_columns = is_by_columns(product.axis, product.top_n, product.epilogue)
    spec = stored_spec(product)
    a, b = open_factors(*operands)
    flags = product.transpose_a, product.transpose_b
    left, right = (m.names.T if flag else m.names for m, flag in zip((a, b), flags, strict=True))
    names = AxisNames(left.rows, right.columns) if output.names else NO_NAMES
    request = ProductRequest(a, b, normalise(target), spec, execution, output, callbacks, *flags, names)
    shapes = (m.full_shape[::-1] if flag else m.full_shape for m, flag in zip((a, b), flags, strict=True))
    (nrows, _), (_, ncols) = shapes
    check_axes(request.target, (nrows, ncols), "csr_matrix" if a.blocksize is None else "bsr_matrix")
    if output.part is not None:
        if by_columns:
            raise InputError(f"part={output.part!r}: a product in parts is made by rows: leave out axis=0")
        return multiply_part(request, begin)
    report = multiply_by_columns(request) if by_columns else multiply_by_rows(request, begin)
    refresh_parent_metadata(request.target)
    return replace(report, seconds=time.perf_counter() - begin) if by_columns and report.blocks else report
