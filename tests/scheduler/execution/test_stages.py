"""What a worker reads for a block: rows of B side by side, and those it has already."""

from __future__ import annotations

import numpy as np
import pytest

import spdist
from spdist.kernels.cpu import multiply as cpu
from spdist.scheduler.execution.stages import Operands, Product, Task
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix
from tests.conftest import assert_is_product, random_matrix

STEP = 340
"""Rows of a block: a plane of the stencil and a third."""


@pytest.fixture
def stencil(tmp_path):
    """Return a 27-point stencil."""
    return spdist.generate("poisson", tmp_path / "A.zarr", dims=(20, 16, 16), points=27)


def tasks_of(a: StoredMatrix) -> list[Task]:
    """Return blocks as the planner would cut them, with room for the rows of B they ask for and no more."""
    m = a.rows(0, a.nrows).to_scipy()
    tasks = []
    for start in range(0, a.nrows, STEP):
        stop = min(start + STEP, a.nrows)
        needed = np.unique(m[start:stop].indices)
        room = int(np.diff(m.indptr)[needed].sum()) * 12 + 24 * len(needed)
        tasks.append(Task(len(tasks), start, stop, 10**6, False, room))
    return tasks


def operands(a: StoredMatrix, tasks: list[Task], pairs: int) -> list[Operands]:
    product = Product(a, a, "numba", False, (0, a.ncols), (0, a.ncols), pairs)
    return [product.preprocess(task) for task in tasks]


@pytest.mark.parametrize("pairs", [1, 2])
def test_rows_side_by_side_give_the_same_product(stencil, pairs):
    whole = stencil.rows(0, stencil.nrows)
    tasks = tasks_of(stencil)
    for task, found in zip(tasks, operands(stencil, tasks, pairs), strict=True):
        assert found.b.nbytes <= task.b_bytes + 8 * found.a.nnz
        c = cpu.multiply(found.a, found.b, engine="numba")
        assert_is_product(c, whole.rows(task.start, task.stop).to_scipy(), whole.to_scipy(), 1e-12)


def test_what_the_block_before_asked_for_is_not_read_again(stencil, monkeypatch):
    original, tasks, read = ChunkedArray.read, tasks_of(stencil), []

    def counting(self, first, last):
        read.append((last - first) * (self.name == "data"))
        return original(self, first, last)

    monkeypatch.setattr(ChunkedArray, "read", counting)
    times = {}
    for pairs in (1, 2):
        read.clear()
        operands(stencil, tasks, pairs)
        times[pairs] = sum(read) / stencil.nnz
    assert times[2] < 1.9  # rows of A, and those after them
    assert 2.1 < times[1] < 2.6  # those before them, too


def test_scattered_rows_are_gathered(stored):
    m = random_matrix(3_000, 3_000, 5, 1)
    a = stored("A", m)
    product = Product(a, a, "numba", False, (0, 3_000), (0, 3_000), 2)
    found = product.preprocess(Task(0, 10, 20, 10_000, False, 1_000))
    assert found.b.nrows == len(np.unique(m[10:20].indices))
