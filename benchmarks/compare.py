"""Compare two commits on one machine, in turns, and say which calls, commands and imports became slower.

::

    python benchmarks/compare.py OLD NEW [--rounds 7] [--out record.json]     # or make bench-compare OLD=... NEW=...

Each commit is checked out into a folder of its own; a folder with sources may stand for one. A round runs every case
once with each, in fresh processes, in turns. A case is slower if the median of its ratios, new over old, is above 1 by
more than its spread: `LEAST`, or three times the median deviation of the ratios. The exit code is then 1. Cases in a
process take the least of several calls, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.05
"""Share by which a case may be slower without being called so."""
CALLS, SECONDS = 15, 0.2
"""Calls of a case in a process, of which the quickest counts: so many at least, and more until time is up."""
COMMANDS = {
    "import spdist": ["-c", "import spdist; spdist.spgemm"],
    "spdist --version": ["-m", "spdist", "--version"],
    "spdist info": ["-m", "spdist", "info", "A.zarr"],
    "spdist multiply": ["-m", "spdist", "multiply", "A.zarr", "A.zarr", "C.zarr", "--overwrite"],
}
"""Commands from prompt to prompt, in a folder with A.zarr."""


def operands(nrows: int, per_row: int) -> Any:
    """Return a random square matrix."""
    import numpy as np
    import scipy.sparse as sp

    rng = np.random.default_rng(1)
    m = sp.random_array((nrows, nrows), density=per_row / nrows, rng=rng, format="csr")
    m.sort_indices()
    return m


def calls() -> dict[str, Callable[[], Any]]:
    """Return what is timed within a process, by name."""
    import numpy as np

    import spdist

    small, middle, large = operands(100, 4), operands(2_000, 8), operands(60_000, 12)
    x = np.ones(60_000)
    operator = spdist.operator(large, "sell")
    found: dict[str, Callable[[], Any]] = {
        "spgemm, 400 entries": lambda: spdist.spgemm(small, small),
        "spgemm, 16,000 entries": lambda: spdist.spgemm(middle, middle),
        "spgemm, 720,000 entries": lambda: spdist.spgemm(large, large),
        "spgemm, top 5": lambda: spdist.spgemm(middle, middle, top_n=5),
        "spgemm, masked": lambda: spdist.spgemm(middle, middle, mask=middle),
        "spgemm, min_plus": lambda: spdist.spgemm(middle, middle, semiring="min_plus"),
        "matmul, 16,000 entries": lambda: spdist.matmul(middle, middle),
        "operator @ x": lambda: operator @ x,
        "operator, prepared": lambda: spdist.operator(middle, "sell"),
    }
    return found | (on_gpu() if record.has_gpu() else {})


def on_gpu() -> dict[str, Callable[[], Any]]:
    """Return calls on operands that are on the GPU, each until it is done."""
    import cupy
    import cupyx.scipy.sparse as csp

    import spdist

    def done(m: Any) -> Callable[[], Any]:
        def call() -> None:
            spdist.spgemm(m, m)
            cupy.cuda.Device().synchronize()

        return call

    sizes = ((100, 4), (2_000, 8), (60_000, 12), (500_000, 12))
    return {f"on the GPU, {n * k:,} entries": done(csp.csr_matrix(operands(n, k).tocsr())) for n, k in sizes}


def probe() -> dict[str, float]:
    """Return the least seconds of each call in this process."""
    found = {}
    for name, call in calls().items():
        call()  # compiles, or loads what is compiled
        times: list[float] = []
        end = time.perf_counter() + SECONDS
        while len(times) < CALLS or time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        found[name] = min(times)
    return found


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Yield a folder with the sources of a commit."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    place = folder / commit.replace("/", "_")
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], cwd=ROOT, check=True)
    try:
        yield place
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def run(place: Path, words: list[str], folder: Path) -> tuple[float, str]:
    """Return the seconds of a command of Python with the sources in `place`, and what it printed."""
    environment = os.environ | {"PYTHONPATH": str(place)}
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{place.name}: {' '.join(words)}: {done.stderr.strip()[-400:]}")
    return time.perf_counter() - begin, done.stdout


def round_of(place: Path, folder: Path) -> dict[str, float]:
    """Return the seconds of each case with the sources in `place`."""
    found = {name: run(place, words, folder)[0] for name, words in COMMANDS.items()}
    return found | json.loads(run(place, [str(Path(__file__).resolve()), "--probe"], folder)[1].splitlines()[-1])


def judged(old: list[float], new: list[float]) -> dict[str, Any]:
    """Return the median ratio, new over old, its spread, and whether the case is slower.

    Examples
    --------
    >>> judged([1.0, 1.0, 1.0], [1.2, 1.2, 1.21])["slower"], judged([1.0, 1.0, 1.0], [0.8, 1.04, 1.3])["slower"]
    (True, False)
    """
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    ratio = statistics.median(ratios)
    spread = max(LEAST, 3 * statistics.median(abs(one - ratio) for one in ratios))
    return {"old_s": old, "new_s": new, "ratio": ratio, "spread": spread, "slower": ratio > 1 + spread}


def main() -> int:
    """Compare, print, record."""
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("commits", nargs="*", metavar="OLD NEW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--probe", action="store_true", help="time this process' calls, and print them")
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(probe()))
        return 0
    old, new = options.commits or (str(ROOT), str(ROOT))
    seconds: dict[str, dict[str, list[float]]] = {"old": {}, "new": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with checked_out(old, folder) as before, checked_out(new, folder / "new") as after:
            run(after, ["-m", "spdist", "generate", "rmat", "A.zarr", "--scale", "12"], folder)
            sides = [("old", before), ("new", after)]
            for _, place in sides:
                round_of(place, folder)  # compiles
            for number in range(1 if options.quick else options.rounds):
                for side, place in sides if number % 2 else sides[::-1]:
                    for name, one in round_of(place, folder).items():
                        seconds[side].setdefault(name, []).append(one)
    rows = {
        name: judged(seconds["old"][name], seconds["new"][name]) for name in seconds["new"] if name in seconds["old"]
    }
    for name, row in rows.items():
        verdict = "SLOWER" if row["slower"] else ""
        times = f"{1e3 * statistics.median(row['old_s']):10.3f} ms {1e3 * statistics.median(row['new_s']):10.3f} ms"
        print(f"{name:28} {times}  {row['ratio']:.3f} +- {row['spread']:.3f} {verdict}")
    record.write({"benchmark": "compare", "old": old, "new": new, "rows": rows}, options.out)
    return int(not options.quick and any(row["slower"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
