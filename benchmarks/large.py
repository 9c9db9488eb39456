"""Time a product far larger than the GPU, its norm, and one product under several limits.

::

    python benchmarks/large.py --folder /dev/shm/large --out record.json

The product is the square of a 27-point grid of 412^3, whose C has 104 GB, from Zarr to Zarr, three times, and verified
once; the same for an R-MAT graph of the size of as-Skitter, whose square did not fit into the memory of Polok's GPU.
Its norm is of A in the host's memory: the whole, beside the kernels that multiply and add up, first with B sent and
then with B where it is. The limits are those of the GPU, from host memory to host memory, on a smaller grid. One GPU is
used, the first.
"""

from __future__ import annotations

import collections
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import counters
import pipeline
import record

import spdist
from spdist.kernels import reduction_spec
from spdist.kernels.streaming import pipeline as streaming
from spdist.kernels.streaming.gpu_device import Gpu
from spdist.matrices.csr import CSR
from spdist.stores.registry import at

SIDES = {False: (412, 256), True: (16, 12)}
"""Of the grids of the product and of the limits."""
GRAPH = {False: (20, 8), True: (8, 4)}
"""Scale and edges per vertex of the R-MAT graph: a million rows, where as-Skitter has 1.7 million."""
TRIALS = 3
STORED = 1 << 30
"""Entries that are written to measure the rate of the storage."""
LIMITS_GIB = 1, 4, 60
REPEATS = 4


def stored(name: str, folder: Path, kind: str, **parameters: Any) -> Path:
    """Store a generated matrix, unless it is there."""
    path = folder / f"{name}.zarr"
    if not path.exists():
        spdist.generate(kind, path, **parameters)
    return path


def grid(side: int, folder: Path) -> Path:
    """Store the matrix of a grid with constant coefficients, unless it is there."""
    return stored(f"poisson-{side}", folder, "poisson", dims=(side,) * 3, points=27)


def product(name: str, a: Path) -> dict[str, Any]:
    """Square a stored matrix some times; return what it took, with medians of whole calls and their phase "run"."""
    c, trials = a.parent / "C.zarr", []
    right, counts = False, set()
    for number in range(TRIALS):
        stages = a.parent / f"run-{number}.jsonl"
        with counters.Meter() as meter:
            report = spdist.multiply(a, a, c, engine="cuda", record=stages, overwrite=True)
        trials.append({"wall_s": meter.seconds, "run_s": pipeline.run_seconds(stages), "joules": meter.joules})
        right = spdist.verify(a, a, c).ok if number == 0 else right
        counts.add(report.nnz)
        at(str(c)).remove()
    nnz, right = report.nnz, right and len(counts) == 1
    found = {
        "matrix": name, "nnz_c": nnz, "bytes_c": 12 * nnz, "blocks": report.blocks, "workers": report.workers,
        "peak_device": report.peak_memory, "peak_host": report.peak_host_memory, "right": right, "trials": trials,
    }  # fmt: skip
    for key in ("wall_s", "run_s", "joules"):
        measured = [trial[key] for trial in trials if trial[key] is not None]
        found[key] = statistics.median(measured) if measured else None
    rates = pipeline.storage_rates(str(a), str(a.parent / "scratch.zarr"), 8, min(nnz, STORED))
    entries = spdist.open(a).nnz
    return found | {"storage": rates, "storage_s": max(12 * entries / rates["read"], 12 * nnz / rates["write"])}


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
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    result: dict[str, Any] = {"benchmark": "large"}
    if not record.has_gpu():
        print("no GPU here (or no CuPy): nothing is measured")
        record.write(result, args.out)
        return 0
    large, small = SIDES[args.quick]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result |= {"gpu": record.gpu()}
        scale, factor = GRAPH[args.quick]
        rmat = stored(f"rmat-{scale}-{factor}", folder, "rmat", scale=scale, edge_factor=factor)
        for key, name, path in (
            ("graph", f"R-MAT {scale} x {factor}", rmat),
            ("product", f"27-point {large}^3", grid(large, folder)),
        ):
            result[key] = product(name, path)
            print(
                "{matrix}: C of {nnz_c:,} entries, {wall_s:.1f} s, run {run_s:.1f} s".format(**result[key]), flush=True
            )
            record.write(result, args.out)
        matrix, device = spdist.open(grid(large, folder)), Gpu()
        a = matrix.rows(0, matrix.nrows)
        result["reductions"] = [norm(a, device) for _ in range(2)]
        print("norm: {seconds:.3f} s, {over_kernels:.2f} of its kernels".format(**result["reductions"][-1]))
        matrix, device = spdist.open(grid(small, folder)), Gpu(1 << 28)  # the memory of the former goes
        a, result["limits"] = matrix.rows(0, matrix.nrows), []
        for gib in LIMITS_GIB:
            result["limits"].append({"matrix": f"27-point {small}^3", **limited(a, gib << 30)})
            print("limit {memory_limit:,}: {seconds:.3f} s, peak {peak:,}".format(**result["limits"][-1]))
            record.write(result, args.out)
    return int(not all(row["right"] for row in (result["graph"], result["product"], *result["limits"])))


if __name__ == "__main__":
    sys.exit(main())
