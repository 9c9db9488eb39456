"""Time and memory of planning A @ A for 5 x 10^8 nonzeros, in a process of its own; and with workers that help."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

import spdist

CHILD = """
import json, resource, sys, time
from distributed import Client
from spdist import workers
from spdist.scheduler.planner.planner import make_plan
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.scheduler.planner.request import PlanRequest
from spdist.storage.matrix import open_matrix

def timed(readers=None):
    begin, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(PlanRequest(a, a, "numba", 1 << 30), readers)
    return plan, time.perf_counter() - begin, time.process_time() - cpu

a, count = open_matrix(sys.argv[1]), int(sys.argv[2])
plan, seconds, cpu = timed()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = {"seconds": seconds, "cpu_s": cpu, "peak": peak, "blocks": len(plan.blocks), "nnz_estimate": plan.c.nnz}
if count:
    with workers(count) as address, Client(address) as client:
        readers = RemoteReaders(client.get_executor(pure=False), count, 1)
        timed(readers)  # they compile
        same, found["helped_s"], found["helped_cpu_s"] = timed(readers)
    assert same == plan
print(json.dumps(found))
"""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "27-point 265^3": ("poisson", {"dims": (265, 265, 265), "points": 27}),
    "erdos-renyi 31M x 16": ("erdos-renyi", {"nrows": 31_250_000, "ncols": 31_250_000, "per_row": 16.0}),
    "R-MAT 22 x 16": ("rmat", {"scale": 22, "edge_factor": 16}),
}
QUICK = {"27-point 20^3": ("poisson", {"dims": (20, 20, 20), "points": 27})}


def measure(name: str, kind: str, parameters: dict[str, Any], folder: Path, workers: int) -> dict[str, Any]:
    """Generate a matrix, plan its square in a child process, return what the child used."""
    begin = time.perf_counter()
    a = spdist.generate(kind, folder / "A.zarr", overwrite=True, **parameters)
    generated = time.perf_counter() - begin
    command = [sys.executable, "-c", CHILD, a.url, str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"case": name, "nnz": a.nnz, "rows": a.nrows, "generated_s": generated, **json.loads(done.stdout)}


def main() -> None:
    """Measure, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where the matrices go; by default a temporary folder")
    parser.add_argument("--workers", type=int, default=0, help="plan again with so many processes that help")
    args = parser.parse_args()
    rows = []
    for name, (kind, parameters) in (QUICK if args.quick else CASES).items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = measure(name, kind, parameters, Path(folder), args.workers)
        rows.append(row)
        helped = f", with help in {row['helped_s']:.2f} s ({row['helped_cpu_s']:.2f} s here)" if args.workers else ""
        print(
            f"{name:22} {row['nnz']:>12,} nonzeros: planned in {row['seconds']:6.2f} s ({row['cpu_s']:.2f} s of cores)"
            f"{helped}, {row['peak'] / 2**20:7.1f} MiB peak, {row['blocks']:,} blocks "
            f"(generated in {row['generated_s']:.0f} s)",
            flush=True,
        )
    record.write({"benchmark": "planning", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
