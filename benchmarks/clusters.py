"""Time Markov clustering of a graph whose walks are stored: whole commands, from a stored matrix to a file of clusters.

::

    python benchmarks/clusters.py --out record.json

The graph has 37 million edges, in cliques that a few edges join, and its walks are stored after each of three steps.
The engine is `cuda` where there is a GPU, the first, else `numba`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import counters
import numpy as np
import pipeline
import record

import spdist
from spdist.matrices.csr import CSR
from spdist.storage.writer import MatrixWriter

TRIALS = 3
CLIQUE = 31
"""Vertices that are joined with each other."""
CLIQUES = {False: 80_000, True: 200}
JOINED = 20
"""The first vertices of each so many cliques are joined in a chain."""
STEPS = 3
STORED = 1 << 30
"""Entries that are written to measure the rate of the storage."""


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
    """Cluster a graph of cliques for some steps, file to file, in fresh processes; say whether cliques stay whole."""
    graph, out, trials, whole = folder / "cliques.zarr", folder / "clusters.txt", [], True
    cliques(count, graph)
    made = spdist.open(graph)
    limit = ["--memory-limit", "32MiB"] if count < 1000 else []  # walks are stored
    command = [sys.executable, "-m", "spdist", "markov-clustering", str(graph), "-o", str(out), "--engine",
               "cuda" if record.has_gpu() else "numba", "--maxiter", str(STEPS), "--no-names", "--overwrite",
               *limit]  # fmt: skip
    for _ in range(TRIALS):
        with counters.Meter() as meter:
            done = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():  # after few steps walks still change, which is exit code 1
            raise SystemExit(f"markov-clustering: {done.stderr.strip()[-800:]}")
        with out.open() as lines:
            whole &= all(len(line.split()) % CLIQUE == 0 for line, _ in zip(lines, range(50), strict=False))
        out.unlink()
        trials.append({"wall_s": meter.seconds, "joules": meter.joules, "said": done.stdout.strip()[-400:]})
        print(f"{trials[-1]['wall_s']:.1f} s", flush=True)
    return {
        "vertices": made.nrows, "edges": made.nnz // 2, "entries": made.nnz, "steps": STEPS, "right": whole,
        "trials": trials, "wall_s": statistics.median(trial["wall_s"] for trial in trials),
        "storage": pipeline.storage_rates(str(graph), str(folder / "scratch.zarr"), 8, min(made.nnz, STORED)),
    }  # fmt: skip


def main() -> int:
    """Measure, print, record."""
    parser = record.parser("Markov clustering of a stored graph")
    parser.add_argument("--folder", type=Path, help="for the graph; a temporary one by default")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    result: dict[str, Any] = {"benchmark": "clusters"} | ({"gpu": record.gpu()} if record.has_gpu() else {})
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result["clusters"] = clusters(CLIQUES[args.quick], Path(folder))
    print("{edges:,} edges, {steps} steps: {wall_s:.1f} s".format(**result["clusters"]))
    record.write(result, args.out)
    return int(not result["clusters"]["right"])


if __name__ == "__main__":
    sys.exit(main())
