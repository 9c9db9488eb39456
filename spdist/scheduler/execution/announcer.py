"""Publishes plan, progress and end of a run to the scheduler. A failure here never stops a run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spdist.scheduler.dashboard.messages import PROGRESS_SECONDS, RUNS, Message, RunEnd, RunStart
from spdist.scheduler.dashboard.run_state import CELLS
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.telemetry import Progress
from spdist.scheduler.planner.plan import Operand, Plan
from spdist.shown import without_secrets

if TYPE_CHECKING:  # a run without a scheduler loads no Dask
    from distributed import Client

PACKAGES = ("dask", "numba", "numpy", "scipy", "spdist", "zarr")
"""Packages whose versions the page tells."""
CALL_SECONDS = 5.0
"""Seconds that the scheduler may take to hear that a run began, or ended."""

logger = logging.getLogger("spdist")


class Announcer:
    """Sends the messages of one run.

    `client`: none if there is no scheduler.
    `heard`: takes each message in this process, too.
    `stages`: totals by stage, once they are known.
    """

    def __init__(self, client: Client | None, name: str, heard: Callable[[Message], None]) -> None:
        self.client, self.name, self.heard = client, name, heard
        self._next = 0.0
        self._last: Progress | None = None
        self.stages: dict[str, dict[str, float]] = {}

    def begin(self, content: RunStart) -> None:
        """Let the scheduler collect messages, and publish the plan of the run."""
        message = self._message("start", content)
        if self.client is None:
            return
        from spdist.scheduler.execution.supervision.calls import LOST, describe

        try:
            self.client.sync(_register, self.client, callback_timeout=CALL_SECONDS)
            self._send(message)
        except (*LOST, OSError, ImportError, ValueError, TypeError) as error:  # no spdist there, or no answer
            logger.info("the scheduler shows no page /spdist for this run: %s", describe(error))

    def progress(self, now: Progress) -> None:
        """Tell how far the run is, now and then, without waiting for the scheduler."""
        self._last = now
        if (clock := time.monotonic()) < self._next:
            return
        self._next = clock + PROGRESS_SECONDS
        message = self._message("progress", asdict(now))
        if self.client is not None and self.client.loop is not None:
            self.client.loop.add_callback(_log, self.client, message)

    def end(self, error: BaseException | None) -> None:
        """Tell how far the run came, and how it ended."""
        interrupted = isinstance(error, KeyboardInterrupt)
        state = "finished" if error is None else "interrupted" if interrupted else "failed"
        text = "" if error is None or interrupted else without_secrets(str(error))[:2000]
        messages = [self._message("progress", asdict(self._last))] if self._last is not None else []
        messages.append(self._message("end", RunEnd(state=state, error=text, stages=self.stages)))
        if self.client is None:
            return
        from spdist.scheduler.execution.supervision.calls import LOST, is_connected

        with contextlib.suppress(*LOST, OSError):
            for message in messages if is_connected(self.client) else ():
                self._send(message)

    def _message(self, what: str, content: Any) -> Message:
        message = {"product": self.name, "what": what, "at": time.time(), "content": without_secrets(content)}
        self.heard(message)
        return message

    def _send(self, message: Message) -> None:
        assert self.client is not None
        self.client.sync(_log, self.client, message, callback_timeout=CALL_SECONDS)


async def _register(client: Client) -> None:
    from distributed.protocol.pickle import dumps

    from spdist.scheduler.dashboard.collector import RunCollector

    scheduler: Any = client.scheduler
    plugin = dumps(RunCollector())
    await scheduler.register_scheduler_plugin(plugin=plugin, name=RunCollector.name, idempotent=True)


async def _log(client: Client, message: Message) -> None:
    """Publish a message; ignore a lost scheduler, which the driver reports."""
    from spdist.scheduler.execution.supervision.calls import LOST

    with contextlib.suppress(*LOST, OSError):
        scheduler: Any = client.scheduler
        await scheduler.log_event(topic=RUNS, msg=message)


@contextlib.contextmanager
def announced(
    client: Client | None, name: str, content: RunStart, heard: Callable[[Message], None]
) -> Iterator[Announcer]:
    """Announce a run for the time of a ``with`` block.

    `client`: none if there is no scheduler.
    `heard`: takes each message in this process, too.
    """
    announcer = Announcer(client, name, heard)
    announcer.begin(content)
    try:
        yield announcer
    except BaseException as error:
        announcer.end(error)
        raise
    announcer.end(None)


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
        versions={name: _version(name) for name in PACKAGES},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # its source is on the path, and nothing is installed
        return "unknown"


def _operand(url: str, operand: Operand) -> dict[str, Any]:
    return {"url": url, "shape": list(operand.shape), "nnz": operand.nnz, "bytes": operand.nbytes}
