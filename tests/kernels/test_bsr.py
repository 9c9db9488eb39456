"""Which kernel the GPU's product of block matrices takes: what needs no GPU."""

from __future__ import annotations

import pytest

from spdist.kernels import bsr_gpu


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
    assert "Tensor<8,8,8>" in bsr_gpu.kernels("double", "int", "int", sizes, True)[1]
    assert "Tensor" not in bsr_gpu.kernels("double", "int", "int", sizes, False)[1]
    assert "Tensor" not in bsr_gpu.kernels("float", "int", "int", sizes, True)[1]
    assert "AnySize" in bsr_gpu.kernels("double", "int", "int", (17, 2, 2), True)[1]
