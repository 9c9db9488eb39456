"""The result of Markov clustering, and the file that mcl writes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spdist.matrices.dtypes import Int64Array
from spdist.storage.atomic_replace import staged_file


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
        How much the walks still changed in the last step.
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
        """Return the facts for a report."""
        sizes = self.sizes
        return {
            "clusters": len(sizes), "largest": int(sizes.max(initial=0)), "alone": int((sizes == 1).sum()),
            "steps": self.steps, "chaos": self.chaos, "converged": self.converged,
            "place": self.place,
        }  # fmt: skip
