"""The one driver with an executor that is neither threads nor Dask: stages run in any order that it allows."""

from __future__ import annotations

import operator
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from spdist.api import products as api
from spdist.errors import SpdistError
from spdist.scheduler.execution import stages
from spdist.scheduler.execution.executor import RunCosts
from spdist.scheduler.execution.journal import JournalTuning
from spdist.scheduler.execution.unfinished import read_journal
from spdist.scheduler.execution.worker import WorkerContext
from spdist.scheduler.planner import planner
from tests.conftest import random_matrix
from tests.scheduler.execution.test_driver import files
from tests.support.planning import SHORT_CHUNKS

LAST_FIRST = 5
"""Seed with which the stage that was submitted last runs first: all blocks wait for the first one."""


class ShuffledExecutor:
    """Two workers that share their memory; of the stages that may run, a random one runs next.

    `held`: most blocks that each worker had at a time, from the first stage of a block to the end of its commit.
    """

    link = ""

    def __init__(self, seed: int) -> None:
        self.name, self.choose = "shuffled", random.Random(seed).choice
        if seed == LAST_FIRST:
            self.choose = operator.itemgetter(-1)
        self.submitted: list[tuple] = []
        self.results: dict[object, object] = {}
        self.holding = {"one": 0, "two": 0}
        self.held, self.spilled = 0, set()
        self.messages: list[str] = []

    def publish(self, messages):
        self.messages += [message["what"] for message in messages]

    @contextmanager
    def running(self, draft, plan, url="", on_timings=None):
        self.context = WorkerContext(draft.with_plan(plan, ""))
        yield
        assert not self.submitted
        self.context.release()

    def workers(self):
        return list(self.holding)

    def with_gpu(self, workers):
        return dict.fromkeys(workers, False)

    def submit(self, stage, *arguments, key, worker="", after=(), wanted=True):
        assert (stage, key) not in self.results
        assert (worker in self.holding) == (stage != "join")
        if stage == "multiply":
            self.holding[worker] += 1
            self.held = max(self.held, *self.holding.values())
        self.submitted.append((stage, arguments, key, worker, wanted, after))
        return stage, key

    def next_completed(self):
        ready = [call for call in self.submitted if all(handle in self.results for handle in call[-1])]
        call = self.choose(ready)
        self.submitted.remove(call)
        stage, arguments, key, worker, wanted, after = call
        if stage == "multiply":
            (task,) = arguments
            result = stages.count(
                self.context, task, stages.compute(self.context, task, self.context.job.pieces_of(task))
            )
        else:
            commits = [self.results[handle] for handle in after] if stage == "join" else []
            result = stages.STAGES[stage](self.context, *arguments, *commits)
        if stage in ("spill", "commit") and key[0] not in self.spilled:
            self.holding[worker] -= 1
        self.spilled |= {key[0]} if stage == "spill" else set()
        self.results[stage, key] = result
        return [((stage, key), result if wanted else None)]

    def costs(self, workers):
        return RunCosts([(0, 0)] * len(workers), [self.context.telemetry.totals])

    def workers_that_see(self, array, k):
        return []


@pytest.fixture
def shuffled(monkeypatch):
    """Let short products be run by new shuffled executors; return the list of them, by a function of the seed."""
    made: list[ShuffledExecutor] = []

    def begin(seed: int) -> list[ShuffledExecutor]:
        def take(name):
            made.append(ShuffledExecutor(seed))
            return made[-1]

        monkeypatch.setattr("spdist.jobs.starting.start.ThreadExecutor", take)
        return made

    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0, share=1e9))
    return begin


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grid", [(30, 1, 1), (6, 3, 2)])
def test_a_product_and_a_resume(stored, tmp_path, monkeypatch, shuffled, seed, grid):
    """Rows that do not fit their block come next; C and its journal are right whenever the run fails."""
    a, c, make = stored("A", random_matrix(900, 900, 12, seed)), tmp_path / "C.zarr", planner.make_plan

    def cut_short(*args, **keywords):
        plan = make(*args, **keywords)
        return replace(plan, blocks=tuple(replace(b, capacity=b.capacity // (1 + seed % 3) + 1) for b in plan.blocks))

    monkeypatch.setattr(planner, "make_plan", cut_short)
    blocks = api.multiply(a, a, tmp_path / "R.zarr", grid=grid).blocks
    executors, commit, left = shuffled(seed), stages.commit, [blocks * (seed + 1) // 7]

    def failing(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise SpdistError("the disk is gone")
        return commit(*arguments)

    with monkeypatch.context() as patch:
        patch.setitem(stages.STAGES, "commit", failing)
        with pytest.raises(SpdistError, match="the disk is gone"):
            api.multiply(a, a, c, grid=grid)
    row = read_journal(str(c)).checkpoint.row
    report = api.multiply(a, a, c, resume=True)
    assert row == 0 or report.blocks < blocks
    assert len(executors) == 2
    assert any(executor.spilled for executor in executors) or (seed, grid) != (LAST_FIRST, (30, 1, 1))
    assert [each.messages[:: len(each.messages) - 1] for each in executors] == [["start", "end"]] * 2
    assert report.workers == 2
    assert files(c) == files(tmp_path / "R.zarr")
    assert max(executor.held for executor in executors) <= api.plan(a, a, grid=grid).blocks_in_flight


@pytest.mark.parametrize("what", ["nnz", "frobenius"])
def test_a_reduction(stored, shuffled, what):
    """Of values that are not whole: results are put together in the order of rows."""
    a = stored("A", random_matrix(900, 900, 12, 1, "float32"))
    expected = api.reduce(a, a, what)
    executors = shuffled(1)
    np.testing.assert_array_equal(api.reduce(a, a, what), expected)
    assert executors
