"""Random walks of Markov clustering in memory: on the host, where `spdist.matmul` multiplies, or on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.rows import stacked
from spdist.applications.walks import Pruning, finished, most_bytes, stochastic
from spdist.applications.walks_on_gpu import GpuWalks, first_walks_on_gpu
from spdist.foundation.threads import run_in_threads
from spdist.foundation.units import parse_bytes
from spdist.kernels.cpu.finished.inflate import thread_bounds
from spdist.kernels.engine import find_engine
from spdist.matrices.csr import CSR, from_scipy
from spdist.options import EngineKeywords
from spdist.storage.external_sort import Entries, sort_entries

SAMPLE, MANY = 100, 0.3
"""Rows of a sample of an expansion, and the share of them with too little left from which all rows are expanded at once
with all that both rules may keep."""
SORT_BYTES = 200
"""Bytes of GPU memory for each edge while both directions are sorted."""


class Walks(Protocol):
    """Walks in memory, of the host or of a GPU: `place` says which."""

    place: str

    def take(self, power: float) -> float:
        """Take a step, inflated by `power`; return the chaos."""
        ...

    @property
    def nnz(self) -> int:
        """Entries of the walks."""
        ...

    def on_host(self) -> CSR:
        """Return the walks on the host."""
        ...


def walks_of(edges: Entries, n: int, pre_inflation: float | None, pruning: Pruning, engine: EngineKeywords) -> Walks:
    """Return one step of a walk, where the engine multiplies.

    `edges`: of a graph; of those between two vertices the heaviest counts.
    `n`: vertices.
    `pre_inflation`: power to which weights are raised first.
    Returns on a GPU if the engine is "cuda" and its memory holds them whatever they become.
    """
    if fit_on_gpu(n, len(edges.rows), pruning, engine):
        return GpuWalks(first_walks_on_gpu(edges, n, pre_inflation), pruning, _gpu_limit(engine))
    return HostWalks(first_walks(edges, n, pre_inflation), pruning, engine)


def fit_on_gpu(n: int, edges: int, pruning: Pruning, engine: EngineKeywords) -> bool:
    """Whether the engine is one of GPUs, and walks cannot outgrow half of the current one's memory.

    Raises `InputError` if there is no GPU.
    """
    chosen = find_engine(engine.get("engine", "auto"))
    if not chosen.uses_gpu or chosen.uses_cpus:
        return False
    return max(2 * most_bytes(pruning, n), SORT_BYTES * edges) <= _gpu_limit(engine)


def _gpu_limit(engine: EngineKeywords) -> int:
    """Return the bytes of GPU memory that may be used."""
    from spdist.inmemory.through_gpu import check_gpu

    check_gpu(engine.get("engine", ""))
    from spdist.kernels.streaming.gpu_device import free_memory

    given = engine.get("memory_limit")
    return free_memory() if given is None else min(parse_bytes(given), free_memory())


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

        Usually rows of which too little is left are expanded again. Where a sample says that these are many, all rows
        are expanded once, with all that may be taken in again.
        """
        pruning, walks = self.pruning, self.rows.to_scipy()

        def expand(rows: Any, options: dict[str, Any]) -> CSR:
            return from_scipy(api.matmul(rows, walks, **options, **self._engine))

        if len(pruning.poor(expand(walks[_sample(walks.shape[0])], pruning.of_expansion()))) > MANY * SAMPLE:
            return _kept_in_threads(expand(walks, pruning.of_all()), pruning)
        rows = expand(walks, pruning.of_expansion())
        poor = pruning.poor(rows)
        if not len(poor):
            return rows
        return pruning.replaced(rows, poor, expand(walks[poor], pruning.of_recovery()))


def _sample(n: int) -> Any:
    """Return the numbers of some rows."""
    return np.linspace(0, n - 1, min(SAMPLE, n)).astype(np.int64)


def _kept_in_threads(rows: CSR, pruning: Pruning) -> CSR:
    """Return what both rules keep of rows, each range of rows in a thread of its own."""
    bounds = thread_bounds(rows)
    parts: list[CSR] = [rows] * (len(bounds) - 1)

    def run(i: int) -> None:
        parts[i] = pruning.kept(rows.rows(bounds[i], bounds[i + 1]))

    run_in_threads(len(parts), run)
    return stacked(parts)
