"""A matrix cut over workers: products and solvers give what one process gives; a part that fails ends all."""

from __future__ import annotations

import functools

import dask
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
from distributed import LocalCluster

import spdist
from spdist.errors import InputError, MatrixError
from spdist.scheduler.executors.clients.local_cluster import SETTINGS
from tests.conftest import random_matrix
from tests.kernels.spmv.test_sell import stencil


@pytest.fixture(scope="module")
def three():
    """Return the address of three workers that are threads of this process."""
    with (
        dask.config.set(SETTINGS),
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
    ):
        yield cluster.scheduler_address


def poisson(side: int) -> sp.csr_matrix:
    """Return the Laplacian of a cube."""
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    one = sp.eye_array(side)
    return sp.csr_matrix(
        sum(sp.kron(sp.kron(a, b), c) for a, b, c in [(line, one, one), (one, line, one), (one, one, line)])
    )


def test_products(three):
    m = stencil(9)
    given = np.random.default_rng(1).integers(0, 3, m.shape[0])
    for partition in ("rows", "metis", given, np.zeros(m.shape[0], int)):
        with spdist.partitioned(m, scheduler=three, partition=partition) as a:
            x = np.random.default_rng(0).standard_normal(m.shape[1])
            for _ in range(3):
                np.testing.assert_allclose(a @ x, m @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32])
def test_stored_matrices_are_read_by_the_workers(three, tmp_path, dtype):
    m = stencil(9).astype(dtype)
    stored = spdist.save(tmp_path / "A.zarr", m)
    x = np.random.default_rng(0).standard_normal(m.shape[1])
    scattered = np.arange(m.shape[0]) % 2  # the third part has no rows
    for given, partition in ((stored, "auto"), (tmp_path / "A.zarr", "rows"), (str(stored.url), scattered)):
        with spdist.partitioned(given, scheduler=three, partition=partition) as a:
            assert a.dtype == (np.float64 if dtype == np.int32 else dtype)
            np.testing.assert_allclose(a @ x, m @ x, rtol=1e-5, atol=1e-4)
    with pytest.raises(InputError, match="in memory only"):
        spdist.partitioned(stored, scheduler=three, partition="metis")


def test_long_messages(three):
    m = sp.csr_matrix(
        sp.eye_array(150_000) + sp.coo_array((np.ones(150_000), (np.arange(150_000), np.arange(150_000)[::-1])))
    )
    x = np.random.default_rng(0).standard_normal(150_000)
    with spdist.partitioned(m, scheduler=three, partition="rows") as a:  # 400 kB to send before any is received
        np.testing.assert_array_equal(a @ x, m @ x)


def test_closed_operators_and_sparse_x_are_refused(three):
    m = poisson(3)
    with spdist.partitioned(m, scheduler=three) as a, pytest.raises(MatrixError, match="multiplies vectors: give one"):
        a @ m
    for use in (a.matvec, functools.partial(spdist.conjugate_gradient, a)):
        with pytest.raises(InputError, match="the operator is closed"):
            use(np.ones(27))
    a.close()


def test_conjugate_gradients(three):
    m, rng = poisson(11), np.random.default_rng(2)
    b = rng.standard_normal(m.shape[0])
    alone = spdist.conjugate_gradient(spdist.operator(m, threads=2), b, rtol=1e-10)
    assert alone.converged
    assert np.linalg.norm(m @ alone.x - b) <= 1e-9 * np.linalg.norm(b)
    with spdist.partitioned(m, scheduler=three, partition="rows") as a:
        cut = spdist.conjugate_gradient(a, b, rtol=1e-10)
        again = spdist.conjugate_gradient(a, b, rtol=1e-10)
        short = spdist.conjugate_gradient(a, b, x0=cut.x, maxiter=0)
        theirs, failed = sla.cg(a, b, rtol=1e-10)
    np.testing.assert_allclose(cut.x, alone.x, rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(again.x, cut.x)  # the same bits
    assert abs(cut.iterations - alone.iterations) <= 2
    assert (short.iterations, short.converged) == (0, True)
    assert failed == 0
    np.testing.assert_allclose(theirs, alone.x, rtol=1e-6, atol=1e-8)


def test_preconditioned(three):
    m = poisson(8)
    scales = sp.diags_array(np.geomspace(1, 1e3, m.shape[0]))
    m, b = sp.csr_matrix(scales @ m @ scales), np.ones(m.shape[0])
    plain = spdist.conjugate_gradient(spdist.operator(m), b, maxiter=300)
    alone = spdist.conjugate_gradient(spdist.operator(m), b, diagonal=m.diagonal(), maxiter=300)
    with spdist.partitioned(m, scheduler=three) as a:
        cut = spdist.conjugate_gradient(a, b, diagonal=m.diagonal(), maxiter=300)
    assert (plain.converged, alone.converged, cut.converged) == (False, True, True)
    np.testing.assert_allclose(m @ cut.x, b, atol=1e-6)


def test_trivial_systems():
    a = spdist.operator(sp.eye_array(5, format="csr"))
    np.testing.assert_array_equal(spdist.conjugate_gradient(a, np.arange(5.0)).x, np.arange(5.0))
    zero = spdist.conjugate_gradient(a, np.zeros(5))
    assert (zero.iterations, zero.converged) == (0, True)
    assert not spdist.conjugate_gradient(spdist.operator(poisson(5)), np.arange(125.0), maxiter=2).converged
    with pytest.raises(MatrixError, match="square"):
        spdist.conjugate_gradient(a, np.zeros(4))


def dense_pagerank(m: sp.csr_matrix, damping: float) -> np.ndarray:
    """Return the ranks by the definition, in dense arithmetic."""
    links, n = m.toarray(), m.shape[0]
    out = links.sum(axis=1)
    moves = np.where(out[:, None] > 0, links / np.where(out > 0, out, 1)[:, None], 1 / n)
    return np.linalg.solve(np.eye(n) - damping * moves.T, np.full(n, (1 - damping) / n))


def test_pagerank(three):
    m = abs(random_matrix(200, 200, 3, 4))
    assert (np.diff(m.indptr) == 0).any()  # nodes without links
    expected = dense_pagerank(m, 0.85)
    alone = spdist.pagerank(m)
    assert alone.converged
    for ranks in (alone.x, spdist.pagerank(m, scheduler=three).x):
        np.testing.assert_allclose(ranks, expected, atol=1e-9)
        assert abs(ranks.sum() - 1) < 1e-12
    assert spdist.pagerank(m.astype(bool), maxiter=1).iterations == 1


def break_one(part):
    if part.rank == 1:
        raise ValueError("part 1 is broken")
    return part.matvec(part.x)


def test_a_part_that_fails_ends_all(three):
    m = poisson(6)
    with spdist.partitioned(m, scheduler=three, partition="rows") as a, pytest.raises((ValueError, EOFError, OSError)):
        a.run(break_one)


@pytest.mark.slow
def test_processes():
    m = poisson(8)
    with spdist.partitioned(m, 2) as a:
        np.testing.assert_allclose(a @ np.ones(m.shape[0]), m @ np.ones(m.shape[0]), atol=1e-12)


def test_refusals(three):
    with pytest.raises(MatrixError, match="square"):
        spdist.partitioned(sp.random_array((3, 4), density=0.5), scheduler=three)
    with pytest.raises(InputError, match="partition must hold a part from 0 to 2"):
        spdist.partitioned(poisson(2), scheduler=three, partition=np.full(8, 3))
    with pytest.raises(InputError, match="partition='columns' is unknown"):
        spdist.partitioned(poisson(2), scheduler=three, partition="columns")
    with pytest.raises(InputError, match="damping=1"):
        spdist.pagerank(poisson(2), damping=1)
    with spdist.partitioned(poisson(2), scheduler=three) as a, pytest.raises(MatrixError, match="a vector has shape"):
        a @ np.ones(3)
    with spdist.partitioned(poisson(2), scheduler=three) as a, pytest.raises(MatrixError, match="cannot be multiplied"):
        a @ np.full(8, 1j)


def test_vectors_of_more_than_64_mib_come_back():
    """Dask sends them in parts, which a scheduler in this process does not put together."""
    n = 9 << 20
    with spdist.partitioned(sp.eye_array(n, format="csr"), workers=1) as a:
        assert (a @ np.full(n, 3.0) == 3).all()


@pytest.mark.gpu
def test_alone_on_a_gpu():
    import cupy
    import cupyx.scipy.sparse as csp

    m = poisson(12)
    b = np.random.default_rng(2).standard_normal(m.shape[0])
    found = spdist.conjugate_gradient(spdist.operator(csp.csr_matrix(m)), cupy.asarray(b))
    np.testing.assert_allclose(m @ found.x.get(), b, atol=1e-6)
    same = spdist.conjugate_gradient(spdist.operator(csp.identity(50, format="csr")), cupy.ones(50))
    np.testing.assert_array_equal(same.x.get(), 1)  # r is 0 long before the residual is looked at
    links = abs(random_matrix(200, 200, 3, 4))
    np.testing.assert_allclose(spdist.pagerank(csp.csr_matrix(links)).x.get(), dense_pagerank(links, 0.85), atol=1e-9)


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    m = poisson(12)
    b = np.random.default_rng(2).standard_normal(m.shape[0])
    expected = spdist.conjugate_gradient(spdist.operator(m), b).x
    gpus = cupy.cuda.runtime.getDeviceCount()
    with spdist.partitioned(m, gpus, partition="rows", on_gpu=True) as a:
        np.testing.assert_allclose(a @ b, m @ b, atol=1e-10)
        np.testing.assert_allclose(spdist.conjugate_gradient(a, b).x, expected, atol=1e-6)
    links = abs(random_matrix(200, 200, 3, 4))
    np.testing.assert_allclose(spdist.pagerank(links, on_gpu=True).x, dense_pagerank(links, 0.85), atol=1e-9)
