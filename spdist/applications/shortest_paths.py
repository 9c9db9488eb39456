"""Lengths of shortest paths: from some vertices or between all pairs, optionally limited in hops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.files import beside, imported
from spdist.applications.operands import check_square, check_values, copy_of, mode_of, opened, parts, place_of_result
from spdist.applications.steps import OnStep, StoredIteration, held, ignore_step, kept_workers
from spdist.applications.vertices import rows_of_vertices
from spdist.foundation.units import check_count
from spdist.jobs.report import Callbacks
from spdist.matrices.csr import CSR, from_scipy
from spdist.options import (
    EngineKeywords,
    ExecutionOptions,
    TaskKeywords,
    lists_keywords,
    options_of,
    select,
)
from spdist.storage.foreign import versions
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.anndata_frames import check_axes

ROUNDINGS = 1000
"""Number of roundings by which a path may become shorter without counting as changed."""


@lists_keywords(TaskKeywords)
@versions.watched()
def shortest_paths(
    graph: Any,
    out: str | Path | None = None,
    *,
    sources: Sequence[int | str] | None = None,
    hops: int | None = None,
    on_step: OnStep = ignore_step,
    callbacks: Callbacks | None = None,
    **keywords: Unpack[TaskKeywords],
) -> Any:
    """Find the lengths of shortest paths, by products over min_plus.

    Parameters
    ----------
    graph : (n, n) scipy.sparse matrix or array; path, URL or StoredMatrix; or path of a list of edges or another file
        The length of an edge from i to j in row i and column j: real, 0 or more. A file is imported to a temporary
        matrix beside D; of several edges from one vertex to another, the shortest counts.
    out : str or Path, optional
        Where to store D; required for a stored graph and for a file. Matrices of the steps lie beside it while they
        are made.
    sources : sequence of int or str, optional
        Vertices from which paths start, by default all: rows, counted from 0, or names of rows.
    hops : int, optional
        Most edges of a path; by default any number.
    on_step : callable, optional
        Called after each step as ``on_step(step, facts)``, with ``hops`` and ``pairs``.
    callbacks, engine, memory_limit, host_limit, workers, scheduler, security, overwrite, steal, names
        As in `multiply`. The engine is not "scipy".
    resume : bool
        Go on with the steps that an earlier call left that was stopped. A file is imported again.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    (n, n) or (len(sources), n) csr_array, or StoredMatrix
        In memory if the graph is and there is no `out`. Pairs without a path have no entry.

    Raises
    ------
    InputError
        If an argument is wrong, or a source is not a vertex.
    MatrixError
        If the matrix is not square, or a length is negative or not a number.
    SpdistError
        If the run failed.

    Notes
    -----
    From sources, D <- min(D, D A) goes on for `hops` steps or until nothing changes. For all pairs D <- min(D, D D)
    doubles the hops in each step [1]_.

    References
    ----------
    .. [1] A. Aho, J. Hopcroft, J. Ullman, "The Design and Analysis of Computer Algorithms", section 5.9, 1974.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> shortest_paths(sp.csr_array([[0.0, 2.0, 9.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])).toarray()
    array([[0., 2., 5.],
           [0., 0., 3.],
           [0., 0., 0.]])
    """
    (execution,) = options_of(shortest_paths, keywords, ExecutionOptions)
    execution.check()
    check_count("hops", hops, "any number")
    with imported(graph, beside(out, "paths", keywords), keywords, duplicates="min") as operand:
        matrix = opened(operand, "paths")
        place = place_of_result(out, matrix, "paths")
        check_square(matrix)
        first = None if sources is None else rows_of_vertices(sources, matrix)
        check_axes(place, (matrix.shape[0] if first is None else len(first), matrix.shape[0]))
        check_values(matrix, lambda x: x >= 0, "lengths of 0 and more")  # NaN is neither
        search = _Search(matrix, first, hops, on_step)
        if not isinstance(matrix, StoredMatrix):
            found = search.in_memory(select(keywords, EngineKeywords))
            return found if out is None else api.save(place, found, **mode_of(keywords))
        steps = StoredIteration(place, f"shortest_paths {matrix.fingerprint()} {first} {hops}")
        with held(steps, keywords) as is_finished:
            if not is_finished:
                with kept_workers(keywords) as where:
                    more = {**where, "callbacks": callbacks, "names": keywords.get("names", True)}
                    steps.finish(search.stored(steps, more, resume=keywords.get("resume", False)))
            steps.remove()
    return open_matrix(place)


@dataclass(frozen=True)
class _Search:
    """The paths to find: from each source a row of D, by products over min_plus."""

    edges: Any
    sources: Sequence[int] | None  # rows of the vertices from which paths start; None for all
    hops: int | None  # most edges of a path; None for any number
    on_step: OnStep

    def steps(self) -> Iterator[tuple[int, bool]]:
        """Yield for each step the hops after it, and whether it multiplies D by itself instead of by the edges."""
        done = 1 if self.sources is None else 0
        while self.hops is None or done < self.hops:
            doubles = self.sources is None and (self.hops is None or 2 * done <= self.hops)
            done += done if doubles else 1
            yield done, doubles

    def first_rows(self) -> Any:
        """Return a row for each source, with length 0 at itself."""
        sources, n, dtype = self.sources or (), self.edges.shape[0], self.edges.dtype
        places = np.arange(len(sources)), np.asarray(sources)
        return sp.csr_array((np.zeros(len(sources), dtype), places), shape=(len(sources), n))

    def in_memory(self, engine: EngineKeywords) -> Any:
        """Return D of edges in memory."""
        edges = _with_loops(0, from_scipy(self.edges)).to_scipy()
        before = edges if self.sources is None else self.first_rows()
        for step, (hops, doubles) in enumerate(self.steps(), 1):
            right = before if doubles else edges
            after = sp.csr_array(api.matmul(before, right, semiring="min_plus", **engine))
            self.on_step(step, {"hops": hops, "pairs": after.nnz})
            converged, before = _are_same(before, after), after
            if converged:
                break
        return before

    def stored(self, kept: StoredIteration, options: dict[str, Any], *, resume: bool) -> int:
        """Take the missing steps; return the number of the step whose matrix is D.

        The matrix of step 0 is the edges, with loops. With sources, step 1 has the first D.
        """
        first, last = (0 if self.sources is None else 1), self._begin(kept, options["names"], resume)
        for step, (hops, doubles) in enumerate(self.steps(), first + 1):
            if step < last:
                continue
            before, after = kept.place(step - 1), kept.place(step)
            if step > last:
                right = before if doubles else kept.place(0)
                api.multiply(before, right, after, semiring="min_plus", resume=True, **options)
                self.on_step(step - first, {"hops": hops, "pairs": open_matrix(after).nnz})
                last = step
            earlier = kept.matrix(step - 1)  # removed if the run that took this step went on
            if earlier is not None and _are_same(earlier, open_matrix(after)):
                break
            kept.remove(keep=(0, step))
        return last

    def _begin(self, kept: StoredIteration, names: bool, resume: bool) -> int:
        """Store the matrices before the first product, if they are missing; return the last step that is stored."""

        def write(place: str, facts: dict[str, str]) -> None:
            copy_of(self.edges, place, _with_loops, self.edges.dtype, names, facts=facts)

        last = kept.begin(write, resume=resume)
        if self.sources is None or last >= 1:
            return last
        of_edges = self.edges.names.readable().rows if names else None
        of_sources = None if of_edges is None else of_edges.to_array()[list(self.sources)]
        api.save(kept.place(1), self.first_rows(), row_names=of_sources)
        return 1


def _with_loops(start: int, rows: CSR) -> CSR:
    """Return rows of edges with a loop of length 0 at each vertex, so that shorter paths stay."""
    number = np.repeat(np.arange(rows.nrows), np.diff(rows.indptr))
    other = rows.indices != number + start
    loops = np.arange(rows.nrows)
    data = np.concatenate([rows.data[other], np.zeros(rows.nrows, rows.dtype)])
    places = np.concatenate([number[other], loops]), np.concatenate([rows.indices[other], loops + start])
    return from_scipy(sp.csr_array((data, places), shape=rows.shape))


def _are_same(p: Any, q: Any) -> bool:
    """Whether two matrices are equal up to rounding errors, which may shorten a path for many steps.

    `p, q`: of one shape; paths in `q` are no longer than in `p`.
    """
    if p.nnz != q.nnz:
        return False
    slack = ROUNDINGS * np.finfo(p.dtype).eps if p.dtype.kind == "f" else 0.0
    for start, rows in parts(p):
        other = q.rows(start, start + rows.nrows) if isinstance(q, StoredMatrix) else from_scipy(q)
        if not np.array_equal(rows.indices, other.indices) or (rows.data - other.data > slack * rows.data).any():
            return False
    return True
