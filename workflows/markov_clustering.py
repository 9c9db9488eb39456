"""Markov clustering of a graph: random walks that are spread, sharpened and pruned until they stay in clusters [1]_.

::

    python workflows/markov_clustering.py JOB.yaml [--set key=value ...]

Rows of M hold where a walk from each vertex goes. M <- M M (expansion) is never whole: each row is cut as soon as it is
made, to values from 1 / `prune` up and the `select` largest, then raised to the power `inflation` and scaled to sum 1.
Where nothing changes any more, vertices whose walks end at the same place are a cluster. The rules are the same
as in the program mcl. Walks larger than memory are stored beside `out`, and a stopped job continues from its last
step. The result is a text file with the vertices of each cluster a line. `spdist.markov_clustering` does the work.
workflows/markov_clustering.yaml explains the keys.

References
----------
.. [1] S. van Dongen, "Graph clustering by flow simulation", thesis, University of Utrecht, 2000.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


def power(value: object) -> float:
    """Accept a number above 1."""
    if job_file.number(value) <= 1:
        raise ValueError("is no power that sharpens; write a number above 1, for instance 2")
    return float(value)


def count_or_none(value: object) -> int:
    """Accept a whole number from 0 up."""
    return 0 if value == 0 and not isinstance(value, bool) else job_file.count(value)


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeProductJob):
    """What a job file says; `markov_clustering.yaml` explains the keys."""

    a: str
    read: dict[str, Any] | None = None
    inflation: float = job_file.key(power, 2.0)
    pre_inflation: float | None = None
    prune: int = job_file.key(count_or_none, 10_000)
    select: int = job_file.key(count_or_none, 1_100)
    recover: int = job_file.key(count_or_none, 1_400)
    recover_percent: float = 90.0
    steps: int = 10_000
    labels: str | None = None
    steal: bool = False


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Expand, inflate and prune until nothing changes; write the clusters.

    Raises `ConvergenceError` if walks still change after the last step.
    """
    import spdist

    def on_step(step: int, facts: dict[str, Any]) -> None:
        log.stop_if_signalled()
        jobs.log_line(f"step {step}: {jobs.counted(facts['entries'], 'entry')}, chaos {facts['chaos']:.1e}")

    names = ("inflation", "pre_inflation", "prune", "select", "recover", "recover_percent", "labels", "resume", "steal")
    options = job.options(*names) | (job.read or {}) | {"maxiter": job.steps, "overwrite": True}
    options |= {"on_step": on_step, "callbacks": log.callbacks()}
    facts = spdist.markov_clustering(job.a, job.out, **options, **job.where()).summary()
    if not facts["converged"]:
        raise jobs.ConvergenceError(
            f"not converged: the last chaos is {facts['chaos']:.1e}; {summary(facts)}; raise steps", facts
        )
    return facts


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    return (
        f"{jobs.counted(result['clusters'], 'cluster')} after {jobs.counted(result['steps'], 'step')}: the largest has "
        f"{jobs.counted(result['largest'], 'vertex')}; {result['alone']:,} with one"
    )


main = jobs.Workflow(__doc__, Job, ("a",), run, summary, ("a",)).main

if __name__ == "__main__":
    sys.exit(main())
