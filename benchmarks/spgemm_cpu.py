"""Time `spdist.spgemm(a, a)` beside SciPy's product, sorted, one thread; check every result bit for bit.

::

    python benchmarks/spgemm_cpu.py [--data DIR] [--stored] [--quick] [--threads N] [--only NAME ...] [--out FILE.json]

Public calls on SciPy's matrices, as users write them: checks and conversions count. Without --threads spdist chooses.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matrices  # noqa: E402
import numpy as np  # noqa: E402
import record  # noqa: E402
import scipy.sparse as sp  # noqa: E402

import spdist  # noqa: E402
from spdist.kernels.cpu.prepare import choose  # noqa: E402
from spdist.kernels.cpu.product_counts import row_products  # noqa: E402
from spdist.matrices.csr import CSR, from_scipy  # noqa: E402

Make = Callable[[], CSR]


def generated(quick: bool) -> dict[str, Make]:
    if quick:
        return {
            "7-point 20^3": lambda: matrices.poisson(7, 20),
            "27-point 12^3": lambda: matrices.poisson(27, 12),
            "rmat 9 x 8": lambda: matrices.rmat(9, 8),
            "erdos-renyi 5k x 8": lambda: matrices.erdos_renyi(5_000, 8),
            "fem 3x3 2.7k": lambda: matrices.fem_blocks(30),
        }
    return {
        "7-point 100^3": lambda: matrices.poisson(7, 100),
        "27-point 58^3": lambda: matrices.poisson(27, 58),
        "rmat 16 x 16": lambda: matrices.rmat(16, 16),
        "erdos-renyi 500k x 8": lambda: matrices.erdos_renyi(500_000, 8),
        "fem 3x3 98k": lambda: matrices.fem_blocks(181),
    }


def stored(folder: Path) -> dict[str, Make]:
    """Square matrices of a folder of scipy.sparse.save_npz files."""
    return {path.stem: lambda path=path: load(path) for path in sorted(folder.glob("*.npz")) if is_square(path)}


def is_square(path: Path) -> bool:
    shape = np.load(path)["shape"]
    return bool(shape[0] == shape[1])


def load(path: Path) -> CSR:
    m = sp.load_npz(path)
    return from_scipy(m if m.dtype.kind in "fc" else m.astype(np.float64))


def scipy_product(m: Any) -> Any:
    c = m @ m
    c.sort_indices()
    return c


def verify(a: CSR, c: CSR) -> None:
    """Compare with SciPy: the pattern with a product of ones, the values bit for bit where SciPy keeps them."""
    m = a.to_scipy()
    ones = sp.csr_matrix((np.ones(a.nnz, np.bool_), m.indices, m.indptr), shape=m.shape)
    pattern = scipy_product(ones)
    same = np.array_equal(c.indptr, pattern.indptr) and np.array_equal(c.indices, pattern.indices)
    expected = scipy_product(m).data
    kept = c.data if len(expected) == c.nnz else c.data[c.data != 0]
    if not (same and np.array_equal(kept, expected, equal_nan=True)):
        raise SystemExit("the product is wrong")


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(name: str, a: CSR, threads: int | None, repeats: int) -> dict[str, Any]:
    m, words = a.to_scipy(), {} if threads is None else {"threads": threads}
    c = spdist.spgemm(m, m, **words)
    verify(a, from_scipy(c))
    nnz, engine = c.nnz, choose(a, a, threads=threads or record.host()["cores"])[0]
    del c
    base, ours = [], []
    first = timed(lambda: scipy_product(m))
    for _ in range(max(repeats, min(200, int(0.2 / first)))):
        base.append(timed(lambda: scipy_product(m)))
        ours.append(timed(lambda: spdist.spgemm(m, m, **words)))
    scipy_s, spdist_s = statistics.median(base), statistics.median(ours)
    products = int(row_products(a, np.diff(a.indptr)).sum())
    return {
        "matrix": name,
        "nrows": a.nrows,
        "nnz": a.nnz,
        "products": products,
        "nnz_c": nnz,
        "engine": engine,
        "scipy_seconds": scipy_s,
        "spdist_seconds": spdist_s,
        "scipy_min": min(base),
        "spdist_min": min(ours),
        "repeats": len(base),
        "ratio": scipy_s / spdist_s,
        "ratio_min": min(base) / min(ours),
    }


def show(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ["scipy ms", "spdist ms", "ratio", "of minima"]
    print(f"{'matrix':22} {'products':>12} {'nnz(C)':>12} {'engine':>6} " + " ".join(f"{n:>9}" for n in names))
    out = []
    for r in rows:
        numbers = 1e3 * r["scipy_seconds"], 1e3 * r["spdist_seconds"], r["ratio"], r["ratio_min"]
        print(f"{r['matrix']:22} {r['products']:12,} {r['nnz_c']:12,} {r['engine']:>6} ", end="")
        print(" ".join(f"{n:9.3f}" for n in numbers), flush=True)
        out.append(r)
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = record.parser("C = A @ A: spdist beside SciPy's sorted product.")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of .npz matrices")
    parser.add_argument("--stored", action="store_true", help="only matrices of the folder")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", help="names of matrices")
    options = parser.parse_args(arguments)
    makers = {} if options.stored else generated(options.quick)
    if options.data.is_dir():
        makers |= stored(options.data)
    else:
        print("no folder of real matrices: only generated ones are timed (give one with --data)")
    chosen = {name: make for name, make in makers.items() if not options.only or name in options.only}
    repeats = 3 if options.quick else 7
    rows = show(measure(name, make(), options.threads, repeats) for name, make in chosen.items())
    ratios = [r["ratio"] for r in rows]
    mean, least = statistics.geometric_mean(ratios), min(ratios)
    minima = [r["ratio_min"] for r in rows]
    threads = options.threads or record.host()["cores"]
    print(f"{len(ratios)} matrices, {threads} threads over 1 of SciPy")
    print(f"medians: geometric mean {mean:.2f}, minimum {least:.2f}")
    print(f"minima:  geometric mean {statistics.geometric_mean(minima):.2f}, minimum {min(minima):.2f}")
    record.write({"threads": threads, "geometric_mean": mean, "minimum": least, "results": rows}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
