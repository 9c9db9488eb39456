"""The most similar rows of each row, by the cosine: texts by their words, users by what they rated.

::

    python workflows/similarity.py JOB.yaml [--set key=value ...]

C has the cosine of rows i and j of A, where it is among the `top_n` largest of row i and `threshold` or more; a row is
not compared with itself, and the rest of A A.T is never stored. `spdist.similarity` does the work.
workflows/similarity.yaml explains the keys.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


@dataclass(frozen=True, kw_only=True)
class Job(job_file.ProductJob):
    """What a job file says; `similarity.yaml` explains the keys."""

    a: str
    read: dict[str, Any] | None = None
    top_n: int = 10
    threshold: float = 0.0
    metric: str = job_file.key(job_file.choice_of("metric", "similarity"), "cosine")
    verify: bool = True
    steal: bool = False


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Compare the rows of A."""
    import spdist

    options = job.options("top_n", "threshold", "metric", "resume", "steal") | (job.read or {})
    options |= {"check": job.verify, "callbacks": log.callbacks()}
    return spdist.similarity(job.a, job.out, **options, **job.where()).to_json()


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "neighbour")


main = jobs.Workflow(__doc__, Job, ("a",), run, summary, ("a",)).main

if __name__ == "__main__":
    sys.exit(main())
