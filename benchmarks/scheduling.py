"""What a block costs the scheduler: thousands of blocks with an empty kernel.

Prints milliseconds a block, how the memory of scheduler and driver (one process) grows, and how many blocks a slow
early block held back.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record
import scipy.sparse as sp
from distributed import Worker, WorkerPlugin

import spdist
from spdist.scheduler.execution import stages
from spdist.scheduler.execution.driver import ProductDriver
from spdist.scheduler.execution.journal import DurableChunks, Journal
from spdist.scheduler.execution.records import BlockCounts, BlockTask, ChunkFragment, Committed, JobSpec
from spdist.scheduler.execution.stages import CommitTarget
from spdist.scheduler.execution.telemetry import Progress, RunCallbacks
from spdist.scheduler.execution.worker import WorkerContext
from spdist.scheduler.execution.worker_process import resident_memory
from spdist.scheduler.executors.clients.cluster import connect
from spdist.scheduler.executors.dask import DaskExecutor
from spdist.scheduler.executors.plugins import installed, peak_memory
from spdist.scheduler.planner.plan import Block, Plan, PlannedOperand
from spdist.storage.checksums import Checksums, WrittenChunks
from spdist.storage.groups import begin
from spdist.storage.writer import Layout

NONE = np.empty(0, np.uint32)
ENTRIES = 64
PAIRS = 8


class EmptyStages(WorkerPlugin):
    """Replaces the stages of worker processes by stages that do nothing, except that one early block sleeps."""

    def __init__(self, slow: int, seconds: float) -> None:
        self.slow, self.seconds = slow, seconds

    def setup(self, worker: Worker) -> None:
        """Replace the stages in the module, which does not travel with this class; these workers run nothing else."""
        stages.STAGES.update(preprocess=self.preprocess, multiply=self.multiply, commit=self.commit, join=self.join)

    def preprocess(self, context: WorkerContext, task: BlockTask, piece: int = 0) -> None:
        """Read nothing."""

    def multiply(self, context: WorkerContext, task: BlockTask, operands: None, piece: int = 0) -> BlockCounts:
        """Multiply nothing; the slow block takes its time."""
        if task.number == self.slow:
            time.sleep(self.seconds)
        return BlockCounts(1, ENTRIES, np.array([ENTRIES]), np.empty(0, np.int64), b"", False)

    def commit(
        self, context: WorkerContext, task: BlockTask, rows: int, digest: bytes, target: CommitTarget
    ) -> Committed:
        """Write nothing; every block shares its Zarr chunk."""
        fragment = ChunkFragment(target.offset, np.arange(ENTRIES, dtype=np.int32), np.ones(ENTRIES))
        return Committed([fragment], [])

    def join(self, context: WorkerContext, layout: Any, k: int, *commits: Committed) -> list[WrittenChunks]:
        """Write nothing, and tell a checksum as if it were written."""
        return [WrittenChunks(name, k, np.array([k], np.uint32)) for name in ("indices", "data")]


class NothingLooked(DurableChunks):
    """Believes what it is told: there are no Zarr chunks to look at."""

    def look(self, *, wait: bool = False) -> None:
        """Look at nothing."""


def plan_of(blocks: int) -> Plan:
    """Return a plan of one row a block."""
    operand = PlannedOperand((blocks, 8), blocks * ENTRIES, 8, 1 << 16)
    cut = tuple(Block(i, i + 1, False, ENTRIES, ENTRIES, ENTRIES, 64, 0, 64) for i in range(blocks))
    return Plan(
        operand, replace(operand, shape=(8, 8)), operand, "scipy", 1 << 25, 0, PAIRS, True, 1 << 12,
        (0, 8), (0, 8), cut, blocks * ENTRIES,
    )  # fmt: skip


def measure(blocks: int, workers: int, slow: int, seconds: float) -> dict[str, float]:
    """Run the empty product; return what it cost."""
    plan = plan_of(blocks)
    seen: list[tuple[int, int]] = []
    ahead: list[int] = []

    def note(now: Progress) -> None:
        if now.blocks % 500 == 0:
            seen.append((now.blocks, resident_memory()))

    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(str(Path(folder) / "C.zarr"), 8, np.dtype(np.float64), plan.chunk)
        begin(layout.url, {})
        a = spdist.save(Path(folder) / "A.zarr", sp.eye_array(8, format="csr"))
        job = JobSpec(a, a, "scipy", False, plan.inner_bounds, plan.column_bounds)
        with (
            connect(workers=workers, scheduler=None, processes=True, blocks=blocks) as client,
            installed(client, "bench", job),
        ):
            client.register_plugin(EmptyStages(slow, seconds))
            executor, journal = DaskExecutor(client, "bench"), Journal(layout)
            driver = ProductDriver(executor, plan, layout, journal, RunCallbacks(progress=note))
            driver.journal.chunks = NothingLooked(layout, Checksums(NONE, NONE, NONE))
            stop = threading.Event()
            watch = threading.Thread(target=lambda: _watch(driver, slow, stop, ahead), daemon=True)
            watch.start()
            gc.freeze()  # as `DaskExecutor.running` does
            started = time.perf_counter()
            driver.run()
            wall = time.perf_counter() - started
            stop.set()
            gc.unfreeze()
            growth = max(peak for peak, _ in client.run(peak_memory, "bench").values())
    second_half = [memory for done, memory in seen if done >= blocks // 2]
    return {
        "blocks": blocks,
        "workers": workers,
        "ms_per_block": (wall - seconds) / blocks * 1e3,
        "worker_growth_mb": growth / 1e6,
        "memory_growth_mb_second_half": (second_half[-1] - second_half[0]) / 1e6 if second_half else 0.0,
        "blocks_beyond_a_slow_one": max(ahead, default=0),
        "window": plan.blocks_in_flight * workers,
    }


def _watch(driver: ProductDriver, slow: int, stop: threading.Event, ahead: list[int]) -> None:
    """Note how many blocks were handed out while the slow one was the first that is not placed."""
    while not stop.is_set():
        waiting = [block.task.number for block in list(driver.window.in_flight) if block.offset < 0]
        if waiting and min(waiting) == slow:
            ahead.append(max(waiting) - slow)
        time.sleep(0.05)


def main() -> None:
    """Measure, print, record."""
    args = record.parser(__doc__ or "").parse_args()
    result = measure(200 if args.quick else 10_000, 2, slow=50, seconds=0.5)
    for name, value in result.items():
        print(f"{name:32} {value:10.2f}")
    record.write({"benchmark": "scheduling", "result": result}, args.out)


if __name__ == "__main__":
    main()
