"""Triangles of a graph, by a product that is masked with the graph itself and never whole."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.files import imported, in_folder
from spdist.applications.operands import check_square, opened, parts
from spdist.jobs.report import Callbacks
from spdist.matrices.dtypes import Int64Array
from spdist.options import CountKeywords, ExecutionOptions, WhereKeywords, lists_keywords, options_of, select
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.foreign import versions
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter


@dataclass(frozen=True)
class TriangleCount:
    """The triangles of a graph.

    Attributes
    ----------
    triangles, vertices, edges : int
        An edge counts once, in whatever direction or directions it is stored; loops do not count.
    """

    triangles: int
    vertices: int
    edges: int


@lists_keywords(CountKeywords)
@versions.watched()
def triangles(
    graph: Any,
    *,
    folder: str | Path | None = None,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[CountKeywords],
) -> TriangleCount:
    """Count the triangles of a graph: paths of two edges that a third one closes.

    Parameters
    ----------
    graph : (n, n) scipy.sparse matrix or array; path, URL or StoredMatrix; or path of a list of edges or another file
        An edge for each entry, in either direction; values do not count. A file is imported to a temporary matrix.
    folder : str or Path, optional
        Where a stored graph's edges lie, in another order, until they are counted; all workers must see it. By default
        the folder for temporary files. The matrix of a file lies there too.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security
        As in `multiply`.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    TriangleCount

    Raises
    ------
    MatrixError
        If the matrix is not square.
    SpdistError
        If the run failed.

    Notes
    -----
    With L the part of the adjacency matrix below the diagonal, the triangles are the sum of L L inside L over plus_pair
    [1]_: what the mask leaves out is not multiplied, and no product is stored. Vertices are put in order of their
    degrees first, so that no row of L is much longer than the root of the number of edges.

    References
    ----------
    .. [1] A. Azad, A. Buluc, J. Gilbert, "Parallel triangle counting and enumeration using matrix algebra", IPDPSW
       2015.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> triangles(sp.csr_array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]))
    TriangleCount(triangles=2, vertices=4, edges=5)
    """
    (execution,) = options_of(triangles, keywords, ExecutionOptions)
    execution.check()
    with contextlib.ExitStack() as stack:
        graph = stack.enter_context(imported(graph, in_folder(folder), keywords, duplicates="first"))
        matrix = opened(graph, "triangles")
        check_square(matrix)
        order, n = _by_degree(matrix), matrix.shape[0]
        if isinstance(matrix, StoredMatrix):
            lower: Any = _stored_lower_part(matrix, order, stack.enter_context(in_folder(folder)))
        else:
            found = _lower(matrix.tocoo().row, matrix.indices, order)
            lower = sp.csr_array((found.values, (found.rows, found.columns)), shape=(n, n))  # adds up duplicates
        options: dict[str, Any] = {"semiring": "plus_pair", "mask": lower, **select(keywords, WhereKeywords)}
        count = api.reduce(lower, lower, "sum", callbacks=callbacks, **options)
        return TriangleCount(int(count), n, lower.nnz)


def _by_degree(m: Any) -> Int64Array:
    """Return the rank of each vertex by degree; an edge that is stored twice counts twice."""
    degrees = np.zeros(m.shape[0], np.int64)
    for start, rows in parts(m):
        degrees[start : start + rows.nrows] += np.diff(rows.indptr)
        degrees += np.bincount(rows.indices, minlength=m.shape[0])
    places = np.empty_like(degrees)
    places[np.argsort(degrees, kind="stable")] = np.arange(m.shape[0])
    return places


def _lower(rows: Any, columns: Any, order: Int64Array) -> Entries:
    """Return the edges from the vertex of higher rank to the other, without loops."""
    one, other = order[rows], order[columns]
    edges = one != other
    low, high = np.minimum(one[edges], other[edges]), np.maximum(one[edges], other[edges])
    return Entries(high, low, np.ones(len(low), np.int8))


def _stored_lower_part(m: StoredMatrix, order: Int64Array, place: str) -> StoredMatrix:
    """Store each edge of a graph once, with vertices ordered by degree."""
    with staged_matrix(place, overwrite=True) as stage:
        sorter = RowSorter(stage.scratch, m.shape, np.dtype(np.int8), expected=m.nnz, duplicates="first")
        for start, rows in parts(m):
            numbers = np.repeat(np.arange(start, start + rows.nrows), np.diff(rows.indptr))
            sorter.add(_lower(numbers, rows.indices, order))
        writer = MatrixWriter(stage.url, m.ncols, np.dtype(np.int8), {})
        for block in sorter.blocks():
            writer.append(block)
        writer.close()
    return open_matrix(place)
