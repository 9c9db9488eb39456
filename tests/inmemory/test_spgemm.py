"""Products in memory: what they take and refuse, and products on a known pattern; on the CPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError, MatrixError
from spdist.inmemory import host_operands
from spdist.matrices.csr import from_scipy
from tests.conftest import pattern_product, random_matrix


class FakeGpuMatrix:
    """Stands in for a matrix of CuPy's where there is none."""

    __module__ = "cupyx.scipy.sparse"
    shape = (4, 4)


def test_operands_of_both_kinds_are_refused():
    with pytest.raises(MatrixError, match=r"A is a .*csr_matrix, B a cupyx\.scipy\.sparse\.FakeGpuMatrix: copy both"):
        spdist.spgemm(random_matrix(4, 4, 2.0, 1), FakeGpuMatrix())


def test_methods_of_the_gpu_are_named():
    with pytest.raises(InputError, match="choose one of auto, rowwise, esc"):
        spdist.spgemm(FakeGpuMatrix(), FakeGpuMatrix(), "numba")


def test_methods_of_the_cpu_are_named():
    with pytest.raises(InputError, match="'esc' is not one of auto, scipy, numba, cuda, hyspmm"):
        spdist.spgemm(random_matrix(4, 4, 2.0, 1), random_matrix(4, 4, 2.0, 1), "esc")


def test_hyspmm_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match=r"install 'spdist\[cu13\]' on a machine with a GPU, or choose method='auto'"):
        spdist.spgemm(random_matrix(4, 4, 2.0, 1), random_matrix(4, 4, 2.0, 1), "hyspmm")


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64"])
def test_numeric_is_the_product_on_the_structural_pattern(dtype):
    a, b = random_matrix(30, 40, 3.0, 1, dtype), random_matrix(40, 20, 3.0, 2, dtype)
    a.data[::3] = 0  # stored zeros belong to the pattern
    pattern = spdist.symbolic(a, b)
    truth = pattern_product(a, b)
    np.testing.assert_array_equal(pattern.indptr, truth.indptr)
    np.testing.assert_array_equal(pattern.indices, truth.indices)
    c = spdist.numeric(pattern, a, b)
    assert c.dtype == dtype
    assert c.nnz == pattern.nnz == truth.nnz
    np.testing.assert_allclose(c.toarray(), (a @ b).toarray(), rtol=1e-6)


def test_numeric_shares_its_structure():
    a = random_matrix(30, 30, 3.0, 1)
    pattern = spdist.symbolic(a, a)
    first, second = spdist.numeric(pattern, a, a), spdist.numeric(pattern, 2 * a, a)
    assert np.shares_memory(first.indices, second.indices)
    np.testing.assert_allclose(second.data, 2 * first.data)


def test_numeric_refuses_another_structure():
    a, b = random_matrix(30, 30, 3.0, 1), random_matrix(30, 30, 3.0, 2)
    with pytest.raises(MatrixError, match="call symbolic again"):
        spdist.numeric(spdist.symbolic(a, a), a, b)


def test_arrays_stay_arrays():
    a = sp.csr_array(random_matrix(10, 10, 3.0, 1))
    assert isinstance(spdist.spgemm(a, a), sp.csr_array)
    assert isinstance(spdist.numeric(spdist.symbolic(a, a), a, a), sp.csr_array)


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_an_object_that_is_given_twice_is_checked_once(monkeypatch, form):
    a = sp.random_array((60, 60), density=0.1, format=form, rng=1)
    calls = []

    def counted(matrix, threads):
        calls.append(matrix)
        return from_scipy(matrix, threads)

    monkeypatch.setattr(host_operands, "from_scipy", counted)
    assert abs(spdist.spgemm(a, a) - a @ a).max() < 1e-12
    assert len(calls) == 1
    assert abs(spdist.spgemm(a, a.copy()) - a @ a).max() < 1e-12
    assert len(calls) == 3
