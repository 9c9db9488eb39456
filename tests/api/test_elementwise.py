"""Stored matrices by entries: sums, products, changed rows, against SciPy and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist.api import elementwise
from tests.conftest import random_matrix
from tests.support.strategies import csr_matrices

DTYPES = [np.dtype(name) for name in ("?", "i4", "f8")]


@st.composite
def pairs(draw):
    shape = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    return tuple(draw(csr_matrices(shape, dtype=dtype)) for dtype in draw(st.tuples(*[st.sampled_from(DTYPES)] * 2)))


def pattern(m) -> np.ndarray:
    found = np.zeros(m.shape, bool)
    found[np.repeat(np.arange(m.shape[0]), np.diff(m.indptr)), m.indices] = True
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs())
def test_any_two(tmp_path, pair):
    p, q = (m.to_scipy() for m in pair)
    a, b = (spdist.save(tmp_path / f"{name}.zarr", m, overwrite=True) for name, m in (("A", p), ("B", q)))
    total = spdist.ewise_add(a, b, tmp_path / "sum.zarr", overwrite=True).to_scipy()
    product = spdist.ewise_mult(a, b, tmp_path / "product.zarr", overwrite=True).to_scipy()
    assert total.dtype == product.dtype == np.result_type(p.dtype, q.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(total.toarray(), np.add(p.toarray(), q.toarray(), dtype=total.dtype))
        np.testing.assert_array_equal(product.toarray(), np.multiply(p.toarray(), q.toarray(), dtype=total.dtype))
    np.testing.assert_array_equal(pattern(total), pattern(p) | pattern(q))
    np.testing.assert_array_equal(pattern(product), pattern(p) & pattern(q))


@pytest.mark.parametrize("part", [3, 50, 1 << 22])
@pytest.mark.parametrize("offsets", [7, 1 << 20])
def test_parts_of_any_size(stored, tmp_path, monkeypatch, part, offsets):
    monkeypatch.setattr(elementwise, "PART_ENTRIES", part)
    monkeypatch.setattr(elementwise, "OFFSETS", offsets)
    p, q = random_matrix(60, 40, 5, 1), random_matrix(60, 40, 9, 2)
    a, b = stored("A", p), stored("B", q)
    assert abs(spdist.ewise_add(a, b, tmp_path / "sum").to_scipy() - (p + q)).max() == 0
    assert abs(spdist.ewise_mult(a, b, tmp_path / "product").to_scipy() - p.multiply(q)).max() == 0
    factors = np.arange(60.0)
    found = spdist.apply(a, tmp_path / "scaled", epilogue=spdist.Epilogue(rows=factors), threshold=0.5, top_n=3)
    expected = spdist.spgemm(
        p, sp.eye_array(40).tocsr(), epilogue=spdist.Epilogue(rows=factors), threshold=0.5, top_n=3
    )
    assert (found.to_scipy() != expected).nnz == 0
    spdist.open(tmp_path / "scaled").check()


def test_the_larger_of_two(stored, tmp_path):
    p, q = abs(random_matrix(40, 40, 5, 1)), abs(random_matrix(40, 40, 5, 2))
    a, b = stored("A", p), stored("B", q)
    for place in (tmp_path / "C", "memory://elementwise/C.zarr"):
        found = spdist.ewise_add(a, b, place, semiring="max_plus", overwrite=True)
        assert abs(found.to_scipy() - p.maximum(q)).max() == 0


def test_a_matrix_replaced_by_its_change(stored):
    a = stored("A", sp.eye_array(3).tocsr())
    spdist.ewise_add(a, a, a.url, overwrite=True)
    assert spdist.open(a.url).to_scipy().sum() == 6


def test_what_cannot_be_is_refused_before_work(stored, tmp_path):
    a, wide = stored("A", sp.eye_array(3).tocsr()), stored("W", sp.eye_array(3, 4).tocsr())
    blocks = stored("B", sp.bsr_array(np.eye(4), blocksize=(2, 2)))
    integers = stored("I", sp.eye_array(3, dtype=np.int64).tocsr())
    for call, error, says in (
        (lambda: spdist.ewise_add(a, wide, tmp_path / "C"), spdist.MatrixError, "3 x 3 and .* 3 x 4"),
        (lambda: spdist.ewise_mult(blocks, blocks, tmp_path / "C"), spdist.InputError, "stored in blocks"),
        (lambda: spdist.apply(blocks, tmp_path / "C"), spdist.InputError, "stored in blocks"),
        (lambda: spdist.ewise_add(a, a, wide.url), spdist.InputError, "exists"),
        (lambda: spdist.ewise_add(a, a, tmp_path / "C", semiring="plus"), spdist.InputError, "plus"),
        (lambda: spdist.ewise_add(sp.eye_array(3), a, tmp_path / "C"), spdist.InputError, "in memory"),
        (lambda: spdist.apply(a, tmp_path / "C", top_n=0), spdist.InputError, "top_n"),
        (
            lambda: spdist.apply(integers, tmp_path / "C", epilogue=spdist.Epilogue(normalize="l1")),
            spdist.InputError,
            "int64",
        ),
    ):
        with pytest.raises(error, match=says):
            call()
    assert not (tmp_path / "C").exists()
