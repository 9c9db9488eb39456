"""Flips, swaps, truncations and deletions of every file: of operands, masks, finished and unfinished products."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.torture.kills import Bench
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS, Product
from tests.torture.runs import Run, Trial

WAYS = ("flip", "truncate", "delete", "swap", "zero", "append", "copy")
"""What happens to a file; ``swap`` and ``copy`` take another one of the same kind."""


@dataclass(frozen=True)
class Damage:
    """What was done to a file.

    Attributes
    ----------
    way : str
        One of `WAYS`.
    paths : tuple of Path
        The files that were changed.
    where : int
        The byte.
    """

    way: str
    paths: tuple[Path, ...]
    where: int = 0

    def __str__(self) -> str:
        """Return the damage as the table of failures shows it."""
        names = " and ".join(
            "/".join(path.parts[-4:] if "c" in path.parts[-2:-1] else path.parts[-2:]) for path in self.paths
        )
        return f"{self.way} {names} at {self.where}"

    def is_named(self, text: str) -> bool:
        """Whether a text names one of the files, or its array and Zarr chunk."""
        return any(_names(path, text) for path in self.paths)


def _names(path: Path, text: str) -> bool:
    """Whether a text names a file, or its array and Zarr chunk, or the matrix whose metadata it is."""
    if path.name.startswith("spdist-") and path.name.removeprefix("spdist-") in text:
        return True
    matrix = next((parent for parent in path.parents if parent.suffix == ".zarr"), path)
    if path.parent.name == "c":
        array, number = path.parent.parent.name, path.name
        return array in text and re.search(rf"(?<!\d){number}(?!\d)", text.replace(str(matrix), "")) is not None
    return path.name in text or matrix.name in text


def files_of(matrix: Path, rng: random.Random) -> Path:
    """Return one of a matrix' files: as often metadata and notes as Zarr chunks of each array."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(matrix.rglob("*")):
        if path.is_file():
            kind = (
                path.parent.parent.name
                if path.parent.name == "c"
                else "metadata"
                if path.name == "zarr.json"
                else path.name
            )
            kinds.setdefault(kind, []).append(path)
    return rng.choice(kinds[rng.choice(sorted(kinds))])


def damage(matrix: Path, rng: random.Random) -> Damage:
    """Damage one file of a matrix.

    A change that leaves the bytes as they are is made again, elsewhere.
    """
    while True:
        path, way = files_of(matrix, rng), rng.choice(WAYS)
        others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
        if path.name == "zarr.json":
            others = [other for other in sorted(matrix.glob("*/zarr.json")) if other != path]
        content = path.read_bytes()
        if way in ("swap", "copy"):
            if not others:
                continue
            other = rng.choice(others)
            theirs = other.read_bytes()
            if theirs == content:
                continue
            path.write_bytes(theirs)
            if way == "copy":
                return Damage(way, (path,))
            other.write_bytes(content)
            return Damage(way, (path, other))
        where = rng.randrange(len(content)) if content else 0
        changed = _changed(content, way, where, rng)
        if changed != content:
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            return Damage(way, (path,), where)


def _changed(content: bytes, way: str, where: int, rng: random.Random) -> bytes | None:
    """Return a file's content after damage, None for no file."""
    if way == "flip" and content:
        return content[:where] + bytes([content[where] ^ (1 << rng.randrange(8))]) + content[where + 1 :]
    if way == "zero":
        length = rng.choice([1, 16, 4096])
        return content[:where] + bytes(len(content[where : where + length])) + content[where + length :]
    if way == "append":
        return content + rng.randbytes(rng.choice([1, 4, 64]))
    return {"truncate": content[:where], "delete": None}.get(way, content)


# -- trials ------------------------------------------------------------------------------------------------------------


def random_damage(bench: Bench, rng: random.Random) -> Outcome:
    """Damage something and look what a command makes of it."""
    kind = rng.choice(["operand", "operand", "mask", "finished", "finished", "unfinished", "unfinished"])
    return {"operand": operand, "mask": operand, "finished": finished, "unfinished": unfinished}[kind](bench, rng, kind)


def _refused(run: Run, done: Damage) -> None:
    """Check that a command that failed names what was damaged."""
    if not done.is_named(run.err):  # a warning may say what the last line need not repeat
        raise VerdictError("vague", f"{done}: {last_line(run)}")


def operand(bench: Bench, rng: random.Random, kind: str) -> Outcome:
    """Damage A, B or the mask before the product."""
    masked = next(product for product in PRODUCTS if product.name == "masked")
    product = masked if kind == "mask" else rng.choice([p for p in PRODUCTS if not p.replaces])
    trial = bench.trial()
    for name in "ABM":
        shutil.copytree(bench.stock.folder / f"{name}.zarr", trial.folder / f"{name}.zarr")
    name = "M" if kind == "mask" else rng.choice("AB")
    done = damage(trial.folder / f"{name}.zarr", rng)

    def act() -> str | None:
        run = bench.multiply(trial, product, "run", None, operands=trial.folder)
        if ended(run):
            bench.check_end(trial, product, run, notes=False)
            return None
        _refused(run, done)
        bench.check_between(trial, product)
        shutil.rmtree(trial.folder / f"{name}.zarr")
        shutil.copytree(bench.stock.folder / f"{name}.zarr", trial.folder / f"{name}.zarr")
        target = trial.data / "C.zarr"
        again = bench.multiply(trial, product, "again", None, *["--overwrite"] * target.exists(), operands=trial.folder)
        if not ended(again):
            raise VerdictError("stuck", f"the operand is whole again: {last_line(again)}")
        bench.check_end(trial, product, again)
        return "refused"

    return bench.judge(f"damaged {'mask' if kind == 'mask' else 'operand'}", f"{product.name}: {done}", trial, act)


def finished(bench: Bench, rng: random.Random, kind: str) -> Outcome:
    """Damage a finished C, then verify it, export it or multiply by it."""
    product = rng.choice([p for p in PRODUCTS if p.name in ("plain", "masked", "min_plus")])
    trial = bench.trial()
    target = trial.data / "C.zarr"
    shutil.copytree(bench.stock.whole(product), target)
    done = damage(target, rng)
    verb = rng.choice(["verify", "export", "multiply"])

    def act() -> str | None:
        a, b = (bench.stock.folder / f"{name}.zarr" for name in "AB")
        words: list[str | Path]
        if verb == "verify":
            options = bench.stock.words(product, target)[3:]
            keep = [w for i, w in enumerate(options) if w.startswith(("--mask", "--semiring")) or
                    (i and options[i - 1] in ("--mask", "--semiring"))]  # fmt: skip
            words = ["verify", a, b, target, *keep]
        elif verb == "export":
            words = ["export", target, trial.folder / "C.npz"]
        else:
            words = ["multiply", target, bench.stock.folder / "D.zarr", trial.data / "E.zarr", "--workers", "1",
                     "--grid", "3,1,1"]  # fmt: skip
        run = bench.launcher.start(trial.folder, verb, [*words, "--json"])
        if not ended(run):
            if '"ok": false' not in run.out:
                _refused(run, done)
            return "refused"
        _check_reading(bench, product, trial, verb, done)
        return None

    return bench.judge(f"damaged C, {verb}", f"{product.name}: {done}", trial, act)


def _check_reading(bench: Bench, product: Product, trial: Trial, verb: str, done: Damage) -> None:
    """Check that a command that took a damaged C read the right entries."""
    if verb == "verify":  # what it read is right only if nobody needs what was damaged
        run = bench.launcher.start(trial.folder, "export", ["export", trial.data / "C.zarr", trial.folder / "C.npz"])
        if not ended(run):
            raise VerdictError("wrong", f"verify says C is right; {last_line(run)}")
        verb = "export"
    if verb == "export":
        import numpy as np
        from numpy.lib.npyio import NpzFile

        expected = bench.stock.folder / "expected" / f"{product.name}.npz"
        if not expected.exists():
            run = bench.launcher.start(trial.folder, "whole", ["export", bench.stock.whole(product), expected])
            assert ended(run), run.err
        one, other = np.load(expected), np.load(trial.folder / "C.npz")
        assert isinstance(one, NpzFile)
        if set(one.files) != set(other.files) or any(not np.array_equal(one[f], other[f]) for f in one.files):
            raise VerdictError("wrong", f"{done}: exported without a word")
        return
    undamaged = bench.stock.folder / "expected" / f"{product.name}-E.zarr"
    if not undamaged.exists():
        words = ["multiply", bench.stock.whole(product), bench.stock.folder / "D.zarr",
                 undamaged, "--workers", "1", "--grid", "3,1,1"]  # fmt: skip
        run = bench.launcher.start(trial.folder, "whole", [*words, "--json"])
        assert ended(run), run.err
    from tests.torture.products import digests

    found, wanted = digests(trial.data / "E.zarr"), digests(undamaged)
    if any(found.get(name) != wanted[name] for name in wanted if "/c/" in name):
        raise VerdictError("wrong", f"{done}: multiplied without a word")


def unfinished(bench: Bench, rng: random.Random, kind: str) -> Outcome:
    """Kill a run midway, damage what it left, and resume."""
    product = rng.choice([p for p in PRODUCTS if p.name in ("plain", "inner", "masked", "replaced")])
    number = rng.randint(2, 6)
    trial = bench.trial()
    note: list[Damage] = []

    def act() -> str | None:
        point = _late_point(bench, product, rng)
        kill = {"role": point[0], "point": point[1], "number": number, "victims": ["client", "worker"]}
        run = bench.multiply(trial, product, "run", trial.arm(**kill))
        if ended(run, killed=True):
            return None
        bench.launcher.left(run)
        places = sorted(path for path in trial.data.iterdir() if _is_unfinished(path))
        if not places:
            return None
        done = damage(places[0], rng)
        note.append(done)
        again = bench.multiply(trial, product, "resume", None, "--resume")
        if ended(again):
            bench.check_end(trial, product, again)
            return None
        _refused(again, done)
        bench.check_between(trial, product)
        anew = bench.multiply(trial, product, "overwrite", None, "--overwrite")
        if not ended(anew) and "remove it yourself" in last_line(anew):  # its own mark is what was damaged
            shutil.rmtree(trial.data)
            trial.data.mkdir()
            anew = bench.multiply(trial, product, "anew", None, "--resume")
        if not ended(anew):
            raise VerdictError("stuck", f"--resume: {last_line(again)}; --overwrite: {last_line(anew)}")
        bench.check_end(trial, product, anew)
        return "refused"

    outcome = bench.judge("damaged unfinished C", f"{product.name}", trial, act)
    return Outcome(
        outcome.part, f"{product.name}: killed, then {note[0] if note else 'nothing'}", outcome.verdict, outcome.detail
    )


def _is_unfinished(path: Path) -> bool:
    """Whether an unfinished product lies here."""
    try:
        return "unfinished" in (path / "zarr.json").read_text()
    except OSError:
        return False


def _late_point(bench: Bench, product: Product, rng: random.Random) -> tuple[str, str]:
    """Return a point that is passed once per block or more, while C is written."""
    points = bench.discover(product)
    often = sorted(key for key, count in points.items() if count >= 4 and ("driver" in key[1] or "journal" in key[1]))
    return rng.choice(often)
