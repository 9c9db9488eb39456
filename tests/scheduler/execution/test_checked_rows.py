"""Workers check the rows that they read, by NumPy or compiled code, and name the row that is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError
from spdist.kernels.cpu.pattern_scan import COMPILED
from spdist.matrices import pattern
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR, empty
from spdist.scheduler.execution.worker import check_rows
from tests.support.strategies import csr_matrices


@st.composite
def spoilt(draw) -> CSR:
    """Draw a matrix with entries whose offsets or columns are changed at some places, or at none."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    m = draw(csr_matrices(shape).filter(lambda m: m.nnz))
    indptr, indices = m.indptr.copy(), m.indices.copy()
    for _ in range(draw(st.integers(0, 2))):
        array, most = draw(st.sampled_from([(indptr, m.nnz), (indices, m.ncols)]))
        array[draw(st.integers(0, len(array) - 1))] = draw(st.integers(-1, most))
    return CSR(indptr, indices, m.data, m.shape)


def is_sound(m: CSR) -> bool:
    try:
        check_canonical(m)
    except MatrixError:
        return False
    return True


@pytest.mark.parametrize("scan", [pattern.NUMPY, COMPILED])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(m=spoilt())
def test_rows_of_a_block_are_refused_by_name(scan, m, monkeypatch):
    monkeypatch.setattr(pattern, "choose_scan", lambda length: scan)
    if is_sound(m):
        assert check_rows(m, "A.zarr") == (m.indices.min(), m.indices.max() + 1)
        return
    with pytest.raises(MatrixError, match=r"A\.zarr"):
        check_rows(m, "A.zarr", 7)


def test_no_entries():
    assert check_rows(empty((3, 5), np.float64), "A.zarr") == (0, 0)
