"""Time products from Zarr to Zarr, and reductions of products, for several numbers of workers.

::

    python benchmarks/scaling.py --folder /dev/shm/scaling --workers 1,2,4,8 --out record.json    # a GPU each
    python benchmarks/scaling.py --engine cuda,hybrid --workers 1                                 # cores beside them
    python benchmarks/scaling.py --engine numba --workers 1,2                                     # CPU workers

Workers are started first, and make each product once before it is timed: kernels are compiled, memory is page-locked.
C of the 27-point grid goes to the same folder as A, in memory if that is; of the R-MAT graph C stays where it is made,
and the Frobenius norm of all is what comes back. Each C is verified once; the norms of all runs must agree. With --weak
also the norm of as many of the graph's rows, drawn at random, as there are workers, times the graph. Beside them: how
quick A is read, and as many bytes as C has are written there, by threads of one process, one a core, with nothing else
going on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pipeline
import record
from distributed import Client

import spdist
from spdist.foundation.cpus import count_cpus
from spdist.scheduler.clusters.security import remembered
from spdist.scheduler.executors.clients import local_cluster
from spdist.stores.registry import at

REPEATS = 2
GPU_ENGINES = {"cuda", "hybrid"}
THREADS = 8
"""Of a worker with a GPU."""


def seconds(run: Callable[[], Any], target: Path | None = None) -> tuple[float, Any]:
    """Return the median time of some runs after a first one, and what the last returned; `target` is removed before."""
    run()
    times = []
    for _ in range(REPEATS):
        if target is not None:
            at(str(target)).remove()
        begin = time.perf_counter()
        found = run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), found


def measure(workers: int, engine: str, stored: dict[str, Path]) -> dict[str, Any]:
    """Start workers; return the seconds of each job, and whether its result is right."""
    on_gpu = engine in GPU_ENGINES
    target, stages_file = stored["grid"].parent / "C.zarr", stored["grid"].parent / "run.jsonl"
    with dask.config.set(local_cluster.SETTINGS), contextlib.ExitStack() as stack:
        made = local_cluster.cuda_cluster(workers, THREADS) if on_gpu else local_cluster.local_cluster(workers, 1, True)
        stack.callback(made.close)
        stack.enter_context(remembered(made.scheduler_address, made.security))
        where: dict[str, Any] = {"engine": engine, "scheduler": made.scheduler_address}
        grid, graph = stored["grid"], stored["graph"]
        if engine == "hybrid":
            with Client(made) as client:
                local_cluster.add_cpu_workers(made, client, count_cpus() // 2)
        reduced, norm = seconds(lambda: spdist.reduce(graph, graph, "frobenius", **where))
        weak = stored.get(f"rows-{workers}")
        weak_s = None if weak is None else seconds(lambda: spdist.reduce(weak, graph, "frobenius", **where))[0]
        written, report = seconds(lambda: spdist.multiply(grid, grid, target, record=stages_file, **where), target)
    run = pipeline.run_seconds(stages_file)  # of the last
    right = spdist.verify(grid, grid, target).ok
    at(str(target)).remove()
    print(
        f"{engine}, {workers} workers: reduction {reduced:.3f} s, product to Zarr {written:.3f} s, {run:.3f} s from "
        f"first read to last write, nnz(C) {report.nnz:,}, {report.blocks} blocks, {'right' if right else 'WRONG'}"
        f"{'' if weak_s is None else f', as many rows as workers {weak_s:.3f} s'}",
        flush=True,
    )
    stages = {name: stage["seconds"] for name, stage in report.stages.items()}
    facts = {"engine": engine, "workers": workers, "nnz_c": report.nnz, "blocks": report.blocks, "stages": stages}
    facts |= {} if weak_s is None else {"weak_s": weak_s}
    return {**facts, "reduction_s": reduced, "norm": float(norm), "product_s": written, "run_s": run, "right": right}


def stored_s(grid: Path, nnz_c: int, speed: dict[str, float]) -> float:
    """Return the seconds that A takes to be read, or C to be written, whichever is longer."""
    a = spdist.open(grid)
    entry = a.indices.dtype.itemsize + a.dtype.itemsize
    return max(a.nnz * entry / speed["read"], nnz_c * entry / speed["write"])


def make(folder: Path, side: int, scale: int) -> dict[str, Path]:
    """Store the matrices, unless they are there; the graph has 2^scale nodes."""
    stored = {"grid": folder / f"poisson-{side}.zarr", "graph": folder / f"rmat-{scale}.zarr"}
    if not stored["grid"].exists():
        spdist.generate("poisson", stored["grid"], dims=(side,) * 3, points=27)
    if not stored["graph"].exists():
        spdist.generate("rmat", stored["graph"], scale=scale, edge_factor=16)
    return stored


def draw_rows(stored: dict[str, Path], counts: list[int]) -> None:
    """Store, for each number of workers, its share of the graph's rows, at random; all of them for the most."""
    graph = spdist.open(stored["graph"])
    whole = graph.rows(0, graph.nrows).to_scipy()
    order = np.random.default_rng(0).permutation(graph.nrows)
    for count in counts:
        target = stored[f"rows-{count}"] = stored["graph"].with_suffix(f".{count}-of-{max(counts)}.zarr")
        if not target.exists():
            spdist.save(target, whole[np.sort(order[: graph.nrows * count // max(counts)])])


def main() -> int:
    """Measure, print, record."""
    parser = record.parser("products over several workers")
    parser.add_argument("--workers", default="1,2", help="how many, separated by commas")
    parser.add_argument("--engine", default="cuda", help="cuda, hybrid or numba; several, separated by commas")
    parser.add_argument("--folder", type=Path, help="keeps the matrices; a temporary one by default")
    parser.add_argument("--scale", type=int, default=22, help="of the graph, which has 2^scale nodes; 22 by default")
    parser.add_argument("--side", type=int, default=256, help="of the grid; 256 by default")
    parser.add_argument("--weak", action="store_true", help="a product that grows with the workers as well")
    args = parser.parse_args()
    engines = args.engine.split(",")
    on_gpu = bool(GPU_ENGINES & {*engines})
    if on_gpu and not record.has_gpu():
        print("no GPU here (or no CuPy): nothing is measured; --engine numba measures CPU workers")
        record.write({"benchmark": "scaling", "results": []}, args.out)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        stored = make(args.folder or Path(scratch), *((12, 8) if args.quick else (args.side, args.scale)))
        counts = [int(count) for count in args.workers.split(",")]
        if args.weak:
            draw_rows(stored, counts)
        rows: list[dict[str, Any]] = []
        scratch_matrix = str(stored["grid"].parent / "scratch.zarr")
        speed: dict[str, float] = {}
        for count, engine in itertools.product(counts, engines):
            rows.append(measure(count, engine, stored))
            speed = speed or pipeline.storage_rates(str(stored["grid"]), scratch_matrix, count_cpus(), rows[0]["nnz_c"])
            least = stored_s(stored["grid"], rows[-1]["nnz_c"], speed)
            rows[-1] |= {"share_of_storage": least / rows[-1]["product_s"], "run_share": least / rows[-1]["run_s"]}
            agree = all(math.isclose(row["norm"], rows[0]["norm"], rel_tol=1e-12) for row in rows)
            result = {"benchmark": "scaling", "results": rows, "norms_agree": agree, "storage": speed}
            # What is measured is kept, should the run be ended before its time.
            record.write(result | ({"gpu": record.gpu()} if on_gpu else {}), args.out)
    return 0 if agree and all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
