"""Time products several times as large as the GPU's memory limit, beside the loop over row blocks that users write.

::

    python benchmarks/pipeline.py --folder /dev/shm/suite --out record.json
    python benchmarks/pipeline.py --folder /dev/shm/suite --store /dev/shm/store     # Zarr to Zarr there, under Dask
    python benchmarks/pipeline.py --folder /dev/shm/suite --thesis                   # hySpMM's matrices, beside CuPy
    python benchmarks/pipeline.py --blocks                                           # a matrix of dense blocks

Host memory to host memory: operands in ordinary memory, product after product (the second has them page-locked where
they lie) and, apart, each product of copies that none read before; and in page-locked memory from the start. C comes to
page-locked memory that is used again from product to product, as a run over many blocks does; a B that stays on the GPU
is sent with the first. The limit of a run is the time of the bytes to the GPU and of those back, both ways at once, at
the rates measured here for page-locked memory; A, B and C count once at the size of an entry. Every product is checked:
canonical form, and C x against A (B x).

The matrices of the thesis fit the GPU: A (which is B) is sent and C comes back each time, with no memory limit. Beside
them CuPy by the book, and with A in page-locked memory and C brought back to such; spdist likewise, both ways.

Zarr to Zarr: from the first block's read to the last write, the start of the workers not counted, beside what A takes
to be read, and as many bytes as C has to be written, by threads with nothing else going on.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import record
import suite

from spdist import spgemm
from spdist.matrices.bsr import BSR, from_rows
from spdist.matrices.checks import is_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import blocksize

SHARE_OF_C = 3.0
"""C over the memory limit."""
THESIS = "hood", "atmosmodl", "offshore", "bmwcra_1", "mono_500Hz", "cage12", "cca", "poisson3Da", "orsirr_1"
RUNS = 9
"""Of those the median."""
JOB_SECONDS = 2.0
"""Products are repeated until their limits sum to so much."""
FEW, ONCE = 5, 3
"""Repeats of what is measured beside, and of products of new operands."""
GRID, SIDE = 64, 4
"""Points in each direction of a 27-point grid, and rows and columns of its blocks."""
CHECKS = 256
"""Parts in which C is checked, by all cores."""
STAGES = "preprocess", "multiply", "merge", "commit", "join"
"""Of a block, from its read to its last write."""
LOOP_BLOCKS = (8, 32)
"""Row blocks of the loop; the better is taken."""


def rates() -> dict[str, float]:
    """Return bytes a second between page-locked memory and the GPU: each way alone, and each while both are busy."""
    import cupy

    from spdist.kernels.cuda.pinned import pinned

    runtime, size = cupy.cuda.runtime, 1 << 30
    hosts, devices = [pinned(size) for _ in range(2)], [cupy.empty(size, np.uint8) for _ in range(2)]
    up = (devices[0].data.ptr, hosts[0].ctypes.data, size, runtime.memcpyHostToDevice)
    down = (hosts[1].ctypes.data, devices[1].data.ptr, size, runtime.memcpyDeviceToHost)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def seconds(*copies: Any) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for copy, stream in zip(copies, streams, strict=False):
                runtime.memcpyAsync(*copy, stream.ptr)
            for stream in streams:
                stream.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)  # a bound is what the machine can do

    return {"to_gpu": size / seconds(up), "to_host": size / seconds(down), "both": size / seconds(up, down)}


def copy_seconds(sent: int, back: int, rate: dict[str, float]) -> float:
    """Return the least time that bytes take to the GPU and back: both ways at once, then the rest of the longer."""
    together = min(sent, back)
    return together / rate["both"] + (sent - together) / rate["to_gpu"] + (back - together) / rate["to_host"]


def loop(a: CSR, b: CSR, blocks: int) -> float:
    """Return the seconds of the loop one writes today: upload rows of A, ``A_i @ B`` by CuPy, ``.get()``."""
    import cupy
    import cupyx.scipy.sparse as csp

    left, right = a.to_scipy(), b.to_scipy()
    cuts = np.linspace(0, a.nrows, blocks + 1).astype(int)
    begin = time.perf_counter()
    on_gpu = csp.csr_matrix(right)
    parts = [(csp.csr_matrix(left[i:j]) @ on_gpu).get() for i, j in itertools.pairwise(cuts)]
    seconds = time.perf_counter() - begin
    del on_gpu, parts
    cupy.get_default_memory_pool().free_all_blocks()
    return seconds


def right(c: CSR, a: CSR, b: CSR) -> bool:
    """Whether C is canonical, and C x is A (B x)."""

    def scipy_of(m: CSR) -> Any:
        return m.to_scipy() if blocksize(m.dtype) is None else from_rows(m).to_scipy()

    second = scipy_of(b)
    x = np.random.default_rng(1).uniform(-1, 1, second.shape[1])
    bx, scales = second @ x, abs(second) @ abs(x)

    def rows_right(start: int, stop: int) -> bool:
        mine, left, product = c.rows(start, stop), scipy_of(a.rows(start, stop)), scipy_of(c.rows(start, stop))
        off, scale = abs(product @ x - left @ bx), abs(left) @ scales
        return is_canonical(mine) and bool(np.all(off <= 1e-12 * scale))

    cuts = np.linspace(0, a.nrows, CHECKS + 1).astype(int).tolist()
    with ThreadPoolExecutor() as threads:
        return all(threads.map(rows_right, cuts[:-1], cuts[1:]))


def locked(m: CSR) -> CSR:
    """Return a copy whose columns and values are in page-locked memory."""
    from spdist.kernels.cuda.pinned import array_at, pinned

    copies = [array_at(pinned(x.nbytes), 0, len(x), x.dtype) for x in (m.indices, m.data)]
    for copy, x in zip(copies, (m.indices, m.data), strict=True):
        copy[:] = x
    return CSR(m.indptr, *copies, m.shape)


def fresh(a: CSR, b: CSR) -> tuple[CSR, CSR]:
    """Return copies of operands, which no product has read."""
    copies = [CSR(m.indptr, m.indices.copy(), m.data.copy(), m.shape) for m in ([a] if b is a else [a, b])]
    return copies[0], copies[-1]


def once_seconds(a: CSR, b: CSR, device: Any) -> float:
    """Return the median seconds of a product whose operands no product has read."""
    from spdist.kernels.streaming import pipeline

    times = []
    for _ in range(ONCE):
        operands = fresh(a, b)
        begin = time.perf_counter()
        c = pipeline.multiply(*operands, device)
        times.append(time.perf_counter() - begin)
        del c, operands
    return float(np.median(times))


def block_matrix(points: int) -> CSR:
    """Return the matrix of a 27-point grid whose entries are dense blocks."""
    pattern = suite.stencil((points,) * 3, suite.box(3), 1)
    data = np.random.default_rng(1).random((pattern.nnz, SIDE, SIDE)) + 0.5
    return BSR(pattern.indptr, pattern.indices, data, (pattern.nrows * SIDE, pattern.ncols * SIDE)).rows()


def through(a: CSR, b: CSR, device: Any, wanted: Callable[[float], int]) -> dict[str, Any]:
    """Return the figures of spdist's product: the first, and `wanted` more after it, one after the other."""
    from spdist.kernels.streaming import pipeline

    stages = collections.Counter[str]()

    def note(stage: pipeline.Stage) -> None:
        stages[stage.name] += stage.seconds
        stages["blocks"] += stage.name == "multiply"

    begin = time.perf_counter()
    c = pipeline.multiply(a, b, device)
    first = time.perf_counter() - begin
    nnz, checked = c.nnz, right(c, a, b)
    del c
    repeats = wanted(nnz)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        pipeline.multiply(a, b, device, report=note)
        times.append(time.perf_counter() - begin)
    return {
        "nnz_c": nnz, "right": checked, "first_s": first, "seconds": sum(times) / repeats, "least_s": min(times),
        "repeats": repeats, "peak": device.peak, "stages": {k: v / repeats for k, v in stages.items()},
    }  # fmt: skip


def measure(name: str, a: CSR, b: CSR, rate: dict[str, float], skip_loop: bool, limit: int | None) -> dict[str, Any]:
    """Return the figures of one product."""
    from spdist.kernels.streaming.gpu_device import Gpu

    entry = a.indices.itemsize + a.dtype.itemsize
    sent = (a.nnz + (0 if b is a else b.nnz)) * entry

    def bound(nnz: int) -> float:
        return copy_seconds(sent, nnz * entry, rate)

    products = int(np.diff(b.indptr)[a.indices].sum())
    memory_limit = limit or default_limit(a, b)

    def wanted(nnz: float) -> int:
        return max(3, int(np.ceil(JOB_SECONDS / bound(int(nnz)))))

    plain = through(a, b, Gpu(memory_limit, pack=False), lambda _: FEW)
    found = through(a, b, Gpu(memory_limit), wanted)
    once = once_seconds(a, b, Gpu(memory_limit))
    lying_a = locked(a)
    lying = through(lying_a, lying_a if b is a else locked(b), Gpu(memory_limit), lambda _: FEW)
    found |= {
        "plain_s": plain["seconds"],
        "once_s": once,
        "locked_s": lying["seconds"],
        "right": found["right"] and lying["right"],
    }
    found |= {"plain_right": plain["right"]}
    found |= {"matrix": name, "products": products, "memory_limit": memory_limit, "limit_s": bound(found["nnz_c"])}
    found["share"] = found["limit_s"] / found["seconds"]
    if not skip_loop:
        found["loop_s"] = min(loop(a, b, blocks) for blocks in LOOP_BLOCKS)
        found["over_loop"] = found["loop_s"] / found["seconds"]
    return found


def default_limit(a: CSR, b: CSR) -> int:
    """Return the memory limit of which C is so many times as SHARE_OF_C says."""
    if blocksize(a.dtype) is not None:
        a = b = CSR(a.indptr, a.indices, np.ones(a.nnz), a.shape)
        return int(default_limit(a, b) * (SIDE * SIDE * 8 + 4) / 12)
    entry = a.indices.itemsize + a.dtype.itemsize
    return int(np.diff(b.indptr)[a.indices].sum() * entry / SHARE_OF_C / compression(a, b))


def compression(a: CSR, b: CSR) -> float:
    """Return products per entry of C of some rows in the middle of A."""
    some = a.rows(a.nrows // 2, min(a.nrows, a.nrows // 2 + 2000))
    return max(int(np.diff(b.indptr)[some.indices].sum()) / max((some.to_scipy() @ b.to_scipy()).nnz, 1), 1.0)


def storage_rates(url: str, scratch: str, threads: int, nnz: int) -> dict[str, float]:
    """Return bytes a second, as they are in memory, of a stored matrix read by threads, and of `nnz` entries written.

    The matrix is written again and again until there are so many entries: writing slows down where caches are full.
    """
    from spdist.storage.chunked_array import compresses
    from spdist.storage.matrix import open_matrix
    from spdist.storage.writer import Layout
    from spdist.stores.registry import at

    m = open_matrix(url)
    cuts = np.linspace(0, m.nrows, 4 * threads + 1).astype(int)
    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        blocks = list(pool.map(m.rows, cuts[:-1].tolist(), cuts[1:].tolist()))
        read = time.perf_counter() - begin
        size = sum(block.indices.nbytes + block.data.nbytes for block in blocks)
        chunk = max(1, min(1 << 20, max(block.nnz for block in blocks)))
        layout = Layout(scratch, m.ncols, m.dtype, chunk, compresses(blocks[0].data))
        pieces = [(b.indices[at : at + chunk], b.data[at : at + chunk])
                  for b in blocks for at in range(0, b.nnz - chunk + 1, chunk)]  # fmt: skip
        count = -(-nnz // chunk)
        begin = time.perf_counter()
        list(pool.map(lambda k: layout.write_entries(k, *pieces[k % len(pieces)]), range(count)))
        written = time.perf_counter() - begin
    at(scratch).remove()
    each = chunk * (blocks[0].indices.itemsize + blocks[0].data.itemsize)
    return {"read": size / read, "write": count * each / max(written, 1e-9), "written_bytes": count * each}


def run_seconds(stages: Path) -> float:
    """Return the seconds from the first block's read to the last write, from what ``record=`` wrote of a run."""
    lines = [json.loads(line) for line in stages.read_text().splitlines()]
    blocks = [line for line in lines if line["stage"] in STAGES]  # others are phases of the whole call
    return max(line["begin"] + line["seconds"] for line in blocks) - min(line["begin"] for line in blocks)


def stored(name: str, a: CSR, b: CSR, memory_limit: int, around: Path, workers: int) -> dict[str, Any]:
    """Return the figures of a product from Zarr to Zarr under Dask, in a new folder within `around`."""
    from spdist.api import products as api
    from spdist.storage.writer import MatrixWriter
    from spdist.stores.registry import at

    around.mkdir(parents=True, exist_ok=True)
    store = Path(tempfile.mkdtemp(prefix="spdist-", dir=around))
    paths = [store / "A.zarr", store / ("A.zarr" if b is a else "B.zarr")]
    for path, m in zip(paths, (a, b), strict=True):
        if not path.exists():
            writer = MatrixWriter(path, m.ncols, m.dtype, {})
            for start in range(0, m.nrows, 1 << 18):
                writer.append(m.rows(start, min(m.nrows, start + (1 << 18))))
            writer.close()
    record_file = store / "run.jsonl"
    report = api.multiply(*paths, store / "C.zarr", engine="cuda", memory_limit=memory_limit, workers=workers,
                          record=record_file)  # fmt: skip
    seconds = run_seconds(record_file)
    checked = api.verify(*paths, store / "C.zarr").ok
    at(str(store / "C.zarr")).remove()
    speed = storage_rates(str(paths[0]), str(store / "scratch.zarr"), 8, report.nnz)
    entry = a.indices.itemsize + a.dtype.itemsize
    read, written = (a.nnz + (0 if b is a else b.nnz)) * entry, report.nnz * entry
    limit = max(read / speed["read"], written / speed["write"])
    shutil.rmtree(store)
    return {
        "matrix": name, "nnz_c": report.nnz, "right": checked, "seconds": seconds, "whole_s": report.seconds,
        "workers": workers, "limit_s": limit, "share": limit / seconds, "storage": speed, "peak": report.peak_memory,
        "peak_host": report.peak_host_memory, "memory_limit": memory_limit, "blocks": report.blocks,
        "stages": {k: v["seconds"] for k, v in report.stages.items()}, "first_s": report.seconds,
    }  # fmt: skip


def thesis(name: str, a: CSR, b: CSR, rate: dict[str, float]) -> dict[str, Any]:
    """Return the seconds of a product that fits the GPU, from host to host: spdist's and CuPy's, and the copies'."""
    import cupy
    import cupyx.scipy.sparse as csp
    import gpu_measure

    from spdist.kernels.streaming import pipeline
    from spdist.kernels.streaming.gpu_device import Gpu
    from spdist.kernels.streaming.layout import device_dtypes

    device = Gpu()
    locked, left = gpu_measure.ThereAndBack(a, b, a.dtype, once=True), a.to_scipy()
    a_locked = CSR(a.indptr, locked.operands[0].indices, locked.operands[0].data, a.shape)

    def ours(a: CSR) -> CSR:
        device.keep(None, device_dtypes(a, a))  # B is sent again
        return pipeline.multiply(a, a, device)

    def plain() -> Any:
        on_gpu = csp.csr_matrix(left)
        return (on_gpu @ on_gpu).get()

    def median(product: Callable[[], Any]) -> float:
        product()
        return float(np.median([gpu_measure.clock(product) for _ in range(RUNS)])) / 1e3

    c = ours(a)
    found: dict[str, Any] = {"matrix": name, "nnz_c": c.nnz, "right": right(c, a, b)}
    entry = a.indices.itemsize + a.dtype.itemsize
    found |= {"seconds": median(lambda: ours(a)), "locked_s": median(lambda: ours(a_locked))}
    found |= {"cupy_s": median(plain), "cupy_locked_s": median(locked)}
    sent, back = a.nnz * entry, c.nnz * entry
    on_gpu = gpu_measure.cupyx_matrix(gpu_measure.on_device(a, a.dtype))
    kernels = median(functools.partial(spgemm, on_gpu, on_gpu))
    found |= {"limit_s": copy_seconds(sent, back, rate), "kernels_s": kernels}
    copies = sent / rate["to_gpu"] + back / rate["to_host"]  # one after the other
    found |= {"copies_s": copies, "hidden": (copies + kernels - found["locked_s"]) / copies}
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def show_thesis(rows: list[dict[str, Any]]) -> None:
    """Print one line a matrix, and the geometric means."""
    heads = " ".join(f"{name:>8}" for name in ("spdist", "locked", "CuPy", "locked", "copies"))
    print(f"{'ms':12} {'nnz(C)':>12} {heads}  over CuPy")
    ratios = []
    for row in rows:
        mine, locked, plain, cupy_locked, bound = (
            1e3 * row[key] for key in ("seconds", "locked_s", "cupy_s", "cupy_locked_s", "limit_s")
        )
        ratios.append((plain / mine, cupy_locked / locked, plain / bound, cupy_locked / bound))
        print(
            f"{row['matrix']:12} {row['nnz_c']:12,} {mine:8.3f} {locked:8.3f} {plain:8.2f} {cupy_locked:8.3f} "
            f"{bound:8.3f} {ratios[-1][0]:5.2f} {ratios[-1][1]:5.2f} {'right' if row['right'] else 'WRONG'}"
        )
    means = np.exp(np.mean(np.log(ratios), axis=0))
    print(f"geometric means over CuPy: {means[0]:.2f}, both from page-locked memory {means[1]:.2f}; "
          f"with free kernels {means[2]:.2f} and {means[3]:.2f}")  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print one line."""
    stages = found["stages"]
    busy = ", ".join(f"{k} {1e3 * v:.0f}" for k, v in stages.items() if k != "blocks")
    print(
        f"{found['matrix']:14} nnz(C) {found['nnz_c']:>13,}  limit {found['memory_limit'] >> 20:>6} MiB  peak "
        f"{found['peak'] >> 20:>6}  {1e3 * found['seconds']:8.1f} ms (first {1e3 * found['first_s']:.0f})  bound "
        f"{1e3 * found['limit_s']:7.1f}  {found['share']:6.1%}  not packed "
        f"{1e3 * found.get('plain_s', 0):.1f}  once {1e3 * found.get('once_s', 0):.1f}  locked "
        f"{1e3 * found.get('locked_s', 0):.1f}  loop {found.get('loop_s', 0):6.2f} s "
        f"{found.get('over_loop', 0):5.1f}x  {stages.get('blocks', 0):.0f} blocks; ms: {busy}; "
        f"{'right' if found['right'] else 'WRONG'}",
        flush=True,
    )


def parse() -> Any:
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--matrices", help="names, by commas")
    parser.add_argument("--folder", type=Path, help="keeps the matrices")
    parser.add_argument("--thesis", action="store_true", help="the matrices of the thesis, which fit the GPU")
    parser.add_argument("--blocks", action="store_true", help="a matrix of dense blocks")
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--store", type=Path, help="go from Zarr to Zarr in this folder")
    parser.add_argument("--workers", type=int, default=1, help="with --store: GPUs")
    parser.add_argument("--memory-limit", type=int, help="bytes; by default a third of C")
    return parser.parse_args()


def main() -> int:
    """Measure, print, record."""
    args = parse()
    rows: list[dict[str, Any]] = []
    if not record.has_gpu():
        print("no GPU here (or no CuPy): nothing is measured")
        record.write({"benchmark": "pipeline", "rows": rows}, args.out)
        return 0
    known = suite.TINY if args.quick else THESIS if args.thesis else suite.LARGE
    names = args.matrices.split(",") if args.matrices else [] if args.blocks else list(known)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        begin = time.perf_counter()
        suite.prepare(names, folder, args.quick)
        rate = rates()
        print(
            f"made in {time.perf_counter() - begin:.0f} s; GB/s: { ({k: round(v / 1e9, 1) for k, v in rate.items()}) }"
        )
        for name in names:
            a, b = suite.load(name, folder, args.quick)
            if args.thesis:
                rows.append(thesis(name, a, b, rate))
            elif args.store:
                limit = args.memory_limit or default_limit(a, b)
                rows.append(stored(name, a, b, limit, args.store, args.workers))
            else:
                rows.append(measure(name, a, b, rate, args.no_loop, args.memory_limit))
            if not args.thesis:
                show(rows[-1])
            # What is measured is kept, should the run be ended before its time.
            record.write({"benchmark": "pipeline", "gpu": record.gpu(), "rates": rate, "rows": rows}, args.out)
        if args.blocks:
            a = block_matrix(8 if args.quick else GRID)
            rows.append(measure(f"27-point, {SIDE} x {SIDE}", a, a, rate, True, args.memory_limit))
            show(rows[-1])
            record.write({"benchmark": "pipeline", "gpu": record.gpu(), "rates": rate, "rows": rows}, args.out)
        if args.thesis:
            show_thesis(rows)
    return 0 if all(row["right"] and row.get("plain_right", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
