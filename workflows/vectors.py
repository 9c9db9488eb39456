"""What the jobs around products with vectors share: where they run, what they read, how they end."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from multiply import (
    STOPPED,
    JobError,
    _Parser,
    check_folder,
    check_matrix,
    check_workers,
    count,
    failed,
    flag,
    read_mapping,
    say,
    scheduler_address,
    split_setting,
    text_of,
    write_report,
)


@dataclass(frozen=True)
class Places:
    """Where a job runs, and where its report goes."""

    report: str = ""
    workers: int | None = None
    scheduler: str | None = None
    scheduler_file: str | None = None
    on_gpu: bool = False

    def where(self) -> dict[str, Any]:
        """Return the arguments of spdist's calls that say so."""
        address = scheduler_address(self.scheduler_file) if self.scheduler_file is not None else self.scheduler
        return {"workers": self.workers, "scheduler": address, "on_gpu": self.on_gpu}

    @contextlib.contextmanager
    def operator(self, matrix: Any) -> Iterator[Any]:
        """Give the matrix prepared for products: in this process, or cut over the workers that were asked for."""
        import spdist

        where = self.where()
        if where == {"workers": None, "scheduler": None, "on_gpu": False}:
            yield spdist.operator(matrix)
            return
        with spdist.partitioned(matrix, where.pop("workers"), **where) as a:
            yield a


READERS: dict[str, Callable[[Any], Any]] = {
    "report": text_of, "workers": count, "scheduler": text_of, "scheduler_file": text_of, "on_gpu": flag,
}  # fmt: skip


def fraction(value: Any) -> float:
    """Accept a number from 0 up and below 1."""
    try:
        number = float(value)  # YAML takes 1e-8 for a text
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < 1:
        raise ValueError("is not a number from 0 up and below 1; write for instance 1.0e-8")
    return number


def read_vector(key: str, place: str, size: int) -> Any:
    """Return a vector of NumPy's .npy."""
    try:
        vector = np.load(place, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise JobError(f"{key}: {place!r} cannot be read: {error}; name a .npy file") from None
    if vector.shape != (size,) or vector.dtype.kind not in "iuf" or not np.isfinite(vector).all():
        raise JobError(
            f"{key}: {place!r} is {vector.dtype} of shape {vector.shape}; {size:,} finite real numbers are needed"
        )
    return vector.astype(np.float64)


def symmetric(matrix: Any) -> bool:
    """Whether a matrix of SciPy's equals its transpose, up to rounding."""
    difference = abs(matrix - matrix.T)
    return not difference.nnz or difference.max() <= 1e-12 * abs(matrix).max()


def run_job(
    text: str | None, argv: Sequence[str] | None, kind: Any, readers: dict[str, Callable[[Any], Any]],
    work: Callable[[Any, Any], tuple[Any, dict[str, Any]]], *, matrix: str, out: str,
) -> int:  # fmt: skip
    """Read the job file, do the work, write vector and report; return the exit code.

    Parameters
    ----------
    kind
        Dataclass of the job.
    work
        From the job and its matrix to the vector and what the report says of it.
    matrix, out
        Keys of the matrix and of the vector.
    """
    parser = _Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in place of the file's value")
    args = parser.parse_args(argv)
    begin = time.time()
    try:
        job = read_job(args.job, args.set, kind, readers, matrix, out)
        say(f"{getattr(job, matrix)} to {getattr(job, out)}")
        vector, result = work(job, read_matrix(matrix, getattr(job, matrix)))
    except JobError as error:
        print(f"{args.job}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("stopped by a signal before the end; nothing was written, run it again")
        return STOPPED
    except Exception as error:
        code, end = failed(error)
        print(f"{args.job}: {end['error']}", file=sys.stderr)
        return code
    np.save(getattr(job, out), vector)
    say(json.dumps(result))
    state = "done" if result["converged"] else "not converged"
    write_report(job, {"state": state, "result": result, "seconds": round(time.time() - begin, 3), "job": asdict(job)})
    return 0 if result["converged"] else 1


def read_job(
    path: Path, settings: Sequence[str], kind: Any, readers: dict[str, Callable[[Any], Any]], matrix: str, out: str
) -> Any:
    """Read a job file, `settings` in place of its values, and check all of it."""
    known = {**readers, **READERS}
    content = read_mapping(path) | dict(map(split_setting, settings))
    for key in content:
        if key not in known:
            raise JobError(f"unknown key {key!r}; the keys are {', '.join(known)}")
    for key in (matrix, out):
        if content.get(key) is None:
            raise JobError(f"{key} is missing; add a line `{key}: PATH`")
    values = {key: _value(known[key], key, value) for key, value in content.items() if value is not None}
    job = kind(**{"report": str(path.with_suffix(".report.json")), **values})
    check_workers(job)
    check_matrix(matrix, getattr(job, matrix))
    for key in ("report", out):
        check_folder(key, getattr(job, key))
    if not getattr(job, out).endswith(".npy"):
        raise JobError(f"{out}: {getattr(job, out)!r} does not end in .npy; it holds NumPy's format")
    return job


def _value(reader: Callable[[Any], Any], key: str, value: Any) -> Any:
    """Return one value in the type its key asks for."""
    try:
        return reader(value)
    except ValueError as error:
        raise JobError(f"{key}: {value!r} {error}") from None


def read_matrix(key: str, place: str) -> Any:
    """Return a stored square matrix as SciPy's."""
    import spdist

    stored = spdist.open(place)
    if stored.shape[0] != stored.shape[1] or not stored.shape[0]:
        raise JobError(f"{key}: {place!r} is {stored.shape[0]:,} x {stored.shape[1]:,}; a square matrix is needed")
    return stored.rows(0, stored.shape[0]).to_scipy()
