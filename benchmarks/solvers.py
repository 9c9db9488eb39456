"""Time an iteration of conjugate gradients on a 27-point grid cut over workers, for several numbers of them.

::

    python benchmarks/solvers.py --out record.json                          # CPU workers, and SciPy beside them
    python benchmarks/solvers.py --gpu --workers 1,2,4,8 --side 400         # workers with a GPU each

The matrix is stored; each worker reads its own rows. Every solution is checked by a product of the stored matrix. What
a product alone takes is timed in the same loop: on GPUs what is left of an iteration is updates, sums and launches, and
the same without CUDA graphs tells what launching one by one costs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
import scipy.sparse.linalg as sla

import spdist
from spdist.foundation.cpus import count_cpus
from spdist.operators import solvers

ROUNDS = 3
TOLERANCE = 1e-8
"""Of the solution that is checked; greatest residual allowed is ten times that."""


def products_s(part: Any, x: Any, *, count: int, graph: bool) -> float:
    """Return the seconds of a product on a worker, among others and with a look every so many, as solvers have it."""
    part.x[...] = x
    y, sums, looks = part.xp.empty_like(x), part.xp.zeros(1), []

    def look() -> float:
        part.total(sums).tolist()  # waits for the GPU
        looks.append(time.perf_counter())
        return 1.0

    done, _, _ = solvers._iterate(part, lambda: part.matvec(part.x, y), look, 1.0, 0.0, count, graph)
    steps = done // len(looks)
    return statistics.median(np.diff(looks[2:])) / steps  # the first is one by one, the second is captured


def iteration_ms(op: Any, b: Any, iterations: int, graph: bool) -> tuple[float, str]:
    """Return the milliseconds of an iteration, and how it was launched."""
    runs = [spdist.conjugate_gradient(op, b, rtol=0, maxiter=iterations, cuda_graph=graph) for _ in range(ROUNDS)]
    return statistics.median(1e3 * run.seconds / run.iterations for run in runs), runs[0].launched


def measure(a: Any, workers: int, iterations: int, on_gpu: bool) -> dict[str, Any]:
    """Prepare, time, solve; return what was found."""
    b = np.random.default_rng(0).standard_normal(a.nrows)
    begin = time.perf_counter()
    with spdist.partitioned(a, workers, partition="rows", on_gpu=on_gpu) as op:
        prepared = time.perf_counter() - begin
        spdist.conjugate_gradient(op, b, rtol=0, maxiter=solvers.LOOKS)
        row: dict[str, Any] = {"workers": workers, "prepared_s": prepared}
        row["ms"], row["launched"] = iteration_ms(op, b, iterations, True)
        row["product_ms"] = 1e3 * max(op.run(products_s, b, count=iterations, graph=True))
        if on_gpu:
            row["ms_without_graph"], _ = iteration_ms(op, b, iterations, False)
            row["product_ms_without_graph"] = 1e3 * max(op.run(products_s, b, count=iterations, graph=False))
        row["product_share"] = row["product_ms"] / row["ms"]
        found = spdist.conjugate_gradient(op, b, rtol=TOLERANCE)
        residual = float(np.linalg.norm(b - (op @ found.x)) / np.linalg.norm(b))
    row |= {"iterations": found.iterations, "right": found.converged and residual <= 10 * TOLERANCE}
    without = f", {row['ms_without_graph']:.3f} without graph" if on_gpu else ""
    print(f"{workers} workers: {row['ms']:.3f} ms an iteration {row['launched']}{without}, of which the product "
          f"{row['product_share']:.0%}, prepared in {prepared:.1f} s, {found.iterations} to {residual:.0e}"
          f"{'' if row['right'] else ', WRONG'}", flush=True)  # fmt: skip
    return row


def scipy_ms(a: Any, iterations: int) -> float:
    """Return the milliseconds of an iteration of SciPy's conjugate gradients with SciPy's product."""
    m, b = a.rows(0, a.nrows).to_scipy(), np.random.default_rng(0).standard_normal(a.nrows)
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        sla.cg(m, b, rtol=0, maxiter=iterations)
        times.append(1e3 * (time.perf_counter() - begin) / iterations)
    print(f"SciPy: {statistics.median(times):.3f} ms an iteration")
    return statistics.median(times)


def main() -> int:
    parser = record.parser("conjugate gradients over workers")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--workers", help="how many, separated by commas; 1 and one a core by default")
    parser.add_argument("--side", type=int, help="grid points along an edge; 100 by default")
    parser.add_argument("--iterations", type=int, help="in each timed run; 50 by default, 400 with --gpu")
    parser.add_argument("--folder", type=Path, help="keeps the matrix; a temporary one by default")
    args = parser.parse_args()
    side = args.side or (12 if args.quick else 100)
    iterations = args.iterations or (400 if args.gpu else 50)
    counts = [int(n) for n in args.workers.split(",")] if args.workers else sorted({1, count_cpus()})
    with tempfile.TemporaryDirectory() as scratch:
        place = (args.folder or Path(scratch)) / f"poisson-{side}.zarr"
        kept = place.exists()
        a = spdist.open(place) if kept else spdist.generate("poisson", place, dims=(side,) * 3, points=27)
        rows = [measure(a, count, iterations, args.gpu) for count in counts]
        result = {
            "grid": side, "nrows": a.nrows, "nnz": a.nnz, "on_gpu": args.gpu, "timed_iterations": iterations,
            "results": rows, "scipy_ms": None if args.gpu else scipy_ms(a, iterations),
        }  # fmt: skip
    if args.gpu:
        result["gpu"] = record.gpu()
    record.write(result, args.out)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
