"""Time the CPU engine with 1, 2, 4, ... and all threads, beside SciPy and packages that use threads too.

::

    python benchmarks/cores.py --out record.json
    python benchmarks/cores.py --threads 1,16 --only 27-point top

Public calls on SciPy's matrices, from call to return, in one warm process that has loaded Numba's kernels:
`spdist.spgemm` of twelve matrices, six of them real; top-n, a masked count of triangles, min-plus, a reduction;
`operator` with a vector. Peers are SciPy, which has no threads, and as far as they are installed sp_matmul_rs, or
sparse_dot_topn (`sp_matmul`, `sp_matmul_topn`), and python-graphblas, with one thread and with all. *Sorted*: the
peer's rows are sorted after it, as spdist's are. *Unsorted*: `spdist.spgemm` with ``sort=False``,
beside `sp_matmul`, which does not sort, and spdist's own sorted rows. Programs take turns.

C is compared with SciPy's once, and bit for bit between numbers of threads. Work that goes on after the budget has no
more peers, then fewer repeats. *Speed-up*: one thread's time over that of n. *Ratio*: a peer's time over spdist's with
as many threads. Operators move A, x and y once; beside them the rate of STREAM's triad with as many threads. Beside the
speed-ups stands that of a loop over eight numbers in registers: cores that are busy all together run more slowly.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fused
import matrices
import numba
import numpy as np
import numpy.typing as npt
import record
import scipy.sparse as sp
import spgemm_cpu
import suite

import spdist
from spdist.kernels.cpu.reduce import reduce_product
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import reduction_of
from spdist.matrices.csr import CSR, from_scipy

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
Threaded = Callable[[int], Any]
REAL = "brack2", "cage10", "bcsstk16", "debian_trixie_deps", "memplus", "pwt"
LONG = 3.0
"""Seconds of a call from which on it is timed once."""
REPEATS = 3
SOME = 64
"""Rows of a product that loads the kernels."""
LOOP_ROUNDS = 1 << 27
"""Rounds of the loop in registers."""
TRIAD_DOUBLES = 1 << 25
"""Of each of three arrays: far more than caches hold."""
TOPN = next((name for name in ("sp_matmul_rs", "sparse_dot_topn") if importlib.util.find_spec(name)), None)
"""The package of `sp_matmul` and `sp_matmul_topn`: the quicker one if it is installed."""
HAS_GRAPHBLAS = importlib.util.find_spec("graphblas") is not None


class Work(NamedTuple):
    """Something to compute: spdist's call, and the peers', each for a number of threads."""

    name: str
    kind: str
    ours: Threaded
    peers: dict[str, Threaded]
    """By name. SciPy's have no threads and are timed once."""
    same: Callable[[Any, Any], bool]
    """Whether two results of spdist's have the same bits."""
    right: Callable[[Any], bool]
    moved: int = 0
    """Bytes that a product with a vector moves."""


def same_matrix(c: Any, d: Any) -> bool:
    """Whether two matrices have the same bits."""
    return all(getattr(c, p).tobytes() == getattr(d, p).tobytes() for p in ("indptr", "indices", "data"))


def same_array(x: Any, y: Any) -> bool:
    """Whether two arrays, or numbers, have the same bits."""
    return bool(np.asarray(x).tobytes() == np.asarray(y).tobytes())


def in_order(c: Any) -> Any:
    """Return a peer's matrix with its rows sorted."""
    c.sort_indices()
    return c


def power_law(nrows: int, seed: int = 5) -> CSR:
    """Return a matrix whose columns fall off as a power of their rank, with rows of 4 to 24 entries."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(nrows), rng.integers(4, 25, nrows))
    columns = (nrows * rng.random(len(rows)) ** 3).astype(np.int64)
    return suite.assemble((nrows, nrows), [rows * nrows + rng.permutation(nrows)[columns]], seed)


def squares(quick: bool, data: Path) -> Iterator[tuple[str, Callable[[], CSR]]]:
    """Yield names of square matrices, and what makes them."""
    generated: dict[str, Callable[[], CSR]] = {
        "27-point 90^3": lambda: matrices.poisson(27, 90),
        "7-point 100^3": lambda: matrices.poisson(7, 100),
        "FEM 3x3 98k": lambda: matrices.fem_blocks(181),
        "R-MAT 17 x 8": lambda: matrices.rmat(17, 8),
        "Erdos-Renyi 500k x 8": lambda: matrices.erdos_renyi(500_000, 8),
        "power-law 120k": lambda: power_law(120_000),
    }
    tiny: dict[str, Callable[[], CSR]] = {
        "27-point 16^3": lambda: matrices.poisson(27, 16),
        "power-law 2k": lambda: power_law(2_000),
    }
    yield from (tiny if quick else generated).items()
    for name in REAL[:1] if quick else REAL:
        path = data / f"{name}.npz"
        if path.exists():
            yield name, lambda path=path: spgemm_cpu.load(path)


def product(name: str, a: CSR) -> Work:
    """Return the square of a matrix, beside SciPy, sp_matmul and GraphBLAS."""
    m = sp.csr_matrix(a.to_scipy())
    peers: dict[str, Threaded] = {"SciPy, sorted": lambda _: in_order(m @ m)}
    if TOPN:
        sp_matmul = importlib.import_module(TOPN).sp_matmul
        peers["sp_matmul"] = lambda n: sp_matmul(m, m, n_threads=n)
        peers["sp_matmul, sorted"] = lambda n: in_order(sp_matmul(m, m, n_threads=n))
    if HAS_GRAPHBLAS:
        peers["GraphBLAS"] = graphblas(a, "plus_times")
    # Numba's kernels are loaded: until a large product has done so, "auto" leaves small ones to SciPy.
    spdist.spgemm(m[:SOME], m, method="numba")

    def right(c: Any) -> bool:
        return bool(abs(sp.csr_matrix(c) - in_order(m @ m)).max() <= 1e-12 * abs(c.data).max())

    return Work(name, "product", lambda n: spdist.spgemm(m, m, threads=n), peers, same_matrix, right)


def unsorted_product(name: str, a: CSR) -> Work:
    """Return the square of a matrix with unsorted rows, beside spdist's sorted rows and sp_matmul."""
    m = sp.csr_matrix(a.to_scipy())
    peers: dict[str, Threaded] = {"spdist, sorted": lambda n: spdist.spgemm(m, m, threads=n)}
    if TOPN:
        sp_matmul = importlib.import_module(TOPN).sp_matmul
        peers["sp_matmul"] = lambda n: sp_matmul(m, m, n_threads=n)
    for sort in (False, True):  # as in `product`
        spdist.spgemm(m[:SOME], m, method="numba", sort=sort)

    def right(c: Any) -> bool:
        return same_matrix(in_order(c.copy()), spdist.spgemm(m, m))

    return Work(
        f"{name}, unsorted", "unsorted product", lambda n: spdist.spgemm(m, m, threads=n, sort=False), peers,
        same_matrix, right,
    )  # fmt: skip


def graphblas(a: CSR, ring: str, mask: CSR | None = None) -> Threaded:
    """Return GraphBLAS's product of a matrix with itself."""

    def run(threads: int) -> Any:
        import graphblas as gb

        gb.ss.config["nthreads"] = threads
        return held[0]()

    held = [fused.graphblas_product(a, ring, 1, mask)]
    return run


def top_n(nrows: int, terms: int, per_row: int) -> Work:
    """Return the ten largest cosines of each document."""
    a = fused.documents(nrows, terms, per_row)
    m, t = sp.csr_matrix(a.to_scipy()), sp.csr_matrix(a.to_scipy().T)
    peers: dict[str, Threaded] = {}
    if TOPN:
        sp_matmul_topn = importlib.import_module(TOPN).sp_matmul_topn
        peers["sp_matmul_topn"] = lambda n: sp_matmul_topn(m, t, top_n=10, threshold=0.2, n_threads=n)

    def right(c: Any) -> bool:
        some = slice(nrows // 2, nrows // 2 + 50)
        dense = (m[some] @ t).toarray()
        wanted = np.sort(np.where(dense >= 0.2, dense, 0))[:, -10:].sum(axis=1)
        return bool(np.allclose(np.asarray(c[some].sum(axis=1)).ravel(), wanted))

    def ours(n: int) -> Any:
        return spdist.spgemm(m, t, top_n=10, threshold=0.2, threads=n)

    return Work(f"top 10 of {nrows:,} documents", "top-n", ours, peers, same_matrix, right)


def others(quick: bool) -> Iterator[Work]:
    """Yield a masked product, a semiring, a reduction, and a product with a vector."""
    graph = matrices.rmat(*((9, 8) if quick else (16, 8))).to_scipy()
    lower = from_scipy(sp.csr_matrix(sp.tril(graph + graph.T, -1)))
    m = lower.to_scipy()
    peers = {"GraphBLAS": graphblas(lower, "plus_pair", lower)} if HAS_GRAPHBLAS else {}
    ones = sp.csr_matrix((np.ones(m.nnz, np.int64), m.indices, m.indptr), m.shape)
    yield Work(
        "masked plus_pair, R-MAT", "masked", lambda n: spdist.spgemm(m, m, semiring="plus_pair", mask=m, threads=n),
        peers, same_matrix, lambda c: int(c.sum()) == int((ones @ ones).multiply(ones).sum()),
    )  # fmt: skip
    road = matrices.rmat(*((8, 8) if quick else (15, 8)))
    w = road.to_scipy()
    peers = {"GraphBLAS": graphblas(road, "min_plus")} if HAS_GRAPHBLAS else {}
    row = int(np.argmax(np.diff(w.indptr)))

    def shortest(c: Any) -> bool:
        middle, dense = w.indices[w.indptr[row] : w.indptr[row + 1]], np.full(w.shape[1], np.inf)
        for k, value in zip(middle, w.data[w.indptr[row] : w.indptr[row + 1]], strict=True):
            part = slice(w.indptr[k], w.indptr[k + 1])
            np.minimum.at(dense, w.indices[part], value + w.data[part])
        found = slice(c.indptr[row], c.indptr[row + 1])
        return bool(np.array_equal(c.data[found], dense[np.isfinite(dense)]))

    yield Work("min_plus, R-MAT", "semiring", lambda n: spdist.spgemm(w, w, semiring="min_plus", threads=n), peers,
               same_matrix, shortest)  # fmt: skip
    g = matrices.rmat(*((9, 8) if quick else (16, 16)))
    norm, spec = reduction_of("frobenius"), ProductSpec()
    yield Work("Frobenius norm, R-MAT", "reduction", lambda n: reduce_product(norm, g, g, threads=n, spec=spec), {},
               lambda x, y: bool(np.isclose(x, y, rtol=1e-13)), lambda x: bool(x > 0))  # fmt: skip
    yield vector_product(16 if quick else 108)


def vector_product(side: int) -> Work:
    """Return a 27-point operator with a vector, beside SciPy."""
    m = matrices.poisson(27, side).to_scipy()
    x = np.random.default_rng(3).random(m.shape[1])
    made: dict[int, Any] = {}

    def ours(threads: int) -> Any:
        if threads not in made:
            made[threads] = spdist.operator(m, "sell", threads=threads)
        return made[threads] @ x

    ours(1)
    moved = made[1].nbytes + 8 * sum(m.shape)
    return Work(f"operator, 27-point {side}^3", "operator", ours, {"SciPy": lambda _: m @ x}, same_array,
                lambda y: bool(np.allclose(y, m @ x)), moved)  # fmt: skip


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _triad(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], c: npt.NDArray[np.float64]) -> None:
    for i in range(len(a)):
        a[i] = b[i] + 3.0 * c[i]


def triad(threads: int, doubles: int) -> float:
    """Return the bytes a second of STREAM's triad by so many threads: the best of some runs."""
    arrays = [np.zeros(doubles) for _ in range(3)]
    cuts = np.linspace(0, doubles, threads + 1).astype(int).tolist()
    parts = [[array[i:j] for array in arrays] for i, j in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:

        def once() -> float:
            begin = time.perf_counter()
            list(pool.map(lambda part: _triad(*part), parts))
            return time.perf_counter() - begin

        once()
        return 24.0 * doubles / min(once() for _ in range(REPEATS))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _loop(rounds: int) -> float:
    a, b, c, d, e, f, g, h = 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7
    for _ in range(rounds):
        a, b, c, d = a * 0.99 + 0.1, b * 0.99 + 0.1, c * 0.99 + 0.1, d * 0.99 + 0.1
        e, f, g, h = e * 0.99 + 0.1, f * 0.99 + 0.1, g * 0.99 + 0.1, h * 0.99 + 0.1
    return a + b + c + d + e + f + g + h


def loop_rate(threads: int, rounds: int) -> float:
    """Return the rounds a second of so many threads that run a loop in registers: the best of some runs."""
    _loop(1)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            begin = time.perf_counter()
            list(pool.map(_loop, [rounds] * threads))
            seconds.append(time.perf_counter() - begin)
    return threads * rounds / min(seconds)


def clock(call: Threaded, threads: int) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    call(threads)
    return time.perf_counter() - begin


def measure(work: Work, threads: list[int], end: float) -> Row:
    """Return the seconds of spdist and of the peers, by number of threads."""
    row: Row = {"work": work.name, "kind": work.kind, "seconds": {}, "peers": {}, "right": True, "same_bits": True}
    first: Any = None
    for n in threads:
        c = work.ours(n)  # kernels are compiled, and memory was touched, before anything is timed
        if first is None:
            first, row["right"] = c, work.right(c)
        row["same_bits"] = row["same_bits"] and work.same(first, c)
        del c
        running = {"spdist": work.ours}
        if time.monotonic() < end:
            others = work.peers if n in (threads[0], threads[-1]) else {}
            running |= {name: peer for name, peer in others.items() if not (name.startswith("SciPy") and n > 1)}
        times: dict[str, list[float]] = {name: [] for name in running}
        for number in range(REPEATS if time.monotonic() < end else 1):
            for name, call in running.items():
                if number and times[name][0] > LONG:
                    continue
                times[name].append(clock(call, n))
        row["seconds"][n] = statistics.median(times.pop("spdist"))
        for name, found in times.items():
            row["peers"].setdefault(name, {})[n] = statistics.median(found)
    row["speed_up"] = {n: row["seconds"][threads[0]] / seconds for n, seconds in row["seconds"].items()}
    row["ratio"] = {
        name: {n: found.get(n, found.get(threads[0])) / row["seconds"][n] for n in row["seconds"]
               if n in found or name.startswith("SciPy")}
        for name, found in row["peers"].items()
    }  # fmt: skip
    if work.moved:
        row["bytes_s"] = {n: work.moved / seconds for n, seconds in row["seconds"].items()}
    return row


def show(row: Row) -> None:
    """Print a line: times, speed-up with all threads, and ratios with all."""
    most = max(row["seconds"])
    times = " ".join(f"{1e3 * seconds:9.1f}" for seconds in row["seconds"].values())
    ratios = ", ".join(f"{name} {found[most]:.2f}" for name, found in row["ratio"].items() if most in found)
    rate = f", {row['bytes_s'][most] / 1e9:.1f} GB/s" if "bytes_s" in row else ""
    verdict = "" if row["right"] and row["same_bits"] else "  WRONG" if not row["right"] else "  OTHER BITS"
    print(f"{row['work']:28} {times}  {row['speed_up'][most]:6.2f}  {ratios}{rate}{verdict}", flush=True)


def summarised(rows: list[Row], most: int) -> Row:
    """Return geometric means and least ratios with all threads, by kind of work and peer; and the least speed-ups."""
    found: Row = {"speed_up": {row["work"]: row["speed_up"][most] for row in rows}}
    pairs = dict.fromkeys((row["kind"], name) for row in rows for name in row["ratio"])
    for kind, name in pairs:
        ratios = [r["ratio"][name][most] for r in rows if r["kind"] == kind and most in r["ratio"].get(name, {})]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            found[f"{kind}, {name}"] = {"geometric_mean": mean, "least": min(ratios), "cases": len(ratios)}
    return found


def works(quick: bool, data: Path, only: list[str] | None) -> Iterator[Work]:
    """Yield what is to be timed, made when it is its turn."""

    def wanted(name: str) -> bool:
        return only is None or any(word in name for word in only)

    if wanted("top"):
        yield top_n(*((500, 300, 8) if quick else (60_000, 30_000, 20)))
    if only is None or any(wanted(word) for word in ("masked", "min_plus", "norm", "operator")):
        yield from (work for work in others(quick) if wanted(work.name))
    for name, make in squares(quick, data):
        if wanted(name):
            a = make()
            yield product(name, a)
            yield unsorted_product(name, a)


def main() -> int:
    """Measure, print, record."""
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    cores = record.host()["cores"]
    parser.add_argument("--threads", help="numbers, by commas; 1, 2, 4, ... and all by default")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of .npz matrices")
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds after which peers are left out")
    args = parser.parse_args()
    powers = {1 << k for k in range(10) if 1 << k <= cores} | {cores}
    threads = sorted({int(n) for n in args.threads.split(",")} if args.threads else powers)
    end = time.monotonic() + args.budget
    missing = [name for name, found in (("sp_matmul_rs", TOPN), ("python-graphblas", HAS_GRAPHBLAS)) if not found]
    if missing:
        print(f"not installed, and not compared with: {', '.join(missing)}")
    heads = " ".join(f"{n:>9}" for n in threads)
    print(f"{'ms, by threads':28} {heads}  speedup  ratio with {threads[-1]} threads")
    rows: list[Row] = []
    result: Row = {"benchmark": "cores", "threads": threads, "sp_matmul_of": TOPN}
    for work in works(args.quick, args.data, args.only):
        rows.append(measure(work, threads, end))
        show(rows[-1])
        # What is measured is kept, should the run be ended before its time.
        record.write(result | {"rows": rows}, args.out, quiet=True)
    rates = {n: triad(n, 1 << 16 if args.quick else TRIAD_DOUBLES) for n in threads}
    print("STREAM triad, GB/s: " + ", ".join(f"{n} threads {rate / 1e9:.1f}" for n, rate in rates.items()))
    loops = {n: loop_rate(n, 1 << 20 if args.quick else LOOP_ROUNDS) for n in threads}
    speed_ups = {n: rate / loops[threads[0]] * threads[0] for n, rate in loops.items()}
    print("a loop in registers, speed-up: " + ", ".join(f"{n} threads {gain:.2f}" for n, gain in speed_ups.items()))
    result |= {"rows": rows, "triad_bytes_s": rates, "loop_speed_up": speed_ups}
    result |= {"summary": summarised(rows, threads[-1])}
    for name, found in result["summary"].items():
        if "cases" in found:
            print(f"{name}: geometric mean {found['geometric_mean']:.2f}, least {found['least']:.2f}, {found['cases']}")
    record.write(result, args.out)
    return 0 if all(row["right"] and row["same_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
