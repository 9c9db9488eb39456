"""The workers of a run: who has room for a block, and which of the blocks that are left is for it."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from spdist.scheduler.execution.stages import Task
from spdist.scheduler.planner.plan import GPU_RATES, RATES, Block, Plan

CAUTION = 1.5
"""A core takes a block if the GPUs need so many times as long as it does to come to that block."""
UNSEEN = 4.0
"""A core's first block may take so many times as long as expected: other cores, and the GPUs' threads, are busy."""
LOOK = 2048
"""Blocks ahead among which one for a core is looked for."""
CHOICE = 8
"""Of those that are far enough ahead, so many are compared."""
LEAST_SECONDS = 1e-6
"""That a block took: several may be counted at once."""
REMEMBERED = 8
"""Blocks by which a sort of worker is judged."""


class Work(NamedTuple):
    """A block that is left: what its worker will be told, products and estimated entries of C."""

    task: Task
    products: int
    nnz: int

    def cut(self, row: int) -> tuple[Work, Work]:
        """Return the parts before and from a row on, as if all rows were alike."""
        task = self.task
        rest = [count * (task.stop - row) // (task.stop - task.start) for count in (self.products, self.nnz)]
        before = Work(replace(task, stop=row), self.products - rest[0], self.nnz - rest[1])
        return before, Work(replace(task, start=row, number=-1), *rest)


def work_of(block: Block, number: int = -1, start: int | None = None) -> Work:
    """Return a block of a plan as what is left to do, from a later row on where one is given."""
    task = Task(number, block.start, block.stop, block.capacity, block.split, block.b_bytes)
    work = Work(task, block.products, block.nnz)
    return work if start is None or start <= block.start else work.cut(start)[1]


class _Pace:
    """Seconds that blocks took, beside those that were expected of them."""

    def __init__(self) -> None:
        self.blocks: collections.deque[tuple[float, float]] = collections.deque(maxlen=REMEMBERED)

    @property
    def mean(self) -> float:
        """How many times as long as expected blocks took; of none, as long."""
        expected = sum(seconds for _, seconds in self.blocks)
        return sum(took for took, _ in self.blocks) / expected if expected else 1.0

    @property
    def worst(self) -> float:
        """The same of the slowest; of none, what may be feared."""
        return max((took / expected for took, expected in self.blocks), default=UNSEEN)


class BlockAssigner:
    """Workers, and the blocks that each has in hand.

    Workers that are all of one sort take the next block in turn. Of GPUs and cores together (engine ``hybrid``), GPUs
    take the next block. Rows of C find their places in order, so that blocks wait for a late one before them; therefore
    a core, which needs many times as long, takes a block so far ahead that it should be done when the GPUs come to it,
    as the blocks before tell: one of the longest for a GPU and the shortest for a core. Where there is none, as towards
    the end, it takes none.

    Parameters
    ----------
    plan : Plan
    pairs : int
        Blocks that a worker has in hand at most, from when it takes them until they are written.
    has_gpu : callable, optional
        Takes addresses; says which of these workers have a GPU, of those that answer. For engine ``hybrid`` alone.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        plan: Plan,
        pairs: int,
        has_gpu: Callable[[list[str]], dict[str, bool]] = lambda addresses: dict.fromkeys(addresses, True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pairs, self.clock, self.mixed = pairs, clock, plan.engine == "hybrid"
        self.has_gpu = has_gpu
        self.entry_bytes = plan.c.entry_bytes
        self.in_hand: dict[str, int] = {}
        self.cores: set[str] = set()
        self.multiplying: dict[str, int] = {}
        self.paces = {True: _Pace(), False: _Pace()}
        self.since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.in_hand)

    def meet(self, addresses: Iterable[str]) -> None:
        """Learn which workers there are; blocks of those that left are nobody's, new ones have none."""
        addresses = list(addresses)
        new = [address for address in addresses if address not in self.in_hand]
        if self.mixed and new:
            sorts = self.has_gpu(new)
            self.cores |= {address for address, gpu in sorts.items() if not gpu}
            addresses = [address for address in addresses if address not in new or address in sorts]
        self.in_hand = {address: self.in_hand.get(address, 0) for address in addresses}
        self.multiplying = {address: self.multiplying.get(address, 0) for address in addresses}
        self.cores &= set(addresses)

    def choose(self, todo: Iterable[Work], *, stuck: bool = False) -> tuple[str, int] | None:
        """Return who takes the next block, and which, counted from the first of those left; None: nobody for now.

        Where the run is `stuck`, as all blocks in hand wait for the first of those left, somebody takes it who has his
        hands full.
        """
        others = [address for address in self.in_hand if address not in self.cores]
        worker = self._freest(others or self.in_hand)
        if self.in_hand[worker] < self.pairs:
            return worker, 0
        if stuck:
            return self._freest(self.in_hand), 0
        core = next((core for core in self.cores if self._is_idle(core)), None)
        ahead = self._ahead(todo, len(others)) if core is not None and others else None
        return None if core is None or ahead is None else (core, ahead)

    def relief(self, held: Iterable[tuple[str, Work]]) -> tuple[str, Work] | None:
        """Return a GPU that has nothing to do, and the last of the blocks held that a core has; None if none are."""
        idle = (address for address, count in self.in_hand.items() if not count and address not in self.cores)
        late = [work for worker, work in held if worker in self.cores]
        gpu = next(idle, None)
        return (gpu, late[-1]) if gpu is not None and late else None

    def _freest(self, workers: Iterable[str]) -> str:
        return min(workers, key=lambda address: self.in_hand[address])

    def _is_idle(self, core: str) -> bool:
        return not self.multiplying[core] and self.in_hand[core] < self.pairs

    def _ahead(self, todo: Iterable[Work], gpus: int) -> int | None:
        """Return the block that a core should take, counted from the first of those left."""
        if not self.paces[True].blocks:
            return None  # nobody knows yet how quick the GPUs are
        pace, core_pace = self.paces[True].mean / gpus, self.paces[False].worst
        fitting: list[tuple[float, int]] = []
        lead = 0.0
        for at, work in enumerate(itertools.islice(todo, LOOK)):
            gpu, core = pace * self._expected(work, True), core_pace * self._expected(work, False)
            if lead >= CAUTION * core:
                fitting.append((core / gpu, at))
            if len(fitting) == CHOICE:
                break
            lead += gpu
        return min(fitting)[1] if fitting else None

    def _expected(self, work: Work, on_gpu: bool) -> float:
        """Return the seconds that a block should take, by rates that are the same on every machine."""
        rates = RATES | GPU_RATES if on_gpu else RATES
        writing = self.entry_bytes * work.nnz / rates["write"]
        return (work.products + 1) / rates["product"] + work.nnz / rates["entry"] + writing

    def give(self, worker: str, work: Work) -> None:
        """Note that a worker has taken a block."""
        if not self.multiplying[worker]:
            self.since[worker] = self.clock()
        self.in_hand[worker] += 1
        self.multiplying[worker] += 1

    def counted(self, worker: str, work: Work) -> None:
        """Note that a worker has multiplied a block, and learn from the time since the one before."""
        if not self.multiplying.get(worker):  # another made what was lost with it
            return
        self.multiplying[worker] -= 1
        now, on_gpu = self.clock(), worker not in self.cores
        took = max(now - self.since[worker], LEAST_SECONDS)
        self.paces[on_gpu].blocks.append((took, self._expected(work, on_gpu)))
        self.since[worker] = now

    def done(self, worker: str) -> None:
        """Note that a block of a worker is written, and its memory free; of one that left, nothing is known."""
        if worker in self.in_hand:
            self.in_hand[worker] -= 1
