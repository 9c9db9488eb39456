"""What occurs together: columns of an incidence matrix that share rows, counted or by pointwise mutual information.

::

    python workflows/cooccurrence.py JOB.yaml [--set key=value ...]

A has a row for each text, basket or gene, and an entry where it holds an item. C is A.T A over plus_pair: the rows that
items i and j share. With ``measure: pmi`` it is log(shared * rows / (rows of i * rows of j)) [1]_, of which a
`threshold` of 0 keeps what occurs together more often than by chance. An item is not counted with itself.
`spdist.cooccurrence` does the work.
workflows/cooccurrence.yaml explains the keys.

References
----------
.. [1] K. Church, P. Hanks, "Word association norms, mutual information, and lexicography", Computational Linguistics
   16(1), 1990.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


@dataclass(frozen=True, kw_only=True)
class Job(job_file.ProductJob):
    """What a job file says; `cooccurrence.yaml` explains the keys."""

    a: str
    measure: str = "count"
    threshold: float | None = None
    top_n: int | None = None
    triangle: str | None = None
    verify: bool = True
    steal: bool = False


def measure_of(value: object) -> str:
    """Accept the measures there are.

    Raises
    ------
    ValueError
        If it is another value; the message follows the key's name.
    """
    if value not in ("count", "pmi"):
        raise ValueError("is no measure; write count or pmi")
    return str(value)


READERS = {
    "a": job_file.text_of,
    "out": job_file.text_of,
    "measure": measure_of,
    "threshold": job_file.number,
    "top_n": job_file.count,
    "triangle": job_file.text_of,
    "verify": job_file.flag,
    "steal": job_file.flag,
    **job_file.PRODUCT,
}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Count what occurs together.

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

    options = {"measure": job.measure, "threshold": job.threshold, "top_n": job.top_n, "triangle": job.triangle}
    options |= {"check": job.verify, "resume": job.resume, "steal": job.steal, "callbacks": log.callbacks()}
    return spdist.cooccurrence(job.a, job.out, **options, **job.where()).to_json()


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "pair")


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a",), run, summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
