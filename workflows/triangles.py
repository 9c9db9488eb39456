"""Count the triangles of a graph: paths of two edges that a third one closes.

::

    python workflows/triangles.py JOB.yaml [--set key=value ...]

With L the part of the adjacency matrix below the diagonal, the triangles are the sum of L L inside L over plus_pair
[1]_: what the mask leaves out is not multiplied, and no product is stored. Vertices are put in order of their degrees
first, so that no row of L is much longer than the root of the edges. `spdist.triangles` does the work. The result goes
to `out` as JSON. workflows/triangles.yaml explains the keys.

References
----------
.. [1] A. Azad, A. Buluc, J. Gilbert, "Parallel triangle counting and enumeration using matrix algebra", IPDPSW 2015.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import job as jobs
import job_file


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeProductJob):
    """What a job file says; `triangles.yaml` explains the keys."""

    a: str
    read: dict[str, Any] | None = None


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Count the triangles."""
    import spdist

    folder = Path(job.out).absolute().parent  # which the workers of a cluster see
    options = {"folder": folder, "callbacks": log.callbacks(), **(job.read or {})}
    found = spdist.triangles(job.a, **options, **job.where())
    result = asdict(found)
    Path(job.out).write_text(json.dumps(result) + "\n")
    return result


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    of = f"{jobs.counted(result['vertices'], 'vertex')} and {jobs.counted(result['edges'], 'edge')}"
    return f"{jobs.counted(result['triangles'], 'triangle')} of {of}"


main = jobs.Workflow(__doc__, Job, ("a",), run, summary, ("a",)).main

if __name__ == "__main__":
    sys.exit(main())
