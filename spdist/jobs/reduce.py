"""Reduce a stored product to a number or a vector: C is never whole, in memory or in storage."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spdist import phases
from spdist.jobs.operands import MatrixLike, open_factors, stored_spec
from spdist.jobs.planning import PlanSource, check_values, request_of
from spdist.jobs.report import Callbacks, run_callbacks
from spdist.jobs.starting.alone import alone, plan_if_short
from spdist.kernels.cpu.reduce import reduce_linear
from spdist.kernels.reduction_spec import Reduction, is_linear, spec_for
from spdist.kernels.reduction_spec import check_values as check_reducible
from spdist.matrices.csr import CSR
from spdist.options import ExecutionOptions, ProductOptions
from spdist.scheduler.execution.alone import reduce_alone
from spdist.scheduler.planner import planner
from spdist.storage.matrix import StoredMatrix, refuse_blocks
from spdist.storage.product_spec import Diagonal


def reduce(
    operands: tuple[MatrixLike, MatrixLike],
    what: Reduction,
    product: ProductOptions,
    execution: ExecutionOptions,
    callbacks: Callbacks | None = None,
) -> Any:
    """Return a reduction of the product of two stored matrices; `spdist.reduce` describes it.

    Parameters
    ----------
    operands : (A, B), each a path, URL or StoredMatrix
    what : Reduction
    product : ProductOptions
    execution : ExecutionOptions
    callbacks : Callbacks, optional

    Returns
    -------
    number or array
        As `spdist.reduce`.

    Raises
    ------
    InputError
        If an argument is wrong.
    MatrixError
        If shapes or values do not fit, or a matrix is stored in blocks.
    SpdistError
        If the run failed.
    """
    (a, b), spec = open_factors(*operands), stored_spec(product)
    planner.check_operands(a, b, None)
    refuse_blocks("reductions", a, b, spec.mask)
    spec.check(a, b, execution.engine)
    dtype = spec.dtype(a, b)
    check_reducible(what, dtype)
    if is_linear(what, spec.per_row, dtype) and spec.mask is None:
        with phases.during("run"):
            return reduce_linear(what, _row_blocks(a), _row_blocks(b), (a.shape, b.shape), dtype)
    check_values(execution.engine, dtype)
    if what == "trace" and not spec.fused:
        spec = replace(spec, mask=Diagonal((a.nrows, b.ncols)))
    spec = replace(spec, per_row=spec_for(what, spec.per_row))
    request = request_of(a, b, spec, execution, writes_c=False)
    return _run(PlanSource(request), what, execution, callbacks or Callbacks())


def _run(source: PlanSource, what: Reduction, execution: ExecutionOptions, callbacks: Callbacks) -> Any:
    """Plan and run a reduction on workers."""
    source = plan_if_short(source, execution)
    if (plan := alone(source, execution)) is not None:
        callbacks.planned(plan)
        return reduce_alone(uuid.uuid4().hex[:8], source.draft(), plan, what, run_callbacks(callbacks))
    from spdist.jobs.starting.workers import workers_and_plan  # loads Dask
    from spdist.scheduler.execution.reduction import execute_reduction

    with workers_and_plan(source, execution, callbacks) as ready:
        reports = replace(run_callbacks(callbacks, ready.supervisor), timed=None)
        return execute_reduction(ready.client, ready.name, source.draft(), ready.plan, what, reports)


def _row_blocks(m: StoredMatrix) -> Iterator[CSR]:
    """Yield successive rows of a stored matrix."""
    for start, stop, _ in m.row_blocks(4 * m.indices.chunk):
        yield m.rows(start, stop)
