"""Who takes which block: workers of one sort, and GPUs with cores beside them, on a clock that the test turns."""

from __future__ import annotations

import heapq
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spdist.scheduler.execution.assignment import BlockAssigner, Work
from spdist.scheduler.execution.stages import Task

PAIRS = 2


def works_of(products, nnz):
    return [
        Work(Task(-1, i, i + 1, 0, False), int(p), int(c)) for i, (p, c) in enumerate(zip(products, nnz, strict=True))
    ]


class Room:
    """Workers that take blocks from a crew; rows find their places in order, and free the worker's hand only then."""

    def __init__(self, works, gpus, cores, seconds, engine="hybrid"):
        self.time, self.seconds, self.works = 0.0, seconds, works
        self.todo = works[::-1]
        plan = SimpleNamespace(engine=engine, c=SimpleNamespace(entry_bytes=12))
        self.crew = BlockAssigner(
            plan, PAIRS, lambda names: {name: name[0] == "g" for name in names}, lambda: self.time
        )
        self.names = [f"gpu {i}" for i in range(gpus)] + [f"core {i}" for i in range(cores)]
        self.crew.meet(self.names)
        self.queues = {name: deque() for name in self.names}
        self.busy, self.events, self.counted, self.placed = {}, [], {}, 0
        self.taken = dict.fromkeys(self.names, 0)

    def fill(self):
        while self.todo and (chosen := self.crew.choose(reversed(self.todo))) is not None:
            name, ahead = chosen
            work = self.todo.pop(-1 - ahead)
            self.crew.give(name, work)
            self.queues[name].append(work)
            self.start(name)

    def start(self, name):
        if name not in self.busy and self.queues[name]:
            work = self.busy[name] = self.queues[name].popleft()
            self.taken[name] += 1
            heapq.heappush(self.events, (self.time + self.seconds(work, name[0] == "g"), name))

    def run(self):
        self.fill()
        while self.events:
            self.time, name = heapq.heappop(self.events)
            work = self.busy.pop(name)
            self.crew.counted(name, work)
            self.counted[work.task.start] = name
            self.start(name)
            while self.placed in self.counted:
                self.crew.done(self.counted[self.placed])
                self.placed += 1
            self.fill()
        assert self.placed == len(self.works)
        assert not any(self.crew.in_hand.values())
        return self.time


def made_of(rng, count):
    products = rng.integers(1, 1 << 28, count) if rng.random() < 0.3 else np.full(count, 1 << 27)
    return works_of(products, products * rng.uniform(0.02, 1.0, count))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 300), gpus=st.integers(1, 4), cores=st.integers(1, 32),
    gpu=st.floats(0.01, 3.0), core=st.floats(0.3, 5.5),
)  # fmt: skip
def test_cores_never_make_the_gpus_late(seed, count, gpus, cores, gpu, core):
    """Whatever the GPUs' speed is; cores may be quicker than expected, or several times as slow."""
    works = made_of(np.random.default_rng(seed), count)

    def seconds(work, on_gpu):
        if on_gpu:
            return gpu * (work.products / 3e10 + work.nnz / 1e9) + 1e-4
        return core * (work.products / 6e8 + work.nnz / 2e8)

    alone = Room(works, gpus, 0, seconds).run()
    together = Room(works, gpus, cores, seconds).run()
    longest = max(seconds(work, True) for work in works)
    assert together <= 1.02 * alone + longest  # a turn of one GPU may come a block later


def test_cores_take_work_off_a_gpu():
    works = works_of(np.full(400, 1 << 27), np.full(400, 1 << 25))
    gpu = 0.05

    def seconds(work, on_gpu):
        return gpu if on_gpu else 20 * gpu

    alone = Room(works, 1, 0, seconds).run()
    room = Room(works, 1, 10, seconds)
    assert room.run() < 0.75 * alone  # ten cores are half a GPU: two thirds at best
    assert min(room.taken.values()) > 5


def test_cores_take_what_suits_them():
    """Of two sorts of blocks that take a GPU as long, cores take those with few products an entry."""
    nnz = np.full(600, 1 << 24)
    works = works_of(np.where(np.arange(600) % 2, 1 << 24, 1 << 29), nnz)
    room = Room(works, 2, 4, lambda work, on_gpu: 0.05 if on_gpu else work.products / 6e8 + work.nnz / 2e8)
    room.run()
    by_cores = [i for i, name in room.counted.items() if name[0] == "c"]
    assert len(by_cores) > 10
    assert np.mean([works[i].products == 1 << 24 for i in by_cores]) > 0.9


def test_the_first_blocks_are_the_gpus():
    works = made_of(np.random.default_rng(2), 50)
    room = Room(works, 2, 8, lambda work, on_gpu: 1.0)
    room.fill()
    assert [name for name, taken in room.taken.items() if taken] == ["gpu 0", "gpu 1"]
    assert len(room.todo) == 50 - 2 * PAIRS


def test_cores_go_on_alone_and_gpus_that_come_back_lead_again():
    works = made_of(np.random.default_rng(3), 50)
    crew = Room(works, 1, 2, None).crew
    crew.meet(["core 0", "core 1"])
    assert crew.choose(iter(works)) == ("core 0", 0)
    crew.meet(["core 0", "core 1", "gpu 9"])
    assert crew.choose(iter(works)) == ("gpu 9", 0)


@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_workers_of_one_sort_take_turns(engine):
    works = made_of(np.random.default_rng(4), 40)
    room = Room(works, 4, 0, lambda work, on_gpu: 1.0, engine)
    room.run()
    assert set(room.taken.values()) == {10}


def test_a_worker_that_left_counts_no_more():
    works = made_of(np.random.default_rng(5), 4)
    crew = Room(works, 2, 0, None).crew
    for name in ("gpu 0", "gpu 1"):
        crew.give(name, works[0])
    crew.meet(["gpu 1", "gpu 2"])
    crew.counted("gpu 0", works[0])  # by whoever made it again
    crew.done("gpu 0")
    assert crew.in_hand == {"gpu 1": 1, "gpu 2": 0}
    assert not crew.paces[True].blocks


def test_hands_that_are_full_of_blocks_that_wait_for_the_first_take_it():
    works = made_of(np.random.default_rng(6), 20)
    room = Room(works, 1, 1, None)
    for name, work in zip(("gpu 0", "gpu 0", "core 0", "core 0"), works[4:], strict=False):
        room.crew.give(name, work)
        room.crew.counted(name, work)
    assert room.crew.choose(iter(works)) is None
    assert room.crew.choose(iter(works), stuck=True)[1] == 0
    room.crew.done("core 0")
    assert room.crew.choose(iter(works), stuck=True) == ("core 0", 0)


def test_a_gpu_that_waits_for_a_core_is_not_slow():
    works = made_of(np.random.default_rng(7), 4)
    room = Room(works, 1, 0, None)
    for _ in range(2):
        room.crew.give("gpu 0", works[0])
        room.time += 1.0
        room.crew.counted("gpu 0", works[0])
        room.time += 100.0
    assert [took for took, _ in room.crew.paces[True].blocks] == [1.0, 1.0]


def test_a_worker_that_does_not_answer_is_met_later():
    crew = Room(made_of(np.random.default_rng(8), 4), 1, 0, None).crew
    answers = {}
    crew.has_gpu = lambda names: {name: answers[name] for name in names if name in answers}
    crew.meet(["gpu 0", "new"])
    assert "new" not in crew.in_hand
    answers["new"] = True
    crew.meet(["gpu 0", "new"])
    assert crew.in_hand == {"gpu 0": 0, "new": 0}
    assert not crew.cores


def test_a_block_that_ends_early_is_cut():
    before, rest = Work(Task(3, 10, 30, 5, False, 7), 1000, 100).cut(25)
    assert (before.task.start, before.task.stop, before.products, before.nnz) == (10, 25, 750, 75)
    assert (rest.task, rest.products, rest.nnz) == (Task(-1, 25, 30, 5, False, 7), 250, 25)
