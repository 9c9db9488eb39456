"""Products of block matrices: each entry of a pattern is a dense block. C = A @ A in float64.

On the CPU beside SciPy's product of `bsr_array`, on the GPU beside the same product entry by entry, by cuSPARSE and by
spdist's own. Patterns are cut to their leading block rows where C would be too large.

::

    python benchmarks/block_spgemm.py [--gpu] [--data DIR] [--sides N ...] [--only NAME ...] [--quick] [--out FILE]
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import record  # noqa: E402
import scipy.sparse as sp  # noqa: E402
import suite  # noqa: E402

import spdist  # noqa: E402
from spdist.bsr import BSR, entries  # noqa: E402
from spdist.csr import CSR, from_scipy  # noqa: E402
from spdist.kernels import bsr_cpu, cpu, gpu  # noqa: E402

STORED = ("email-Enron", "ca-CondMat", "pwt")
SIDES = (2, 3, 4, 6, 8, 16)
CPU_BYTES, GPU_BYTES = 400 << 20, 16 << 30
"""Values of C at most."""
ENTRIES_BYTES = 1 << 30
"""Values of C up to which the GPU also makes the product entry by entry: cuSPARSE takes many times as much."""
PATIENCE = 0.2
"""Seconds of a call from which it is timed once."""
THREADS = 2
TOLERANCE = 1e-12
AT_ONCE = 1 << 20

Product = Callable[[], Any]


def patterns(args: Any) -> dict[str, Callable[[], CSR]]:
    """Return what makes each pattern."""
    points = 8 if args.quick else 64 if args.gpu else 40
    found: dict[str, Callable[[], CSR]] = {"27-point": lambda: suite.stencil((points,) * 3, suite.box(3), 1)}
    if not args.quick:
        found["roadnet"] = suite.SUITE["roadnet"]
    for name in STORED:
        path = args.data / f"{name}.npz"
        if path.exists():
            found[name] = lambda path=path: from_scipy(sp.load_npz(path).astype(np.float64))
        else:
            print(f"{path.name} is not in {args.data}: left out")
    return {name: make for name, make in found.items() if not args.only or name in args.only}


def leading(pattern: CSR, side: int, most_bytes: int) -> tuple[CSR, int, int]:
    """Return the leading part whose C takes at most so many bytes, its products of blocks and C's blocks."""
    size = pattern.nrows
    while True:
        part = from_scipy(pattern.to_scipy()[:size, :size]) if size < pattern.nrows else pattern
        ones = CSR(part.indptr, part.indices, np.ones(part.nnz, np.bool_), part.shape)
        blocks = cpu.multiply(ones, ones, engine="numba", threads=THREADS).nnz
        if blocks * side * side * 8 <= most_bytes:
            return part, int(cpu.row_products(part, np.diff(part.indptr)).sum()), blocks
        size = int(0.97 * size * (most_bytes / (blocks * side * side * 8)) ** 0.5)


def filled(pattern: CSR, side: int, xp: Any = np) -> BSR:
    """Return a matrix with a block of random values in [0.5, 1.5) for each entry of a pattern, as arrays of `xp`."""
    data = xp.random.default_rng(side).random((pattern.nnz, side, side)) + 0.5
    indptr = pattern.indptr if xp is np else xp.asarray(pattern.indptr.astype(np.int32))
    return BSR(indptr, xp.asarray(pattern.indices), data, (pattern.nrows * side, pattern.ncols * side))


def median(product: Product, settle: Product = lambda: None) -> tuple[float, int]:
    """Return the median milliseconds of a call, and the calls: three at least, unless it takes long."""
    times: list[float] = []
    product()
    gc.collect()
    while not times or (times[0] < PATIENCE and (len(times) < 3 or (sum(times) < 0.5 and len(times) < 30))):
        settle()
        begin = time.perf_counter()
        c = product()
        settle()
        times.append(time.perf_counter() - begin)
        del c
    return 1e3 * statistics.median(times), len(times)


def on_cpu(a: BSR) -> dict[str, Any]:
    """Time the CPU's product beside SciPy's, which leaves rows unsorted, and check its bits."""
    matrix = a.to_scipy()
    expected = matrix @ matrix
    expected.sort_indices()
    c = bsr_cpu.multiply(a, a, threads=THREADS)
    right = np.array_equal(c.indices, expected.indices) and np.array_equal(c.data, expected.data)
    del c, expected
    theirs, runs = median(lambda: matrix @ matrix)
    ours, _ = median(lambda: bsr_cpu.multiply(a, a, threads=THREADS))
    return {"right": right, "scipy_ms": theirs, "ms": ours, "runs": runs, "ratio": theirs / ours}


def on_gpu(a: BSR, by_entries: bool) -> dict[str, Any]:
    """Time the GPU's product, beside those of the entries where these are asked for; weigh it, check it by a vector."""
    import cupy

    device, pool = cupy.cuda.Device(), cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    c = spdist.spgemm(a, a)
    workspace = pool.total_bytes() - before - c.nbytes
    found = {"workspace": workspace, "workspace_of_c": workspace / c.nbytes, "right": is_right(c, a)}
    del c
    ours, runs = median(lambda: spdist.spgemm(a, a), device.synchronize)
    found |= {"ms": ours, "runs": runs}
    if not by_entries:
        return found
    scalar = entries(a)
    scalar = CSR(scalar.indptr.astype(np.int32), scalar.indices, scalar.data, scalar.shape)
    times = {"auto": median(lambda: gpu.multiply(scalar, scalar), device.synchronize)[0]}
    for name, product in of_cusparse(scalar).items():
        pool.free_all_blocks()
        try:
            times[name] = median(product, device.synchronize)[0]
            break  # the others are slower, and take less memory
        except Exception as error:  # cuSPARSE's own, or too little memory
            print(f"  {name}: {type(error).__name__}")
    best = min(times, key=times.__getitem__)
    return found | {"entries_ms": times, "entries_best": best, "ratio": times[best] / ours}


def of_cusparse(a: CSR) -> dict[str, Product]:
    """Return cuSPARSE's products, its quickest algorithm first."""
    from cusparse import ALGORITHMS, Cusparse

    library = Cusparse()
    return {f"cusparse_{name}": library.bind(name, a, a) for name in ALGORITHMS if name != "reuse"}


def is_right(c: BSR, a: BSR) -> bool:
    """Whether ``C x`` is ``A (A x)``, for values above zero, and no block row falls."""
    import cupy

    x = cupy.random.default_rng(1).random(a.shape[1])
    y, expected = times_vector(c, x), times_vector(a, times_vector(a, x))
    falls = int((c.indices[1:] <= c.indices[:-1]).sum())
    starts = c.indptr[1:-1]
    starts = cupy.unique(starts[(starts > 0) & (starts < c.blocks)])
    return falls == int((c.indices[starts] <= c.indices[starts - 1]).sum()) and bool(
        (abs(y - expected) <= TOLERANCE * expected).all()
    )


def times_vector(m: BSR, x: Any) -> Any:
    """Return ``m @ x`` on the GPU, a part of the blocks at a time."""
    import cupy

    r, s = m.blocksize
    y, parts = cupy.zeros((m.shape[0] // r, r)), x.reshape(-1, s)
    for first in range(0, m.blocks, AT_ONCE):
        numbers = cupy.arange(first, min(first + AT_ONCE, m.blocks))
        rows = cupy.searchsorted(m.indptr, numbers, side="right") - 1
        sums = (m.data[first : first + AT_ONCE] * parts[m.indices[first : first + AT_ONCE]][:, None, :]).sum(axis=2)
        for i in range(r):
            y[:, i] += cupy.bincount(rows, weights=sums[:, i], minlength=len(y))
    return y.ravel()


def measure(name: str, pattern: CSR, side: int, args: Any) -> list[dict[str, Any]]:
    """Time one pattern with one size of blocks; on the GPU also larger than what is compared."""
    rows: list[dict[str, Any]] = []
    for limit in (ENTRIES_BYTES, GPU_BYTES) if args.gpu else (CPU_BYTES,):
        part, products, blocks = leading(pattern, side, limit)
        if rows and part.nrows == rows[0]["block_rows"]:
            break
        if args.gpu:
            import cupy

            found = on_gpu(filled(part, side, cupy), not rows)
        else:
            found = on_cpu(filled(part, side))
        gflops = round(2 * products * side**3 / (1e6 * found["ms"]), 2)
        facts = {"matrix": name, "side": side, "block_rows": part.nrows, "blocks": part.nnz, "products": products}
        rows.append({**facts, "blocks_c": blocks, "c_bytes": blocks * side * side * 8, "gflops": gflops, **found})
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    ratio = f"{row['ratio']:6.2f}" if "ratio" in row else "     -"
    size = f"{row['block_rows']:9,} {row['products']:12,} {row['c_bytes'] / 1e9:7.2f} GB"
    print(f"{row['matrix']:12} {row['side']:3} {size} {row['ms']:9.3f} ms {row['gflops']:9.1f} GFLOP/s {ratio}", end="")
    print("" if row["right"] else " WRONG", flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means of the ratios, for each size of blocks and for all."""
    by_side = {side: [r["ratio"] for r in rows if r["side"] == side and "ratio" in r] for side in SIDES}
    means = {str(side): round(statistics.geometric_mean(ratios), 3) for side, ratios in by_side.items() if ratios}
    ratios = [ratio for of_side in by_side.values() for ratio in of_side]
    if not ratios:
        return {"right": all(r["right"] for r in rows)}
    return {"geometric_mean": round(statistics.geometric_mean(ratios), 3), "least": round(min(ratios), 3),
            "by_side": means, "right": all(r["right"] for r in rows)}  # fmt: skip


def main() -> int:
    parser = record.parser("C = A @ A of dense blocks.")
    parser.add_argument("--gpu", action="store_true", help="on the GPU")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of .npz patterns")
    parser.add_argument("--sides", type=int, nargs="*", default=SIDES, help="rows and columns of a block")
    parser.add_argument("--only", nargs="*", help="names of patterns")
    args = parser.parse_args()
    sides = (2, 3) if args.quick else args.sides
    rows = []
    for name, make in patterns(args).items():
        pattern = make()
        rows += [row for side in sides for row in measure(name, pattern, side, args)]
    result = {"benchmark": "block_spgemm", "threads": THREADS, "summary": summary(rows), "rows": rows}
    print(result["summary"])
    record.write(result | ({"gpu": record.gpu()} if args.gpu else {}), args.out)
    return 0 if all(r["right"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
