"""Random walks of Markov clustering: how they begin, how a step ends, the memory that they take.

Rows hold where a walk from each vertex goes, as float32, and sum to 1. The graph is symmetric, so that rows here are
columns of the matrices in the thesis of van Dongen.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from spdist.applications.markov_clustering.pruning import DTYPE, Pruning
from spdist.applications.markov_clustering.rows import inflate, module_of, numbers_of, replaced
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype

COPIES = 3
"""Matrices of the size of the walks that a step holds at a time."""


def most_bytes(pruning: Pruning, n: int) -> int:
    """Return the maximum bytes of the walks from `n` vertices that a step holds at a time."""
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
    """Return the rows of the next step, and their chaos.

    `start`: number of the first row.
    `rows`: rows of an expansion, cut; their values are overwritten.
    `power`: the inflation.
    Chaos, as mcl calls it, is the largest ``(max - sum of squares) * entries`` of a row: 0 if the values of each row
    are equal.
    """
    xp = module_of(rows)
    missing = xp.flatnonzero(rows.indptr[1:] == rows.indptr[:-1])
    if len(missing):  # nothing is left of a row: its walk stays where it is
        loops = xp.arange(len(missing) + 1, dtype=rows.indptr.dtype), (missing + start).astype(rows.indices.dtype)
        rows = replaced(rows, missing, CSR(*loops, xp.ones(len(missing), rows.dtype), (len(missing), rows.ncols)))
    return rows, inflate(rows, power)
