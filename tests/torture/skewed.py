"""Products of skewed matrices at random limits: their memory, by their own report and measured from outside.

A process that multiplies itself first makes a small product, loads Zarr and starts a cluster: what it holds then is its
base. Zarr loads CuPy where there is one.
The base of workers is the peak of workers that made a small product. Run as a module, this file is such a process.
"""

from __future__ import annotations

import ctypes
import io
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import scipy.sparse as sp

import spdist
from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, VerdictError
from tests.torture.runs import ROOT

MIB = 1 << 20
ALLOCATOR_BYTES = 24 << 20
"""Bytes that the allocator may hold beyond the limit, as seen from outside."""
MOST_PRODUCTS = 400_000_000
"""Products of a trial: larger ones take too long."""
TRIAL_SECONDS = 300.0
POLL_SECONDS = 0.003
OPTIONS: tuple[tuple[str, ...], ...] = (
    *[()] * 5, ("--mask", "{A}"), ("--mask", "{A}", "--complement"), ("--top-n", "5"), ("--semiring", "min_plus"),
    ("--threshold", "2"), ("--transpose-a",), ("--transpose-b",), ("--axis", "0", "--top-n", "3"),
    ("--grid", "12,3,1"), ("--grid", "20,2,2"),
)  # fmt: skip
"""Options of trials; `{A}` stands for the path of A."""

Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Peak(NamedTuple):
    """What a product came to: exit code, its last line on stderr, and peak bytes by its report and from outside."""

    code: int
    line: str
    reported: int
    outside: int


@dataclass(frozen=True)
class Case:
    """A skewed product; `seed` and `kind` make A, which is multiplied by itself. The limit is in bytes."""

    kind: str
    seed: int
    limit: int
    options: tuple[str, ...] = ()
    workers: int = 0

    def __str__(self) -> str:
        """Return the case as the table of failures shows it."""
        return f"{self.kind} {self.seed}, {self.limit // MIB} MiB, {self.workers} workers, {' '.join(self.options)}"


def random_case(rng: random.Random) -> Case:
    """Return a case with a limit from 32 MiB to 1 GiB, most often a small one."""
    limit = int(32 * MIB * 2 ** rng.uniform(0, 5 if rng.random() < 0.3 else 2.2))
    workers = 2 if rng.random() < 0.2 else 0
    return Case(rng.choice(KINDS), rng.randrange(10**6), limit, rng.choice(OPTIONS), workers)


# -- skewed matrices ---------------------------------------------------------------------------------------------------


def _rmat(rng: np.random.Generator, n: int) -> Places:
    scale, count = n.bit_length() - 1, n * int(rng.integers(4, 14))
    rows, columns = np.zeros((2, count), np.int64)
    for _ in range(scale):
        u = rng.random(count)
        rows, columns = 2 * rows + (u > 0.76), 2 * columns + (((u > 0.57) & (u <= 0.76)) | (u > 0.95))
    return rows, columns


def _power_law(rng: np.random.Generator, n: int) -> Places:
    weight = np.arange(1, n + 1) ** -rng.uniform(0.5, 0.9)
    rows, columns = (rng.permutation(n)[rng.choice(n, 6 * n, p=weight / weight.sum())] for _ in range(2))
    return rows, columns


def _scattered(rng: np.random.Generator, n: int, per_row: float) -> Places:
    rows, columns = rng.integers(0, n, (2, int(n * per_row)))
    return rows, columns


def _with_hubs(rng: np.random.Generator, places: Places, n: int, *, row: bool, column: bool) -> Places:
    """Add a long row, a long column, or both through one vertex."""
    hub, line = int(rng.integers(n)), rng.choice(n, int(n * rng.uniform(0.2, 1)), replace=False)
    down = line[:4000] if row else line[:20_000]
    rows = [places[0], *([np.full(len(line), hub)] if row else []), *([down] if column else [])]
    columns = [places[1], *([line] if row else []), *([np.full(len(down), hub)] if column else [])]
    return np.concatenate(rows), np.concatenate(columns)


def _banded(rng: np.random.Generator, n: int) -> Places:
    width = int(rng.integers(1, 12))
    rows = np.tile(np.arange(n), 2 * width + 1)
    columns = np.clip(rows + np.repeat(np.arange(-width, width + 1), n), 0, n - 1)
    for _ in range(int(rng.integers(1, 4))):
        places = _with_hubs(rng, (rows, columns), n, row=bool(rng.random() < 0.5), column=False)
        rows, columns = places if rng.random() < 0.7 else _with_hubs(rng, places, n, row=False, column=True)
    return rows, columns


KINDS = ("rmat", "power law", "hub row", "hub column", "row and column", "long row", "banded")


def matrix(kind: str, seed: int) -> sp.csr_array:
    """Return a skewed matrix with small whole numbers."""
    rng = np.random.default_rng(seed)
    n = int(10 ** rng.uniform(5, 6)) if kind == "long row" else 1 << int(rng.integers(11, 16))
    if kind == "rmat":
        rows, columns = _rmat(rng, n)
    elif kind == "power law":
        rows, columns = _power_law(rng, n)
    elif kind == "banded":
        rows, columns = _banded(rng, n)
    else:
        places = _scattered(rng, n, 0.3 if kind == "long row" else rng.uniform(2, 10))
        rows, columns = _with_hubs(rng, places, n, row=kind != "hub column", column=kind.endswith("column"))
    found = sp.coo_array((np.ones(len(rows)), (rows, columns)), shape=(n, n)).tocsr()
    found.data[:] = rng.integers(1, 5, found.nnz)
    return found


# -- a trial -----------------------------------------------------------------------------------------------------------


def random_skewed_product(bench: Bench, rng: random.Random) -> Outcome:
    """Make a random skewed product, and look what it took."""
    case, trial = random_case(rng), bench.trial()
    a = matrix(case.kind, case.seed)
    while _products(case, a) > MOST_PRODUCTS:
        case = random_case(rng)
        a = matrix(case.kind, case.seed)
    return bench.judge("skewed", str(case), trial, lambda: verdict_on(case, a, trial.data))


def _products(case: Case, a: sp.csr_array) -> int:
    """Return the products of a case from the lengths of A's columns and of B's rows."""
    rows, columns = np.diff(a.indptr).astype(np.int64), np.bincount(a.indices, minlength=a.shape[1])
    left = rows if "--transpose-a" in case.options else columns
    return int(left @ (columns if "--transpose-b" in case.options else rows))


def verdict_on(case: Case, a: sp.csr_array, folder: Path) -> str:
    """Make the product of a case; return "right", or "refused" if it was refused as it must be.

    Raises
    ------
    VerdictError
        If it took more memory than its limit, is not the product, or failed; tells the peaks.
    """
    peak = measure(case, a, folder)
    if "compiling kernels" in peak.line or _is_over(case, peak):  # a machine compiles each kernel once, in 175 MiB
        peak = measure(case, a, folder)
    if peak.code == 2 and re.search(r"(row|rows) [\d, to]+ of A .* raise memory_limit to at least ", peak.line):
        return "refused"
    if peak.code != 0:
        raise VerdictError("silent", f"exit code {peak.code}: {peak.line}")
    if _is_over(case, peak):
        parts = f"{peak.reported / case.limit:.2f} reported, {peak.outside / case.limit:.2f} from outside"
        raise VerdictError("over", f"{parts}, as parts of the limit")
    if not case.options or case.options[0] == "--grid":
        c, expected = spdist.open(folder / "C.zarr").to_scipy(), a @ a
        if c.nnz != expected.nnz or (c != expected).nnz:
            raise VerdictError("wrong", "C is not A @ A")
    return "right"


def _is_over(case: Case, peak: Peak) -> bool:
    """Return whether a product took more than its limit, by its report or from outside."""
    return peak.reported > case.limit or peak.outside > case.limit + ALLOCATOR_BYTES


def measure(case: Case, a: sp.csr_array, folder: Path) -> Peak:
    """Make a product in fresh processes, and return its peaks."""
    for name in ("C", "small-C"):
        shutil.rmtree(folder / f"{name}.zarr", ignore_errors=True)
    spdist.save(folder / "A.zarr", a, overwrite=True)
    diagonal = np.arange(2000)  # as wide as A, so that it loads the same kernels
    small = sp.coo_array((np.ones(2000), (diagonal, diagonal)), shape=a.shape).tocsr()
    spdist.save(folder / "small.zarr", small, overwrite=True)
    real, first = (_words(case, folder, name) for name in ("A", "small"))
    if not case.workers:
        run = [sys.executable, "-m", "tests.torture.skewed", str(folder), json.dumps([first, real])]
        done, peaks = _run(run)
        base = int((folder / "base").read_text())
        return _peak(done, max(int((folder / "end").read_text()), *(peaks or [0])) - base)
    spdist_words = [sys.executable, "-m", "spdist"]
    bases = _run([*spdist_words, *first], of_workers=True)[1]
    done, peaks = _run([*spdist_words, *real], of_workers=True)
    return _peak(done, max(peaks, default=0) - max(bases, default=0))


def _peak(done: subprocess.CompletedProcess[str], outside: int) -> Peak:
    lines = done.stderr.strip().splitlines()
    reported = json.loads(done.stdout.strip().splitlines()[-1])["peak_memory"] if done.returncode == 0 else 0
    return Peak(done.returncode, lines[-1] if lines else "", reported, outside)


def _words(case: Case, folder: Path, name: str) -> list[str]:
    """Return the command for A, or for a small matrix that is cut as finely as large ones."""
    path, limit = str(folder / f"{name}.zarr"), case.limit if name == "A" else 256 * MIB
    options = [option.replace("{A}", path) for option in case.options]
    if name != "A" and "--grid" not in options and "--axis" not in options:
        options += ["--grid", "10,1,1"]
    c = folder / ("C.zarr" if name == "A" else "small-C.zarr")
    workers = ["--workers", str(case.workers)] if case.workers else []
    return ["multiply", path, path, str(c), "--memory-limit", str(limit), "--engine", "numba", "--json", *options,
            *workers]  # fmt: skip


def _run(words: list[str], *, of_workers: bool = False) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Run a command; return it, and the peaks of its children that were seen meanwhile if they are workers."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    peaks: dict[int, int] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    peaks[child.pid] = max(peaks.get(child.pid, 0), memory("VmHWM", child.pid))

    watcher = threading.Thread(target=watch, daemon=True)
    if of_workers:
        watcher.start()
    try:
        out, err = process.communicate(timeout=TRIAL_SECONDS)
    finally:
        ended.set()
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, out, err), list(peaks.values())


def memory(field: str, pid: int | str = "self") -> int:
    """Return a field of a process's status in bytes; 0 if the process is gone."""
    with suppress(OSError):
        found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


class _PeakSampler(threading.Thread):
    """Notes the greatest `VmHWM` of this process, which spdist resets, until it is told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()

    def run(self) -> None:
        """Note the peak every few milliseconds."""
        while not self.ended.wait(POLL_SECONDS):
            self.most = max(self.most, memory("VmHWM"))


def main(folder: Path, small: list[str], real: list[str]) -> Any:
    """Make the small product, start a cluster in this process, note the base, and make the other product."""
    import zarrs  # noqa: F401

    from spdist.cli import main as cli
    from spdist.kernels.engine import find_engine
    from spdist.scheduler.executors.clients.local_cluster import started

    with redirect_stdout(io.StringIO()):
        assert not cli(small), small
    # a longer product than the small one has Dask's scheduler
    with started(1, find_engine("numba"), MIB, processes=False):
        pass
    ctypes.CDLL(None).malloc_trim(0)
    (folder / "base").write_text(str(memory("VmRSS")))
    Path("/proc/self/clear_refs").write_text("5")
    sampler = _PeakSampler()
    sampler.start()
    try:
        return cli(real)
    finally:
        sampler.ended.set()
        sampler.join()
        (folder / "end").write_text(str(max(sampler.most, memory("VmHWM"))))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *json.loads(sys.argv[2])))
