"""Matrices of dense blocks of many sizes: converted and multiplied, against SciPy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import InputError, MatrixError
from spdist.matrices import vbr
from spdist.matrices.vbr import VBR
from tests.support.strategies import csr_pairs


def bounds(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return the bounds of parts of random sizes."""
    inner = np.flatnonzero(rng.random(max(size - 1, 0)) < 0.4) + 1
    return np.concatenate([[0], inner, [size]]) if size else np.zeros(1, np.int64)


def matrix(nrows: int, ncols: int, seed: int, rows: np.ndarray, columns: np.ndarray) -> VBR:
    """Return a matrix of full blocks of small integers."""
    rng = np.random.default_rng(seed)
    pattern = sp.random_array((len(rows) - 1, len(columns) - 1), density=0.1, rng=rng, format="csr")
    heights, widths = np.diff(rows), np.diff(columns)
    indptr, indices = pattern.indptr.astype(np.int64), pattern.indices
    owner = np.repeat(np.arange(len(heights)), np.diff(indptr))
    data = rng.integers(-3, 4, int((heights[owner] * widths[indices]).sum())).astype(float)
    return VBR(rows, columns, indptr, indices, data)


def assert_is_product(c: VBR, a: VBR, b: VBR) -> None:
    """Check blocks, those that cancel among them, and values."""
    pattern = sp.csr_array(a.pattern(np.ones(a.blocks)).to_scipy() @ b.pattern(np.ones(b.blocks)).to_scipy())
    pattern.sort_indices()
    np.testing.assert_array_equal(c.indptr, pattern.indptr)
    np.testing.assert_array_equal(c.indices, pattern.indices)
    truth = a.entries().to_scipy() @ b.entries().to_scipy()
    np.testing.assert_array_equal(c.entries().to_scipy().toarray(), truth.toarray())


@settings(max_examples=60, deadline=None)
@given(csr_pairs(), st.integers(0, 2**32 - 1))
def test_products_are_scipys(pair, seed):
    rng = np.random.default_rng(seed)
    inner = bounds(rng, pair[0].ncols)
    a = vbr.from_scipy(pair[0].to_scipy(), bounds(rng, pair[0].nrows), inner)
    b = vbr.from_scipy(pair[1].to_scipy(), inner, bounds(rng, pair[1].ncols))
    for m, original in ((a, pair[0]), (b, pair[1])):
        assert m.shape == original.shape
        np.testing.assert_array_equal(m.entries().to_scipy().toarray(), original.to_scipy().toarray())
    assert_is_product(spdist.spgemm(a, b), a, b)


def test_runs_of_rows_and_columns_make_full_blocks():
    parts = [np.ones((2, 3)), np.ones((4, 1)), np.ones((1, 5))]
    m = vbr.from_scipy(sp.block_diag(parts))
    np.testing.assert_array_equal(m.row_bounds, [0, 2, 6, 7])
    np.testing.assert_array_equal(m.column_bounds, [0, 3, 4, 9])
    assert m.nnz == 15
    shared = sp.csr_array(np.array([[1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 0, 0], [0, 0, 0]]))
    np.testing.assert_array_equal(vbr.from_scipy(shared).row_bounds, [0, 1, 3, 5])


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(2)
    a = matrix(50, 60, 1, bounds(rng, 50), bounds(rng, 60))
    b = matrix(60, 40, 2, bounds(rng, 60), bounds(rng, 40))
    with pytest.raises(MatrixError, match="are not cut as the rows of B"):
        spdist.spgemm(a, b)
    with pytest.raises(InputError, match="a VBR is multiplied by a VBR"):
        spdist.spgemm(a, sp.eye_array(60, format="csr"))
    with pytest.raises(MatrixError, match="row bounds of blocks must rise from 0"):
        VBR(np.array([0, 2, 2]), a.column_bounds, a.indptr, a.indices, a.data)
    with pytest.raises(MatrixError, match="values, but there are"):
        VBR(a.row_bounds, a.column_bounds, a.indptr, a.indices, a.data[1:])
    with pytest.raises(MatrixError, match="do not fit"):
        VBR(a.row_bounds, a.column_bounds, a.indptr[:-1], a.indices, a.data)
    with pytest.raises(MatrixError, match="bounds end at 50 and 60, the matrix is 3 x 3"):
        vbr.from_scipy(sp.eye_array(3, format="csr"), a.row_bounds, a.column_bounds)


@pytest.mark.gpu
def test_products_on_the_gpu():
    import cupy

    rng = np.random.default_rng(3)
    cuts = [bounds(rng, size) for size in (500, 400, 300)]
    a, b = matrix(500, 400, 1, *cuts[:2]), matrix(400, 300, 2, *cuts[1:])

    def moved(m: VBR, to) -> VBR:
        return VBR(*(to(x) for x in (m.row_bounds, m.column_bounds, m.indptr, m.indices, m.data)))

    c = spdist.spgemm(moved(a, cupy.asarray), moved(b, cupy.asarray))
    assert_is_product(moved(c, cupy.asnumpy), a, b)
    with pytest.raises(MatrixError, match="bring both to one side"):
        spdist.spgemm(moved(a, cupy.asarray), b)


def test_the_module_is_a_name_of_the_package():
    """In a process that has not imported it."""
    program = "import spdist; name = 'spdist.matrices.vbr'; "
    program += "print(name in sys.modules, spdist.vbr.from_scipy.__name__, 'vbr' in dir(spdist))"
    found = subprocess.run([sys.executable, "-c", f"import sys; {program}"], capture_output=True, text=True, check=True)
    assert found.stdout == "False from_scipy True\n"
