"""Walks of Markov clustering on a GPU, run thread by thread on the host: those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from spdist.applications.markov_clustering import gpu_walks, host_walks
from spdist.applications.markov_clustering.pruning import Pruning
from spdist.applications.markov_clustering.rows import is_on_gpu
from spdist.kernels.rowwise_gpu.finished.inflate import inflate
from spdist.matrices.csr import CSR
from spdist.storage.external_sort import Entries
from tests.conftest import random_matrix
from tests.support import host_cupy

pytestmark = pytest.mark.skipif(not host_cupy.CAN_RUN, reason="needs g++ on x86-64")
RULES = [Pruning(), Pruning(0, 0, 0), Pruning(30, 4, 9, 90.0), Pruning(10, 3, 0), Pruning(5, 0, 12, 99.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def on_host(monkeypatch, folder):
    with host_cupy.installed(monkeypatch, folder):
        yield


def edges(n: int, seed: int) -> Entries:
    """Return edges in any order: both directions, loops, weights of 0, several edges in one place."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, n, (2, 4 * n))
    return Entries(rows, columns, rng.choice([0.0, 0.5, 1.0, 2.5, 7.0], 4 * n) * rng.uniform(0.9, 1.1, 4 * n))


def same(mine: CSR, theirs: CSR) -> bool:
    return (
        np.array_equal(mine.indptr, theirs.indptr)
        and np.array_equal(mine.indices, theirs.indices)
        and np.allclose(mine.data, theirs.data, rtol=1e-4, atol=0)
    )


@pytest.mark.parametrize("pre_inflation", [None, 1.7])
@pytest.mark.parametrize("n", [1, 2, 50])
def test_first_walks(n, pre_inflation):
    found = gpu_walks.first_walks_on_gpu(edges(n, n), n, pre_inflation)
    assert is_on_gpu(found)
    assert same(found, host_walks.first_walks(edges(n, n), n, pre_inflation))


def test_first_walks_of_no_edges():
    nothing = Entries(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    assert gpu_walks.first_walks_on_gpu(nothing, 3, None).data.tolist() == [1, 1, 1]


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("pruning", RULES, ids=str)
def test_steps(pruning, blocks, monkeypatch):
    n = 60
    mine = gpu_walks.GpuWalks(gpu_walks.first_walks_on_gpu(edges(n, 1), n, None), pruning, 1 << 30)
    theirs = host_walks.HostWalks(host_walks.first_walks(edges(n, 1), n, None), pruning, {})
    if blocks > 1:
        monkeypatch.setattr(gpu_walks, "BLOCK_ENTRIES", n * n // blocks)
    assert (mine.place, theirs.place) == ("gpu", "host")
    for _ in range(4):
        assert mine.take(1.6) == pytest.approx(theirs.take(1.6), rel=1e-5)
        assert same(mine.on_host(), theirs.on_host())
        assert mine.nnz == theirs.nnz


@pytest.mark.parametrize("power", [1.0, 2.0, 3.3, 60.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inflation(dtype, power):
    import cupy

    lengths = [3, 0, 1, 5000, 40, 2]
    m = abs(random_matrix(6, 6000, 1, 0))
    m = sp.vstack([sp.random_array((1, 6000), density=length / 6000, format="csr", rng=np.random.default_rng(length))
                   for length in lengths]).tocsr().astype(dtype)  # fmt: skip
    m.data[m.indptr[2] : m.indptr[3]] = 0
    rows = CSR(*(cupy.asarray(x) for x in (m.indptr, m.indices, m.data)), m.shape)
    dense = m.toarray().astype(float)
    chaos = max((row.max() - (row**2).sum()) * count for row, count in zip(dense, np.diff(m.indptr), strict=True))
    assert inflate(rows, power) == pytest.approx(chaos, rel=1e-6)
    raised = (dense / np.maximum(dense.max(axis=1), 1e-300)[:, None]) ** power
    expected = raised / np.maximum(raised.sum(axis=1), 1e-300)[:, None]
    found = sp.csr_array((np.array(rows.data), m.indices, m.indptr), m.shape).toarray()
    np.testing.assert_allclose(found, expected, rtol=2e-6 if dtype == "float32" else 1e-12, atol=1e-30)


def test_inflation_of_no_rows():
    import cupy

    assert inflate(CSR(cupy.zeros(1, np.int32), cupy.zeros(0, np.int32), cupy.zeros(0, np.float32), (0, 3)), 2.0) == 0
