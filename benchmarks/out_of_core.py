"""Zarr to Zarr on two workers beside the sum of its parts: the blocks in memory, A and B read once, C written once.

The memory limit is C / 20 or less. Worker processes are weighed from outside, every 10 ms; an idle worker is one that
has started and loaded spdist but has no block yet.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import record

import spdist
from spdist.api import products as api
from spdist.kernels.cpu import multiply as cpu
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.worker import WorkerContext
from spdist.scheduler.planner.plan import Plan
from spdist.storage import groups
from spdist.storage.matrix import StoredMatrix
from spdist.storage.writer import Layout

WORKERS = 2
CASES = {
    "27-point 150^3": ("poisson", {"dims": (150, 150, 150), "points": 27}),
    "fem-blocks 60^3 x 3": ("fem-blocks", {"dims": (60, 60, 60), "dof": 3}),
    "rmat 17 x 16": ("rmat", {"scale": 17, "edge_factor": 16}),
    "erdos-renyi 3M x 8": ("erdos-renyi", {"nrows": 3_000_000, "ncols": 3_000_000, "per_row": 8.0}),
}
QUICK = {"27-point 12^3": ("poisson", {"dims": (12, 12, 12), "points": 27})}


class Scale:
    """Weighs the worker processes from outside."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self.idle: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Scale:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def weigh_idle(self, _: Any = None) -> None:
        """Note what the workers hold now, and forget the peak of their start."""
        self.idle = {worker.pid: worker.memory_info().rss for worker in self._workers()}
        self.peaks.clear()

    def _watch(self) -> None:
        workers: list[psutil.Process] = []
        turn = 0
        while not self._stop.wait(0.01):
            if turn % 50 == 0:
                workers = self._workers()
            turn += 1
            for worker in workers:
                try:
                    self.peaks[worker.pid] = max(self.peaks.get(worker.pid, 0), worker.memory_info().rss)
                except psutil.Error:
                    continue

    @staticmethod
    def _workers() -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children(recursive=True):
            try:
                if any("spawn_main" in word for word in child.cmdline()):
                    found.append(child)
            except psutil.Error:  # it has just ended
                continue
        return found


def in_memory(plan: Plan, a: StoredMatrix, b: StoredMatrix) -> float:
    """Multiply the plan's blocks with operands and results in memory, `WORKERS` at a time; return seconds."""
    job = JobSpec(a, b, plan.engine, plan.resident, plan.inner_bounds, plan.column_bounds)
    whole_a, whole_b = a.rows(0, a.nrows), b.rows(0, b.nrows)
    WorkerContext(job).warm_up()

    def multiply(block: Any) -> int:
        rows = whole_a.rows(block.start, block.stop)
        c = cpu.multiply_rows(rows, whole_b, 0, block.capacity, engine=plan.engine)
        return c.nnz

    begin = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(multiply, plan.blocks))
    return time.perf_counter() - begin


def storage_seconds(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, folder: Path) -> tuple[float, float]:
    """Read A and B once and write C once, in large pieces; return the seconds of each."""
    begin = time.perf_counter()
    for matrix in (a, b):
        for start, stop, _ in matrix.row_blocks(16 * matrix.indices.chunk):
            matrix.rows(start, stop)
    reading = time.perf_counter() - begin
    layout = Layout(str(folder / "copy.zarr"), c.ncols, c.dtype, c.indices.chunk, _compressed(c))
    groups.begin(layout.url, {})
    writing, step = 0.0, 16 * c.indices.chunk
    for first in range(0, c.nnz, step):
        last = min(first + step, c.nnz)
        indices, values = c.read_indices(first, last), np.ascontiguousarray(c.data.read(first, last))
        begin = time.perf_counter()
        layout.write_entries(first // layout.chunk, indices, values)
        writing += time.perf_counter() - begin
    shutil.rmtree(layout.url)
    return reading, writing


def _compressed(c: StoredMatrix) -> bool:
    return "blosc" in c.data.metadata


def measure(name: str, kind: str, parameters: dict[str, Any], folder: Path, runs: int) -> dict[str, Any]:
    """Return the figures of one case: medians over `runs`."""
    a = spdist.generate(kind, folder / "A.zarr", overwrite=True, **parameters)
    c_bytes = api.plan(a, a).c.nbytes
    limit = max(int(c_bytes / 20.5), 32 << 20)
    plan = api.plan(a, a, memory_limit=limit)
    walls, parts, memory = [], [], []
    for _ in range(runs):
        shutil.rmtree(folder / "C.zarr", ignore_errors=True)
        with Scale() as scale:
            begin = time.perf_counter()
            report = api.multiply(
                a, a, folder / "C.zarr", memory_limit=limit, workers=WORKERS,
                callbacks=spdist.Callbacks(started=scale.weigh_idle),
            )  # fmt: skip
            walls.append(time.perf_counter() - begin)
        memory.append(max(scale.peaks[pid] - scale.idle[pid] for pid in scale.idle if pid in scale.peaks))
        c = spdist.open(folder / "C.zarr")
        reading, writing = storage_seconds(a, a, c, folder)
        parts.append((in_memory(plan, a, a), reading, writing))
    computing, reading, writing = (float(np.median(column)) for column in zip(*parts, strict=True))
    wall = float(np.median(walls))
    allowed = 0.15 * limit + 40e6
    parts_s = computing + reading + writing
    return {
        "case": name, "nnz_c": c.nnz, "c_over_limit": c.nbytes / limit, "blocks": len(plan.blocks),
        "wall_s": wall, "trials_s": walls, "in_memory_s": computing, "read_s": reading, "write_s": writing,
        "ratio": wall / parts_s, "limit_mb": limit / 1e6, "peak_mb": max(memory) / 1e6,
        "allowed_mb": (limit + allowed) / 1e6, "stages": report.stages, "verified": api.verify(a, a, c).ok,
    }  # fmt: skip


def main() -> None:
    """Measure, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where the matrices go; by default a temporary folder")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, (kind, parameters) in (QUICK if args.quick else CASES).items():
            if args.only and name not in args.only:
                continue
            row = measure(name, kind, parameters, Path(folder), 1 if args.quick else args.runs)
            rows.append(row)
            print(
                f"{name:22} C {row['nnz_c']:>11,} = {row['c_over_limit']:5.1f} x limit, {row['blocks']:5} blocks: "
                f"{row['wall_s']:6.2f} s against {row['in_memory_s']:6.2f} + {row['read_s']:5.2f} + "
                f"{row['write_s']:5.2f} = ratio {row['ratio']:5.2f}; worker {row['peak_mb']:6.1f} of "
                f"{row['allowed_mb']:6.1f} MB; {'verified' if row['verified'] else 'WRONG'}",
                flush=True,
            )
            for stage, total in row["stages"].items():
                moved = f"{total['bytes'] / 1e6:9.0f} MB"
                print(f"    {stage:12} {total['tasks']:6.0f} tasks {total['seconds']:7.2f} s {moved}")
    record.write({"benchmark": "out_of_core", "workers": WORKERS, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
