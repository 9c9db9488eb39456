"""The row-by-row product on a GPU against SciPy; every output is poisoned before it is written."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.cuda.constants import NARROW_COLUMNS
from spdist.kernels.rowwise_gpu import analysis, workspace
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu.row_classes import RowTuning
from spdist.matrices.csr import CSR
from tests.kernels.esc.test_multiply_gpu import poisoned as poisoned_pool

pytestmark = pytest.mark.gpu

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=80)
EVERYWHERE = RowTuning(
    node_least_rows=1, node_products=(16, 16384), few_slots=0, few_rows=0, few_rows_single_pass=0, few_short_rows=0,
    few_parts=0,
)  # fmt: skip
"""Send rows to every family of kernels at small sizes too."""
KINDS = ("sparse", "dense", "skew", "longrow", "block")
TYPES = (  # values, columns, offsets: each choice is compiled apart
    (np.float64, np.int32, np.int32),
    (np.float32, np.int32, np.int64),
    (np.complex64, np.int32, np.int32),
    (np.complex128, np.int64, np.int64),
)


def a_matrix(kind: str, nrows: int, ncols: int, rng: np.random.Generator) -> sp.csr_matrix:
    """Return a canonical matrix of small integers, zeros among them, so that sums are exact and cancel."""
    if 0 in (nrows, ncols):
        return sp.csr_matrix((nrows, ncols))
    density = {"dense": rng.uniform(0.1, 0.6)}.get(kind, min(1.0, rng.uniform(0, 8) / ncols))
    m = sp.random(nrows, ncols, density=density, random_state=rng, format="csr")
    if kind == "skew":
        rows, columns = ((n * rng.random(6 * nrows) ** 3).astype(int) for n in (nrows, ncols))
        m = sp.csr_matrix((np.ones(6 * nrows), (rows, columns)), (nrows, ncols))
    if kind == "longrow":
        m = m.tolil()
        m[rng.integers(nrows)] = 1.0
        m[:, rng.integers(ncols)] = np.ones((nrows, 1))
        m = m.tocsr()
    if kind == "block":  # rows that repeat the pattern of the one before, more than fit in one node
        size = int(rng.choice([2, 3, 6, 7, 60]))
        nodes = sp.random(max(1, nrows // size), max(1, ncols // size), density=density, random_state=rng)
        m = sp.kron(nodes, np.ones((size, size))).tocsr()
        m.resize((nrows, ncols))
    m.sum_duplicates()
    m.data = rng.integers(-3, 6, m.nnz).astype(float)
    return m


def to_gpu(m: sp.csr_matrix, value=np.float64, index=np.int32, pointer=np.int32) -> CSR:
    import cupy

    arrays = m.indptr.astype(pointer), m.indices.astype(index), m.data.astype(value)
    return CSR(*map(cupy.asarray, arrays), m.shape)


def to_host(c: CSR) -> sp.csr_matrix:
    return sp.csr_matrix((c.data.get(), c.indices.get(), c.indptr.get()), c.shape)


def assert_product(c: CSR, a: sp.csr_matrix, b: sp.csr_matrix) -> None:
    ones = [sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), m.shape) for m in (a, b)]
    pattern = ones[0] @ ones[1]  # SciPy drops zero results, so the pattern needs its own oracle
    pattern.sort_indices()
    np.testing.assert_array_equal(c.indptr.get(), pattern.indptr)
    np.testing.assert_array_equal(c.indices.get(), pattern.indices)
    difference = to_host(c) - (a @ b).astype(c.dtype)
    assert difference.nnz == 0 or abs(difference).max() == 0


@pytest.fixture(autouse=True)
def poisoned():
    """Allocate from a pool of its own, whose bytes are all 0xa5 before they are written."""
    with poisoned_pool() as pool:
        yield pool


@QUIET
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(*[st.sampled_from([0, 1, 2, 7, 33, 100, 500, 2000])] * 3),
    st.tuples(*[st.sampled_from(KINDS)] * 2),
    st.sampled_from(TYPES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_equals_scipy(seed, shape, kinds, types, deterministic, everywhere, share_at_once):
    rng = np.random.default_rng(seed)
    a, b = a_matrix(kinds[0], *shape[:2], rng), a_matrix(kinds[1], *shape[1:], rng)
    square = shape[0] == shape[1] == shape[2]
    with pytest.MonkeyPatch.context() as patch:
        tuning = EVERYWHERE if everywhere else RowTuning()
        tuning = replace(tuning, early=seed % 8 not in (2, 5))
        if seed % 4 == 1:  # as for large products
            patch.setattr(workspace, "SMALL_BYTES", 0)
        elif seed % 4 == 3:  # so that a pass that is queued early has too little room, or the count is queued
            patch.setattr(workspace, "SMALL_BYTES", 12 << seed % 16)
        if share_at_once is not None:  # not counted before, up to several lengths; with samples that tell little
            tuning = replace(tuning, single_pass_rows=1, single_pass_fill=0.0, single_pass_share=share_at_once)
            patch.setattr(workspace, "SAMPLE_ROWS", 1 + seed % 50)
        patch.setattr(rowwise_gpu, "TUNING", tuning)
        left = to_gpu(a, *types)
        right = left if square else to_gpu(b, *types)
        c = rowwise_gpu.multiply(left, right, deterministic=deterministic)
    assert c.dtype == types[0]
    assert_product(c, a, a if square else b)


def long_row(entries: int, ncols: int) -> sp.csr_matrix:
    """Return a matrix with one row of `entries` entries among rows of four."""
    rng = np.random.default_rng(1)
    rows = np.concatenate([np.repeat(np.arange(ncols), 4), np.full(entries, 5)])
    columns = np.concatenate([rng.integers(0, ncols, 4 * ncols), np.arange(entries)])
    m = sp.csr_matrix((np.ones(len(rows)), (rows, columns)), (ncols, ncols))
    m.data = np.arange(m.nnz) % 7 - 3.0
    return m


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("entries", [1025, 8193, 70_000])
def test_long_rows(entries, deterministic):
    m = long_row(entries, 100_000)
    assert_product(rowwise_gpu.multiply(to_gpu(m), to_gpu(m), deterministic=deterministic), m, m)


def test_deterministic_gives_the_same_bits():
    rng = np.random.default_rng(1)
    m = sp.random(3000, 3000, density=0.02, random_state=1, format="csr")
    m.data = rng.standard_normal(m.nnz)
    results = [rowwise_gpu.multiply(to_gpu(m), to_gpu(m), deterministic=True).data.get().tobytes() for _ in range(5)]
    assert len(set(results)) == 1


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0, 3.0])
def test_what_is_expected_of_c_may_be_wrong(monkeypatch, share):
    """And what the host does meanwhile is done once, whether rows are made at once or counted first."""
    monkeypatch.setattr(rowwise_gpu, "TUNING", RowTuning(single_pass_rows=100))
    monkeypatch.setattr(workspace, "SMALL_BYTES", 0)
    m, called = a_matrix("sparse", 3000, 3000, np.random.default_rng(1)), []
    whole = (m @ m).nnz
    for deterministic in (False, True):
        expected = int(share * whole)
        c = rowwise_gpu.multiply(to_gpu(m), to_gpu(m), deterministic=deterministic, expected=expected,
                         meanwhile=lambda: called.append(1))  # fmt: skip
        assert_product(c, m, m)
    assert len(called) == 2


@pytest.mark.parametrize(("columns", "small", "queued", "made"), [
    (900, 32 << 20, "pass", True), (2000, 32 << 20, "pass", False), (900, 0, "count", True), (2000, 0, "count", False),
])  # fmt: skip
def test_work_queued_before_rows_are_counted(monkeypatch, columns, small, queued, made):
    """It has too little room for C at first: every row of A meets the one long row of B. Rows of 2,000 forbid it."""
    monkeypatch.setattr(workspace, "SMALL_BYTES", small)
    plans, found = [], []
    read = rowwise_gpu._EarlyProduct.read

    def spy(early, x):
        plans.append("pass" if early.plan.capacity else "count")
        found.append(read(early, x))
        return found[-1]

    monkeypatch.setattr(rowwise_gpu._EarlyProduct, "read", spy)
    a = sp.csr_matrix((np.ones(50), (np.arange(50), np.zeros(50, int))), (50, 300))
    b = sp.csr_matrix((np.arange(columns) % 7 - 3.0, (np.zeros(columns, int), np.arange(columns))), (300, 3000))
    assert_product(rowwise_gpu.multiply(to_gpu(a), to_gpu(b)), a, b)
    assert (plans, [one is not None for one in found]) == ([queued], [made])


def test_wide_matrices_take_wide_keys():
    rng = np.random.default_rng(2)
    ncols = 2 * NARROW_COLUMNS
    rows, columns = rng.integers(0, 300, 2000), rng.integers(0, ncols, 2000)
    b = sp.csr_matrix((np.ones(2000), (rows, columns)), (300, ncols))
    a = sp.random(50, 300, density=0.1, random_state=3, format="csr")
    a.data[:] = 2.0
    assert_product(rowwise_gpu.multiply(to_gpu(a), to_gpu(b)), a, b)


@pytest.mark.parametrize("spread", [9, NARROW_COLUMNS - 1, NARROW_COLUMNS, 2 * NARROW_COLUMNS])
@pytest.mark.parametrize("entries", [1, 80, 300])
def test_wide_matrices_of_rows_that_are_not(spread, entries):
    """Each row of C is within a band of its own, as wide as keys have room for, or wider; one row of A may be long."""
    rng, rows, ncols = np.random.default_rng(3), 400, 4 * NARROW_COLUMNS
    starts, near = rng.integers(0, ncols - spread, (rows, 1)), rng.integers(1, spread, (rows, 5))
    columns = starts + np.hstack([np.zeros((rows, 1), int), np.full((rows, 1), spread), near])
    b = sp.csr_matrix(
        (np.ones(columns.size), (np.repeat(np.arange(rows), columns.shape[1]), columns.ravel())), (rows, ncols)
    )
    lengths = np.append(entries, np.ones(rows - 1, int))
    a = sp.csr_matrix((np.ones(lengths.sum()), np.repeat(np.arange(rows), lengths), np.append(0, np.cumsum(lengths))))
    assert_product(rowwise_gpu.multiply(to_gpu(a), to_gpu(b)), a, b)


def test_operands_may_have_indices_of_two_dtypes():
    m = a_matrix("sparse", 300, 300, np.random.default_rng(1))
    c = rowwise_gpu.multiply(to_gpu(m), to_gpu(m, index=np.int64, pointer=np.int64))
    assert c.indices.dtype == np.int64
    assert_product(c, m, m)


def test_more_products_than_int32():
    m = sp.csr_matrix(np.ones((1500, 1500)))
    c = rowwise_gpu.multiply(to_gpu(m), to_gpu(m))
    assert c.nnz == 1500**2
    assert c.indptr.dtype == np.int32
    assert float(abs(c.data - 1500).max()) == 0.0


@pytest.mark.slow
def test_more_entries_than_int32():
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 24 << 30:
        pytest.skip("C takes 17 GB")
    nrows, ncols, half = 27_000, 80_000, 75_000
    starts = np.array([0, ncols - half])  # two rows of B, which share most of their columns and have all between them
    b = CSR(
        cupy.asarray([0, half, 2 * half], np.int32),
        cupy.asarray(np.concatenate([start + np.arange(half) for start in starts]), np.int32),
        cupy.asarray(np.arange(2 * half) % 7 + 1, np.float32),
        (2, ncols),
    )
    factors = cupy.asarray(np.arange(2 * nrows) % 5 + 1, np.float32)
    entries = cupy.arange(2 * nrows, dtype=np.int32)
    a = CSR(cupy.arange(0, 2 * nrows + 1, 2, dtype=np.int32), entries % 2, factors, (nrows, 2))
    c = rowwise_gpu.multiply(a, b)
    assert c.nnz == nrows * ncols > 2**31
    assert c.indptr.dtype == np.int64
    assert bool((c.indptr == ncols * cupy.arange(nrows + 1)).all())
    dense = cupy.zeros((2, ncols), np.float32)
    for k, start in enumerate(starts):
        dense[k, start : start + half] = b.data[k * half : (k + 1) * half]
    for first in range(0, nrows, 3000):
        rows = slice(first * ncols, (first + 3000) * ncols)
        assert bool((c.indices[rows].reshape(-1, ncols) == cupy.arange(ncols)).all())
        expected = factors.reshape(-1, 2)[first : first + 3000, :1] * dense[0]
        expected += factors.reshape(-1, 2)[first : first + 3000, 1:] * dense[1]
        assert bool((c.data[rows].reshape(-1, ncols) == expected).all())


@pytest.mark.parametrize("spoil", ["column", "negative column", "offset", "unsorted", "duplicate"])
def test_bad_operands_are_refused(spoil):
    good = sp.random(300, 300, density=0.05, random_state=1, format="csr")
    bad = good.copy()
    at = bad.indptr[10]
    if spoil == "offset":
        bad.indptr[7] = -5
    else:
        bad.indices[at] = {"column": 300, "negative column": -1}.get(spoil, bad.indices[at + 1])
        bad.indices[at + 1] -= spoil == "unsorted"
    with pytest.raises(MatrixError, match="B: "):
        rowwise_gpu.multiply(to_gpu(good), to_gpu(bad))


@pytest.mark.parametrize("value", [np.float64, np.complex64])
def test_numeric_fills_a_pattern_again(value):
    rng = np.random.default_rng(1)
    a, b = (a_matrix("sparse", 400, 400, rng) for _ in range(2))
    pattern = rowwise_gpu.symbolic(to_gpu(a, value), to_gpu(b, value))
    for _ in range(3):
        a.data, b.data = rng.integers(-3, 6, a.nnz).astype(float), rng.integers(-3, 6, b.nnz).astype(float)
        c = rowwise_gpu.numeric(pattern, to_gpu(a, value), to_gpu(b, value))
        assert_product(c, a, b)
    with pytest.raises(MatrixError, match="call symbolic again"):
        rowwise_gpu.numeric(pattern, to_gpu(a[:100], value), to_gpu(b, value))


def test_numeric_takes_operands_of_two_dtypes():
    a = a_matrix("sparse", 300, 300, np.random.default_rng(1))
    left, right = to_gpu(a, np.float32), to_gpu(a, np.float64)
    c = rowwise_gpu.numeric(rowwise_gpu.symbolic(left, right), left, right)
    assert c.dtype == np.float64
    assert_product(c, a, a)
    with pytest.raises(MatrixError, match="for a product of float32"):
        rowwise_gpu.numeric(rowwise_gpu.symbolic(left, right), left, left)


def test_a_pattern_outlives_other_products():
    rng = np.random.default_rng(1)
    a, b = a_matrix("block", 3000, 3000, rng), a_matrix("dense", 200, 200, rng)
    pattern = rowwise_gpu.symbolic(to_gpu(a), to_gpu(a))
    rowwise_gpu.multiply(to_gpu(b), to_gpu(b))
    assert_product(rowwise_gpu.numeric(pattern, to_gpu(a), to_gpu(a)), a, a)


def test_too_little_memory_is_said(poisoned):
    m = sp.random(3000, 3000, density=0.1, random_state=1, format="csr")
    left = to_gpu(m)
    poisoned.set_limit(size=poisoned.total_bytes() + (40 << 20))
    with pytest.raises(MemoryBoundError, match=r"C takes 103\.00 MiB"):
        rowwise_gpu.multiply(left, left)


def test_several_threads_share_a_device():
    import cupy

    m = sp.random(2000, 2000, density=0.01, random_state=1, format="csr")
    m.data[:] = 1.0
    left, failures = to_gpu(m), []

    def work():
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(10):
                try:
                    assert_product(rowwise_gpu.multiply(left, left), m, m)
                except BaseException as error:
                    failures.append(error)

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.float64, np.complex64])
def test_the_peak_is_within_the_workspace(kind, value, poisoned):
    m = a_matrix(kind, 2000, 2000, np.random.default_rng(1))
    left = to_gpu(m, value)
    x = analysis.analyse(analysis.requested(left, left))
    products, counts = x.products, x.facts.class_rows()
    del x
    poisoned.free_all_blocks()
    before = poisoned.total_bytes()
    c = rowwise_gpu.multiply(left, left)
    c_bytes = c.data.nbytes + c.indices.nbytes + c.indptr.nbytes
    sizes = c.dtype.itemsize, c.indices.itemsize
    bound = workspace.rowwise_workspace(2000, 2000, 2000, products, counts, *sizes)
    assert poisoned.total_bytes() - before <= c_bytes + bound


def test_cupy_in_cupy_out():
    import cupyx.scipy.sparse as csp

    from spdist import numeric, spgemm, symbolic

    a, b = (sp.random(n, 40, density=0.2, random_state=n, format="csr") for n in (50, 40))
    left, right = csp.csr_matrix(a), csp.csr_matrix(b)
    c = spgemm(left, right)
    assert isinstance(c, csp.csr_matrix)
    np.testing.assert_allclose(c.get().toarray(), (a @ b).toarray())
    assert spgemm(left.tocsc(), right.tocsc()).format == "csc"
    np.testing.assert_allclose(spgemm(left.tocsc(), right.tocsc()).get().toarray(), (a @ b).toarray())
    np.testing.assert_allclose(numeric(symbolic(left, right), 2 * left, right).get().toarray(), 2 * (a @ b).toarray())
    with pytest.raises(MatrixError, match="copy both"):
        spgemm(left, b)


def test_rows_of_b_are_sorted_in_a_copy():
    import cupy
    import cupyx.scipy.sparse as csp

    from spdist.inmemory.spgemm import spgemm

    b = sp.random(40, 40, density=0.3, random_state=1, format="csr")
    order = np.concatenate([np.arange(s, e)[::-1] for s, e in zip(b.indptr, b.indptr[1:], strict=False)])
    messy = csp.csr_matrix(tuple(map(cupy.asarray, (b.data[order], b.indices[order], b.indptr))), shape=b.shape)
    before = messy.indices.get()
    np.testing.assert_allclose(spgemm(csp.csr_matrix(b), messy).get().toarray(), (b @ b).toarray())
    np.testing.assert_array_equal(messy.indices.get(), before)
