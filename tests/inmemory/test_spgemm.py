"""Products in memory: what they take and refuse, and products on a known pattern; on the CPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import InputError, MatrixError
from spdist.inmemory import host_operands, through_gpu
from spdist.matrices import csr
from spdist.matrices.csr import from_scipy
from tests.conftest import pattern_product, random_matrix
from tests.support.host_device import HostDevice


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
    with pytest.raises(
        InputError, match=r"'\.\[cu13\]' in its checkout\) on a machine with a GPU, or choose method='auto'"
    ):
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
    assert abs(spdist.spgemm(a, a, "scipy") - a @ a).max() < 1e-12
    assert len(calls) == 1
    assert abs(spdist.spgemm(a, a.copy(), "scipy") - a @ a).max() < 1e-12
    assert len(calls) == 3


@pytest.fixture
def gpu_on_the_host(monkeypatch):
    """Let the engine `cuda` stream blocks through a device that the host plays."""
    monkeypatch.setattr(through_gpu, "check_gpu", lambda method: None)
    monkeypatch.setattr(through_gpu, "_gpu", lambda limit, deterministic=False: HostDevice(limit))


def unsorted(rows: int, columns: int) -> sp.csr_array:
    """Return a matrix whose rows are not sorted and hold duplicates."""
    rng = np.random.default_rng(5)
    indptr = np.arange(0, 4 * rows + 1, 4)
    m = sp.csr_array((rng.random(4 * rows), rng.integers(0, columns, 4 * rows), indptr), shape=(rows, columns))
    assert not m.has_sorted_indices
    return m


@pytest.mark.parametrize("limit", [1 << 16, 1 << 20])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_the_device_takes_an_a_that_no_scan_has_seen(gpu_on_the_host, monkeypatch, limit, index):
    scanned, scan = [], csr.check_structure
    monkeypatch.setattr(
        csr, "check_structure", lambda m, *args, **keys: scanned.append(m.shape) or scan(m, *args, **keys)
    )
    a, b = unsorted(700, 500), random_matrix(500, 400, 4.0, 2)
    a.indptr, a.indices = a.indptr.astype(index), a.indices.astype(index)
    c = spdist.spgemm(a, b, "cuda", memory_limit=limit)
    np.testing.assert_allclose(c.toarray(), (a @ b).toarray())
    assert ((700, 500) in scanned) == (index is np.int64)
    spdist.spgemm(a, b, "cuda", memory_limit=limit, top_n=3)
    assert (700, 500) in scanned  # where duplicates would count, they are summed first


@pytest.mark.parametrize("bad", [-1, 500, 2**31 - 1])
@pytest.mark.parametrize("limit", [1 << 16, 1 << 20])
def test_a_bad_column_of_an_a_that_no_scan_has_seen_is_named(gpu_on_the_host, bad, limit):
    a = random_matrix(700, 500, 4.0, 1)
    row = int(np.flatnonzero(np.diff(a.indptr))[500])
    a.indices[a.indptr[row]] = bad
    with pytest.raises(MatrixError, match=rf"column {bad:,} in row {row:,} is outside \[0, 500\)"):
        spdist.spgemm(a, random_matrix(500, 400, 4.0, 2), "cuda", memory_limit=limit)


def test_offsets_of_an_a_that_no_scan_has_seen_are_checked(gpu_on_the_host):
    a = random_matrix(700, 500, 4.0, 1)
    a.indptr[300] = a.indptr[302] + 1
    with pytest.raises(MatrixError, match="offsets must not decrease"):
        spdist.spgemm(a, random_matrix(500, 400, 4.0, 2), "cuda", memory_limit=1 << 20)
    a.indptr[300], a.indptr[-1] = a.indptr[301], a.nnz + 5
    with pytest.raises(MatrixError, match="indptr ends at"):
        spdist.spgemm(a, random_matrix(500, 400, 4.0, 2), "cuda", memory_limit=1 << 20)


def test_batches_on_the_host_and_what_is_no_batch():
    a, b = random_matrix(30, 20, 3.0, 1), random_matrix(20, 10, 3.0, 2)
    found = spdist.spgemm([a, a], (b, b), top_n=3)
    assert [abs(c - spdist.spgemm(a, b, top_n=3)).max() for c in found] == [0, 0]
    assert spdist.spgemm([], []) == []
    with pytest.raises(InputError, match="A is a list of 1 matrices and B of 2"):
        spdist.spgemm([a], [b, b])
    with pytest.raises(InputError, match="takes two lists"):
        spdist.spgemm([a], b)
    with pytest.raises(MatrixError, match="shapes do not fit"):
        spdist.spgemm([a, a], [b, a])
