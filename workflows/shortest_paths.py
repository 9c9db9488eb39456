"""Lengths of shortest paths: of at most some hops from some vertices, or between all pairs.

::

    python workflows/shortest_paths.py JOB.yaml [--set key=value ...]

A holds the lengths of edges, none negative. With `sources` D has a row for each of them, and D <- min(D, D A) over
min_plus goes on for `hops` steps, or until nothing changes. Without, D <- min(D, D D) doubles the hops in each step:
all pairs [1]_. Each step is a product of its own, stored beside `out`; a job that was stopped goes on with the step it
was at. Pairs without a path have no entry. workflows/shortest_paths.yaml explains the keys.

References
----------
.. [1] A. Aho, J. Hopcroft, J. Ullman, "The Design and Analysis of Computer Algorithms", section 5.9, 1974.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file
import job_matrices
import numpy as np
import scipy.sparse as sp

ROUNDINGS = 1000
"""Number of roundings by which a path may become shorter without counting as changed."""


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeJob):
    """What a job file says; `shortest_paths.yaml` explains the keys."""

    a: str
    sources: list[int] | None = None
    hops: int | None = None


def vertices_of(value: object) -> list[int]:
    """Accept a list of vertices.

    Raises
    ------
    ValueError
        If it is another value; the message follows the key's name.
    """
    if not isinstance(value, list) or not all(isinstance(one, int) and one >= 0 for one in value) or not value:
        raise ValueError("is no list of vertices, counted from 0; write for instance [0, 17]")
    return value


READERS = {
    "a": job_file.text_of,
    "sources": vertices_of,
    "hops": job_file.count,
    **job_file.WHOLE,
}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Take steps until the hops are done or nothing changes.

    Parameters
    ----------
    job : Job
    log : Log
        Writes the progress.

    Returns
    -------
    dict
        The result for the report.

    Raises
    ------
    InputError
        If a source is not a vertex.
    """
    import spdist

    a = job_matrices.square("a", spdist.open(job.a))
    if max(job.sources or [0]) >= a.nrows:
        raise spdist.InputError(f"sources: vertex {max(job.sources or [0])} of {a.nrows:,} vertices")
    graph = with_loops(job_matrices.with_values("a", a, lambda x: x >= 0, "lengths of 0 and more"))  # NaN is neither
    with job_matrices.scratch(job.out, "edges", keep=True) as (edges,), job.where_for_all() as where:
        spdist.save(edges, graph, overwrite=True)
        if job.sources is not None:
            spdist.save(f"{edges}-0", graph_rows(graph.shape[0], job.sources, graph.dtype), overwrite=True)
        before, steps, hops = (edges, 0, 1) if job.sources is None else (f"{edges}-0", 0, 0)
        while job.hops is None or hops < job.hops:
            steps += 1
            after = f"{edges}-{steps}"
            right = before if job.sources is None and (job.hops is None or 2 * hops <= job.hops) else edges
            spdist.multiply(before, right, after, semiring="min_plus", resume=True, **where, callbacks=log.callbacks())
            hops += hops if right == before else 1
            jobs.say(f"step {steps}: paths of at most {hops:,} hops, {spdist.open(after).nnz:,} pairs")
            done = same(spdist.open(before), spdist.open(after))
            before = after
            if done:
                break
        job_matrices.put(before, job.out)
        result = {"steps": steps, "pairs": spdist.open(job.out).nnz, "vertices": graph.shape[0]}
        job_matrices.remove_steps(edges, steps)
    return result


def with_loops(a: Any) -> Any:
    """Return the edges with a loop of length 0 at each vertex, so that shorter paths stay."""
    m = a.rows(0, a.nrows).to_scipy().tocoo()
    other = m.row != m.col
    loops = np.arange(a.nrows)
    data = np.concatenate([m.data[other], np.zeros(a.nrows, m.dtype)])
    places = np.concatenate([m.row[other], loops]), np.concatenate([m.col[other], loops])
    return sp.csr_array((data, places), shape=m.shape)


def graph_rows(n: int, sources: Sequence[int], dtype: np.dtype[Any]) -> Any:
    """Return a row for each source, with length 0 at itself.

    Parameters
    ----------
    n : int
        Vertices of the graph.
    sources : sequence of int
    dtype : dtype

    Returns
    -------
    (len(sources), n) csr_array
    """
    places = np.arange(len(sources)), np.asarray(sources)
    return sp.csr_array((np.zeros(len(sources), dtype), places), shape=(len(sources), n))


def same(p: Any, q: Any) -> bool:
    """Whether two stored matrices are equal but for rounding errors, which may shorten a path for many steps.

    Parameters
    ----------
    p, q : StoredMatrix
        Of one shape; paths in `q` are no longer than in `p`.

    Returns
    -------
    bool
    """
    slack = ROUNDINGS * np.finfo(p.dtype).eps if p.dtype.kind == "f" else 0.0
    if p.nnz != q.nnz:
        return False
    for start, stop, _ in p.row_blocks(1 << 20):
        one, other = p.rows(start, stop), q.rows(start, stop)
        if not np.array_equal(one.indices, other.indices) or (one.data - other.data > slack * one.data).any():
            return False
    return True


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return f"{result['pairs']:,} pairs have a path, of {result['vertices']:,} vertices, after {result['steps']} steps"


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a",), run, summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
