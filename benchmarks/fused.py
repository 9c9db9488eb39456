"""Time what turns a product into an answer on the CPU: top-n with a threshold, semirings, a mask; beside peers.

Public calls on SciPy's matrices. Peers are optional; missing ones are named: ``pip install sparse_dot_topn sp_matmul_rs
python-graphblas``. GraphBLAS takes its own matrices, made beforehand, and every answer is compared. Medians of runs in
turn.

::

    python benchmarks/fused.py [--quick] [--threads N] [--only top_n semirings triangles] [--out FILE.json]
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matrices  # noqa: E402
import numpy as np  # noqa: E402
import record  # noqa: E402
import scipy.sparse as sp  # noqa: E402

import spdist  # noqa: E402
from spdist.kernels.cpu.product_counts import row_products  # noqa: E402
from spdist.kernels.semirings import SEMIRINGS  # noqa: E402
from spdist.matrices.csr import CSR, from_scipy  # noqa: E402

PEERS = {"sparse_dot_topn": "sparse_dot_topn", "sp_matmul_rs": "sp_matmul_rs", "graphblas": "python-graphblas"}
TOP_N = ("sparse_dot_topn", "sp_matmul_rs")
GRAPHBLAS = {"or_and": "lor_land"}
RINGS = ("plus_times", "min_plus", "max_times", "max_min", "or_and", "plus_pair", "plus_first", "any_pair")
Row = dict[str, Any]


def in_turn(repeats: int, **runs: Callable[[], Any]) -> dict[str, float]:
    """Return the median seconds of each function, called in turn, after one call that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def documents(nrows: int, terms: int, per_row: int, seed: int = 0) -> CSR:
    """Return TF-IDF rows of length 1 over terms whose frequencies fall as in text (rank to the power -0.8)."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, terms + 1) ** -0.8
    columns = rng.choice(terms, nrows * per_row, p=weights / weights.sum())
    counts = sp.csr_matrix((np.ones(len(columns)), (np.repeat(np.arange(nrows), per_row), columns)), (nrows, terms))
    counts.sum_duplicates()
    frequency = np.bincount(counts.indices, minlength=terms)
    counts.data *= np.log(nrows / np.maximum(frequency, 1))[counts.indices] + 1
    counts.data /= np.sqrt(np.add.reduceat(counts.data**2, counts.indptr[:-1]))[np.repeat(
        np.arange(nrows), np.diff(counts.indptr)
    )]  # fmt: skip
    return from_scipy(counts)


def top_n(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time cosine similarities, the best 10 of each row from a threshold on."""
    rows = []
    for nrows, terms, per_row, threshold in [(500, 300, 8, 0.2)] if quick else [
        (40_000, 30_000, 20, 0.2), (40_000, 30_000, 20, 0.0), (100_000, 100_000, 12, 0.3),
    ]:  # fmt: skip
        a = documents(nrows, terms, per_row)
        b = from_scipy(a.to_scipy().T)
        left, right = a.to_scipy(), b.to_scipy()
        runs = {"spdist": functools.partial(spdist.spgemm, left, right, top_n=10, threshold=threshold, threads=threads)}
        for peer in filter(find_spec, TOP_N):
            runs[peer] = functools.partial(
                import_module(peer).sp_matmul_topn, left, right, top_n=10, threshold=threshold, n_threads=threads
            )
            check_top_n(runs["spdist"](), runs[peer](), threshold)
        products = int(row_products(a, np.diff(b.indptr)).sum())
        case = f"{nrows:,} documents, {terms:,} terms, threshold {threshold}"
        rows.append({"case": case, "products": products, "seconds": in_turn(repeats, **runs)})
    return rows


def check_top_n(c: Any, d: Any, threshold: float) -> None:
    """Compare the values of each row; equal ones may be of other columns, and sums differ in their last bits."""
    if threshold <= 0:  # the peer leaves out what is not above 0
        c = c.maximum(0)
    sums = [np.asarray(m.sum(axis=1)).ravel() for m in (c, d)]
    if not np.allclose(*sums):
        raise SystemExit("top-n is wrong")


def semirings(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time products over semirings, sorted."""
    cases = {"rmat 8 x 8": matrices.rmat(8, 8)} if quick else {
        "rmat 15 x 8": matrices.rmat(15, 8), "erdos-renyi 200k x 8": matrices.erdos_renyi(200_000, 8),
        "27-point 40^3": matrices.poisson(27, 40),
    }  # fmt: skip
    rows = []
    for case, a in cases.items():
        for name in RINGS:
            m = a.to_scipy()
            runs = {"spdist": functools.partial(spdist.spgemm, m, m, semiring=name, threads=threads)}
            if find_spec("graphblas"):
                runs["graphblas"] = graphblas_product(a, name, threads)
                check_product(runs["spdist"](), runs["graphblas"]())
            products = int(row_products(a, np.diff(a.indptr)).sum())
            rows.append({"case": f"{case}, {name}", "products": products, "seconds": in_turn(repeats, **runs)})
    return rows


def graphblas_matrix(m: CSR, dtype: Any) -> Any:
    """Return a matrix of GraphBLAS's."""
    import graphblas as gb

    return gb.Matrix.from_csr(m.indptr, m.indices, m.data.astype(dtype), nrows=m.nrows, ncols=m.ncols)


def graphblas_product(a: CSR, name: str, threads: int, mask: CSR | None = None) -> Callable[[], Any]:
    """Return GraphBLAS's product ``A @ A``, sorted as spdist's is."""
    import graphblas as gb

    gb.ss.config["nthreads"] = threads
    dtype = SEMIRINGS[name].result_dtype(a.dtype, a.dtype)
    ring = getattr(gb.semiring, GRAPHBLAS.get(name, name))[dtype.name]
    m = graphblas_matrix(a, dtype)
    structure = None if mask is None else graphblas_matrix(mask, np.bool_).S

    def run() -> Any:
        c = gb.Matrix(dtype.name, a.nrows, a.ncols)
        if structure is None:
            c << m.mxm(m, ring)
        else:
            c(mask=structure) << m.mxm(m, ring)
        c.wait("materialize")
        return c

    return run


def check_product(c: Any, d: Any) -> None:
    """Compare with a product of GraphBLAS's, whose sums may be of another order."""
    indptr, indices, data = d.to_csr(sort=True)
    same = np.array_equal(c.indptr, indptr) and np.array_equal(c.indices, indices)
    if not same or not np.allclose(c.data, data):
        raise SystemExit("the product is wrong")


def triangles(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time the count of triangles, a product inside a graph, beside the whole product with a filter after it."""
    rows = []
    for scale, edges, whole in [(8, 8, False)] if quick else [(14, 16, False), (16, 8, False), (14, 8, True)]:
        graph = matrices.rmat(scale, edges).to_scipy()
        lower = sp.csr_matrix(sp.tril(graph + graph.T, -1))
        a = from_scipy(lower + lower.T if whole else lower)
        m = a.to_scipy()
        mask, product = m.astype(np.bool_), functools.partial(spdist.spgemm, semiring="plus_pair", threads=threads)

        def filtered(m: Any = m, mask: Any = mask, product: Any = product) -> Any:
            return product(m, m).multiply(mask).sum()

        def confined(m: Any = m, product: Any = product) -> Any:
            return product(m, m, mask=m).data.sum()

        runs = {"spdist": confined, "unmasked": filtered}
        if find_spec("graphblas"):
            peer = graphblas_product(a, "plus_pair", threads, a)
            runs["graphblas"] = lambda peer=peer: peer().reduce_scalar("plus").get()
        counts = {name: int(run()) for name, run in runs.items()}
        if len(set(counts.values())) > 1:
            raise SystemExit(f"the counts differ: {counts}")
        case = f"rmat {scale} x {edges}, {'A A inside A' if whole else 'L L inside L'}, sum {counts['spdist']:,}"
        products = int(row_products(a, np.diff(a.indptr)).sum())
        rows.append({"case": case, "products": products, "seconds": in_turn(repeats, **runs)})
    return rows


PARTS: dict[str, Callable[[bool, int, int], list[Row]]] = {
    "top_n": top_n, "semirings": semirings, "triangles": triangles,
}  # fmt: skip


def show(part: str, rows: list[Row]) -> None:
    print(part)
    for row in rows:
        seconds = row["seconds"]
        ours = seconds["spdist"]
        others = [f"{name} {1e3 * s:,.1f} ms ({s / ours:.2f} x)" for name, s in seconds.items() if name != "spdist"]
        print(f"  {row['case']:55} {row['products']:13,} products: {', '.join([f'{1e3 * ours:,.1f} ms', *others])}")


def main(arguments: list[str] | None = None) -> int:
    parser = record.parser("Top-n, semirings and masks on the CPU, beside sparse_dot_topn and GraphBLAS.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args(arguments)
    missing = [package for module, package in PEERS.items() if not find_spec(module)]
    if missing:
        print(f"not installed, and not compared with: {', '.join(missing)}")
    results = {}
    for name in options.only:
        results[name] = PARTS[name](options.quick, options.threads, 2 if options.quick else options.repeats)
        show(name, results[name])
    peers = {package: record.version_of(package) for package in PEERS.values()}
    record.write({"threads": options.threads, "peers": peers, "results": results}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
