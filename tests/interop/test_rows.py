"""Stored matrices as SciPy's: whole, by rows and columns, and in products with vectors."""

from __future__ import annotations

import dataclasses
from uuid import uuid4

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist.interop import rows as rows_module
from spdist.jobs.operands import canonical_rows
from spdist.storage.writer import MatrixWriter
from tests.conftest import random_matrix

M = sp.csr_array(random_matrix(57, 43, 4, 1))


@pytest.fixture(scope="module")
def a():
    return spdist.save("memory://rows.zarr", M, overwrite=True)


@pytest.fixture
def blocks(stored):
    m = sp.bsr_array((np.arange(24.0).reshape(4, 2, 3) + 1, [0, 2, 1, 2], [0, 2, 3, 4]))
    return m, stored("blocks", m)


def same(found, expected) -> None:
    if np.ndim(expected) == 0 and not sp.issparse(expected):
        assert found == expected
        return
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.array_equal(found.toarray(), expected.toarray())


def test_the_whole_matrix(a, blocks):
    same(a.to_scipy(), M)
    assert isinstance(a.to_scipy(), sp.csr_array)
    m, stored_blocks = blocks
    same(stored_blocks.to_scipy(), m)
    assert stored_blocks.to_scipy().blocksize == (2, 3)


def axis(size: int):
    bound = st.none() | st.integers(-size - 3, size + 3)
    slices = st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, -1, -3]))
    return (
        st.integers(-size, size - 1) | slices
        | st.lists(st.integers(-size, size - 1), max_size=9) | st.lists(st.booleans(), min_size=size, max_size=size)
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(rows=axis(57), columns=axis(43))
def test_rows_and_columns_as_numpy(a, rows, columns):
    rows, columns = (np.array(k, int if not k or type(k[0]) is int else bool) if isinstance(k, list) else k
                     for k in (rows, columns))  # fmt: skip
    if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
        with pytest.raises(IndexError, match="both arrays"):
            a[rows, columns]
        columns = slice(None)
    found, expected = a[rows, columns], M.toarray()[rows, columns]
    assert found.dtype == expected.dtype
    assert np.array_equal(found.toarray() if sp.issparse(found) else found, expected)


@pytest.mark.parametrize("key", [5, -1, slice(3, 9), slice(None), [1, 2, 2], np.array([True] * 20 + [False] * 37)])
def test_rows_alone(a, key):
    same(a[key], M[key])


def in_short_chunks(m):
    """Store a matrix whose Zarr chunks hold seven entries; a part that is read has one of them at least."""
    rows = canonical_rows(m)
    writer = MatrixWriter(f"memory://short-{uuid4().hex}.zarr", rows.ncols, rows.dtype, {})
    writer.layout = dataclasses.replace(writer.layout, chunk=7)
    writer.append(rows)
    return writer.close()


def test_parts_of_a_read_do_not_show(monkeypatch):
    monkeypatch.setattr(rows_module, "PART_ENTRIES", 1)
    monkeypatch.setattr(rows_module, "PART_ROWS", 3)
    a = in_short_chunks(M)
    assert len(list(rows_module._parts(a, 0, 57))) > 20
    same(a[5:50, [1, 2]], M[5:50][:, [1, 2]])
    same(a[np.arange(50, 2, -5)], M[np.arange(50, 2, -5)])
    x, y = np.arange(43.0), np.arange(57.0)
    assert np.allclose(a @ x, M.toarray() @ x)
    assert np.allclose(a.T @ y, M.toarray().T @ y)
    m = sp.bsr_array(sp.kron(sp.random_array((40, 30), density=0.2, rng=np.random.default_rng(1)), np.ones((2, 3))))
    many = in_short_chunks(sp.bsr_array(m, blocksize=(2, 3)))
    assert len(list(rows_module._parts(many, 0, 40))) > 20
    assert np.allclose(many @ np.arange(90.0), m.toarray() @ np.arange(90.0))
    assert np.allclose(many.T @ np.arange(80.0), m.toarray().T @ np.arange(80.0))


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (57, "range"), (-58, "range"), ((0, 43), "range"), ([0, 57], "57"), ([0.5], "float64"),
        (np.ones((2, 2), int), "2-dimensional"), (np.ones(3, bool), "mask"), ((0, 0, 0), "dimensions"),
    ],
)  # fmt: skip
def test_keys_out_of_range(a, key, says):
    with pytest.raises(IndexError, match=says):
        a[key]


@pytest.mark.parametrize("x", [np.arange(43.0), np.ones((43, 3), np.float32), list(range(43)), np.ones(43) * 1j])
def test_products_with_vectors(a, x):
    assert np.allclose(a @ x, M @ np.asarray(x))
    assert (a @ x).dtype == (M @ np.asarray(x)).dtype
    y = np.arange(57.0)
    assert np.allclose(a.T @ y, M.T @ y)
    assert a.T.shape == (43, 57)
    assert a.T.T is a


def test_blocks_and_vectors(blocks):
    m, a = blocks
    assert np.allclose(a @ np.arange(9.0), m @ np.arange(9.0))
    assert np.allclose(a.T @ np.arange(6.0), m.T @ np.arange(6.0))
    with pytest.raises(spdist.InputError, match="to_scipy"):
        a[0:2]


def test_what_would_read_all_of_it_is_refused(a, monkeypatch):
    for attempt in (lambda: np.asarray(a), lambda: list(a), lambda: a @ M.T, lambda: a @ a):
        with pytest.raises(spdist.InputError):
            attempt()
    with pytest.raises(spdist.MatrixError, match=r"43 columns.*\(57,\)"):
        a @ np.ones(57)
    monkeypatch.setattr(rows_module, "available_memory", lambda: 100)
    with pytest.raises(spdist.MatrixError, match="100 B are free"):
        a.to_scipy()


def test_views_of_transposes_are_multiplied(stored, tmp_path):
    m, other = random_matrix(30, 20, 3, 1), random_matrix(30, 25, 3, 2)
    a, b = stored("A", m), stored("B", other)
    assert abs(spdist.matmul(a.T, b, tmp_path / "1.zarr").to_scipy() - m.T @ other).max() < 1e-12
    assert abs(spdist.matmul(b.T, a.T, tmp_path / "2.zarr", transpose_b=True).to_scipy() - other.T @ m).max() < 1e-12
    spdist.multiply(a.T, b, tmp_path / "3.zarr", record=tmp_path / "run.jsonl")
    assert abs(spdist.open(tmp_path / "3.zarr").to_scipy() - m.T @ other).max() < 1e-12
    with pytest.raises(spdist.InputError, match=r"spdist\.transpose"):
        spdist.plan(a.T, b)
