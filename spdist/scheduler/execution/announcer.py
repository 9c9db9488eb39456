"""Publishes plan, progress and end of a run to its scheduler, if there is one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from spdist.foundation.distribution import version_of
from spdist.scheduler.dashboard.messages import PROGRESS_SECONDS, Message, RunEnd, RunEvent, RunStart
from spdist.scheduler.dashboard.run_state import CELLS
from spdist.scheduler.execution.executor import Executor
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.telemetry import Progress
from spdist.scheduler.planner.plan import Plan, PlannedOperand
from spdist.shown import without_secrets

PACKAGES = ("dask", "numba", "numpy", "scipy", "spdist", "zarr")
"""Packages whose versions the page shows."""


class Announcer:
    """Sends the messages of one run.

    `on_message`: takes each message in this process, too.
    `stages`: totals by stage, once they are known.
    """

    def __init__(self, executor: Executor, on_message: Callable[[Message], None]) -> None:
        self.executor, self.on_message = executor, on_message
        self._next = 0.0
        self._last: Progress | None = None
        self.stages: dict[str, dict[str, float]] = {}

    def begin(self, content: RunStart) -> None:
        """Publish the plan of the run."""
        self.executor.publish([self._message("start", content)])

    def progress(self, now: Progress) -> None:
        """Publish how far the run is, at most every `PROGRESS_SECONDS`."""
        self._last = now
        if (clock := time.monotonic()) < self._next:
            return
        self._next = clock + PROGRESS_SECONDS
        self.executor.publish([self._message("progress", asdict(now))])

    def event(self, text: str) -> None:
        """Publish what was said to the user; from any thread."""
        self.executor.publish([self._message("event", RunEvent(text=text))])

    def end(self, error: BaseException | None) -> None:
        """Publish how far the run came, and how it ended."""
        interrupted = isinstance(error, KeyboardInterrupt)
        state = "finished" if error is None else "interrupted" if interrupted else "failed"
        text = "" if error is None or interrupted else without_secrets(str(error))[:2000]
        messages = [self._message("progress", asdict(self._last))] if self._last is not None else []
        self.executor.publish([*messages, self._message("end", RunEnd(state=state, error=text, stages=self.stages))])

    def _message(self, what: str, content: Any) -> Message:
        message = {"product": self.executor.name, "what": what, "at": time.time(), "content": without_secrets(content)}
        self.on_message(message)
        return message


@contextlib.contextmanager
def announced(executor: Executor, content: RunStart, on_message: Callable[[Message], None]) -> Iterator[Announcer]:
    """Announce a run for the time of a ``with`` block.

    `on_message`: takes each message in this process, too.
    """
    announcer = Announcer(executor, on_message)
    announcer.begin(content)
    try:
        with _warnings_to(announcer.event):
            yield announcer
    except BaseException as error:
        announcer.end(error)
        raise
    announcer.end(None)


@contextlib.contextmanager
def _warnings_to(take: Callable[[str], None]) -> Iterator[None]:
    """Hand on every warning of the package that this process says in a ``with`` block.

    By a filter, which lets all of them pass: a handler would keep Python from printing warnings where nobody handles
    them.
    """

    def look(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            take(record.getMessage())
        return True

    logger = logging.getLogger("spdist")
    logger.addFilter(look)
    try:
        yield
    finally:
        logger.removeFilter(look)


def run_start(plan: Plan, job: JobSpec, target: str, resumed_row: int, expected: float) -> RunStart:
    """Return what a run is going to do.

    `target`: path or URL of C, or the name of the reduction.
    `resumed_row`: rows that are durable already.
    `expected`: predicted wall seconds of all rows.
    """
    rows = plan.a.shape[0]
    starts = [block.start for block in plan.blocks]
    group = -(-len(starts) // CELLS) or 1
    return RunStart(
        target=target,
        operands={
            "A": _operand(job.a.url, plan.a),
            "B": _operand(job.b.url, plan.b),
            "C": _operand(target, plan.c),
        },
        engine=plan.engine,
        grid=plan.grid,
        block_starts=starts[::group],
        rows=rows,
        products=plan.expansion,
        memory_limit=plan.memory_limit,
        host_limit=plan.host_limit,
        projected_memory=plan.projected_host_memory,
        seconds=plan.stage_seconds(),
        expected=expected * (1 - resumed_row / max(rows, 1)),
        resumed_row=resumed_row,
        begun=time.time(),
        versions={name: version_of(name) or "unknown" for name in PACKAGES},
    )


def _operand(url: str, operand: PlannedOperand) -> dict[str, Any]:
    return {"url": url, "shape": list(operand.shape), "nnz": operand.nnz, "bytes": operand.nbytes}
