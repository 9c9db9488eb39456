"""Products with matrices of many columns on the GPU, against SciPy; the shapes of their groups of lanes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.kernels.spmv import columns
from tests.conftest import random_matrix
from tests.kernels.rowwise_gpu.test_multiply import TYPES, to_gpu
from tests.kernels.spmv.test_sell import stencil


def skewed(rows=300):
    """Rows of a few entries, empty ones, and rows of one piece, of several and of many."""
    rng = np.random.default_rng(2)
    lengths = np.append(rng.integers(0, 6, rows), [63, 64, 65, 128, 129, 900])
    rng.shuffle(lengths)
    places = [rng.choice(1000, n, replace=False) for n in lengths]
    data = rng.integers(-3, 4, lengths.sum()).astype(float)
    return sp.csr_matrix((data, np.concatenate(places), np.append(0, np.cumsum(lengths))), (len(lengths), 1000))


def check(m, count, types, offset=0):
    import cupy

    value, index, pointer = types
    pieces = columns.cut(to_gpu(m, value, index, pointer))
    x = np.random.default_rng(count).integers(-3, 4, (m.shape[1], count)).astype(value)
    room = cupy.empty(x.size + offset, value)
    there = room[offset:].reshape(x.shape)
    there[...] = cupy.asarray(x)
    y = cupy.full((m.shape[0], count), np.nan, value)
    assert columns.multiply(pieces, there, y) is y
    np.testing.assert_array_equal(y.get(), m @ x)
    return pieces


@pytest.mark.gpu
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("count", [1, 5, 6, 8, 16, 31, 32, 64, 100])
def test_products_are_scipys(types, count):
    pieces = check(skewed(), count, types)
    assert pieces.most == 32
    assert pieces.slots == 2 + 2 + 3 + 4 + 5 + 29
    check(skewed(), count, types, offset=1)  # not aligned


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5), (1, 1)])
def test_little_matrices(shape):
    pieces = check(sp.csr_matrix(shape), 8, TYPES[0])
    assert pieces.places is None
    check(stencil(3), 8, TYPES[0])


@pytest.mark.gpu
def test_operators_take_them_and_wait_for_what_was_launched_before():
    import cupy
    import cupyx.scipy.sparse as csp

    m = random_matrix(3000, 3000, 9.0, 1)
    x = np.random.default_rng(0).random((3000, 32))
    for method in ("auto", "sell", "csr", "cusparse", "levels"):
        a = spdist.operator(csp.csr_matrix(m), method)
        there, out = cupy.asarray(x), cupy.empty((3000, 32))
        for wide in (there, there[:, :8].copy(), cupy.asfortranarray(there), there + 1j * there, there.astype("f4")):
            near = 1e-5 if wide.dtype == "f4" else 1e-12
            np.testing.assert_allclose((a @ wide).get(), m @ wide.get(), rtol=near, atol=near)
        scaled = spdist.operator(csp.csr_matrix(m / abs(m).sum(axis=1).max()), method)
        wanted = x
        for _ in range(10):  # each begins early, and reads what the one before wrote
            scaled.matmat(there, out)
            scaled.matmat(out, there)
            wanted = m @ (m @ wanted) / abs(m).sum(axis=1).max() ** 2
        np.testing.assert_allclose(there.get(), wanted, rtol=1e-10, atol=1e-12)
        assert isinstance(a._made_for_columns, columns.Pieces)


@pytest.mark.parametrize(("count", "itemsize", "pieces", "nnz", "shape"), [
    (8, 8, 100, 300, (4, 2, 1)), (8, 8, 100, 2000, (4, 2, 4)), (8, 4, 100, 20_000, (2, 4, 8)),
    (32, 8, 100, 20_000, (16, 2, 2)), (64, 8, 100, 20_000, (32, 2, 1)), (100, 8, 100, 20_000, (32, 2, 1)),
    (5, 8, 100, 300, (8, 1, 1)), (9, 16, 100, 20_000, (16, 1, 2)), (8, 8, 1 << 15, 1 << 22, (4, 2, 2)),
    (8, 8, 1 << 20, 1 << 24, (4, 2, 1)),
])  # fmt: skip
def test_lanes_take_columns(count, itemsize, pieces, nnz, shape):
    assert columns.shape_of(count, itemsize, pieces, nnz) == shape
    assert shape in columns.shapes(itemsize)
