"""Compare small calls with what the last release took for them, as ratios to SciPy: part of `make check`.

::

    python benchmarks/guard.py              # exit with 1 if a ratio is LIMIT times the release's
    python benchmarks/guard.py --release    # write release.json, when a release is made

What counts is the least CPU time of many calls, spdist's and SciPy's in turns: what else runs on the machine adds to
neither. A ratio that is too large is measured again, and the least one counts. Ratios differ between processors; a call
that became 20 % slower is found by `make bench-compare`, not here.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare
import numpy as np
import record
import scipy.sparse as sp

RELEASE = Path(__file__).resolve().parent / "release.json"
LIMIT = 1.5
"""Times the release's ratio."""
ATTEMPTS = 4
SECONDS = 0.4
"""That each case is repeated for."""
IMPORTS = {"spdist": "import spdist; spdist.spgemm", "SciPy": "import scipy.sparse"}
Call = Callable[[], Any]


def cases() -> dict[str, tuple[Call, Call]]:
    """Return by name a call of spdist's and the same of SciPy's."""
    import spdist

    found: dict[str, tuple[Call, Call]] = {}
    for nrows, per_row in ((100, 4), (2_000, 8), (20_000, 12)):
        m = compare.operands(nrows, per_row)
        found[f"spgemm, {m.nnz:,} entries"] = lambda m=m: spdist.spgemm(m, m), lambda m=m: (m @ m).sort_indices()
    operator, x = spdist.operator(m, "sell", threads=1), np.ones(m.shape[1])
    walks = walks_on_cliques(1_200, 30, 120)
    return found | {
        "operator @ x": (lambda: operator @ x, lambda: m @ x),
        "spgemm, threshold": (lambda: spdist.spgemm(walks, walks, threshold=1e-4, top_n=1_100), lambda: walks @ walks),
    }


def walks_on_cliques(n: int, clique: int, others: int) -> sp.csr_array:
    """Return rows of sum 1 that hold a clique and others anywhere, which weigh little."""
    rng = np.random.default_rng(0)
    rows = np.arange(n)[:, None]
    columns = np.hstack([rows // clique * clique + np.arange(clique), rng.integers(0, n, (n, others))])
    weights = np.hstack([np.ones((n, clique)), 10 ** rng.uniform(-6, -2, (n, others))])
    found = sp.csr_array((weights.ravel(), (np.repeat(rows, clique + others), columns.ravel())), shape=(n, n))
    return sp.csr_array(sp.diags_array(1 / found.sum(axis=1)) @ found)


def least(calls: tuple[Call, Call]) -> float:
    """Return the least CPU time of the first call over that of the second."""
    best = [float("inf"), float("inf")]
    for call in calls:
        call()  # compiles, or loads what is compiled
    end = time.perf_counter() + SECONDS
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        for side, call in enumerate(calls):
            begin = time.process_time()
            call()
            best[side] = min(best[side], time.process_time() - begin)
        rounds += 1
    return best[0] / best[1]


def importing() -> float:
    """Return the least CPU time of importing spdist over that of SciPy's sparse matrices."""

    def taken(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = {name: [taken(code) for _ in range(3)] for name, code in IMPORTS.items()}
    return min(times["spdist"]) / min(times["SciPy"])


def measure() -> dict[str, Call]:
    """Return by case what measures its ratio."""
    return {"import": importing} | {name: lambda calls=calls: least(calls) for name, calls in cases().items()}


def slower(released: dict[str, float], measured: dict[str, Call]) -> dict[str, float]:
    """Return the ratios that stay above the limit however often they are measured."""
    found = {}
    for name, ratio in measured.items():
        if name in released and (now := min_of(ratio, LIMIT * released[name])) > LIMIT * released[name]:
            found[name] = now
    return found


def min_of(ratio: Call, enough: float) -> float:
    """Return the least of some measurements; none is repeated once it is small enough."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        best = min(best, ratio())
        if best <= enough:
            break
    return best


def main() -> int:
    """Compare, or write the figures of a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help="write what later changes are compared with")
    if parser.parse_args().release:
        ratios = {name: min_of(ratio, 0.0) for name, ratio in measure().items()}
        RELEASE.write_text(json.dumps({**record.machine(), "ratios": ratios}, indent=1) + "\n")
        print("\n".join(f"{name}: {ratio:.2f} of SciPy's CPU time" for name, ratio in ratios.items()))
        return 0
    released = json.loads(RELEASE.read_text())["ratios"]
    found = slower(released, measure())
    for name, ratio in found.items():
        print(f"{name}: {ratio:.2f} of SciPy's CPU time, {ratio / released[name]:.2f} times the last release's; "
              "see make bench-compare", file=sys.stderr)  # fmt: skip
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
