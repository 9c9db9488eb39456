"""Ranges of rows shared out to a pool of threads, each range of about equal weight."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from spdist.matrices.dtypes import IndexArray

PARALLEL_ENTRIES = 1 << 19
"""Entries below which a second thread costs more than it gains."""
RANGE_WEIGHT = 1 << 18
"""Least weight of a range that a thread takes at a time."""
MOST_RANGES = 16
"""Most ranges, unless there are more threads."""


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="spdist-sell")


def in_parallel(work: Callable[[int, int], None], ends: IndexArray, threads: int) -> None:
    """Call ``work(start, stop)`` for ranges of about equal weight, on several threads.

    If ranges are not too small, there are more of them than threads, and threads take them one by one: on a machine
    with other users one core may do twice the work of another. The caller takes part. It does not wait for a thread
    that has not begun when no range is left.

    Parameters
    ----------
    work : callable
        Must be safe to call for several ranges at once.
    ends : (n,) int
        ``ends[i]`` is the weight of items 0 to i; ascending.
    threads : int
        Most threads, with the caller.
    """
    count = len(ends)
    if threads <= 1 or count < 2 * threads:
        if count:
            work(0, count)
        return
    ranges = max(threads, min(MOST_RANGES, int(ends[-1]) // RANGE_WEIGHT, count))
    cuts = (bisect.bisect_left(ends, ends[-1] * number / ranges) for number in range(1, ranges))
    left = deque(itertools.pairwise((0, *cuts, count)))
    others = [_pool(threads).submit(_share, i, work, left) for i in range(1, threads)]
    _share(0, work, left)
    for other in others:
        if not other.cancel():
            other.result()


def _share(number: int, work: Callable[[int, int], None], left: deque[tuple[int, int]]) -> None:
    """Call ``work(start, stop)`` for ranges until none is left, beginning on a core of this thread's own.

    Threads that sleep between products were seen to wake on one core and share it for milliseconds, the others idle.
    The thread moves to its core and is released at once, so that the system can move it if the core is busy.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(cores)[(os.getpid() + number) % len(cores)]})
        os.sched_setaffinity(0, cores)
    while left:
        try:
            start, stop = left.popleft()
        except IndexError:  # another thread was quicker
            return
        if start < stop:
            work(start, stop)
