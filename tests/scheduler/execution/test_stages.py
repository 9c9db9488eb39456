"""Stages that need no cluster, and the parts of a block that share a Zarr chunk with others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdist.errors import SpdistError
from spdist.scheduler.execution.records import BlockTask, JobSpec
from spdist.scheduler.execution.stages import (
    CommitTarget,
    commit,
    compute,
    count,
    shared_slices,
)
from spdist.scheduler.execution.worker import CONTEXTS, WorkerContext
from spdist.scheduler.executors.dask import run_stage
from spdist.storage import groups
from spdist.storage.writer import Layout
from tests.conftest import assert_is_product, random_matrix


@pytest.fixture
def product(stored):
    """Return a matrix, and the context of a job that squares it in two pieces."""
    m = random_matrix(200, 200, 6, 1)
    a = stored("A", m)
    return m, WorkerContext(JobSpec(a, a, "numba", False, (0, 90, 200), (0, 200)))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 120))
def test_shared_slices_leave_whole_chunks(at, nnz, chunk):
    slices = shared_slices(at, nnz, chunk)
    kept = np.zeros(nnz, bool)
    for low, high in slices:
        assert 0 <= low < high <= nnz
        assert (at + low) // chunk == (at + high - 1) // chunk
        kept[low:high] = True
    body = np.flatnonzero(~kept)
    if len(body):
        assert (at + body[0]) % chunk == 0
        assert (at + body[-1] + 1) % chunk == 0
        assert body[-1] - body[0] + 1 == len(body)


def test_pieces_are_added_up(product):
    m, context = product
    c = compute(context, BlockTask(0, 20, 60, 10_000, True), 2)
    assert_is_product(c, m[20:60], m, 1e-12)
    assert set(context.telemetry.totals) == {"preprocess", "multiply", "merge"}
    assert not context.partial_results


def test_a_commit_writes_whole_chunks_and_returns_the_rest(product, tmp_path):
    _, context = product
    task = BlockTask(0, 0, 50, 10_000, False)
    c = compute(context, task, 1)
    layout = Layout(str(tmp_path / "C.zarr"), 200, np.dtype(np.float64), 100)
    groups.begin(layout.url, {})
    counts = count(context, task, c)
    committed = commit(context, task, counts.rows, counts.digest, CommitTarget(layout, 70, 0))
    fragments, chunks = committed.fragments, committed.written
    assert [(one.array, one.first) for one in chunks] == [("indices", 1), ("data", 1)]
    for one in chunks:
        assert one.sums.tolist() == layout.array(one.array).stored_checksums(1, 1 + len(one.sums)).tolist()
    assert [fragment.offset for fragment in fragments] == [70, (70 + c.nnz) // 100 * 100]
    written = context.telemetry.totals["commit"].nbytes // 12
    assert written == 100 * len(chunks[0].sums)
    assert sum(len(fragment.data) for fragment in fragments) + written == c.nnz
    assert not context.results


def test_a_lost_block_must_come_out_the_same(product, tmp_path):
    _, context = product
    task = BlockTask(0, 0, 50, 10_000, True)
    with pytest.raises(SpdistError, match="gave another pattern when computed again"):
        commit(context, task, 50, b"another", CommitTarget(None, 0, 0))


def test_a_task_names_its_job_and_stage(product, monkeypatch):
    _, context = product
    monkeypatch.setitem(CONTEXTS, "job", context)
    assert run_stage("job", "preprocess", BlockTask(0, 3, 8, 100, False)).a.nrows == 5
