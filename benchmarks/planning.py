"""Time and memory of planning A @ A for 5 x 10^8 nonzeros, in a process of its own."""

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
from spdist import api
begin = time.perf_counter()
plan = api.plan(sys.argv[1], sys.argv[1], memory_limit="1GiB")
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak": peak, "blocks": len(plan.blocks), "nnz_estimate": plan.c.nnz}))
"""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "27-point 265^3": ("poisson", {"dims": (265, 265, 265), "points": 27}),
    "erdos-renyi 31M x 16": ("erdos-renyi", {"nrows": 31_250_000, "ncols": 31_250_000, "per_row": 16.0}),
}
QUICK = {"27-point 20^3": ("poisson", {"dims": (20, 20, 20), "points": 27})}


def measure(name: str, kind: str, parameters: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Generate a matrix, plan its square in a child process, return what the child used."""
    begin = time.perf_counter()
    a = spdist.generate(kind, folder / "A.zarr", overwrite=True, **parameters)
    generated = time.perf_counter() - begin
    done = subprocess.run([sys.executable, "-c", CHILD, a.url], capture_output=True, text=True, check=True)
    return {"case": name, "nnz": a.nnz, "rows": a.nrows, "generated_s": generated, **json.loads(done.stdout)}


def main() -> None:
    """Measure, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where the matrices go; by default a temporary folder")
    args = parser.parse_args()
    rows = []
    for name, (kind, parameters) in (QUICK if args.quick else CASES).items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = measure(name, kind, parameters, Path(folder))
        rows.append(row)
        print(
            f"{name:22} {row['nnz']:>12,} nonzeros: planned in {row['seconds']:6.2f} s, {row['peak'] / 2**20:7.1f} MiB "
            f"peak, {row['blocks']:,} blocks (generated in {row['generated_s']:.0f} s)",
            flush=True,
        )
    record.write({"benchmark": "planning", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
