"""Iterations of products: matrices of each step beside the result, workers that stay from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spdist.errors import MatrixError
from spdist.jobs.by_rows import put_in_place
from spdist.jobs.target import check_target
from spdist.kernels.engine import find_engine
from spdist.options import ApplicationKeywords, WhereKeywords, select
from spdist.storage import groups, locations
from spdist.storage.atomic_replace import staged_file
from spdist.storage.lock import hold_target, remove_remains
from spdist.storage.matrix import StoredMatrix, open_matrix

STEP = ".spdist-step-"
"""Begins the end of a step's name."""
STEPS_OF = "steps_of"
"""Fact of the first matrix of an iteration, and of its result: what the iteration depends on."""
OnStep = Callable[[int, dict[str, Any]], None]
"""Called after each step with its number and facts about it."""


def ignore_step(step: int, facts: dict[str, Any]) -> None:
    """Do nothing."""


@contextmanager
def held(steps: Steps, keywords: ApplicationKeywords) -> Iterator[bool]:
    """Hold the place of an iteration's result; yield whether the result that is to be resumed is there already.

    Refuses a place that may not be written.
    """
    if not (keywords.get("resume", False) and steps.are_finished()):
        check_target(steps.target, overwrite=keywords.get("overwrite", False))
    with _held_with_steps(steps.target, keywords):
        yield keywords.get("resume", False) and steps.are_finished()


@contextmanager
def held_file(out: str | Path, keywords: ApplicationKeywords) -> Iterator[Path]:
    """Hold the lock of a file's place; yield a temporary path, whose file replaces the old one at the end."""
    target, overwrite = locations.normalise(out), keywords.get("overwrite", False)
    with _held_with_steps(target, keywords), staged_file(target, overwrite=overwrite) as place:
        yield place


@contextmanager
def _held_with_steps(target: str, keywords: ApplicationKeywords) -> Iterator[None]:
    """Hold a target; remove what dead runs left there, except the steps that are to be resumed."""
    with hold_target(target, steal=keywords.get("steal", False)):
        places = [place for place in locations.relatives(target) if place.startswith(f"{target}{STEP}")]
        remove_remains(target, keep=tuple(places) if keywords.get("resume", False) else ())
        yield


@contextmanager
def kept_workers(keywords: ApplicationKeywords) -> Iterator[WhereKeywords]:
    """Yield where all products of an iteration run; worker processes that are needed start once."""
    where = select(keywords, WhereKeywords)
    engine, count = find_engine(where.get("engine", "auto")), where.get("workers")
    if where.get("scheduler") is None and engine.uses_gpu and count is None:
        from spdist.scheduler.execution.worker_process import count_gpus

        count = count_gpus() if count_gpus() > 1 else None  # one works in this process
    if count is None or engine.mixes:
        yield where
        return
    from spdist.scheduler.execution.clients.cluster import workers

    with workers(count, engine=engine.name) as scheduler:
        kept: WhereKeywords = {**where, "workers": None, "scheduler": scheduler}
        yield kept


@dataclass(frozen=True)
class Steps:
    """The matrices of the steps of an iteration, so that one that was stopped goes on where it was."""

    target: str  # the result, normalised; the matrices lie beside it
    identity: str  # what the iteration depends on. Steps of another iteration are removed.

    def place(self, step: int, suffix: str = "") -> str:
        """Return where the matrix of a step lies; of the first, 0, what the iteration begins with."""
        return f"{self.target}{STEP}{step}{suffix}"

    def begin(self, write: Callable[[str, dict[str, str]], object], *, resume: bool) -> int:
        """Make sure that the first matrix is there; return the last step that is.

        `write`: called as ``write(place, facts)``: stores the first matrix with these facts.
        `resume`: whether to go on with the steps that are there.
        """
        first = self.place(0)
        facts = groups.read_facts(first) if resume and locations.exists(first) else {}
        if facts.get(STEPS_OF) == self.identity and self.matrix(0) is not None:
            return max((step for step in self._numbers() if self.matrix(step) is not None), default=0)
        self.remove()
        write(first, {STEPS_OF: self.identity})
        return 0

    def are_finished(self) -> bool:
        """Whether the result of this iteration is in its place."""
        return groups.read_facts(self.target).get(STEPS_OF) == self.identity

    def finish(self, last: int) -> None:
        """Make the matrix of the last step the result."""
        groups.add_facts(self.place(last), {STEPS_OF: self.identity})
        put_in_place(self.place(last), self.target)

    def matrix(self, step: int) -> StoredMatrix | None:
        """Return the matrix of a step, if it is there and whole."""
        with suppress(MatrixError):  # not there, or unfinished; one that cannot be read is no reason to begin anew
            return open_matrix(self.place(step))
        return None

    def fact(self, step: int, name: str, default: Any) -> Any:
        """Return a fact that was stored with the matrix of a step."""
        return groups.read_facts(self.place(step)).get(name, default)

    def remove(self, *, keep: tuple[int, ...] = ()) -> None:
        """Remove the matrices of all steps but some."""
        kept = {self.place(step) for step in keep}
        for place in locations.relatives(self.target):
            if place.startswith(f"{self.target}{STEP}") and place not in kept:
                locations.discard(place)

    def _numbers(self) -> Iterator[int]:
        for place in locations.relatives(self.target):
            number = place.removeprefix(f"{self.target}{STEP}")
            if number.isdigit():
                yield int(number)
