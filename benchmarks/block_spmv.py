"""Time y = A @ x for block matrices in memory: by blocks beside SciPy's `bsr_array` and CSR, and beside SELL-C-sigma.

The four are called turn by turn; each result is checked against SciPy's.

::

    python benchmarks/block_spmv.py [--threads N] [--data DIR] [--quick] [--out FILE]
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import block_spgemm  # noqa: E402
import numpy as np  # noqa: E402
import record  # noqa: E402
from spmv import in_turns  # noqa: E402

import spdist  # noqa: E402
from spdist.matrices.csr import CSR  # noqa: E402

SIDES = (2, 3, 4, 6)
ROUNDS = 15
MOST_BYTES = 200 << 20
"""Values of a matrix; patterns are cut to their leading block rows where there would be more."""
TOLERANCE = 1e-12


def measure(name: str, pattern: CSR, side: int, threads: int, rounds: int) -> dict[str, Any]:
    """Time one pattern with one size of blocks."""
    rows = int(np.searchsorted(pattern.indptr, MOST_BYTES // (8 * side * side), side="right")) - 1
    blocks = block_spgemm.filled(pattern.rows(0, min(rows, pattern.nrows)), side)
    matrix = blocks.to_scipy()
    entries, x = matrix.tocsr(), np.random.default_rng(1).random(blocks.shape[1])
    y = np.empty(blocks.shape[0])
    ours = spdist.operator(blocks, "bsr", threads=threads)
    sell = spdist.operator(entries, "sell", threads=threads)
    calls = (
        functools.partial(ours.matvec, x, out=y),
        functools.partial(matrix.__matmul__, x),
        functools.partial(entries.__matmul__, x),
        functools.partial(sell.matvec, x, out=np.empty_like(y)),
    )
    in_turns(calls, 1)
    ms = [1e3 * statistics.median(times) for times in in_turns(calls, rounds)]
    expected = matrix @ x
    right = bool((abs(y - expected) <= TOLERANCE * expected).all())
    found = dict(zip(("ms", "bsr_array_ms", "csr_array_ms", "sell_ms"), ms, strict=True))
    row = {"matrix": name, "side": side, "blocks": blocks.blocks, "nbytes": blocks.nbytes, **found}
    ratios = {"ratio": min(ms[1:3]) / ms[0], "over_sell": ms[3] / ms[0]}
    print(f"{name:12} {side} {ms[0]:8.3f} ms, " + ", ".join(f"{what} {value:.2f}" for what, value in ratios.items()))
    return {**row, **ratios, "right": right}


def main() -> int:
    parser = record.parser("y = A @ x for matrices of dense blocks, on the CPU.")
    parser.add_argument("--threads", type=int, default=1, help="SciPy has one")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of .npz patterns")
    args = parser.parse_args()
    args.gpu, args.only = False, None
    sides, rounds = (SIDES[:2], 3) if args.quick else (SIDES, ROUNDS)
    rows = []
    for name, make in block_spgemm.patterns(args).items():
        pattern = make()
        rows += [measure(name, pattern, side, args.threads, rounds) for side in sides]
    means = {key: round(statistics.geometric_mean(row[key] for row in rows), 3) for key in ("ratio", "over_sell")} | {
        "least": round(min(row["ratio"] for row in rows), 3)
    }
    print(means)
    record.write({"benchmark": "block_spmv", "threads": args.threads, "summary": means, "rows": rows}, args.out)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
