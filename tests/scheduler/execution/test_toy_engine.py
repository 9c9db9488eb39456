"""An engine is one file and one line: stored matrices are multiplied through one that only the tests know."""

from __future__ import annotations

import re

import pytest

import spdist
from spdist.api import products as api
from spdist.errors import InputError, SpdistError
from spdist.kernels.engine import ENGINES
from spdist.scheduler.execution import stages
from tests.conftest import random_matrix
from tests.scheduler.execution.test_driver import files
from tests.support.planning import SHORT_CHUNKS
from tests.support.toy_engine import TOY, ToyEngine


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ENGINES, "toy", "tests.support.toy_engine:TOY")
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)


@pytest.mark.parametrize("grid", [(5, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("dask", [False, True])
def test_stored_matrices(stored, tmp_path, scheduler, grid, dask):
    a = stored("A", random_matrix(300, 300, 5, 1))
    before, where = TOY.blocks, {"scheduler": scheduler} if dask else {}
    report = api.multiply(a, a, tmp_path / "C.zarr", engine="toy", grid=grid, check=True, **where)
    assert report.verification["ok"]
    assert (report.engine, report.blocks) == ("toy", grid[0])
    assert TOY.blocks > before + grid[0] * grid[1] - 1
    api.multiply(a, a, tmp_path / "D.zarr", engine="numba", grid=grid, **where)
    assert files(tmp_path / "C.zarr") == files(tmp_path / "D.zarr")


@pytest.mark.parametrize("dask", [False, True])
def test_a_run_is_resumed(stored, tmp_path, scheduler, monkeypatch, dask):
    a, where = stored("A", random_matrix(300, 300, 5, 1)), {"scheduler": scheduler} if dask else {}
    commit, resumed = stages.STAGES["commit"], []

    def failing(context, task, *rest):
        if task.number == 2:
            raise ZeroDivisionError("of no use")
        return commit(context, task, *rest)

    with monkeypatch.context() as patch:
        patch.setitem(stages.STAGES, "commit", failing)
        with pytest.raises(SpdistError, match="ZeroDivisionError"):
            api.multiply(a, a, tmp_path / "C.zarr", engine="toy", grid=(5, 1, 1), **where)
    before, callbacks = TOY.blocks, spdist.Callbacks(resumed=resumed.append)
    report = api.multiply(a, a, tmp_path / "C.zarr", resume=True, check=True, callbacks=callbacks, **where)
    assert report.verification["ok"]
    assert (report.engine, report.state, TOY.blocks > before) == ("toy", "resumed", True)
    assert dask or re.match(r"[1-9]\d* of 300 rows", resumed[0])


def test_the_plan_reserves_its_workspace(stored, monkeypatch):
    a, plans = stored("A", random_matrix(300, 300, 5, 1)), []
    for nbytes in (0, 1 << 20):
        monkeypatch.setattr(ToyEngine, "kernel_bytes", lambda self, work, nbytes=nbytes: nbytes)
        plans.append(api.plan(a, a, engine="toy", memory_limit="2GiB"))
    assert plans[1].reserved_memory == plans[0].reserved_memory + (1 << 20)


def test_options_that_it_lacks_are_refused(stored, tmp_path):
    a = stored("A", random_matrix(30, 30, 5, 1))
    with pytest.raises(InputError, match="engine='toy' makes whole products"):
        api.multiply(a, a, tmp_path / "C.zarr", engine="toy", top_n=2)
