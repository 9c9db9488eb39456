"""Measure again what the papers behind spdist measured, on matrices of the same kind; docs/papers.md shows the record.

::

    python benchmarks/papers.py --folder /data/suite --data real --out papers.json
    python benchmarks/papers.py --only polok villa

`--data` is a folder of real matrices, .npz of SciPy; those of the papers that are not there are generated. Without a
GPU, only what needs none is measured. Operands are on the GPU, as in the papers, except where the paper counts
transfers: hySpMM's speed-ups are those of ``spgemm.py --methods hyspmm``, EHYB's those of ``spmv.py``. Hits of caches
and bytes from memory are counted by `ncu`, energy by NVML, where they are there.
"""

from __future__ import annotations

import collections
import functools
import inspect
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import record
import scipy.sparse as sp
import suite
from spgemm import products_of

from spdist.foundation.cpus import count_cpus
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR, from_scipy

HERE = Path(__file__).resolve().parent
RUNS = 5
"""Timed runs, of which the median counts."""
LONG_S = 0.5
"""Seconds after which a call on the host is not timed again."""
SNAP: dict[str, Callable[[], CSR]] = {
    "roadNet-CA": suite.SUITE["roadnet"],
    "web-Google": suite.SUITE["webgoogle"],
    "amazon0312": lambda: suite.web(400_727, 3_200_440, 61),
    "cit-Patents": lambda: suite.erdos_renyi(3_774_768, 4, 62),
    "email-Enron": lambda: suite.web(36_692, 367_662, 63),
    "ca-CondMat": lambda: suite.web(23_133, 186_936, 64),
    "p2p-Gnutella31": lambda: suite.erdos_renyi(62_586, 2, 65),
    "wiki-Vote": lambda: suite.rmat(13, 12),
}
"""Polok's table 1: a generator for each matrix that is not in the folder of real ones."""
SECONDS = {
    "roadNet-CA": (0.774, 0.103, 0.099), "web-Google": (5.312, 0.315, 0.249), "email-Enron": (1.150, 0.247, 0.173),
    "amazon0312": (1.659, 0.141, 0.123), "ca-CondMat": (0.140, 0.024, 0.015), "p2p-Gnutella31": (0.032, 0.008, 0.003),
    "wiki-Vote": (0.082, 0.025, 0.015), "cit-Patents": (13.414, 0.497, 0.446),
}  # fmt: skip
"""Polok's table 1: seconds of CSparse, of CUSP and of the paper's product on a Tesla K40."""
THREADS = 256, 512, 1024
"""In a block, of Villa's kernels."""
THESIS = ("hood", "atmosmodl", "offshore", "bmwcra_1", "mono_500Hz", "cage12", "cca", "poisson3Da", "orsirr_1")
CACHED = "offshore", "cage12", "poisson3Da"
"""Of the thesis' matrices: those whose hits of the second cache are counted."""
STREAMED = "s27_108", "s7_atmosmodl", "elas3_70", "tet_1m", "tet_1m_rand", "rmat_20"
"""Matrices whose vector's traffic and whose energy are measured."""
COUNTING_S = 60.0
"""Seconds that one run of `ncu` may take."""
STAGES = {"count": "count", "esc_rows": "expand, sort, compress", "copy": "copy"}
"""Parts of names of ESC's kernels, and the stage that each belongs to; all others are of long rows."""


def median(call: Callable[[], Any], warm: bool = False) -> float:
    """Return the seconds of a call on the host, after one that is not counted; fewer calls where they are long."""
    if not warm:
        call()
    times: list[float] = []
    while len(times) < RUNS and sum(times) < LONG_S:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def real(folder: Path | None) -> dict[str, Path]:
    """Return the real matrices that there are."""
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.npz"))}


def load(path: Path) -> CSR:
    """Return a real matrix in double precision."""
    return from_scipy(sp.load_npz(path).tocsr().astype(np.float64))


# -- Wu 2015 -----------------------------------------------------------------------------------------------------------


def hyspmm(options: Any, files: dict[str, Path]) -> dict[str, Any]:
    """Return the second cache's share of hits of hySpMM, of ESC and of cuSPARSE: figures 1.1 and 4.3."""
    if not record.has_gpu() or options.quick:
        return {"rows": []}
    import counters

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        suite.prepare(CACHED, folder)
        found = {}
        for kind in ("esc", "cusparse", "hyspmm"):
            found |= counters.counted([f"{kind}:{name}" for name in CACHED], folder, COUNTING_S)
        suite.prepare(THESIS, folder)
        beside = [{"matrix": name, **beside_cusp(suite.load(name, folder)[0], options.cusp)} for name in THESIS]
    rows = []
    for case, one in found.items():
        method, name = case.split(":")
        rows.append({"matrix": name, "method": method, "hit_ratio": one[counters.HITS] / one[counters.SECTORS],
                     "kernels": one["kernels"], "read_bytes": one[counters.READ],
                     "written_bytes": one[counters.WRITTEN]})  # fmt: skip
    for row in [*rows, *beside]:
        print(row, flush=True)
    return {"rows": rows, "beside_cusp": beside}


def beside_cusp(a: CSR, program: str | None) -> dict[str, float]:
    """Return seconds of hySpMM from host to host, and of CUSP where its program is there."""
    import gpu_measure

    from spdist.kernels.hyspmm.multiply import multiply

    call = functools.partial(multiply, a, a)
    call()
    found = {"hyspmm_s": statistics.median(gpu_measure.clock(call) for _ in range(RUNS)) / 1e3}
    return found | by_cusp(a, program)


def by_cusp(a: CSR, program: str | None) -> dict[str, float]:
    """Return seconds of CUSP's product on the GPU, and with A sent and C brought back (`peers/cusp.cu`)."""
    if program is None:
        return {}
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        for part in (np.array([a.nrows, a.nnz], np.int64), a.indptr.astype(np.int32), a.indices, a.data):
            part.tofile(file)
        file.flush()
        done = subprocess.run([program, file.name, str(RUNS)], capture_output=True, text=True)
    if done.returncode:
        print(f"CUSP: exit code {done.returncode}: {done.stderr.strip()[-200:]}")
        return {}
    said = json.loads(done.stdout)
    return {"cusp_s": said["gpu_s"], "cusp_locked_s": said["locked_s"], "cusp_nnz_c": said["nnz_c"]}


# -- Polok, Ila, Smrz 2015 ---------------------------------------------------------------------------------------------


def esc_figures(a: CSR, b: CSR) -> dict[str, Any]:
    """Return seconds of ESC and of cuSPARSE, and seconds by stage, operands on the GPU."""
    import gpu_measure

    from spdist.kernels.esc.multiply import multiply

    left = gpu_measure.on_device(a, a.dtype)
    right = left if b is a else gpu_measure.on_device(b, b.dtype)
    csp_left = gpu_measure.cupyx_matrix(left)
    csp_right = csp_left if b is a else gpu_measure.cupyx_matrix(right)
    esc, peer = functools.partial(multiply, left, right), lambda: csp_left @ csp_right
    for call in (esc, peer):
        gpu_measure.clock(call)
    found = {
        name: statistics.median(gpu_measure.clock(call) for _ in range(RUNS)) / 1e3
        for name, call in (("esc_s", esc), ("cusparse_s", peer))
    }
    with gpu_measure.launches() as seen:
        c = esc()
    stages: collections.Counter[str] = collections.Counter()
    for launch in seen:
        stages[next((stage for part, stage in STAGES.items() if part in launch.name), "long rows")] += launch.ms / 1e3
    return {**found, "nnz_c": int(c.nnz), "stages_s": dict(stages)}


def polok(options: Any, files: dict[str, Path]) -> dict[str, Any]:
    """Return table 1 with the stages of figure 1 and the expansion factors of figure 3, and the costs of figure 4."""
    rows, all_to_all = [], []
    names = ["wiki-Vote"] if options.quick else list(SNAP)
    for name in names:
        is_real = name in files
        made = load(files[name]) if is_real else suite.TINY["rmat"]() if options.quick else SNAP[name]()
        a: CSR = made if isinstance(made, CSR) else made[0]
        rows.append({"matrix": name, "real": is_real, **product_figures(a, a), **by_cusp(a, options.cusp)})
        print(f"{name:16} {'real' if is_real else 'generated':9} {rows[-1]}", flush=True)
    for name, path in files.items():
        a = load(path)
        turned = from_scipy(a.to_scipy().T.tocsr())
        for kind, b in (("A A", a), ("A A'", turned)):
            if a.ncols == b.nrows and 0 < products_of(a, b) < (10**5 if options.quick else 10**8):
                all_to_all.append({"matrix": name, "product": kind, **product_figures(a, b)})
    return {"rows": rows, "all_to_all": all_to_all}


def product_figures(a: CSR, b: CSR) -> dict[str, Any]:
    """Return sizes and seconds of one product: SciPy's on a thread, and on a GPU ESC's and cuSPARSE's."""
    left, right = a.to_scipy(), b.to_scipy()
    c = left @ right
    products = products_of(a, b)
    found: dict[str, Any] = {
        "nnz": a.nnz, "products": products, "nnz_c": int(c.nnz), "expansion": products / max(c.nnz, 1),
        "scipy_s": median(lambda: (left @ right).sort_indices(), warm=True),
    }  # fmt: skip
    if record.has_gpu():
        found |= (made := esc_figures(a, b))
        found["right"] = made["nnz_c"] == c.nnz
    return found


# -- Villa -------------------------------------------------------------------------------------------------------------


def villa(options: Any, files: dict[str, Path]) -> dict[str, Any]:
    """Return products of CSR-scalar and CSR-vector by threads a block, and of one thread of the CPU."""
    import spmv_suite

    rows = []
    made: dict[str, Callable[[], CSR]] = {
        "long rows": lambda: spmv_suite.skewed(500, 200, 51) if options.quick else spmv_suite.LONG_ROWS(),
        "short rows, as kmer_V4a": lambda: suite.erdos_renyi(*((2_000, 2) if options.quick else (8_000_000, 2)), 66),
    }
    for name, make in made.items():
        m = make()
        matrix, x = m.to_scipy(), np.random.default_rng(0).uniform(-1, 1, m.ncols)
        row: dict[str, Any] = {
            "matrix": name,
            "nnz": m.nnz,
            "nrows": m.nrows,
            "cpu_s": median(functools.partial(matrix.dot, x)),
        }
        if record.has_gpu():
            row |= villa_on_gpu(m, x, matrix @ x)
        rows.append(row)
        print(name, row, flush=True)
    return {"rows": rows}


def villa_on_gpu(m: CSR, x: Any, expected: Any) -> dict[str, Any]:
    """Return seconds of both kernels."""
    import cupy
    import gpu_measure
    from spmv import graph_us

    from spdist.kernels.spmv import csr

    a, on_gpu, found = gpu_measure.on_device(m, m.dtype), cupy.asarray(x), {}
    for name, width in (("scalar", 1), ("vector", 32)):
        y = cupy.full(a.nrows, np.nan)
        call = functools.partial(csr.multiply, a, on_gpu, y, width=width)
        found[f"{name}_s"] = graph_us(call) / 1e6
        assert np.allclose(y.get(), expected, rtol=1e-10, atol=1e-12)
    found["by_threads_s"] = {str(threads): villa_block(a, on_gpu, threads, expected) for threads in THREADS}
    return found


def villa_block(a: CSR, x: Any, threads: int, expected: Any) -> dict[str, float]:
    """Return seconds of both kernels with so many threads in a block; spdist's have 256."""
    import cupy
    from spmv import graph_us

    from spdist.kernels.cuda.module import FOLDER, options
    from spdist.kernels.spmv import csr

    names = {"scalar": csr.kernel_name("double", "double", "int", "int", 1),
             "vector": csr.kernel_name("double", "double", "int", "int", 32)}  # fmt: skip
    text = (FOLDER / csr.FILE).read_text().replace("256", str(threads))
    kernels = cupy.RawModule(
        code=text, options=options(csr.FILE), backend="nvrtc", name_expressions=tuple(names.values())
    )
    y, found = cupy.full(a.nrows, np.nan), {}
    words = (np.int64(a.nrows), np.int64(1), a.indptr, a.indices, a.data, x, y)
    for kind, width in (("scalar", 1), ("vector", 32)):
        y.fill(np.nan)
        kernel, grid = kernels.get_function(names[kind]), (ceil_div(a.nrows, threads // width), 1)
        found[kind] = graph_us(functools.partial(kernel, grid, (threads,), words)) / 1e6
        assert np.allclose(y.get(), expected, rtol=1e-10, atol=1e-12)
    return found


# -- Chen --------------------------------------------------------------------------------------------------------------


def ehyb(options: Any, files: dict[str, Path]) -> dict[str, Any]:
    """Return conjugate gradients with a sparse approximate inverse as an operator, as the paper's users have it."""
    if not record.has_gpu() or options.quick:
        return {"rows": []}
    import gpu_measure
    import spmv_suite

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        names = ["s27_108", "tet_1m"]
        spmv_suite.prepare(names, folder)
        for name in names:
            a = gpu_measure.cupyx_matrix(gpu_measure.on_device(laplacian(spmv_suite.load(name, folder)), np.float64))
            rows.append({"matrix": name, "nrows": a.shape[0], "nnz": int(a.nnz), **preconditioned(a)})
            if find_spec("kaminpar"):
                rows[-1]["partition"] = partitioned(a)
            print(rows[-1], flush=True)
    return {"rows": rows}


def partitioned(a: Any) -> dict[str, dict[str, float]]:
    """Return seconds of parts by METIS on one thread and by KaMinPar on all, and of EHYB's product with either."""
    import cupy
    from spmv import graph_us

    from spdist.kernels.spmv import ehyb as kernel
    from spdist.operators import prepare

    host = from_scipy(a.get())
    share = int(kernel.SHARED_SHARE * kernel.SLACK * kernel.shared_limit())
    parts, _ = kernel.part_count(a.shape[0], a.dtype.itemsize, kernel.processors(), share)
    x, y, found = cupy.ones(a.shape[1]), cupy.empty(a.shape[0]), {}
    for name, cut in (("METIS", kernel.partition), ("KaMinPar", by_kaminpar)):
        begin = time.perf_counter()
        part = cut(host, parts)
        seconds = time.perf_counter() - begin
        operator = prepare.ehyb_operator(a, part=part)
        product = graph_us(functools.partial(operator.matvec, x, out=y)) / 1e6
        found[name] = {"partition_s": seconds, "product_s": product, "threads": 1 if name == "METIS" else count_cpus()}
    return found


def by_kaminpar(a: CSR, parts: int) -> Any:
    """Return the part of each row of a matrix of symmetric pattern; KaMinPar reads its graph from a file."""
    import kaminpar

    graph = sp.csr_matrix(a.to_scipy(), copy=True)
    graph.setdiag(0)
    graph.eliminate_zeros()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "graph.parhip"
        with path.open("wb") as file:  # version, vertices, edges; where each vertex' edges are in the file; edges
            np.array([3, a.nrows, graph.nnz], np.uint64).tofile(file)
            (8 * (graph.indptr.astype(np.uint64) + np.uint64(a.nrows + 4))).tofile(file)
            graph.indices.astype(np.uint64).tofile(file)
        loaded = kaminpar.load_graph(str(path), kaminpar.GraphFileFormat.PARHIP)
    cutter = kaminpar.KaMinPar(num_threads=count_cpus(), ctx=kaminpar.default_context())
    return np.asarray(cutter.compute_partition(loaded, parts, 0.03), np.int32)


def laplacian(m: CSR) -> CSR:
    """Return a positive definite matrix of a symmetric pattern: -1 beside the diagonal, a bit above the sum on it."""
    pattern = m.to_scipy()
    pattern.data[:] = 1.0
    pattern = sp.csr_matrix(pattern.maximum(pattern.T))
    pattern.setdiag(0)
    pattern.eliminate_zeros()
    degrees = np.asarray(pattern.sum(axis=1)).ravel()
    return from_scipy(sp.csr_matrix(sp.diags_array(1.001 * degrees + 1e-3) - pattern))


def approximate_inverse(a: Any) -> tuple[Any, Any]:
    """Return G and its transpose, ``G' G`` nearly the inverse of A: a row of G solves A's block of the row's columns.

    G has the pattern of A's lower triangle (Kolotilina and Yeremin 1993); the paper's is factorised likewise.
    """
    import cupy
    import cupyx.scipy.sparse as csp

    n, lower = a.shape[0], csp.tril(a, format="csr")
    lower.sort_indices()
    a.sort_indices()
    lengths = cupy.diff(lower.indptr)
    width = int(lengths.max())
    of_row = rows_of(lower)
    slot = cupy.arange(lower.nnz) - lower.indptr[of_row]
    columns = cupy.full((n, width), -1, np.int64)
    columns[of_row, slot] = lower.indices
    keys = rows_of(a) * n + a.indices
    values = cupy.zeros(lower.nnz)
    for start in range(0, n, 1 << 17):  # so that little memory is needed
        c = columns[start : start + (1 << 17)]
        wanted = c[:, :, None] * n + c[:, None, :]
        place = cupy.minimum(cupy.searchsorted(keys, wanted.ravel()), len(keys) - 1)
        there = (keys[place] == wanted.ravel()) & ((c[:, :, None] >= 0) & (c[:, None, :] >= 0)).ravel()
        blocks = cupy.where(there, a.data[place], 0.0).reshape(wanted.shape)
        blocks += cupy.eye(width)[None] * (c < 0)[:, :, None]
        last = lengths[start : start + len(c)] - 1
        unit = (cupy.arange(width)[None, :] == last[:, None]).astype(np.float64)
        g = cupy.linalg.solve(blocks, unit[:, :, None])[:, :, 0]
        g /= cupy.sqrt(cupy.take_along_axis(g, last[:, None], axis=1))
        inside = (of_row >= start) & (of_row < start + len(c))
        values[inside] = g[of_row[inside] - start, slot[inside]]
    factor = csp.csr_matrix((values, lower.indices, lower.indptr), shape=a.shape)
    return factor, factor.T.tocsr()


def rows_of(m: Any) -> Any:
    """Return the row of each entry of a matrix on the GPU."""
    import cupy

    return cupy.asarray(np.repeat(np.arange(m.shape[0]), np.diff(m.indptr.get())))


def preconditioned(a: Any) -> dict[str, Any]:
    """Return iterations and seconds of conjugate gradients by CuPy, whose products are spdist's or cuSPARSE's."""
    import cupy
    from cupyx.scipy.sparse import linalg

    from spdist.operators import prepare

    g, turned = approximate_inverse(a)
    b = cupy.asarray(np.random.default_rng(0).standard_normal(a.shape[0]))
    found: dict[str, Any] = {}
    tolerance = {"rtol" if "rtol" in inspect.signature(linalg.cg).parameters else "tol": 1e-8}

    def solve(product: Any, first: Any = None, second: Any = None) -> Any:
        matrix = linalg.LinearOperator(a.shape, matvec=product, dtype=a.dtype)
        m = first and linalg.LinearOperator(a.shape, matvec=lambda r: second(first(r)), dtype=a.dtype)
        counted: list[int] = []
        begin = time.perf_counter()
        x, _ = linalg.cg(matrix, b, maxiter=5000, M=m, callback=lambda _: counted.append(1), **tolerance)
        cupy.cuda.Device().synchronize()
        seconds = time.perf_counter() - begin
        return x, len(counted), seconds

    for way in ("cusparse", "spdist"):
        begin = time.perf_counter()
        products = [m.__matmul__ if way == "cusparse" else prepare.operator(m).matvec for m in (a, g, turned)]
        cupy.cuda.Device().synchronize()
        found[f"{way}_prepared_s"] = time.perf_counter() - begin
        for kind, of in (("plain", products[:1]), ("inverse", products)):
            runs = [solve(*of) for _ in range(3)]
            x = runs[0][0]
            residual = float(cupy.linalg.norm(b - a @ x) / cupy.linalg.norm(b))
            found[f"{way}_{kind}"] = {"iterations": runs[0][1], "seconds": statistics.median(run[2] for run in runs)}
            found["right"] = found.get("right", True) and residual <= 1e-6
    return found


# -- Kreutzer, Hager, Wellein ------------------------------------------------------------------------------------------


def kreutzer(options: Any, files: dict[str, Path]) -> dict[str, Any]:
    """Return, for the suite's matrices, SELL-32-sigma beside the best format, its occupancy and predicted time."""
    import spmv_suite

    rows = []
    names = list(spmv_suite.TINY if options.quick else spmv_suite.SUITE | spmv_suite.OTHER)[:18]
    on_gpu: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        spmv_suite.prepare(names, folder, options.quick)
        for name in names:
            rows.append({"matrix": name, **sell_on_cpu(spmv_suite.load(name, folder))})
            print(rows[-1], flush=True)
        if record.has_gpu() and not options.quick:
            on_gpu = {"traffic": traffic(folder), "energy": energy(folder)}
    return {"rows": rows, **on_gpu}


def traffic(folder: Path) -> list[dict[str, Any]]:
    """Return bytes of SELL's products on the GPU as counted, and the loads of x per entry (alpha) that they mean."""
    import counters
    import cupyx.scipy.sparse as csp
    import spmv_suite

    from spdist.operators import prepare

    rows = []
    for case, one in counters.counted([f"sell:{name}" for name in STREAMED], folder, COUNTING_S).items():
        m = spmv_suite.load(case.split(":")[1], folder)
        stored = prepare.operator(csp.csr_matrix(m.to_scipy()), "sell").nbytes
        moved = one[counters.READ] + one[counters.WRITTEN]
        rows.append({"matrix": case.split(":")[1], "counted_bytes": moved, "stored_bytes": stored, "nnz": m.nnz,
                     "alpha": (one[counters.READ] - stored) / (8 * m.nnz), "alpha_best": m.ncols / m.nnz,
                     "over_predicted": moved / (stored + 8 * (m.nrows + m.ncols)),
                     "bytes_per_flop": moved / (2 * m.nnz)})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def energy(folder: Path) -> list[dict[str, Any]]:
    """Return joules of a product on the GPU, of SELL and of what is chosen, and of CuPy's."""
    import counters
    import gpu_measure
    import spmv_suite

    rows = []
    for name in STREAMED[:4]:
        a = gpu_measure.cupyx_matrix(gpu_measure.on_device(spmv_suite.load(name, folder), np.float64))
        for method in ("sell", "auto", "cusparse"):
            if one := counters.joules(counters.spmv_call(a, method)):
                rows.append({"matrix": name, "method": method, "nnz": int(a.nnz), **one})
                print(rows[-1], flush=True)
    return rows


def sell_on_cpu(m: CSR) -> dict[str, Any]:
    """Return seconds of the CPU's formats with all threads, and what the paper's model says of SELL."""
    from spdist.kernels.spmv.sell.layout import chunk_occupancy, code_balance
    from spdist.operators import prepare

    matrix, x = m.to_scipy(), np.random.default_rng(0).uniform(-1, 1, m.ncols)
    found: dict[str, Any] = {"nnz": m.nnz, "scipy_s": median(functools.partial(matrix.dot, x))}
    for method in ("sell", "auto"):
        operator = prepare.operator(matrix, method, threads=count_cpus())
        y = np.empty(m.nrows)
        found[f"{method}_s"] = median(functools.partial(operator.matvec, x, out=y))
        assert np.allclose(y, matrix @ x, rtol=1e-10, atol=1e-10)
    row_nnz = m.nnz / max(m.nrows, 1)
    beta = float(chunk_occupancy(np.diff(m.indptr), 32, 1024))
    return found | {"beta": beta, "bytes_per_flop_best": code_balance(beta, 1 / row_nnz, row_nnz)}


PAPERS: dict[str, Callable[[Any, dict[str, Path]], dict[str, Any]]] = {
    "villa": villa, "ehyb": ehyb, "hyspmm": hyspmm, "kreutzer": kreutzer, "polok": polok,
}  # fmt: skip


def parts(options: Any) -> Iterator[str]:
    """Yield the papers to measure."""
    yield from (name for name in PAPERS if not options.only or name in options.only)


def main() -> int:
    """Measure, print, record."""
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=list(PAPERS))
    parser.add_argument("--cusp", default=shutil.which("cusp_esc"), help="program of peers/cusp.cu")
    parser.add_argument("--folder", type=Path, help="keeps the suite's matrices; by default a temporary folder")
    parser.add_argument("--data", type=Path, default=HERE.parent / "data", help="folder of real matrices, .npz")
    options = parser.parse_args()
    files = real(None if options.quick else options.data)
    found: dict[str, Any] = {"benchmark": "papers", "published_s": SECONDS}
    found |= {"gpu": record.gpu()} if record.has_gpu() else {}
    for name in parts(options):
        found[name] = PAPERS[name](options, files)
        record.write(found, options.out, quiet=True)
    rows = [row for part in PAPERS for row in found.get(part, {}).get("rows", [])]
    return 0 if all(row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
