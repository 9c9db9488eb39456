"""Lengths of shortest paths: from some vertices or between all pairs, optionally limited in hops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import scipy.sparse as sp

from spdist.api import products as api
from spdist.applications.files import beside, imported
from spdist.applications.operands import check_square, check_values, copy_of, mode_of, opened, parts, place_of_result
from spdist.applications.steps import OnStep, StoredIteration, held, ignore_step, kept_workers
from spdist.errors import InputError
from spdist.foundation.units import check_count, counted
from spdist.jobs.report import Callbacks
from spdist.matrices.csr import CSR, from_scipy
from spdist.options import (
    ApplicationKeywords,
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
        first = None if sources is None else _rows_of(sources, matrix)
        check_axes(place, (matrix.shape[0] if first is None else len(first), matrix.shape[0]))
        check_values(matrix, lambda x: x >= 0, "lengths of 0 and more")  # NaN is neither
        if not isinstance(matrix, StoredMatrix):
            found = _in_memory(matrix, first, hops, on_step, keywords)
            return found if out is None else api.save(place, found, **mode_of(keywords))
        identity = f"shortest_paths {matrix.fingerprint()} {first} {hops}"
        steps, resume = StoredIteration(place, identity), keywords.get("resume", False)
        with held(steps, keywords) as is_finished:
            if not is_finished:
                with kept_workers(keywords) as where:
                    more = {**where, "callbacks": callbacks, "names": keywords.get("names", True)}
                    steps.finish(_stored(matrix, first, hops, steps, resume, on_step, more))
            steps.remove()
    return open_matrix(place)


def _rows_of(sources: Sequence[int | str], matrix: Any) -> list[int]:
    """Return the rows of vertices given by number or by name.

    Raises `InputError` if one is not a vertex.
    """
    n = matrix.shape[0]
    if isinstance(sources, str) or not len(sources) or not all(isinstance(x, int | np.integer | str) for x in sources):
        raise InputError(
            f"sources={sources!r} is not a list of vertices: name some, counted from 0, for instance [0, 17]"
        )
    named = matrix.row_names if isinstance(matrix, StoredMatrix) else None
    wanted = {one for one in sources if isinstance(one, str)}
    rows: dict[str, list[int]] = {one: [] for one in wanted}
    for row, name in enumerate(named if named is not None and wanted else ()):
        if name in wanted:
            rows[name].append(row)
    has_numbers = named is None or not any(name.isdigit() for name in named)
    found = [_row_of(one, rows, has_numbers, n) for one in sources]
    if wrong := [one for one in found if not 0 <= one < n]:
        raise InputError(f"sources: vertex {wrong[0]} of a graph of {counted(n, 'vertex')}; they are counted from 0")
    return found


def _row_of(source: int | str, rows: dict[str, list[int]], has_numbers: bool, n: int) -> int:
    """Return the row of a vertex: a text is its name or, if no vertex has a number as its name, its number."""
    if not isinstance(source, str):
        return int(source)
    if has_numbers and source.isdecimal() and source.isascii():
        return int(source)
    if len(rows[source]) != 1:
        times = f"is the name of {len(rows[source]):,} vertices" if rows[source] else "is the name of no vertex"
        raise InputError(f"sources: {source!r} {times} of {n:,}; name others")
    return rows[source][0]


def _schedule(sources: Sequence[int] | None, hops: int | None) -> Iterator[tuple[int, bool]]:
    """Yield for each step the hops after it, and whether it multiplies D by itself instead of by the edges."""
    done = 1 if sources is None else 0
    while hops is None or done < hops:
        doubles = sources is None and (hops is None or 2 * done <= hops)
        done += done if doubles else 1
        yield done, doubles


def _in_memory(
    matrix: Any, sources: Sequence[int] | None, hops: int | None, on_step: OnStep, keywords: ApplicationKeywords
) -> Any:
    edges = _with_loops(0, from_scipy(matrix)).to_scipy()
    before = edges if sources is None else _first_rows(edges.shape[0], sources, edges.dtype)
    for step, (done, doubles) in enumerate(_schedule(sources, hops), 1):
        after = sp.csr_array(
            api.matmul(before, before if doubles else edges, semiring="min_plus", **select(keywords, EngineKeywords))
        )
        on_step(step, {"hops": done, "pairs": after.nnz})
        done_with, before = _are_same(before, after), after
        if done_with:
            break
    return before


def _stored(
    matrix: StoredMatrix,
    sources: Sequence[int] | None,
    hops: int | None,
    steps: StoredIteration,
    resume: bool,
    on_step: OnStep,
    options: dict[str, Any],
) -> int:
    """Take the missing steps; return the number of the step whose matrix is D.

    The matrix of step 0 is the edges, with loops. With sources, step 1 has the first D.
    """

    def write(place: str, facts: dict[str, str]) -> None:
        copy_of(matrix, place, _with_loops, matrix.dtype, options["names"], **facts)

    first = 0 if sources is None else 1
    last = steps.begin(write, resume=resume)
    if last < first:
        names = matrix.names.readable().rows if options["names"] else None
        named = None if names is None else names.to_array()[list(sources or ())]
        api.save(steps.place(1), _first_rows(matrix.nrows, sources or (), matrix.dtype), row_names=named)
        last = 1
    for step, (done, doubles) in enumerate(_schedule(sources, hops), first + 1):
        before, after = steps.place(step - 1), steps.place(step)
        if step < last:
            continue
        if step > last:
            right = before if doubles else steps.place(0)
            api.multiply(before, right, after, semiring="min_plus", resume=True, **options)
            on_step(step - first, {"hops": done, "pairs": open_matrix(after).nnz})
            last = step
        earlier = steps.matrix(step - 1)  # removed if the run that took this step went on
        if earlier is not None and _are_same(earlier, open_matrix(after)):
            break
        steps.remove(keep=(0, step))
    return last


def _with_loops(start: int, rows: CSR) -> CSR:
    """Return rows of edges with a loop of length 0 at each vertex, so that shorter paths stay."""
    number = np.repeat(np.arange(rows.nrows), np.diff(rows.indptr))
    other = rows.indices != number + start
    loops = np.arange(rows.nrows)
    data = np.concatenate([rows.data[other], np.zeros(rows.nrows, rows.dtype)])
    places = np.concatenate([number[other], loops]), np.concatenate([rows.indices[other], loops + start])
    return from_scipy(sp.csr_array((data, places), shape=rows.shape))


def _first_rows(n: int, sources: Sequence[int], dtype: np.dtype[Any]) -> Any:
    """Return a row for each source, with length 0 at itself."""
    places = np.arange(len(sources)), np.asarray(sources)
    return sp.csr_array((np.zeros(len(sources), dtype), places), shape=(len(sources), n))


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
