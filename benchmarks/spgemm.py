"""Time C = A @ B on the GPU, spdist's methods beside cuSPARSE's best algorithm in the same process; check every result.

::

    python benchmarks/spgemm.py --folder /data/suite --out record.json      # the suite, in double precision
    python benchmarks/spgemm.py --matrices cage12,cca --methods rowwise --dtype float32
    python benchmarks/spgemm.py --real data                                 # a folder of .npz and .mtx as well
    python benchmarks/spgemm.py --profile hood                              # one line per kernel
    python benchmarks/spgemm.py --cold                                      # compilation, and starting from its cache

The time is that of the whole product: analysis, counting, allocation from CuPy's pool, values; operands on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record
import scipy.io
import scipy.sparse as sp
import suite

from spdist.kernels.hyspmm.workspace import BlockSizes, ItemBytes, sent_offsets
from spdist.matrices.csr import CSR, from_scipy

HERE = Path(__file__).resolve().parent
KERNELS = {"rowwise": "rowwise_gpu", "esc": "esc", "hyspmm": "hyspmm", "hyspmm_duplicated": "hyspmm"}
"""Module of spdist.kernels by method; "numeric" is rowwise on a known pattern, others go through spdist.spgemm."""
ON_HOST = {"hyspmm": "distinct", "hyspmm_duplicated": "duplicated"}
"""Methods whose operands and product stay on the host, and their variants; their time includes both transfers. They are
compared with CuPy's ``A @ B`` between transfers of A, B and C from and to page-locked memory."""
DTYPES = ("float32", "float64", "complex64", "complex128")
PATIENCE = 2.5
"""An algorithm of cuSPARSE so many times slower than another is timed once."""

Bind = Callable[[CSR, CSR], Callable[[], CSR]]
"""Takes operands, returns the function that is timed."""


def find_methods(names: list[str], deterministic: bool, probe: bool = True) -> dict[str, Bind]:
    """Return what each requested method multiplies with; say which are missing, by trying where `probe` is set."""
    found: dict[str, Bind] = {}
    for name in names:
        try:
            found[name] = _method(name, deterministic, probe)
        except (ImportError, LookupError) as error:
            print(f"{name}: left out, not there ({error})")
    return found


def _method(name: str, deterministic: bool, probe: bool) -> Bind:
    """Return one method."""
    if name == "numeric":
        return functools.partial(_numeric, deterministic)
    return _kernel(name, deterministic) if name in KERNELS else _public(name, deterministic, probe)


def _numeric(deterministic: bool, a: CSR, b: CSR) -> Callable[[], CSR]:
    """Return the product on a pattern that is known, as for every step but the first of many on one structure."""
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

    return functools.partial(rowwise_gpu.numeric, rowwise_gpu.symbolic(a, b, deterministic=deterministic), a, b)


def _kernel(name: str, deterministic: bool) -> Bind:
    """Return a method straight from its module; one without the option is deterministic anyway."""
    import gpu_measure

    multiply = importlib.import_module(f"spdist.kernels.{KERNELS[name]}.multiply").multiply
    has_option = "deterministic" in inspect.signature(multiply).parameters
    options: dict[str, Any] = {"deterministic": True} if deterministic and has_option else {}
    if name in ON_HOST:
        options["variant"] = ON_HOST[name]

    def bind(a: CSR, b: CSR) -> Callable[[], CSR]:
        left, right = a, b
        if name in ON_HOST:
            left = gpu_measure.page_locked(gpu_measure.on_host(a), a.data.dtype)
            right = left if b is a else gpu_measure.page_locked(gpu_measure.on_host(b), b.data.dtype)
        return functools.partial(multiply, left, right, **options)

    return bind


def _public(name: str, deterministic: bool, probe: bool) -> Bind:
    """Return a method by way of ``spdist.spgemm``, with CuPy's matrices in and out."""
    import cupyx.scipy.sparse
    from gpu_measure import cupyx_matrix

    from spdist import spgemm

    options = {"deterministic": True} if deterministic else {}
    if probe:
        one = cupyx.scipy.sparse.identity(1, format="csr")
        try:
            spgemm(one, one, method=name, **options)
        except Exception as error:  # each reason has its own: no such method, no such option, no CuPy matrices
            raise LookupError(str(error)) from error

    def bind(a: CSR, b: CSR) -> Callable[[], CSR]:
        left = cupyx_matrix(a)
        right = left if b is a else cupyx_matrix(b)

        def multiply() -> CSR:
            c = spgemm(left, right, method=name, **options)
            return CSR(c.indptr, c.indices, c.data, c.shape)

        return multiply

    return bind


def sent_duplicated(a: CSR, products: int, value_bytes: int) -> int:
    """Return the bytes that hySpMM sends for a product in one block, with a row of B for each entry of A."""
    sizes = BlockSizes(a.nrows, a.nnz, products, b_rows=a.nnz, b_entries=products, distinct=False)
    return sent_offsets(sizes, ItemBytes(value_bytes, index_bytes=4, pointer_bytes=4))[-1]


def products_of(a: CSR, b: CSR) -> int:
    """Return the multiplications that the product takes; host arrays."""
    return int(np.diff(b.indptr)[a.indices].sum())


def read_real(path: Path) -> suite.Pair:
    """Read a matrix; A @ A where it is square, else A @ A.T."""
    stored = sp.load_npz(path) if path.suffix == ".npz" else scipy.io.mmread(path)
    matrix = stored.tocsr().astype(np.complex128 if stored.dtype.kind == "c" else np.float64)
    a = from_scipy(matrix)
    return (a, a) if a.nrows == a.ncols else (a, from_scipy(matrix.T.tocsr()))


def operands(args: Any, folder: Path) -> Iterator[tuple[str, CSR, CSR]]:
    """Yield the name, A and B of each product that was asked for, on the host."""
    known = suite.TINY if args.quick else suite.SUITE
    files = {f"real/{path.stem}": path for path in sorted(args.real.iterdir())} if args.real else {}
    files = {name: path for name, path in files.items() if path.suffix in (".npz", ".mtx")}
    names = [*known, *files] if args.matrices is None else [name for name in args.matrices.split(",") if name]
    unknown = [name for name in names if name not in known and name not in files]
    if unknown:
        raise SystemExit(f"no such matrix: {', '.join(unknown)}; there are {', '.join([*known, *files])}")
    suite.prepare([name for name in names if name in known], folder, args.quick)
    for name in names:
        a, b = suite.load(name, folder, args.quick) if name in known else read_real(files[name])
        if name in files and products_of(a, b) > args.most:
            print(f"{name}: left out, {products_of(a, b):,} products are more than --most {args.most:,}")
            continue
        yield name, a, b


def attempt(name: str, multiply: Callable[[], CSR], *args: Any, **options: Any) -> dict[str, Any]:
    """Measure a product, or say why it failed; an error that the GPU does not recover from ends the run."""
    import cupy
    import gpu_measure

    try:
        return gpu_measure.measure(multiply, *args, **options)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    print(f"  {name} failed: {failed}")
    cupy.cuda.Device().synchronize()
    return {"failed": failed, "right": False}


class Bench:
    """What stays the same from matrix to matrix: the methods, the pool, cuSPARSE, the peers' figures."""

    def __init__(self, args: Any) -> None:
        import cupy
        import cusparse
        import gpu_measure

        self.args, self.dtype = args, np.dtype(args.dtype)
        self.pool = cupy.get_default_memory_pool()
        self.methods = find_methods(args.methods.split(","), args.deterministic)
        self.cusparse = cusparse.Cusparse(args.cusparse)
        self.bandwidth = gpu_measure.copy_bandwidth()
        self.gpu = {**record.gpu(), "cusparse": self.cusparse.version, "copy_gb_s": round(self.bandwidth / 1e9)}
        self.pcie = gpu_measure.pcie_bandwidth()
        self.gpu |= {f"{way}_gb_s": round(rate / 1e9, 1) for way, rate in self.pcie.items()}
        self.peers = {} if args.quick else peer_figures(args.targets, self.dtype, self.gpu["device"])

    def run(self, name: str, host_a: CSR, host_b: CSR) -> dict[str, Any]:
        """Return the figures of one product."""
        import gpu_measure

        self.pool.free_all_blocks()
        a = gpu_measure.on_device(host_a, self.dtype)
        b = a if host_b is host_a else gpu_measure.on_device(host_b, self.dtype)
        reference = gpu_measure.Reference(self.cusparse, a, b)
        theirs = self._cusparse(a, b, reference)
        ours = {}
        for method, bind in self.methods.items():
            ours[method] = attempt(
                method, bind(a, b), reference, self.pool, self.args.runs, twice=self.args.deterministic
            )
        products = products_of(host_a, host_b)
        row = {"matrix": name, "nrows": a.nrows, "nnz_a": a.nnz, "nnz_b": b.nnz, "products": products}
        if set(ON_HOST) & set(ours):
            cupy_there_and_back = gpu_measure.ThereAndBack(host_a, host_b, self.dtype, once=True)
            row["cupy"] = attempt("CuPy", cupy_there_and_back, reference, self.pool, self.args.runs, peer=True)
            self._transfers(host_a, products, row["cupy"], ours)
        return {**row, "cusparse": theirs, "methods": ours, **self._ratios(name, a, b, theirs, ours)}

    def _transfers(self, a: CSR, products: int, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        """Add to the figures of methods on the host how they compare with CuPy's, and their bound by PCIe.

        The bound is the longer of what is sent with B duplicated, and C coming back, each at the rate of its way alone.
        """
        for method in set(ON_HOST) & set(ours):
            figures = ours[method]
            if not figures["right"]:
                continue
            figures["over_cupy"] = theirs["ms"] / figures["ms"] if theirs["right"] else None
            if ON_HOST[method] == "duplicated":
                sent = sent_duplicated(a, products, self.dtype.itemsize)
                bound = 1e3 * max(sent / self.pcie["to_device"], figures["c_bytes"] / self.pcie["to_host"])
                figures |= {"sent": sent, "bound_ms": bound, "of_bound": bound / figures["ms"]}

    def _cusparse(self, a: CSR, b: CSR, reference: Any) -> dict[str, dict[str, Any]]:
        from cusparse import ALGORITHMS

        found: dict[str, dict[str, Any]] = {}
        for algorithm in ALGORITHMS:
            best = min((f["ms"] for f in found.values() if f["right"]), default=np.inf)
            multiply = self.cusparse.bind(algorithm, a, b)
            found[algorithm] = attempt(
                f"cuSPARSE {algorithm}", multiply, reference, self.pool, self.args.runs, peer=True,
                patience=PATIENCE * best,
            )  # fmt: skip
        return found

    def _ratios(self, name: str, a: CSR, b: CSR, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        """Add to each method's figures how they compare; return what they compare with."""
        good = {algorithm: figures["ms"] for algorithm, figures in theirs.items() if figures["right"]}
        best = min(good, key=good.__getitem__, default=None)
        peer, peer_ms = self.peers.get(name, (None, None))
        floor = None
        for figures in ours.values():
            if figures["right"]:
                moved = (a.nnz + b.nnz + figures["nnz_c"]) * (self.dtype.itemsize + 4)
                floor = 1e3 * moved / self.bandwidth
                figures["over_cusparse"] = good[best] / figures["ms"] if best else None
                figures["over_peer"] = peer_ms / figures["ms"] if peer_ms else None
                figures["workspace_of_c"] = figures["workspace"] / max(figures["c_bytes"], 1)
                figures["over_floor"] = figures["ms"] / floor
        return {"cusparse_best": best, "peer": peer, "peer_ms": peer_ms, "floor_ms": floor}


def peer_figures(path: Path, dtype: np.dtype[Any], device: str) -> dict[str, tuple[str, float]]:
    """Return the fastest code known for each matrix and its milliseconds; none for another dtype."""
    content = json.loads(path.read_text())
    if dtype != np.float64:
        print("peers were measured in float64 only: no ratio to them")
        return {}
    if not content["device"].startswith(device):
        print(f"peers were measured on {content['device']}, this is {device}: ratios to them mean little")
    figures = {}
    for row in content.get("spgemm", content)["rows"]:
        known = [(row["best_other_ms"], row["best_other"]), (row["cusparse_ms"], row["cusparse_best"])]
        ms, name = min(known)
        figures[row["matrix"]] = (name, ms)
    return figures


HEAD = (
    f"{'matrix':16} {'products':>13} {'nnz(C)':>12} {'method':8} {'ms':>9} {'cuSPARSE':>9} {'':6} {'ratio':>6} "
    f"{'peer':>8} {'':14} {'ratio':>6} {'work MB':>8} {'of C':>5} {'of theirs':>9} {'floor':>6} {'error':>8}"
)


def show(row: dict[str, Any]) -> None:
    """Print one line for each method."""
    for method, f in row["methods"].items():
        start = f"{row['matrix']:16} {row['products']:>13,} {f.get('nnz_c', 0):>12,} {method:8} "
        if "failed" in f:
            print(f"{start}failed: {f['failed']}", flush=True)
            continue
        if not f["right"]:
            keys = ("fault", "pattern", "entry_error", "row_error", "same_bits", "right_in_clean_memory")
            print(f"{start}WRONG: {', '.join(f'{key} {f[key]}' for key in keys if key in f)}", flush=True)
            continue
        best = row["cusparse"].get(row["cusparse_best"], {})
        error = max(e for e in (f["entry_error"], f["row_error"]) if e is not None)
        of_theirs = f["workspace"] / best["workspace"] if best.get("workspace") else None
        cells = [
            cell(f["ms"], "9.3f"), cell(best.get("ms"), "9.3f"), f"{row['cusparse_best'] or '':6}",
            cell(f["over_cusparse"], "6.2f"), cell(row["peer_ms"], "8.3f"), f"{row['peer'] or '':14}",
            cell(f["over_peer"], "6.2f"), cell(f["workspace"] / 1e6, "8.1f"), cell(f["workspace_of_c"], "5.2f"),
            cell(of_theirs, "9.4f"), cell(f["over_floor"], "6.1f"), cell(error, "8.1e"),
        ]  # fmt: skip
        print(start + " ".join(cells), flush=True)


def cell(value: float | None, form: str) -> str:
    """Format a number, or a dash of its width where there is none."""
    return f"{'-':>{int(form.split('.')[0])}}" if value is None else f"{value:{form}}"


MEANS = {
    "over_cusparse": "over cuSPARSE", "over_peer": "over the best peer", "over_cupy": "over CuPy with transfers",
    "of_bound": "of its bound",
}  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return and print each method's means over the matrices."""
    out = {}
    for method in dict.fromkeys(method for row in rows for method in row["methods"]):
        figures = [row["methods"][method] for row in rows]
        right = [f for f in figures if f["right"]]
        out[method] = {"right": len(right), "of": len(figures)}
        for key in MEANS:
            values = [f[key] for f in right if f.get(key)]
            if values:
                out[method][key] = {"geometric_mean": statistics.geometric_mean(values), "minimum": min(values)}
        if right:
            out[method]["most_workspace_of_c"] = max(f["workspace_of_c"] for f in right)
        parts = [f"{method}: {len(right)} of {len(figures)} right"]
        for key, text in MEANS.items():
            if key in out[method]:
                mean, least = out[method][key].values()
                parts.append(f"{text} geometric mean {mean:.2f}, minimum {least:.2f}")
        print("; ".join(parts))
    return out


def profile(args: Any, folder: Path) -> None:
    """Print the launches of each method for one matrix, longest first."""
    import cupy
    import gpu_measure

    args.matrices = args.profile
    methods = find_methods(args.methods.split(","), args.deterministic)
    for name, host_a, host_b in operands(args, folder):
        a = gpu_measure.on_device(host_a, np.dtype(args.dtype))
        b = a if host_b is host_a else gpu_measure.on_device(host_b, np.dtype(args.dtype))
        for method, bind in methods.items():
            multiply = bind(a, b)
            gpu_measure.clock(multiply)
            whole = statistics.median(gpu_measure.clock(multiply) for _ in range(args.runs))
            with gpu_measure.launches() as seen:
                multiply()
            total = sum(launch.ms for launch in seen)
            print(f"{name}, {method}: {whole:.3f} ms, {total:.3f} of it in {len(seen)} kernels of spdist")
            for launch in sorted(seen, key=lambda launch: -launch.ms):
                where = f"grid {launch.grid!s:>9} block {launch.block:5} shared {launch.shared:7,}"
                print(f"  {launch.ms:9.4f} ms {launch.ms / total:6.1%}  {where}  {launch.name}")
        cupy.get_default_memory_pool().free_all_blocks()


def start(method: str, dtype: str, folder: str) -> None:
    """Multiply the tiny matrices twice and print the seconds as JSON; the child process of `cold`."""
    begin = time.perf_counter()
    import cupy
    import gpu_measure

    bind = find_methods([method], False, probe=False)[method]
    pairs = []
    for name in suite.TINY:
        host_a, host_b = suite.load(name, Path(folder), tiny=True)
        a = gpu_measure.on_device(host_a, np.dtype(dtype))
        pairs.append((a, a if host_b is host_a else gpu_measure.on_device(host_b, np.dtype(dtype))))
    cupy.cuda.Device().synchronize()
    seconds = {"import_s": time.perf_counter() - begin}
    for key in ("first_s", "second_s"):
        seconds[key] = sum(gpu_measure.clock(bind(a, b)) for a, b in pairs) / 1e3
    print(json.dumps(seconds))


def _cold_and_warm(code: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run the child process with the cache empty, then full."""
    found: dict[str, Any] = {}
    for state in ("cold", "warm"):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"failed": errors[0] if errors else f"exit status {done.returncode}"}
        found[state] = json.loads(done.stdout.splitlines()[-1])
    return found


def cold(args: Any, folder: Path) -> list[dict[str, Any]]:
    """Time the first products of fresh processes: nothing compiled, then everything in the disk's cache."""
    suite.prepare(suite.TINY, folder, tiny=True)
    rows = []
    for method in find_methods(args.methods.split(","), False):
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as cache:
                path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
                environment = {**os.environ, "CUPY_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1", "PYTHONPATH": path}
                code = f"import spgemm; spgemm.start({method!r}, {dtype!r}, {str(folder)!r})"
                row = {"method": method, "dtype": dtype, **_cold_and_warm(code, environment)}
                row["cache_bytes"] = sum(p.stat().st_size for p in Path(cache).rglob("*") if p.is_file())
            rows.append(row)
            if "failed" in row:
                print(f"{method:8} {dtype:10}  failed: {row['failed']}", flush=True)
                continue
            print(
                f"{method:8} {dtype:10}  first: {row['cold']['first_s']:6.2f} s compiling, "
                f"{row['warm']['first_s']:6.3f} s from the cache on disk ({row['cache_bytes'] / 1e6:.1f} MB); "
                f"again {row['warm']['second_s']:6.3f} s",
                flush=True,
            )
    return rows


def parse() -> Any:
    parser = record.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the examples keep their lines
    parser.add_argument("--methods", default="rowwise,esc,hyspmm,auto")
    parser.add_argument("--matrices", help="names, by commas; all by default")
    parser.add_argument("--folder", type=Path, help="keeps the suite's matrices; by default a temporary folder")
    parser.add_argument("--real", type=Path, help="folder of .npz and .mtx files, multiplied as real/NAME")
    parser.add_argument("--most", type=int, default=3 * 10**9, help="products of a real matrix, at most")
    parser.add_argument("--cusparse", type=Path, help="the file of another cuSPARSE than CuPy's")
    parser.add_argument("--targets", type=Path, default=HERE / "peers.json", help="milliseconds of other codes")
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--deterministic", action="store_true", help="ask for the same bits on every run, and check")
    parser.add_argument("--runs", type=int, default=7, help="timed runs, at least")
    parser.add_argument("--profile", metavar="MATRIX", help="print each kernel's time instead")
    parser.add_argument("--cold", action="store_true", help="measure compilation in fresh processes instead")
    return parser.parse_args()


def main() -> int:
    """Measure, print, record."""
    args = parse()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"benchmark": "spgemm", "dtype": args.dtype, "rows": rows}
    if not record.has_gpu():
        print("no GPU here (or no CuPy): nothing is measured")
        record.write(result, args.out)
        return 0
    with tempfile.TemporaryDirectory() if args.folder is None else contextlib.nullcontext(args.folder) as place:
        folder = Path(place)
        if args.profile:
            profile(args, folder)
            return 0
        if args.cold:
            record.write({**result, "gpu": record.gpu(), "rows": cold(args, folder)}, args.out)
            return 0
        products = operands(args, folder)
        bench = Bench(args)
        print(", ".join(f"{key} {value}" for key, value in bench.gpu.items()))
        print(f"{args.dtype}, median of {args.runs} runs or more; floor: A, B and C moved once = 1")
        for method in set(ON_HOST) & set(bench.methods):
            print(f"{method}: operands and C on the host, both transfers in its time")
        print(HEAD)
        for name, a, b in products:
            try:
                rows.append(bench.run(name, a, b))
            except Exception:  # record what there is
                traceback.print_exc()
                print(f"{name}: the run ends here")
                result["broken"] = name
                break
            show(rows[-1])
    result |= {"gpu": bench.gpu, "deterministic": args.deterministic, "summary": summary(rows)}
    record.write(result, args.out)
    if "broken" in result:
        sys.stdout.flush()
        os._exit(1)  # a GPU that has failed answers every clean-up with another error
    return 0 if all(f["right"] for row in rows for f in row["methods"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
