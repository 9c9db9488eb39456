"""Products of block matrices on the CPU against SciPy's of their entries."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import InputError, MatrixError
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.matrices.bsr import BSR, entries, from_scipy
from tests.conftest import random_matrix
from tests.support.strategies import DTYPES, csr_pairs

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def block_matrix(nrows: int, ncols: int, per_row: float, size: tuple[int, int], seed: int, dtype="float64") -> BSR:
    """Return a canonical block matrix of small integers, zeros and zero blocks among them."""
    pattern = random_matrix(nrows, ncols, per_row, seed)
    values = np.random.default_rng(seed).integers(-3, 4, (pattern.nnz, *size))
    values[::5] = 0
    shape = nrows * size[0], ncols * size[1]
    return BSR(pattern.indptr.astype(np.int64), pattern.indices, values.astype(dtype), shape)


def assert_is_block_product(c: BSR, a: BSR, b: BSR) -> None:
    """Check the pattern, which keeps blocks that cancel, and every value."""
    ones = [m.pattern(np.ones(m.blocks)).to_scipy() for m in (a, b)]
    pattern = sp.csr_array(ones[0] @ ones[1])
    pattern.sort_indices()
    np.testing.assert_array_equal(c.indptr, pattern.indptr)
    np.testing.assert_array_equal(c.indices, pattern.indices)
    assert c.blocksize == (a.blocksize[0], b.blocksize[1])
    truth = a.to_scipy().tocsr() @ b.to_scipy().tocsr()
    assert c.dtype == truth.dtype
    np.testing.assert_array_equal(c.to_scipy().toarray(), truth.toarray())


@settings(max_examples=25, deadline=None)
@given(
    csr_pairs(), SIZES, SIZES, SIZES, st.sampled_from(["float32", "float64", "complex64"]), st.integers(0, 2**32 - 1)
)
def test_any_blocks(pair, r, s, t, dtype, seed):
    rng = np.random.default_rng(seed)
    a, b = (
        BSR(m.indptr, m.indices, rng.integers(-3, 4, (m.nnz, *size)).astype(dtype), _scaled(m.shape, size))
        for m, size in zip(pair, ((r, s), (s, t)), strict=True)
    )
    assert_is_block_product(bsr_cpu.multiply(a, b, threads=2), a, b)


def _scaled(shape, size):
    return shape[0] * size[0], shape[1] * size[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(dtype):
    a, b = (block_matrix(20, 20, 3.0, (3, 3), seed, dtype) for seed in (1, 2))
    assert_is_block_product(bsr_cpu.multiply(a, b), a, b)


@pytest.mark.parametrize("size", [5, 8, 16, 17])
def test_large_blocks_and_threads(size, monkeypatch):
    monkeypatch.setattr(bsr_cpu, "PARALLEL_VALUES", 0)
    a, b = block_matrix(40, 30, 4.0, (size, size), 1), block_matrix(30, 50, 4.0, (size, 2), 2)
    assert_is_block_product(bsr_cpu.multiply(a, b, threads=3), a, b)


def test_results_equal_products_of_entries_bit_for_bit():
    a = block_matrix(60, 60, 5.0, (3, 3), 1)
    a = BSR(a.indptr, a.indices, np.random.default_rng(1).standard_normal(a.data.shape), a.shape)
    c = spdist.spgemm(a.to_scipy().tocsr(), a.to_scipy().tocsr())
    np.testing.assert_array_equal(entries(bsr_cpu.multiply(a, a)).data, c.data)


def test_stored_zeros_meet_infinity():
    a = BSR(np.array([0, 1]), np.array([0], np.int32), np.array([[[0.0, 1.0], [2.0, 3.0]]]), (2, 2))
    b = BSR(a.indptr, a.indices, np.array([[[np.inf, 1.0], [2.0, 3.0]]]), (2, 2))
    np.testing.assert_array_equal(bsr_cpu.multiply(a, b).data, [[[np.nan, 3.0], [np.inf, 11.0]]])


@pytest.mark.parametrize("kind", [sp.bsr_array, sp.bsr_matrix])
def test_scipy_in_scipy_out(kind):
    a, b = (kind(block_matrix(20, 20, 3.0, size, 1).to_scipy()) for size in ((2, 3), (3, 4)))
    c = spdist.spgemm(a, b)
    assert isinstance(c, kind)
    assert c.blocksize == (2, 4)
    np.testing.assert_array_equal(c.toarray(), (a.tocsr() @ b.tocsr()).toarray())


def test_unsorted_blocks_and_duplicates_are_put_in_order():
    data, indices, indptr = np.arange(12.0).reshape(3, 2, 2), np.array([1, 0, 1], np.int32), np.array([0, 3, 3])
    messy = sp.bsr_array((data, indices, indptr), shape=(4, 4))
    truth = messy.toarray()
    m = from_scipy(messy)
    np.testing.assert_array_equal(m.indices, [0, 1])
    np.testing.assert_array_equal(m.to_scipy().toarray(), truth)
    np.testing.assert_array_equal(messy.indices, [1, 0, 1])


@pytest.mark.parametrize("size", [(3, 3), (1, 4), (5, 2)])
def test_entries(size):
    m = block_matrix(30, 20, 3.0, size, 4)
    out = entries(m)
    truth = m.to_scipy().tocsr()
    np.testing.assert_array_equal(out.indptr, truth.indptr)
    np.testing.assert_array_equal(out.to_scipy().toarray(), truth.toarray())


@pytest.mark.parametrize("which", ["scalar", "sizes", "option"])
def test_what_does_not_fit_is_multiplied_by_entries_and_said(which, caplog):
    a = block_matrix(20, 20, 3.0, (2, 2), 1).to_scipy()
    b = {"scalar": a.tocsr(), "sizes": a.tobsr((4, 4)), "option": a}[which]
    with caplog.at_level(logging.INFO, "spdist"):
        c = spdist.spgemm(a, b, semiring="plus_first" if which == "option" else "plus_times")
    assert c.format == "csr"
    assert "A: its blocks of 2 x 2 are multiplied entry by entry" in caplog.text
    if which != "option":
        np.testing.assert_array_equal(c.toarray(), (a @ a).toarray())


def test_refusals():
    a, b = block_matrix(20, 20, 3.0, (2, 2), 1), block_matrix(21, 20, 3.0, (2, 2), 1)
    with pytest.raises(MatrixError, match=r"A is 40 x 40 in blocks of 2 x 2, B 42 x 40"):
        bsr_cpu.multiply(a, b)
    with pytest.raises(InputError, match="'hyspmm' is not for block matrices: choose one of auto, numba"):
        spdist.spgemm(a, a, "hyspmm")
    with pytest.raises(MatrixError, match=r"shape \(blocks, r, s\)"):
        BSR(a.indptr, a.indices, a.data[1:], a.shape)
    with pytest.raises(MatrixError, match="needs whole blocks"):
        BSR(a.indptr, a.indices, a.data, (41, 40))
    falling = BSR(a.indptr, a.indices[::-1].copy(), a.data, a.shape)
    with pytest.raises(MatrixError, match=r"B: row \d+ is not sorted"):
        spdist.spgemm(a, falling)
    broken = a.to_scipy()
    broken.indices[0] = 25
    with pytest.raises(MatrixError, match="column 25"):
        from_scipy(broken)


def test_an_operator_takes_blocks():
    m = block_matrix(60, 60, 4.0, (3, 3), 1).to_scipy()
    x = np.random.default_rng(1).standard_normal(180)
    np.testing.assert_allclose(spdist.operator(m) @ x, m @ x, rtol=1e-12, atol=1e-12)
