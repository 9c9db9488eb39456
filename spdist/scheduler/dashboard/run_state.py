"""The state of one run, folded from its messages: its size is bounded, however many blocks there are.

No clock, no Dask: times come with the messages, so that a record that was written earlier folds to the same state.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from spdist.scheduler.dashboard.messages import SCHEMA, Message, RunEnd, RunProgress, RunStart
from spdist.scheduler.dashboard.pace import Pace
from spdist.scheduler.dashboard.timeline import Timeline

CELLS = 256
"""Cells of the map of blocks."""
RECENT = 1000
"""Newest runs of stages that are kept one by one."""
RECENT_SECONDS = 10.0
"""Seconds over which the stage that takes most time now is determined."""
GANTT_SECONDS = 60.0
"""Seconds of the Gantt chart."""
EVENTS = 200
"""Newest events that are kept."""
SAMPLES = 240
"""Samples of progress; when they are full, every second one is dropped."""
WORKERS = 256
"""Workers with totals of their own; workers that join later share one total."""
OTHERS = "other workers"
"""The name of these workers."""

WAITING, COMPUTED, WRITTEN, DURABLE = range(4)
"""States of a cell of the map: nothing done, products done, rows written, all rows durable."""


@dataclass
class StageSums:
    """Totals of a stage: seconds, bytes, number of runs, and the best rate of the machine in bytes/s."""

    seconds: float = 0.0
    nbytes: int = 0
    tasks: int = 0
    limit: float = 0.0

    def add(self, seconds: float, nbytes: int) -> None:
        """Add one run of the stage."""
        self.seconds += seconds
        self.nbytes += nbytes
        self.tasks += 1


@dataclass
class RunState:
    """The state of one run.

    `name`: name of the job.
    """

    name: str
    start: RunStart
    progress: RunProgress | None = None
    end: RunEnd | None = None
    ended: float = 0.0
    stages: dict[str, StageSums] = field(default_factory=dict)
    of_workers: dict[str, dict[str, StageSums]] = field(default_factory=dict)  # of each worker, by stage
    recent: deque[tuple[str, str, int, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    samples: list[tuple[float, int]] = field(default_factory=list)
    cells: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.start["begun"])
        self.pace = Pace(self.start["begun"], self.start.get("expected", 0.0))
        self.cells = bytearray(len(self.start["block_starts"]))
        if self.start["resumed_row"]:
            self.add_event(self.start["begun"], f"resumed: {self.start['resumed_row']:,} rows were durable already")

    # -- messages in ---------------------------------------------------------------------------------------------------

    def add_timings(self, worker: str, timings: list[Message], limits: dict[str, float]) -> None:
        """Add runs of stages on a worker.

        `timings`: with the fields of `StageTiming`.
        `limits`: the machine's best bytes/s of some stages.
        """
        if worker not in self.of_workers and len(self.of_workers) >= WORKERS:
            worker = OTHERS
        mine = self.of_workers.setdefault(worker, {})
        for timing in timings:
            stage, row, begin, seconds = timing["stage"], timing["row"], timing["begin"], timing["seconds"]
            for sums in (self.stages, mine):
                sums.setdefault(stage, StageSums()).add(seconds, timing["nbytes"])
            if not stage.startswith("gpu "):  # parts of the stage multiply
                self.timeline.add(stage, begin, seconds)
                self.recent.append((worker, stage, row, begin, seconds))
            self._mark(stage, row)
        for stage, limit in limits.items():
            if stage in self.stages:
                self.stages[stage].limit = max(self.stages[stage].limit, limit)

    def add_progress(self, now: float, progress: RunProgress) -> None:
        """Record the progress of the run.

        `now`: seconds since 1970.
        """
        given: dict[str, Any] = {"multiplied": 0, "written": 0, "work": 0, **progress}  # not in older records
        known = {name: int(given[name]) for name in RunProgress.__annotations__}
        self.progress = RunProgress(**known)  # type: ignore[typeddict-item]
        if known["work"]:
            self.pace.add(now, known["multiplied"], known["written"], known["work"])
        self.samples.append((now, progress["products"]))
        if len(self.samples) > SAMPLES:
            del self.samples[1:-1:2]
        for cell, stop in enumerate([*self.start["block_starts"][1:], self.start["rows"]]):
            if stop > progress["durable_row"]:
                break
            self.cells[cell] = DURABLE

    def add_event(self, now: float, text: str) -> None:
        """Add an event.

        `now`: seconds since 1970.
        `text`: what happened, for the user.
        """
        self.events.append((now, text))

    def finish(self, now: float, end: RunEnd) -> None:
        """Record the end of the run, and the exact totals of the stages.

        `now`: seconds since 1970.
        """
        self.end, self.ended = end, now
        for stage, total in end["stages"].items():  # no counter falls, whatever is known of workers that were lost
            now_known = self.stages.get(stage, StageSums())
            self.stages[stage] = StageSums(
                max(total["seconds"], now_known.seconds), max(int(total["bytes"]), now_known.nbytes),
                max(int(total["tasks"]), now_known.tasks), total["limit"],
            )  # fmt: skip
        self.add_event(now, end["state"] + (f": {end['error']}" if end["error"] else ""))

    @property
    def workers(self) -> dict[str, StageSums]:
        """Totals of each worker over its stages, parts of stages left out."""
        found = {}
        for worker, stages in self.of_workers.items():
            whole = [sums for stage, sums in stages.items() if not stage.startswith("gpu ")]
            found[worker] = StageSums(
                sum(one.seconds for one in whole), sum(one.nbytes for one in whole), sum(one.tasks for one in whole)
            )
        return found

    def _mark(self, stage: str, row: int) -> None:
        """Mark the cell of a row on the map."""
        state = {"multiply": COMPUTED, "commit": WRITTEN}.get(stage)
        if state is None or row < 0 or not self.cells:
            return
        cell = max(bisect.bisect_right(self.start["block_starts"], row) - 1, 0)
        self.cells[cell] = max(self.cells[cell], state)

    @property
    def state(self) -> str:
        """``running``, or how it ended."""
        return self.end["state"] if self.end else "running"

    # -- state out -----------------------------------------------------------------------------------------------------

    def seconds_left(self, now: float) -> tuple[float, float, float] | None:
        """Return the seconds that are left: likely, least and most; None if it is too early to tell."""
        return self.pace.estimate_time_left(now) if self.end is None else None

    def bound_by(self, now: float) -> tuple[str, float] | None:
        """Return the stage that takes most of the workers' time, and its share; None if nothing ran.

        For an active run, in the last `RECENT_SECONDS`; for a run that has ended, over the whole run.
        """
        return self.timeline.largest(now - RECENT_SECONDS if self.end is None else 0.0, now)

    def to_json(self, now: float, *, short: bool = False) -> dict[str, Any]:
        """Return the state as the page and the report read it.

        `now`: seconds since 1970.
        `short`: whether to leave out data that only pictures need.
        Returns at most about 50 kB as text.
        """
        end = self.ended or now
        facts = {
            "schema": SCHEMA,
            "product": self.name,
            "start": self.start if not short else self.start | {"block_starts": []},
            "progress": self.progress,
            "state": self.state,
            "error": self.end["error"] if self.end else "",
            "seconds": round(end - self.start["begun"], 3),
            "left": self.seconds_left(now),
        }
        return facts if short else facts | self._pictures(end)

    def _pictures(self, end: float) -> dict[str, Any]:
        """Return the data of pictures: stages, workers, timelines, events and the map of blocks."""
        begun = self.start["begun"]
        return {
            "bound_by": self.bound_by(end),
            "stages": {name: vars(sums) for name, sums in self.stages.items()},
            "workers": {name: vars(sums) for name, sums in self.workers.items()},
            "gantt": self._last_minute(end),
            "timeline": self.timeline.to_json(),
            "events": [[round(at - begun, 1), text] for at, text in self.events],
            "samples": [[round(at - begun, 2), products] for at, products in self.samples],
            "cells": list(self.cells),
        }

    def _last_minute(self, end: float) -> list[list[float]]:
        """Return worker, stage, row, begin and seconds of the newest runs of stages in the last minute."""
        workers = {name: i for i, name in enumerate(self.of_workers)}
        stages, begun = {name: i for i, name in enumerate(self.stages)}, self.start["begun"]
        return [
            [workers[worker], stages[stage], row, round(begin - begun, 3), round(seconds, 4)]
            for worker, stage, row, begin, seconds in self.recent
            if begin + seconds >= end - GANTT_SECONDS
        ]
