"""Drive products of up to a million blocks on a thousand workers that are simulated: what one driver stands.

Driver and journal are the real ones, with the real tables of checksums; time, workers and storage are simulated. Prints
the share of time in which workers multiply, what the driver costs a block, how its memory grows, and how many bytes of
C wait for their place.
"""

from __future__ import annotations

import functools
import gc
import heapq
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import record
from scheduling import NONE, NothingLooked

from spdist.scheduler.execution.driver import ProductDriver
from spdist.scheduler.execution.executor import Handle, RunCosts
from spdist.scheduler.execution.journal import Journal
from spdist.scheduler.execution.records import BlockCounts, BlockTask
from spdist.scheduler.execution.telemetry import Progress, RunCallbacks
from spdist.scheduler.execution.worker_process import resident_memory
from spdist.scheduler.planner.plan import Block, Plan, PlannedOperand
from spdist.storage.checksums import Checksums, WrittenChunks
from spdist.storage.groups import begin
from spdist.storage.writer import Layout

ENTRY_BYTES = 12
NO_ENDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Cluster:
    """A cluster, and a product on it."""

    workers: int
    blocks: int
    block_bytes: float  # of C
    seconds: float = 5.0  # mean time to multiply a block
    spread: float = 0.5  # times are uniform within this share of the mean
    slow: float = 0.0005  # share of blocks that take ten times as long
    storage: float = 1e12  # bytes/s that storage takes of all workers
    worker_storage: float = 2e9  # bytes/s that it takes of one
    latency: float = 0.005  # seconds of a message
    in_flight: int = 3  # blocks that a worker holds
    spills: bool = True  # whether there is room for blocks that wait for their place

    @property
    def block_entries(self) -> int:
        """Entries of C in a block."""
        return int(self.block_bytes / ENTRY_BYTES)

    @property
    def chunk(self) -> int:
        """Entries of a Zarr chunk of C, as a plan of such a product has them."""
        return min(1 << 23, 1 << max(self.block_entries, 2).bit_length() - 1)


class SimulatedExecutor:
    """Workers of a `Cluster` in simulated time; see `Executor`.

    `now`: seconds since the start.
    `busy`: seconds in which workers multiplied.
    `own`: seconds of real time that the simulation took.
    """

    name, link = "scale", ""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.now, self.busy, self.own, self.last_block = cluster, 0.0, 0.0, 0.0, 0.0
        self._free = {f"worker {i}": 0.0 for i in range(cluster.workers)}
        self._in_files: set[int] = set()
        self._storage_free, self._random, self._count = 0.0, np.random.default_rng(1), 0
        self._ends: list[tuple[float, int, Handle, Callable[[], Any] | None]] = []

    @property
    def spilled(self) -> int:
        """Blocks that waited for their place in files."""
        return len(self._in_files)

    def publish(self, messages: Sequence[Any]) -> None:
        """Send nothing."""

    @contextmanager
    def running(self, *arguments: Any, **keywords: Any) -> Iterator[None]:
        """Run nothing: the driver is called without it."""
        yield

    def workers(self) -> list[str]:
        """Return the workers."""
        return list(self._free)

    def with_gpu(self, workers: list[str]) -> dict[str, bool]:
        """Return that all are alike."""
        return dict.fromkeys(workers, False)

    def submit(
        self,
        stage: str,
        *arguments: Any,
        key: tuple[int, int],
        worker: str = "",
        after: Sequence[Handle] = (),
        wanted: bool = True,
    ) -> Handle:
        """Decide when a stage will end, and with what."""
        began, cluster, handle = time.perf_counter(), self.cluster, (stage, key)
        end, result = self.now + 2 * cluster.latency, None
        if stage == "multiply":
            took = cluster.seconds * (1 + cluster.spread * self._random.uniform(-1, 1))
            took *= 10 if self._random.random() < cluster.slow else 1
            begin = max(self.now + cluster.latency, self._free[worker])
            self._free[worker], self.busy = begin + took, self.busy + took
            end, result = begin + took + cluster.latency, functools.partial(self._counts, *arguments)
            self.last_block = max(self.last_block, end)
        elif stage == "spill":
            end, result = self._moved(1), lambda: cluster.spills
            self._in_files |= {key[0]} if cluster.spills else set()
        elif stage == "commit":
            end = self._moved(2 if key[0] in self._in_files else 1)
        else:
            result = functools.partial(self._joined, *arguments)
        self._count += 1
        heapq.heappush(self._ends, (end, self._count, handle, result))
        self.own += time.perf_counter() - began
        return handle

    def _moved(self, times: int) -> float:
        """Return when storage has moved a block, once or more often; it does so for one after the other."""
        nbytes = times * self.cluster.block_bytes
        self._storage_free = max(self.now, self._storage_free) + nbytes / self.cluster.storage
        return max(self._storage_free, self.now + nbytes / self.cluster.worker_storage) + self.cluster.latency

    def _counts(self, task: BlockTask) -> BlockCounts:
        entries = self.cluster.block_entries
        return BlockCounts(task.stop - task.start, entries, np.array([entries]), NO_ENDS, b"", False)

    def _joined(self, layout: Layout, k: int) -> list[WrittenChunks]:
        """Return the Zarr chunk, and those of the block before it."""
        first = max(k - self.cluster.block_entries // layout.chunk, 0)
        sums = np.arange(first, k + 1, dtype=np.uint32)
        return [WrittenChunks(name, first, sums) for name in ("indices", "data")]

    def next_completed(self) -> list[tuple[Handle, Any]]:
        """Go on to the time when the next stage ends; return all stages that have ended when the driver hears of it."""
        began = time.perf_counter()
        self.now = max(self.now, self._ends[0][0])
        done = []
        while self._ends and self._ends[0][0] <= self.now:
            _, _, handle, result = heapq.heappop(self._ends)
            done.append((handle, result and result()))
        self.own += time.perf_counter() - began
        return done

    def costs(self, workers: Any) -> RunCosts:
        """Return nothing."""
        return RunCosts([], [])

    def workers_that_see(self, array: Any, k: int) -> list[str]:
        """Return nobody."""
        return []


def plan_of(cluster: Cluster) -> Plan:
    """Return a plan of one row a block."""
    n, entries = cluster.blocks, cluster.block_entries
    operand = PlannedOperand((n, 8), n * entries, ENTRY_BYTES, 1 << 16)
    block = Block(0, 1, False, entries, entries, entries, 64, 0, 64)
    cut = tuple(replace(block, start=i, stop=i + 1) for i in range(n))
    return Plan(
        operand, replace(operand, shape=(8, 8)), operand, "scipy", 1 << 40, 0, cluster.in_flight, True, cluster.chunk,
        (0, 8), (0, 8), cut, n * entries,
    )  # fmt: skip


def simulate(cluster: Cluster) -> dict[str, float]:
    """Run a product; return what it cost."""
    plan, memory, waiting = plan_of(cluster), dict[int, int](), [0]
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(str(Path(folder) / "C.zarr"), 8, np.dtype(np.float64), plan.chunk)
        begin(layout.url, {})
        executor, journal = SimulatedExecutor(cluster), Journal(layout)
        journal.chunks.close()
        journal.chunks = NothingLooked(layout, Checksums(NONE, NONE, NONE))

        def note(now: Progress) -> None:
            tenth = 10 * now.blocks // cluster.blocks
            if tenth not in memory:
                memory[tenth] = resident_memory()
                counted = sum(1 for block in driver.window.in_flight if block.counts and block.offset < 0)
                waiting[0] = max(waiting[0], counted)

        driver = ProductDriver(executor, plan, layout, journal, RunCallbacks(progress=note))
        gc.collect()
        gc.freeze()  # as `DaskExecutor.running` does
        started = time.perf_counter()
        driver.run()
        wall = time.perf_counter() - started
        gc.unfreeze()
    return {
        **asdict(cluster),
        "c_tb": cluster.blocks * cluster.block_bytes / 1e12,
        "zarr_chunks": 2 * -(-cluster.blocks * cluster.block_entries // cluster.chunk),
        "simulated_seconds": executor.now,
        "busy": executor.busy / cluster.workers / executor.now,
        "after_last_block": executor.now - executor.last_block,
        "driver_ms_per_block": (wall - executor.own) / cluster.blocks * 1e3,
        "memory_mb": max(memory.values()) / 1e6,
        "memory_growth_mb": (memory[max(memory)] - memory[min(memory)]) / 1e6,
        "spilled": executor.spilled,
        "gb_waiting": waiting[0] * cluster.block_bytes / 1e9,
    }


CLUSTERS = {
    "1,000 workers": Cluster(1_000, 20_000, 2e8),
    "1,000 workers, no room to spill": Cluster(1_000, 20_000, 2e8, spills=False),
    "1,000 workers, a million blocks": Cluster(1_000, 1_000_000, 1e8),
    "800 GPUs": Cluster(800, 25_000, 4e9),
    "800 GPUs, no room to spill": Cluster(800, 25_000, 4e9, spills=False),
    "800 GPUs, storage of 0.1 TB/s": Cluster(800, 25_000, 4e9, storage=1e11),
    "8 GPUs": Cluster(8, 2_500, 4e8, storage=2e10),
}


def main() -> None:
    """Simulate, print, record."""
    args = record.parser(__doc__ or "").parse_args()
    found = {}
    for name, cluster in CLUSTERS.items():
        found[name] = simulate(replace(cluster, blocks=cluster.blocks // 100) if args.quick else cluster)
        one = found[name]
        seconds = f"{one['simulated_seconds']:.0f} s, {one['after_last_block']:.2f} s after the last block"
        memory = f"{one['memory_mb']:.0f} MB (+{one['memory_growth_mb']:.0f})"
        waited = f"{one['gb_waiting']:.0f} GB waited, {one['spilled']:,} blocks spilled"
        driver = f"driver {one['driver_ms_per_block']:.3f} ms a block"
        print(f"{name:34} {one['c_tb']:7.1f} TB in {seconds}, busy {one['busy']:5.1%}, {driver}, {memory}, {waited}")
    record.write({"benchmark": "scale", "result": found}, args.out)


if __name__ == "__main__":
    main()
