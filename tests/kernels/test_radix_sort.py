"""The stable sort of keys: NumPy's is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels import radix_sort


@pytest.mark.parametrize("largest", [0, 1, 2047, 2048, 10**6, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("count", [0, 1, 1000, 30_000])
def test_order_is_that_of_numpy(largest, count):
    keys = np.random.default_rng(count).integers(0, largest, count, endpoint=True)
    wanted = np.argsort(keys, kind="stable")
    assert np.array_equal(radix_sort.stable_order(keys.copy()), wanted)
