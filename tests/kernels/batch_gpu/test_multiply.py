"""Many small products on the GPU as one, against SciPy."""

from __future__ import annotations

import numpy as np
import pytest

import spdist
from spdist.errors import MatrixError
from spdist.kernels.batch_gpu import multiply as batch
from tests.conftest import random_matrix
from tests.kernels.rowwise_gpu.test_multiply import KINDS, TYPES, a_matrix, assert_product, to_gpu

pytestmark = pytest.mark.gpu


def pairs_of(count, types, seed=0):
    """Return pairs of small matrices, some without rows, columns or entries, on the host and on the GPU."""
    rng = np.random.default_rng(seed)
    host = []
    for number in range(count):
        n, k, m = (0, 5, 5) if number == 3 else (5, 0, 5) if number == 4 else rng.integers(1, 40, 3)
        host.append((a_matrix(KINDS[number % 5], n, k, rng), a_matrix(KINDS[number % 3], k, m, rng)))
    return host, [tuple(to_gpu(one, *types) for one in pair) for pair in host]


@pytest.mark.parametrize("types", TYPES)
def test_each_product_is_scipys(types):
    host, there = pairs_of(12, types)
    assert batch.groups(there) == [list(range(12))]
    found = batch.multiply(there)
    for c, (a, b), (left, _) in zip(found, host, there, strict=True):
        assert_product(c, a, b)
        assert (c.dtype, c.indices.dtype, c.indptr.dtype) == (left.dtype, left.indices.dtype, left.indptr.dtype)
        for name in ("indptr", "indices", "data"):
            array, first = getattr(c, name), getattr(found[0], name)
            assert not array.size or (array.data.ptr - first.data.ptr) % 256 == 0


def test_groups_are_of_one_kind_and_small(monkeypatch):
    _, doubles = pairs_of(6, TYPES[0])
    _, floats = pairs_of(2, TYPES[1])
    other = (doubles[0][0], floats[0][1])
    assert batch.groups([*doubles, *floats, other, *doubles]) == [
        [0, 1, 2, 3, 4, 5], [6, 7], [8], [9, 10, 11, 12, 13, 14],
    ]  # fmt: skip
    monkeypatch.setattr(batch, "MOST_ENTRIES", 0)
    assert [0] in batch.groups(doubles)
    monkeypatch.undo()
    monkeypatch.setattr(batch, "JOINED_ENTRIES", sum(m.nnz for pair in doubles[:3] for m in pair))
    assert batch.groups(doubles)[0] == [0, 1, 2]
    assert batch.groups([]) == []


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("spoil", ["column", "offset", "start", "end"])
def test_arrays_that_do_not_fit_are_noticed(side, spoil):
    a = random_matrix(9, 9, 3.0, 1)
    spoilt = a.copy()
    if spoil == "column":
        spoilt.indices[2] = 9
    else:
        place, value = {"offset": (3, 1000), "start": (0, 1), "end": (-1, 3)}[spoil]
        spoilt.indptr[place] = value
    bad = [to_gpu(a), to_gpu(a)]
    bad[side] = to_gpu(spoilt)
    try:
        assert batch.multiply([(to_gpu(a), to_gpu(a)), tuple(bad)]) is None
    except MatrixError:
        assert (side, spoil) != (0, "column")  # a clamped offset may be one that falls, a clamped column there twice


def test_lists_of_matrices():
    import cupyx.scipy.sparse as csp

    host = [pair for pair in pairs_of(20, TYPES[0], seed=5)[0] if 0 not in (*pair[0].shape, *pair[1].shape)]
    there = [[csp.csr_matrix(m) for m in side] for side in zip(*host, strict=True)]
    there[1][7] = there[1][7].tocsc()
    for options in ({}, {"deterministic": True}, {"top_n": 2}):
        for c, a, b in zip(spdist.spgemm(*there, **options), *there, strict=True):
            wanted = spdist.spgemm(a, b, **options)
            assert (type(c), c.dtype, c.format) == (type(wanted), wanted.dtype, wanted.format)
            assert_product(to_gpu(c.get()), *(m.get().tocsr() for m in (a, b))) if not options.get("top_n") else None
            assert abs(c.get() - wanted.get()).sum() == 0
    unsorted = csp.csr_matrix(random_matrix(9, 9, 3.0, 1))
    unsorted.indices[:] = unsorted.indices[::-1].copy()
    unsorted.has_sorted_indices = unsorted.has_canonical_format = False
    a = csp.csr_matrix(random_matrix(9, 9, 3.0, 1))
    found = spdist.spgemm([a, a], [a, unsorted])
    assert abs(found[1].get() - a.get() @ unsorted.get()).max() < 1e-12
