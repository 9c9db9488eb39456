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
from spdist.storage import groups
from spdist.storage.atomic_replace import staged_file
from spdist.storage.lock import hold_target, remove_remains
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.stores.registry import at, normalise

STEP = ".spdist-step-"
"""Suffix of the target in the name of a step, before its number."""
STEPS_OF = "steps_of"
"""Key of the fact, of the first matrix and of the result, that holds the parameters of the iteration."""
OnStep = Callable[[int, dict[str, Any]], None]
"""Called after each step with its number and facts about it."""


def ignore_step(step: int, facts: dict[str, Any]) -> None:
    """Do nothing."""


@contextmanager
def held(steps: StoredIteration, keywords: ApplicationKeywords) -> Iterator[bool]:
    """Lock the target of an iteration; yield whether the result to resume is finished already.

    Raises if the target may not be written.
    """
    if not (keywords.get("resume", False) and steps.are_finished()):
        check_target(steps.target, overwrite=keywords.get("overwrite", False))
    with _held_with_steps(steps.target, keywords):
        yield keywords.get("resume", False) and steps.are_finished()


@contextmanager
def held_file(out: str | Path, keywords: ApplicationKeywords) -> Iterator[Path]:
    """Lock the path of a file; yield a temporary path, whose file replaces the old one at the end."""
    target, overwrite = normalise(out), keywords.get("overwrite", False)
    with _held_with_steps(target, keywords), staged_file(target, overwrite=overwrite) as place:
        yield place


@contextmanager
def _held_with_steps(target: str, keywords: ApplicationKeywords) -> Iterator[None]:
    """Lock a target; remove remains of dead runs, except steps to resume."""
    with hold_target(target, steal=keywords.get("steal", False)):
        places = [place for place in at(target).relatives() if place.startswith(f"{target}{STEP}")]
        remove_remains(target, keep=tuple(places) if keywords.get("resume", False) else ())
        yield


@contextmanager
def kept_workers(keywords: ApplicationKeywords) -> Iterator[WhereKeywords]:
    """Yield the keywords that say where all products of an iteration run; worker processes start once."""
    where = select(keywords, WhereKeywords)
    engine, count = find_engine(where.get("engine", "auto")), where.get("workers")
    if count is None or engine.mixes:
        yield where
        return
    from spdist.scheduler.executors.clients.cluster import workers

    with workers(count, engine=engine.name) as scheduler:
        kept: WhereKeywords = {**where, "workers": None, "scheduler": scheduler}
        yield kept


@dataclass(frozen=True)
class StoredIteration:
    """The stored matrices of an iteration's steps, from which a stopped iteration can resume."""

    target: str  # the result, normalised; the matrices lie beside it
    identity: str  # parameters of the iteration; steps of other parameters are removed

    def place(self, step: int, suffix: str = "") -> str:
        """Return the path of the matrix of a step; step 0 is the start of the iteration."""
        return f"{self.target}{STEP}{step}{suffix}"

    def begin(self, write: Callable[[str, dict[str, str]], object], *, resume: bool) -> int:
        """Make sure that the first matrix exists; return the last step that does.

        `write`: called as ``write(place, facts)`` to store the first matrix with these facts.
        `resume`: whether to continue from the stored steps.
        """
        first = self.place(0)
        facts = groups.read_facts(first) if resume and at(first).exists() else {}
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
        """Return the matrix of a step, if it exists and is whole."""
        with suppress(MatrixError):  # missing or unfinished; a read error must not restart the iteration
            return open_matrix(self.place(step))
        return None

    def fact(self, step: int, name: str, default: Any) -> Any:
        """Return a fact that was stored with the matrix of a step."""
        return groups.read_facts(self.place(step)).get(name, default)

    def remove(self, *, keep: tuple[int, ...] = ()) -> None:
        """Remove the matrices of all steps but some."""
        kept = {self.place(step) for step in keep}
        for place in at(self.target).relatives():
            if place.startswith(f"{self.target}{STEP}") and place not in kept:
                at(place).discard()

    def _numbers(self) -> Iterator[int]:
        for place in at(self.target).relatives():
            number = place.removeprefix(f"{self.target}{STEP}")
            if number.isdigit():
                yield int(number)
