"""How the GPU's product of block matrices is cut and which kernel it takes: what needs no GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spdist.kernels import bsr_gpu


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [1, 40, 5000])
def test_tasks_have_all_blocks_once_and_about_as_many_pairs(seed, most):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 200, 300) * (rng.random(300) < 0.5)
    lengths[7] = 1
    indptr = np.append(0, np.cumsum(lengths)).astype(np.int32)
    counts = rng.integers(1, most + 1, indptr[-1])
    ends = np.cumsum(counts)
    firsts, rows = bsr_gpu.cut_tasks(ends, indptr)
    assert firsts[0] == 0
    assert firsts[-1] == len(ends)
    assert (np.diff(firsts) >= 0).all()
    assert np.diff(firsts).max() <= bsr_gpu.SHARE
    starts = np.append(0, ends)[:-1]
    for task, (first, stop) in enumerate(itertools.pairwise(firsts)):
        assert (starts[first:stop] // bsr_gpu.SHARE == task).all()
        if first < stop:
            assert indptr[rows[task, 0]] <= first < indptr[rows[task, 0] + 1]
            assert indptr[rows[task, 1]] < stop <= indptr[rows[task, 1] + 1]


@pytest.mark.parametrize("r", range(1, 17))
@pytest.mark.parametrize("t", range(1, 17))
def test_tiles_fit_in_a_warp(r, t):
    tile = bsr_gpu.best_tile(r, t)
    if tile is None:
        assert all(r * t > 32 * i * j for i in (1, 2, 3, 4) for j in (1, 2, 3, 4) if r % i == t % j == 0)
    else:
        assert r % tile[0] == t % tile[1] == 0
        assert r * t // (tile[0] * tile[1]) <= 32


def test_tensor_cores_are_for_double():
    sizes = 8, 8, 8
    assert "Tensor<8,8,8>" in bsr_gpu.kernel("double", "int", "int", sizes, True)
    assert "Tensor" not in bsr_gpu.kernel("double", "int", "int", sizes, False)
    assert "Tensor" not in bsr_gpu.kernel("float", "int", "int", sizes, True)
    assert "AnySize" in bsr_gpu.kernel("double", "int", "int", (17, 2, 2), True)
