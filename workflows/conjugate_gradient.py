"""Solve A x = b by conjugate gradients as a batch job: a job file in, x and a JSON report out.

::

    python workflows/conjugate_gradient.py JOB.yaml [--set key=value ...]

A is a stored matrix, symmetric and positive definite; it is brought to memory whole. The solution is checked with a
product of its own. Exit codes: 0 done; 1 not converged, or the job failed; 2 the job file or a matrix is wrong, nothing
was written; 75 stopped by a signal, nothing was written. workflows/conjugate_gradient.yaml explains the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from multiply import JobError, catch_signals, count, flag, text_of
from vectors import Places, fraction, read_vector, run_job, symmetric


@dataclass(frozen=True)
class Job(Places):
    """What a job file says; `conjugate_gradient.yaml` explains the keys."""

    a: str = ""
    b: str | None = None
    x: str = ""
    rtol: float = 1e-8
    maxiter: int | None = None
    jacobi: bool = True


READERS = {"a": text_of, "b": text_of, "x": text_of, "rtol": fraction, "maxiter": count, "jacobi": flag}


def solve(job: Job, matrix: Any) -> tuple[Any, dict[str, Any]]:
    """Return x and what the report says of it."""
    import spdist

    if not symmetric(matrix):
        raise JobError(f"a: {job.a!r} is not symmetric; conjugate gradients are for symmetric matrices only")
    diagonal = matrix.diagonal()
    if (diagonal <= 0).any():
        raise JobError(f"a: {job.a!r} has a diagonal that is not positive; it is not positive definite")
    b = np.ones(matrix.shape[0]) if job.b is None else read_vector("b", job.b, matrix.shape[0])
    with job.operator(matrix) as a:
        found = spdist.conjugate_gradient(
            a, b, diagonal=diagonal if job.jacobi else None, rtol=job.rtol, maxiter=job.maxiter
        )
    residual = float(np.linalg.norm(b - matrix @ found.x) / max(np.linalg.norm(b), np.finfo(float).tiny))
    return found.x, {
        "converged": found.converged, "iterations": found.iterations, "seconds": found.seconds,
        "relative_residual": residual,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job file; return the exit code."""
    return run_job(__doc__, argv, Job, READERS, solve, matrix="a", out="x")


if __name__ == "__main__":
    catch_signals()
    sys.exit(main())
