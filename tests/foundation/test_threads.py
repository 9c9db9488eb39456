"""Threads of the host: work is done by threads that wait between calls."""

from __future__ import annotations

import os
import threading
import time
import weakref

import pytest

from spdist.foundation.threads import NICENESS, run_in_threads, thread_pool


def test_each_part_has_its_thread():
    together = threading.Barrier(5, timeout=90)
    seen = [0] * 5

    def work(i: int) -> None:
        together.wait()
        seen[i] = threading.get_ident()

    run_in_threads(5, work)
    assert seen[0] == threading.get_ident()
    assert len(set(seen)) == 5


def test_threads_work_again():
    def count() -> int:
        return sum(thread.name == "spdist-helper" for thread in threading.enumerate())

    run_in_threads(6, lambda i: time.sleep(0.01))
    before = count()
    for _ in range(20):
        run_in_threads(6, lambda i: time.sleep(0.001))
    assert count() <= before + 5  # one that has just worked may not wait yet


def test_calls_inside_calls_and_beside_each_other():
    sums = [[0] * 4 for _ in range(4)]

    def outer(i: int) -> None:
        def inner(j: int) -> None:
            sums[i][j] = 10 * i + j

        run_in_threads(4, inner)

    callers = [threading.Thread(target=run_in_threads, args=(4, outer)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sums == [[10 * i + j for j in range(4)] for i in range(4)]


@pytest.mark.parametrize("wrong", [0, 3])
def test_an_error_comes_after_all_have_ended(wrong):
    ended = []

    def work(i: int) -> None:
        if i == wrong:
            raise ZeroDivisionError(i)
        time.sleep(0.05)
        ended.append(i)

    with pytest.raises(ZeroDivisionError, match=str(wrong)):
        run_in_threads(4, work)
    assert sorted(ended) == [i for i in range(4) if i != wrong]
    run_in_threads(4, ended.append)  # all work again
    assert len(ended) == 7


def test_what_was_done_is_not_held():
    class Thing:
        pass

    thing = Thing()
    held = weakref.ref(thing)
    run_in_threads(3, lambda i, thing=thing: None)
    del thing
    end = time.monotonic() + 90
    while held() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert held() is None


def test_helpers_have_the_priority_of_the_caller():
    def niceness() -> list[int]:
        found = [0] * 3

        def note(i: int) -> None:
            found[i] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        run_in_threads(3, note)
        return found

    polite = thread_pool(1, "test of priorities").submit(niceness).result()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert polite == [max(NICENESS, own)] * 3
    assert niceness() == [own] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's: a process of several threads forks
def test_a_forked_process_has_threads_of_its_own():
    run_in_threads(3, lambda i: None)
    child = os.fork()
    if child == 0:
        found = []
        run_in_threads(3, found.append)
        os._exit(0 if sorted(found) == [0, 1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
