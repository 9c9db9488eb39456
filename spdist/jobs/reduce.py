"""Reduce a stored product to a number or a vector: C is never whole, in memory or in storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spdist.foundation import phases
from spdist.jobs.operands import MatrixLike, open_factors, stored_spec
from spdist.jobs.planning import PlanSource, request_of
from spdist.jobs.predicting.run_time import expectation
from spdist.jobs.report import Callbacks, run_callbacks
from spdist.jobs.starting.start import ready_to_run
from spdist.kernels.cpu.reduce import reduce_linear
from spdist.kernels.engine import find_engine
from spdist.kernels.reduction_spec import Reduction, is_linear, spec_for
from spdist.kernels.reduction_spec import check_values as check_reducible
from spdist.matrices.csr import CSR
from spdist.options import ExecutionOptions, ProductOptions
from spdist.scheduler.execution.reduction import execute_reduction
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.request import PlanRequest
from spdist.storage.foreign import versions
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
    with versions.watched():
        request = request_to_reduce(operands, what, product, execution)
        if is_by_vectors(request, what):
            a, b = request.a, request.b
            with phases.during("run"):
                found = reduce_linear(
                    what, _row_blocks(a), _row_blocks(b), (a.shape, b.shape), request.spec.dtype(a, b)
                )
        else:
            found = _run(PlanSource(request), what, execution, callbacks or Callbacks())
        versions.check()
    return found


def is_by_vectors(request: PlanRequest, what: Reduction) -> bool:
    """Whether a reduction comes from products with vectors: it needs no product of matrices, and no plan."""
    spec = request.spec
    return is_linear(what, spec.per_row, spec.dtype(request.a, request.b)) and spec.mask is None


def request_to_reduce(
    operands: tuple[MatrixLike, MatrixLike], what: Reduction, product: ProductOptions, execution: ExecutionOptions
) -> PlanRequest:
    """Check a reduction, and return the request for its plan; for parameters and errors see `reduce`."""
    (a, b), spec = open_factors(*operands), stored_spec(product)
    planner.check_operands(a, b, None)
    refuse_blocks("reductions", a, b, spec.mask)
    spec.check(a, b, execution.engine)
    dtype = spec.dtype(a, b)
    check_reducible(what, dtype)
    find_engine(execution.engine).check_values(dtype)
    if what == "trace" and not spec.fused:
        spec = replace(spec, mask=Diagonal((a.nrows, b.ncols)))
    spec = replace(spec, per_row=spec_for(what, spec.per_row))
    return request_of(a, b, spec, execution, writes_c=False)


def _run(source: PlanSource, what: Reduction, execution: ExecutionOptions, callbacks: Callbacks) -> Any:
    """Plan and run a reduction."""
    expects = expectation(source.request, execution)
    with ready_to_run(source, execution, callbacks) as (executor, plan, supervisor):
        return execute_reduction(executor, source.draft(), plan, what, run_callbacks(callbacks, expects, supervisor))


def _row_blocks(m: StoredMatrix) -> Iterator[CSR]:
    """Yield successive rows of a stored matrix."""
    for start, stop, _ in m.row_blocks(4 * m.indices.chunk):
        yield m.rows(start, stop)
