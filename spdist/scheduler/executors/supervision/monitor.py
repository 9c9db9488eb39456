"""Says what a run waits for: a thread that writes a line when nothing has happened for a while, and tries connections.

The thread owns no state of the run. The driver hands it frozen values (`Monitor.record_in_flight`), and the scheduler's
events say which workers come and go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distributed import Client
from distributed.scheduler import heartbeat_interval

from spdist.foundation.units import counted
from spdist.scheduler.dashboard.messages import ANNOUNCEMENTS
from spdist.scheduler.execution.telemetry import InFlight
from spdist.scheduler.executors.supervision.calls import LOST, is_connected, remove_worker
from spdist.scheduler.executors.supervision.silence import SignsOfLife
from spdist.scheduler.executors.supervision.streams import Fetches, repair_streams

logger = logging.getLogger("spdist")

WORKER_EVENTS = "all"
"""Dask topic of workers that join and leave."""
CALL_SECONDS = 2.0
"""Seconds within which the scheduler must answer: on which worker a block is, whom it heard."""
SILENT_INTERVALS = 5
"""Heartbeats in a row that a silent worker has missed, at the least."""


@dataclass(frozen=True)
class MonitorTuning:
    """When a monitor says that nothing happens."""

    no_workers_seconds: float = 10.0  # seconds without workers
    idle_seconds: float = 60.0  # seconds in which nothing was finished
    repair_seconds: float = 60.0  # seconds in which nothing was finished, after which connections are tried
    # seconds without a heartbeat, after which a worker's blocks are given to others. The intervals of heartbeats grow
    # with the number of workers; it is at least `SILENT_INTERVALS` of them.
    silent_seconds: float = 10.0
    growth: float = 2.0  # the wait before each further line grows by this factor
    most_seconds: float = 600.0  # longest time between two lines
    tick_seconds: float = 0.5  # seconds between two looks


TUNING = MonitorTuning()


class _Clock:
    """Tells when to say again that something has lasted for a while, at growing intervals.

    `first`: seconds until the first line.
    """

    def __init__(self, first: float, tuning: MonitorTuning) -> None:
        self.first, self.tuning = first, tuning
        self.reset(0.0)

    def reset(self, now: float) -> None:
        """Restart all timers, because something happened."""
        self.since, self.wait = now, self.first

    def due(self, now: float) -> float:
        """Return the seconds that it has lasted if a line is due; 0.0 if none is."""
        lasted = now - self.since
        if lasted < self.wait:
            return 0.0
        self.wait = lasted + min(self.wait * (self.tuning.growth - 1), self.tuning.most_seconds)
        return lasted


class Monitor:
    """Watches a run from a daemon thread while its ``with`` block lasts.

    `name`: name of the job on the workers.
    """

    def __init__(self, client: Client, name: str, tuning: MonitorTuning | None = None) -> None:
        self.client, self.name, self.tuning = client, name, tuning or TUNING
        self._phase = "the workers to answer"
        self._in_flight = InFlight()
        self._life = SignsOfLife(time.monotonic())
        self._replaced: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spdist-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self.client.subscribe_topic(WORKER_EVENTS, self._worker_event)
        self.client.subscribe_topic(ANNOUNCEMENTS, self._announcement)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if is_connected(self.client):
            for topic in (WORKER_EVENTS, ANNOUNCEMENTS):
                self.client.unsubscribe_topic(topic)

    def record_in_flight(self, now: InFlight) -> None:
        """Keep what is in flight for the thread; the driver calls this after each step."""
        self._in_flight = now

    @contextmanager
    def waiting_for(self, phase: str) -> Iterator[None]:
        """Name what the run waits for during a ``with`` block: "the plan"."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at the run now and then until it ends or its scheduler is gone."""
        start = time.monotonic()
        no_workers = _Clock(self.tuning.no_workers_seconds, self.tuning)
        idle = _Clock(self.tuning.idle_seconds, self.tuning)
        no_workers.reset(start)
        idle.reset(start)
        before: tuple[str, int] = ("", -1)
        next_look = start
        fetching: Fetches | None = None
        while not self._stop.wait(self.tuning.tick_seconds) and is_connected(self.client):
            now, in_flight = time.monotonic(), self._in_flight
            if count := self._count_workers():
                no_workers.reset(now)
                if count > 1 and in_flight.blocks and now >= next_look:
                    self._replace_silent_workers(in_flight, count)
                    next_look = now + heartbeat_interval(count)
                if before != (self._phase, in_flight.finished):
                    before = self._phase, in_flight.finished
                    idle.reset(now)
                    fetching = None
                elif lasted := idle.due(now):
                    logger.warning("%s", self._idle_line(in_flight, lasted))
                    if lasted >= self.tuning.repair_seconds:
                        fetching = repair_streams(self.client, fetching)
            else:
                idle.reset(now)
                if lasted := no_workers.due(now):
                    logger.warning("%s", self._no_workers_line(lasted))

    def _replace_silent_workers(self, in_flight: InFlight, count: int) -> None:
        """Give the blocks of workers without a sign of life to others."""
        scheduler: Any = self.client.scheduler
        seconds = max(self.tuning.silent_seconds, SILENT_INTERVALS * heartbeat_interval(count))
        try:
            infos = self.client.sync(scheduler.identity, n_workers=-1, callback_timeout=CALL_SECONDS)["workers"]
        except (*LOST, OSError):
            return
        heard = {address: info["last_seen"] for address, info in infos.items()}
        for worker in self._life.find_silent(heard, in_flight.held, time.monotonic(), seconds):
            held = in_flight.held[worker]
            logger.warning(
                "worker %s has given no sign of life for %.0f s: its %s %s given to other workers",
                worker, seconds, counted(held, "block"), "is" if held == 1 else "are",
            )  # fmt: skip
            self._replaced.add(worker)
            remove_worker(self.client, worker, CALL_SECONDS)

    def _count_workers(self) -> int:
        """Return how many workers there are, as the client's last look at the scheduler found; at least 0."""
        return int(self.client._scheduler_identity.get("n_workers", 0))

    def _no_workers_line(self, lasted: float) -> str:
        address = getattr(self.client.scheduler, "address", "the scheduler's address")
        how = (
            "they are being started" if self.client.cluster is not None else f"start some with `dask worker {address}`"
        )
        return (
            f"no workers at {address} for {lasted:.0f} s: waiting; {how}, or stop with Ctrl-C; finished rows are kept"
        )

    def _idle_line(self, in_flight: InFlight, lasted: float) -> str:
        if not in_flight.blocks:
            return f"waiting for {self._phase} for {lasted:.0f} s"
        number, start, stop = in_flight.oldest
        blocks = f"{counted(in_flight.blocks, 'block')} {'is' if in_flight.blocks == 1 else 'are'}"
        return (
            f"nothing finished for {lasted:.0f} s: {blocks} in flight; the oldest, rows {start:,} to {stop:,}, "
            f"{self._find(number)}"
        )

    def _find(self, number: int) -> str:
        """Return in words where a block is: its stage, and its worker."""
        scheduler: Any = self.client.scheduler
        try:
            processing = self.client.sync(scheduler.processing, workers=None, callback_timeout=CALL_SECONDS)
        except (*LOST, OSError):
            return "is somewhere: the scheduler does not answer"
        for worker, keys in processing.items():
            for key in keys:
                stage, of_job = _stage_of(key, self.name)
                if of_job == number and stage != "join":
                    return f"is in stage {stage} on worker {worker}"
        return "waits for a worker"

    # -- events of the scheduler, in the client's thread ---------------------------------------------------------------

    def _worker_event(self, event: tuple[float, Any]) -> None:
        """Say that a worker has joined or was lost."""
        message = event[1]
        action = message.get("action") if isinstance(message, dict) else None
        if self._stop.is_set():
            return
        if action == "add-worker":
            self._replaced.discard(message["worker"])
            logger.warning("worker %s has joined", message["worker"])
        elif action == "remove-worker" and message["worker"] not in self._replaced:
            held = self._in_flight.held.get(message["worker"], 0)
            again = f"its {counted(held, 'block')} {'is' if held == 1 else 'are'} computed again"
            logger.warning("worker %s was lost: %s", message["worker"], again if held else "it held no block")

    def _announcement(self, event: tuple[float, Any]) -> None:
        """Say what a worker announced."""
        message = event[1]
        if message.get("product") == self.name:
            logger.warning("%s", message["text"])


def _stage_of(key: Any, name: str) -> tuple[str, int]:
    """Return the stage and the block's number of a task; ("", -1) if it is of another job."""
    if not isinstance(key, tuple | list) or len(key) < 2 or not str(key[0]).endswith(f"-{name}"):
        return "", -1
    return str(key[0]).removesuffix(f"-{name}"), int(key[1])
