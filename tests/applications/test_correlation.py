"""Correlations and covariances of columns against NumPy's of the dense matrix."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import spdist
from spdist import cli
from spdist.errors import InputError, MatrixError
from tests.conftest import random_matrix


def values(nrows=80, ncols=25, seed=0, negative=True):
    m = sp.csr_array(random_matrix(nrows, ncols, 4, seed)).astype(float)
    return m if negative else abs(m)


def expected(m, measure="correlation"):
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.corrcoef(m.toarray().T) if measure == "correlation" else np.cov(m.toarray().T)
    return np.nan_to_num(np.atleast_2d(found))


@pytest.mark.parametrize("measure", ["correlation", "covariance"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "?"])
@pytest.mark.parametrize("negative", [False, True])
def test_as_numpy(measure, dtype, negative):
    m = values(negative=negative).astype(dtype)
    found = spdist.correlation(m, measure=measure)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found.toarray(), expected(m.astype(float), measure), atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 12), st.integers(1, 9), st.integers(0, 99), st.sampled_from(["correlation", "covariance"]))
def test_any_shape(nrows, ncols, seed, measure):
    m = sp.csr_array(random_matrix(nrows, ncols, 2, seed)).astype(float)
    np.testing.assert_allclose(spdist.correlation(m, measure=measure).toarray(), expected(m, measure), atol=1e-9)


def test_columns_of_equal_values_have_no_correlation():
    m = values().tolil()
    m[:, 3], m[:, 7], m[:, 11] = 0, 0.1, 1e9
    found = spdist.correlation(m.tocsr())
    assert not found[[3, 7, 11]].nnz
    assert not found[:, [3, 7, 11]].nnz
    assert not np.isnan(found.data).any()


def test_small_deviations_from_a_large_mean():
    x = np.random.default_rng(1).standard_normal((500, 4)) + 1e6
    np.testing.assert_allclose(spdist.correlation(sp.csr_array(x)).toarray(), np.corrcoef(x.T), atol=1e-9)


@pytest.mark.parametrize("options", [{"top_n": 4}, {"threshold": 0.05}, {"triangle": "upper"}, {}])
@pytest.mark.parametrize("is_stored", [False, True])
def test_pairs_that_are_kept(options, is_stored, stored, tmp_path):
    m = values(seed=3)
    every = expected(m)
    if options.keys() & {"top_n", "threshold"}:
        np.fill_diagonal(every, -9)
    if is_stored:
        spdist.correlation(stored("A", m), tmp_path / "C.zarr", check=True, **options)
        found = spdist.open(tmp_path / "C.zarr").to_scipy()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["A.zarr", "C.zarr"]
    else:
        found = spdist.correlation(m, **options)
    if "top_n" in options:
        wanted = np.where(every >= np.sort(every, axis=1)[:, -4:-3], every, 0)
    else:
        wanted = (
            np.triu(every, 1) if "triangle" in options else np.where(every >= options.get("threshold", -2), every, 0)
        )
    np.testing.assert_allclose(found.toarray(), wanted, atol=1e-12)


@pytest.mark.parametrize("measure", ["correlation", "covariance"])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("options", [{}, {"top_n": 3}, {"mask": True}])
def test_columns_of_two_matrices(measure, is_stored, options, stored, tmp_path):
    a, b = values(seed=3).tolil(), values(ncols=14, seed=4).tolil()
    a[:, 2], b[:, 5] = a[:, [2]].toarray() + 7, b[:, [5]].toarray() - 3  # full columns, with a large mean
    a, b = a.tocsr(), b.tocsr()
    wanted = expected(sp.hstack([a, b]), measure)[:25, 25:]
    mask = sp.csr_array(random_matrix(25, 14, 2, 8))
    if "mask" in options:
        wanted = np.where(mask.toarray() != 0, wanted, 0)
        options = {"mask": stored("M", mask) if is_stored else mask}
    if "top_n" in options:
        wanted = np.where(wanted >= np.sort(wanted, axis=1)[:, -3:-2], wanted, 0)
    if is_stored:
        b = stored("B", b)
        spdist.correlation(stored("A", a), tmp_path / "C.zarr", other=b, measure=measure, check=True, **options)
        found = spdist.open(tmp_path / "C.zarr").to_scipy()
    else:
        found = spdist.correlation(a, other=b, measure=measure, **options)
    assert found.shape == (25, 14)
    np.testing.assert_allclose(found.toarray(), wanted, atol=1e-12)


def test_masked_pairs_of_one_matrix():
    m, mask = values(seed=5), sp.csr_array(random_matrix(25, 25, 3, 1)) + sp.eye_array(25)
    found = spdist.correlation(m, mask=mask)
    np.testing.assert_allclose(found.toarray(), np.where(mask.toarray() != 0, expected(m), 0), atol=1e-12)


def test_names_of_two_matrices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spdist.save("A.zarr", values(), column_names=[f"gene {i}" for i in range(25)])
    spdist.save("B.zarr", values(ncols=3), column_names=["x", "y", "z"])
    assert cli.main(["correlation", "A.zarr", "C.zarr", "--other", "B.zarr", "--json"]) == 0
    c = spdist.open("C.zarr")
    assert (c.row_names[3], c.column_names.tolist()) == ("gene 3", ["x", "y", "z"])


def test_names_of_columns_and_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    m = values()
    names = [f"gene {i}" for i in range(25)]
    spdist.save("A.zarr", m, row_names=[str(i) for i in range(80)], column_names=names)
    assert cli.main(["correlation", "A.zarr", "C.zarr", "--json", "--measure", "covariance"]) == 0
    assert json.loads(capsys.readouterr().out)["nnz"] == 625
    c = spdist.open("C.zarr")
    assert c.row_names.tolist() == c.column_names.tolist() == names
    np.save("x.npy", m.toarray())
    assert cli.main(["correlation", "x.npy", "D.zarr", "--dense", "--top-n", "3"]) == 0
    assert spdist.open("D.zarr").nnz == 75


@pytest.mark.parametrize(
    ("m", "options", "error", "match"),
    [
        (sp.csr_array((1, 4)), {}, InputError, "a matrix of 1 rows has no correlations"),
        (sp.csr_array(np.array([[1.0, np.inf], [1, 2]])), {}, MatrixError, "holds inf in row 0, column 1"),
        (sp.csr_array(np.eye(3) * 1j), {}, MatrixError, "holds complex128"),
        (sp.csr_array(np.eye(3)), {"measure": "spearman"}, InputError, "measure='spearman' is not one of correlation"),
        (sp.csr_array(np.eye(3)), {"top_n": 0}, InputError, "top_n"),
        (sp.csr_array(np.eye(3)), {"other": sp.csr_array((4, 2))}, InputError, "3 rows and 4 rows are not the same"),
        (sp.csr_array(np.eye(3)), {"other": sp.csr_array((3, 2)), "triangle": "upper"}, InputError, "have no triangle"),
        (sp.csr_array(np.eye(3)), {"other": sp.csr_array(np.full((3, 2), np.inf))}, MatrixError, "finite"),
    ],
)
def test_what_has_no_correlations(m, options, error, match):
    with pytest.raises(error, match=match):
        spdist.correlation(m, **options)
