"""A state machine: runs, kills, pairs, damage, moves and deletions in any order lead to a right C."""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.torture import damage
from tests.torture.kills import Bench, names_in
from tests.torture.outcome import Outcome, VerdictError, ended, last_line
from tests.torture.products import PRODUCTS, Product, claims_to_be_whole
from tests.torture.runs import Run

TWO = tuple(product for product in PRODUCTS if product.name in ("plain", "masked"))
MODES = ("", "--resume", "--overwrite")


class Target(RuleBasedStateMachine):
    """One target, and what may lie there.

    Attributes
    ----------
    bench : Bench
        Set before the machine runs.
    whole : set of str
        Names of the products that C may be, if it claims to be whole.
    damaged : bool
        Whether somebody changed its files.
    """

    bench: ClassVar[Bench]

    def __init__(self) -> None:
        super().__init__()
        self.trial = self.bench.trial()
        self.whole: set[str] = set()
        self.damaged = False

    @property
    def place(self) -> Path:
        """Return where C is."""
        return self.trial.data / "C.zarr"

    def matches(self, product: Product) -> bool:
        """Whether C is this product."""
        return not self.bench.stock.difference(product, self.place)

    def start(self, product: Product, mode: str, specification: Path | None = None) -> Run:
        """Start a run."""
        return self.bench.multiply(self.trial, product, "run", specification, *[mode] * bool(mode))

    def finished(self, run: Run, product: Product, mode: str) -> None:
        """Note that a run is done: C is its product; one that had nothing to do may have looked at nothing."""
        if self.damaged and mode == "--resume" and not self.matches(product):
            return
        if difference := self.bench.stock.difference(product, self.place):
            raise VerdictError("wrong", f"{mode} is done; {difference}")
        self.whole, self.damaged = {product.name}, False

    @rule(product=st.sampled_from(TWO), mode=st.sampled_from(MODES))
    def run(self, product: Product, mode: str) -> None:
        """Run a product to its end, or to a refusal that has a reason."""
        there = bool(names_in(self.trial.data))
        run = self.start(product, mode)
        if ended(run):
            self.finished(run, product, mode)
        elif not there or (mode == "--overwrite" and not self.damaged):
            raise VerdictError("stuck", f"nothing is in the way: {last_line(run)}")

    @rule(
        product=st.sampled_from(TWO), mode=st.sampled_from(MODES), choice=st.integers(0, 10**6), all_die=st.booleans()
    )
    def kill(self, product: Product, mode: str, choice: int, all_die: bool) -> None:
        """Kill the client, or all, at a point."""
        points = self.bench.discover(product)
        rng = random.Random(choice)
        role, point = rng.choice(sorted(key for key in points if key[0] == "client" or all_die))
        victims = ["client", "worker"] if all_die else ["client"]
        arming = {"role": role, "point": point, "number": rng.randint(1, points[role, point]), "victims": victims}
        run = self.start(product, mode, self.trial.arm(**arming))
        if ended(run, killed=True):
            self.finished(run, product, mode)
        self.bench.launcher.left(run)
        if self.matches(product):
            self.whole.add(product.name)

    @rule(modes=st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)))
    def two_runs(self, modes: tuple[str, str]) -> None:
        """Run both products at once."""
        runs = [
            self.bench.multiply(self.trial, product, f"run{i}", None, *[mode] * bool(mode))
            for i, (product, mode) in enumerate(zip(TWO, modes, strict=True))
        ]
        done = [product for run, product in zip(runs, TWO, strict=True) if ended(run)]
        if done and not self.damaged and not any(self.matches(product) for product in TWO):
            raise VerdictError("wrong", f"two runs: {self.bench.stock.difference(done[0], self.place)}")
        if done and (self.damaged is False or any(self.matches(product) for product in done)):
            self.whole = {product.name for product in TWO if self.matches(product)}
            self.damaged = False

    @precondition(lambda self: self.place.exists() and any(path.is_file() for path in self.place.rglob("*")))
    @rule(choice=st.integers(0, 10**6))
    def damage(self, choice: int) -> None:
        """Damage a file of C."""
        damage.damage(self.place, random.Random(choice))
        self.damaged = True

    @precondition(lambda self: self.place.exists())
    @rule(keep=st.booleans())
    def remove(self, keep: bool) -> None:
        """Delete C, or move it away."""
        if keep:
            shutil.rmtree(self.trial.folder / "moved", ignore_errors=True)
            self.place.rename(self.trial.folder / "moved")
        else:
            shutil.rmtree(self.place)
        self.whole, self.damaged = set(), False

    @invariant()
    def what_claims_to_be_whole_is_right(self) -> None:
        """Check C unless somebody damaged it."""
        if not self.damaged and claims_to_be_whole(self.place) and not any(map(self._agrees, TWO)):
            raise VerdictError("wrong", f"C claims to be whole: {self.bench.stock.difference(TWO[0], self.place)}")

    def _agrees(self, product: Product) -> bool:
        """Whether C is this product, perhaps with notes of a run that was killed while it finished."""
        parts = self.bench.stock.difference(product, self.place).split("; ")
        return all(not part or part.startswith("has too much") for part in parts)

    def teardown(self) -> None:
        """Bring the first product to its end: nothing may be left beside it."""
        try:
            run = self.start(TWO[0], "--overwrite")
            if not ended(run) and self.damaged:
                shutil.rmtree(self.place)
                run = self.start(TWO[0], "--overwrite")
            if not ended(run):
                raise VerdictError("stuck", last_line(run))
            self.bench.check_end(self.trial, TWO[0], run)
            shutil.rmtree(self.trial.folder)
        finally:
            self.bench.launcher.left()


def random_history(bench: Bench, rng: random.Random, examples: int = 1, steps: int = 6) -> Outcome:
    """Run one history; a bad one is not shrunk, since each step takes seconds, but hypothesis prints it."""
    number = rng.randrange(2**32)

    @with_seed(number)
    class Seeded(Target):
        pass

    Seeded.bench = bench
    chosen = settings(max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
                      phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False)  # fmt: skip
    # Hypothesis parses this file's source, which Python 3.11 fails at when a collection lets another thread run
    # meanwhile (cpython 106905).
    gc.disable()
    try:
        run_state_machine_as_test(Seeded, settings=chosen)
    except VerdictError as bad:
        history = " | ".join(line.strip() for line in getattr(bad, "__notes__", []))
        return Outcome("history", f"seed {number}: {history}", bad.verdict, bad.detail)
    finally:
        gc.enable()
    return Outcome("history", f"seed {number}", "right")
