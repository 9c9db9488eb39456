"""The parameters of Markov clustering, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.steps import OnStep
from spdist.errors import InputError

STILL = 1e-4
"""Walks have converged once their chaos is below this."""
STUBBORN = 40
"""Steps after which each further step raises the inflation: some graphs oscillate for ever."""
PRESSED = 1.001
"""Factor by which each of these steps raises the inflation."""


@dataclass(frozen=True)
class Rules:
    """How walks change from step to step."""

    inflation: float
    pre_inflation: float | None
    pruning: Pruning
    maxiter: int
    on_step: OnStep

    def __post_init__(self) -> None:
        if not self.inflation > 1:
            raise InputError(f"inflation={self.inflation!r} sharpens nothing: write a number above 1, for instance 2")
        if self.pre_inflation is not None and not self.pre_inflation > 0:
            raise InputError(f"pre_inflation={self.pre_inflation!r} must be a number above 0")

    def power(self, step: int) -> float:
        """Return the inflation of a step."""
        return self.inflation * PRESSED ** max(step - STUBBORN, 0)

    def identity(self) -> str:
        """Return the parameters that walks depend on, besides the graph and the number of steps."""
        return repr((self.inflation, self.pre_inflation, self.pruning))
