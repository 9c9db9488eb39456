"""Block matrices times vectors against SciPy."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.errors import MatrixError
from spdist.kernels.spmv import bsr as bsr_spmv
from spdist.kernels.spmv import parallel
from spdist.matrices.bsr import BSR
from tests.kernels.bsr.test_multiply_cpu import block_matrix


def numbers(shape, dtype, seed=3):
    values = np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)
    return values + 2j * values[::-1] if np.dtype(dtype).kind == "c" else values


SIZES = [(1, 1), (2, 2), (3, 3), (2, 5), (6, 6), (17, 3)]
COLUMNS = [None, 1, 3, 8, 19]
CASES = [
    *((size, columns, ("float64", "float64")) for size in SIZES for columns in COLUMNS),
    *((size, columns, types) for types in (("float32", "float64"), ("complex64", "complex128"))
      for size in SIZES for columns in COLUMNS if size == (3, 3) or columns == 3),
]  # fmt: skip
"""A kernel is compiled for each: of numbers that are widened, for every size of blocks and every number of columns."""


@pytest.mark.parametrize(("size", "columns", "types"), CASES)
def test_equals_scipy(size, columns, types):
    a = block_matrix(60, 50, 4.0, size, 1, types[0])
    x = numbers((a.shape[1],) if columns is None else (a.shape[1], columns), types[1])
    y = bsr_spmv.multiply(a, x)
    assert y.dtype == types[1]
    np.testing.assert_array_equal(y, a.to_scipy().tocsr() @ x)
    out = np.full_like(y, np.nan)
    assert bsr_spmv.multiply(a, x, out) is out
    np.testing.assert_array_equal(out, y)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(threads, monkeypatch):
    monkeypatch.setattr(parallel, "THREAD_ENTRIES", 1)
    a = block_matrix(300, 300, 9.0, (3, 3), 1)
    a = BSR(a.indptr, a.indices, np.random.default_rng(1).standard_normal(a.data.shape), a.shape)
    x = np.random.default_rng(2).standard_normal((900, 2))
    np.testing.assert_array_equal(bsr_spmv.multiply(a, x, threads=threads), bsr_spmv.multiply(a, x))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1)])
def test_empty(shape):
    a = block_matrix(*shape, 1.0, (2, 3), 1)
    np.testing.assert_array_equal(bsr_spmv.multiply(a, np.ones(a.shape[1])), a.to_scipy() @ np.ones(a.shape[1]))
    assert bsr_spmv.multiply(a, np.ones((a.shape[1], 0))).shape == (a.shape[0], 0)


def test_wrong_shapes_are_refused():
    a = block_matrix(5, 4, 2.0, (2, 3), 1)
    with pytest.raises(MatrixError, match=r"A is 10 x 12, x has shape \(10,\)"):
        bsr_spmv.multiply(a, np.ones(10))
    with pytest.raises(MatrixError, match=r"out must have \(10,\)"):
        bsr_spmv.multiply(a, np.ones(12), np.ones(12))
