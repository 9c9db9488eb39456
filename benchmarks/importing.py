"""Seconds of ``spdist import`` for large lists of edges, from prompt to prompt, beside pandas.

Each command is a fresh process on two cores. *script* does what ``spdist import`` does, with pandas, SciPy and
zarr-python: read, number the vertices, sort, write. *read_csv* reads the file into a frame and is done. ``--baseline
FOLDER`` times another checkout in the same rounds, but for semicolons. Files lie in ``--folder``, best in memory
(/dev/shm), and hold random edges among ``VERTICES`` vertices.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record

VERTICES = 1_000_000
EDGES_AT_A_TIME = 200_000
CORES = 2
PANDAS = "import sys, pandas; pandas.read_csv(sys.argv[1], sep=sys.argv[2], header=None)"
KINDS = {
    "numbers.tsv": ("{}\t{}\t{}\n", ()),
    "names.tsv": ("gene{}\tgene{}\t{}\n", ("--names",)),
    "quoted.csv": ('"gene{}","gene{}",{}\n', ("--names",)),
    "semicolons.csv": ("gene{};gene{};{}\n", ("--names",)),
}
"""Files: how a line is written, and the options of its import."""


def write(path: Path, line: str, size: int) -> None:
    """Write a list of edges of at least `size` bytes."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        while file.tell() < size:
            a, b = rng.integers(0, VERTICES, (2, EDGES_AT_A_TIME)).tolist()
            weights = [f"{weight:.6g}" for weight in rng.random(EDGES_AT_A_TIME).tolist()]
            weights = [each.replace(".", ",") for each in weights] if "semi" in path.name else weights
            file.write("".join(line.format(*edge) for edge in zip(a, b, weights, strict=True)))


def commands(
    path: Path, target: Path, options: tuple[str, ...], baseline: Path | None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, command and environment of each peer."""
    here = Path(__file__).resolve().parent.parent
    for name, root in (("spdist", here), ("baseline", baseline)):
        if root is not None and (root == here or "semicolons" not in path.name):
            words = [sys.executable, "-m", "spdist", "import", str(path), str(target), *options, "--json"]
            yield name, words, {**os.environ, "PYTHONPATH": str(root)}
    separator = ";" if "semi" in path.name else "," if path.suffix == ".csv" else "\t"
    script = str(here / "benchmarks" / "peers" / "pandas_zarr.py")
    yield "script", [sys.executable, script, str(path), separator, str(target)], os.environ
    yield "read_csv", [sys.executable, "-c", PANDAS, str(path), separator], os.environ


def timed(words: list[str], environment: Any, target: Path) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of one process on `CORES` cores."""
    shutil.rmtree(target, ignore_errors=True)
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    before, begin = os.times(), time.perf_counter()
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   preexec_fn=lambda: os.sched_setaffinity(0, cores))  # fmt: skip
    seconds, after = time.perf_counter() - begin, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used


def main() -> None:
    """Time all kinds of lists, print a table, and write a record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("--size", type=float, default=1.0, help="GB of each list")
    parser.add_argument("--folder", type=Path, help="where files and matrices lie; by default that of temporary files")
    parser.add_argument("--baseline", type=Path, help="another checkout to time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args: argparse.Namespace = parser.parse_args()
    size, rows = int(args.size * 1e9), []
    if args.quick:
        size, args.rounds, args.kinds = 100_000, 1, args.kinds[:1]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for kind in args.kinds:
            path, target = Path(folder) / kind, Path(folder) / "A.zarr"
            write(path, KINDS[kind][0], size)
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(args.rounds + 1):
                for name, words, environment in commands(path, target, KINDS[kind][1], args.baseline):
                    found.setdefault(name, []).append(timed(words, environment, target))
            seconds = {name: median(wall for wall, _ in each[1:]) for name, each in found.items()}
            rows.append({"list": kind, "bytes": path.stat().st_size, "seconds": seconds,
                         "cpu": {name: median(cpu for _, cpu in each[1:]) for name, each in found.items()},
                         "all": found})  # fmt: skip
            shown = ", ".join(
                f"{name} {each:.2f} s ({rows[-1]['cpu'][name]:.2f} CPU)" for name, each in seconds.items()
            )
            print(f"{kind:15} {path.stat().st_size / 1e9:.2f} GB: {shown}; script / spdist "
                  f"{seconds['script'] / seconds['spdist']:.2f}", flush=True)  # fmt: skip
            path.unlink()
    record.write({"benchmark": "importing", "cores_used": CORES, "vertices": VERTICES, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
