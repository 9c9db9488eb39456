"""Random walks of Markov clustering: where they begin, what a step keeps of each row, whether they still change.

Rows hold where a walk from each vertex goes, as float32, and sum to 1. The graph is symmetric, so that rows here are
columns of the matrices in the thesis of van Dongen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError
from spdist.kernels.cpu.finished.inflate import inflate, thread_bounds
from spdist.kernels.cpu.multiply import cut
from spdist.kernels.cpu.threads import run_in_threads
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import Int64Array

DTYPE = np.dtype(np.float32)
NEARLY_ONE = 0.99999
"""Share of 1 / `prune` from which values are kept: a row of equal values keeps all of them in spite of rounding."""


@dataclass(frozen=True)
class Pruning:
    """What a step of Markov clustering keeps of each row, as mcl does.

    Attributes
    ----------
    prune : int
        Drop values below 1 / `prune`; 0 drops none.
    select : int
        Of a row that has more left keep so many, the largest; 0 keeps all.
    recover : int
        Where less than `recover_percent` of the row is left then, take up to so many of the largest values in again;
        0 takes none.
    recover_percent : float
    """

    prune: int = 10_000
    select: int = 1_100
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
        """Return what both rules keep of rows that have all that they may keep."""
        copy = CSR(rows.indptr.copy(), rows.indices.copy(), rows.data.copy(), rows.shape)
        first = cut(copy, ProductSpec(**self.of_expansion()))
        poor = self.poor(first)
        if not len(poor):
            return first
        again = cut(from_scipy(rows.to_scipy()[poor]), ProductSpec(**self.of_recovery()))
        return replaced(first, poor, self.recovered(again))

    def most_entries(self, n: int) -> int:
        """Return the most entries of `n` rows after a step."""
        return n * min(n, max(self.select, self.recover) or n)

    def poor(self, rows: CSR) -> Int64Array:
        """Return which rows of an expansion have too little left, counted from the first of these rows."""
        if not self.recover:
            return np.empty(0, np.int64)
        left = sums_of(rows) < self.recover_percent / 100
        return np.flatnonzero(left & (np.diff(rows.indptr) < self.recover))

    def recovered(self, rows: CSR) -> CSR:
        """Return rows that were expanded again: of one that has enough values of the least size only these."""
        large = rows.data >= DTYPE.type(self.least)
        of_row = numbers_of(rows)
        counts = np.bincount(of_row[large], minlength=rows.nrows)
        mass = np.bincount(of_row[large], rows.data[large], minlength=rows.nrows)
        enough = (counts >= self.recover) | (mass >= self.recover_percent / 100)
        return filtered(rows, large | ~enough[of_row])


def first_walks(m: Any, pre_inflation: float | None) -> Any:
    """Return one step of a walk in memory.

    Parameters
    ----------
    m : csr_array
        Weights of edges, none negative.
    pre_inflation : float or None
        Power to which weights are raised first.

    Returns
    -------
    csr_array
        The graph made symmetric by the larger weight, with a loop at each vertex as heavy as its heaviest edge; rows
        sum to 1.
    """
    return stochastic(0, from_scipy(sp.csr_array(m).maximum(sp.csr_array(m.T))), pre_inflation).to_scipy()


def stochastic(start: int, rows: CSR, pre_inflation: float | None) -> CSR:
    """Return rows of a symmetric graph with loops, scaled to sum 1.

    Parameters
    ----------
    start : int
        Number of the first row.
    rows : CSR
    pre_inflation : float or None
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

    Parameters
    ----------
    start : int
        Number of the first row.
    rows : CSR
        Rows of an expansion, cut; their values are overwritten.
    power : float
        The inflation.

    Returns
    -------
    CSR
    float
        The largest ``(max - sum of squares) * entries`` of a row, which mcl calls chaos; 0 where each row has one
        value, or equal ones.
    """
    lengths = np.diff(rows.indptr)
    if not lengths.all():  # nothing is left of a row: its walk stays where it is
        missing = np.flatnonzero(lengths == 0)
        places = np.concatenate([numbers_of(rows), missing]), np.concatenate([rows.indices, missing + start])
        data = np.concatenate([rows.data, np.ones(len(missing), rows.dtype)])
        rows = from_scipy(sp.csr_array((data, places), shape=rows.shape))
    chaos = inflate(rows, power)
    return rows, chaos


def replaced(rows: CSR, numbers: Int64Array, others: CSR) -> CSR:
    """Return rows, some of them replaced.

    Parameters
    ----------
    rows : CSR
    numbers : (k,) int64
        Which, rising.
    others : CSR
        The `k` rows in place of these.
    """
    stays = np.ones(rows.nrows, np.bool_)
    stays[numbers] = False
    kept = filtered(rows, stays[numbers_of(rows)])
    lengths = np.diff(kept.indptr)
    lengths[numbers] = np.diff(others.indptr)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    new = np.repeat(~stays, lengths)
    indices, data = np.empty(indptr[-1], rows.indices.dtype), np.empty(indptr[-1], rows.dtype)
    indices[new], data[new] = others.indices, others.data
    indices[~new], data[~new] = kept.indices, kept.data
    return CSR(indptr, indices, data, rows.shape)


def in_threads(rows: CSR, work: Callable[[CSR], CSR]) -> CSR:
    """Return rows that a function makes of ranges of rows, each range in a thread of its own."""
    bounds = thread_bounds(rows)
    parts: list[CSR] = [rows] * (len(bounds) - 1)

    def run(i: int) -> None:
        parts[i] = work(rows.rows(bounds[i], bounds[i + 1]))

    run_in_threads(len(parts), run)
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    indices, data = (np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "data"))
    return CSR(np.concatenate([[0], np.cumsum(lengths)]), indices, data, (len(lengths), rows.ncols))


def numbers_of(rows: CSR) -> Int64Array:
    """Return the row of each entry."""
    return np.repeat(np.arange(rows.nrows), np.diff(rows.indptr))


def sums_of(rows: CSR) -> Any:
    """Return the sum of each row."""
    return np.bincount(numbers_of(rows), rows.data, minlength=rows.nrows)


def filtered(rows: CSR, keep: Any) -> CSR:
    """Return rows with some of their entries."""
    lengths = np.bincount(numbers_of(rows)[keep], minlength=rows.nrows)
    return CSR(np.concatenate([[0], np.cumsum(lengths)]), rows.indices[keep], rows.data[keep], rows.shape)
