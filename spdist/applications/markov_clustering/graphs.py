"""Graphs to be clustered: matrices and lists of edges, in memory if walks on them can stay there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spdist.applications.files import file_format, imported, in_folder
from spdist.applications.markov_clustering.gpu_walks import fit_on_gpu
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.markov_clustering.rows import numbers_of
from spdist.applications.markov_clustering.walks import COPIES, most_bytes
from spdist.applications.operands import WEIGHTS, check_square, check_values, name_of, opened
from spdist.errors import InputError, MatrixError
from spdist.foundation.units import counted, parse_bytes
from spdist.kernels.engine import find_engine
from spdist.matrices.csr import from_scipy
from spdist.options import DEFAULT_MEMORY_LIMIT, EngineKeywords, ExecutionOptions, FileKeywords, TaskKeywords, select
from spdist.scheduler.planner.plan import DEFAULT_HOST_LIMIT
from spdist.storage.external_sort import Entries
from spdist.storage.formats.opening import STANDARD_INPUT
from spdist.storage.formats.registry import EDGE_OPTIONS
from spdist.storage.import_export import read_edges
from spdist.storage.matrix import StoredMatrix


@dataclass(frozen=True)
class Graph:
    """A graph whose weights are known to be sound."""

    vertices: int
    names: Sequence[str] | None  # of the vertices, if they have any
    edges: Entries | None = None  # in memory; the heaviest of several between two vertices counts
    matrix: StoredMatrix | None = None  # if edges are not in memory


def load_graph(
    graph: Any, labels: str | Path | None, pruning: Pruning, execution: ExecutionOptions,
    keywords: TaskKeywords, stack: ExitStack,
) -> Graph:  # fmt: skip
    """Return a graph, in memory if walks on it cannot outgrow the limit, or if it was there.

    `labels`: file of the names of a matrix' vertices; by default the names of its rows.
    `keywords`: of the call; the names of `FileKeywords` say how to read a file.
    `stack`: removes the matrix of a file.
    Raises `InputError, MatrixError` if it is not a graph; names what is wrong.
    """
    kind = file_format(graph, keywords)
    if kind is not None and kind.takes == EDGE_OPTIONS:
        if labels is not None:
            raise InputError(
                f"labels={str(labels)!r}: vertices of a list of edges have names in the list; leave it out"
            )
        if str(graph) != STANDARD_INPUT:  # which can be read once, and is imported
            how: Any = select(keywords, FileKeywords)
            read = read_edges(graph, most_bytes=_memory(execution), **how)
            if read is not None and _walks_fit(len(read[1]), len(read[0].rows), pruning, execution):
                return _checked(str(graph), *read)
    graph = stack.enter_context(imported(graph, in_folder(), keywords, duplicates="max"))
    matrix = opened(graph, "clusters")
    check_square(matrix)
    check_values(matrix, lambda x: np.isfinite(x) & (x >= 0), WEIGHTS)
    names = _own_names(matrix) if labels is None else _names(labels, matrix)
    if isinstance(matrix, StoredMatrix):
        fit = _walks_fit(matrix.nrows, matrix.nnz, pruning, execution)
        if not fit or COPIES * matrix.nbytes > _memory(execution):
            return Graph(matrix.nrows, names, matrix=matrix)
        matrix = matrix.to_scipy()
    rows = from_scipy(matrix)
    return Graph(rows.nrows, names, Entries(numbers_of(rows), rows.indices, rows.data))


def _memory(execution: ExecutionOptions) -> int:
    """Return the bytes of the host that a graph and its walks may take."""
    if find_engine(execution.engine).uses_gpu:
        return parse_bytes(execution.host_limit or DEFAULT_HOST_LIMIT)
    return parse_bytes(execution.memory_limit or DEFAULT_MEMORY_LIMIT)


def _walks_fit(n: int, edges: int, pruning: Pruning, execution: ExecutionOptions) -> bool:
    """Whether walks cannot outgrow the memory of a GPU or of the host; with worker processes they are always stored."""
    if execution.workers is not None or execution.scheduler is not None:
        return False
    engine: EngineKeywords = {"engine": execution.engine, "memory_limit": execution.memory_limit}
    return fit_on_gpu(n, edges, pruning, engine) or most_bytes(pruning, n) <= _memory(execution)


def _checked(path: str, edges: Entries, names: Sequence[str]) -> Graph:
    """Return the graph of a list of edges; refuse weights that none can have."""
    if not names:
        raise MatrixError(f"{path} has no edges; name another list")
    fits = np.isfinite(edges.values) & (edges.values >= 0)
    if not fits.all():
        at = int(fits.argmin())
        ends = " and ".join(repr(names[int(each[at])]) for each in (edges.rows, edges.columns))
        raise MatrixError(
            f"{path} has an edge of weight {edges.values[at]} between {ends}; {WEIGHTS} are needed: correct it"
        )
    return Graph(len(names), names, edges)


def _own_names(matrix: Any) -> Sequence[str] | None:
    """Return the names of a stored matrix' rows, if they have any."""
    names = matrix.names.readable().rows if isinstance(matrix, StoredMatrix) else None
    return None if names is None else list(names.to_array())


def _names(labels: str | Path, matrix: Any) -> Sequence[str]:
    try:
        text = Path(labels).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise InputError(f"labels={str(labels)!r} cannot be read: {error.strerror}; name another file") from None
    names = text.removesuffix("\n").split("\n") if text else []
    if len(names) != matrix.shape[0]:
        raise InputError(
            f"labels={str(labels)!r} has {counted(len(names), 'line')}, and {name_of(matrix)} "
            f"{counted(matrix.shape[0], 'vertex')}"
        )
    return names
