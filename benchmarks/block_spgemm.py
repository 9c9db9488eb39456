"""Products of block matrices: each entry of a pattern is a dense block. C = A @ A in float64.

On the CPU beside SciPy's product of `bsr_array`, on the GPU beside the same product entry by entry, by cuSPARSE and by
spdist's own. For these, and on the CPU, patterns are cut to their leading block rows and columns where C would be too
large; on the GPU C is then made once more, whole, by ranges of block rows.

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
from spdist.kernels.cpu import multiply as cpu  # noqa: E402
from spdist.kernels.cpu.product_counts import row_products  # noqa: E402
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu  # noqa: E402
from spdist.matrices.bsr import BSR, entries  # noqa: E402
from spdist.matrices.csr import CSR, from_scipy  # noqa: E402
from spdist.matrices.dtypes import Int64Array  # noqa: E402

STORED = ("email-Enron", "ca-CondMat", "pwt")
SIDES = (2, 3, 4, 6, 8, 16)
CPU_BYTES, RANGE_BYTES = 400 << 20, 16 << 30
"""Values of C at most: on the CPU, and of a range of block rows on the GPU."""
ENTRIES_BYTES = 1 << 30
"""Values of C up to which the GPU also makes the product entry by entry: cuSPARSE takes many times as much."""
LEAST, SECONDS, RUNS = 3, 0.1, 10
"""Calls at least; seconds of all from which there are no more, and their number, at most."""
THREADS = 2
TOLERANCE = 1e-12
TF32_SIDE = 8
"""Blocks from which on they fill tensor cores in single precision."""
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


def leading(pattern: CSR, blocks: int, side: int, most_bytes: int, on_gpu: bool) -> tuple[CSR, int]:
    """Return the leading part whose C takes at most so many bytes, and its C's blocks; all of C has `blocks`."""
    part, size = pattern, pattern.nrows
    while blocks * side * side * 8 > most_bytes:
        size = int(0.97 * size * (most_bytes / (blocks * side * side * 8)) ** 0.5)
        part = from_scipy(pattern.to_scipy()[:size, :size])
        blocks = int(offsets_of_c(part, on_gpu)[-1])
    return part, blocks


def offsets_of_c(pattern: CSR, on_gpu: bool) -> Int64Array:
    """Return where the block rows of C begin."""
    ones = CSR(pattern.indptr, pattern.indices, np.ones(pattern.nnz, np.float32), pattern.shape)
    if not on_gpu:
        return cpu.multiply(ones, ones, engine="numba", threads=THREADS).indptr
    import cupy

    ones = CSR(*map(cupy.asarray, (ones.indptr.astype(np.int32), ones.indices, ones.data)), ones.shape)
    return rowwise_gpu.multiply(ones, ones).indptr.get().astype(np.int64)


def filled(pattern: CSR, side: int, xp: Any = np) -> BSR:
    """Return a matrix with a block of random values in [0.5, 1.5) for each entry of a pattern, as arrays of `xp`."""
    data = xp.random.default_rng(side).random((pattern.nnz, side, side)) + 0.5
    indptr = pattern.indptr if xp is np else xp.asarray(pattern.indptr.astype(np.int32))
    return BSR(indptr, xp.asarray(pattern.indices), data, (pattern.nrows * side, pattern.ncols * side))


def median(product: Product, settle: Product = lambda: None) -> tuple[float, int]:
    """Return the median milliseconds of a call, and the calls."""
    times: list[float] = []
    product()
    gc.collect()
    while len(times) < LEAST or (sum(times) < SECONDS and len(times) < RUNS):
        settle()
        begin = time.perf_counter()
        c = product()
        settle()
        times.append(time.perf_counter() - begin)
        del c
    return 1e3 * statistics.median(times), len(times)


def on_cpu(a: BSR) -> dict[str, Any]:
    """Time the public call on SciPy's matrix beside SciPy's product, which leaves rows unsorted, and check its bits."""
    matrix = a.to_scipy()

    def product() -> Any:
        return spdist.spgemm(matrix, matrix, threads=THREADS)

    expected = matrix @ matrix
    expected.sort_indices()
    c = product()
    right = np.array_equal(c.indices, expected.indices) and np.array_equal(c.data, expected.data)
    del c, expected
    theirs, runs = median(lambda: matrix @ matrix)
    ours, _ = median(product)
    return {"right": right, "scipy_ms": theirs, "ms": ours, "runs": runs, "ratio": theirs / ours}


def workspace(a: BSR) -> dict[str, Any]:
    """Return the bytes that the GPU's product takes beyond A and C."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    with cupy.cuda.using_allocator(pool.malloc):
        c = spdist.spgemm(a, a)
    beyond = pool.total_bytes() - c.nbytes
    return {"workspace": beyond, "workspace_of_c": beyond / c.nbytes}


def by_blocks(a: BSR, b: BSR) -> dict[str, Any]:
    """Time the GPU's product, and check it by a vector."""
    import cupy

    gc.collect()
    right = is_right(spdist.spgemm(a, b), a, b)
    ours, runs = median(lambda: spdist.spgemm(a, b), cupy.cuda.Device().synchronize)
    return {"right": right, "ms": ours, "runs": runs}


def by_entries(a: BSR, ours: float) -> dict[str, Any]:
    """Time the same product entry by entry, beside the milliseconds it takes by blocks."""
    import cupy

    device, pool = cupy.cuda.Device(), cupy.get_default_memory_pool()
    scalar = entries(a)
    scalar = CSR(scalar.indptr.astype(np.int32), scalar.indices, scalar.data, scalar.shape)
    times = {"auto": median(lambda: rowwise_gpu.multiply(scalar, scalar), device.synchronize)[0]}
    for name, product in of_cusparse(scalar).items():
        pool.free_all_blocks()
        try:
            times[name] = median(product, device.synchronize)[0]
            break
        except Exception as error:  # cuSPARSE's own, or too little memory
            print(f"  {name}: {type(error).__name__}")
    best = min(times, key=times.__getitem__)
    return {"entries_ms": times, "entries_best": best, "ratio": times[best] / ours}


def in_single_precision(a: BSR) -> dict[str, Any]:
    """Time the product of float32, in full and rounded for tensor cores; and how far off the latter is."""
    import cupy

    single = BSR(a.indptr, a.indices, a.data.astype(np.float32), a.shape)
    x = cupy.random.default_rng(1).random(a.shape[1])
    expected = times_vector(single, times_vector(single, x))
    y = times_vector(spdist.spgemm(single, single, "tf32"), x)
    full, tf32 = (
        median(lambda method=method: spdist.spgemm(single, single, method), cupy.cuda.Device().synchronize)[0]
        for method in ("auto", "tf32")
    )
    off = abs(y - expected) / cupy.where(expected > 0, expected, 1)  # rows may be empty
    return {"float32_ms": full, "tf32_ms": tf32, "tf32_off": float(off.max())}


def in_ranges(pattern: CSR, side: int, offsets: Int64Array) -> dict[str, Any]:
    """Time the whole of C, by ranges of block rows, each of at most `RANGE_BYTES`."""
    import cupy

    b = filled(pattern, side, cupy)
    room, start, parts = RANGE_BYTES // (8 * side * side), 0, []
    while start < pattern.nrows:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + room, side="right")) - 1)
        first, last = int(pattern.indptr[start]), int(pattern.indptr[stop])
        indptr = b.indptr[start : stop + 1] - b.indptr[start]
        rows = BSR(indptr, b.indices[first:last], b.data[first:last], ((stop - start) * side, b.shape[1]))
        parts.append(by_blocks(rows, b))
        start = stop
    right, ms = all(part["right"] for part in parts), sum(part["ms"] for part in parts)
    return {"ranges": len(parts), "right": right, "ms": ms, "runs": max(part["runs"] for part in parts)}


def of_cusparse(a: CSR) -> dict[str, Product]:
    """Return cuSPARSE's products: by its quickest algorithm, and by the one that takes least memory."""
    from cusparse import Cusparse

    library = Cusparse()
    return {f"cusparse_{name}": library.bind(name, a, a) for name in ("alg1", "alg3")}


def is_right(c: BSR, a: BSR, b: BSR) -> bool:
    """Whether ``C x`` is ``A (B x)``, for values above zero, and no block row falls."""
    import cupy

    x = cupy.random.default_rng(1).random(b.shape[1])
    y, expected = times_vector(c, x), times_vector(a, times_vector(b, x))
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


def measure(name: str, pattern: CSR, offsets: Int64Array, side: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Time a pattern, whose C has rows at `offsets`, with one size of blocks; on the GPU also larger than compared."""
    part, blocks = leading(pattern, int(offsets[-1]), side, ENTRIES_BYTES if on_gpu else CPU_BYTES, on_gpu)
    if not on_gpu:
        return [facts(name, part, side, blocks, on_cpu(filled(part, side)))]
    import cupy

    a = filled(part, side, cupy)
    found = by_blocks(a, a)
    single = in_single_precision(a) if side >= TF32_SIDE else {}
    rows = [facts(name, part, side, blocks, workspace(a) | found | by_entries(a, found["ms"]) | single)]
    del a
    if part is not pattern:
        rows.append(facts(name, pattern, side, int(offsets[-1]), in_ranges(pattern, side, offsets)))
    return rows


def facts(name: str, pattern: CSR, side: int, blocks: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the record, and show it."""
    products = int(row_products(pattern, np.diff(pattern.indptr)).sum())
    row = {"matrix": name, "side": side, "block_rows": pattern.nrows, "blocks": pattern.nnz, "products": products,
           "blocks_c": blocks, "c_bytes": blocks * side * side * 8,
           "gflops": round(2 * products * side**3 / (1e6 * found["ms"]), 2), **found}  # fmt: skip
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    ratio = f"{row['ratio']:6.2f}" if "ratio" in row else "     -"
    size = f"{row['block_rows']:9,} {row['products']:12,} {row['c_bytes'] / 1e9:7.2f} GB"
    print(f"{row['matrix']:12} {row['side']:3} {size} {row['ms']:9.3f} ms {row['gflops']:9.1f} GFLOP/s {ratio}", end="")
    if "tf32_ms" in row:
        print(f", float32 {row['float32_ms']:.3f} ms, tf32 {row['tf32_ms']:.3f} off {row['tf32_off']:.1e}", end="")
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
        offsets = offsets_of_c(pattern, args.gpu)
        rows += [row for side in sides for row in measure(name, pattern, offsets, side, args.gpu)]
    result = {"benchmark": "block_spgemm", "threads": THREADS, "summary": summary(rows), "rows": rows}
    print(result["summary"])
    record.write(result | ({"gpu": record.gpu()} if args.gpu else {}), args.out)
    return 0 if all(r["right"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
