"""Checks of all paths that a job reads or writes, before it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job_file import Job, JobError, WholeJob, local, scheduler_address


def check_workers(job: Job) -> None:
    """Raise `JobError` if more than one of workers, scheduler and scheduler_file is given."""
    named = [key for key in ("workers", "scheduler", "scheduler_file") if getattr(job, key) is not None]
    if len(named) > 1:
        values = " and ".join(f"{key}: {getattr(job, key)!r}" for key in named)
        raise JobError(f"{values} exclude each other: workers are of this machine, a scheduler has its own; keep one")


def check_paths(matrices: Sequence[str], job: Job, *, files: Sequence[str] = ()) -> None:
    """Raise `JobError` if the job cannot read or write a path.

    `matrices`: keys that name matrices.
    `files`: keys of matrices that may also name a local file.
    """
    for key in matrices:
        url = getattr(job, key)
        if url is not None and not (key in files and is_file(url)):
            check_matrix(key, url)
    check_report(job)
    if (out := local(job.out)) is not None:
        check_folder("out", str(out))
    if not isinstance(job, WholeJob) or not job.overwrite:
        check_out(job)
    if job.scheduler_file is not None:
        scheduler_address(job.scheduler_file)


def check_report(job: Job) -> None:
    """Refuse a report in place of anything but an earlier report: the job file, say, or a vector that it names."""
    check_folder("report", job.report)
    path = Path(job.report)
    if path.is_dir():
        raise JobError(f"report: {job.report!r} is a folder; name a file in it")
    if (out := local(job.out)) is not None and path.resolve() == out.resolve():
        raise JobError(f"report: {job.report!r} is what out names; name another file")
    if path.exists() and not earlier_report(path):
        raise JobError(f"report: {job.report!r} exists and is no report of a job; name another file")


def earlier_report(path: Path) -> dict[str, Any]:
    """Return the report of an earlier run; empty if there is no report."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    is_report = isinstance(content, dict) and "exit_code" in content and isinstance(content.get("job"), dict)
    return content if is_report else {}


def check_out(job: Job) -> None:
    """Refuse to continue the result at `out` against `resume`, or to replace a result that is not this job's."""
    if (out := local(job.out)) is not None and out.exists() and not job.resume:
        raise JobError(f"out: {job.out!r} exists; remove it, choose another name, or set resume: true to continue it")
    import spdist

    own = earlier_report(Path(job.report)).get("job", {}).get("out") == spdist.without_secrets(job.out)
    if isinstance(job, WholeJob) and not own and is_there(job.out):
        raise JobError(
            f"out: {job.out!r} exists, and {job.report} does not say that this job wrote it; name another out, or set "
            f"overwrite: true to replace it"
        )


def is_there(url: str) -> bool:
    """Whether a path or URL exists.

    Raises `JobError` if the address cannot be opened.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        return bool(system.exists(path))
    except Exception as error:  # each file system raises its own
        raise JobError(f"out: {url!r} cannot be opened: {error}; correct the address") from None


def check_matrix(key: str, url: str) -> None:
    """Raise if a path or URL is not a matrix.

    Raises `JobError` if there is no matrix, or it cannot be opened.
    """
    import spdist

    path = local(url)
    if path is not None and not path.exists():
        raise JobError(f"{key}: {url!r} does not exist in {Path.cwd()}; correct it, or create it with `spdist import`")
    try:
        spdist.open(url)
    except spdist.SpdistError as error:
        raise JobError(f"{key}: {url!r}: {error}") from None
    except (OSError, ImportError, ValueError) as error:
        raise JobError(f"{key}: {url!r} cannot be opened: {error}; correct the address") from None


def is_file(url: str) -> bool:
    """Whether a path is a local file; a matrix inside it may follow after ``::``."""
    path = local(url.partition("::")[0])
    return path is not None and path.is_file()


def check_folder(key: str, url: str) -> None:
    """Raise if the folder of a path is missing or may not be written to."""
    parent = Path(url).absolute().parent
    if not parent.is_dir():
        raise JobError(f"{key}: {url!r}: {parent} is not a folder; create it or choose another place")
    if not os.access(parent, os.W_OK):
        raise JobError(f"{key}: {url!r}: {parent} may not be written to; choose another place")
