"""What a product needs to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from spdist.scheduler.execution.executor import Executor
from spdist.scheduler.planner.plan import Plan

if TYPE_CHECKING:  # loads Dask
    from spdist.scheduler.executors.supervision.supervisor import Supervisor


class PreparedRun(NamedTuple):
    """A plan, and who runs it."""

    executor: Executor
    plan: Plan
    supervisor: Supervisor | None = None  # looks after workers; it has found that they fit the plan
