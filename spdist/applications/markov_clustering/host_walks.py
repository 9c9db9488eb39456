"""Random walks in memory of the host, multiplied by `spdist.matmul`."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.markov_clustering.rows import stacked
from spdist.applications.markov_clustering.walks import finished, stochastic
from spdist.foundation.threads import run_in_threads
from spdist.kernels.cpu.finished.inflate import thread_bounds
from spdist.matrices.csr import CSR, from_scipy
from spdist.options import EngineKeywords
from spdist.storage.external_sort import Entries, sort_entries

SAMPLE = 100
"""Rows of a sample of an expansion."""
MANY = 0.3
"""Share of the sample below recovery from which all rows are expanded once, with every entry that may be kept."""


def first_walks(edges: Entries, n: int, pre_inflation: float | None) -> CSR:
    """Return one step of a walk.

    `edges`: none of negative weight.
    `n`: vertices.
    `pre_inflation`: power to which weights are raised first.
    Returns the graph made symmetric by the larger weight, with a loop at each vertex as heavy as its heaviest edge;
    rows sum to 1.
    """
    rows, columns, weights = sort_entries(edges, n, "max")
    m = sp.csr_array((weights, (rows, columns)), shape=(n, n))
    return stochastic(0, from_scipy(m.maximum(sp.csr_array(m.T))), pre_inflation)


class HostWalks:
    """Walks whose products `spdist.matmul` makes, on the CPU or through a GPU that need not hold them."""

    place = "host"

    def __init__(self, rows: CSR, pruning: Pruning, engine: EngineKeywords) -> None:
        self.rows, self.pruning, self._engine = rows, pruning, engine

    def take(self, power: float) -> float:
        """Take a step; return the chaos."""
        self.rows, chaos = finished(0, self._expanded(), power)
        return chaos

    @property
    def nnz(self) -> int:
        """Entries of the walks."""
        return self.rows.nnz

    def on_host(self) -> CSR:
        """Return the walks."""
        return self.rows

    def _expanded(self) -> CSR:
        """Return the expansion, cut.

        Usually the rows below recovery are expanded again. If a sample has many such rows, all rows are expanded once,
        with every entry that may be kept.
        """
        pruning, walks = self.pruning, self.rows.to_scipy()

        def expand(rows: Any, options: dict[str, Any]) -> CSR:
            return from_scipy(api.matmul(rows, walks, **options, **self._engine))

        sample = expand(walks[_sample(walks.shape[0])], pruning.of_expansion())
        if len(pruning.rows_below_recovery(sample)) > MANY * SAMPLE:
            return _kept_in_threads(expand(walks, pruning.of_all()), pruning)
        rows = expand(walks, pruning.of_expansion())
        lost = pruning.rows_below_recovery(rows)
        if not len(lost):
            return rows
        return pruning.replaced(rows, lost, expand(walks[lost], pruning.of_recovery()))


def _sample(n: int) -> Any:
    """Return the numbers of some rows."""
    return np.linspace(0, n - 1, min(SAMPLE, n)).astype(np.int64)


def _kept_in_threads(rows: CSR, pruning: Pruning) -> CSR:
    """Apply both rules to rows, each range of rows in a thread of its own."""
    bounds = thread_bounds(rows)
    parts: list[CSR] = [rows] * (len(bounds) - 1)

    def run(i: int) -> None:
        parts[i] = pruning.kept(rows.rows(bounds[i], bounds[i + 1]))

    run_in_threads(len(parts), run)
    return stacked(parts)
