"""Rank the nodes of a stored graph by PageRank as a batch job: a job file in, ranks and a JSON report out.

::

    python workflows/pagerank.py JOB.yaml [--set key=value ...]

An entry in row i and column j is a link from i to j. The graph is brought to memory whole. Exit codes: 0 done; 1 not
converged, or the job failed; 2 the job file or a matrix is wrong, nothing was written; 75 stopped by a signal, nothing
was written. workflows/pagerank.yaml explains the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from multiply import JobError, catch_signals, count, text_of
from vectors import Places, fraction, run_job


@dataclass(frozen=True)
class Job(Places):
    """What a job file says; `pagerank.yaml` explains the keys."""

    links: str = ""
    ranks: str = ""
    damping: float = 0.85
    tolerance: float = 1e-10
    maxiter: int = 1000
    top: int = 10


READERS = {
    "links": text_of, "ranks": text_of, "damping": fraction, "tolerance": fraction, "maxiter": count, "top": count,
}  # fmt: skip


def rank(job: Job, links: Any) -> tuple[Any, dict[str, Any]]:
    """Return the ranks and what the report says of them."""
    import spdist

    if links.nnz and not links.data.min() >= 0:
        raise JobError(f"links: {job.links!r} has weights that are negative or no numbers; links have none")
    found = spdist.pagerank(links, damping=job.damping, tolerance=job.tolerance, maxiter=job.maxiter, **job.where())
    best = np.argsort(-found.x, kind="stable")[: job.top]
    return found.x, {
        "converged": found.converged, "iterations": found.iterations, "seconds": found.seconds,
        "last_change": found.residual, "top": [{"node": int(i), "rank": float(found.x[i])} for i in best],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return run_job(__doc__, argv, Job, READERS, rank, matrix="links", out="ranks")


if __name__ == "__main__":
    catch_signals()
    sys.exit(main())
