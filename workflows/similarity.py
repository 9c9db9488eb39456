"""The most similar rows of each row, by the cosine: texts by their words, users by what they rated.

::

    python workflows/similarity.py JOB.yaml [--set key=value ...]

C has the cosine of rows i and j of A, where it is among the `top_n` largest of row i and `threshold` or more; a row is
not compared with itself. Rows are scaled to length 1 first (a product with a diagonal matrix); the rest of A A.T is
never stored. workflows/similarity.yaml explains the keys.
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


@dataclass(frozen=True, kw_only=True)
class Job(job_file.Job):
    """What a job file says; `similarity.yaml` explains the keys."""

    a: str
    top_n: int = 10
    threshold: float = 0.0
    verify: bool = True


READERS = {
    "a": job_file.text_of,
    "out": job_file.text_of,
    "top_n": job_file.count,
    "threshold": job_file.number,
    "verify": job_file.flag,
    **job_file.COMMON,
}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Scale the rows of A and multiply them with one another.

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

    a = job_matrices.with_values("a", spdist.open(job.a), np.isfinite, "finite real values")
    with (
        job_matrices.scratch(job.out, "unit", "diagonal", "itself") as (unit, diagonal, itself),
        job.where_for_all() as where,
    ):
        spdist.save(diagonal, sp.diags_array(1 / row_lengths(a)).tocsr())
        spdist.save(itself, sp.eye_array(a.nrows, dtype=bool).tocsr())
        jobs.say("scaling rows to length 1")
        spdist.multiply(diagonal, a, unit, **where, callbacks=log.callbacks())
        jobs.say("comparing rows")
        report = spdist.multiply(
            unit,
            unit,
            job.out,
            transpose_b=True,
            mask=itself,
            complement=True,
            threshold=max(job.threshold, np.finfo(np.float64).tiny),  # what shares nothing is no neighbour
            top_n=job.top_n,
            check=job.verify,
            resume=job.resume,
            **where,
            callbacks=log.callbacks(),
        )
    return report.to_json()


def row_lengths(a: Any) -> Any:
    """Return the Euclidean norm of each row of a stored matrix; 1 for rows of zeros."""
    out = np.ones(a.nrows)
    for start, stop, _ in a.row_blocks(1 << 20):
        rows = a.rows(start, stop).to_scipy()
        squares = np.asarray(abs(rows).power(2).sum(axis=1), np.float64).ravel()
        out[start:stop] = np.where(squares > 0, np.sqrt(squares), 1)
    return out


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "neighbours")


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a",), run, summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
