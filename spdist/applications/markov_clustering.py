"""Markov clustering: random walks on a graph are spread, sharpened and pruned until they stay in clusters."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from spdist.api import products as api
from spdist.applications.clusters import Clustering, joined, labels_of, strongest
from spdist.applications.files import in_folder
from spdist.applications.graphs import Graph, load_graph
from spdist.applications.operands import parts
from spdist.applications.rows import numbers_of
from spdist.applications.steps import OnStep, Steps, held_file, ignore_step, kept_workers
from spdist.applications.walks import DTYPE, Pruning, finished, stochastic
from spdist.applications.walks_in_memory import walks_of
from spdist.errors import InputError
from spdist.foundation.units import check_count
from spdist.jobs.report import Callbacks
from spdist.matrices.dtypes import Int64Array
from spdist.options import EngineKeywords, ExecutionOptions, TaskKeywords, lists, options_of
from spdist.options import select as selected
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.foreign import versions
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at, normalise

STILL = 1e-4
"""Chaos below which walks stand still."""
STUBBORN, PRESSED = 40, 1.001
"""Steps after which each further one raises the inflation by a factor: some graphs go round in a circle for ever."""


@lists(TaskKeywords)
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
        Those of SciPy's matrices always stay in memory.
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
    rules = _Rules(inflation, pre_inflation, Pruning(prune, select, recover, recover_percent), maxiter, on_step)
    with contextlib.ExitStack() as stack:
        place = None
        if out is not None:
            place = stack.enter_context(held_file(out, keywords))
        loaded = load_graph(graph, labels, rules.pruning, execution, keywords, stack)
        if loaded.matrix is None:
            found = _in_memory(loaded, rules, selected(keywords, EngineKeywords))
        else:
            if out is None:
                out = stack.enter_context(in_folder())
            identity = f"markov_clustering {loaded.matrix.fingerprint()} {rules.identity()}"
            where = stack.enter_context(kept_workers(keywords))
            stored = _StoredWalks(Steps(normalise(out), identity), rules, {**where, "callbacks": callbacks})
            found = stored.cluster(loaded.matrix, resume=keywords.get("resume", False))
        clustering = replace(found, names=loaded.names if keywords.get("names", True) else None)
        if place is not None:
            clustering.write_lines(place)
        return clustering


@dataclass(frozen=True)
class _Rules:
    """How walks change from step to step."""

    inflation: float
    pre_inflation: float | None
    pruning: Pruning
    maxiter: int
    on_step: OnStep

    def __post_init__(self) -> None:
        if not self.inflation > 1:
            raise InputError(f"inflation={self.inflation!r} sharpens nothing: write a number above 1, for instance 2")
        if self.pre_inflation is not None and not self.pre_inflation > 0:
            raise InputError(f"pre_inflation={self.pre_inflation!r} must be a number above 0")

    def power(self, step: int) -> float:
        """Return the inflation of a step."""
        return self.inflation * PRESSED ** max(step - STUBBORN, 0)

    def identity(self) -> str:
        """Return what walks depend on besides the graph."""
        return repr((self.inflation, self.pre_inflation, self.pruning))


def _in_memory(graph: Graph, rules: _Rules, engine: EngineKeywords) -> Clustering:
    """Cluster a graph in memory."""
    assert graph.edges is not None
    walks = walks_of(graph.edges, graph.vertices, rules.pre_inflation, rules.pruning, engine)
    step, chaos = 0, np.inf
    while step < rules.maxiter and chaos >= STILL:
        step += 1
        chaos = walks.take(rules.power(step))
        rules.on_step(step, {"entries": walks.nnz, "chaos": chaos})
    labels = labels_of(joined([strongest(0, walks.on_host())], graph.vertices))
    return Clustering(labels, None, step, chaos, chaos < STILL, walks.place)


@dataclass(frozen=True)
class _StoredWalks:
    """Walks that memory does not hold: the matrix of each step is stored, and read some rows at a time."""

    steps: Steps
    rules: _Rules
    options: dict[str, Any]

    def cluster(self, graph: StoredMatrix, *, resume: bool) -> Clustering:
        """Take steps until walks stand still; return the clusters and remove the walks."""
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
        poor = [start + pruning.poor(rows) for start, rows in parts(rows_of_all)]
        again = self._expand_again(step, before, np.concatenate(poor)) if sum(map(len, poor)) else None
        facts: dict[str, Any] = {"chaos": 0.0}
        at(self.steps.place(step)).discard()  # begun by a run that was killed
        writer, done = MatrixWriter(self.steps.place(step), before.ncols, DTYPE, facts), 0
        for (start, rows), numbers in zip(parts(rows_of_all), poor, strict=True):
            if again is not None and len(numbers):
                others = again.rows(done, done + len(numbers))
                rows, done = pruning.replaced(rows, numbers - start, others), done + len(numbers)
            rows, chaos = finished(start, rows, self.rules.power(step))
            facts["chaos"] = max(facts["chaos"], chaos)
            writer.append(rows)
        writer.close()
        return float(facts["chaos"])

    def _expand_again(self, step: int, before: StoredMatrix, numbers: Int64Array) -> StoredMatrix:
        """Store rows of the expansion of which too little was left, with all that may be taken in again."""
        some, again = (self.steps.place(step, suffix) for suffix in ("-poor", "-recovered"))
        for place in (some, again):
            at(place).discard()
        writer = MatrixWriter(some, before.ncols, DTYPE, {})
        for first in range(0, len(numbers), 1 << 14):
            writer.append(before.take(numbers[first : first + (1 << 14)]))
        rows = writer.close()
        api.multiply(rows, before, again, **self.rules.pruning.of_recovery(), **self.options)
        return open_matrix(again)
