"""The coarse matrix of a multigrid method, R A P, from storage to storage.

::

    python workflows/galerkin.py JOB.yaml [--set key=value ...]

The two products are made in the order that takes fewer multiplications. Without `r`, R is the transpose of P, written
beside `out` while the job runs. workflows/galerkin.yaml explains the keys.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file
import job_matrices


@dataclass(frozen=True, kw_only=True)
class Job(job_file.ProductJob):
    """What a job file says; `galerkin.yaml` explains the keys."""

    a: str
    p: str
    r: str | None = None
    steal: bool = False


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Multiply the three."""
    import spdist

    with job_matrices.scratch(job.out, "r") as (url,):
        r = spdist.transpose(job.p, url) if job.r is None else spdist.open(job.r)
        c = spdist.multi_matmul([r, job.a, job.p], job.out, **job.options("resume", "steal"), **job.where())
    a = spdist.open(job.a)
    return {"rows": c.nrows, "nnz": c.nnz, "rows_of_a": a.nrows, "nnz_of_a": a.nnz}


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    share = result["nnz"] / max(result["nnz_of_a"], 1)
    return (
        f"{jobs.counted(result['rows_of_a'], 'row')} became {result['rows']:,}, with "
        f"{jobs.counted(result['nnz'], 'entry')}, {share:.2f} times as many as before"
    )


main = jobs.Workflow(__doc__, Job, ("a", "p", "r"), run, summary).main

if __name__ == "__main__":
    sys.exit(main())
