"""Trials side by side: jobs are processes with servers, cores and a folder of their own, and take trials in turn.

A trial's seed has its part and its number, so that the same trials are made whatever the number of jobs. Parts advance
together: torture that ends when its time is up has made the same share of each.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.torture import calls, damage, kills, machine, pairs, proxy, rewrites, settings, skewed, tasks
from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, Table
from tests.torture.products import Stock
from tests.torture.runs import Launcher

Part = Callable[[Bench, random.Random, int], Outcome]
"""Makes a trial of the number that it has in its part."""


def _by_chance(trial: Callable[[Bench, random.Random], Outcome]) -> Part:
    return lambda bench, rng, number: trial(bench, rng)


PARTS: dict[str, tuple[Part, float]] = {
    "kills": (_by_chance(lambda bench, rng: kills.run_kill(bench, kills.random_kill(bench, rng))), 1.0),
    "cluster": (_by_chance(kills.random_cluster_kill), 0.1),
    "tasks": (_by_chance(tasks.random_task_kill), 0.5),
    "ends": (tasks.kill_in_turn, 0.8),
    "damage": (_by_chance(damage.random_damage), 1.0),
    "pairs": (_by_chance(pairs.random_pair), 0.5),
    "calls": (_by_chance(calls.random_failure), 1.0),
    "memory": (_by_chance(calls.random_allocation), 0.2),
    "network": (_by_chance(proxy.random_network_fault), 0.1),
    "histories": (_by_chance(machine.random_history), 0.1),
    "power": (_by_chance(calls.random_power_loss), 0.2),
    "rewrites": (_by_chance(rewrites.random_rewrite), 0.2),
    "skewed": (_by_chance(skewed.random_skewed_product), 0.2),
    "settings": (_by_chance(settings.random_settings), 0.3),
}
"""What each part does, and its trials for each one of ``--count``."""
NEED_COMPILER = {"tasks", "ends", "calls", "memory", "power"}
"""Parts that need `faults.c`."""
LAST_SECONDS = 15.0
"""Seconds before the time is up in which no trial begins: most take less."""
END_SECONDS = 5.0
"""Seconds in which a job ends its processes."""


@dataclass(frozen=True)
class Orders:
    """Which trials to make, and how.

    Attributes
    ----------
    trials : tuple of (str, int)
        Part and number of each, in order.
    seed : int
    folder : Path
        Each job has a folder in it.
    jobs : int
        Trials at a time.
    budget : float
        Seconds in which all is over; trials that are not done by then do not count.
    """

    trials: tuple[tuple[str, int], ...]
    seed: int
    folder: Path
    jobs: int = 1
    budget: float = float("inf")

    @staticmethod
    def numbered(parts: list[str], count: int) -> tuple[tuple[str, int], ...]:
        """Return the trials of some parts, all parts in proportion at any time."""
        most = {part: max(1, round(PARTS[part][1] * count)) for part in parts}
        ordered = sorted((number / most[part], part, number) for part in parts for number in range(most[part]))
        return tuple((part, number) for _, part, number in ordered)


@dataclass
class Done:
    """What became of the orders.

    Attributes
    ----------
    table : Table
        Outcomes of the trials that are done.
    cut_off : list of str
        Trials that had begun when the time was up.
    """

    table: Table = field(default_factory=Table)
    cut_off: list[str] = field(default_factory=list)


def torture(orders: Orders) -> Done:
    """Make trials until all are done or the time is up; say at once what goes wrong, and how to repeat it."""
    deadline = time.monotonic() + orders.budget
    library = calls.compile_library(orders.folder)
    if library is None and NEED_COMPILER & {part for part, _ in orders.trials}:
        raise SystemExit(f"no C compiler: set CC, or leave out the parts {', '.join(sorted(NEED_COMPILER))}")
    context = multiprocessing.get_context("spawn")
    results, following = context.Queue(), context.Value("q", 0)
    jobs = [
        context.Process(target=_work, args=(orders, i, library, deadline - LAST_SECONDS, following, results))
        for i in range(min(orders.jobs, len(orders.trials)))
    ]
    for job in jobs:
        job.start()
    try:
        return _collect(orders, jobs, results, deadline)
    finally:
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.join(END_SECONDS)
            job.kill()


def _collect(orders: Orders, jobs: list[Any], results: Any, deadline: float) -> Done:
    """Take what the jobs found until they end or the time is up."""
    done, under_way = Done(), set[tuple[str, int]]()
    while time.monotonic() < deadline:
        try:
            part, number, outcome = results.get(timeout=0.2)
        except queue.Empty:
            if not any(job.is_alive() for job in jobs):
                break
            continue
        if outcome is None:
            under_way.add((part, number))
            continue
        under_way.discard((part, number))
        if not outcome.good:
            print(f"--part {part} --seed {orders.seed} --only {number}:", flush=True)
        done.table.add(outcome, verbose=True)
    done.cut_off = [f"--part {part} --only {number}" for part, number in sorted(under_way)]
    return done


# -- a job -------------------------------------------------------------------------------------------------------------


def _work(orders: Orders, job: int, library: Path | None, last: float, following: Any, results: Any) -> None:
    """Make trials in this process, which was started for it."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that started this one, which ends this one
    _keep_to_cores(job, orders.jobs)
    trials, turn = _take(orders, following, last), 0
    trial = next(trials, None)
    while trial is not None:
        folder = orders.folder / f"job-{job}" / str(turn)
        turn += 1
        with Launcher(library) as launcher:
            bench = Bench(Stock(folder / "stock", launcher).make(), folder)
            is_sound = True
            while trial is not None and is_sound:
                results.put((*trial, None))
                outcome = _outcome(bench, orders.seed, *trial)
                results.put((*trial, outcome))
                is_sound, trial = outcome.verdict != "broken", next(trials, None)


def _take(orders: Orders, following: Any, last: float) -> Iterator[tuple[str, int]]:
    """Yield the next trial that no job has taken, until none is left or none may begin any more."""
    while time.monotonic() < last:
        with following.get_lock():
            i, following.value = following.value, following.value + 1
        if i >= len(orders.trials):
            return
        yield orders.trials[i]


def _outcome(bench: Bench, seed: int, part: str, number: int) -> Outcome:
    """Make a trial; an error of torture itself is an outcome too, after which servers are started anew."""
    try:
        return PARTS[part][0](bench, random.Random(f"{seed}/{part}/{number}"), number)
    except Exception as error:
        return Outcome(part, f"trial {number}", "broken", f"{type(error).__name__}: {error}"[:500])


def _keep_to_cores(job: int, jobs: int) -> None:
    """Keep a job and what it starts to a share of the cores, so that jobs do not wait for each other."""
    cores = sorted(os.sched_getaffinity(0))
    if 1 < jobs <= len(cores):
        os.sched_setaffinity(0, cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs])


def _end(number: int, frame: FrameType | None) -> None:
    """End the job; its servers end what they started."""
    sys.exit(1)
