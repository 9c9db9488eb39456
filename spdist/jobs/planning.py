"""From a request to a plan: limits in bytes, checks of values and engine, and the one place that calls the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from spdist.errors import InputError
from spdist.foundation.cpus import cpus_per_worker
from spdist.foundation.units import parse_bytes
from spdist.jobs.operands import MatrixLike, open_factors, stored_spec
from spdist.jobs.predicting.choice import quickest
from spdist.kernels.engine import find_engine
from spdist.options import DEFAULT_MEMORY_LIMIT, ExecutionOptions, ProductOptions
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import StoredProductSpec

if TYPE_CHECKING:
    from spdist.scheduler.execution.records import JobSpec
    from spdist.scheduler.planner.remote_readers import RemoteReaders


MOST_THREADS = 64
"""Most threads of a worker that multiplies on its cores."""


class WorkerLimits(NamedTuple):
    """Memory of a worker."""

    memory: int  # bytes; of the GPU with an engine of GPUs
    host: int | None  # bytes of the host's memory with an engine of GPUs; None means the default


@dataclass(frozen=True)
class PlanSource:
    """Where the plan of a product comes from: the planner, or an unfinished C that is continued."""

    request: PlanRequest  # operands, engine and limits; with a stored plan, the plan's engine and limits
    stored_plan: Plan | None = None  # the plan of the unfinished C

    def make(self, readers: RemoteReaders | None = None) -> Plan:
        """Return the stored plan, or make one; `readers` are processes that help to read A."""
        return planner.make_plan(self.request, readers) if self.stored_plan is None else self.stored_plan

    def for_threads(self, threads: int) -> PlanSource:
        """Return the source of plans for workers of `threads` threads, if they multiply on their cores."""
        one = self.request
        return self if one.on_gpu else replace(self, request=replace(one, threads=min(threads, MOST_THREADS)))

    def will_be_resident(self) -> bool:
        """Whether the plan will almost surely keep all of B in each worker's memory."""
        return planner.will_be_resident(self.request)

    def draft(self) -> JobSpec:
        """Return the job before there is a plan: its blocks are not cut yet."""
        from spdist.scheduler.execution.records import JobSpec

        one = self.request
        bounds = (0, one.a.ncols), (0, one.b.ncols)
        return JobSpec(
            one.a, one.b, one.engine, False, *bounds, memory_limit=one.memory_limit, host_limit=one.host_bytes,
            product=one.spec,
        )  # fmt: skip


def plan(a: MatrixLike, b: MatrixLike, product: ProductOptions, execution: ExecutionOptions) -> Plan:
    """Plan ``A @ B``; `spdist.plan` describes it.

    Parameters
    ----------
    a, b : path, URL or StoredMatrix
    product : ProductOptions
    execution : ExecutionOptions

    Returns
    -------
    Plan

    Raises
    ------
    InputError
        If operands, options or limits are wrong.
    MemoryBoundError
        If the smallest block does not fit.
    """
    return planner.make_plan(planned_request(a, b, product, execution))


def planned_request(a: MatrixLike, b: MatrixLike, product: ProductOptions, execution: ExecutionOptions) -> PlanRequest:
    """Check a product, and return the request for its plan; for parameters and errors see `plan`."""
    execution.check()
    spec = stored_spec(product)
    left, right = open_factors(a, b)
    check_fit(left, right, spec, execution)
    find_engine(execution.engine).check_values(spec.dtype(left, right))
    return request_of(left, right, spec, execution)


def request_of(
    a: StoredMatrix, b: StoredMatrix, spec: StoredProductSpec, execution: ExecutionOptions, *, writes_c: bool = True
) -> PlanRequest:
    """Return the request for a plan, with the limits and threads of workers on this machine, and with its engine.

    An engine that leaves the choice may become one of GPUs; ``memory_limit`` is the host's in either case.
    `writes_c`: as of `PlanRequest`.
    Raises `InputError` As `limits_of`.
    """
    limits = limits_of(execution)
    threads = 1 if find_engine(execution.engine).uses_gpu else min(cpus_per_worker(execution.workers), MOST_THREADS)
    grid = execution.grid
    request = PlanRequest(a, b, execution.engine, limits.memory, limits.host, grid, spec, writes_c, threads)
    counterpart = find_engine(execution.engine).gpu_counterpart
    if not counterpart or execution.workers is not None or execution.scheduler is not None:
        return request
    on_gpus = replace(execution, engine=counterpart, memory_limit=None, host_limit=execution.memory_limit)
    return quickest(request, lambda: request_of(a, b, spec, on_gpus, writes_c=writes_c))


def check_fit(a: StoredMatrix, b: StoredMatrix, spec: StoredProductSpec, execution: ExecutionOptions) -> None:
    """Refuse operands, options and a grid that do not fit each other or the engine.

    `execution`: its engine and grid count.
    Raises `InputError` if they do not fit.
    """
    planner.check_operands(a, b, execution.grid)
    spec.check(a, b, execution.engine)


def limits_of(execution: ExecutionOptions) -> WorkerLimits:
    """Return the limits in bytes, with defaults for limits that were not given.

    Raises `InputError` if a limit is not a size, if `host_limit` is given for an engine of the CPU, or if
    `memory_limit` is missing and this machine has no GPU whose free memory could be the limit.

    Examples
    --------
    >>> limits_of(ExecutionOptions(memory_limit="1KiB"))
    WorkerLimits(memory=1024, host=None)
    """
    if not find_engine(execution.engine).uses_gpu:
        if execution.host_limit is not None:
            raise InputError(
                f"host_limit={execution.host_limit} is for GPUs: engine={execution.engine!r} has its memory_limit on "
                f"the host"
            )
        limit = DEFAULT_MEMORY_LIMIT if execution.memory_limit is None else execution.memory_limit
        return WorkerLimits(parse_bytes(limit), None)
    host = None if execution.host_limit is None else parse_bytes(execution.host_limit)
    memory = free_gpu_memory() if execution.memory_limit is None else parse_bytes(execution.memory_limit)
    return WorkerLimits(memory, host)


def free_gpu_memory() -> int:
    """Return the default limit of GPU memory for a worker, in bytes, from the free memory of a GPU of this machine.

    Raises `InputError` if there is no GPU.
    """
    from spdist.kernels.streaming.gpu_device import free_memory
    from spdist.scheduler.execution import worker_process

    try:
        worker_process.count_gpus()
    except InputError as error:
        raise InputError(
            f"{error}; where the GPUs are on other machines, say what each may take with memory_limit"
        ) from None
    return free_memory()
