"""Time calls of `spdist.matmul` on matrices in memory, call to return, beside the loop that users of CuPy write.

::

    python benchmarks/calls.py --out record.json

Operands and C are SciPy's, in ordinary memory. *Once*: operands that no call has seen, new copies for every call.
*Again*: the same operands as in the call before. Kernels are compiled and the GPU is in use before: a small product
goes first. With a GPU the engine is `cuda` within a limit of a third of C, and the peer is a loop over 8 or 32 row
blocks, whichever is quicker (rows of A up, ``A_i @ B``, ``.get()``), of new copies as well: once against once. The bus
is the time that A, B and C take between page-locked memory and the GPU, both ways at once. Without a GPU the engine is
`auto` with all cores, and the peer is SciPy's ``a @ b``, which leaves rows unsorted, with one.

Every product is checked: canonical form, and C x against A (B x). Calls and loops take turns; medians and all times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pipeline
import record
import suite

import spdist
from spdist.matrices.csr import CSR, from_scipy

Row = dict[str, Any]
Pair = tuple[Any, Any]
REPEATS = 3
WARM_UP = 16
"""Points each way of the grid whose product goes first."""


def band(size: int, per_row: int, reach: int) -> CSR:
    """Return a matrix with random columns a row, none further than `reach` from the diagonal."""
    rng = np.random.default_rng(36)
    rows = np.repeat(np.arange(size), per_row)
    columns = np.clip(rows + rng.integers(-reach, reach + 1, len(rows)), 0, size - 1)
    return suite.assemble((size, size), [rows * size + columns], 37)


def square(a: CSR) -> tuple[CSR, CSR]:
    """Return A and A."""
    return a, a


CASES: dict[str, dict[str, Callable[[], tuple[CSR, CSR]]]] = {
    "quick": {
        "27-point 20^3": lambda: square(suite.grid(20, 35)),
        "A @ P 24^3": lambda: suite.galerkin(24, 34),
    },
    "cpu": {
        "Erdos-Renyi 300k x 8": lambda: square(suite.erdos_renyi(300_000, 8, 31)),
        "R-MAT 15 x 8": lambda: square(suite.rmat(15, 8)),
        "27-point 60^3": lambda: square(suite.grid(60, 35)),
        "local band 200k x 14": lambda: square(band(200_000, 14, 1000)),
        "A @ P 96^3": lambda: suite.galerkin(96, 34),
    },
    "gpu": {
        "Erdos-Renyi 1M x 14": lambda: square(suite.erdos_renyi(1_000_000, 14, 31)),
        "R-MAT 17 x 8": lambda: square(suite.rmat(17, 8)),
        "27-point 120^3": lambda: square(suite.grid(120, 35)),
        "local band 1M x 14": lambda: square(band(1_000_000, 14, 1000)),
        "A @ P 231^3": lambda: suite.galerkin(231, 34),
    },
}
"""On a GPU C has about 150 to 220 million entries."""


def copies(a: Any, b: Any) -> Pair:
    """Return operands that no call has seen; one object where A is B."""
    left = a.copy()
    return left, left if b is a else b.copy()


def clock(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and what it returned."""
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def loop(a: Any, b: Any, blocks: int) -> float:
    """Return the seconds of the loop that users of CuPy write."""
    left, right = (CSR(np.asarray(m.indptr, np.int64), m.indices, m.data, m.shape) for m in (a, b))
    return pipeline.loop(left, right, blocks)


def measure(name: str, made: tuple[CSR, CSR], rates: dict[str, float] | None) -> Row:
    """Return the figures of one product."""
    a, b = made[0].to_scipy(), made[1].to_scipy()
    a, b = (a, a) if made[1] is made[0] else (a, b)
    keywords: Row = {"engine": "auto"}
    if rates is not None:
        keywords = {"engine": "cuda", "memory_limit": max(1 << 25, pipeline.default_limit(*made))}
    once, again, peer = [], [], []
    right, nnz = True, 0
    for number in range(REPEATS):
        pair = copies(a, b)
        seconds, c = clock(lambda pair=pair: spdist.matmul(*pair, **keywords))
        once.append(seconds)
        if number == 0:
            nnz, right = c.nnz, pipeline.right(from_scipy(c), *made)
        del c
        again.append(clock(lambda pair=pair: spdist.matmul(*pair, **keywords))[0])
        pair = copies(a, b)
        if rates is None:
            peer.append(clock(lambda pair=pair: pair[0] @ pair[1])[0])
        else:
            peer.append(min(loop(*copies(a, b), blocks) for blocks in pipeline.LOOP_BLOCKS))
    found: Row = {"case": name, **keywords, "nnz_c": nnz, "right": right}
    found |= {"once_s": once, "again_s": again, "peer_s": peer}
    found |= {"over_peer_once": statistics.median(peer) / statistics.median(once)}
    if rates is not None:
        entry = made[0].indices.itemsize + made[0].data.itemsize
        sent = (made[0].nnz + (0 if b is a else made[1].nnz)) * entry
        found["bus_s"] = bus = pipeline.copy_seconds(sent, nnz * entry, rates)
        found |= {"bus_once": bus / statistics.median(once), "bus_again": bus / statistics.median(again)}
    return found


def show(rows: list[Row], on_gpu: bool) -> None:
    """Print a line for each product, and geometric means."""
    peer = "CuPy's loop" if on_gpu else "SciPy"
    print(
        f"\n{'ms':22} {'nnz(C)':>12} {'once':>8} {'again':>8} {peer:>12} {'once/once':>10} {'bus once':>9} {'again':>6}"
    )
    for row in rows:
        once, again, other = (1e3 * statistics.median(row[key]) for key in ("once_s", "again_s", "peer_s"))
        shares = f"{row['bus_once']:9.0%} {row['bus_again']:6.0%}" if "bus_s" in row else f"{'':16}"
        times = f"{once:8.1f} {again:8.1f} {other:12.1f} {row['over_peer_once']:10.2f}"
        print(f"{row['case']:22} {row['nnz_c']:12,} {times} {shares} {'right' if row['right'] else 'WRONG'}")
    ratios = [row["over_peer_once"] for row in rows]
    if len(ratios) > 2:
        print(f"once over {peer}: geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}")


def main() -> int:
    """Measure, print, record."""
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    args = parser.parse_args()
    on_gpu = record.has_gpu()
    rates = pipeline.rates() if on_gpu else None
    end = time.monotonic() + args.budget
    small = suite.grid(WARM_UP, 35).to_scipy()
    spdist.matmul(small, small, engine="cuda" if on_gpu else "auto")
    if on_gpu:
        loop(small, small, 1)
    rows: list[Row] = []
    result: Row = {"benchmark": "calls", "gpu": record.gpu()} if on_gpu else {"benchmark": "calls"}
    last = 0.0
    for name, make in CASES["quick" if args.quick else "gpu" if on_gpu else "cpu"].items():
        if time.monotonic() + last > end:
            print(f"{name} and the following are left out: the budget of {args.budget:.0f} s is spent")
            break
        begin = time.monotonic()
        rows.append(measure(name, make(), rates))
        last = time.monotonic() - begin
        # What is measured is kept, should the run be ended before its time.
        record.write(result | {"rates": rates, "rows": rows}, args.out, quiet=True)
    show(rows, on_gpu)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
