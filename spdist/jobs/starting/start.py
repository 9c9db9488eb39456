"""Who runs a product: threads of this process if it is short, otherwise workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import uuid
from collections.abc import Iterator

from spdist.foundation.units import format_bytes
from spdist.jobs.planning import PlanSource
from spdist.jobs.report import Callbacks
from spdist.jobs.starting.prepared_run import PreparedRun
from spdist.jobs.starting.short import count_gaining_gpus, count_gpus_for
from spdist.jobs.starting.this_process import plan_for_this_process, plan_if_short
from spdist.options import ExecutionOptions
from spdist.scheduler.execution.executor import Executor
from spdist.scheduler.executors.gpus import GpuExecutor
from spdist.scheduler.executors.threads import ThreadExecutor
from spdist.scheduler.planner.plan import Plan

logger = logging.getLogger("spdist")


@contextlib.contextmanager
def ready_to_run(
    source: PlanSource, execution: ExecutionOptions, callbacks: Callbacks, target: str = ""
) -> Iterator[PreparedRun]:
    """Plan a product and choose its executor; workers that were started for it are stopped afterwards.

    `target`: where C goes; empty if C is not stored.
    Raises what `plan_for_this_process` and `workers_and_plan` raise.
    """
    if execution.scheduler is None and execution.workers is None and (address := _active_client()):
        _say_that_it_is_not_used(address)
    source = plan_if_short(source, execution)
    plan = plan_for_this_process(source, execution)
    if plan is None:
        from spdist.jobs.starting.workers import workers_and_plan  # loads Dask

        with workers_and_plan(source, execution, callbacks, target) as ready:
            yield ready
        return
    callbacks.planned(plan)
    yield PreparedRun(_executor_here(plan), plan)
    from spdist.jobs.compiling.ahead import note_compiled

    note_compiled(source.draft().with_plan(plan, ""))


def _active_client() -> str:
    """Return the address of the scheduler that this process has a Dask client of; empty without one."""
    if (distributed := sys.modules.get("distributed")) is None:
        return ""
    try:
        scheduler = distributed.default_client().scheduler
    except ValueError:  # no client
        return ""
    return "" if scheduler is None else str(scheduler.address)


@functools.cache
def _say_that_it_is_not_used(address: str) -> None:
    logger.warning("the workers of this process's Dask client, %s, are not used: scheduler=client uses them", address)


def _executor_here(plan: Plan) -> Executor:
    """Return the threads of this process that run a plan."""
    name, gpus = uuid.uuid4().hex[:8], count_gpus_for(plan)
    if gpus < (gaining := count_gaining_gpus(plan)):
        logger.warning(
            "%d of %d GPUs are used: the plan takes %s of this host's memory for each; lower host_limit to use all",
            gpus, gaining, format_bytes(plan.projected_host_memory),
        )  # fmt: skip
    return GpuExecutor(name, gpus) if plan.on_gpu else ThreadExecutor(name)
