"""EHYB on the GPU: SciPy is the oracle; parts of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import InputError, MatrixError
from spdist.kernels.spmv import ehyb
from spdist.matrices.csr import CSR
from tests.kernels.spmv.test_sell import any_csr, as_csr, dense, stencil
from tests.kernels.spmv.test_sell_gpu import TYPES, on_gpu

pytestmark = pytest.mark.gpu


def square(m: CSR) -> CSR:
    """Return a matrix cut, or filled up with nothing, to as many rows as columns."""
    rows = dense(m)[: m.ncols]
    full = np.zeros((m.ncols, m.ncols), m.dtype)
    full[: len(rows)] = rows
    return as_csr(sp.csr_array(full))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_product_and_back(data):
    import cupy

    dtype = data.draw(st.sampled_from(TYPES))
    m = square(data.draw(any_csr(dtype)))
    part = data.draw(st.lists(st.integers(0, 3), min_size=m.nrows, max_size=m.nrows))
    a = ehyb.build(on_gpu(m), part=np.array(part, np.int32))
    x = (np.arange(m.ncols * 3).reshape(-1, 3) % 7 - 3).astype(dtype)
    y = cupy.full((m.nrows, 3), np.nan, dtype)
    for _ in range(2):  # every product does all of its work
        np.testing.assert_array_equal(ehyb.multiply(a, cupy.asarray(x), y).get(), dense(m) @ x)
        y.fill(np.nan)
    np.testing.assert_array_equal(ehyb.to_csr(a).to_scipy().toarray(), dense(m))
    inside = ehyb.permuted(a)
    there = ehyb.multiply(inside, ehyb.permute(a, cupy.asarray(x)))
    np.testing.assert_array_equal(ehyb.unpermute(a, there).get(), dense(m) @ x)


@pytest.mark.parametrize("parts", [1, 7])
def test_stencil_with_long_rows(parts):
    import cupy

    m = stencil(14).tolil()
    m[5] = 1.0
    m[2000, ::1] = 2.0
    m = m.tocsr()
    part = np.arange(m.shape[0]) * parts // m.shape[0]
    a = ehyb.build(on_gpu(as_csr(m)), part=part)
    assert len(a.long.long_rows) == 2
    x = np.random.default_rng(1).standard_normal(m.shape[0])
    np.testing.assert_allclose(ehyb.multiply(a, cupy.asarray(x)).get(), m @ x, rtol=1e-10)
    assert (a.outside == 0) == (parts == 1)
    assert abs(ehyb.to_csr(a).to_scipy() - m).max() == 0


def test_values_may_be_stored_narrower():
    import cupy

    m = stencil(8)
    a = ehyb.build(on_gpu(as_csr(m)), part=np.arange(512) // 100, dtype=np.float32)
    x = np.random.default_rng(1).standard_normal(512)
    np.testing.assert_allclose(ehyb.multiply(a, cupy.asarray(x)).get(), m @ x, rtol=1e-5, atol=1e-5)


def test_operator(tmp_path):
    import cupy
    import cupyx.scipy.sparse as csp

    m = stencil(8)
    a = spdist.ehyb(csp.csr_matrix(m), part=np.arange(512) // 100)
    x = np.random.default_rng(1).standard_normal(512)
    gx = cupy.asarray(x)
    np.testing.assert_allclose((a @ gx).get(), m @ x, rtol=1e-12)
    np.testing.assert_allclose(a.unpermute(a.permuted() @ a.permute(gx)).get(), m @ x, rtol=1e-12)
    a.save(tmp_path / "a.zarr")
    b = spdist.open_operator(tmp_path / "a.zarr", on_gpu=True)
    np.testing.assert_array_equal((b @ gx).get(), (a @ gx).get())
    assert abs(b.to_csr().to_scipy() - m).max() == 0


def test_partition_by_metis():
    m = stencil(12)
    for side, matrix in ((1, m), (3, sp.kron(m, np.ones((3, 3))).tocsr())):
        part = ehyb.partition(as_csr(matrix), 6, side)
        assert set(part) == set(range(6))
        assert np.bincount(part).max() < 1.2 * len(part) / 6
        assert all(len(set(part[i : i + side])) == 1 for i in range(0, len(part), side))
        rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        assert (part[rows] != part[matrix.indices]).mean() < 0.35


def test_what_does_not_fit_is_refused():
    with pytest.raises(MatrixError, match="for square matrices"):
        ehyb.build(on_gpu(CSR(np.zeros(3, np.int64), np.empty(0, np.int32), np.empty(0), (2, 4))))
    big = CSR(np.zeros(70_001, np.int64), np.empty(0, np.int32), np.empty(0), (70_000, 70_000))
    with pytest.raises(MatrixError, match="does not fit"):
        ehyb.build(on_gpu(big), part=np.zeros(70_000, np.int32))
    with pytest.raises(InputError, match=r"made by spdist\.ehyb"):
        spdist.operator(stencil(3), "sell").permuted()
