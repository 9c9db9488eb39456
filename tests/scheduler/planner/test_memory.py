"""The bound is a handful of integers: check it on numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdist.scheduler.planner import memory


@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_upper_bound_holds_for_any_product(nrows, ncols, data):
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    a = rng.random((nrows, 5)) < 0.3
    b = rng.random((5, ncols)) < 0.3
    nnz = int(((a.astype(int) @ b.astype(int)) > 0).sum())
    empty_rows, empty_columns = int((~a.any(axis=1)).sum()), int((~b.any(axis=0)).sum())
    bound = memory.upper_bound_nnz(nrows, ncols, empty_rows, empty_columns)
    assert nnz <= bound <= nrows * ncols
    assert memory.upper_bound_ratio(nrows, ncols, empty_rows, empty_columns) == bound / (nrows * ncols)


def test_expansion_size_counts_every_product():
    rng = np.random.default_rng(1)
    a, b = rng.random((20, 30)) < 0.2, rng.random((30, 10)) < 0.2
    assert memory.expansion_size(a.sum(axis=0), b.sum(axis=1)) == int((a.astype(int) @ b.astype(int)).sum())


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 10**9), st.integers(1, 8))
def test_even_blocks_is_the_least_number_that_fits(a_nnz, b_nnz, c_nnz, limit, pairs):
    nb = memory.even_blocks(a_nnz, b_nnz, c_nnz, limit, pairs)
    room = int(memory.USABLE * limit / pairs)
    if nb == 0:
        assert c_nnz >= room
        return
    assert -(-(a_nnz + b_nnz) // nb) + c_nnz <= room
    if nb > 1:
        assert -(-(a_nnz + b_nnz) // (nb - 1)) + c_nnz > room


@given(st.integers(1, 10**12), st.integers(0, 10**9), st.integers(1, 4))
def test_limit_for_is_the_inverse_of_block_budget(pair, fixed, pairs):
    limit = memory.limit_for(pair, fixed, pairs)
    assert memory.block_budget(limit, fixed, pairs) >= pair
    assert memory.block_budget(limit - 3, fixed, pairs) <= pair


def test_fits_is_equation_5():
    assert memory.fits(30, 30, 30, 100)
    assert not memory.fits(30, 30, 31, 100)
    assert memory.fits(15, 15, 15, 100, blocks_in_flight=2)
    assert not memory.fits(16, 15, 15, 100, blocks_in_flight=2)


@pytest.mark.parametrize(("text", "size"), [("32MiB", 2**25), ("1.5G", 3 * 2**29), ("2GB", 2 * 10**9), (77, 77)])
def test_parse_bytes(text, size):
    from spdist.foundation.units import parse_bytes

    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2 furlongs", "GiB", -5])
def test_parse_bytes_refuses(text):
    from spdist.errors import InputError
    from spdist.foundation.units import parse_bytes

    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(text)
