"""Assign blocks to workers: which worker takes a block next, and which of the remaining blocks it takes."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from spdist.kernels.engine import find_engine
from spdist.scheduler.execution.records import BlockNumber, BlockTask
from spdist.scheduler.planner.plan import GPU_RATES, RATES, Block, Plan

LEAST_SECONDS = 1e-6
"""Shortest duration of a block in seconds; several blocks may finish at once."""


@dataclass(frozen=True)
class AssignmentTuning:
    """When a CPU worker may take a block that GPUs will reach later."""

    # the GPUs must need this many times as long to reach the block as the CPU worker needs to multiply it
    safety_factor: float = 1.5
    # expected duration of the first block of a CPU worker, as a multiple of the estimate: other cores, and the GPUs'
    # threads, are busy
    first_slowdown: float = 4.0
    lookahead: int = 2048  # remaining blocks among which one for a CPU worker is searched
    candidates: int = 8  # blocks far enough ahead that are compared
    remembered: int = 8  # last blocks by which GPUs, and CPU workers, are judged


TUNING = AssignmentTuning()


class BlockWork(NamedTuple):
    """A block that remains to be computed."""

    task: BlockTask
    products: int  # multiply-adds
    nnz: int  # estimated entries of C

    @staticmethod
    def of(block: Block, number: BlockNumber = -1, start: int = 0) -> BlockWork:
        """Return the rows of a plan's block from `start` on."""
        task = BlockTask(number, block.start, block.stop, block.capacity, block.split, block.b_bytes)
        work = BlockWork(task, block.products, block.nnz)
        return work if start <= block.start else work.cut(start)[1]

    def seconds(self, entry_bytes: int, *, on_gpu: bool) -> float:
        """Return the seconds that the block should take a typical worker, to multiply and to write.

        `entry_bytes`: bytes of an entry of C; 0 if C is not written.
        """
        rates = GPU_RATES if on_gpu else RATES
        return (self.products + 1) / rates.product + self.nnz / rates.entry + entry_bytes * self.nnz / rates.write

    def microseconds(self, entry_bytes: int, *, on_gpu: bool) -> int:
        """Return the microseconds that the block should take, at least 1."""
        return max(1, round(1e6 * self.seconds(entry_bytes, on_gpu=on_gpu)))

    def cut(self, row: int) -> tuple[BlockWork, BlockWork]:
        """Return the rows before `row` and the rows from `row` on, as if all rows were alike."""
        task = self.task
        rest = [total * (task.stop - row) // (task.stop - task.start) for total in (self.products, self.nnz)]
        before = BlockWork(replace(task, stop=row), self.products - rest[0], self.nnz - rest[1])
        return before, BlockWork(replace(task, start=row, number=-1), *rest)


class _Pace:
    """Measured and expected seconds of the last blocks of all GPUs, or of all CPU workers."""

    def __init__(self, remembered: int) -> None:
        self.blocks: collections.deque[tuple[float, float]] = collections.deque(maxlen=remembered)

    @property
    def mean(self) -> float:
        """Measured over expected seconds; 1.0 before the first block."""
        expected = sum(seconds for _, seconds in self.blocks)
        return sum(took for took, _ in self.blocks) / expected if expected else 1.0

    def worst(self, default: float) -> float:
        """Measured over expected seconds of the slowest block; `default` before the first block."""
        return max((took / expected for took, expected in self.blocks), default=default)


class BlockAssigner:
    """Workers, and how many blocks each of them holds.

    Workers of one kind take the next block in turn. With engine ``hybrid`` the GPUs take the next block. Blocks get
    their position in C in the order of rows, so every block waits for a late one before it. A CPU worker is many times
    slower than a GPU; therefore it takes a block so far ahead that it should be done when the GPUs reach it. Among
    these it takes the one that costs it least in comparison to a GPU. If no block is far enough ahead, for instance
    towards the end of a run, it takes none.

    `blocks_in_flight`: blocks that a worker holds at most, from assignment until they are written.
    `has_gpu`: takes addresses; returns which of these workers have a GPU. Workers that do not answer are left out. Only
    engine ``hybrid`` calls it.
    `clock`: returns seconds.
    """

    def __init__(
        self,
        plan: Plan,
        blocks_in_flight: int,
        has_gpu: Callable[[list[str]], dict[str, bool]] = lambda addresses: dict.fromkeys(addresses, True),
        clock: Callable[[], float] = time.monotonic,
        tuning: AssignmentTuning = TUNING,
    ) -> None:
        self.blocks_in_flight, self.has_gpu, self.clock, self.tuning = blocks_in_flight, has_gpu, clock, tuning
        self.is_hybrid = find_engine(plan.engine).mixes
        self.entry_bytes = plan.c.entry_bytes
        self.held: dict[str, int] = {}
        self.cpu_workers: set[str] = set()
        self.gpu_pace, self.cpu_pace = _Pace(tuning.remembered), _Pace(tuning.remembered)
        self._multiplying: dict[str, int] = {}
        self._busy_since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.held)

    def update_workers(self, addresses: Iterable[str]) -> None:
        """Set the workers of the run: new workers hold no blocks, and workers that have left are forgotten."""
        addresses = list(addresses)
        new = [address for address in addresses if address not in self.held]
        if self.is_hybrid and new:
            answers = self.has_gpu(new)
            self.cpu_workers |= {address for address, gpu in answers.items() if not gpu}
            addresses = [address for address in addresses if address not in new or address in answers]
        self.held = {address: self.held.get(address, 0) for address in addresses}
        self._multiplying = {address: self._multiplying.get(address, 0) for address in addresses}
        self.cpu_workers &= set(addresses)

    def choose(self, remaining: Iterable[BlockWork], *, stuck: bool = False) -> tuple[str, int] | None:
        """Choose the worker that takes a block now, and the block.

        `remaining`: blocks that are left, by rising rows.
        `stuck`: whether all blocks in flight wait for the first remaining one. Then the least-loaded worker takes it,
        even above its limit.
        Returns (str, int) or None: address of the worker, and position of the block in `remaining`; None if no worker
        should take one.
        """
        gpus = [one for one in self.held if one not in self.cpu_workers] if self.cpu_workers else list(self.held)
        worker = self._least_loaded(gpus or self.held)
        if self.held[worker] < self.blocks_in_flight:
            return worker, 0
        if stuck:
            return self._least_loaded(self.held), 0
        idle = next((address for address in self.cpu_workers if self._is_idle(address)), None)
        position = self._position_for_cpu(remaining, len(gpus)) if idle is not None and gpus else None
        return None if idle is None or position is None else (idle, position)

    def is_stuck(self, worker: str) -> bool:
        """Whether a worker could multiply, but holds as many blocks as it may, all of them multiplied.

        Not one that may hold a single block, which waits for the blocks before it as a rule.
        """
        is_full = 1 < self.blocks_in_flight <= self.held.get(worker, 0)
        return is_full and not self._multiplying[worker] and not self.is_hybrid

    def backup_for_cpu(self, assigned: Iterable[tuple[str, BlockWork]]) -> tuple[str, BlockWork] | None:
        """Return an idle GPU, and the last assigned block that a CPU worker holds; None if there is no such pair."""
        idle = (address for address, count in self.held.items() if not count and address not in self.cpu_workers)
        on_cpu = [work for worker, work in assigned if worker in self.cpu_workers]
        gpu = next(idle, None)
        return (gpu, on_cpu[-1]) if gpu is not None and on_cpu else None

    def _least_loaded(self, workers: Iterable[str]) -> str:
        return min(workers, key=self.held.__getitem__)

    def _is_idle(self, worker: str) -> bool:
        return not self._multiplying[worker] and self.held[worker] < self.blocks_in_flight

    def _position_for_cpu(self, remaining: Iterable[BlockWork], gpus: int) -> int | None:
        """Return the position of the block that a CPU worker should take; None if none is far enough ahead."""
        if not self.gpu_pace.blocks:
            return None  # the GPUs' speed is unknown
        tuning = self.tuning
        gpu_pace, cpu_pace = self.gpu_pace.mean / gpus, self.cpu_pace.worst(tuning.first_slowdown)
        candidates: list[tuple[float, int]] = []
        lead = 0.0  # seconds until the GPUs reach the block
        for position, work in enumerate(itertools.islice(remaining, tuning.lookahead)):
            gpu = gpu_pace * work.seconds(self.entry_bytes, on_gpu=True)
            cpu = cpu_pace * work.seconds(self.entry_bytes, on_gpu=False)
            if lead >= tuning.safety_factor * cpu:
                candidates.append((cpu / gpu, position))
            if len(candidates) == tuning.candidates:
                break
            lead += gpu
        return min(candidates)[1] if candidates else None

    def assign(self, worker: str, work: BlockWork) -> None:
        """Note that a worker has taken a block."""
        if not self._multiplying[worker]:
            self._busy_since[worker] = self.clock()
        self.held[worker] += 1
        self._multiplying[worker] += 1

    def note_multiplied(self, worker: str, work: BlockWork) -> None:
        """Note that a worker has multiplied a block, and how long that took since it was free.

        A worker without blocks is ignored: it left, and another worker did its block.
        """
        if not self._multiplying.get(worker):
            return
        self._multiplying[worker] -= 1
        now, on_gpu = self.clock(), worker not in self.cpu_workers
        took = max(now - self._busy_since[worker], LEAST_SECONDS)
        pace = self.gpu_pace if on_gpu else self.cpu_pace
        pace.blocks.append((took, work.seconds(self.entry_bytes, on_gpu=on_gpu)))
        self._busy_since[worker] = now

    def note_written(self, worker: str) -> None:
        """Note that a block of a worker is written and its memory free; a worker that left is ignored."""
        if worker in self.held:
            self.held[worker] -= 1
