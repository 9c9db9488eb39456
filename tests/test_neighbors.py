"""Nearest neighbours beside scikit-learn's brute force, in its pipelines, of stored and lazy rows."""

from __future__ import annotations

import anndata as ad
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_distances, cosine_similarity
from sklearn.neighbors import KNeighborsClassifier, KNeighborsTransformer, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import spdist
from spdist.errors import InputError
from spdist.neighbors import TopNTransformer
from tests.conftest import random_matrix


@parametrize_with_checks(
    [
        TopNTransformer(2),
        TopNTransformer(2, mode="similarity", metric="inner_product"),
        TopNTransformer(2, threshold=0.1),
    ]
)
def test_estimator(estimator, check):
    check(estimator)


def rows_of(nrows: int, ncols: int, each: int, seed: int, *, negative: bool = False) -> sp.csr_array:
    m = abs(sp.csr_array(random_matrix(nrows, ncols, each, seed)))
    if negative:
        m.data[::3] *= -1
    return m


def distances(graph: sp.csr_matrix, n: int) -> np.ndarray:
    """Return the distances of each row, which must rise, and check that its columns differ."""
    assert (np.diff(graph.indptr) == n).all()
    columns, values = graph.indices.reshape(-1, n), graph.data.reshape(-1, n)
    assert (np.diff(values, axis=1) >= 0).all()
    assert all(len(set(row)) == n for row in columns.tolist())
    return values


@settings(max_examples=60, deadline=None)
@given(
    nrows=st.integers(3, 60), ncols=st.integers(1, 40), each=st.integers(0, 5), count=st.integers(1, 20),
    seed=st.integers(0, 99), negative=st.booleans(),
)  # fmt: skip
def test_distances_are_those_of_brute_force(nrows, ncols, each, count, seed, negative):
    count = min(count, nrows - 1)
    m = rows_of(nrows, ncols, min(each, ncols), seed, negative=negative)
    graph = TopNTransformer(count).fit_transform(m)
    every = cosine_distances(m)
    found = distances(graph, count + 1)
    assert np.allclose(found, np.sort(every, axis=1)[:, : count + 1], atol=1e-7)
    columns = graph.indices.reshape(-1, count + 1)
    assert (columns[:, 0] == np.arange(nrows)).all()
    assert np.allclose(np.take_along_axis(every, columns, axis=1), found, atol=1e-7)


def test_as_scikit_learn():
    m = rows_of(80, 30, 6, 1)
    other = rows_of(20, 30, 6, 2)
    ours, theirs = TopNTransformer(7).fit(m), KNeighborsTransformer(n_neighbors=7, metric="cosine").fit(m)
    for x in (m, other):
        assert np.allclose(distances(ours.transform(x), 8), distances(theirs.transform(x), 8), atol=1e-7)
    assert isinstance(ours.transform(other), sp.csr_matrix)
    assert ours.transform(other).shape == (20, 80)
    assert ours.get_feature_names_out()[0] == "topntransformer0"


@pytest.mark.parametrize("negative", [False, True])
def test_similarities_and_connectivity(negative):
    m, other = rows_of(50, 20, 4, 1, negative=negative), rows_of(9, 20, 4, 2)
    for metric, every in (("cosine", cosine_similarity(other, m)), ("inner_product", (other @ m.T).toarray())):
        found = TopNTransformer(6, mode="similarity", metric=metric).fit(m).transform(other)
        assert np.allclose(-distances(-found, 6), -np.sort(-every, axis=1)[:, :6])
    edges = TopNTransformer(6, mode="connectivity").fit(m).transform(other)
    assert set(edges.data) == {1.0}
    assert (edges.getnnz(axis=1) == 6).all()


def test_a_threshold_leaves_rows_short():
    m = rows_of(60, 20, 3, 1)
    every = cosine_similarity(m)
    found = TopNTransformer(60, mode="similarity", threshold=0.5).fit_transform(m)
    assert np.array_equal(found.getnnz(axis=1), np.maximum((every >= 0.5).sum(axis=1), 1))
    assert np.allclose(found.toarray()[every >= 0.5], every[every >= 0.5])


def test_rows_of_zeros_and_equal_rows():
    m = sp.csr_array(np.array([[0, 0], [1, 1], [1, 1], [1, 1], [0, 0]], float))
    found = TopNTransformer(2).fit_transform(m)
    assert np.allclose(distances(found, 3), [[0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1]])
    assert (found.indices.reshape(-1, 3)[:, 0] == np.arange(5)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stored_and_lazy_rows(stored, tmp_path, dtype):
    m, other = rows_of(90, 30, 5, 1).astype(dtype), rows_of(20, 30, 5, 2).astype(dtype)
    a, lazy = stored("A", m), da.from_array(m.toarray(), chunks=(25, 30)).map_blocks(sp.csr_array)
    expected = TopNTransformer(4).fit(m)
    for x in (a, a.url, lazy):
        model = TopNTransformer(4, memory_limit="64MiB", folder=tmp_path)
        found = model.fit_transform(x)
        assert found.dtype == dtype
        assert np.allclose(distances(found, 5), distances(expected.fit_transform(m), 5), atol=1e-6)
        assert np.allclose(distances(model.transform(other), 5), distances(expected.transform(other), 5), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distances_are_those_of_scikit_learn_to_the_last_bit(stored, dtype):
    """Otherwise scanpy, whose weights begin at the least distance, computes others."""
    rng = np.random.default_rng(6)
    m = sp.csr_matrix(np.log1p(rng.poisson(rng.gamma(0.4, 1, (6, 90))[rng.integers(0, 6, 400)])).astype(dtype))
    brute = KNeighborsTransformer(n_neighbors=15, metric="cosine", algorithm="brute").fit_transform(m)
    expected = np.sort(brute.data.reshape(400, 16), axis=1)
    expected[:, 0] = 0  # of a row to itself; scikit-learn may round it
    for x in (m, stored("A", sp.csr_array(m))):
        found = TopNTransformer(15).fit_transform(x).data.reshape(400, 16)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_as_scanpy_asks(tmp_path):
    """`sc.pp.neighbors` calls `fit_transform` with X of any AnnData, and takes indices and data by rows of one length.

    The row itself comes first, at distance 0: scanpy's weights begin at the least distance above 0, and some rounding
    in its place would change them all.
    """
    m = rows_of(90, 30, 5, 1)
    cells = ad.AnnData(sp.csr_matrix(m))
    cells.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    for x in (cells.X, backed.X):
        found = TopNTransformer(4, folder=tmp_path).fit_transform(x)
        assert (np.diff(found.indptr) == 5).all()
        indices, values = found.indices.reshape(90, 5), found.data.reshape(90, 5)
        np.testing.assert_array_equal(indices[:, 0], np.arange(90))
        assert (values[:, 0] == 0).all()
        assert (np.diff(values, axis=1) >= 0).all()
        assert np.allclose(values, np.sort(cosine_distances(m), axis=1)[:, :5])
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]
    backed.file.close()


def test_in_a_pipeline():
    rng = np.random.default_rng(0)
    centres = rng.random((3, 40)) * (rng.random((3, 40)) < 0.3)
    labels = rng.integers(0, 3, 120)
    x = sp.csr_array(centres[labels] + 0.05 * (rng.random((120, 40)) < 0.1))
    classify = make_pipeline(TopNTransformer(5), KNeighborsClassifier(5, metric="precomputed"))
    assert classify.fit(x[:90], labels[:90]).score(x[90:], labels[90:]) > 0.9


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"mode": "near"}, "mode='near'"), ({"metric": "l2"}, "metric='l2'"), ({"n_neighbors": 0}, "n_neighbors=0"),
     ({"n_neighbors": 2.5}, "n_neighbors=2.5"), ({"metric": "inner_product"}, "similarity")],
)  # fmt: skip
def test_parameters_that_are_none(wrong, says):
    with pytest.raises(spdist.InputError, match=says):
        TopNTransformer(**wrong).fit(sp.eye_array(5, format="csr"))


def test_input_that_does_not_fit(stored):
    m = rows_of(10, 20, 3, 1)
    model = TopNTransformer(4).fit(m)
    with pytest.raises(ValueError, match="features"):
        model.transform(stored("B", rows_of(5, 19, 3, 1)))
    with pytest.raises(ValueError, match="n_samples_fit"):
        TopNTransformer(10).fit_transform(m)
    with pytest.raises(spdist.MatrixError, match="int64"):
        TopNTransformer(4).fit(stored("I", m.astype(np.int64)))


# -- dense rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", ["distance", "connectivity"])
def test_dense_rows_have_the_graph_of_scikit_learn(dtype, mode):
    x = np.random.default_rng(3).standard_normal((600, 20)).astype(dtype)
    for metric in ("euclidean", "cosine"):
        theirs = KNeighborsTransformer(n_neighbors=9, mode=mode, metric=metric, algorithm="brute")
        ours = TopNTransformer(9, mode=mode, metric=metric)
        for found, wanted in (
            (ours.fit_transform(x), theirs.fit_transform(x)),
            (ours.transform(x[:50] + 1), theirs.transform(x[:50] + 1)),
        ):
            assert found.dtype == dtype or mode == "connectivity"
            assert found.shape == wanted.shape
            np.testing.assert_array_equal(found.indices, wanted.indices)
            np.testing.assert_allclose(found.data, wanted.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_distances_of_float32_rows_have_the_bits_of_scikit_learn(kind):
    """scanpy's weights amplify a last bit; of a row's distance to itself scikit-learn's rounding leaves some."""
    x = kind((np.random.default_rng(8).standard_normal((500, 40)) * np.linspace(9, 0.1, 40)).astype(np.float32))
    theirs = KNeighborsTransformer(n_neighbors=9, metric="euclidean", algorithm="brute").fit_transform(x)
    ours = TopNTransformer(9, metric="euclidean").fit_transform(x)
    np.testing.assert_array_equal(ours.indices, theirs.indices)
    np.testing.assert_array_equal(*(m.data.astype(np.float32).reshape(500, 10)[:, 1:] for m in (ours, theirs)))


def test_distances_beyond_the_squares_of_float32():
    x = np.array([[3e19, 0], [0, 4e19], [0, 0]], np.float32)
    found = TopNTransformer(1, metric="euclidean").fit_transform(x)
    np.testing.assert_allclose(found.data[1::2], [3e19, 4e19, 3e19], rtol=1e-6)


def test_dense_similarities():
    x = np.random.default_rng(4).standard_normal((90, 6))
    for metric, every in (("cosine", cosine_similarity(x)), ("inner_product", x @ x.T)):
        graph = TopNTransformer(5, mode="similarity", metric=metric).fit_transform(x)
        np.testing.assert_allclose(graph.data.reshape(-1, 5), -np.sort(-every, axis=1)[:, :5], atol=1e-12)


def test_dense_and_sparse_rows_meet():
    x = np.random.default_rng(5).standard_normal((60, 6))
    dense = TopNTransformer(4).fit(x)
    np.testing.assert_allclose(dense.transform(sp.csr_array(x[:9])).data, dense.transform(x[:9]).data, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "x", "match"),
    [
        ({"mode": "similarity"}, np.eye(5), "are of similarities"),
        ({"threshold": 0.5}, np.eye(5), "are of similarities"),
    ],
)
def test_what_euclidean_distances_are_not(options, x, match):
    with pytest.raises(InputError, match=match):
        TopNTransformer(2, metric="euclidean", **options).fit_transform(x)


@pytest.mark.parametrize("kind", ["dense", "sparse", "stored"])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_neighbours_of_new_and_of_fitted_rows(kind, metric, tmp_path):
    x = np.random.default_rng(6).standard_normal((60, 6))
    rows = {"dense": x, "sparse": sp.csr_array(x), "stored": spdist.save(tmp_path / "x.zarr", sp.csr_array(x))}[kind]
    theirs = NearestNeighbors(n_neighbors=4, metric=metric, algorithm="brute").fit(x)
    ours = TopNTransformer(4, metric=metric, threshold=None if metric == "euclidean" else -2.0).fit(rows)
    new = x[:9] + 0.1
    for found, wanted in (
        (ours.kneighbors(), theirs.kneighbors()),
        (ours.kneighbors(new, 3), theirs.kneighbors(new, 3)),
    ):
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-7)
        np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(ours.kneighbors(new, return_distance=False), theirs.kneighbors(new)[1])
    graph = ours.transform(new)
    np.testing.assert_allclose(graph.data.reshape(-1, 5)[:, :4], ours.kneighbors(new)[0], atol=1e-7)


def test_a_threshold_has_no_array_of_neighbours():
    with pytest.raises(InputError, match=r"threshold=0.99 leaves row 0 with fewer neighbours: use transform"):
        TopNTransformer(2, threshold=0.99).fit(sp.eye_array(5, format="csr")).kneighbors()
