"""Two commands on one target at a time: one wins, the other says who holds it, and C is exactly one of the products."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.torture.kills import Bench, names_in
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS, Product, digests

PLAIN = Product("plain", ("--grid", "8,1,1"))
BACK = Product("back", ("--grid", "8,1,1"))
"""B @ A."""
HOLDERS = ("held", "holds", "lock", "another run", "is being written", "exists", "unfinished", "other matrices")
"""Words of which a refusal has one."""
PAIRS = (
    ("multiply", "back --overwrite"),
    ("multiply --overwrite", "back --overwrite"),
    ("multiply --resume", "multiply --resume"),
    ("multiply", "transpose"),
    ("multiply", "import"),
    ("multiply --overwrite", "import --overwrite"),
    ("multiply --overwrite", "transpose --overwrite"),
    ("transpose --overwrite", "import --overwrite"),
    ("multiply", "multiply"),
    ("multiply --resume", "back --overwrite"),
)


def expected(bench: Bench, kind: str) -> dict[str, str]:
    """Return the digests of C as one kind of command makes it; makes it once."""
    place = bench.stock.folder / "expected" / f"pair-{kind}.zarr"
    if not place.exists():
        folder = bench.stock.folder
        if kind == "import":
            export = bench.launcher.start(folder, "stock", ["export", folder / "M.zarr", folder / "M.npz"])
            assert ended(export), export.err
        run = bench.launcher.start(folder, "stock", _words(bench, kind, place))
        assert ended(run), run.err
    return digests(place)


def _words(bench: Bench, what: str, target: Path) -> list[str]:
    """Return the arguments of a command such as ``back --overwrite``."""
    kind, *options = what.split()
    folder = bench.stock.folder
    if kind == "transpose":
        return ["transpose", str(folder / "A.zarr"), str(target), *options]
    if kind == "import":
        return ["import", str(folder / "M.npz"), str(target), *options]
    words = bench.stock.words(PLAIN, target)
    if kind == "back":
        words[:2] = words[1::-1]
    return ["multiply", *words, *options, "--json"]


def random_pair(bench: Bench, rng: random.Random) -> Outcome:
    """Run two commands on one target at a random distance; sometimes something lies there before."""
    first, second = rng.choice(PAIRS)
    if rng.random() < 0.5:
        first, second = second, first
    kinds = [what.split()[0] for what in (first, second)]
    wanted = {kind: expected(bench, kind) for kind in kinds}
    distance = rng.uniform(0.0, 1.1 * bench.stock.seconds_of(PRODUCTS[0])) * rng.choice([0.1, 1.0])
    trial = bench.trial()
    target = trial.data / "C.zarr"
    what = f"{first}, and after {distance:.3f} s {second}"

    def act() -> str | None:
        runs = [bench.launcher.start(trial.folder, "first", _words(bench, first, target))]
        time.sleep(distance)
        runs.append(bench.launcher.start(trial.folder, "second", _words(bench, second, target)))
        done = [ended(run) for run in runs]
        if not any(done):
            raise VerdictError("gave up", f"both: {last_line(runs[0])} / {last_line(runs[1])}")
        for run, well in zip(runs, done, strict=True):
            if not well and not any(word in last_line(run) for word in HOLDERS):
                raise VerdictError("vague", f"{run.name}: {last_line(run)}")
        _check_one(target, wanted, [kind for kind, well in zip(kinds, done, strict=True) if well])
        if beside := sorted(names_in(trial.data) - {"C.zarr"}):
            raise VerdictError("left", f"beside C: {', '.join(beside)}")
        if stayed := bench.launcher.left(*runs):
            raise VerdictError("left", f"processes: {'; '.join(stayed)}")
        return "right" if all(done) else "refused"

    return bench.judge("pair", what, trial, act)


def _check_one(target: Path, wanted: dict[str, dict[str, str]], winners: list[str]) -> None:
    """Check that C is exactly what one of the commands that are done makes."""
    found = digests(target) if target.exists() else {}
    for kind in winners:
        if _same(found, wanted[kind]):
            return
    loser = next((kind for kind in wanted if _same(found, wanted[kind])), None)
    raise VerdictError(
        "wrong", f"done: {', '.join(winners)}; C is {'that of ' + loser if loser else 'neither product'}"
    )


def _same(found: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether two matrices are equal, apart from notes that a run writes about itself."""
    return found.keys() == wanted.keys() and all(found[name] == wanted[name] for name in wanted if "/" in name)
