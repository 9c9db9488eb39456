"""Markov clustering beside mcl: whole commands, a list of edges in, a file of clusters out, and whether they agree.

::

    python benchmarks/clustering.py --mcl PATH [--data FOLDER] [--engine numba cuda] [--threads N] [--out FILE]

Both read the same file and write clusters of names. Commands run in turns; each time is a median. The variation of
information of the two clusterings is given as a share of the larger entropy: 0 if they are equal. Without mcl on the
machine, spdist alone is timed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record
import scipy.sparse as sp

DATA = Path(__file__).resolve().parent.parent / "data"
REAL = ("1138_bus", "debian_trixie_deps", "human_gene_GO", "ca-CondMat", "facebook_combined", "ca-AstroPh-nr",
        "email-Enron", "soc-brightkite-nr", "web-indochina-2004")  # fmt: skip


def planted(n: int, size: int, degree: float, noise: float) -> Any:
    """Return a graph of families, as of proteins: `degree` edges a vertex inside its family, `noise` to anywhere."""
    rng = np.random.default_rng(5)
    inside, outside = int(n * degree), int(n * noise)
    one = rng.integers(0, n, inside)
    other = np.minimum(one // size * size + rng.integers(0, size, inside), n - 1)
    rows = np.concatenate([one, rng.integers(0, n, outside)])
    columns = np.concatenate([other, rng.integers(0, n, outside)])
    weights = np.concatenate([rng.uniform(20, 200, inside), rng.uniform(1, 40, outside)])
    return sp.coo_array((weights, (rows, columns)), shape=(n, n))


def rmat(scale: int, edges: int) -> Any:
    """Return an R-MAT graph of Graph500's parameters, weights at random."""
    rng = np.random.default_rng(7)
    rows = columns = np.zeros(edges << scale, np.int64)
    for _ in range(scale):
        down, right = rng.random(len(rows)), rng.random(len(rows))
        lower = down > 0.76
        rows, columns = 2 * rows + lower, 2 * columns + (right > np.where(lower, 0.19 / 0.24, 0.57 / 0.76))
    return sp.coo_array((rng.uniform(0.1, 1, len(rows)), (rows, columns)), shape=(1 << scale, 1 << scale))


def graphs(args: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the matrix of each graph that is asked for."""
    if args.quick:
        yield "planted 2,000", planted(2_000, 20, 10, 2)
        return
    for name in REAL:
        for folder in (DATA, args.data):
            if folder is not None and (file := folder / f"{name}.npz").exists():
                yield name, sp.coo_array(sp.load_npz(file))
                break
    for n in args.planted:
        yield f"planted {n:,}", planted(n, 30, 12, 2)
    for scale in args.rmat:
        yield f"R-MAT {scale} x 16", rmat(scale, 16)


def write_edges(m: Any, file: Path) -> None:
    """Write the edges of a graph, with weights above 0."""
    weights = np.abs(m.data.astype(float))
    with file.open("w") as out:
        out.writelines(
            f"v{i}\tv{j}\t{x:.6g}\n" for i, j, x in zip(m.row.tolist(), m.col.tolist(), weights.tolist(), strict=True)
        )


def seconds_of(command: list[str], limit: float) -> float:
    """Run a command to its end; return its wall seconds, or infinity if it takes longer than `limit`."""
    begin = time.perf_counter()
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return float("inf")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(command)}: {error.stderr.decode()[-800:]}") from None
    return time.perf_counter() - begin


def labels_in(file: Path) -> dict[str, int]:
    """Return the line of each vertex."""
    return {vertex: i for i, line in enumerate(file.read_text().splitlines()) for vertex in line.split("\t")}


def agreement(one: Path, other: Path) -> dict[str, Any]:
    """Return how far apart two clusterings are."""
    mine, theirs = labels_in(one), labels_in(other)
    vertices = sorted(theirs)
    a, b = (np.array([found[vertex] for vertex in vertices]) for found in (mine, theirs))
    both = sp.csr_array((np.ones(len(a)), (a, b)))
    entropies = [_entropy(np.bincount(a)), _entropy(np.bincount(b)), _entropy(both.data)]
    variation = 2 * entropies[2] - entropies[0] - entropies[1]
    alone = [set(np.flatnonzero(np.bincount(x)[x] == 1).tolist()) for x in (a, b)]
    return {
        "clusters": [int(a.max()) + 1, int(b.max()) + 1],
        "variation_share": max(variation, 0.0) / max(*entropies[:2], 1e-300),
        "alone": [len(each) for each in alone], "alone_in_one": len(alone[0] ^ alone[1]),
    }  # fmt: skip


def _entropy(counts: Any) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def measure(m: Any, folder: Path, args: Any) -> dict[str, Any]:
    """Cluster one graph by both commands, in turns."""
    edges, ours, theirs = folder / "graph.abc", folder / "ours", folder / "theirs"
    write_edges(m, edges)
    threads = ["-te", str(args.threads), *args.options.split()]
    spdist = [sys.executable, "-m", "spdist", "markov-clustering", str(edges), "-I", "2.0", "-o", str(ours)]
    commands = {f"spdist {each}": [*spdist, *threads, "--engine", each, "--overwrite"] for each in args.engine}
    if args.mcl is not None:
        te = ["-te", str(args.threads)]
        commands["mcl"] = [args.mcl, str(edges), "--abc", "-I", "2.0", *te, "-o", str(theirs)]
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(args.rounds):
        for name in sorted(commands, reverse=bool(turn % 2)):
            if float("inf") not in found[name]:
                found[name].append(seconds_of(commands[name], args.limit))
    result: dict[str, Any] = {"vertices": m.shape[0], "edges": m.nnz}
    medians = {name: statistics.median(times) for name, times in found.items()}
    result["seconds"] = {
        name: None if seconds == float("inf") else round(seconds, 3) for name, seconds in medians.items()
    }
    if args.mcl is not None and theirs.exists():
        result |= agreement(ours, theirs)
    return result


def main() -> None:
    """Measure each graph, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--mcl", default=shutil.which("mcl"), help="the program mcl, by default the one on PATH")
    parser.add_argument("--data", type=Path, help="more real graphs, as .npz of SciPy")
    parser.add_argument("--engine", nargs="+", default=["auto"], help="of spdist, one or several")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a command is stopped")
    parser.add_argument("--rmat", type=int, nargs="*", default=[14], help="scales of R-MAT graphs")
    parser.add_argument("--planted", type=int, nargs="*", default=[100_000], help="vertices of graphs of families")
    parser.add_argument("--only", nargs="*", help="names of graphs")
    parser.add_argument("--options", default="--memory-limit 8GiB", help="more options of spdist, in quotes")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    results = {}
    for name, m in graphs(args):
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(m, Path(folder), args)
        print(f"{name:24} " + ", ".join(f"{key} {value}" for key, value in results[name].items()), flush=True)
    peer = None if args.mcl is None else subprocess.run([args.mcl, "--version"], capture_output=True, text=True).stdout
    content = {"benchmark": "clustering", "threads": args.threads, "limit": args.limit, "rounds": args.rounds}
    mcl = None if peer is None else peer.split("\n")[0]
    record.write(content | {"mcl": mcl, "options": args.options, "results": results}, args.out)


if __name__ == "__main__":
    main()
