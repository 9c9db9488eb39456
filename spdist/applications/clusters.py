"""The clusters that walks which stand still tell of, and mcl's file of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from spdist.applications.rows import filtered, numbers_of, sums_of
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array
from spdist.storage.atomic_replace import staged_file

SELF_SHARE, SLACK = 0.999, 0.01
"""Share of a vertex's own value in the bar that its other values must reach, and how far below the largest one they may
be where its own is the largest: the constants of mcl."""


@dataclass(frozen=True, eq=False)
class Clustering:
    """The clusters of a graph.

    Attributes
    ----------
    labels : (n,) int64
        The cluster of each vertex. Clusters are numbered from the largest on, of equal ones by their first vertex.
    names : list of str or None
        The vertices, if they have names.
    steps : int
        Products that were made.
    chaos : float
        How far from standing still the walks were in the last step.
    converged : bool
    place : {"host", "gpu", "storage"}
        Where the walks were.
    """

    labels: Int64Array
    names: Sequence[str] | None
    steps: int
    chaos: float
    converged: bool
    place: str = "host"

    @property
    def sizes(self) -> Int64Array:
        """Vertices of each cluster."""
        return np.bincount(self.labels)

    def clusters(self) -> Iterator[Any]:
        """Yield the vertices of each cluster: their names, or their numbers."""
        order = np.argsort(self.labels, kind="stable")
        for members in np.split(order, np.cumsum(self.sizes)[:-1]):
            yield members if self.names is None else [self.names[member] for member in members]

    def write(self, out: str | Path, *, overwrite: bool = False) -> None:
        """Write the clusters as mcl does: one a line, vertices with tabs between.

        Raises
        ------
        InputError
            If something is at `out` and `overwrite` is false.
        """
        with staged_file(out, overwrite=overwrite) as place:
            self.write_lines(place)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of mcl's file: the vertices of each cluster, with tabs between."""
        for members in self.clusters():
            yield ("\t".join(map(str, members)) + "\n").encode("utf-8", "surrogateescape")

    def write_lines(self, place: Path) -> None:
        """Write the clusters to a new file."""
        with place.open("wb") as file:
            file.writelines(self.lines())

    def summary(self) -> dict[str, Any]:
        """Return the facts that a report tells."""
        sizes = self.sizes
        return {
            "clusters": len(sizes), "largest": int(sizes.max(initial=0)), "alone": int((sizes == 1).sum()),
            "steps": self.steps, "chaos": self.chaos, "converged": self.converged,
            "place": self.place,
        }  # fmt: skip


def strongest(start: int, rows: CSR) -> CSR:
    """Return the entries of walks that stand still which say where a vertex belongs.

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
