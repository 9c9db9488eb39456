"""Markov clustering from storage to storage: the walks of each step are a stored matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.api import products as api
from spdist.applications.markov_clustering.attractors import joined, labels_of, strongest
from spdist.applications.markov_clustering.clustering import Clustering
from spdist.applications.markov_clustering.pruning import DTYPE
from spdist.applications.markov_clustering.rows import numbers_of
from spdist.applications.markov_clustering.rules import STILL, Rules
from spdist.applications.markov_clustering.walks import finished, stochastic
from spdist.applications.operands import parts
from spdist.applications.steps import StoredIteration
from spdist.matrices.dtypes import Int64Array
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at


@dataclass(frozen=True)
class StoredWalks:
    """Walks larger than memory: the matrix of each step is stored, and read in parts."""

    steps: StoredIteration
    rules: Rules
    options: dict[str, Any]

    def cluster(self, graph: StoredMatrix, *, resume: bool) -> Clustering:
        """Take steps until the walks converge; return the clusters and remove the walks."""
        step = self.steps.begin(lambda place, facts: self._write_first(graph, place, facts), resume=resume)
        chaos = self.steps.fact(step, "chaos", np.inf)
        while step < self.rules.maxiter and chaos >= STILL:
            step += 1
            chaos = self._take(step)
            self.rules.on_step(step, {"entries": open_matrix(self.steps.place(step)).nnz, "chaos": chaos})
            self.steps.remove(keep=(0, step))
        walks = open_matrix(self.steps.place(step))
        labels = labels_of(joined((strongest(start, rows) for start, rows in parts(walks)), walks.nrows))
        self.steps.remove()
        return Clustering(labels, None, step, chaos, chaos < STILL, "storage")

    def _write_first(self, graph: StoredMatrix, place: str, facts: dict[str, Any]) -> None:
        """Store one step of a walk."""
        with staged_matrix(place, overwrite=True) as stage:
            sorter = RowSorter(stage.scratch, graph.shape, graph.dtype, expected=2 * graph.nnz, duplicates="max")
            for start, rows in parts(graph):
                number = numbers_of(rows) + start
                sorter.add(Entries(number, rows.indices, rows.data))
                sorter.add(Entries(rows.indices, number, rows.data))
            writer, start = MatrixWriter(stage.url, graph.ncols, DTYPE, facts), 0
            for rows in sorter.blocks():
                writer.append(stochastic(start, rows, self.rules.pre_inflation))
                start += rows.nrows
            writer.close()

    def _take(self, step: int) -> float:
        """Store the walks after a step; return their chaos."""
        before, expanded = open_matrix(self.steps.place(step - 1)), self.steps.place(step, "-expanded")
        pruning = self.rules.pruning
        api.multiply(before, before, expanded, resume=True, **pruning.of_expansion(), **self.options)
        rows_of_all = open_matrix(expanded)
        lost = [start + pruning.rows_below_recovery(rows) for start, rows in parts(rows_of_all)]
        again = self._expand_again(step, before, np.concatenate(lost)) if sum(map(len, lost)) else None
        facts: dict[str, Any] = {"chaos": 0.0}
        at(self.steps.place(step)).discard()  # begun by a run that was killed
        writer, done = MatrixWriter(self.steps.place(step), before.ncols, DTYPE, facts), 0
        for (start, rows), numbers in zip(parts(rows_of_all), lost, strict=True):
            if again is not None and len(numbers):
                others = again.rows(done, done + len(numbers))
                rows, done = pruning.replaced(rows, numbers - start, others), done + len(numbers)
            rows, chaos = finished(start, rows, self.rules.power(step))
            facts["chaos"] = max(facts["chaos"], chaos)
            writer.append(rows)
        writer.close()
        return float(facts["chaos"])

    def _expand_again(self, step: int, before: StoredMatrix, numbers: Int64Array) -> StoredMatrix:
        """Store the rows that lost too much mass, with all candidates for recovery."""
        some, again = (self.steps.place(step, suffix) for suffix in ("-poor", "-recovered"))
        for place in (some, again):
            at(place).discard()
        writer = MatrixWriter(some, before.ncols, DTYPE, {})
        for first in range(0, len(numbers), 1 << 14):
            writer.append(before.take(numbers[first : first + (1 << 14)]))
        rows = writer.close()
        api.multiply(rows, before, again, **self.rules.pruning.of_recovery(), **self.options)
        return open_matrix(again)
