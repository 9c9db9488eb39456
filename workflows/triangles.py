"""Count the triangles of a graph: paths of two edges that a third one closes.

::

    python workflows/triangles.py JOB.yaml [--set key=value ...]

With L the part of the adjacency matrix below the diagonal, the triangles are the sum of L L inside L over plus_pair
[1]_: what the mask leaves out is not multiplied, and no product is stored. Vertices are put in order of their degrees
first, so that no row of L is much longer than the root of the edges. The graph is held in memory for that; its products
are not. The result goes to `out` as JSON. workflows/triangles.yaml explains the keys.

References
----------
.. [1] A. Azad, A. Buluc, J. Gilbert, "Parallel triangle counting and enumeration using matrix algebra", IPDPSW 2015.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import job as jobs
import job_file
import job_matrices
import numpy as np
import scipy.sparse as sp


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeJob):
    """What a job file says; `triangles.yaml` explains the keys."""

    a: str


READERS = {"a": job_file.text_of, **job_file.WHOLE}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Order the graph, take its lower part, and reduce the masked product.

    Parameters
    ----------
    job : Job
    log : Log
        Writes the progress.

    Returns
    -------
    dict
        The result for the report.
    """
    import spdist

    a = job_matrices.square("a", spdist.open(job.a))
    lower = lower_part(a.rows(0, a.nrows).to_scipy())
    with job_matrices.scratch(job.out, "lower") as (place,):
        spdist.save(place, lower)
        found = spdist.reduce(
            place, place, "sum", semiring="plus_pair", mask=place, **job.where(), callbacks=log.callbacks()
        )
    paths = int((lower.sum(axis=0) @ lower.sum(axis=1)).item())
    result = {"vertices": a.nrows, "edges": lower.nnz, "triangles": int(found), "products_unmasked": paths}
    Path(job.out).write_text(json.dumps(result) + "\n")
    return result


def lower_part(a: Any) -> Any:
    """Return the part below the diagonal of a graph's pattern, made symmetric, vertices in order of their degrees."""
    pattern = sp.csr_array((np.ones(a.nnz, np.int64), a.indices, a.indptr), a.shape)
    pattern = ((pattern + pattern.T) > 0).tocoo()
    order = np.argsort(np.argsort(np.bincount(pattern.row, minlength=a.shape[0]), kind="stable"))
    row, column = order[pattern.row], order[pattern.col]
    below = row > column
    ones = np.ones(int(below.sum()), np.int64)
    return sp.csr_array((ones, (row[below], column[below])), shape=a.shape)


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return f"{result['triangles']:,} triangles of {result['vertices']:,} vertices and {result['edges']:,} edges"


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a",), run, summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
