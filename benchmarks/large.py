"""Time a product far larger than the GPU, its norm, one product under several limits, and clusters of a large graph.

::

    python benchmarks/large.py --folder /dev/shm/large --out record.json

The product is the square of a 27-point grid of 412^3, whose C has 104 GB, from Zarr to Zarr, and verified. Its norm is
of A in the host's memory: the whole, beside the kernels that multiply and add up, first with B sent and then with B
where it is. The limits are those of the GPU, from host memory to host memory, on a smaller grid. The graph has 1.8
billion edges, in cliques that a few edges join; its Markov clustering takes three steps, from file to file.
"""

from __future__ import annotations

import collections
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import counters
import numpy as np
import pipeline
import record

import spdist
from spdist.kernels import reduction_spec
from spdist.kernels.streaming import pipeline as streaming
from spdist.kernels.streaming.gpu_device import Gpu
from spdist.matrices.csr import CSR
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at

SIDES = {False: (412, 256), True: (16, 12)}
"""Of the grids of the product and of the limits."""
CLIQUE = 31
"""Vertices that are joined with each other."""
CLIQUES = {False: 1_940_000, True: 200}
JOINED = 20
"""The first vertices of each so many cliques are joined in a chain."""
STEPS = 3
STORED = 1 << 30
"""Entries that are written to measure the rate of the storage."""
LIMITS_GIB = 1, 4, 60
REPEATS = 4


def grid(side: int, folder: Path) -> Path:
    """Store the matrix of a grid with constant coefficients, unless it is there."""
    path = folder / f"poisson-{side}.zarr"
    if not path.exists():
        spdist.generate("poisson", path, dims=(side,) * 3, points=27)
    return path


def product(side: int, folder: Path) -> dict[str, Any]:
    """Square a stored grid; return what it took from the first read to the last write, and whether C is right."""
    a, c, stages = grid(side, folder), folder / "C.zarr", folder / "run.jsonl"
    with counters.Meter() as meter:
        report = spdist.multiply(a, a, c, engine="cuda", record=stages, overwrite=True)
    wall = meter.seconds
    found = {
        "matrix": f"27-point {side}^3", "nnz_c": report.nnz, "bytes_c": 12 * report.nnz, "wall_s": wall,
        "run_s": pipeline.run_seconds(stages), "blocks": report.blocks,
        "peak_device": report.peak_memory, "peak_host": report.peak_host_memory,
        "right": spdist.verify(a, a, c).ok, "joules": meter.joules,
    }  # fmt: skip
    at(str(c)).remove()
    rates = pipeline.storage_rates(str(a), str(folder / "scratch.zarr"), 8, min(report.nnz, STORED))
    entries = spdist.open(a).nnz
    found |= {"storage": rates, "storage_s": max(12 * entries / rates["read"], 12 * report.nnz / rates["write"])}
    return found


def cliques(count: int, path: Path) -> None:
    """Store a graph of cliques whose first vertices, one in JOINED, are joined in a chain."""
    n, size = count * CLIQUE, 20_000  # cliques at a time
    writer = MatrixWriter(path, n, np.dtype(np.float32), {})
    ahead = JOINED * CLIQUE
    for start in range(0, count, size):
        cliques_here = np.arange(start, min(start + size, count))
        rows = (CLIQUE * cliques_here[:, None] + np.arange(CLIQUE)).ravel()
        columns = np.repeat(CLIQUE * cliques_here[:, None, None] + np.arange(CLIQUE), CLIQUE, axis=1).reshape(
            -1, CLIQUE
        )
        before, after = rows % ahead == 0, (rows % ahead == 0) & (rows + ahead < n)
        before &= rows >= ahead
        wide = np.column_stack([rows - ahead, columns, rows + ahead])
        kept = np.ones(wide.shape, bool)
        kept[:, 0], kept[:, -1] = before, after
        kept[:, 1:-1] = columns != rows[:, None]
        indptr = np.append(0, np.cumsum(kept.sum(axis=1)))
        indices = wide[kept].astype(np.int32)
        writer.append(CSR(indptr, indices, np.ones(len(indices), np.float32), (len(rows), n)))
    writer.close()


def clusters(count: int, folder: Path) -> dict[str, Any]:
    """Cluster a graph of cliques for some steps, file to file, in a fresh process; say whether cliques stay whole."""
    graph, out = folder / "cliques.zarr", folder / "clusters.txt"
    begin = time.perf_counter()
    cliques(count, graph)
    stored = spdist.open(graph)
    found = {"vertices": stored.nrows, "edges": stored.nnz // 2, "entries": stored.nnz, "steps": STEPS}
    found["made_s"] = time.perf_counter() - begin
    limit = ["--memory-limit", "32MiB"] if count < 1000 else []  # walks are stored
    command = [sys.executable, "-m", "spdist", "markov-clustering", str(graph), "-o", str(out), "--engine",
               "cuda" if record.has_gpu() else "numba", "--maxiter", str(STEPS), "--no-names", "--overwrite",
               *limit]  # fmt: skip
    with counters.Meter() as meter:
        done = subprocess.run(command, capture_output=True, text=True)
    if not out.exists():  # after few steps walks still change, which is exit code 1
        raise SystemExit(f"markov-clustering: {done.stderr.strip()[-800:]}")
    with out.open() as lines:
        first = [line.split() for line, _ in zip(lines, range(50), strict=False)]
    whole = all(len(line) % CLIQUE == 0 for line in first)
    found |= {"wall_s": meter.seconds, "joules": meter.joules, "said": done.stdout.strip()[-400:], "right": whole}
    rates = pipeline.storage_rates(str(graph), str(folder / "scratch.zarr"), 8, min(stored.nnz, STORED))
    at(str(graph)).remove()
    return {**found, "storage": rates}


def norm(a: CSR, device: Gpu) -> dict[str, Any]:
    """Return the seconds of the Frobenius norm of A A, and how many times as long as its kernels' they are."""
    stages = collections.Counter[str]()

    def note(stage: streaming.Stage) -> None:
        stages[stage.name] += stage.seconds

    begin = time.perf_counter()
    part = streaming.reduce(a, a, "frobenius", device, report=note)
    seconds = time.perf_counter() - begin
    kernels = stages["multiply"] + stages["reduce"]
    value = float(reduction_spec.final_value("frobenius", part, a.ncols))
    return {"seconds": seconds, "stages": dict(stages), "over_kernels": seconds / kernels, "value": value}


def limited(a: CSR, limit: int) -> dict[str, Any]:
    """Return the seconds of A A within a limit of the GPU's memory, and the most of it that was held."""
    device = Gpu(limit)
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        c = streaming.multiply(a, a, device)
        times.append(time.perf_counter() - begin)
        if len(times) == 1:
            right = pipeline.right(c, a, a)
        del c
    seconds = statistics.median(times[1:])
    found = {"memory_limit": limit, "first_s": times[0], "seconds": seconds, "peak": device.peak}
    return {**found, "right": right and device.peak <= limit}


def main() -> int:
    """Measure, print, record."""
    parser = record.parser("a product of 104 GB, its norm, and products under several limits")
    parser.add_argument("--folder", type=Path, help="keeps the matrices; a temporary one by default")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "large"}
    if not record.has_gpu():
        print("no GPU here (or no CuPy): nothing is measured")
        record.write(result, args.out)
        return 0
    large, small = SIDES[args.quick]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result |= {"gpu": record.gpu(), "product": product(large, folder)}
        print("C of {nnz_c:,} entries: {run_s:.1f} s from first read to last write".format(**result["product"]))
        record.write(result, args.out)
        stored, device = spdist.open(grid(large, folder)), Gpu()
        a = stored.rows(0, stored.nrows)
        result["reductions"] = [norm(a, device) for _ in range(2)]
        print("norm: {seconds:.3f} s, {over_kernels:.2f} of its kernels".format(**result["reductions"][-1]))
        stored, device = spdist.open(grid(small, folder)), Gpu(1 << 28)  # the memory of the former goes
        a, result["limits"] = stored.rows(0, stored.nrows), []
        for gib in LIMITS_GIB:
            result["limits"].append({"matrix": f"27-point {small}^3", **limited(a, gib << 30)})
            print("limit {memory_limit:,}: {seconds:.3f} s, peak {peak:,}".format(**result["limits"][-1]))
            record.write(result, args.out)
        del a
        result["clusters"] = clusters(CLIQUES[args.quick], folder)
        print("{edges:,} edges, {steps} steps: {wall_s:.1f} s".format(**result["clusters"]))
        record.write(result, args.out)
    return 0 if all(row["right"] for row in (result["product"], *result["limits"], result["clusters"])) else 1


if __name__ == "__main__":
    sys.exit(main())
