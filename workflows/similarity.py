"""The most similar rows of each row, by the cosine: texts by their words, users by what they rated.

::

    python workflows/similarity.py JOB.yaml [--set key=value ...]

C has the cosine of rows i and j of A, where it is among the `top_n` largest of row i and `threshold` or more; a row is
not compared with itself, and the rest of A A.T is never stored. `spdist.similarity` does the work.
workflows/similarity.yaml explains the keys.
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
    """What a job file says; `similarity.yaml` explains the keys."""

    a: str
    read: dict[str, Any] | None = None
    top_n: int = 10
    threshold: float = 0.0
    metric: str = "cosine"
    verify: bool = True
    steal: bool = False


def metric_of(value: object) -> str:
    """Accept the metrics there are.

    Raises
    ------
    ValueError
        If it is another value; the message follows the key's name.
    """
    if value not in ("cosine", "inner_product"):
        raise ValueError("is no metric; write cosine or inner_product")
    return str(value)


READERS = {
    "a": job_file.text_of,
    "read": job_file.reading,
    "out": job_file.text_of,
    "top_n": job_file.count,
    "threshold": job_file.number,
    "metric": metric_of,
    "verify": job_file.flag,
    "steal": job_file.flag,
    **job_file.PRODUCT,
}


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Compare the rows of A.

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

    options = {"top_n": job.top_n, "threshold": job.threshold, "metric": job.metric}
    options |= {"check": job.verify, "resume": job.resume, "steal": job.steal, **(job.read or {})}
    report = spdist.similarity(job.a, job.out, **options, **job.where(), callbacks=log.callbacks())
    return report.to_json()


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return jobs.product_summary(result, "neighbour")


WORKFLOW = jobs.Workflow(__doc__, Job, READERS, ("a",), run, summary, ("a",))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return jobs.main(WORKFLOW, argv)


if __name__ == "__main__":
    sys.exit(main())
