"""Markov clustering in memory, on the host or on a GPU."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spdist.applications.markov_clustering.attractors import joined, labels_of, strongest
from spdist.applications.markov_clustering.clustering import Clustering
from spdist.applications.markov_clustering.gpu_walks import GpuWalks, first_walks_on_gpu, fit_on_gpu, gpu_limit
from spdist.applications.markov_clustering.graphs import Graph
from spdist.applications.markov_clustering.host_walks import HostWalks, first_walks
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.markov_clustering.rules import STILL, Rules
from spdist.matrices.csr import CSR
from spdist.options import EngineKeywords
from spdist.storage.external_sort import Entries


def cluster_in_memory(graph: Graph, rules: Rules, engine: EngineKeywords) -> Clustering:
    """Cluster a graph in memory."""
    assert graph.edges is not None
    walks = _walks_of(graph.edges, graph.vertices, rules.pre_inflation, rules.pruning, engine)
    step, chaos = 0, np.inf
    while step < rules.maxiter and chaos >= STILL:
        step += 1
        chaos = walks.take(rules.power(step))
        rules.on_step(step, {"entries": walks.nnz, "chaos": chaos})
    labels = labels_of(joined([strongest(0, walks.on_host())], graph.vertices))
    return Clustering(labels, None, step, chaos, chaos < STILL, walks.place)


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


def _walks_of(edges: Entries, n: int, pre_inflation: float | None, pruning: Pruning, engine: EngineKeywords) -> Walks:
    """Return one step of a walk, where the engine multiplies.

    `edges`: of a graph; the heaviest of several edges between two vertices counts.
    `n`: vertices.
    `pre_inflation`: power to which weights are raised first.
    The walks are on a GPU if the engine is "cuda" and they cannot outgrow its memory.
    """
    if fit_on_gpu(n, len(edges.rows), pruning, engine):
        return GpuWalks(first_walks_on_gpu(edges, n, pre_inflation), pruning, gpu_limit(engine))
    return HostWalks(first_walks(edges, n, pre_inflation), pruning, engine)
