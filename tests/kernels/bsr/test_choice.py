"""Which kernel the GPU's product of block matrices takes: what needs no GPU."""

from __future__ import annotations

import pytest

from spdist.kernels.bsr import multiply_gpu as bsr_gpu


@pytest.mark.parametrize("r", range(1, 17))
@pytest.mark.parametrize("t", range(1, 17))
def test_tiles_fit_in_a_warp(r, t):
    tile = bsr_gpu.best_tile(r, t)
    if tile is None:
        assert all(r * t > 32 * i * j for i in (1, 2, 3, 4) for j in (1, 2, 3, 4) if r % i == t % j == 0)
    else:
        assert r % tile[0] == t % tile[1] == 0
        assert r * t // (tile[0] * tile[1]) <= 32


def test_tensor_cores_are_for_double_and_for_float_where_asked():
    sizes = 8, 8, 8
    assert bsr_gpu.method_of("double", sizes, True) == "Tensor<Double,8,8,8>"
    assert "Tiles" in bsr_gpu.method_of("double", sizes, False)
    assert "Tiles" in bsr_gpu.method_of("float", sizes, True)
    assert "Tiles" in bsr_gpu.method_of("float", sizes, False, True)
    assert bsr_gpu.method_of("float", sizes, True, True) == "Tensor<Rounded,8,8,8>"
    assert "Tiles" in bsr_gpu.method_of("float", (6, 6, 6), True, True)  # a fifth of what tensor cores take
    assert "AnySize" in bsr_gpu.method_of("double", (17, 2, 2), True, True)


@pytest.mark.parametrize("mean", [1.0, 3.0, 9.0, 27.0, 60.0])
@pytest.mark.parametrize("sides", [(1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 3)])
@pytest.mark.parametrize("value", [4, 8, 16])
def test_short_rows_are_taken_whole(mean, sides, value):
    whole = bsr_gpu.whole_rows(int(mean) + 1, mean, 5 * mean, sides, value, 4)
    if whole is None:  # too much shared memory, or many more pairs than blocks
        assert bsr_gpu.ROW_THREADS // 32 * 5 * mean * sides[0] * sides[2] * value > bsr_gpu.ROW_SHARED / 2 or mean == 60
        return
    assert whole.group in (4, 8, 16, 32)
    assert whole.group >= mean or whole.group == 32
    assert whole.room >= 5 * mean
    groups = bsr_gpu.ROW_THREADS // whole.group
    assert whole.shared == groups * whole.room * (sides[0] * sides[2] * value + 4) <= bsr_gpu.ROW_SHARED


def test_other_rows_are_not():
    assert bsr_gpu.whole_rows(10, 5.0, 20.0, (4, 4, 4), 8, 4) is None
    assert bsr_gpu.whole_rows(10_000, 5.0, 20.0, (2, 2, 2), 8, 4) is None
    assert bsr_gpu.whole_rows(10, 5.0, 1e6, (2, 2, 2), 8, 4) is None
