"""A matrix cut by rows: shares are whole, and their products with exchanged halos equal the whole matrix's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from spdist.matrices.csr import from_scipy
from spdist.operators import halo
from tests.conftest import random_matrix


def cut(m: sp.csr_matrix, part: np.ndarray, parts: int) -> list[halo.Share]:
    """Return the shares, as workers and driver make them together."""
    numbers = [np.flatnonzero(part == rank) for rank in range(parts)]
    rows = [halo.Rows(mine, from_scipy(m[mine])) for mine in numbers]
    exchanges = halo.exchanges([halo.needed(mine) for mine in rows], part)
    return [halo.share(rank, *pair) for rank, pair in enumerate(zip(rows, exchanges, strict=True))]


def exchanged(shares, x):
    """Return the x of each part with its halo, as messages would fill it."""
    own = [np.concatenate([x[s.rows], np.full(s.outer.shape[1] - len(s.rows), np.nan)]) for s in shares]
    for s in shares:
        for q, places in s.sends.items():
            first, last = shares[q].receives[s.rank]
            own[q][first:last] = x[s.rows][places]
    return own


@pytest.mark.parametrize("parts", [1, 2, 5, 9])
def test_parts_multiply_as_the_whole(parts):
    m = random_matrix(60, 60, 4, 3)
    part = np.random.default_rng(parts).integers(0, parts, 60)
    part[part == 3] = 0  # a part without rows
    shares = cut(m, part, parts)
    np.testing.assert_array_equal(np.sort(np.concatenate([s.rows for s in shares])), np.arange(60))
    x, y = np.random.default_rng(1).standard_normal(60), np.full(60, np.nan)
    for s, own in zip(shares, exchanged(shares, x), strict=True):
        inner = s.inner.to_scipy() @ own[: len(s.rows)]
        y[s.rows] = np.concatenate([inner, s.outer.to_scipy() @ own])
    np.testing.assert_allclose(y, m @ x, rtol=1e-12, atol=1e-12)


def test_rows_that_need_nothing_are_inner():
    m = sp.csr_matrix(sp.diags_array([1.0, 2.0, 1.0], offsets=[-1, 0, 1], shape=(10, 10)))
    first, last = cut(m, halo.even_rows(m.indptr, 2), 2)
    assert (first.inner.nrows, first.outer.nrows) == (4, 1)
    assert first.sends[1].tolist() == [4]
    assert last.receives[0] == (5, 6)


def test_even_rows_balance_entries():
    m = random_matrix(5000, 5000, 6, 1)
    part = halo.even_rows(m.indptr, 7)
    assert (np.diff(part) >= 0).all()
    entries = np.bincount(part, np.diff(m.indptr))
    assert entries.max() < 1.1 * m.nnz / 7
