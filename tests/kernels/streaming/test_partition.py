"""Counting products: NumPy's way against the compiled one."""

from __future__ import annotations

import numpy as np
import pytest

from spdist.kernels.streaming import partition
from tests.conftest import random_matrix


@pytest.mark.parametrize("damage", [None, "column", "negative column", "falling offsets", "offsets", "lengths of B"])
@pytest.mark.parametrize(("start", "stop"), [(0, 60), (7, 41), (20, 20)])
def test_numpy_counts_what_compiled_code_counts(damage, start, stop):
    a, b = random_matrix(60, 40, 5, 1), random_matrix(40, 30, 3, 2)
    indptr, indices, b_indptr = a.indptr.astype(np.int64), a.indices.copy(), b.indptr.astype(np.int64)
    at = int(indptr[30])
    if damage == "column":
        indices[at] = 40
    elif damage == "negative column":
        indices[at] = -1
    elif damage == "falling offsets":
        indptr[31] = at - 1
    elif damage == "offsets":
        indptr[31] = a.nnz + 1
    elif damage == "lengths of B":
        b_indptr[indices[at] + 1] = b_indptr[indices[at]] - 1
    found = []
    for count in (partition._count, partition._count_compiled):
        ends = np.zeros(61, np.int64)
        found.append((*count((indptr, indices), b_indptr, start, stop, ends), ends.tolist()))
    if found[1][0] < 0:
        assert found[0][:2] == found[1][:2]
    else:
        assert (found[0][0], found[0][2]) == (found[1][0], found[1][2])
    assert (found[0][0] < 0) == (damage is not None and stop > start)
