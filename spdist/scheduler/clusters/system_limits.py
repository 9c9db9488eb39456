"""Limits of this machine that keep worker processes from starting: say so in one line, before Dask waits for them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Iterator

import psutil

from spdist.errors import InputError

FILES_OF_RUN, FILES_PER_WORKER = 48, 12
"""Open files of this process while workers run, and for each of them: half more than was seen with 1 to 8 workers."""


def check_limits(workers: int) -> None:
    """Refuse to start worker processes for which this machine's limits are too small.

    The limit of open files is raised if it may be.

    Raises `InputError` if there is no room for their connections, their locks or their files.
    """
    _raise_open_files(psutil.Process().num_fds() + FILES_OF_RUN + FILES_PER_WORKER * workers, workers)
    try:
        with _quiet_tracker():
            multiprocessing.get_context("spawn").Lock()
    except BrokenPipeError:  # the process that counts locks did not start, or ended at once
        raise InputError(
            f"worker processes cannot start: {sys.executable} does not run as a new process of this user; see what "
            f"`{sys.executable} -c pass` says, and whether HOME is set"
        ) from None
    except OSError as error:
        raise InputError(
            f"worker processes need locks in /dev/shm, and none can be made ({error}): mount a tmpfs there that you "
            f"may write, or use a scheduler on another machine"
        ) from None
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise InputError(f"no folder for temporary files: {error.strerror}; name one in TMPDIR") from None


def _raise_open_files(needed: int, workers: int) -> None:
    """Raise the soft limit of open files to what is needed, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return
    raise InputError(
        f"{workers} workers need {needed} open files, and the limit is {hard}: raise it (ulimit -n {needed}), or start "
        f"fewer workers"
    )


@contextlib.contextmanager
def _quiet_tracker() -> Iterator[None]:
    """Keep the process that counts locks, started with the first, from warning about locks of killed workers."""
    before = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker"]))
    try:
        yield
    finally:
        if before:
            os.environ["PYTHONWARNINGS"] = before
        else:
            del os.environ["PYTHONWARNINGS"]
