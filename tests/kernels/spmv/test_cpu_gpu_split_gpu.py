"""Rows shared by a GPU and the host, on a GPU: SciPy is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError
from spdist.kernels.spmv import cpu_gpu_split
from spdist.kernels.spmv.cpu_gpu_split import PreparedSplit
from spdist.matrices.csr import CSR
from spdist.operators import choice
from spdist.operators.operator import Operator
from tests.conftest import random_matrix
from tests.kernels.spmv.test_cpu_gpu_split import MATRICES
from tests.kernels.spmv.test_sell import stencil

pytestmark = pytest.mark.gpu

SHARES = (0.0, 0.3, 1.0)
TYPES = (np.float32, np.float64, np.complex64, np.complex128)


@pytest.fixture
def shared(monkeypatch):
    """Return a function that prepares a matrix with a share of the host's, whatever the times."""

    def prepare(m, share: float = 0.3, **options) -> Operator:
        monkeypatch.setattr(cpu_gpu_split, "balance", lambda *given: share)
        monkeypatch.setattr(cpu_gpu_split, "wins", lambda *times: True)
        monkeypatch.setattr(choice, "gpu_seconds", lambda *given: 10.0)
        a = spdist.operator(on_gpu(m), "hybrid", uses=1, threads=2, **options)
        assert isinstance(a.prepared, PreparedSplit)
        return a

    return prepare


def on_gpu(m):
    import cupyx.scipy.sparse as csp

    return csp.csr_matrix(sp.csr_matrix(m))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [kind for kind in MATRICES if kind != "no columns"])
def test_products_equal_scipys(shared, kind, dtype, share):
    import cupy

    m = sp.csr_array(MATRICES[kind]())
    m.data = np.trunc(3 * m.data)  # sums are exact in any order
    m = m.astype(dtype)
    a, rng = shared(m, share), np.random.default_rng(1)
    assert a.dtype == dtype
    for columns in ((), (1,), (4,), (11,)):
        x = rng.integers(-3, 4, (m.shape[1], *columns)).astype(dtype)
        y = cupy.full((m.shape[0], *columns), np.nan, dtype)
        assert (a.matvec if columns in ((), (1,)) else a.matmat)(cupy.asarray(x), out=y) is y
        np.testing.assert_array_equal(y.get(), m @ x)
        np.testing.assert_array_equal((a @ cupy.asarray(x)).get(), m @ x)
    z = rng.integers(-3, 4, m.shape[0]).astype(dtype)
    np.testing.assert_array_equal(a.rmatvec(cupy.asarray(z)).get(), m.conj().T @ z)
    assert abs(a.to_csr().to_scipy() - m).nnz == 0


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("make", [lambda: stencil(40), lambda: random_matrix(60_000, 60_000, 12.0, 1)])
def test_products_in_a_row_wait_for_each_other(shared, make, own_stream):
    """Each x is made of the y before while nobody waits; the memory of one product is the next one's."""
    import cupy

    m = sp.csr_array(make())
    m.data = np.ones_like(m.data)
    a, steps, size = shared(m, 0.2), 300, m.shape[0]
    expected = np.arange(size) % 1009
    for _ in range(steps):
        expected = (m @ expected.astype(float)).astype(np.int64) % 1009
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    cupy.cuda.Device().synchronize()
    with stream:
        x = (cupy.arange(size) % 1009).astype(float)
        for _ in range(steps):
            x = (a @ x) % 1009
            cupy.full(size, np.nan)  # takes the memory that was given back
    stream.synchronize()
    np.testing.assert_array_equal(x.get(), expected)


def test_vectors_of_all_kinds_and_narrow_values(shared):
    import cupy

    from tests.operators.test_operator import vectors

    m = stencil(12)
    for stored, rtol in ((None, 1e-12), (np.float32, 1e-5)):
        a = shared(m, dtype=stored)
        for x in vectors(m.shape[1]):
            y = a @ cupy.asarray(x)
            assert y.dtype == np.result_type(m.dtype, x.dtype)
            np.testing.assert_allclose(y.get(), m @ x, rtol=1e-5 if x.dtype == np.float32 else rtol, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 5), (5, 5)])
def test_nothing_to_share(shape):
    import cupy

    empty = CSR(cupy.zeros(shape[0] + 1, np.int32), cupy.empty(0, np.int32), cupy.empty(0), shape)
    dtype = np.dtype("f8")
    a = Operator(choice.split(empty, dtype, dtype, 1000, 2), empty.shape, dtype)
    assert a.why == f"hybrid: the GPU alone: {shape[0]} rows with 0 entries are not to be shared"
    np.testing.assert_array_equal((a @ cupy.ones(shape[1])).get(), np.zeros(shape[0]))
    assert (a @ cupy.ones((shape[1], 4))).shape == (shape[0], 4)


@pytest.mark.parametrize("make", [lambda: stencil(8), lambda: stencil(70), lambda: random_matrix(9000, 9000, 50.0, 1)])
def test_what_it_chooses_is_told_and_right(tmp_path, make):
    import cupy

    m = make()
    a = spdist.operator(on_gpu(m), "hybrid")
    assert "the GPU alone" in a.why
    assert a.why.startswith("hybrid: the GPU alone") != isinstance(a.prepared, PreparedSplit)
    a.save(tmp_path / "a.zarr")
    b = spdist.open_operator(tmp_path / "a.zarr", on_gpu=True)
    assert (b.method, b.shape, b.dtype) == (a.method, a.shape, a.dtype)
    x = np.random.default_rng(1).standard_normal((m.shape[1], 4))
    for one in (a, b):
        np.testing.assert_allclose((one @ cupy.asarray(x)).get(), m @ x, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(one.rmatvec(cupy.asarray(x[:, 0])).get(), m.T @ x[:, 0], rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="open it with on_gpu=True"):
        spdist.open_operator(tmp_path / "a.zarr")


def test_solvers_say_that_a_graph_does_not_hold_it(shared):
    import cupy

    m = stencil(16)
    m = (m @ m.T + sp.eye_array(m.shape[0])).tocsr()
    found = spdist.conjugate_gradient(shared(m), cupy.ones(m.shape[0]), rtol=1e-9)
    assert found.converged
    assert found.iterations > 16
    assert "multiplied by cores of the host, which a CUDA graph cannot capture" in found.launched
    np.testing.assert_allclose(m @ found.x.get(), 1.0, atol=1e-6)


def test_the_gpu_alone_goes_into_a_graph(monkeypatch):
    import cupy

    monkeypatch.setattr(cpu_gpu_split, "wins", lambda *times: False)
    m = stencil(16)
    m = (m @ m.T + sp.eye_array(m.shape[0])).tocsr()
    found = spdist.conjugate_gradient(spdist.operator(on_gpu(m), "hybrid", uses=1), cupy.ones(m.shape[0]), rtol=1e-9)
    assert found.launched == "as a CUDA graph"


def test_parts_share_with_their_cores():
    m = stencil(16)
    m = (m @ m.T + sp.eye_array(m.shape[0])).tocsr()
    x = np.random.default_rng(1).standard_normal(m.shape[0])
    with spdist.partitioned(m, 1, partition="rows", on_gpu=True, method="hybrid") as a:
        np.testing.assert_allclose(a @ x, m @ x, rtol=1e-10, atol=1e-10)
        assert spdist.conjugate_gradient(a, np.ones(m.shape[0])).converged
