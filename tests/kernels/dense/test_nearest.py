"""The nearest of dense rows, against all distances in float64; also where float32 cannot tell rows apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from spdist.kernels.dense import nearest as module
from spdist.kernels.dense.nearest import nearest

METRICS = ["euclidean", "cosine", "inner_product"]


def all_distances(x, y, metric):
    x, y = x.astype(np.float64), y.astype(np.float64)
    if metric == "inner_product":
        return -(x @ y.T)
    return cdist(x, y, metric)


def check(x, y, count, metric, atol=1e-7):
    """The distances are the least ones, and belong to their columns, of which each is there once."""
    columns, distances = nearest(x, y, count, metric)
    every = all_distances(x, y, metric)
    wanted = np.sort(every, axis=1)[:, :count]
    scale = max(1.0, abs(wanted).max(initial=0.0))
    np.testing.assert_allclose(distances, wanted, rtol=1e-6, atol=atol * scale)
    np.testing.assert_allclose(np.take_along_axis(every, columns, axis=1), distances, rtol=1e-6, atol=atol * scale)
    assert all(len(set(row)) == count for row in columns.tolist())
    return columns


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40), n=st.integers(1, 300), d=st.integers(1, 12), seed=st.integers(0, 99), data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]), metric=st.sampled_from(METRICS),
)  # fmt: skip
def test_as_all_distances(m, n, d, seed, data, dtype, metric):
    """Rows of few different values have many ties."""
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal if seed % 2 else lambda shape: rng.integers(-2, 3, shape) + 0.25
    check(draw((m, d)).astype(dtype), draw((n, d)).astype(dtype), data.draw(st.integers(1, n)), metric)


@pytest.mark.parametrize("metric", METRICS)
def test_many_chunks_of_the_corpus(monkeypatch, metric):
    """Worse rows are dropped again and again; the last ones are the best."""
    monkeypatch.setattr(module, "CORPUS", 128)
    monkeypatch.setattr(module, "QUERIES", 7)
    rng = np.random.default_rng(1)
    y = rng.standard_normal((3000, 9)).astype(np.float32)
    y = y[np.argsort(-((y - y[0]) ** 2).sum(axis=1))]
    columns = check(y[-50:], y, 12, metric)
    assert metric != "euclidean" or columns.max() > 2900


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_that_float32_does_not_tell_apart(dtype):
    """Far from the origin, and closer together than float32 resolves after the move to the mean."""
    rng = np.random.default_rng(2)
    y = np.concatenate([rng.standard_normal((400, 5)) * 1e-5 + 1, rng.standard_normal((3, 5)) * 100]).astype(dtype)
    columns, distances = nearest(y, y, 6, "euclidean")
    every = cdist(y.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(distances, np.sort(every, axis=1)[:, :6], rtol=1e-9, atol=1e-15)
    assert (columns[:400, 0] == np.arange(400)).all() or dtype == np.float32  # some rows of float32 are equal


def test_equal_rows_come_in_their_order():
    y = np.repeat(np.eye(3), 40, axis=0)
    columns, distances = nearest(y, y, 5, "euclidean")
    assert not distances.any()
    assert (columns == np.repeat([[0], [40], [80]], 40, axis=0) + np.arange(5)).all()


@pytest.mark.parametrize("metric", METRICS)
def test_no_queries_and_zeros(metric):
    columns, distances = nearest(np.empty((0, 3)), np.ones((4, 3)), 2, metric)
    assert columns.shape == distances.shape == (0, 2)
    columns, _ = nearest(np.zeros((2, 3)), np.zeros((4, 3)), 4, metric)
    assert (columns == np.arange(4)).all()


def test_values_beyond_the_range_of_float32():
    x = np.array([[1e200, 0], [2e200, 0], [-1e200, 3e199]])
    columns, distances = nearest(x / 1e50, x / 1e50, 2, "euclidean")
    assert columns.tolist() == [[0, 1], [1, 0], [2, 0]]
    np.testing.assert_allclose(distances[:, 1], [1e150, 1e150, np.hypot(2e150, 3e149)])
