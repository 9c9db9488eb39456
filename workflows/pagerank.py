"""Rank the nodes of a graph by PageRank.

::

    python workflows/pagerank.py JOB.yaml [--set key=value ...]

An entry in row i and column j is a link from i to j. The graph is brought to memory whole. Where workers are asked for,
its rows are cut over them and the iterations run there; else in this process. The ranks go to `out` as NumPy's .npy.
workflows/pagerank.yaml explains the keys.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file
import job_paths
import numpy as np
import vectors


@dataclass(frozen=True, kw_only=True)
class Job(vectors.Job):
    """What a job file says; `pagerank.yaml` explains the keys."""

    a: str
    read: dict[str, Any] | None = None
    damping: float = job_file.key(vectors.fraction, 0.85)
    tolerance: float = job_file.key(vectors.fraction, 1e-10)
    maxiter: int | None = 1000
    top: int = 10


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Rank the nodes, and write the ranks.

    Raises `MatrixError` if a weight is negative, infinite or not a number.
    """
    import spdist

    is_file = job_paths.is_file(job.a)
    links = job.a if is_file else vectors.square_matrix("a", job)
    if not is_file and not (np.isfinite(links.data) & (links.data >= 0)).all():
        raise spdist.MatrixError(f"a: {job.a!r} has weights that are negative, infinite or no numbers; links have none")
    options = job.options("damping", "tolerance", "maxiter") | (job.read or {})
    found = spdist.pagerank(links, **options, **(job.workers_asked_for() or {}))
    facts = vectors.finish(job, found, "the last change")
    best = np.argsort(-found.x, kind="stable")[: job.top]
    top: list[dict[str, Any]] = [{"node": int(node), "rank": float(found.x[node])} for node in best]
    if found.names is not None:
        top = [{**one, "name": found.names[one["node"]]} for one in top]
    return {**facts, "top": top}


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    first = result["top"][0]
    return (
        f"{jobs.counted(result['iterations'], 'iteration')} in {result['seconds']:.2f} s; node {first['node']} is first"
    )


main = jobs.Workflow(__doc__, Job, ("a",), run, summary, ("a",)).main

if __name__ == "__main__":
    sys.exit(main())
