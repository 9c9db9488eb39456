"""Threads of this process: helpers that wait for the next call, and pools at low priority for pipelines."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

NICENESS = 10
"""Niceness of the threads of a pool, as `nice` counts it."""


@functools.cache
def thread_pool(count: int, task: str) -> ThreadPoolExecutor:
    """Return the pool of `count` threads for a task; it lives as long as the process.

    Each task has its own pool, so that one task never waits behind another. The threads run at low priority: the
    thread that keeps the GPU busy must get a core at once.

    `count`: number of threads.
    `task`: name of the task; threads are called ``spdist-<task>``.
    """
    return ThreadPoolExecutor(count, f"spdist-{task}", lower_priority)


def lower_priority() -> None:
    """Run the calling thread, and the helpers that it asks, at low priority."""
    with contextlib.suppress(OSError):  # the process runs at a lower priority already, and may not raise it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class _Helper:
    """A thread that works when it is asked to, and otherwise waits, with its memory at hand.

    `niceness`: of the thread that starts it, and so its own: threads of another priority do not ask it.
    """

    idle: ClassVar[defaultdict[int, deque[_Helper]]] = defaultdict(deque)
    """Those that wait, by niceness: in deques, because several threads may use the ends of one at once."""

    def __init__(self, niceness: int) -> None:
        self._niceness, self._work = niceness, _nothing
        self._asked = threading.Lock()
        self._asked.acquire()
        threading.Thread(target=self._serve, name="spdist-helper", daemon=True).start()

    @classmethod
    def take(cls) -> _Helper:
        """Return a helper of the caller's priority that waits, or a new one."""
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            return cls.idle[niceness].pop()
        except IndexError:
            return cls(niceness)

    def ask(self, work: Callable[[], None]) -> None:
        """Let the helper work; it raises nothing, and waits again afterwards."""
        self._work = work
        self._asked.release()

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            self._work()
            self._work = _nothing  # what it referred to is free
            self.idle[self._niceness].append(self)


def _nothing() -> None:
    """Do nothing."""


os.register_at_fork(after_in_child=_Helper.idle.clear)


def begin_in_thread(work: Callable[[], None]) -> None:
    """Let a thread begin ``work()`` and return at once; the thread has the caller's priority.

    `work`: raises nothing, and says itself when it has ended.

    Examples
    --------
    >>> ended = threading.Event()
    >>> begin_in_thread(ended.set)
    >>> ended.wait()
    True
    """
    _Helper.take().ask(work)


def run_in_threads(count: int, work: Callable[[int], None]) -> None:
    """Call ``work(i)`` for each i below `count`, each in a thread; ``work(0)`` runs in the calling thread.

    Raises `Exception` The first that a thread raised, after all threads have ended.

    Examples
    --------
    >>> squares = [0] * 3
    >>> def square(i):
    ...     squares[i] = i * i
    >>> run_in_threads(3, square)
    >>> squares
    [0, 1, 4]
    """
    if count == 1:
        work(0)
        return
    errors: list[BaseException] = []
    ended = threading.Semaphore(0)

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # to the calling thread, whatever it is
            errors.append(error)
        finally:
            ended.release()

    for i in range(1, count):
        begin_in_thread(functools.partial(run, i))
    run(0)
    for _ in range(count):
        ended.acquire()
    if errors:
        raise errors[0]


def run_now(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in the calling thread; a substitute for an executor's `submit`.

    `*args`: its arguments.
    Returns done. An exception of the function is raised here, not stored.

    Examples
    --------
    >>> run_now(max, 1, 2).result()
    2
    """
    future: Future[T] = Future()
    future.set_result(function(*args))
    return future
