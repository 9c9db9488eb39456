"""The nearest of dense rows on a GPU: the same columns and bits as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels.dense import nearest_gpu
from spdist.kernels.dense.nearest import nearest
from tests.kernels.dense.test_nearest import METRICS

pytestmark = pytest.mark.gpu


def check_equal(x, y, count, metric):
    columns, distances = nearest_gpu.nearest(x, y, count, metric)
    wanted = nearest(x, y, count, metric)
    np.testing.assert_array_equal(columns, wanted[0])
    np.testing.assert_array_equal(distances, wanted[1])
    assert columns.dtype == np.int64
    return columns


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("tile", [(2048, 8192), (7, 1500)])
def test_same_bits_as_on_the_cpu(monkeypatch, metric, dtype, tile):
    """Tiles of the corpus that are no multiple of what a thread block compares at once; few and many candidates."""
    monkeypatch.setattr(nearest_gpu, "QUERIES", tile[0])
    monkeypatch.setattr(nearest_gpu, "CORPUS", tile[1])
    rng = np.random.default_rng(1)
    y = rng.standard_normal((4000, 6)).astype(dtype)
    for count in (1, 15, nearest_gpu.MOST_NEIGHBOURS):
        check_equal(y[:20], y, count, metric)
    check_equal(y[:3], y[:40], 40, metric)
    check_equal(y[:0], y, 2, metric)


def test_worse_rows_are_dropped_again_and_again(monkeypatch):
    monkeypatch.setattr(nearest_gpu, "CORPUS", 3000)
    rng = np.random.default_rng(2)
    y = rng.standard_normal((9000, 5))
    y = y[np.argsort(-((y - y[0]) ** 2).sum(axis=1))]
    assert check_equal(y[-9:], y, 12, "euclidean").max() > 8900


@pytest.mark.parametrize("metric", METRICS)
def test_equal_rows_and_rows_that_float32_does_not_tell_apart(metric):
    rng = np.random.default_rng(3)
    check_equal(np.eye(3), np.repeat(np.eye(3), 400, axis=0), 5, metric)
    close = np.concatenate([rng.standard_normal((300, 5)) * 1e-5 + 1, rng.standard_normal((3, 5)) * 100])
    for dtype in (np.float64, np.float32):
        check_equal(close[:9].astype(dtype), close.astype(dtype), 6, metric)
