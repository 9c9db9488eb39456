"""Ranges of rows of about equal weight, distributed over threads."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from spdist.foundation.threads import begin_in_thread
from spdist.matrices.dtypes import IndexArray

THREAD_ENTRIES = 1 << 18
"""Least entries for each thread: with fewer, waking the thread costs more than it gains."""
RANGE_WEIGHT = 1 << 18
"""Least weight of a range that a thread takes at a time."""
MOST_RANGES = 16
"""Most ranges, or twice the number of threads if that is more."""


def threads_for(entries: int, threads: int) -> int:
    """Return how many threads a product keeps busy; `entries` counts A's entries times the columns of x."""
    return max(1, min(threads, entries // THREAD_ENTRIES))


def in_parallel(work: Callable[[int, int], None], ends: IndexArray, threads: int) -> None:
    """Call ``work(start, stop)`` for ranges of about equal weight, on several threads, the caller's among them.

    If ranges are not too small, there are more of them than threads, and threads take them one by one: on a machine
    with other users one core may do twice the work of another. The caller waits for ranges, not for threads: one that
    begins when no range is left keeps nobody.
    `ends`: (n,): ``ends[i]`` is the weight of items 0 to i; ascending.
    Raises the first exception that `work` raised, after all ranges have ended.
    """
    count = len(ends)
    if threads <= 1 or count < 2 * threads:
        if count:
            work(0, count)
        return
    most = max(MOST_RANGES, 2 * threads)
    ranges = max(threads, min(most, int(ends[-1]) // RANGE_WEIGHT, count))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, ranges) / ranges).tolist()
    shared = _Ranges(work, itertools.pairwise((0, *cuts, count)))
    for _ in range(1, threads):
        begin_in_thread(shared.take)
    shared.take()
    shared.wait()


class _Ranges:
    """Ranges that several threads take, until none is left."""

    def __init__(self, work: Callable[[int, int], None], ranges: Iterable[tuple[int, int]]) -> None:
        self._work, self._left = work, deque(ranges)
        self._count, self._ended = len(self._left), threading.Semaphore(0)
        self._errors: list[BaseException] = []

    def take(self) -> None:
        """Work on ranges until none is left; errors are kept for the thread that waits."""
        while True:
            try:
                start, stop = self._left.popleft()
            except IndexError:
                return
            try:
                if start < stop:
                    self._work(start, stop)
            except BaseException as error:  # to the waiting thread, whatever it is
                self._errors.append(error)
            finally:
                self._ended.release()

    def wait(self) -> None:
        """Wait until all ranges have ended, and raise the first error."""
        for _ in range(self._count):
            self._ended.acquire()
        if self._errors:
            raise self._errors[0]
