"""Who runs a product: threads of this process if it is short, otherwise workers."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from spdist.jobs.planning import PlanSource
from spdist.jobs.report import Callbacks
from spdist.jobs.starting.prepared_run import PreparedRun
from spdist.jobs.starting.this_process import plan_for_this_process, plan_if_short
from spdist.options import ExecutionOptions
from spdist.scheduler.executors.threads import ThreadExecutor


@contextlib.contextmanager
def ready_to_run(
    source: PlanSource, execution: ExecutionOptions, callbacks: Callbacks, target: str = ""
) -> Iterator[PreparedRun]:
    """Plan a product and choose its executor; workers that were started for it are stopped afterwards.

    `target`: where C goes; empty if C is not stored.
    Raises what `plan_for_this_process` and `workers_and_plan` raise.
    """
    source = plan_if_short(source, execution)
    plan = plan_for_this_process(source, execution)
    if plan is None:
        from spdist.jobs.starting.workers import workers_and_plan  # loads Dask

        with workers_and_plan(source, execution, callbacks, target) as ready:
            yield ready
        return
    callbacks.planned(plan)
    yield PreparedRun(ThreadExecutor(uuid.uuid4().hex[:8]), plan)
    from spdist.jobs.compiling.ahead import note_compiled

    note_compiled(source.draft().with_plan(plan, ""))
