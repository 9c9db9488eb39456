"""Time `spdist.neighbors.TopNTransformer` beside scikit-learn's brute force and sparse_dot_topn: whole calls.

::

    python benchmarks/neighbors.py [--quick] [--repeats N] [--only CASE ...] [--out FILE.json]

Each call begins with sparse rows that are not normalised and ends with the graph of the 15 nearest by the cosine, and
each row itself: `KNeighborsTransformer` with ``algorithm="brute"``, and `sp_matmul_topn` between rows made of length 1.
Each has as many threads as the process may use cores; the engine `cuda` takes part where CuPy sees a GPU. Calls take
turns after one that is not timed; medians. The similarities in each row of the graphs are compared. Peers that are
missing are named.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import record
import scipy.sparse as sp

from spdist.neighbors import TopNTransformer

NEIGHBORS = 15
DENSE = 10**8
"""Elements of dense rows at most, for faiss."""
Call = Callable[[], Any]


def documents(nrows: int, terms: int, per_row: int) -> sp.csr_matrix:
    """Return rows over terms whose frequencies fall as in text (rank to the power -0.8), weighted by rarity."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, terms + 1) ** -0.8
    columns = rng.choice(terms, nrows * per_row, p=weights / weights.sum())
    counts = sp.csr_matrix((np.ones(len(columns)), (np.repeat(np.arange(nrows), per_row), columns)), (nrows, terms))
    counts.sum_duplicates()
    frequency = np.bincount(counts.indices, minlength=terms)
    counts.data *= np.log(nrows / np.maximum(frequency, 1))[counts.indices] + 1
    return counts


def cells(nrows: int, genes: int, per_row: int, kinds: int) -> sp.csr_matrix:
    """Return counts of genes in cells, float32: each kind of cell favours some of the genes."""
    rng = np.random.default_rng(1)
    profiles = rng.gamma(0.3, size=(kinds, genes))
    profiles /= profiles.sum(axis=1, keepdims=True)
    of_kind = rng.integers(0, kinds, nrows)
    columns = np.concatenate([rng.choice(genes, per_row, p=profiles[kind]) for kind in of_kind])
    rows = np.repeat(np.arange(nrows), per_row)
    counts = sp.csr_matrix((np.ones(len(columns), np.float32), (rows, columns)), (nrows, genes))
    counts.sum_duplicates()
    counts.data = np.log1p(counts.data)
    return counts


CASES: dict[str, Callable[[], sp.csr_matrix]] = {
    "20,000 documents": lambda: documents(20_000, 30_000, 20),
    "40,000 documents": lambda: documents(40_000, 50_000, 20),
    "20,000 cells": lambda: cells(20_000, 2_000, 300, 20),
}
QUICK: dict[str, Callable[[], sp.csr_matrix]] = {"300 documents": lambda: documents(300, 500, 20)}


def with_topn(x: sp.csr_matrix, threads: int) -> Any:
    """Return the graph by sparse_dot_topn; rows are as long as there are positive similarities."""
    from sparse_dot_topn import sp_matmul_topn

    lengths = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    unit = sp.csr_matrix(sp.diags_array(1 / np.where(lengths > 0, lengths, 1)).astype(x.dtype) @ x)
    found = sp_matmul_topn(unit, sp.csr_matrix(unit.T), top_n=NEIGHBORS + 1, sort=True, n_threads=threads)
    found.data = 1 - found.data
    return found


def with_faiss(x: sp.csr_matrix, threads: int) -> Any:
    """Return the graph by faiss, which takes dense rows in single precision."""
    import faiss

    faiss.omp_set_num_threads(threads)
    dense = x.toarray().astype(np.float32)
    faiss.normalize_L2(dense)
    index = faiss.IndexFlatIP(dense.shape[1])
    index.add(dense)
    similar, columns = index.search(dense, NEIGHBORS + 1)
    offsets = np.arange(0, columns.size + 1, NEIGHBORS + 1)
    return sp.csr_matrix((np.clip(1 - similar.ravel(), 0, None), columns.ravel(), offsets), (len(dense), len(dense)))


def calls(x: sp.csr_matrix, threads: int) -> dict[str, Call]:
    """Return what is timed, by name."""
    from sklearn.neighbors import KNeighborsTransformer

    engines = ["numba", *(["cuda"] if record.has_gpu() else [])]
    found: dict[str, Call] = {
        f"spdist {engine}": lambda engine=engine: TopNTransformer(NEIGHBORS, engine=engine).fit_transform(x)
        for engine in engines
    }  # fmt: skip
    brute = {"n_neighbors": NEIGHBORS, "metric": "cosine", "algorithm": "brute", "n_jobs": threads}
    found["scikit-learn"] = lambda: KNeighborsTransformer(**brute).fit_transform(x)
    if find_spec("sparse_dot_topn"):
        found["sparse_dot_topn"] = lambda: with_topn(x, threads)
    if find_spec("faiss") and x.shape[0] * x.shape[1] <= DENSE:
        found["faiss, dense rows"] = lambda: with_faiss(x, threads)
    return found


def distances(graph: Any) -> np.ndarray:
    """Return the distances in each row, from the least on; 1 where there are fewer."""
    graph = sp.csr_matrix(graph)
    made = np.ones((graph.shape[0], NEIGHBORS + 1))
    lengths = np.diff(graph.indptr)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    made[rows, np.arange(graph.nnz) - np.repeat(graph.indptr[:-1], lengths)] = graph.data
    return np.sort(made, axis=1)


def measure(runs: dict[str, Call], repeats: int) -> dict[str, float]:
    """Compare the graphs of all calls, then return their median seconds."""
    graphs = {name: distances(run()) for name, run in runs.items()}
    first = next(iter(graphs.values()))
    for name, graph in graphs.items():
        if not np.allclose(first, graph, atol=2e-5):
            raise SystemExit(f"{name}: another graph")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name, run in list(runs.items())[:: 1 - 2 * (turn % 2)]:
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: round(statistics.median(seconds), 4) for name, seconds in times.items()}


def main() -> None:
    """Measure, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    cases = QUICK if args.quick else {name: CASES[name] for name in args.only}
    threads = len(os.sched_getaffinity(0))
    results: list[dict[str, Any]] = []
    for name, make in cases.items():
        x = make()
        seconds = measure(calls(x, threads), 1 if args.quick else args.repeats)
        results.append({"case": name, "nrows": x.shape[0], "nnz": x.nnz, "dtype": x.dtype.name, "seconds": seconds})
        print(f"{name:18} " + ", ".join(f"{way} {value:.3g} s" for way, value in seconds.items()), flush=True)
        content = {"benchmark": "neighbors", "neighbors": NEIGHBORS, "threads": threads, "repeats": args.repeats}
        content |= {"gpu": record.gpu()} if record.has_gpu() else {}
        record.write({**content, "results": results}, args.out, quiet=True)
    if not find_spec("sparse_dot_topn"):
        print("not installed: sparse_dot_topn")


if __name__ == "__main__":
    main()
