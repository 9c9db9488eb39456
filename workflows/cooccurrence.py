"""Co-occurrence: columns of an incidence matrix that share rows, counted or by pointwise mutual information.

::

    python workflows/cooccurrence.py JOB.yaml [--set key=value ...]

A has a row for each text, basket or gene, and an entry where it holds an item. C is A.T A over plus_pair: the rows that
items i and j share. With ``measure: pmi`` it is log(shared * rows / (rows of i * rows of j)) [1]_; a `threshold`
of 0 then keeps pairs that occur together more often than by chance. An item is not counted with itself.
`spdist.cooccurrence` does the work.
workflows/cooccurrence.yaml explains the keys.

References
----------
.. [1] K. Church, P. Hanks, "Word association norms, mutual information, and lexicography", Computational Linguistics
   16(1), 1990.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


@dataclass(frozen=True, kw_only=True)
class Job(job_file.ProductJob):
    """What a job file says; `cooccurrence.yaml` explains the keys."""

    a: str
    measure: str = job_file.key(job_file.choice_of("measure", "cooccurrence"), "count")
    threshold: float | None = None
    top_n: int | None = None
    triangle: str | None = None
    verify: bool = True
    steal: bool = False


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Count what occurs together."""
    import spdist

    options = job.options("measure", "threshold", "top_n", "triangle", "resume", "steal")
    options |= {"check": job.verify, "callbacks": log.callbacks()}
    return spdist.cooccurrence(job.a, job.out, **options, **job.where()).to_json()


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "pair")


main = jobs.Workflow(__doc__, Job, ("a",), run, summary).main

if __name__ == "__main__":
    sys.exit(main())
