"""What a worker reads for a block: bands of B, and entries that it already has."""

from __future__ import annotations

import numpy as np
import pytest

import spdist
from spdist.kernels.cpu import multiply as cpu
from spdist.scheduler.execution.records import BlockOperands, BlockTask, JobSpec
from spdist.scheduler.execution.stages import preprocess
from spdist.scheduler.execution.worker import WorkerContext
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix
from tests.conftest import assert_is_product, random_matrix

STEP = 340
"""Rows of a block: a plane of the stencil and a third."""


@pytest.fixture
def stencil(tmp_path):
    """Return a 27-point stencil."""
    return spdist.generate("poisson", tmp_path / "A.zarr", dims=(20, 16, 16), points=27)


def tasks_of(a: StoredMatrix) -> list[BlockTask]:
    """Return blocks as the planner would cut them, with room for the rows of B they ask for and no more."""
    m = a.rows(0, a.nrows).to_scipy()
    tasks = []
    for start in range(0, a.nrows, STEP):
        stop = min(start + STEP, a.nrows)
        needed = np.unique(m[start:stop].indices)
        room = int(np.diff(m.indptr)[needed].sum()) * 12 + 24 * len(needed)
        tasks.append(BlockTask(len(tasks), start, stop, 10**6, False, room))
    return tasks


def operands(a: StoredMatrix, tasks: list[BlockTask], blocks_in_flight: int) -> list[BlockOperands]:
    context = WorkerContext(JobSpec(a, a, "numba", False, (0, a.ncols), (0, a.ncols), blocks_in_flight))
    return [preprocess(context, task) for task in tasks]


@pytest.mark.parametrize("blocks_in_flight", [1, 2])
def test_a_band_gives_the_same_product(stencil, blocks_in_flight):
    whole = stencil.rows(0, stencil.nrows)
    tasks = tasks_of(stencil)
    for task, found in zip(tasks, operands(stencil, tasks, blocks_in_flight), strict=True):
        assert found.b.nbytes <= task.b_bytes + 8 * found.a.nnz
        c = cpu.multiply(found.a, found.b, engine="numba")
        assert_is_product(c, whole.rows(task.start, task.stop).to_scipy(), whole.to_scipy(), 1e-12)


def test_rows_of_the_last_band_are_not_read_again(stencil, monkeypatch):
    original, tasks, read = ChunkedArray.read, tasks_of(stencil), []

    def counting(self, first, last):
        read.append((last - first) * (self.name == "data"))
        return original(self, first, last)

    monkeypatch.setattr(ChunkedArray, "read", counting)
    times = {}
    for blocks_in_flight in (1, 2):
        read.clear()
        operands(stencil, tasks, blocks_in_flight)
        times[blocks_in_flight] = sum(read) / stencil.nnz
    assert times[2] < 1.9  # rows of A, and those after them
    assert 2.1 < times[1] < 2.6  # those before them, too


def test_scattered_rows_are_read_one_by_one(stored):
    m = random_matrix(3_000, 3_000, 5, 1)
    a = stored("A", m)
    context = WorkerContext(JobSpec(a, a, "numba", False, (0, 3_000), (0, 3_000), 2))
    found = preprocess(context, BlockTask(0, 10, 20, 10_000, False, 1_000))
    assert found.b.nrows == len(np.unique(m[10:20].indices))
