"""What the jobs around products with vectors share: a matrix in memory, where it is multiplied, vectors as .npy."""

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
    """The keys that these jobs have besides those of every job.

    Attributes
    ----------
    maxiter : int or None
    on_gpu : bool
        Multiply on GPUs.
    """

    maxiter: int | None = None
    on_gpu: bool = False

    def workers_asked_for(self) -> dict[str, Any] | None:
        """Return where the rows are multiplied, as spdist's calls take it; None for this process."""
        where = self.where()
        asked = {"workers": where["workers"], "scheduler": where["scheduler"], "on_gpu": self.on_gpu}
        return asked if any(asked.values()) else None


READERS = {"maxiter": job_file.count, "on_gpu": job_file.flag, **job_file.WHOLE}


def fraction(value: Any) -> float:
    """Accept a number from 0 up and below 1.

    Raises
    ------
    ValueError
        If it is another value; the message follows the key's name.
    """
    try:
        number = -1.0 if isinstance(value, bool) else float(value)  # YAML takes 1e-8 for a text
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < 1:
        raise ValueError("is not a number from 0 up and below 1; write for instance 1.0e-8")
    return number


def square_matrix(key: str, job: Job) -> Any:
    """Return a stored square matrix as SciPy's, if it takes no more than the memory limit.

    Parameters
    ----------
    key : str
        The job's key that names the matrix.
    job : Job

    Returns
    -------
    csr_matrix or csr_array

    Raises
    ------
    MatrixError
        If it is not square.
    InputError
        If it takes more than the memory limit.
    """
    import spdist

    a = job_matrices.square(key, spdist.open(getattr(job, key)))
    limit = job_file.DEFAULT_LIMIT if job.memory_limit is None else job.memory_limit
    if a.nbytes > parse_bytes(limit):
        raise spdist.InputError(
            f"{key}: {a.url} takes {a.nbytes / 2**20:,.0f} MiB in memory, more than memory_limit={limit}: raise it"
        )
    return a.rows(0, a.nrows).to_scipy()


def read_vector(key: str, place: str, size: int) -> Any:
    """Return a vector of NumPy's .npy.

    Parameters
    ----------
    key : str
        The job's key that names the file.
    place : str
        A .npy file.
    size : int

    Returns
    -------
    (size,) float64

    Raises
    ------
    InputError
        If the file cannot be read, or does not hold `size` finite real numbers.
    """
    import spdist

    try:
        vector = np.load(place, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise spdist.InputError(f"{key}: {place!r} cannot be read: {error}; name a .npy file") from None
    if vector.shape != (size,) or vector.dtype.kind not in "iuf" or not np.isfinite(vector).all():
        raise spdist.InputError(
            f"{key}: {place!r} is {vector.dtype} of shape {vector.shape}; {size:,} finite real numbers are needed"
        )
    return vector.astype(np.float64)


def finish(job: Job, found: Any, what: str) -> dict[str, Any]:
    """Write the vector that was found.

    Parameters
    ----------
    job : Job
    found : spdist.Solution
    what : str
        The quantity that is the residual, in words.

    Returns
    -------
    dict
        The facts for the report.

    Raises
    ------
    ConvergenceError
        If the iterations did not converge.
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
