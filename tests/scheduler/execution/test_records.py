"""Values that travel."""

from __future__ import annotations

import pickle

import pytest

from spdist.api import products as api
from spdist.scheduler.execution.records import BlockTask, JobSpec
from tests.conftest import random_matrix


@pytest.fixture
def job(stored):
    a = stored("A", random_matrix(50, 50, 3, 1))
    return JobSpec(a, a, "auto", False, (0, 50), (0, 50))


def test_a_job_travels(job):
    assert pickle.loads(pickle.dumps(job)) == job


def test_a_plan_decides_on_a_job(job):
    plan = api.plan(job.a, job.b, engine="numba", grid=(4, 2, 1))
    made = job.with_plan(plan, "name")
    assert (made.engine, made.inner_bounds, made.memory_limit) == ("numba", plan.inner_bounds, plan.memory_limit)
    assert (made.a, made.shared_name) == (job.a, "name")
    assert [piece[2:] for piece in made.pieces] == [(0, 50)] * 2
    assert made.pieces_of(BlockTask(0, 0, 5, 9, True)) == 2
    assert made.pieces_of(BlockTask(0, 0, 5, 9, False)) == 1
