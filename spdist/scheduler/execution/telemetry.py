"""Timings of stages, from the worker where they are measured to the run's report; and the progress of a run.

Every stage on every worker, GPU stages included, reports through `StageRecorder.record`. Workers publish new timings
as Dask events (topic ``spdist``); a `TimingSubscriber` passes them to `RunCallbacks.on_timings`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spdist.scheduler.execution.records import StageTiming, StageTotal
from spdist.scheduler.planner.plan import Plan

LATE_EVENT_SECONDS = 2.0
"""Seconds to wait at the end of a run for published timings that have not arrived."""

TimingRecord = dict[str, Any]
"""A `StageTiming` as a dictionary, for JSON."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    # finished blocks, and blocks known so far
    blocks: int
    blocks_total: int
    # products (multiply-adds) of the finished blocks, and of all
    products: int
    products_total: int
    nnz: int  # entries of C with a known position
    durable_row: int = 0  # rows of C that are durable; 0 if C is not stored
    in_flight: int = 0  # blocks that workers have
    # of blocks that this run has multiplied, and written, and of all that it does, in microseconds of a typical core;
    # without what was durable before
    multiplied: int = 0
    written: int = 0
    work: int = 0


@dataclass(frozen=True)
class InFlight:
    """The blocks of a run that are not finished."""

    finished: int = 0  # tasks that were finished so far
    blocks: int = 0  # blocks in flight
    oldest: tuple[int, int, int] = (-1, 0, 0)  # number, first row and last row + 1 of the first of them
    held: Mapping[str, int] = field(default_factory=dict)  # number of blocks that each worker has, by address


@dataclass(frozen=True)
class RunCallbacks:
    """Functions that a run calls on the driver."""

    # takes the link to the Dask dashboard, once, when the workers are ready
    started: Callable[[str], None] = lambda link: None
    progress: Callable[[Progress], None] | None = None  # takes a `Progress` after each step
    # takes a list of timings, each a dictionary with the fields of `StageTiming` and ``worker``
    on_timings: Callable[[list[TimingRecord]], None] | None = None
    # takes the addresses of all workers; returns those that the run may use
    admit: Callable[[list[str]], list[str]] = lambda workers: workers
    on_step: Callable[[InFlight], None] = lambda now: None  # called with the `InFlight` after each step
    # takes each message that the scheduler gets about the run; see `dashboard.messages`
    on_message: Callable[[dict[str, Any]], None] = lambda message: None
    # takes the plan; returns the wall seconds that its run should take here, 0.0 if nobody knows
    expects: Callable[[Plan], float] = lambda plan: 0.0

    def with_progress(self, progress: Callable[[Progress], None]) -> RunCallbacks:
        """Return the callbacks with another function that takes the progress."""
        mine = self.progress

        def both(now: Progress) -> None:
            if mine is not None:
                mine(now)
            progress(now)

        return replace(self, progress=both)

    def with_events(self, take: Callable[[float, str], None]) -> RunCallbacks:
        """Return the callbacks with a function that takes what is said of the run: seconds since 1970, and words."""
        mine = self.on_message

        def both(message: dict[str, Any]) -> None:
            mine(message)
            if message["what"] == "event":
                take(message["at"], message["content"]["text"])

        return replace(self, on_message=both)


class StageRecorder:
    """Timings and totals of all stages of one job on one worker; safe to use from several threads."""

    def __init__(self) -> None:
        self.published = 0
        self.limits: dict[str, float] = {}
        self._totals: dict[str, StageTotal] = {}
        self._timings: list[StageTiming] = []
        self._announcements: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, stage: str, row: int) -> Iterator[Callable[[int], None]]:
        """Time a stage of the block that starts at `row`; yields a function that takes bytes moved.

        Examples
        --------
        >>> recorder = StageRecorder()
        >>> with recorder.measure("commit", 0) as add_bytes:
        ...     add_bytes(100)
        >>> recorder.totals["commit"].nbytes
        100
        """
        moved: list[int] = []
        begin, clock = time.time(), time.perf_counter()
        yield moved.append
        self.record(StageTiming(stage, row, begin, time.perf_counter() - clock, sum(moved)))

    def record(self, timing: StageTiming) -> None:
        """Add one run of a stage: the one function through which every stage reports."""
        with self._lock:
            total = self._totals.get(timing.stage) or StageTotal(limit=self.limits.get(timing.stage, 0.0))
            self._totals[timing.stage] = total.plus(timing)
            self._timings.append(timing)

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Set the best possible bytes/s of some stages; totals that begin later show them."""
        self.limits = self.limits | dict(limits)

    @property
    def totals(self) -> dict[str, StageTotal]:
        """Totals by stage."""
        with self._lock:
            return dict(self._totals)

    def take_timings(self) -> list[TimingRecord]:
        """Return the timings since the last call."""
        with self._lock:
            taken, self._timings = self._timings, []
        return [asdict(timing) for timing in taken]

    def announce(self, text: str) -> None:
        """Say something that the user should know, soon after it happened."""
        with self._lock:
            self._announcements.append(text)

    def take_announcements(self) -> list[str]:
        """Return the announcements since the last call."""
        with self._lock:
            taken, self._announcements = self._announcements, []
        return taken

    def publish(self, send: Callable[[list[TimingRecord]], None]) -> None:
        """Send the timings since the last call, if there are any."""
        if timings := self.take_timings():
            self.published += len(timings)
            send(timings)

    def clear(self) -> None:
        """Forget timings and totals; limits stay."""
        with self._lock:
            self._timings, self._totals = [], {}


class TimingSubscriber:
    """Passes the timings that workers publish for one job to a callback.

    `name`: name of the job.
    `on_timings`: see `RunCallbacks`.
    """

    def __init__(self, name: str, on_timings: Callable[[list[TimingRecord]], None]) -> None:
        self.name, self.on_timings = name, on_timings
        self._received: Counter[str] = Counter()

    def receive(self, event: tuple[Any, dict[str, Any]]) -> None:
        """Take an event of `TIMINGS`; Dask calls this in the client's thread."""
        message = event[1]
        if message.get("product") == self.name:
            self._pass_on(message["worker"], message["timings"])
            self._received[message["worker"]] += len(message["timings"])

    def finish(self, unpublished: Mapping[str, tuple[int, list[TimingRecord]]]) -> None:
        """Wait for published timings that are still on their way, then pass on the unpublished ones.

        `unpublished`: for each worker address: how many timings the worker has published, and the timings it has not.
        """
        deadline = time.monotonic() + LATE_EVENT_SECONDS
        for worker, (published, rest) in unpublished.items():
            while self._received[worker] < published and time.monotonic() < deadline:
                time.sleep(0.01)
            self._pass_on(worker, rest)

    def _pass_on(self, worker: str, timings: list[TimingRecord]) -> None:
        self.on_timings([timing | {"worker": worker} for timing in timings])


def add_totals(workers: Iterable[Mapping[str, StageTotal]]) -> dict[str, dict[str, float]]:
    """Add up the totals of all workers.

    `workers`: totals by stage, one mapping a worker.
    Returns for each stage ``seconds``, ``bytes`` and ``tasks`` over all workers, and the ``limit`` in bytes/s of the
    fastest worker.

    Examples
    --------
    >>> add_totals([{"commit": StageTotal(1.0, 10, 1, 5.0)}, {"commit": StageTotal(2.0, 20, 1, 7.0)}])
    {'commit': {'seconds': 3.0, 'bytes': 30, 'tasks': 2, 'limit': 7.0}}
    """
    added: dict[str, dict[str, float]] = {}
    for totals in workers:
        for stage, total in totals.items():
            sums = added.setdefault(stage, {"seconds": 0.0, "bytes": 0, "tasks": 0, "limit": 0.0})
            sums["seconds"] += total.seconds
            sums["bytes"] += total.nbytes
            sums["tasks"] += total.tasks
            sums["limit"] = max(sums["limit"], total.limit)
    return added
