"""Products so short that this process makes them itself, before workers would have started."""

from __future__ import annotations

from dataclasses import replace

from spdist.errors import InputError
from spdist.foundation import phases
from spdist.foundation.memory import host_memory
from spdist.foundation.units import counted, format_bytes
from spdist.jobs.planning import PlanSource
from spdist.jobs.starting.short import is_short, room
from spdist.kernels.engine import find_engine
from spdist.options import ExecutionOptions
from spdist.scheduler.execution import worker_process
from spdist.scheduler.planner.plan import Plan

GPU_PRODUCTS = 1 << 35
"""Products, as if all rows of B had one length, up to which a product on a GPU is planned before anything starts.

Workers start while a longer one is planned."""
LOADED_BYTES = 110 << 20
"""Resident bytes of a process that has loaded Dask and kernels; measured with Linux, Python 3.11 and NumPy 2."""
LEAST_ROOM = 32 << 20
"""Bytes of the least memory limit that a message recommends."""


def plan_if_short(source: PlanSource, execution: ExecutionOptions) -> PlanSource:
    """Make the plan at once if the product may be so short that it needs no workers.

    With the engines of CPUs, workers would start after the plan anyway.

    Returns with the plan, or `source` itself.
    """
    if source.stored_plan is not None or _has_workers(execution):
        return source
    a, b = source.request.a, source.request.b
    if source.request.on_gpu and a.nnz * b.nnz // max(b.nrows, 1) > GPU_PRODUCTS:
        return source
    with phases.during("plan"), worker_process.small_arrays_kept(source.request.host_bytes):
        return replace(source, stored_plan=source.make())


def plan_for_this_process(source: PlanSource, execution: ExecutionOptions) -> Plan | None:
    """Return the plan if this process shall make the product itself; None if it needs workers.

    `source`: from `plan_if_short`.
    Raises `InputError` if this process cannot take as much memory as the plan needs.
    """
    plan = source.stored_plan
    if plan is None or _has_workers(execution) or not is_short(plan):
        if execution.scheduler is None:
            _check_memory(execution.workers or 0, 0 if plan is None else plan.projected_host_memory)
        return None
    left = room()
    if plan.projected_host_memory > left:
        less = f"plan with memory_limit={format_bytes(left)}" if left >= LEAST_ROOM else "give it more"
        raise InputError(
            f"the plan needs {format_bytes(plan.projected_host_memory)}, and this host or its control group leaves "
            f"{format_bytes(left)}: {less}"
        )
    return plan


def _check_memory(workers: int, of_each: int) -> None:
    """Refuse workers for which this host or its control group is too small: the system would end them without a word.

    `workers`: processes that will be started; 0 if the only worker is in this process.
    `of_each`: bytes that the plan takes on each worker; 0 if there is no plan yet.
    """
    needed, limit = (workers + 1) * LOADED_BYTES + max(workers, 1) * of_each, host_memory()
    if needed > limit:
        who = f"this process and {counted(workers, 'worker')}" if workers else "this process"
        raise InputError(
            f"{who} would take {format_bytes(needed)} of memory with libraries, and this host or its control group "
            f"has {format_bytes(limit)}: give it more, or lower workers and memory_limit"
        )


def _has_workers(execution: ExecutionOptions) -> bool:
    return execution.workers is not None or execution.scheduler is not None or find_engine(execution.engine).mixes
