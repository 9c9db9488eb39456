"""Lengths of shortest paths: from some vertices or between all pairs, optionally limited in hops.

::

    python workflows/shortest_paths.py JOB.yaml [--set key=value ...]

A holds the lengths of edges, none negative. With `sources` D has a row for each of them, and D <- min(D, D A) over
min_plus goes on for `hops` steps, or until nothing changes. Without, D <- min(D, D D) doubles the hops in each step:
all pairs [1]_. Each step is a product of its own, stored beside `out`; a job that was stopped goes on with the step it
was at. Pairs without a path have no entry. `spdist.shortest_paths` does the work.
workflows/shortest_paths.yaml explains the keys.

References
----------
.. [1] A. Aho, J. Hopcroft, J. Ullman, "The Design and Analysis of Computer Algorithms", section 5.9, 1974.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file


def is_vertex(value: object) -> bool:
    """Whether a value is the number or the name of a vertex."""
    return isinstance(value, str) or (isinstance(value, int) and value >= 0)


def vertices_of(value: object) -> list[int | str]:
    """Accept a list of vertices."""
    if not isinstance(value, list) or not value or not all(map(is_vertex, value)):
        raise ValueError("is no list of vertices, counted from 0 or by name; write for instance [0, 17]")
    return value


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeProductJob):
    """What a job file says; `shortest_paths.yaml` explains the keys."""

    a: str
    read: dict[str, Any] | None = None
    sources: list[int | str] | None = job_file.key(vertices_of, None)
    hops: int | None = None
    steal: bool = False


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Take steps until the hops are done or nothing changes."""
    import spdist

    steps = []

    def on_step(step: int, facts: dict[str, Any]) -> None:
        log.stop_if_signalled()
        steps.append(step)
        hops, pairs = jobs.counted(facts["hops"], "hop"), jobs.counted(facts["pairs"], "pair")
        jobs.log_line(f"step {step}: paths of at most {hops}, {pairs}")

    options = job.options("sources", "hops", "resume", "steal") | (job.read or {})
    options |= {"overwrite": True, "on_step": on_step, "callbacks": log.callbacks()}
    found = spdist.shortest_paths(job.a, job.out, **options, **job.where())
    return {"steps": steps[-1] if steps else 0, "pairs": found.nnz, "vertices": found.ncols}


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    pairs, vertices = jobs.counted(result["pairs"], "pair"), jobs.counted(result["vertices"], "vertex")
    return f"paths between {pairs} of {vertices}, after {jobs.counted(result['steps'], 'step')}"


main = jobs.Workflow(__doc__, Job, ("a",), run, summary, ("a",)).main

if __name__ == "__main__":
    sys.exit(main())
