"""Answers from storage within a memory limit, reductions, and the workflows beside the packages people use today.

Peers are optional, and those that are missing are named: ``pip install sparse_dot_topn networkx pyamg``. Results are
compared; a difference ends the run. Both sides have `--threads` threads where the peer has threads at all; medians of
`--repeats` calls in turn, in seconds.

With `--gpu`, answers on a GPU: top-n from host memory to host memory, beside the whole product and the time of its
kernels; reductions beside the kernels of the product; and on the device semirings beside plus and times, R A P of known
structure and masked products beside cuSPARSE, upper triangles beside whole products.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import matrices
import numpy as np
import record
import scipy.sparse as sp
import suite
from fused import documents, in_turn

import spdist
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import SEMIRINGS
from spdist.kernels.streaming import pipeline
from spdist.matrices.csr import CSR, from_scipy

DATA = Path(__file__).resolve().parent.parent / "data"
PEERS = ("sparse_dot_topn", "networkx", "pyamg")
LIMIT = "64MiB"
Row = dict[str, Any]


def check(same: bool, what: str) -> None:
    """End the run where results differ."""
    if not same:
        raise SystemExit(f"{what}: the results differ")


def stored(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Measure answers to products whose C is many times the memory limit, from Zarr to Zarr."""
    rows = []
    cases: dict[str, dict[str, Any]] = {
        "top_n=10": {"top_n": 10},
        "top_n=10, min_plus": {"semiring": "min_plus", "top_n": 10},
        "inside A, plus_pair": {"semiring": "plus_pair", "mask": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        a = spdist.generate("rmat", f"{folder}/A.zarr", scale=10 if quick else 17, edge_factor=16)
        whole = spdist.plan(a, a, memory_limit=LIMIT)
        for case, wanted in cases.items():
            options = wanted | ({"mask": a} if "mask" in wanted else {})
            done = spdist.multiply(
                a, a, f"{folder}/C.zarr", memory_limit=LIMIT, workers=threads, overwrite=True, check=True, **options
            )
            rows.append(
                {
                    "case": f"rmat {10 if quick else 17} x 16, {case}",
                    "products": whole.expansion,
                    "c_over_limit": whole.c.nbytes / whole.memory_limit,
                    "nnz": done.nnz,
                    "blocks": done.blocks,
                    "blocks_of_whole": len(whole.blocks),
                    "seconds": {"spdist": done.seconds},
                    "peak_mb": done.peak_memory / 1e6,
                    "allowed_mb": (1.15 * done.memory_limit + 40e6) / 1e6,
                    "verified": (done.verification or {})["reason"],
                }
            )
            check(done.peak_memory <= 1.15 * done.memory_limit + 40e6, f"memory of {case}")
    return rows


def reductions(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time reductions beside the product they are of."""
    a = matrices.rmat(9 if quick else 16, 8).to_scipy()
    rows = []
    for what in ("frobenius", "column_sums", "nnz", "trace", "histogram"):
        options = {"mask": a} if what == "column_sums" else {}
        bins = np.linspace(0, 5, 101) if what == "histogram" else None
        runs = {
            "spdist": lambda what=what, bins=bins, options=options: spdist.reduce(a, a, what, bins=bins, **options),
            "product": lambda options=options: spdist.spgemm(a, a, threads=threads, **options),
        }
        rows.append({"case": f"{what}{' inside A' if options else ''}", "seconds": in_turn(repeats, **runs)})
    return rows


def similarity(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time the nearest genes by their annotations, each with itself, beside sparse_dot_topn."""
    m = sp.csr_array(sp.load_npz(DATA / "human_gene_GO.npz"))[: 300 if quick else None]
    unit = sp.csr_matrix(m / np.sqrt(m.power(2).sum(axis=1))[:, None])
    other = sp.csr_matrix(unit.T)
    runs: dict[str, Callable[[], Any]] = {
        "spdist": lambda: spdist.spgemm(unit, other, top_n=10, threshold=0.5, threads=threads)
    }
    if find_spec("sparse_dot_topn"):
        from sparse_dot_topn import sp_matmul_topn

        runs["sparse_dot_topn"] = lambda: sp_matmul_topn(unit, other, top_n=10, threshold=0.5, n_threads=threads)
        sums = [np.asarray(run().sum(axis=1)).ravel() for run in runs.values()]
        check(np.allclose(*sums), "similarity")
    return [{"case": f"{m.shape[0]:,} genes, cosine from 0.5, top 10", "seconds": in_turn(min(repeats, 3), **runs)}]


def halves(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time the upper triangle of A @ A.T, and of A.T @ A for genes' annotations, beside the whole product."""
    annotations = from_scipy(sp.load_npz(DATA / "human_gene_GO.npz").tocsr()[: 300 if quick else None].T)
    cases = {"genes, terms that share them": annotations} | (
        {"rmat 8 x 8": matrices.rmat(8, 8)} if quick else
        {"rmat 15 x 8": matrices.rmat(15, 8), "erdos-renyi 500k x 8": matrices.erdos_renyi(500_000, 8),
         "27-point 60^3": matrices.poisson(27, 60)}
    )  # fmt: skip
    rows = []
    for case, m in cases.items():
        a = sp.csr_matrix(m.to_scipy())
        b = sp.csr_matrix(a.T)
        runs = {
            "spdist": lambda a=a, b=b: spdist.spgemm(a, b, threads=threads, triangle="upper"),
            "whole": lambda a=a, b=b: spdist.spgemm(a, b, "numba", threads=threads),
        }
        half, whole = (run() for run in runs.values())
        check(2 * half.nnz - np.count_nonzero(np.diff(a.indptr)) == whole.nnz, case)
        check(np.array_equal(half.diagonal(), whole.diagonal()), case)
        rows.append({"case": case, "nnz": half.nnz, "nnz_of_whole": whole.nnz, "seconds": in_turn(repeats, **runs)})
    return rows


def triangles(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time the count of triangles beside networkx, each on its own form of the graph."""
    rows = []
    for name in ("1138_bus",) if quick else ("debian_trixie_deps", "brack2"):
        m = sp.load_npz(DATA / f"{name}.npz")
        pattern = sp.csr_array((abs(m) + abs(m.T)) > 0).astype(np.int64)
        order = np.argsort(np.diff(pattern.indptr), kind="stable")
        lower = sp.csr_matrix(sp.tril(pattern[order][:, order], -1))
        runs: dict[str, Callable[[], Any]] = {
            "spdist": lambda lower=lower: spdist.reduce(lower, lower, "sum", semiring="plus_pair", mask=lower)
        }
        if find_spec("networkx"):
            import networkx

            graph = networkx.from_scipy_sparse_array(sp.csr_array(lower + lower.T))
            runs["networkx"] = lambda graph=graph: sum(networkx.triangles(graph).values()) // 3
            check(len({int(run()) for run in runs.values()}) == 1, name)
        rows.append({"case": name, "triangles": int(runs["spdist"]()), "seconds": in_turn(min(repeats, 3), **runs)})
    return rows


def galerkin(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time R A P of each level of a hierarchy of pyamg's, beside SciPy's products, which pyamg calls."""
    if not find_spec("pyamg"):
        return []
    import pyamg

    side = 8 if quick else 60
    levels = pyamg.smoothed_aggregation_solver(pyamg.gallery.poisson((side,) * 3, format="csr"), max_coarse=500).levels
    rows = []
    warm = sp.eye_array(9, format="csr")
    spdist.spgemm(warm, warm, "numba")  # loads the kernels, as any larger product does
    for number, level in enumerate(levels[:-1]):
        r, a, p = (sp.csr_matrix(m) for m in (level.R, level.A, level.P))
        runs = {
            "spdist": lambda r=r, a=a, p=p: spdist.multi_matmul([r, a, p]),
            "scipy": lambda r=r, a=a, p=p: r @ a @ p,
        }
        difference = abs(runs["spdist"]() - runs["scipy"]()).max()
        check(difference <= 1e-12 * abs(a).max(), "galerkin")
        rows.append(
            {"case": f"poisson {side}^3, level {number}: {a.shape[0]:,} rows", "seconds": in_turn(repeats, **runs)}
        )
    return rows


def shortest_paths(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time all pairs by squaring over min_plus beside scipy.sparse.csgraph's choice for each graph."""
    from scipy.sparse.csgraph import shortest_path

    rng = np.random.default_rng(0)
    power, name = abs(sp.load_npz(DATA / "1138_bus.npz")), "1138_bus"
    if quick:
        power, name = power[:200, :200], "1138_bus, 200 vertices"
    n = 100 if quick else 1_000
    dense = sp.random_array((n, n), density=0.05, format="csr", random_state=rng)
    rows = []
    for case, m in ((name, sp.csr_array(power)), (f"random {n:,}, 5 % of all edges", dense)):
        m = sp.csr_array(m - sp.diags_array(m.diagonal()))
        m.data = np.floor(1 + 9 * rng.random(m.nnz))
        runs = {"spdist": lambda m=m: all_pairs(m, threads), "scipy": lambda m=m: shortest_path(m)}
        found, expected = runs["spdist"](), runs["scipy"]()
        check(found.nnz == np.isfinite(expected).sum() and found.sum() == expected[np.isfinite(expected)].sum(), case)
        rows.append({"case": case, "seconds": in_turn(min(repeats, 3), **runs)})
    return rows


def all_pairs(m: sp.csr_array, threads: int) -> Any:
    """Square until nothing changes; a loop of length 0 at each vertex keeps shorter paths."""
    n, entries = m.shape[0], m.tocoo()
    off = entries.row != entries.col
    places = np.append(entries.row[off], np.arange(n)), np.append(entries.col[off], np.arange(n))
    before = sp.csr_matrix((np.append(entries.data[off], np.zeros(n)), places), shape=m.shape)
    while True:
        after = spdist.spgemm(before, before, semiring="min_plus", threads=threads)
        if after.nnz == before.nnz and np.array_equal(after.data, before.data):
            return after
        before = after


# -- on a GPU ----------------------------------------------------------------------------------------------------------

WHOLE = 200_000_000
"""Entries of C up to which it is also made whole."""
RINGS = {
    "plus_times": np.float64, "min_plus": np.float64, "max_plus": np.float64, "max_times": np.float64,
    "max_min": np.float64, "plus_first": np.float64, "plus_second": np.float64, "plus_pair": np.int64,
    "or_and": np.bool_, "any_pair": np.bool_,
}  # fmt: skip


def on_device(m: CSR, dtype: Any = np.float64) -> CSR:
    """Copy a matrix to the GPU."""
    import cupy

    arrays = m.indptr.astype(np.int32), m.indices.astype(np.int32), m.data.astype(dtype)
    return CSR(*(cupy.asarray(array) for array in arrays), m.shape)


def synchronous(run: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that waits for the GPU, and lets go of what it made."""
    import cupy

    def wait() -> None:
        run()
        cupy.cuda.Device().synchronize()

    return wait


def kernels(a: CSR, b: CSR) -> Callable[[], None]:
    """Return the product of matrices that are on the GPU, left there."""
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

    left, right = on_device(a), on_device(b)
    return synchronous(lambda: rowwise_gpu.multiply(left, right))


def compile_ahead(names: dict[str, Any]) -> None:
    """Compile the kernels of semirings side by side."""
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: rowwise_gpu.compile_kernels(np.dtype(names[name]), 1 << 16, SEMIRINGS[name]), names))


def check_rows(a: CSR, b: CSR, c: CSR, options: ProductSpec) -> None:
    """Compare the values that are kept of some rows with SciPy's."""
    assert options.top_n is not None
    for row in np.linspace(0, a.nrows - 1, 50).astype(int):
        made = np.sort((a.rows(row, row + 1).to_scipy() @ b.to_scipy()).data)[::-1]
        kept = np.sort(c.rows(row, row + 1).data)[::-1]
        expected = made[made >= options.threshold][: options.top_n]
        near = abs(made - options.threshold) < 1e-12  # sums of another order may fall on the other side
        check(near.any() or (len(kept) == len(expected) and np.allclose(kept, expected)), f"row {row}")


def gpu_top_n(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time cosine similarities, the best 10 of each row from a threshold on, as `similarity` and fused.py have them."""
    from spdist.kernels.streaming.gpu_device import Gpu

    m = sp.csr_array(sp.load_npz(DATA / "human_gene_GO.npz"))[: 300 if quick else None]
    unit = sp.csr_matrix(m / np.sqrt(m.power(2).sum(axis=1))[:, None])
    cases = {f"{m.shape[0]:,} genes, cosine from 0.5, top 10": (from_scipy(unit), 0.5)}
    for nrows, terms, per_row, threshold in [(500, 300, 8, 0.2)] if quick else [
        (40_000, 30_000, 20, 0.2), (40_000, 30_000, 20, 0.0), (100_000, 100_000, 12, 0.3),
    ]:  # fmt: skip
        cases[f"{nrows:,} documents, {terms:,} terms, threshold {threshold}"] = (
            documents(nrows, terms, per_row), threshold,
        )  # fmt: skip
    rows = []
    for case, (a, threshold) in cases.items():
        b, device = from_scipy(a.to_scipy().T), Gpu()
        options = ProductSpec(top_n=10, threshold=threshold)
        make = functools.partial(pipeline.multiply, a, b, device)
        runs: dict[str, Callable[[], Any]] = {"spdist": lambda make=make, options=options: make(spec=options)}
        check_rows(a, b, runs["spdist"](), options)
        entries = int(pipeline.reduce(a, b, "nnz", device).values[0])
        if entries <= WHOLE:
            runs |= {"whole": make, "kernels": kernels(a, b)}
        rows.append({"case": case, "entries": entries, "seconds": in_turn(min(repeats, 3), **runs)})
    return rows


def gpu_reductions(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time reductions of a product whose operands are in host memory beside its kernels alone."""
    from spdist.kernels.streaming.gpu_device import Gpu

    cases = {"rmat 8 x 8": matrices.rmat(8, 8)} if quick else {
        "rmat 17 x 8": matrices.rmat(17, 8), "27-point 80^3": matrices.poisson(27, 80),
    }  # fmt: skip
    rows = []
    for case, a in cases.items():
        device = Gpu()
        alone = in_turn(repeats, kernels=kernels(a, a))
        for what in ("frobenius", "trace", "row_nnz"):
            run = functools.partial(pipeline.reduce, a, a, what, device)
            rows.append({"case": f"{case}, {what}", "seconds": in_turn(repeats, spdist=run) | alone})
    return rows


def gpu_semirings(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time products on the device over semirings, beside plus and times."""
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

    cases = {"rmat 8 x 8": matrices.rmat(8, 8)} if quick else {
        "rmat 17 x 8": matrices.rmat(17, 8), "erdos-renyi 500k x 8": matrices.erdos_renyi(500_000, 8),
        "27-point 60^3": matrices.poisson(27, 60),
    }  # fmt: skip
    rows = []
    compile_ahead(RINGS)
    for case, a in cases.items():
        plain: dict[str, float] = {}
        for name, dtype in RINGS.items():
            m = on_device(a, dtype)
            run = synchronous(lambda m=m, name=name: rowwise_gpu.multiply(m, m, semiring=SEMIRINGS[name]))
            seconds = in_turn(repeats, spdist=run)
            plain = plain or {"plus_times": seconds["spdist"]}
            rows.append({"case": f"{case}, {name}", "seconds": seconds | plain})
    return rows


def cusparse(*factors: CSR) -> Callable[[], Any]:
    """Return the product of CuPy's matrices from the last factor to the first, left on the device."""
    import cupyx.scipy.sparse as csp

    made = [csp.csr_matrix((m.data, m.indices, m.indptr), m.shape) for m in map(on_device, factors)]
    return lambda: functools.reduce(lambda right, left: left @ right, reversed(made))


def gpu_galerkin(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time R (A P) on the device with the structures of both products known, beside cuSPARSE's two products."""
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

    rows = []
    for side in [9] if quick else [63, 96]:
        a, p = suite.galerkin(side, seed=28)
        r = from_scipy(sp.csr_matrix(p.to_scipy().T))
        left, middle, right = (on_device(m) for m in (r, a, p))
        first = rowwise_gpu.symbolic(middle, right)
        second = rowwise_gpu.symbolic(left, rowwise_gpu.numeric(first, middle, right))

        def again(left=left, middle=middle, right=right, first=first, second=second) -> CSR:
            return rowwise_gpu.numeric(second, left, rowwise_gpu.numeric(first, middle, right))

        x = np.random.default_rng(1).uniform(-1, 1, p.ncols)
        expected = r.to_scipy() @ (a.to_scipy() @ (p.to_scipy() @ x))
        c = again()
        made = sp.csr_matrix((c.data.get(), c.indices.get(), c.indptr.get()), c.shape) @ x
        check(np.allclose(made, expected, rtol=1e-10, atol=1e-10 * abs(expected).max()), "galerkin")
        runs = {"spdist": synchronous(again), "cusparse": synchronous(cusparse(r, a, p))}
        rows.append({"case": f"27-point {side}^3, R A P, structures known", "seconds": in_turn(repeats, **runs)})
    return rows


def gpu_masks(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time triangles as L L inside L on the device, beside whole products of spdist and cuSPARSE that are filtered."""
    import cupyx.scipy.sparse as csp

    rows = []
    for scale, factor in [(8, 8)] if quick else [(16, 8), (18, 16)]:
        pattern = matrices.rmat(scale, factor).to_scipy()
        pattern.data[:] = 1
        lower = on_device(from_scipy(sp.csr_matrix(sp.tril(pattern + pattern.T, -1) > 0)))
        m = csp.csr_matrix((lower.data, lower.indices, lower.indptr), lower.shape)
        runs = {
            "spdist": lambda m=m: spdist.spgemm(m, m, mask=m),
            "whole, filtered": lambda m=m: spdist.spgemm(m, m).multiply(m),
            "cusparse, filtered": lambda m=m: (m @ m).multiply(m),
        }
        check(len({round(float(run().sum())) for run in runs.values()}) == 1, f"triangles of rmat {scale}")
        seconds = in_turn(min(repeats, 3), **{name: synchronous(run) for name, run in runs.items()})
        rows.append({"case": f"rmat {scale} x {factor}, L L inside L", "seconds": seconds})
    return rows


def gpu_halves(quick: bool, threads: int, repeats: int) -> list[Row]:
    """Time the upper triangle of A @ A.T on the device beside the whole product."""
    import cupyx.scipy.sparse as csp

    cases = {"rmat 8 x 8": matrices.rmat(8, 8)} if quick else {
        "rmat 17 x 8": matrices.rmat(17, 8), "erdos-renyi 500k x 8": matrices.erdos_renyi(500_000, 8),
        "27-point 60^3": matrices.poisson(27, 60),
    }  # fmt: skip
    rows = []
    for case, a in cases.items():
        transposed = from_scipy(sp.csr_matrix(a.to_scipy().T))
        left, right = (csp.csr_matrix((m.data, m.indices, m.indptr), m.shape) for m in map(on_device, (a, transposed)))
        runs = {
            "spdist": lambda left=left, right=right: spdist.spgemm(left, right, triangle="upper"),
            "whole": lambda left=left, right=right: spdist.spgemm(left, right),
        }
        half, whole = (run() for run in runs.values())
        check(2 * half.nnz - np.count_nonzero(np.diff(a.indptr)) == whole.nnz, case)
        check(np.isclose(float(2 * half.sum() - half.diagonal().sum()), float(whole.sum())), case)
        seconds = in_turn(repeats, **{name: synchronous(run) for name, run in runs.items()})
        rows.append({"case": case, "nnz": half.nnz, "nnz_of_whole": whole.nnz, "seconds": seconds})
    return rows


GPU_PARTS: dict[str, Callable[[bool, int, int], list[Row]]] = {
    "gpu_top_n": gpu_top_n, "gpu_reductions": gpu_reductions, "gpu_semirings": gpu_semirings,
    "gpu_galerkin": gpu_galerkin, "gpu_masks": gpu_masks, "gpu_halves": gpu_halves,
}  # fmt: skip
PARTS: dict[str, Callable[[bool, int, int], list[Row]]] = {
    "stored": stored, "reductions": reductions, "similarity": similarity, "triangles": triangles, "galerkin": galerkin,
    "shortest_paths": shortest_paths, "halves": halves,
}  # fmt: skip


def show(part: str, rows: list[Row]) -> None:
    """Print a part's rows."""
    print(part, flush=True)
    for row in rows:
        seconds, ours = row["seconds"], row["seconds"]["spdist"]
        others = [f"{name} {1e3 * s:,.1f} ms ({s / ours:.2f} x)" for name, s in seconds.items() if name != "spdist"]
        more = (
            f"; C {row['c_over_limit']:.0f} x limit, {row['peak_mb']:.0f} of {row['allowed_mb']:.0f} MB, "
            if ("peak_mb" in row)
            else ""
        )
        blocks = f"{row['blocks']} blocks, whole {row['blocks_of_whole']}" if more else ""
        print(f"  {row['case']:50} {', '.join([f'{1e3 * ours:,.1f} ms', *others])}{more}{blocks}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu", action="store_true", help="answers on a GPU, and nothing else")
    parser.add_argument("--only", nargs="*", choices=[*PARTS, *GPU_PARTS])
    options = parser.parse_args(arguments)
    parts = GPU_PARTS if options.gpu else PARTS
    if missing := [name for name in PEERS if not find_spec(name)]:
        print(f"not installed, and not compared with: {', '.join(missing)}")
    results = {}
    for name in options.only or parts:
        results[name] = parts[name](options.quick, options.threads, 2 if options.quick else options.repeats)
        show(name, results[name])
    peers = {package: record.version_of(package) for package in PEERS}
    gpu = {"gpu": record.gpu()} if options.gpu else {}
    record.write({**gpu, "threads": options.threads, "peers": peers, "results": results}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
