"""Products with matrices of several columns on the CPU, against SciPy: both add in the order of entries."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.kernels.spmv import columns_cpu
from spdist.kernels.spmv.columns_cpu import Rows
from spdist.matrices.csr import from_scipy
from tests.conftest import random_matrix
from tests.kernels.spmv.test_columns import skewed


def matrix(dtype=float):
    m = skewed().astype(dtype)
    m.sort_indices()
    m.data = numbers(m.nnz, dtype=dtype)
    return m


def numbers(*shape, dtype=float):
    return np.random.default_rng(shape[-1]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 15, 32, 47, 64])
def test_products_are_scipys(dtype, index, count):
    m = matrix(dtype)
    m.indices, m.indptr = m.indices.astype(index), m.indptr.astype(index)
    x = numbers(m.shape[1], count, dtype=dtype)
    y = np.full((m.shape[0], count), np.nan, dtype)
    assert Rows(from_scipy(m)).multiply(x, y, 1) is y
    np.testing.assert_array_equal(y, m @ x)


def test_narrow_values_are_widened():
    m = matrix("f4")
    x = numbers(m.shape[1], 6)
    np.testing.assert_array_equal(Rows(from_scipy(m)).multiply(x, None, 1), m.astype("f8") @ x)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), st.integers(0, 99))
def test_any_shape(nrows, ncols, count, seed):
    m = sp.csr_matrix(random_matrix(max(nrows, 1), max(ncols, 1), 3, seed))[:nrows, :ncols].astype(float)
    x = numbers(ncols, count)
    np.testing.assert_array_equal(Rows(from_scipy(m)).multiply(x, None, 1), m @ x)


@pytest.mark.parametrize("method", ["sell", "scipy", "popular"])
def test_operators_share_rows_among_threads(method, monkeypatch):
    monkeypatch.setattr(sys.modules["spdist.kernels.spmv.parallel"], "THREAD_ENTRIES", 64)
    m = matrix()
    op = spdist.operator(m, method, threads=3)
    for count in (1, 2, 5, 33):
        x = numbers(m.shape[1], count)
        np.testing.assert_allclose(op @ x, m @ x, atol=1e-12)
        out = np.empty((m.shape[0], count))
        assert op.matmat(x, out) is out
        np.testing.assert_allclose(out, m @ x, atol=1e-12)
    x = numbers(m.shape[1])
    np.testing.assert_allclose(op @ x, m @ x, atol=1e-12)


def test_which_operators_sum_several_columns_at_once(monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr(
        columns_cpu.Rows, "multiply", lambda self, x, out, threads: taken.append(self.matrix) or x[:306]
    )
    m = matrix()
    x, one = numbers(1000, 3), numbers(1000, 1)
    op = spdist.operator(m, "sell")
    op.save(tmp_path / "op.zarr")
    for sums in (op, spdist.open_operator(tmp_path / "op.zarr")):
        np.testing.assert_array_equal(sums @ x, x[:306])
        np.testing.assert_array_equal(sums @ x, x[:306])
        assert taken.pop() is taken.pop()
        assert (sums @ one).shape == (306, 1)
    np.testing.assert_array_equal(op @ (x + 1j * x), x[:306] + 1j * x[:306])  # as six real columns
    assert taken.pop().shape == m.shape
    others = (m, "scipy"), (m.astype("c8"), "sell"), (sp.kron(m, np.ones((2, 2))).tobsr((2, 2)), "bsr")
    for other, method in others:
        made = spdist.operator(other, method)
        assert (made @ numbers(made.shape[1], 3)).shape == (made.shape[0], 3)
    assert not taken
