"""What the driver asks of those who run its stages; `spdist.scheduler.executors` has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from spdist.scheduler.dashboard.messages import Message
from spdist.scheduler.execution.records import JobSpec, StageTotal
from spdist.scheduler.execution.telemetry import TimingRecord
from spdist.scheduler.planner.plan import Plan
from spdist.storage.chunked_array import ChunkedArray

Handle = Hashable
"""A stage that was submitted."""


@dataclass(frozen=True)
class RunCosts:
    """What a run cost its workers."""

    peaks: Sequence[tuple[int, int]]  # peak bytes of each worker's host memory beyond its idle memory, and of its GPU's
    stages: Sequence[Mapping[str, StageTotal]]  # totals of each worker, by stage


class Executor(Protocol):
    """Workers of one job, and the stages that they run.

    `name`: of the job, unique among the jobs of these workers.
    """

    name: str

    @property
    def link(self) -> str:
        """Address of Dask's dashboard; empty without Dask."""
        ...

    def publish(self, messages: Sequence[Message]) -> None:
        """Send messages of the run to its scheduler, if there is one; a failure never stops the run.

        Returns at once for progress or an event alone; otherwise when the scheduler has the start or end of a run.
        """
        ...

    def running(
        self, draft: JobSpec, plan: Plan, url: str = "", on_timings: Callable[[list[TimingRecord]], None] | None = None
    ) -> AbstractContextManager[None]:
        """Have the job on the workers during a ``with`` block; no stage runs when the block has ended.

        `draft`: operands and options; the plan decides the rest.
        `url`: of the unfinished C; empty if each block is reduced.
        `on_timings`: takes timings, the last of them at the end of the block.
        """
        ...

    def workers(self) -> list[str]:
        """Return the addresses of the workers; waits until there is one."""
        ...

    def with_gpu(self, workers: list[str]) -> dict[str, bool]:
        """Return for each of some workers whether it sees a GPU; workers that have left are left out."""
        ...

    def submit(
        self,
        stage: str,
        *arguments: Any,
        key: tuple[int, int],
        worker: str = "",
        after: Sequence[Handle] = (),
        wanted: bool = True,
    ) -> Handle:
        """Submit a stage: "multiply" (all stages up to the commit), "spill", "commit", "join" or "reduce".

        `arguments`: passed to the stage after its context; "multiply" takes the block's task alone.
        `key`: unique among the calls of the stage.
        `worker`: should run the stage; empty leaves the choice to the executor.
        `after`: handles of the stages before; "join" takes their results as further arguments.
        `wanted`: whether the driver needs the result, which may stay where it is otherwise.
        """
        ...

    def next_completed(self) -> Sequence[tuple[Handle, Any]]:
        """Wait for stages; return those that are done, with results: None if one was not wanted and is elsewhere.

        Raises `SpdistError` if a stage failed.
        """
        ...

    def costs(self, workers: Collection[str]) -> RunCosts:
        """Return what the run cost the workers that had blocks."""
        ...

    def workers_that_see(self, array: ChunkedArray, k: int) -> list[str]:
        """Return the workers in other processes that see Zarr chunk `k` of an array."""
        ...
