"""The clusters that converged walks lead to: attractors, and the vertices whose walks end there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from spdist.applications.markov_clustering.rows import filtered, numbers_of, sums_of
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array

SELF_SHARE = 0.999
"""Weight of a vertex's own value in the bar that its other values must reach, as in mcl."""
SLACK = 0.01
"""How far below a vertex's own value, if that is the largest, others may lie; relative, as in mcl."""


def strongest(start: int, rows: CSR) -> CSR:
    """Return the entries of converged walks that decide where a vertex belongs.

    `start`: number of the first row.
    `rows`: no row is empty.
    """
    number = numbers_of(rows)
    own = np.zeros(rows.nrows)
    loops = rows.indices == number + start
    own[number[loops]] = rows.data[loops]
    if not rows.nrows:
        return rows
    largest = np.maximum.reduceat(rows.data, rows.indptr[:-1]).astype(np.float64)
    bar = np.where(own < largest, SELF_SHARE * own + (1 - SELF_SHARE) * largest, own / (1 + SLACK))
    first = filtered(rows, rows.data >= bar[number])
    number, counts = numbers_of(first), np.diff(first.indptr)
    return filtered(first, first.data * (counts + 1)[number] >= sums_of(first)[number])


def labels_of(m: Any) -> Int64Array:
    """Return the cluster of each vertex.

    Attractors, vertices whose walk stays with them, belong together if a walk leads from one to the other. Every other
    vertex belongs to the attractors that its walk leads to; of several clusters, to the one with most attractors.

    `m`: (n, n) csr_array: the entries that `strongest` returns.
    """
    n = m.shape[0]
    attractor = m.diagonal() > 0
    between = m[attractor][:, attractor]
    _, system = connected_components(between, directed=False)
    order = np.argsort(np.argsort(-np.bincount(system, minlength=1), kind="stable"))
    labels = np.full(n, n, np.int64)
    labels[attractor] = order[system] if len(system) else []
    led = sp.csr_array(m[~attractor])
    others, filled = np.flatnonzero(~attractor), np.diff(led.indptr) > 0
    while len(others):
        reached = np.full(len(others), n)
        reached[filled] = np.minimum.reduceat(labels[led.indices], led.indptr[:-1][filled])
        reached = np.minimum(reached, labels[others])
        if np.array_equal(reached, labels[others]):
            break
        labels[others] = reached
    left = np.flatnonzero(labels == n)  # walks that lead round in a circle
    if len(left):
        labels[left] = n + connected_components(m[left][:, left], directed=False)[1]
    return _by_size(labels)


def _by_size(labels: Int64Array) -> Int64Array:
    """Return labels numbered from the largest cluster on, of equal ones by their first vertex."""
    _, first, numbers, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    rank = np.empty(len(sizes), np.int64)
    rank[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    return rank[numbers]


def joined(blocks: Iterable[CSR], n: int) -> Any:
    """Return blocks of rows as one csr_array.

    `n`: rows and columns of the result if there are no blocks.
    """
    parts = [block.to_scipy() for block in blocks]
    return sp.csr_array(sp.vstack(parts, format="csr")) if parts else sp.csr_array((n, n), dtype=np.float32)
