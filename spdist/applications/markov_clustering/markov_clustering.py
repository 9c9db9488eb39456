"""Markov clustering: random walks on a graph are spread, sharpened and pruned until they stay in clusters."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from spdist.applications.files import in_folder
from spdist.applications.markov_clustering.clustering import Clustering
from spdist.applications.markov_clustering.graphs import load_graph
from spdist.applications.markov_clustering.in_memory import cluster_in_memory
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.markov_clustering.rules import Rules
from spdist.applications.markov_clustering.stored_walks import StoredWalks
from spdist.applications.steps import OnStep, StoredIteration, held_file, ignore_step, kept_workers
from spdist.foundation.units import check_count
from spdist.jobs.report import Callbacks
from spdist.options import EngineKeywords, ExecutionOptions, TaskKeywords, lists_keywords, options_of
from spdist.options import select as selected
from spdist.storage.foreign import versions
from spdist.stores.registry import normalise


@lists_keywords(TaskKeywords)
@versions.watched()
def markov_clustering(
    graph: Any,
    out: str | Path | None = None,
    *,
    inflation: float = 2.0,
    pre_inflation: float | None = None,
    prune: int = 10_000,
    select: int = 1_100,
    recover: int = 1_400,
    recover_percent: float = 90.0,
    maxiter: int = 10_000,
    labels: str | Path | None = None,
    on_step: OnStep = ignore_step,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[TaskKeywords],
) -> Clustering:
    """Cluster a graph by Markov clustering [1]_, with the rules and the constants of the program mcl.

    Parameters
    ----------
    graph : (n, n) scipy.sparse matrix or array; path, URL or StoredMatrix; or path of a list of edges or another file
        Weights of 0 and more. Of the two directions of an edge, and of several edges in a list, the heaviest counts;
        loops do not. Vertices of a list have names. ``"-"`` is standard input, with `format`.
    out : str or Path, optional
        Text file for the clusters: one a line, from the largest on, vertices with tabs between. The walks of a graph
        that memory does not hold lie beside it meanwhile; without `out`, in the folder for temporary files.
    inflation : float
        Power above 1 that sharpens walks; more of it gives smaller clusters. mcl's ``-I``.
    pre_inflation : float, optional
        Power to which weights are raised first. mcl's ``-pi``.
    prune, select, recover, recover_percent
        What each step keeps of a walk: values from 1 / `prune` up, of these the `select` largest, and if that is less
        than `recover_percent` of the walk, the `recover` largest. 0 switches a rule off. mcl's ``-P``, ``-S``, ``-R``
        and ``-pct``.
    maxiter : int
        Most steps.
    labels : str or Path, optional
        File with the name of each vertex of a matrix, one a line, as `import_matrix` writes it; by default vertices of
        a stored matrix have the names of its rows.
    on_step : callable, optional
        Called after each step as ``on_step(step, facts)``, with ``entries`` and ``chaos``.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security, steal, names
        As in `multiply`. Walks stay in memory if they cannot outgrow `memory_limit`, unless workers or a scheduler are
        named; with "cuda" on the GPU if they cannot outgrow half of its limit, else on the host within `host_limit`.
        Walks on SciPy's matrices always stay in memory.
    resume : bool
        Go on with the step that an earlier call left that was stopped.
    overwrite : bool
        Replace `out`.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    Clustering

    Raises
    ------
    InputError
        If an argument is wrong; nothing has been written.
    MatrixError
        If the matrix is not square, or a weight is negative, infinite or not a number.
    SpdistError
        If the run failed.

    References
    ----------
    .. [1] S. van Dongen, "Graph clustering via a discrete uncoupling process", SIAM Journal on Matrix Analysis and
       Applications 30(1), 2008.

    Examples
    --------
    Two triangles with an edge between them:

    >>> import scipy.sparse as sp
    >>> edges = [0, 0, 1, 2, 3, 3, 4], [1, 2, 2, 3, 4, 5, 5]
    >>> found = markov_clustering(sp.csr_array(([1.0] * 7, edges), shape=(6, 6)))
    >>> found.labels, found.converged
    (array([0, 0, 0, 1, 1, 1]), True)
    """
    (execution,) = options_of(markov_clustering, keywords, ExecutionOptions)
    execution.check()
    check_count("maxiter", maxiter, "any number")
    rules = Rules(inflation, pre_inflation, Pruning(prune, select, recover, recover_percent), maxiter, on_step)
    with contextlib.ExitStack() as stack:
        place = None
        if out is not None:
            place = stack.enter_context(held_file(out, keywords))
        loaded = load_graph(graph, labels, rules.pruning, execution, keywords, stack)
        if loaded.matrix is None:
            found = cluster_in_memory(loaded, rules, selected(keywords, EngineKeywords))
        else:
            if out is None:
                out = stack.enter_context(in_folder())
            identity = f"markov_clustering {loaded.matrix.fingerprint()} {rules.identity()}"
            where = stack.enter_context(kept_workers(keywords))
            steps = StoredIteration(normalise(out), identity)
            stored = StoredWalks(steps, rules, {**where, "callbacks": callbacks})
            found = stored.cluster(loaded.matrix, resume=keywords.get("resume", False))
        clustering = replace(found, names=loaded.names if keywords.get("names", True) else None)
        if place is not None:
            clustering.write_lines(place)
        return clustering
