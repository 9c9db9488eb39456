"""Small products of SciPy's matrices: the same objects and bits as the general way gives, or left to it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import MatrixError
from spdist.inmemory import small
from spdist.inmemory.spgemm import multiply
from spdist.options import InMemoryOptions, ProductOptions
from tests.conftest import random_matrix

DTYPES = ("?", "i1", "u2", "i8", "f4", "f8", "c8", "c16")


def general(a, b):
    return multiply(a, b, ProductOptions(), InMemoryOptions())


def check_same(found, wanted):
    assert type(found) is type(wanted)
    assert (found.format, found.dtype, found.shape) == (wanted.format, wanted.dtype, wanted.shape)
    for name in ("indptr", "indices", "data"):
        assert getattr(found, name).dtype == getattr(wanted, name).dtype
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert found.has_canonical_format


def values(rng, count, dtype):
    """Small numbers, some of them zeros, whose sums often cancel."""
    return rng.integers(-2, 3, count).astype(dtype)


def shuffled(m, rng):
    """Return a CSR matrix with the entries of each row in another order."""
    order = np.concatenate(
        [rng.permutation(np.arange(*ends)) for ends in zip(m.indptr[:-1], m.indptr[1:], strict=True)] or [[]]
    )
    order = order.astype(np.int64)
    return type(m)((m.data[order], m.indices[order], m.indptr), shape=m.shape)


@st.composite
def operands(draw):
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sizes = [draw(st.integers(0, 11)) for _ in range(3)]
    pair = []
    for shape in (sizes[:2], sizes[1:]):
        m = sp.random(*shape, density=draw(st.floats(0, 1)), rng=rng, format="csr")
        m.data = values(rng, m.nnz, draw(st.sampled_from(DTYPES)))
        if draw(st.booleans()):
            m = sp.csr_array(m)
        if draw(st.booleans()):
            m = shuffled(m, rng)
        pair.append(m.asformat(draw(st.sampled_from(("csr", "csr", "csc", "coo", "lil")))))
    return pair


@settings(deadline=None)
@given(operands())
def test_products_are_those_of_the_general_way(pair):
    before = [m.copy() for m in pair]
    found = small.multiply(*pair)
    check_same(found, general(*pair))
    for m, copy in zip(pair, before, strict=True):
        np.testing.assert_array_equal(m.toarray(), copy.toarray())
    assert found.nnz == 0 or found.data.base is None or found.data.base is not pair[0].data


@pytest.mark.parametrize("rows", [10, 100, 1000, 4000])
@pytest.mark.parametrize("format", ["csr", "csc"])
def test_products_of_one_object_and_of_many_entries(monkeypatch, rows, format):
    monkeypatch.setattr(small, "kernels_are_loaded", lambda *kinds: False)  # whatever ran before in this process
    a = random_matrix(rows, rows, 5.0, rows).asformat(format)
    check_same(small.multiply(a, a), general(a, a))
    check_same(spdist.matmul(a, a.copy()), general(a, a))


def test_kernels_that_are_loaded_make_products_of_some_size(monkeypatch):
    monkeypatch.setattr(small, "kernels_are_loaded", lambda *kinds: True)
    assert small.multiply(random_matrix(100, 100, 5.0, 1), random_matrix(100, 100, 5.0, 2)) is not None
    assert small.multiply(random_matrix(1000, 1000, 5.0, 1), random_matrix(1000, 1000, 5.0, 2)) is None


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["?", "i8", "f4", "f8", "c8"]), st.booleans())
def test_blocks(seed, dtype, array):
    rng = np.random.default_rng(seed)
    r, s, t = (int(size) for size in rng.integers(1, 5, 3))
    sizes, pair = [int(size) for size in rng.integers(1, 9, 3)], []
    for shape, side in ((sizes[:2], (r, s)), (sizes[1:], (s, t))):
        m = sp.random(*shape, density=rng.random(), rng=rng, format="csr")
        data = values(rng, m.nnz * side[0] * side[1], dtype).reshape(m.nnz, *side)
        kind = sp.bsr_array if array else sp.bsr_matrix
        pair.append(kind((data, m.indices, m.indptr), shape=(shape[0] * side[0], shape[1] * side[1])))
    found = small.multiply(*pair)
    if r == s == t == 1:
        assert found is None
    else:
        check_same(found, general(*pair))
        assert found.blocksize == (r, t)


def left_to_the_general_way():
    a = random_matrix(20, 20, 3.0, 1)
    blocks = sp.bsr_array((np.ones((2, 2, 2)), [0, 1], [0, 1, 2]), shape=(4, 4))
    twice = sp.csr_array((np.ones(2), [1, 1], [0, 2]), shape=(1, 2))
    large = random_matrix(20_000, 20_000, 8.0, 2)
    swapped = a.copy()
    swapped.data = a.data.astype(a.dtype.newbyteorder())
    narrow = sp.csr_matrix((a.data, a.indices.astype(np.int64), a.indptr.astype(np.int64)), shape=a.shape)
    narrow.indices, narrow.indptr = a.indices.astype(np.int64), a.indptr.astype(np.int64)
    return {
        "not SciPy's": (a.toarray(), a), "shapes": (a, a[:5]), "duplicates": (twice, twice.T.tocsr()),
        "blocks that do not fit": (blocks, sp.bsr_array(np.ones((4, 3)), blocksize=(1, 3))),
        "blocks and entries": (blocks, sp.csr_array((4, 4))), "many entries": (large, large), "order": (swapped, a),
        "one dimension": (a, sp.coo_array(np.ones(20))), "int64": (narrow, a),
        "few entries of many columns": (sp.csr_array((1, 1)), sp.csr_array((1, 1 << 20))),
    }  # fmt: skip


@pytest.mark.parametrize("name", left_to_the_general_way())
def test_what_is_left_to_the_general_way(name):
    assert small.multiply(*left_to_the_general_way()[name]) is None


@pytest.mark.parametrize("spoil", [
    lambda m: m.indices.__setitem__(3, 99), lambda m: m.indices.__setitem__(3, -1),
    lambda m: m.indptr.__setitem__(2, 10_000), lambda m: m.indptr.__setitem__(2, -5),
    lambda m: m.indptr.__setitem__(-1, 2), lambda m: m.indptr.__setitem__(0, 1),
    lambda m: m.indptr.__setitem__(2, m.indptr[3] + 1),
])  # fmt: skip
@pytest.mark.parametrize("second", [False, True])
def test_arrays_that_do_not_fit_are_refused(spoil, second):
    good, bad = random_matrix(20, 20, 3.0, 1), random_matrix(20, 20, 3.0, 1)
    spoil(bad)
    pair = (good, bad) if second else (bad, good)
    assert small.multiply(*pair) is None
    with pytest.raises(MatrixError):
        spdist.spgemm(*pair)


def test_dtypes_that_are_not_multiplied():
    a = sp.csr_array(np.ones((2, 2)))
    a.data = a.data.astype(np.longdouble)
    with pytest.raises(MatrixError, match=a.data.dtype.name):
        spdist.spgemm(a, a)
