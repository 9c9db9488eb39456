"""The newest runs of one scheduler, folded from their messages."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from distributed import Scheduler
from distributed.scheduler import WorkerState

from spdist.scheduler.dashboard.messages import RUNS, TIMINGS, Message
from spdist.scheduler.dashboard.run_state import OTHERS, RunState

MOST_RUNS = 20
"""Runs that stay readable after their end; the oldest is dropped first."""


class Runs:
    """Folds the messages of runs, and describes them.

    `by_name`: `RunState` by name of the job, oldest first.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.by_name: OrderedDict[str, RunState] = OrderedDict()
        self._limit = 0
        self._idle: dict[str, int] = {}

    def fold(self, topic: str, message: Message) -> None:
        """Fold one message into the state of its run; ignore messages of unknown runs.

        `topic`: Dask topic of the message.
        Raises `KeyError, TypeError, AttributeError, ValueError` if another version sent it.
        """
        now = time.time()
        if topic == RUNS and message["what"] == "start":
            self._begin(message["product"], message["content"])
            return
        run = self.by_name.get(message["product"])
        if run is None:
            return
        if topic == TIMINGS:
            run.add_timings(message["worker"], message["timings"], message.get("limits", {}))
        elif message["what"] == "event":
            run.add_event(now, message["content"]["text"])
        elif message["what"] == "progress":
            run.add_progress(now, message["content"])
        elif message["what"] == "end":
            run.finish(now, message["content"])

    def _begin(self, name: str, content: Any) -> None:
        self.by_name[name] = RunState(name, content)
        while len(self.by_name) > MOST_RUNS:
            self.by_name.popitem(last=False)
        self._limit = int(content["host_limit"] or content["memory_limit"])
        self._idle = {address: _memory_of(worker) for address, worker in self.scheduler.workers.items()}

    def totals_of_lost(self, name: str) -> list[dict[str, tuple[float, int, int, float]]]:
        """Return what is known of workers that were lost: seconds, bytes, tasks and limit by stage, of each worker.

        `name`: of the job; nothing is known of a job that is not here.
        """
        if (run := self.by_name.get(name)) is None:
            return []
        return [
            {stage: (sums.seconds, sums.nbytes, sums.tasks, sums.limit) for stage, sums in stages.items()}
            for worker, stages in run.of_workers.items()
            if worker != OTHERS and worker not in self.scheduler.workers
        ]

    @property
    def newest(self) -> RunState | None:
        """The run that began last."""
        return next(reversed(self.by_name.values()), None)

    def to_json(self, chosen: str = "") -> dict[str, Any]:
        """Return the state of all runs, newest first, and the memory of the workers.

        `chosen`: name of the run to describe in detail; by default the newest. Other runs have no long lists, so that
        an update of the page stays small.
        """
        now = time.time()
        detailed = chosen if chosen in self.by_name else next(reversed(self.by_name), "")
        runs = [run.to_json(now, short=name != detailed) for name, run in reversed(self.by_name.items())]
        return {"now": now, "runs": runs, "memory": self.memory()}

    def memory(self) -> dict[str, dict[str, int]]:
        """Return each worker's bytes of host memory and of GPU memory, at its last heartbeat.

        ``host`` is what the worker takes beyond its idle memory, ``idle``, as the newest run's limit counts it.
        """
        memory = {}
        for address, worker in self.scheduler.workers.items():
            idle = self._idle.setdefault(address, _memory_of(worker))
            found = {"host": max(_memory_of(worker) - idle, 0), "host_limit": self._limit, "idle": idle}
            gpu = worker.metrics.get("gpu_memory_used"), worker.extra.get("gpu", {}).get("memory-total")
            if isinstance(gpu[0], int) and isinstance(gpu[1], int):
                found |= {"gpu": gpu[0], "gpu_limit": gpu[1]}
            memory[address] = found
        return memory


def _memory_of(worker: WorkerState) -> int:
    return int(worker.metrics.get("memory", 0))
