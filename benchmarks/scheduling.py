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

from spdist.matrices.csr import CSR
from spdist.scheduler.execution import driver as driver_module
from spdist.scheduler.execution.cluster import connect
from spdist.scheduler.execution.stages import Counted, Part, Task
from spdist.scheduler.execution.worker_process import resident_memory
from spdist.scheduler.planner.plan import Block, Operand, Plan
from spdist.storage import groups
from spdist.storage.writer import Layout

ENTRIES = 64
PAIRS = 8


class Empty:
    """A product whose stages do nothing, except that one early block sleeps."""

    def __init__(self, slow: int, seconds: float) -> None:
        self.slow, self.seconds, self.totals = slow, seconds, {}

    def warm(self) -> None:
        """Nothing to compile."""

    def take_timings(self) -> list[Any]:
        """Nothing was timed."""
        return []

    def gpu_peak(self) -> int:
        """No GPU."""
        return 0

    def preprocess(self, task: Task, piece: int = 0) -> None:
        """Read nothing."""

    def multiply(self, task: Task, operands: None, piece: int = 0) -> Counted:
        """Multiply nothing; the slow block takes its time."""
        if task.number == self.slow:
            time.sleep(self.seconds)
        return Counted(np.array([ENTRIES], np.uint32), b"", False)

    def commit(self, task: Task, rows: int, digest: bytes, layout: Any, at: int, done_chunks: int) -> list[Part]:
        """Write nothing; every block shares its Zarr chunk."""
        c = CSR(np.array([0, ENTRIES]), np.arange(ENTRIES, dtype=np.int32), np.ones(ENTRIES), (1, ENTRIES))
        return [Part(at, c.indices, c.data)]

    def join(self, layout: Any, k: int, *parts: list[Part]) -> None:
        """Write nothing."""


def plan_of(blocks: int) -> Plan:
    """Return a plan of one row a block."""
    operand = Operand((blocks, 8), blocks * ENTRIES, 8, 1 << 16)
    cut = tuple(Block(i, i + 1, False, ENTRIES, ENTRIES, ENTRIES, 64, 0, 64) for i in range(blocks))
    return Plan(
        operand, replace(operand, shape=(8, 8)), operand, "empty", 1 << 25, 0, PAIRS, True, 1 << 12,
        (0, 8), (0, 8), cut, blocks * ENTRIES,
    )  # fmt: skip


def measure(blocks: int, workers: int, slow: int, seconds: float) -> dict[str, float]:
    """Run the empty product; return what it cost."""
    plan = plan_of(blocks)
    seen: list[tuple[int, int]] = []
    ahead: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(str(Path(folder) / "C.zarr"), 8, np.dtype(np.float64), plan.chunk)
        groups.begin(layout.url, {})
        with connect(workers=workers, scheduler=None, processes=True, blocks=blocks) as client:
            client.register_plugin(driver_module.Install("bench", Empty(slow, seconds)), name="bench")
            driver = driver_module.Driver(
                client, plan, None, layout, "bench", *driver_module.read_journal(layout.url), None
            )
            driver.progress = lambda now: (
                seen.append((now.blocks, resident_memory())) if now.blocks % 500 == 0 else None
            )
            stop = threading.Event()
            watch = threading.Thread(target=lambda: _watch(driver, slow, stop, ahead), daemon=True)
            watch.start()
            gc.freeze()  # as `run.execute` does
            begin = time.perf_counter()
            driver.run()
            wall = time.perf_counter() - begin
            stop.set()
            gc.unfreeze()
            growth = max(peak for peak, _ in client.run(driver_module.worker_memory, "").values())
    settled = [memory for done, memory in seen if done >= blocks // 2]
    return {
        "blocks": blocks,
        "workers": workers,
        "ms_per_block": (wall - seconds) / blocks * 1e3,
        "worker_growth_mb": growth / 1e6,
        "memory_growth_mb_second_half": (settled[-1] - settled[0]) / 1e6 if settled else 0.0,
        "blocks_beyond_a_slow_one": max(ahead, default=0),
        "window": plan.blocks_in_flight * workers,
    }


def _watch(driver: driver_module.Driver, slow: int, stop: threading.Event, ahead: list[int]) -> None:
    """Note how many blocks were handed out while the slow one was the first that is not placed."""
    while not stop.is_set():
        waiting = [block.task.number for block in list(driver.inflight) if block.at < 0]
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
