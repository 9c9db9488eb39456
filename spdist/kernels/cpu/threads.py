"""Threads of the host that work for a pipeline: pools at low priority, one for each task."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

NICENESS = 10
"""Niceness of the threads of a pool, as `nice` counts it."""


@functools.cache
def thread_pool(count: int, task: str) -> ThreadPoolExecutor:
    """Return the pool of `count` threads for a task; it lives as long as the process.

    Each task has its own pool, so that one task never waits behind another. The threads run at low priority: the
    thread that keeps the GPU busy must get a core at once.

    Parameters
    ----------
    count : int
        Number of threads.
    task : str
        Name of the task; threads are called ``spdist-<task>``.
    """
    return ThreadPoolExecutor(count, f"spdist-{task}", _lower_priority)


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # the process runs at a lower priority already, and may not raise it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_now(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in the calling thread; a substitute for an executor's `submit`.

    Returns
    -------
    Future
        Done. An exception of the function is raised here, not stored.

    Examples
    --------
    >>> run_now(max, 1, 2).result()
    2
    """
    future: Future[T] = Future()
    future.set_result(function(*args))
    return future
