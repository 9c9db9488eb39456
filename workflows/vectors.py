"""Parts that the jobs around products with vectors share: matrices in memory, workers, vectors as .npy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import job as jobs
import job_file
import job_matrices
import numpy as np
from dask.utils import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Job(job_file.WholeJob):
    """The keys of these jobs."""

    maxiter: int | None = None
    on_gpu: bool = False

    def workers_asked_for(self) -> dict[str, Any] | None:
        """Return where the rows are multiplied, as spdist's calls take it; None for this process."""
        where = self.where()
        asked = {"workers": where["workers"], "scheduler": where["scheduler"], "on_gpu": self.on_gpu}
        return asked if any(asked.values()) else None


def fraction(value: Any) -> float:
    """Accept a number from 0 up and below 1."""
    try:
        number = -1.0 if isinstance(value, bool) else float(value)  # YAML takes 1e-8 for a text
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < 1:
        raise ValueError("is not a number from 0 up and below 1; write for instance 1.0e-8")
    return number


def square_matrix(key: str, job: Job) -> Any:
    """Return a stored square matrix as SciPy's, if it takes no more than the memory limit.

    Raises `MatrixError` if it is not square.
    Raises `InputError` if it takes more than the memory limit.
    """
    import spdist

    a = job_matrices.square(key, spdist.open(getattr(job, key)))
    limit = job_file.DEFAULT_LIMIT if job.memory_limit is None else job.memory_limit
    if a.nbytes > parse_bytes(limit):
        raise spdist.InputError(
            f"{key}: {a.url} takes {a.nbytes / 2**20:,.0f} MiB in memory, more than memory_limit={limit}: raise it"
        )
    return a.rows(0, a.nrows).to_scipy()


def read_vector(key: str, path: str, size: int) -> Any:
    """Return a vector of NumPy's .npy.

    Raises `InputError` if the file cannot be read, or does not hold `size` finite real numbers.
    """
    import spdist

    try:
        vector = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise spdist.InputError(f"{key}: {path!r} cannot be read: {error}; name a .npy file") from None
    if vector.shape != (size,) or vector.dtype.kind not in "iuf" or not np.isfinite(vector).all():
        raise spdist.InputError(
            f"{key}: {path!r} is {vector.dtype} of shape {vector.shape}; {size:,} finite real numbers are needed"
        )
    return vector.astype(np.float64)


def finish(job: Job, found: Any, what: str) -> dict[str, Any]:
    """Write the vector that was found.

    `what`: the quantity that is the residual, in words.
    Raises `ConvergenceError` if the iterations did not converge.
    """
    with open(job.out, "wb") as file:  # noqa: PTH123  (np.save would add a suffix to a name)
        np.save(file, found.x)
    facts = {"iterations": found.iterations, "seconds": found.seconds, "residual": found.residual}
    if not found.converged:
        after = jobs.counted(found.iterations, "iteration")
        raise jobs.ConvergenceError(
            f"not converged: {what} is {found.residual:.1e} after {after}; raise maxiter", facts
        )
    return {**facts, "converged": True}
