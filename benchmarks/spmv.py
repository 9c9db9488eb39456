"""Time y = A @ x: spdist's operators beside cuSPARSE's best format in the same run, or SciPy; check every result.

::

    python benchmarks/spmv.py --folder /data/suite --out record.json        # on the GPU, in double precision
    python benchmarks/spmv.py --dtype float32 --matrices tet_1m,rmat_20
    python benchmarks/spmv.py --real data                                   # a folder of .npz as well
    python benchmarks/spmv.py --hybrid --threads 16 --out record.json       # shared with cores, beside the GPU alone
    python benchmarks/spmv.py --cpu --out record.json                       # on two threads, beside SciPy's one

On the GPU, products are captured in a CUDA graph, ours and cuSPARSE's alike, and a replay is timed: what a solver that
keeps its loop on the GPU sees. cuSPARSE is preprocessed. Preparation is timed once the kernels are compiled; it is
given in products of its own operator.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import record  # noqa: E402
import scipy.sparse as sp  # noqa: E402
import spmv_suite as suite  # noqa: E402

from spdist.errors import InputError  # noqa: E402
from spdist.foundation.cpus import count_cpus  # noqa: E402
from spdist.kernels.spmv.cpu_gpu_split import PreparedSplit  # noqa: E402
from spdist.matrices.csr import CSR, from_scipy  # noqa: E402
from spdist.operators import prepare  # noqa: E402
from spdist.operators.operator import Operator  # noqa: E402

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
"""Greatest error allowed, in units of ``|A| |x|``."""
REPLAYS = 7
PREPARATIONS, PREPARE_S = 5, 1.0
"""Times that an operator is prepared, of which the median counts; fewer once they took so many seconds."""
GRAPH_MS = 3.0
"""Milliseconds of products that a graph holds, about."""
CPU_ROUNDS = 15
STREAM = """
extern "C" __global__ void stream(const VALUE* v, const int* c, VALUE* out, const unsigned long long n) {
    VALUE sum = 0;
    int seen = 0;
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x * 2;
    for (unsigned long long i = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) * 2; i + 1 < n; i += step) {
        const VALUE2 a = __ldcs((const VALUE2*)(v + i));
        const int2 b = __ldcs((const int2*)(c + i));
        sum += a.x + a.y;
        seen += b.x ^ b.y;
    }
    if (sum == (VALUE)1.2345e30 && seen == 77) *out = sum;
}
"""
"""Reads values and indices once, and nothing else: the rate that a format's bytes are measured against."""


def matrices(args: Any, folder: Path) -> Iterator[tuple[str, CSR]]:
    """Yield the name and the matrix of each that was asked for, on the host."""
    known = suite.TINY if args.quick else suite.SUITE | suite.LARGE | suite.OTHER
    usual = suite.TINY if args.quick else [*suite.STREAMED, *suite.LARGE] if args.hybrid else suite.SUITE
    files = {f"real/{path.stem}": path for path in sorted(args.real.glob("*.npz"))} if args.real else {}
    usual = suite.OTHER if args.other else usual
    names = [*usual, *files] if args.matrices is None else args.matrices.split(",")
    suite.prepare([name for name in names if name in known], folder, args.quick)
    for name in names:
        if name in known:
            yield name, suite.load(name, folder)
        else:
            yield name, from_scipy(sp.load_npz(files[name]).tocsr().astype(np.float64))


class Reference:
    """What a product must be, by SciPy in double precision."""

    def __init__(self, m: CSR, dtype: np.dtype[Any]) -> None:
        matrix = m.to_scipy()
        matrix = sp.csr_matrix((m.data.astype(dtype), matrix.indices, matrix.indptr), shape=m.shape)
        self.x = np.random.default_rng(0).uniform(-1, 1, m.ncols).astype(dtype)
        wide = matrix.astype(np.float64)
        self.y = wide @ self.x.astype(np.float64)
        self.scale = np.maximum(abs(wide) @ abs(self.x).astype(np.float64), np.finfo(np.float64).tiny)

    def error(self, y: Any) -> float:
        """Return the greatest error in units of ``|A| |x|``; infinite where an element is no number."""
        wrong = abs(np.asarray(y, np.float64) - self.y) / self.scale
        return float(np.nan_to_num(wrong, nan=np.inf).max(initial=0.0))


# -- on the GPU --------------------------------------------------------------------------------------------------------


def graph_us(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call within a CUDA graph of many; the median over replays."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()  # what was prepared on another stream
    with stream:
        for _ in range(2):
            call()
        begin.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        count = max(4, min(64, int(GRAPH_MS / max(cupy.cuda.get_elapsed_time(begin, end), 1e-3))))
        stream.begin_capture()
        for _ in range(count):
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(REPLAYS):
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / count)
    return float(np.median(times))


def stream_rate(a: CSR) -> float:
    """Return the bytes a second at which a matrix's values and indices can be read."""
    import cupy

    value = "double" if a.dtype == np.float64 else "float"
    kernel = cupy.RawKernel(STREAM.replace("VALUE", value), "stream")
    us = graph_us(lambda: kernel((132 * 16,), (512,), (a.data, a.indices, a.data, np.uint64(a.nnz))))
    return a.nnz * (a.dtype.itemsize + 4) / us * 1e6


def peers(library: Any, a: CSR, reference: Reference) -> dict[str, tuple[float, float]]:
    """Return the microseconds of a product and of its preparation, for each format of a cuSPARSE that is right."""
    import cupy
    import cusparse

    found = {}
    x, y = cupy.asarray(reference.x), cupy.empty(a.nrows, a.dtype)
    for name in [*cusparse.SPMV, *cusparse.SPMV_OP]:
        y.fill(np.nan)
        try:
            prepared = []
            for _ in range(2):  # the first loads kernels
                cupy.cuda.Device().synchronize()
                begin = time.perf_counter()
                product = cusparse.SpMV(library, name, a, x, y)
                cupy.cuda.Device().synchronize()
                prepared.append(1e6 * (time.perf_counter() - begin))
            us = graph_us(product)
        except (cusparse.CusparseError, cupy.cuda.memory.OutOfMemoryError) as error:
            print(f"  cuSPARSE {name}: {error}")
            continue
        result = cupy.empty_like(y)
        result[slice(None) if product.order is None else product.order] = y
        if reference.error(result.get()) <= TOLERANCE[a.dtype.name]:
            found[f"{library.version} {name}"] = us, prepared[-1]
        else:
            print(f"  cuSPARSE {name}: wrong")
    return found


METHODS: dict[str, Callable[[Any], Operator]] = {
    "auto": prepare.operator,
    "auto, 1": lambda a: prepare.operator(a, uses=1),
    "auto, 100": lambda a: prepare.operator(a, uses=100),
    "auto, 100000": lambda a: prepare.operator(a, uses=100_000),
    "sell": lambda a: prepare.operator(a, "sell"),
    "sell, 32-bit": lambda a: prepare.sell_operator(a, 32, index="wide", block=1),
    "sell, 16-bit": lambda a: prepare.sell_operator(a, 32, index="narrow", block=1),
    "csr-vector": lambda a: prepare.operator(a, "csr"),
    "ehyb": lambda a: prepare.operator(a, "ehyb"),
}


PARTS_S = ("circuit_2700k", "rmat_20")
"""Those that METIS takes up to a minute for: left out unless --matrices names them."""


def chosen(args: Any, matrix: str) -> list[str]:
    """Return the methods to measure on a matrix."""
    names = [name.replace("+", ", ") for name in args.methods.split(",")] if args.methods else METHODS
    return [name for name in names if name != "ehyb" or args.matrices or matrix not in PARTS_S]


def compile_kernels(method: str, matrix: Any) -> None:
    """Have the kernels of a method compiled: by preparing the matrix, or a small one where that takes METIS."""
    import cupyx.scipy.sparse as csp

    if method == "ehyb":
        small = csp.identity(64, matrix.dtype, format="csr")
        prepare.ehyb_operator(small, part=np.zeros(64, np.int32))
    else:
        METHODS[method](matrix)


def measure(make: Callable[[], Operator], reference: Reference, rate: float, best: float) -> dict[str, Any]:
    """Prepare an operator, check it, time it."""
    import cupy

    times: list[float] = []
    while len(times) < PREPARATIONS and sum(times) < PREPARE_S:
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        a = make()
        cupy.cuda.Device().synchronize()
        times.append(time.perf_counter() - begin)
    prepared = 1e6 * statistics.median(times)
    x = cupy.asarray(reference.x)
    y = cupy.full(a.shape[0], np.nan, x.dtype)
    us = graph_us(lambda: a.matvec(x, out=y))
    error = reference.error(y.get())
    moved = a.nbytes + x.nbytes + y.nbytes
    return {
        "ms": us / 1e3, "bytes": moved, "gb_s": moved / us / 1e3, "of_stream": moved / us * 1e6 / rate,
        "over_cusparse": best / us, "error": error, "right": error <= TOLERANCE[x.dtype.name],
        "prepared_ms": prepared / 1e3, "prepared_products": prepared / us, "form": a.prepared.describe(), "why": a.why,
        "method": a.method,
    }  # fmt: skip


def on_gpu(args: Any, folder: Path) -> dict[str, Any]:
    """Measure every matrix; return the record."""
    import cupyx.scipy.sparse as csp
    import gpu_measure
    from cusparse import Cusparse

    libraries = [Cusparse(path) for path in [None, *args.cusparse]]
    dtype, rows = np.dtype(args.dtype), []
    for name, m in matrices(args, folder):
        a = gpu_measure.on_device(m, dtype)
        matrix, reference = csp.csr_matrix((a.data, a.indices, a.indptr), shape=a.shape), Reference(m, dtype)
        measured = {format: us for library in libraries for format, us in peers(library, a, reference).items()}
        theirs = {format: us for format, (us, _) in measured.items()}
        rate = stream_rate(a)
        best = min(theirs, key=theirs.__getitem__)
        ours = {}
        for method in chosen(args, name):
            make = functools.partial(METHODS[method], matrix)
            try:
                compile_kernels(method, matrix)
                ours[method] = measure(make, reference, rate, theirs[best])
            except InputError as error:
                print(f"  {method}: left out ({error})")
        rows.append({"matrix": name, "nrows": m.nrows, "nnz": m.nnz, "cusparse_us": theirs, "cusparse_best": best,
                     "cusparse_prepared_us": {format: us for format, (_, us) in measured.items()},
                     "stream_gb_s": rate / 1e9, "methods": ours})  # fmt: skip
        show(rows[-1])
    gpu = {**record.gpu(), "cusparse": [library.version for library in libraries]}
    return {"gpu": gpu, "dtype": dtype.name, "results": rows, "summary": summary(rows), "long_rows": long_rows(args)}


def launched_us(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call among others that are launched one by one, by the clock of the host."""
    import cupy

    count = 20
    call()
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    cupy.cuda.Device().synchronize()
    return 1e6 * (time.perf_counter() - begin) / count


def shared(args: Any, folder: Path) -> dict[str, Any]:
    """Measure rows shared by the GPU and cores beside the GPU alone, turn by turn; return the record."""
    import cupy
    import cupyx.scipy.sparse as csp

    rows = []
    for name, m in matrices(args, folder):
        reference = Reference(m, np.dtype(args.dtype))
        a = csp.csr_matrix(m.to_scipy().astype(args.dtype))
        alone = prepare.operator(a)
        begin = time.perf_counter()
        both = prepare.operator(a, "hybrid", threads=args.threads)
        prepared = time.perf_counter() - begin
        x, ys = cupy.asarray(reference.x), [cupy.full(m.nrows, np.nan, args.dtype) for _ in range(2)]
        calls = [functools.partial(one.matvec, x, out=y) for one, y in zip((alone, both), ys, strict=True)]
        turns = [(graph_us(calls[0]), launched_us(calls[0]), launched_us(calls[1])) for _ in range(REPLAYS)]
        graph, one_by_one, ours = (statistics.median(times) for times in zip(*turns, strict=True))
        error = max(reference.error(y.get()) for y in ys)
        rows.append({
            "matrix": name, "nrows": m.nrows, "nnz": m.nnz, "alone_us": graph, "alone_launched_us": one_by_one,
            "hybrid_us": ours, "ratio": graph / ours, "turns_us": turns, "error": error,
            "right": error <= TOLERANCE[args.dtype], "prepared_s": prepared, "threads": both.threads,
            "shared": isinstance(both.prepared, PreparedSplit), "form": both.prepared.describe(), "why": both.why,
        })  # fmt: skip
        print(f"{name:20} the GPU alone {graph:8.1f} us, launched one by one {one_by_one:8.1f} us, hybrid "
              f"{ours:8.1f} us, ratio {graph / ours:.3f}{'' if rows[-1]['right'] else ', WRONG'}; {both}",
              flush=True)  # fmt: skip
    return {"gpu": record.gpu(), "dtype": args.dtype, "results": rows}


def long_rows(args: Any) -> dict[str, float]:
    """Return the milliseconds of CSR-scalar and CSR-vector on long rows, and their ratio."""
    import cupy
    import gpu_measure

    from spdist.kernels.spmv import csr as csr_spmv

    m = suite.skewed(500, 200, 51) if args.quick else suite.LONG_ROWS()
    a, reference = gpu_measure.on_device(m, np.dtype(args.dtype)), Reference(m, np.dtype(args.dtype))
    x, found = cupy.asarray(reference.x), {}
    for name, width in (("csr-scalar", 1), ("csr-vector", 32)):
        y = cupy.full(a.nrows, np.nan, x.dtype)
        found[name] = graph_us(functools.partial(csr_spmv.multiply, a, x, y, width=width)) / 1e3
        assert reference.error(y.get()) <= TOLERANCE[x.dtype.name]
    found["ratio"] = found["csr-scalar"] / found["csr-vector"]
    print(f"rows of {m.nnz // m.nrows:,} entries: CSR-vector over CSR-scalar {found['ratio']:.2f}")
    return found


def show(row: dict[str, Any]) -> None:
    best = row["cusparse_best"]
    print(f"{row['matrix']}: {row['nrows']:,} rows, {row['nnz']:,} entries; cuSPARSE {row['cusparse_us'][best]:.1f} us "
          f"({best}), stream {row['stream_gb_s']:,.0f} GB/s")  # fmt: skip
    for method, f in row["methods"].items():
        print(f"  {method:13} {1e3 * f['ms']:8.1f} us {f['gb_s']:6,.0f} GB/s {f['of_stream']:5.2f} of stream "
              f"{f['over_cusparse']:5.2f} x cuSPARSE, prepared in {f['prepared_products']:5,.0f} products, "
              f"{'' if f['right'] else 'WRONG, '}error {f['error']:.0e}; {f['method']}: {f['form']}",
              flush=True)  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return and print each method's mean over the matrices."""
    out: dict[str, Any] = {}
    for method in dict.fromkeys(method for row in rows for method in row["methods"]):
        figures = {row["matrix"]: row["methods"][method] for row in rows if method in row["methods"]}
        ratios = {name: f["over_cusparse"] for name, f in figures.items()}
        fem = [ratio for name, ratio in ratios.items() if name in suite.FEM]
        out[method] = {
            "geometric_mean": statistics.geometric_mean(ratios.values()), "minimum": min(ratios.values()),
            "finite_elements": statistics.geometric_mean(fem) if fem else None,
            "right": all(f["right"] for f in figures.values()),
        }  # fmt: skip
        print(
            f"{method:13} over cuSPARSE: " + ", ".join(f"{k} {v:.2f}" for k, v in out[method].items() if v is not None)
        )
    return out


# -- on the CPU --------------------------------------------------------------------------------------------------------


def in_turns(calls: tuple[Callable[[], Any], ...], rounds: int) -> tuple[list[float], ...]:
    """Return the seconds of each call in each round; what disturbs one round disturbs all of its calls."""
    times: tuple[list[float], ...] = tuple([] for _ in calls)
    for _ in range(rounds):
        for taken, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return times


def on_cpu(args: Any, folder: Path) -> dict[str, Any]:
    """Measure ``a @ x`` by SELL-C-sigma with threads and by SciPy with one, turn by turn; return the record."""
    rows = []
    for name, m in matrices(args, folder):
        reference, matrix = Reference(m, np.dtype(args.dtype)), m.to_scipy().astype(args.dtype)
        make = functools.partial(prepare.operator, matrix, "sell", threads=args.threads)
        make()
        prepared = statistics.median(in_turns((make,), 3)[0])
        a = make()
        y = a @ reference.x
        calls = functools.partial(matrix.__matmul__, reference.x), functools.partial(a.__matmul__, reference.x)
        theirs, ours = in_turns(calls, 3 if args.quick else CPU_ROUNDS)
        error, ms = reference.error(y), 1e3 * statistics.median(ours)
        moved = a.nbytes + reference.x.nbytes + y.nbytes
        rows.append({
            "matrix": name, "nrows": m.nrows, "nnz": m.nnz, "scipy_ms": 1e3 * statistics.median(theirs), "ms": ms,
            "ratio": statistics.median(theirs) / statistics.median(ours), "ratio_min": min(theirs) / min(ours),
            "gb_s": moved / ms / 1e6, "error": error, "right": error <= TOLERANCE[args.dtype],
            "prepared_ms": 1e3 * prepared, "prepared_products": 1e3 * prepared / ms, "form": a.prepared.describe(),
        })  # fmt: skip
        r = rows[-1]
        print(f"{name:20} SciPy {r['scipy_ms']:8.2f} ms, SELL {ms:8.2f} ms, ratio {r['ratio']:.2f}, of minima "
              f"{r['ratio_min']:.2f}, {r['gb_s']:.1f} GB/s, prepared in {r['prepared_products']:.0f} products, "
              f"{'' if r['right'] else 'WRONG, '}{r['form']}", flush=True)  # fmt: skip
    ratios = [row["ratio"] for row in rows]
    mean, least = statistics.geometric_mean(ratios), min(ratios)
    print(f"{args.threads} threads over 1 of SciPy: geometric mean {mean:.2f}, minimum {least:.2f}")
    return {"threads": args.threads, "dtype": args.dtype, "geometric_mean": mean, "minimum": least, "results": rows}


def main() -> int:
    parser = record.parser("y = A @ x: spdist beside cuSPARSE, or beside SciPy on the CPU")
    parser.add_argument("--cpu", action="store_true", help="on the CPU; without a GPU that is all there is")
    parser.add_argument("--folder", type=Path, help="keeps the matrices; a temporary one by default")
    parser.add_argument("--matrices", help="names, separated by commas")
    parser.add_argument("--other", action="store_true", help="kinds of matrix that the choice was not tuned on")
    parser.add_argument("--real", type=Path, help="a folder of .npz files to measure as well")
    others = [Path(name) for name in os.environ.get("CUSPARSE", "").split(os.pathsep) if name]
    parser.add_argument("--cusparse", type=Path, action="append", default=others,
                        help="the file of another cuSPARSE; by default those that CUSPARSE names")  # fmt: skip
    parser.add_argument("--methods", help="names, separated by commas, with + for a comma and a space in a name")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float64")
    parser.add_argument("--hybrid", action="store_true", help="rows shared by the GPU and cores, beside the GPU alone")
    parser.add_argument("--threads", type=int, help="by default 2 on the CPU, and all cores beside the GPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        cpu = args.cpu or not record.has_gpu()
        if cpu and not args.cpu:
            print("no GPU: the products on the CPU only")
        if cpu and args.threads is None:
            args.threads = min(2, count_cpus())
        result = (on_cpu if cpu else shared if args.hybrid else on_gpu)(args, folder)
    record.write(result, args.out)
    rights = [f["right"] for row in result["results"] for f in row.get("methods", {"": row}).values()]
    return 0 if all(rights) else 1


if __name__ == "__main__":
    sys.exit(main())
