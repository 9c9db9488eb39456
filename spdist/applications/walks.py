"""Random walks of Markov clustering: where they begin, what a step keeps of each row, whether they still change.

Rows hold where a walk from each vertex goes, as float32, and sum to 1. The graph is symmetric, so that rows here are
columns of the matrices in the thesis of van Dongen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.applications.rows import cut_rows, filtered, inflate, module_of, numbers_of, replaced, sums_of, taken
from spdist.errors import InputError
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype

DTYPE = np.dtype(np.float32)
COPIES = 3
"""Matrices of the size of the walks that a step has at a time."""
NEARLY_ONE = 0.99999
"""Share of 1 / `prune` from which values are kept: a row of equal values keeps all of them in spite of rounding."""


@dataclass(frozen=True)
class Pruning:
    """What a step of Markov clustering keeps of each row, as mcl does."""

    prune: int = 10_000  # drop values below 1 / `prune`; 0 drops none
    select: int = 1_100  # of a row that has more left keep so many, the largest; 0 keeps all
    # where less than `recover_percent` of the row is left then, take up to so many of the largest values in again; 0
    # takes none
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
        """Return the options of the product that expands rows of which too little was left."""
        return {"top_n": self.recover}

    def of_all(self) -> dict[str, Any]:
        """Return the options of a product that has all that both rules may keep."""
        return {"top_n": max(self.select, self.recover)}

    def kept(self, rows: CSR) -> CSR:
        """Return what both rules keep of rows that have all that they may keep; these rows stay."""
        first = cut_rows(rows, ProductSpec(**self.of_expansion()))
        poor = self.poor(first)
        if not len(poor):
            return first
        return self.replaced(first, poor, cut_rows(taken(rows, poor), ProductSpec(**self.of_recovery())))

    def most_entries(self, n: int) -> int:
        """Return the most entries of `n` rows after a step."""
        return n * min(n, max(self.select, self.recover) or n)

    def poor(self, rows: CSR) -> Any:
        """Return which rows of an expansion have too little left, counted from the first of these rows."""
        xp = module_of(rows)
        if not self.recover:
            return xp.zeros(0, np.int64)
        few = rows.indptr[1:] - rows.indptr[:-1] < self.recover
        return xp.flatnonzero((sums_of(rows) < self.recover_percent / 100) & few)

    def replaced(self, rows: CSR, poor: Any, again: CSR) -> CSR:
        """Return rows, those of which too little was left as they are after they were expanded again."""
        return replaced(rows, poor, self.recovered(again))

    def recovered(self, rows: CSR) -> CSR:
        """Return rows that were expanded again: of one that has enough values of the least size only these."""
        large = rows.data >= DTYPE.type(self.least)
        only = filtered(rows, large)
        counts, mass = only.indptr[1:] - only.indptr[:-1], sums_of(only)
        enough = (counts >= self.recover) | (mass >= self.recover_percent / 100)
        return filtered(rows, large | ~enough[numbers_of(rows)])


def most_bytes(pruning: Pruning, n: int) -> int:
    """Return the bytes of the walks from `n` vertices that a step has at a time, at the most."""
    return COPIES * pruning.most_entries(n) * (DTYPE.itemsize + index_dtype(n).itemsize)


def stochastic(start: int, rows: CSR, pre_inflation: float | None) -> CSR:
    """Return rows of a symmetric graph with loops, scaled to sum 1.

    `start`: number of the first row.
    """
    number = numbers_of(rows)
    edges = (rows.indices != number + start) & (rows.data > 0)
    heaviest = np.zeros(rows.nrows)
    np.maximum.at(heaviest, number[edges], rows.data[edges].astype(np.float64))
    loops = np.arange(rows.nrows)
    data = np.concatenate([rows.data[edges].astype(np.float64), np.where(heaviest > 0, heaviest, 1.0)])
    places = np.concatenate([number[edges], loops]), np.concatenate([rows.indices[edges], loops + start])
    whole = from_scipy(sp.csr_array((data, places), shape=rows.shape))
    inflate(whole, 1.0 if pre_inflation is None else pre_inflation)
    return CSR(whole.indptr, whole.indices, whole.data.astype(DTYPE), whole.shape)


def finished(start: int, rows: CSR, power: float) -> tuple[CSR, float]:
    """Return the rows of the next step, and how far from standing still the walks are.

    `start`: number of the first row.
    `rows`: rows of an expansion, cut; their values are overwritten.
    `power`: the inflation.
    Returns the largest ``(max - sum of squares) * entries`` of a row, which mcl calls chaos; 0 where each row has one
    value, or equal ones.
    """
    xp = module_of(rows)
    missing = xp.flatnonzero(rows.indptr[1:] == rows.indptr[:-1])
    if len(missing):  # nothing is left of a row: its walk stays where it is
        loops = xp.arange(len(missing) + 1, dtype=rows.indptr.dtype), (missing + start).astype(rows.indices.dtype)
        rows = replaced(rows, missing, CSR(*loops, xp.ones(len(missing), rows.dtype), (len(missing), rows.ncols)))
    return rows, inflate(rows, power)
