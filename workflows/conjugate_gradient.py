"""Solve A x = b by conjugate gradients.

::

    python workflows/conjugate_gradient.py JOB.yaml [--set key=value ...]

A is symmetric and positive definite, and brought to memory whole. Where workers are asked for, its rows are cut over
them and the iterations run there; else in this process. The solution goes to `out` as NumPy's .npy; its residual is
taken by a product of its own. workflows/conjugate_gradient.yaml explains the keys.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file
import numpy as np
import vectors


@dataclass(frozen=True, kw_only=True)
class Job(vectors.Job):
    """What a job file says; `conjugate_gradient.yaml` explains the keys."""

    a: str
    b: str | None = None
    rtol: float = job_file.key(vectors.fraction, 1e-8)
    jacobi: bool = True


def run(job: Job, log: jobs.Log) -> dict[str, Any]:
    """Solve, and write the solution; return the result for the report."""
    import spdist

    a = vectors.square_matrix("a", job)
    diagonal = check_matrix(job.a, a)
    b = np.ones(a.shape[0]) if job.b is None else vectors.read_vector("b", job.b, a.shape[0])
    where = job.workers_asked_for()
    with spdist.partitioned(a, **where) if where else contextlib.nullcontext(spdist.operator(a)) as prepared:
        jobs.log_line("A is prepared")
        found = spdist.conjugate_gradient(
            prepared, b, diagonal=diagonal if job.jacobi else None, rtol=job.rtol, maxiter=job.maxiter
        )
    facts = vectors.finish(job, found, "|b - A x|")
    scale = max(float(np.linalg.norm(b)), np.finfo(float).tiny)
    return {**facts, "relative_residual": float(np.linalg.norm(b - a @ found.x)) / scale}


def check_matrix(url: str, a: Any) -> Any:
    """Refuse a matrix that conjugate gradients are not for; return its diagonal.

    `a`: square.
    Raises `MatrixError` if a value is not finite, the matrix is not symmetric, or its diagonal is not positive.
    """
    import spdist

    if not np.isfinite(a.data).all():
        raise spdist.MatrixError(f"a: {url!r} has values that are infinite or no numbers; correct them")
    difference = abs(a - a.T)
    if difference.nnz and difference.max() > 1e-12 * abs(a).max():
        raise spdist.MatrixError(f"a: {url!r} is not symmetric; conjugate gradients need a symmetric matrix")
    diagonal = a.diagonal()
    if not (diagonal > 0).all():
        raise spdist.MatrixError(f"a: {url!r} has a diagonal that is not positive: it is not positive definite")
    return diagonal


def summary(result: dict[str, Any]) -> str:
    """Return a result in a line."""
    iterations = jobs.counted(result["iterations"], "iteration")
    return f"{iterations} in {result['seconds']:.2f} s to {result['relative_residual']:.1e} |b|"


main = jobs.Workflow(__doc__, Job, ("a",), run, summary).main

if __name__ == "__main__":
    sys.exit(main())
