"""Time what a user waits for: commands from prompt to prompt beside scripts of `benchmarks/peers`, and public calls.

::

    python benchmarks/prompt.py --folder /dev/shm/prompt --out record.json
    python benchmarks/prompt.py --cases 27-point --engines cuda --gpus 1,2          # some of it

Each trial is a fresh process, timed from its start to its end as the shell times it: spdist's command line, or a script
that multiplies the same stored matrices by CuPy, SciPy or `dask.array` with zarr-python, which is given the number of
rows to take at a time, and does less: no compression, no checksums, no journal, rows as the product leaves them.
Programs take turns, in the other order every second round. Between trials C is looked at and removed: its offsets, its
number of entries, and rows at random places computed again; `spdist verify` checks the first C of each engine where C
is small.

Kernels are cached in folders of the run's own, one for spdist and one for the others. The first trials start with
empty ones (*cold*); small products of each kind then fill them before anything else is timed (*warm*). A command that
still compiles is run again, and its seconds are kept apart. Files are in the page cache, because they were just
written, and Python's bytecode is compiled; nothing is done about either. What earlier trials wrote is on the disk
before a trial begins, so that none waits for what another wrote.

Trials go on, round by round, while `--budget` lasts, so that the whole stays within nine minutes; what was left out is
recorded. All times are kept; medians are shown. The calls are those of `benchmarks/calls.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import record
import suite
import zarr

import spdist
from spdist.stores.registry import at

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).resolve().parent / "peers"
Row = dict[str, Any]
BLOCK_BYTES = 1 << 28
"""Of C that a script makes at a time: well within a GPU's memory, with cuSPARSE's workspace."""
PATIENCE = 240
"""Seconds after which a trial is ended."""
SAMPLES, SAMPLE_ROWS = 24, 32
VERIFY_ENTRIES = 100_000_000
"""Entries of C up to which `spdist verify` checks it too."""
CEILING_BYTES = 64 << 20
"""Written at a time when the storage is timed alone."""
CACHING = "cuda", "numba", "auto", "hybrid", "cupy_zarr"
"""Engines, and scripts, that compile kernels and keep them."""
COMPILED_S = 0.3
"""Seconds of compiling, or of loading kernels, from which a command is run again."""
INFO_RUNS = 5
"""Of commands that multiply nothing."""
Stored = Callable[[Path, Path], Any]


class Case(NamedTuple):
    """A product: its name, what stores A and B, and whether every number of workers and every script is tried."""

    name: str
    store: Stored
    every: bool = True


class Program(NamedTuple):
    """Something that multiplies stored matrices: its name, whose it is, and its command line without A, B and C."""

    name: str
    engine: str
    """Of spdist; "" for a script."""
    words: list[str]
    most: bool
    """Whether it uses all the cores, or GPUs: large products are left to such."""


def poisson(side: int, points: int = 27) -> Stored:
    """Return what stores a grid, which is A and B."""
    return lambda a, _: spdist.generate("poisson", a, dims=(side,) * 3, points=points)


def rmat(scale: int, edge_factor: int) -> Stored:
    """Return what stores an R-MAT graph, which is A and B."""
    return lambda a, _: spdist.generate("rmat", a, scale=scale, edge_factor=edge_factor)


def galerkin(side: int) -> Stored:
    """Return what stores a 27-point operator and its prolongator."""

    def store(a: Path, b: Path) -> None:
        for path, matrix in zip((a, b), suite.galerkin(side, 34), strict=True):
            spdist.save(path, matrix.to_scipy())

    return store


TINY = Case("27-point 16^3", poisson(16))
SMALL = [
    TINY,
    Case("7-point 66^3", poisson(66, 7)),
    Case("R-MAT 11 x 8", rmat(11, 8)),
    Case("A @ P 24^3", galerkin(24)),
]
"""To compile what the cases need: one of each kind, and one with more columns than one accumulator takes."""
CASES = {
    "quick": [TINY, Case("A @ P 24^3", galerkin(24), every=False)],
    "cpu": [
        TINY,
        Case("27-point 100^3", poisson(100)),
        Case("R-MAT 16 x 8", rmat(16, 8), every=False),
        Case("A @ P 153^3", galerkin(153), every=False),
    ],
    "gpu": [
        TINY,
        Case("27-point 100^3", poisson(100)),
        Case("27-point 220^3", poisson(220), every=False),
        Case("R-MAT 18 x 8", rmat(18, 8), every=False),
        Case("A @ P 153^3", galerkin(153), every=False),
    ],
}
"""C has 1.5 GB (100^3), 0.9 GB, 0.5 GB; with a GPU also 15.7 GB (220^3) and 6.0 GB."""


class Clock:
    """Seconds left of those that the benchmark may take."""

    def __init__(self, budget: float) -> None:
        self.end = time.monotonic() + budget

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return seconds < self.left()


def trial(command: list[str], environment: dict[str, str]) -> Row:
    """Run a command in a fresh process; return the seconds from its start to its end, and what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        alarm = threading.Timer(PATIENCE, process.kill)
        alarm.start()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        alarm.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines = err.read().decode(errors="replace").strip().splitlines()
        found: Row = {"s": seconds, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss << 10}
        if process.returncode:
            return found | {"failed": lines[-1][:300] if lines else f"exit code {process.returncode}"}
        return found | {"stdout": out.read().decode()}


class Product:
    """Stored operands, and one place for C, at which every program stores it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        stem = case.name.replace(" ", "_").replace("@", "x")
        self.a = folder / f"{stem}_A.zarr"
        self.b = folder / f"{stem}_B.zarr"
        if not self.a.exists():
            case.store(self.a, self.b)
        if not self.b.exists():
            self.b = self.a
        self.c = folder / "C.zarr"
        left, right = spdist.open(self.a), spdist.open(self.b)
        self.nrows, self.right = left.nrows, right.rows(0, right.nrows).to_scipy()
        self.left = left
        self.products = self._products(np.diff(self.right.indptr))
        self.nnz: int | None = None

    def _products(self, lengths: Any) -> int:
        step = max(1, self.left.nrows // 64)
        blocks = (self.left.rows(i, min(self.nrows, i + step)) for i in range(0, self.nrows, step))
        return sum(int(lengths[block.indices].sum()) for block in blocks)

    def rows_at_a_time(self, threads: int) -> int:
        """Return how many rows a script takes: blocks of C of about `BLOCK_BYTES`, at least one for each thread."""
        blocks = -(-self.products * 4 // BLOCK_BYTES)  # C has fewer bytes than 12 for each product
        return max(1, -(-self.nrows // max(threads, blocks)))

    def command(self, program: Program) -> list[str]:
        """Return the words that multiply by a program."""
        paths = [str(self.a), str(self.b), str(self.c)]
        if program.engine:
            words = ["-m", "spdist", "multiply", *paths, "--json"]
            return [sys.executable, *words, *program.words]
        script, *threads = program.words
        return [sys.executable, script, *paths, str(self.rows_at_a_time(int(threads[0]) if threads else 1)), *threads]

    def is_right(self, verify: bool) -> bool:
        """Whether C has as many entries as before, offsets that rise, and the right rows at places drawn at random.

        Parameters
        ----------
        verify : bool
            Ask `spdist verify` too, if C is not large; it wants the sorted rows that spdist stores.
        """
        c = zarr.open_group(self.c, mode="r")
        indptr = c["indptr"][:]
        nnz = int(indptr[-1])
        self.nnz = nnz if self.nnz is None else self.nnz
        if not (len(indptr) == self.nrows + 1 and nnz == self.nnz == c["data"].shape[0] == c["indices"].shape[0]):
            return False
        starts = np.random.default_rng(7).integers(0, max(1, self.nrows - SAMPLE_ROWS), SAMPLES).tolist()
        same = bool(np.diff(indptr).min() >= 0) and all(self._right_rows(c, indptr, start) for start in starts)
        return same and (not verify or nnz > VERIFY_ENTRIES or spdist.verify(self.a, self.b, self.c).ok)

    def _right_rows(self, c: Any, indptr: Any, start: int) -> bool:
        stop = min(self.nrows, start + SAMPLE_ROWS)
        part = slice(int(indptr[start]), int(indptr[stop]))
        wanted = self.left.rows(start, stop).to_scipy() @ self.right
        arrays = c["data"][part], c["indices"][part], indptr[start : stop + 1] - indptr[start]
        found = type(wanted)(arrays, shape=wanted.shape)
        for matrix in (wanted, found):
            matrix.sort_indices()
        same = np.array_equal(found.indptr, wanted.indptr) and np.array_equal(found.indices, wanted.indices)
        largest = abs(wanted.data).max(initial=0.0)
        return same and bool(np.allclose(found.data, wanted.data, rtol=1e-10, atol=1e-12 * largest))

    def measure(self, program: Program, environment: dict[str, str], verify: bool = False) -> Row:
        """Run a program once; look at C, and remove it."""
        os.sync()
        found = trial(self.command(program), environment) | {"products": self.products}
        text = found.pop("stdout", "")
        if "failed" in found:
            found["failed"] = found["failed"].replace(f"{self.a.parent}/", "")  # records hold no path
        else:
            found["right"] = self.is_right(verify and bool(program.engine))
        found["nnz_c"] = self.nnz
        if text and program.engine:
            report = json.loads(text)
            facts = {key: report.get(key) for key in ("seconds", "phases", "blocks", "workers", "peak_memory")}
            found |= {"run_s": (report.get("phases") or {}).get("run"), **facts}
        if self.c.exists():
            at(str(self.c)).remove()
        return found


def programs(args: Any) -> list[Program]:
    """Return spdist's commands and the scripts, in turns."""
    cores = record.host()["cores"]
    ours = []
    for engine in args.engines:
        on_gpu = engine == "cuda"
        ours.append(Program(f"spdist {engine}", engine, ["--engine", engine], True))  # as users write it
        kind, counts = ("GPU", gpu_counts(args)) if on_gpu else ("worker", workers(args, cores))
        for n in counts:
            name = f"spdist {engine}, {plural(n, kind)}"
            ours.append(Program(name, engine, ["--engine", engine, "--workers", str(n)], on_gpu or n == cores))
    scipy, cupy, dask = (str(PEERS / f"{name}.py") for name in ("scipy_zarr", "cupy_zarr", "dask_sparse"))
    theirs = [Program("CuPy and zarr-python", "", [cupy], True)] if record.has_gpu() else []
    theirs += [
        Program(f"SciPy and zarr-python, {plural(n, 'thread')}", "", [scipy, str(n)], n == cores)
        for n in sorted({1, cores})
    ]
    theirs.append(Program(f"dask.array of SciPy's blocks, {plural(cores, 'thread')}", "", [dask, str(cores)], False))
    return [p for p in interleaved(ours, theirs) if args.programs is None or any(w in p.name for w in args.programs)]


def plural(count: int, noun: str) -> str:
    """Return a count and its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def gpu_counts(args: Any) -> list[int]:
    """Return numbers of GPUs: those asked for that there are."""
    import cupy

    return sorted({n for n in map(int, args.gpus.split(",")) if n <= cupy.cuda.runtime.getDeviceCount()})


def workers(args: Any, cores: int) -> list[int]:
    """Return numbers of CPU workers: those asked for, at most one for each core."""
    return sorted({cores if word == "all" else min(int(word), cores) for word in args.workers.split(",") if word})


def interleaved(first: list[Program], second: list[Program]) -> list[Program]:
    """Return the programs of two lists in turns."""
    length = max(len(first), len(second))
    return [program for i in range(length) for group in (first, second) if i < len(group) for program in [group[i]]]


def environment(caches: Path, program: Program) -> dict[str, str]:
    """Return an environment with cache folders for spdist's kernels, or for those of the scripts."""
    folder = caches / ("spdist" if program.engine else "scripts")
    names = {"NUMBA_CACHE_DIR": "numba", "CUPY_CACHE_DIR": "cupy", "CUDA_CACHE_PATH": "cuda", "XDG_CACHE_HOME": "home"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **{name: str(folder / end) for name, end in names.items()}}


def warm_up(cases: list[Case], chosen: list[Program], folder: Path, caches: Path) -> list[Row]:
    """Run small products until all kernels are cached; the first of each engine, or script, is the cold one."""
    rows: list[Row] = []
    for case in cases:
        product, done = Product(case, folder), set()
        for program in chosen:
            kind = program.engine or Path(program.words[0]).stem
            if kind in done or kind not in CACHING:
                continue
            done.add(kind)
            row = {"case": case.name, "program": program.name, "kind": kind}
            row["cold"] = all(before["kind"] != kind for before in rows)
            rows.append(row | product.measure(program, environment(caches, program), verify=True))
            show_trial(rows[-1])
    return rows


def rounds(
    cases: list[Case], chosen: list[Program], count: int, measure: Callable[[Case, Program], Row], clock: Clock
) -> Iterator[list[Row]]:
    """Run every program on every case, round by round, while the budget lasts; yield the rows after each trial.

    A program that failed on a case is not tried on it again.
    """
    rows: dict[tuple[str, str], Row] = {
        (case.name, p.name): {"case": case.name, "program": p.name, "ours": bool(p.engine), "trials": [], "left_out": 0}
        for case in cases
        for p in chosen
        if case.every or p.most
    }
    yield list(rows.values())
    for number in range(count):
        for case in cases:
            for program in chosen[:: -1 if number % 2 else 1]:
                row = rows.get((case.name, program.name))
                if row is None or any("failed" in done for done in row["trials"]):
                    continue
                if not clock.allows(1.3 * row["trials"][-1]["s"] + 5 if row["trials"] else 5):
                    row["left_out"] += 1
                    continue
                found = measure(case, program)
                if (found.get("phases") or {}).get("compile", 0.0) > COMPILED_S:
                    row.setdefault("compiling_s", []).append(found["s"])
                    found = measure(case, program)
                row |= {"nnz_c": found.pop("nnz_c"), "products": found.pop("products")}
                row["trials"].append(found)
                show_trial({**row, **found})
                yield list(rows.values())


def show_trial(row: Row) -> None:
    """Print what one trial came to."""
    right = row.get("failed") or ("right" if row["right"] else "WRONG")
    inside = f"  first read to last write {row['run_s']:6.2f} s" if row.get("run_s") else ""
    cold = "  caches empty" if row.get("cold") else ""
    print(f"{row['case']:16} {row['program']:42} {row['s']:7.2f} s{inside}{cold}  {right}", flush=True)


def summarised(rows: list[Row]) -> list[Row]:
    """Return the rows with medians, and the quickest of spdist's and of the scripts over each other."""
    for row in rows:
        good = [t for t in row["trials"] if t.get("right")]
        if good:
            row["median_s"] = statistics.median(t["s"] for t in good)
            row["median_cpu_s"] = statistics.median(t["cpu_s"] for t in good)
            phases = [t["phases"] for t in good if t.get("phases")]
            names = dict.fromkeys(name for found in phases for name in found)
            row["median_phases"] = {name: statistics.median(found.get(name, 0.0) for found in phases) for name in names}
            inside = [t["run_s"] for t in good if t.get("run_s")]
            row |= {"median_run_s": statistics.median(inside)} if inside else {}
    for row in rows:
        peers = {r["program"]: r["median_s"] for r in rows
                 if r["case"] == row["case"] and not r["ours"] and "median_s" in r}  # fmt: skip
        if row["ours"] and peers and "median_s" in row:
            row["best_peer"] = min(peers, key=peers.__getitem__)
            row["over_best_peer"] = peers[row["best_peer"]] / row["median_s"]
            row["over"] = {name: seconds / row["median_s"] for name, seconds in peers.items()}
    return rows


def show(result: Row) -> None:
    """Print the compact table."""
    print(
        f"\n{'product':16} {'program':42} {'median':>8} {'inside':>7} {'CPU':>7} {'over best script':>17}  all values"
    )
    for row in result["rows"]:
        if "median_s" not in row:
            continue
        inside, ratio = row.get("median_run_s"), row.get("over_best_peer")
        print(
            f"{row['case']:16} {row['program']:42} {row['median_s']:8.2f} {f'{inside:.2f}' if inside else '':>7} "
            f"{row['median_cpu_s']:7.1f} {f'{ratio:.2f}' if ratio else '':>17}  "
            + " ".join(f"{t['s']:.2f}" for t in row["trials"])
        )
    for row in result["rows"]:
        if row.get("median_phases"):
            print(f"{row['case']:16} {row['program']:42} phases, s: "
                  + ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["median_phases"].items()))  # fmt: skip
    for name, times in result["commands"].items():
        print(f"{name:59} {statistics.median(times):8.2f}  " + " ".join(f"{t:.2f}" for t in times))
    for row in result.get("ceiling", []):
        print(f"{row['case']:16} C's bytes written by all cores, fsync       {row['s']:8.2f}")


def commands(a: Path, runs: int, surroundings: dict[str, str]) -> dict[str, list[float]]:
    """Return the seconds of commands that multiply nothing, and of Python alone."""
    spoken = {
        "python -c pass": ["-c", "pass"],
        "spdist --help": ["-m", "spdist", "--help"],
        "spdist info": ["-m", "spdist", "info", str(a)],
        "spdist plan": ["-m", "spdist", "plan", str(a), str(a)],
    }
    return {
        name: [trial([sys.executable, *words], surroundings)["s"] for _ in range(runs)]
        for name, words in spoken.items()
    }


def write_ceiling(size: int, folder: Path) -> float:
    """Return the seconds that all cores take to write so many bytes to new files there, and to make them durable."""
    threads = record.host()["cores"]
    part = np.random.default_rng(0).bytes(CEILING_BYTES)
    counts = [-(-size // CEILING_BYTES // threads)] * threads
    target = folder / "ceiling"
    target.mkdir()

    def write(number: int) -> None:
        for each in range(counts[number]):
            with (target / f"{number}-{each}").open("wb") as file:
                file.write(part)
                file.flush()
                os.fsync(file.fileno())

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds * size / (sum(counts) * CEILING_BYTES)


def ceilings(rows: list[Row], folder: Path, clock: Clock) -> Iterator[Row]:
    """Yield the seconds that C's own bytes take to be written by all cores, for each product of more than 1 GB."""
    for case, nnz in {row["case"]: row.get("nnz_c") or 0 for row in rows}.items():
        if nnz * 12 > 1e9 and clock.allows(30):
            yield {"case": case, "bytes": nnz * 12, "s": write_ceiling(nnz * 12, folder)}


def calls(quick: bool, budget: float, out: Path, surroundings: dict[str, str]) -> Row:
    """Return what `benchmarks/calls.py` records, in a fresh process."""
    words = [sys.executable, str(Path(__file__).with_name("calls.py")), "--out", str(out), "--budget", str(budget)]
    print("\ncalls", flush=True)
    done = subprocess.run(words + ["--quick"] * quick, check=False, env=surroundings)
    found: Row = json.loads(out.read_text()) if out.exists() else {"rows": []}
    return {"rows": found["rows"], "rates": found.get("rates"), "right": done.returncode == 0}


def parse() -> Any:
    """Return the arguments."""
    parser = record.parser(__doc__.splitlines()[0] if __doc__ else "")
    on_gpu, cpu = record.has_gpu(), ["auto", "numba"]
    parser.add_argument("--folder", type=Path, help="for matrices; a temporary one by default")
    parser.add_argument("--size", choices=list(CASES), default="gpu" if on_gpu else "cpu")
    parser.add_argument("--cases", nargs="*", help="parts of their names")
    parser.add_argument("--programs", nargs="*", help="parts of their names")
    parser.add_argument("--engines", nargs="*", default=["cuda", *cpu] if on_gpu else cpu)
    parser.add_argument("--workers", default="2", help="of CPU engines, besides spdist's own choice")
    parser.add_argument("--gpus", default="2", help="those that there are, besides spdist's own choice")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    parser.add_argument("--no-calls", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.size, args.rounds, args.workers = "quick", 1, ""
    return args


def main() -> int:
    """Measure, print, record."""
    args = parse()
    whole, part = Clock(args.budget), Clock(args.budget * (1.0 if args.no_calls else 0.8))
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, caches = Path(temporary), Path(temporary) / "caches"
        chosen = programs(args)
        cases = [c for c in CASES[args.size] if not args.cases or any(word in c.name for word in args.cases)]
        result: Row = {"benchmark": "prompt", "size": args.size, "storage": storage(folder)}
        result |= {"gpu": record.gpu()} if "cuda" in args.engines else {}
        result["warm_up"] = warm_up(SMALL[:1] if args.quick else SMALL, chosen, folder, caches)
        products: dict[str, Product] = {}

        def measure(case: Case, program: Program) -> Row:
            product = products.setdefault(case.name, products.get(case.name) or Product(case, folder))
            return product.measure(program, environment(caches, program))

        own = environment(caches, Program("", "numba", [], True))
        result["commands"] = commands(Product(TINY, folder).a, 2 if args.quick else INFO_RUNS, own)
        for rows in rounds(cases, chosen, args.rounds, measure, part):
            result["rows"] = summarised(rows)
            # What is measured is kept, should the run be ended before its time.
            record.write(result, args.out, quiet=True)
        result["ceiling"] = list(ceilings(result["rows"], folder, part))
        products.clear()
        if not args.no_calls:
            result["calls"] = calls(args.quick, max(10.0, whole.left()), folder / "calls.json", own)
        show(result)
        record.write(result, args.out)
    done = [*result["warm_up"], *({**row, **t} for row in result["rows"] for t in row["trials"])]
    wrong = [t for t in done if t["program"].startswith("spdist") and not t.get("right")]
    return 1 if wrong or not result.get("calls", {"right": True})["right"] else 0


def storage(folder: Path) -> str:
    """Return the kind of file system that the matrices are on."""
    found = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
