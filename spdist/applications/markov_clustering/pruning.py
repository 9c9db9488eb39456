"""The entries of walks that a step keeps: threshold, selection and recovery, as in mcl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.applications.markov_clustering.rows import (
    cut_rows,
    filtered,
    module_of,
    numbers_of,
    replaced,
    sums_of,
    taken,
)
from spdist.errors import InputError
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR

DTYPE = np.dtype(np.float32)
"""Of the values of walks."""
NEARLY_ONE = 0.99999
"""Share of 1 / `prune` from which values are kept: a row of equal values keeps all of them in spite of rounding."""


@dataclass(frozen=True)
class Pruning:
    """The entries of each row that a step of Markov clustering keeps, by the rules of mcl."""

    prune: int = 10_000  # drop values below 1 / `prune`; 0 drops none
    select: int = 1_100  # maximum entries kept per row, largest first; 0 keeps all
    # if a pruned row keeps less than `recover_percent` of its sum, restore up to this many of its largest values; 0
    # restores none
    recover: int = 1_400
    recover_percent: float = 90.0

    def __post_init__(self) -> None:
        for name in ("prune", "select", "recover"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
                raise InputError(f"{name}={value!r} must be a whole number of at least 0")
        if not 0 <= self.recover_percent <= 100:
            raise InputError(f"recover_percent={self.recover_percent!r} must lie from 0 to 100")

    @property
    def least(self) -> float:
        """The least value that is kept."""
        return NEARLY_ONE / self.prune if self.prune else 0.0

    def of_expansion(self) -> dict[str, Any]:
        """Return the options of the product that expands all rows."""
        return {"threshold": self.least if self.prune else None, "top_n": self.select or None}

    def of_recovery(self) -> dict[str, Any]:
        """Return the options of the product that expands the rows below recovery again."""
        return {"top_n": self.recover}

    def of_all(self) -> dict[str, Any]:
        """Return the options of a product that keeps every entry that either rule may keep."""
        return {"top_n": max(self.select, self.recover)}

    def kept(self, rows: CSR) -> CSR:
        """Apply both rules to rows that hold every entry that either may keep; the given rows are not changed."""
        first = cut_rows(rows, ProductSpec(**self.of_expansion()))
        lost = self.rows_below_recovery(first)
        if not len(lost):
            return first
        return self.replaced(first, lost, cut_rows(taken(rows, lost), ProductSpec(**self.of_recovery())))

    def most_entries(self, n: int) -> int:
        """Return the most entries of `n` rows after a step."""
        return n * min(n, max(self.select, self.recover) or n)

    def rows_below_recovery(self, rows: CSR) -> Any:
        """Return the numbers of the pruned rows that lost too much, counted from the first of these rows."""
        xp = module_of(rows)
        if not self.recover:
            return xp.zeros(0, np.int64)
        few = rows.indptr[1:] - rows.indptr[:-1] < self.recover
        return xp.flatnonzero((sums_of(rows) < self.recover_percent / 100) & few)

    def replaced(self, rows: CSR, lost: Any, again: CSR) -> CSR:
        """Return the rows, with the rows below recovery replaced by their second expansion."""
        return replaced(rows, lost, self.recovered(again))

    def recovered(self, rows: CSR) -> CSR:
        """Drop values below the least from the rows of a second expansion, unless too few would be left."""
        large = rows.data >= DTYPE.type(self.least)
        only = filtered(rows, large)
        counts, mass = only.indptr[1:] - only.indptr[:-1], sums_of(only)
        enough = (counts >= self.recover) | (mass >= self.recover_percent / 100)
        return filtered(rows, large | ~enough[numbers_of(rows)])
