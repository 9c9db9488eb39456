"""Products through a device that holds neither operand nor C: the host's part, against SciPy, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.csr import CSR, from_scipy
from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels import cpu, outofcore, workspace
from tests.conftest import random_matrix
from tests.kernels.host_device import HostDevice
from tests.strategies import csr_pairs


def assert_same(c: CSR, d: CSR) -> None:
    assert c.shape == d.shape
    assert c.dtype == d.dtype
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices), (c.data, d.data)):
        assert_array_equal(x, y)


def oracle(a: CSR, b: CSR) -> CSR:
    return cpu.multiply(a, b, engine="scipy")


@pytest.fixture(autouse=True)
def small_margins(monkeypatch):
    monkeypatch.setattr(outofcore, "SCRATCH_BYTES", 1 << 10)
    monkeypatch.setattr(outofcore, "ROW_BYTES", 16)


@given(csr_pairs(), st.integers(12, 24), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_equals_scipy_whatever_the_limit(pair, log_limit, pairs):
    a, b = pair
    if a.dtype.kind not in "fc" or b.dtype.kind not in "fc":
        return
    device = HostDevice(1 << log_limit)
    try:
        c = outofcore.multiply(a, b, device, pairs=pairs)
    except MemoryBoundError:
        assert log_limit < 16
        return
    assert_same(c, oracle(a, b))
    assert device.most <= 1 << log_limit


@pytest.mark.parametrize("limit", [1 << 15, 1 << 16, 1 << 18, 1 << 22, 1 << 28])
@pytest.mark.parametrize("kind", ["random", "banded", "skewed"])
def test_blocks_of_many_sizes(kind, limit):
    if kind == "random":
        a = from_scipy(random_matrix(900, 900, 6.0, 3))
    elif kind == "banded":
        a = from_scipy(sp.diags_array([np.ones(1500)] * 9, offsets=range(-4, 5), shape=(1500, 1500)).tocsr())
    else:
        m = random_matrix(800, 800, 3.0, 4).tolil()
        m[5] = 1.0
        a = from_scipy(m.tocsr())
    device = HostDevice(limit)
    if kind == "skewed" and limit < 1 << 16:
        with pytest.raises(MemoryBoundError, match="raise memory_limit"):
            outofcore.multiply(a, a, device)
        return
    assert_same(outofcore.multiply(a, a, device), oracle(a, a))


def test_b_stays_where_it_fits_and_is_sent_in_parts_where_not():
    a = from_scipy(random_matrix(2000, 2000, 5.0, 5))
    for limit, stays in ((1 << 17, False), (1 << 22, True)):
        device = HostDevice(limit)
        assert_same(outofcore.multiply(a, a, device), oracle(a, a))
        assert (device.b is not None) == stays


def test_a_long_row_gets_all_the_room():
    m = random_matrix(400, 400, 3.0, 6).tolil()
    m[200] = 2.0
    a = from_scipy(m.tocsr())
    device = HostDevice(34_000)
    assert_same(outofcore.multiply(a, a, device), oracle(a, a))
    assert [count for count, _ in device.taken] == [workspace.PAIRS, 1]


def test_a_row_that_fits_nowhere_is_refused_with_its_number():
    a = from_scipy(sp.csr_array(np.ones((3, 2000))))
    with pytest.raises(MemoryBoundError, match="row 0 of A expands to 4,000,000 products"):
        outofcore.multiply(a, from_scipy(sp.csr_array(np.ones((2000, 2000)))), HostDevice(1 << 16))


@pytest.mark.parametrize("capacity", [0, 1, 40, 400, 5000, 10**9])
@pytest.mark.parametrize("start", [0, 7, 299])
def test_rows_that_fit_a_capacity(capacity, start):
    a = from_scipy(random_matrix(300, 300, 4.0, 7))
    whole = oracle(a, a).rows(start, 300)
    c = outofcore.multiply_rows(a, a, start, capacity, HostDevice(1 << 16))
    assert c.nrows >= 1
    assert_same(c, whole.rows(0, c.nrows))
    assert c.nnz <= capacity or c.nrows == 1
    assert c.nrows == whole.nrows or int(whole.indptr[c.nrows + 1]) > capacity


def test_an_estimate_too_low_grows(monkeypatch):
    """The rows of the sample compress well, the rest not at all."""
    monkeypatch.setattr(outofcore, "MARGIN", 1.0)
    monkeypatch.setattr(outofcore.Run, "_learn_from_sample", lambda run: setattr(run.cutter, "c_ratio", 1e-9))
    monkeypatch.setattr(outofcore, "FIRST_SHARE", 64)
    a = from_scipy(random_matrix(500, 500, 5.0, 8))
    assert_same(outofcore.multiply(a, a, HostDevice(1 << 18)), oracle(a, a))


def test_types_and_shapes_are_checked():
    a = from_scipy(random_matrix(5, 4, 2.0, 9))
    with pytest.raises(MatrixError, match="4 columns but B has 5 rows"):
        outofcore.multiply(a, a, HostDevice(1 << 20))
    with pytest.raises(InputError, match="start=6"):
        outofcore.multiply_rows(a, from_scipy(random_matrix(4, 4, 2.0, 9)), 6, 1, HostDevice(1 << 20))
    bad = CSR(a.indptr, np.full_like(a.indices, 9), a.data, a.shape)
    with pytest.raises(MatrixError, match="row 0 of A"):
        outofcore.multiply(bad, from_scipy(random_matrix(4, 4, 2.0, 9)), HostDevice(1 << 20))


def test_every_stage_of_every_block_is_reported():
    seen: list[outofcore.Stage] = []
    a = from_scipy(random_matrix(900, 900, 6.0, 3))
    outofcore.multiply(a, a, HostDevice(1 << 18), report=seen.append)
    prepared = [stage for stage in seen if stage.name == "prepare"]
    assert len(prepared) > 3
    assert [s.start for s in prepared] == sorted({s.start for s in prepared})
    assert all(s.seconds > 0 and s.nbytes > 0 for s in prepared)
