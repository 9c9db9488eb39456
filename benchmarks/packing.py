"""Time C's way from the GPU to the host's memory: copied as it is, and packed, copied and unpacked by threads.

::

    python benchmarks/packing.py --out record.json
    python benchmarks/packing.py --products er_500k_d16 --threads 1,8 --blocks 4

C goes in blocks of rows, as in a product larger than the GPU: while one is copied, the next is packed and the one
before it unpacked. Every result is compared with C bit by bit.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import record
import suite

from spdist.foundation.cpus import count_cpus
from spdist.kernels.streaming import packing, workspace
from spdist.matrices.csr import CSR

CONSTANT = "27-point 96^3 constant"
PRODUCTS: dict[str, Callable[[], CSR | suite.Pair]] = {
    "er_500k_d16": suite.SUITE["er_500k_d16"],
    "rmat17_e8": suite.SUITE["rmat17_e8"],
    "27-point 64^3": lambda: suite.stencil((64, 64, 64), suite.box(3), 1),
    CONSTANT: lambda: suite.stencil((96, 96, 96), suite.box(3), 1),
    "hood": suite.SUITE["hood"],
    "amg_AP": suite.SUITE["amg_AP"],
}
TINY = {name: suite.TINY["27-point" if "27" in name else "rmat"] for name in PRODUCTS}
SLOTS = 2
"""Blocks that are packed or copied at the same time."""
SHARE = 1 << 20
"""Entries that a thread should unpack in one call, which takes some microseconds by itself."""


def c_on_device(name: str, tiny: bool) -> CSR:
    """Return C of a product, on the GPU."""
    import gpu_measure

    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

    made = (TINY if tiny else PRODUCTS)[name]()
    a, b = made if isinstance(made, tuple) else (made, made)
    if name == CONSTANT:
        diagonal = np.repeat(np.arange(a.nrows), np.diff(a.indptr)) == a.indices
        a = b = CSR(a.indptr, a.indices, np.where(diagonal, 26.0, -1.0), a.shape)
    left = gpu_measure.on_device(a, np.float64)
    return rowwise_gpu.multiply(left, left if b is a else gpu_measure.on_device(b, np.float64))


class Way:
    """C on the GPU, cut into blocks of rows, and the ways to pinned memory of the host.

    Each block has its own offsets, from 0 on, one after the other in `indptr`; columns and values lie as in C.
    """

    def __init__(self, c: CSR, blocks: int) -> None:
        import cupy
        import cupyx

        ends = c.indptr.get()
        cuts = np.unique(np.searchsorted(ends, np.linspace(0, c.nnz, blocks + 1)[1:-1]))
        self.rows = list(itertools.pairwise([0, *cuts.tolist(), c.nrows]))
        self.entries = [(int(ends[first]), int(ends[last])) for first, last in self.rows]
        self.blocks = [c.rows(*rows) for rows in self.rows]
        bounds = [workspace.packed_bound(b.shape, b.nnz, b.indices.itemsize, b.dtype.itemsize) for b in self.blocks]
        self.out = [cupy.empty(max(bounds), np.uint8) for _ in range(SLOTS)]
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(SLOTS)]
        self.indptr = cupyx.empty_pinned(c.nrows + len(self.blocks), c.indptr.dtype)
        self.indices, self.data = cupyx.empty_pinned(c.nnz, c.indices.dtype), cupyx.empty_pinned(c.nnz, c.dtype)
        self.packed = [np.empty(0, np.uint8) for _ in self.blocks]  # pinned when their size is known
        self.bound = sum(bounds)
        self.plain_bytes = sum(block.nbytes for block in self.blocks)
        sizes = c.nrows, c.nnz, self.plain_bytes, c.data.nbytes
        self.mean = packing.Sizes(*(size // len(self.blocks) for size in sizes))

    def block_on_host(self, number: int) -> tuple[Any, Any, Any]:
        """Return where a block's arrays belong."""
        (start, stop), (first, last) = self.rows[number], self.entries[number]
        return self.indptr[start + number : stop + number + 1], self.indices[first:last], self.data[first:last]

    def poison(self) -> None:
        """Fill the host's arrays with what C does not hold."""
        for array in (self.indptr, self.indices, self.data):
            array[:] = -1

    def wrong(self) -> int:
        """Return how many blocks on the host are not those of C, bit by bit."""
        import cupy
        import gpu_measure

        hosts = (CSR(*map(cupy.asarray, self.block_on_host(i)), b.shape) for i, b in enumerate(self.blocks))
        return sum(not gpu_measure.same_bits(host, block) for host, block in zip(hosts, self.blocks, strict=True))

    def plain(self) -> None:
        """Copy C as it is."""
        for number, block in enumerate(self.blocks):
            for array, target in zip(
                (block.indptr, block.indices, block.data), self.block_on_host(number), strict=True
            ):
                array.data.copy_to_host_async(target.ctypes.data, array.nbytes, self.streams[0])
        self.streams[0].synchronize()

    def pack(self, number: int, values: bool) -> packing.Packed:
        """Start to pack a block."""
        with self.streams[number % SLOTS]:
            return packing.pack(self.blocks[number], self.out[number % SLOTS], values=values)

    def pack_all(self, values: bool) -> list[packing.Packed]:
        """Pack every block, one over the other."""
        return [self.pack(number, values).wait() for number in range(len(self.blocks))]

    def send(self, number: int, packed: packing.Packed) -> Any:
        """Start to copy a block, values that are not packed last; return the event after what is."""
        import cupyx

        stream = self.streams[number % SLOTS]
        if len(self.packed[number]) < packed.nbytes:
            self.packed[number] = cupyx.empty_pinned(packed.nbytes, np.uint8)
        with stream:
            packed.copy(self.packed[number])
            there = stream.record()
            if not packed.values:
                data = self.blocks[number].data
                data.data.copy_to_host_async(self.block_on_host(number)[2].ctypes.data, data.nbytes, stream)
        return there

    def unpack(
        self, number: int, packed: packing.Packed, pool: ThreadPoolExecutor, threads: int, there: Any = None
    ) -> list[Future[None]]:
        """Start to unpack a block, in as many shares as are worth a call each, at most one a thread."""
        indptr, indices, data = self.block_on_host(number)

        def share(first: int, last: int) -> None:
            if there is not None:
                there.synchronize()
            packing.unpack(self.packed[number], indptr, indices, data if packed.values else None, first, last)

        units = workspace.packed_units(len(indptr) - 1, len(indices))
        shares = max(1, min(threads, len(indices) // SHARE))
        cuts = [units * part // shares for part in range(shares + 1)]
        return [pool.submit(share, *cut) for cut in itertools.pairwise(cuts)]

    def unpack_all(self, all_packed: list[packing.Packed], pool: ThreadPoolExecutor, threads: int) -> None:
        """Unpack every block."""
        jobs = [job for i, packed in enumerate(all_packed) for job in self.unpack(i, packed, pool, threads)]
        for job in jobs:
            job.result()

    def whole(self, pool: ThreadPoolExecutor, threads: int, values: bool) -> list[packing.Packed]:
        """Pack, copy and unpack C, block by block, all three at the same time."""
        jobs: list[Future[None]] = []
        all_packed = [self.pack(0, values)]
        for number in range(len(self.blocks)):
            packed = all_packed[number].wait()
            there = self.send(number, packed)
            jobs += self.unpack(number, packed, pool, threads, there)
            if number + 1 < len(self.blocks):
                all_packed.append(self.pack(number + 1, values))
        for job in jobs:
            job.result()
        for stream in self.streams:
            stream.synchronize()
        return all_packed


def clock(function: Callable[[], Any], runs: int) -> float:
    """Return the median seconds of a call, after one that is not timed; the GPU is idle before and after."""
    import cupy

    times = []
    for _ in range(runs + 1):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        function()
        cupy.cuda.Device().synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(way: Way, c: CSR, values: bool, threads: list[int], runs: int) -> dict[str, Any]:
    """Return the figures of packing, with the values or without."""
    way.poison()
    with ThreadPoolExecutor(max(threads)) as pool:
        packed = way.whole(pool, max(threads), values)
    right = not way.wrong()
    apart = sum(block.data.nbytes for block, p in zip(way.blocks, packed, strict=True) if not p.values)
    sent, unpacked = sum(p.nbytes for p in packed) + apart, way.plain_bytes - apart
    mean_bytes = (sent - apart) // len(packed), apart // len(packed)
    pack = clock(lambda: way.pack_all(values), runs)
    found: dict[str, Any] = {
        "values": all(p.values for p in packed), "why": packed[0].why, "sent_bytes": sent,
        "packed_bytes": sent - apart, "bound_bytes": way.bound,
        "bytes_an_entry": sent / max(c.nnz, 1), "shrinks": way.plain_bytes / sent, "pack_ms": 1e3 * pack,
        "pack_gb_s": unpacked / pack / 1e9, "threads": {},
    }  # fmt: skip
    for count in threads:
        with ThreadPoolExecutor(count) as pool:
            unpack = clock(functools.partial(way.unpack_all, packed, pool, count), runs)
            whole = clock(functools.partial(way.whole, pool, count, values), runs)
        found["threads"][count] = {
            "unpack_ms": 1e3 * unpack, "unpack_gb_s": unpacked / unpack / 1e9, "whole_ms": 1e3 * whole,
            "predicted_ms": 1e3 * len(packed) * packing.seconds(way.mean, *mean_bytes, count),
        }  # fmt: skip
    return {**found, "right": right and not way.wrong()}


def run(name: str, args: Any, threads: list[int]) -> dict[str, Any]:
    """Return the figures of one product."""
    import cupy

    c = c_on_device(name, args.quick)
    way = Way(c, args.blocks)
    plain = clock(way.plain, args.runs)
    row = {
        "product": name, "nrows": c.nrows, "nnz": c.nnz, "blocks": len(way.blocks), "plain_bytes": way.plain_bytes,
        "plain_ms": 1e3 * plain, "plain_gb_s": way.plain_bytes / plain / 1e9, "packed": [],
    }  # fmt: skip
    row["packed"].append(measure(way, c, True, threads, args.runs))
    if row["packed"][0]["values"]:
        row["packed"].append(measure(way, c, False, threads, args.runs))
    sizes = {found["values"]: found["packed_bytes"] // len(way.blocks) for found in row["packed"]}
    row["chosen"] = {
        count: packing.choose(way.mean, sizes.get(False, 0), sizes.get(True, 0), count) for count in threads
    }
    for found in row["packed"]:
        for figures in found["threads"].values():
            figures["over_plain"] = row["plain_ms"] / figures["whole_ms"]
        show(row, found)
    print("  chosen: " + ", ".join(f"{way} by {count} threads" for count, way in row["chosen"].items()), flush=True)
    del way, c
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return row


def show(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Print one line for packing and one for each number of threads."""
    parts = "columns and values" if found["values"] else "columns"
    print(
        f"{row['product']}: {row['nnz'] / 1e6:.1f} M entries, plain {row['plain_ms']:.1f} ms "
        f"({row['plain_gb_s']:.1f} GB/s); {parts}: {found['bytes_an_entry']:.2f} bytes an entry of "
        f"{row['plain_bytes'] / row['nnz']:.2f}, {found['shrinks']:.2f} times fewer, "
        f"packed in {found['pack_ms']:.2f} ms ({found['pack_gb_s']:.0f} GB/s); {'right' if found['right'] else 'WRONG'}"
    )
    for count, f in found["threads"].items():
        print(
            f"  {count:2} threads: unpack {f['unpack_ms']:7.1f} ms ({f['unpack_gb_s']:5.1f} GB/s), whole "
            f"{f['whole_ms']:7.1f} ms, {f['over_plain']:.2f} over plain; "
            f"predicted {f['predicted_ms']:.1f} ms",
            flush=True,
        )


def main() -> int:
    """Measure, print, record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--products", default=",".join(PRODUCTS), help="names, by commas")
    parser.add_argument("--threads", default="1,2,4,8,16", help="numbers of threads that unpack, by commas")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of rows that C goes in")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "packing", "dtype": "float64", "rows": []}
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        result |= {"gpu": record.gpu()}
    except Exception as error:  # no CuPy, no driver, no device: each raises its own
        print(f"no GPU here (or no CuPy), nothing is measured: {error}")
        record.write(result, args.out)
        return 0
    threads = [count for count in map(int, args.threads.split(",")) if count <= count_cpus()]
    for name in args.products.split(","):
        result["rows"].append(run(name, args, threads))
    record.write(result, args.out)
    return 0 if all(found["right"] for row in result["rows"] for found in row["packed"]) else 1


if __name__ == "__main__":
    sys.exit(main())
