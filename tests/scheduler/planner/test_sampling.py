"""The sample of rows: spread over A, the same each time, and near the truth."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from spdist.api import products as api
from spdist.errors import MatrixError
from spdist.scheduler.planner.planner import make_plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.sampling import candidate_runs, sample_rows, spread_evenly
from spdist.scheduler.planner.stored_rows import row_lengths
from spdist.scheduler.planner.tuning import (
    PlannerTuning,
    SampleTuning,
)
from spdist.storage.matrix import open_matrix
from tests.conftest import random_matrix
from tests.support.seals import without_seal


def test_rows_of_the_sample_are_not_read_far_ahead():
    """Rows may be long: those that wait to be looked at are in memory."""
    reads: list[int] = []

    def read(first: int, last: int) -> np.ndarray:
        reads.append(first)
        return np.zeros(last - first, np.int32)

    a = SimpleNamespace(
        nrows=10_000, ncols=9, nnz=1 << 40, is_known_canonical=True, url="", read_indices=read,
        offsets_of=lambda rows: (rows, rows + 1),
    )  # fmt: skip
    found = candidate_runs(a)
    assert next(found)[0] == 0
    time.sleep(0.2)
    assert len(reads) <= SampleTuning().threads
    assert sum(block.nrows for _, block in found) == 255 * 8


@pytest.mark.parametrize("wrong", [-3, 307])
def test_a_column_out_of_range_is_found_in_the_sample_too(stored, tmp_path, wrong):
    """And the matrix is named that has it."""
    m = random_matrix(300, 300, 8, 1)
    a = stored("A", m)
    stored("F", m)
    foreign = without_seal(tmp_path / "F.zarr")
    foreign["indices"][int(m.indptr[150])] = wrong
    for grid, runs in ((None, 256), ((5, 1, 1), 1)):  # one run is of the first rows
        request = PlanRequest(open_matrix(tmp_path / "F.zarr"), a, "numba", 1 << 31, grid=grid)
        with pytest.raises(MatrixError, match=rf"F.zarr: column {wrong} in row 150 is outside \[0, 300\)"):
            make_plan(request, tuning=PlannerTuning(sample=SampleTuning(runs=runs)))


def test_estimate_is_near_the_truth(stored):
    for seed, make in enumerate((lambda: random_matrix(30_000, 30_000, 8, 7), lambda: grid_stencil(40))):
        m = make()
        a = stored(f"A{seed}", m)
        ones = sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), m.shape)
        plan = api.plan(a, a)
        assert plan.c.nnz == pytest.approx((ones @ ones).nnz, rel=0.15)


def grid_stencil(n: int) -> sp.csr_matrix:
    one = sp.diags([1.0, 1.0, 1.0], [-1, 0, 1], shape=(n, n))
    return sp.csr_matrix(sp.kron(sp.kron(one, one), one))


def test_sample_is_deterministic_and_spread(stored):
    a = stored("A", random_matrix(9_000, 9_000, 9, 8))
    lengths = row_lengths(a)
    assert np.array_equal(sample_rows(a, a, lengths).ratio, sample_rows(a, a, lengths).ratio)
    assert sorted(spread_evenly(100)) == list(range(100))
    assert max(np.diff(sorted(spread_evenly(64)[:8]))) == 8
