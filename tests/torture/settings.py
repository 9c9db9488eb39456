"""Hostile environments and files of settings, as `tests.fuzz.environments` makes them, each in a fresh process."""

from __future__ import annotations

import random

import spdist
from tests.fuzz import environments
from tests.torture.kills import Bench
from tests.torture.outcome import Outcome

VERDICTS = {"": "right", "hang": "hang", "traceback": "traceback", "wrong product": "wrong"}
"""Verdicts of what `environments.wrong` finds; of an exit code it is a crash, of too many or too few lines silent."""


def random_settings(bench: Bench, rng: random.Random) -> Outcome:
    """Run a command in a random environment."""
    folder, stored = bench.trial().folder, bench.stock.folder / "settings"
    folder = folder / "settings"
    folder.mkdir()
    if not stored.exists():
        stored.mkdir()
        environments.write_matrices(stored)
    environment = environments.random_environment(rng)
    code, said = environments.run(environment, stored, folder)
    problem = environments.wrong(environment, code, said, folder, spdist.open(stored / "S.zarr").to_scipy())
    verdict = VERDICTS.get(problem, "crash" if problem.startswith("exit code") else "silent")
    return Outcome("settings", str(environment), "refused" if verdict == "right" and code else verdict, said[-500:])
