"""The stable sort of keys: NumPy's is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels import radix_sort


@pytest.mark.parametrize("largest", [0, 1, 2047, 2048, 10**6, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("count", [1, 1000, 30_000])
def test_order_is_that_of_numpy(monkeypatch, largest, count):
    monkeypatch.setattr(radix_sort, "LEAST_KEYS", 1)
    keys = np.random.default_rng(count).integers(0, largest, count, endpoint=True)
    wanted = np.argsort(keys, kind="stable")
    assert np.array_equal(radix_sort.stable_order(keys.copy()), wanted)


def test_few_keys_need_no_compiled_code(monkeypatch):
    monkeypatch.setattr(radix_sort, "sort_by_digits", None)
    assert radix_sort.stable_order(np.array([2, 0, 2, 1])).tolist() == [1, 3, 0, 2]
