"""Operands that another program rewrites while a product reads them, at a moment or when a file of them is opened."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS, Product, digests
from tests.torture.runs import Run, Trial

KINDS = ("plain", "anndata", "own")
"""Who wrote the operands: Zarr, AnnData, spdist."""
WAYS = {
    "double": ("plain", "anndata"),
    "swap": ("plain", "anndata"),
    "whole": KINDS,
    "replace": KINDS,
    "remove": KINDS,
    "add": KINDS,
    "touch": KINDS,
}
"""What is done to an operand, and for which kinds: values of a Zarr chunk doubled, two Zarr chunks swapped, all files
rewritten one by one or replaced in one step by those of another matrix, a Zarr chunk removed or one too many added,
all files written again as they were."""
CHUNK = 4096
STOP_SECONDS = 0.002


def operands_of(bench: Bench, kind: str) -> Path:
    """Return a folder with A, B and M of a kind, and N, another matrix of their shape; made once."""
    folder = bench.stock.folder / f"of-{kind}"
    if folder.exists():
        return folder
    import anndata
    import scipy.sparse as sp
    import zarr

    for name, source in zip("ABMN", ("A", "B", "M", "B0"), strict=True):
        place = folder / f"{name}.zarr"
        stored = zarr.open_group(bench.stock.folder / f"{source}.zarr", mode="r")
        if kind == "own":
            shutil.copytree(bench.stock.folder / f"{source}.zarr", place)
            continue
        parts = [stored[array][:] for array in ("data", "indices", "indptr")]
        matrix = sp.csr_matrix(tuple(parts), shape=stored.attrs["shape"])
        if kind == "anndata":
            anndata.io.write_elem(
                zarr.open_group(folder, mode="a", zarr_format=3),
                place.name,
                matrix,
                dataset_kwargs={"chunks": (CHUNK,)},
            )
            continue
        group = zarr.open_group(place, mode="w", zarr_format=3)
        group.attrs.put({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(matrix.shape)})
        for array in ("data", "indices", "indptr"):
            values = getattr(matrix, array)
            group.create_array(array, shape=values.shape, dtype=values.dtype, chunks=(CHUNK,))[:] = values
    return folder


def rewrite(matrix: Path, way: str, rng: random.Random) -> str:
    """Rewrite a matrix; return what was done."""
    import zarr

    other = matrix.parent.parent / "N.zarr"
    array = matrix / rng.choice(["data", "data", "indices"]) / "c"
    chunks = sorted(array.iterdir(), key=lambda path: int(path.name))
    chunk = rng.choice(chunks)
    where = f"{array.parent.name}/{chunk.name}"
    if way == "double":
        values = zarr.open_group(matrix, mode="r+")["data"]
        first = rng.randrange(len(chunks)) * values.chunks[0]
        values[first : first + values.chunks[0]] = 2 * values[first : first + values.chunks[0]]
        return f"from {first}"
    if way == "swap":
        contents = chunks[0].read_bytes(), chunk.read_bytes()
        chunks[0].write_bytes(contents[1])
        chunk.write_bytes(contents[0])
    elif way == "whole":
        for path in sorted(path for path in other.rglob("*") if path.is_file()):
            place = matrix / path.relative_to(other)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
        return ""
    elif way == "replace":
        ready = matrix.parent.parent / "ready.zarr"
        shutil.copytree(other, ready)
        matrix.rename(matrix.parent.parent / "old.zarr")
        ready.rename(matrix)
        return ""
    elif way == "remove":
        chunk.unlink()
    elif way == "add":
        where = f"{array.parent.name}/{len(chunks)}"
        (array / str(len(chunks))).write_bytes(chunk.read_bytes())
    elif way == "touch":
        for path in (path for path in matrix.rglob("*") if path.is_file()):
            path.write_bytes(path.read_bytes())
    return where


def random_rewrite(bench: Bench, rng: random.Random) -> Outcome:
    """Rewrite A, B or the mask while a product runs; C is wholly that of one state, or refused and then made anew."""
    kind, product = rng.choice(KINDS), rng.choice([p for p in PRODUCTS if p.name != "min_plus"])
    name = rng.choice("ABM" if product.name == "masked" else "AB")
    way = rng.choice([way for way, kinds in WAYS.items() if kind in kinds])
    trial, operands = bench.trial(), operands_of(bench, kind)
    for path in operands.glob("*.zarr"):
        shutil.copytree(path, (trial.folder if path.stem == "N" else trial.data) / path.name)
    matrix = trial.data / f"{name}.zarr"
    old = _expected(bench, product, kind)
    seconds = rng.uniform(0.0, 1.05 * bench.stock.seconds_of(product))
    stop = _random_open(bench, product, kind, name, rng) if bench.launcher.preload and rng.random() < 0.6 else None
    moment = f"after {seconds:.2f} s" if stop is None else f"at open {stop[1]} of it by a {stop[0]}"
    what = f"{product.name}: {way} {kind} {name} {moment}"
    notes: list[str] = []

    def act() -> str | None:
        calls = {} if stop is None else {"calls": f"openread {stop[1]} stop 0 {matrix}/", "call_roles": [stop[0]]}
        run = bench.multiply(trial, product, "run", trial.arm(**calls), operands=trial.data)
        _wait(trial, run, seconds, stops=stop is not None)
        notes.append(rewrite(matrix, way, rng))
        _go_on(trial)
        if ended(run):
            if _entries(trial.data / "C.zarr") != old:
                _check_new(bench, trial, product, run)
            _check_nothing_left(bench, trial, run)
            return None
        if not re.search(rf"\b{name}\.zarr", run.err):
            raise VerdictError("vague", last_line(run))
        bench.check_between(trial, product)
        _bring_back(bench, trial, product, matrix, operands / matrix.name, old, rng)
        return "refused"

    outcome = bench.judge("operand rewritten", what, trial, act)
    return Outcome(outcome.part, f"{what} {' '.join(notes)}", outcome.verdict, outcome.detail)


def _random_open(bench: Bench, product: Product, kind: str, name: str, rng: random.Random) -> tuple[str, int]:
    """Return a role, and which of its openings of an operand's files is the moment; runs a product once."""
    key = f"opens of {name} in {product.name} of {kind}"
    if key not in bench.points:
        trial = bench.trial()
        for path in operands_of(bench, kind).glob("*.zarr"):
            shutil.copytree(path, trial.data / path.name)
        calls = f"log 0 fail 0 {trial.data / name}.zarr/"
        specification = trial.arm(calls=calls, call_roles=["client", "worker"])
        run = bench.multiply(trial, product, "discovery", specification, operands=trial.data)
        assert ended(run), run.err
        counts = Counter((role, pid) for role, pid, what in trial.hits() if what.startswith("call.openread "))
        most: dict[tuple[str, str], int] = {}
        for (role, _), count in counts.items():
            most[role, "openread"] = max(most.get((role, "openread"), 0), count)
        bench.points[key] = most
        shutil.rmtree(trial.folder)
    most = bench.points[key]
    role = rng.choice(sorted(role for role, _ in most))
    return role, rng.randint(1, most[role, "openread"])


def _processes(trial: Trial) -> list[psutil.Process]:
    found = []
    for entry in (trial.folder / "pids").iterdir():
        with suppress(psutil.Error):
            found.append(psutil.Process(int(entry.name.split(".")[0])))
    return found


def _wait(trial: Trial, run: Run, seconds: float, *, stops: bool) -> None:
    """Wait for the moment: some seconds, or until a process has stopped itself; or for the end."""
    end = time.monotonic() + (run.launcher.seconds if stops else seconds)
    while time.monotonic() < end and run.poll() is None:
        if stops and trial.fired and any(_is_stopped(process) for process in _processes(trial)):
            return
        time.sleep(STOP_SECONDS)


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _go_on(trial: Trial) -> None:
    for process in _processes(trial):
        with suppress(psutil.Error):
            os.kill(process.pid, signal.SIGCONT)


# -- what C must be ----------------------------------------------------------------------------------------------------


def _entries(matrix: Path) -> dict[str, str]:
    """Return digests of the Zarr chunks of a matrix."""
    return {name: digest for name, digest in digests(matrix).items() if "/c/" in name}


def _expected(bench: Bench, product: Product, kind: str) -> dict[str, str]:
    """Return C's Zarr chunks of an undisturbed run."""
    place = bench.stock.folder / "expected" / f"{product.name}-of-{kind}.zarr"
    if not place.exists():
        words = bench.stock.words(product, place, operands_of(bench, kind))
        run = bench.launcher.start(bench.stock.folder, "whole", ["multiply", *words, "--json"])
        assert ended(run), run.err
    return _entries(place)


def _check_new(bench: Bench, trial: Trial, product: Product, run: Run) -> None:
    """Check that a C that is not that of the operands at the start is that of the operands now."""
    place = trial.folder / "now.zarr"
    words = bench.stock.words(product, place, trial.data)
    now = bench.launcher.start(trial.folder, "now", ["multiply", *words, "--json"])
    if not ended(now):
        raise VerdictError(
            "wrong", f"C is not that of the old operands, and the new ones are refused: {last_line(now)}"
        )
    if _entries(place) != _entries(trial.data / "C.zarr"):
        raise VerdictError("wrong", "C is a mixture")


def _check_nothing_left(bench: Bench, trial: Trial, run: Run) -> None:
    beside = sorted({path.name for path in trial.data.iterdir()} - {"C.zarr", "A.zarr", "B.zarr", "M.zarr"})
    if beside:
        raise VerdictError("left", f"beside C: {', '.join(beside)}")
    if stayed := bench.launcher.left(run):
        raise VerdictError("left", f"processes: {'; '.join(stayed)}")


def _bring_back(
    bench: Bench, trial: Trial, product: Product, matrix: Path, original: Path, old: dict[str, str], rng: random.Random
) -> None:
    """Put the operand back as it was, and resume or overwrite: no row of the mixture may be in C."""
    shutil.rmtree(matrix)
    shutil.copytree(original, matrix)
    is_there = (trial.data / "C.zarr").exists()
    how = "--overwrite" if is_there or rng.random() < 0.5 else "--resume"
    run = bench.multiply(trial, product, "again", None, how, operands=trial.data)
    if not ended(run):
        raise VerdictError("stuck", f"{how}: {last_line(run)}")
    if _entries(trial.data / "C.zarr") != old:
        raise VerdictError("wrong", f"{how}: C has rows of a mixture")
    _check_nothing_left(bench, trial, run)
