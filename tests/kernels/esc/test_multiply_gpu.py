"""`esc` on a GPU against SciPy: every dtype, every shape, every slice; outputs are poisoned before they are written."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.esc import multiply as esc
from spdist.kernels.esc.workspace import EscSizes, esc_workspace
from spdist.matrices.csr import CSR

pytestmark = pytest.mark.gpu
TYPES = (
    (np.float32, np.int32, np.int32),
    (np.float64, np.int32, np.int64),
    (np.complex64, np.int64, np.int32),
    (np.complex128, np.int64, np.int64),
)
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


@contextlib.contextmanager
def poisoned(pool: Any = None) -> Any:
    """Allocate from a separate pool, whose bytes are all 0xa5 before they are written."""
    import cupy

    pool = pool or cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        if size:
            memory.memset_async(
                0xA5, size
            )  # on the stream that will use it: streams of kernels do not wait for the null one
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield pool


def random_rows(nrows: int, ncols: int, lengths: Any, seed: int, dtype: Any = np.float64, index: Any = np.int32) -> CSR:
    """Return rows of the given lengths with unsorted columns, duplicates and stored zeros."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(np.broadcast_to(lengths, nrows))])
    values = rng.integers(-4, 5, indptr[-1]).astype(dtype)  # sums are exact in any order; many are zero
    if np.dtype(dtype).kind == "c":
        values += 1j * rng.integers(-4, 5, len(values)).astype(values.real.dtype)
    columns = rng.integers(0, max(ncols, 1), indptr[-1]).astype(index)
    return CSR(indptr.astype(index), columns, values, (nrows, ncols))


def to_gpu(m: CSR) -> CSR:
    import cupy

    return CSR(cupy.asarray(m.indptr), cupy.asarray(m.indices), cupy.asarray(m.data), m.shape)


def to_host(m: CSR) -> CSR:
    return CSR(m.indptr.get(), m.indices.get(), m.data.get(), m.shape)


def to_scipy(m: CSR, data: Any = None) -> sp.csr_matrix:
    return sp.csr_matrix((m.data if data is None else data, m.indices, m.indptr), m.shape)


def assert_product(c: CSR, a: CSR, b: CSR) -> None:
    """Check pattern and values of C exactly; the pattern from matrices of ones, for SciPy drops zeros."""
    pattern = to_scipy(a, np.ones(a.nnz)) @ to_scipy(b, np.ones(b.nnz))
    pattern.sort_indices()
    np.testing.assert_array_equal(c.indptr, pattern.indptr)
    np.testing.assert_array_equal(c.indices, pattern.indices)
    assert c.dtype == np.result_type(a.dtype, b.dtype)
    difference = to_scipy(c) - to_scipy(a) @ to_scipy(b)
    assert abs(difference).max() == 0 if difference.nnz else True


def check(a: CSR, b: CSR, limit: int | None = None) -> CSR:
    a_gpu = to_gpu(a)
    b_gpu = a_gpu if b is a else to_gpu(b)
    with poisoned():
        c = to_host(esc.multiply(a_gpu, b_gpu, workspace_limit=limit))
    assert_product(c, a, b)
    return c


@st.composite
def matrices(draw: Any, nrows: int, ncols: int, dtype: Any, index: Any, pointer: Any) -> CSR:
    longest = 0 if ncols == 0 else 3 * ncols
    row = st.just(0) | st.integers(0, min(longest, 4)) | st.integers(0, longest)
    lengths = draw(st.lists(row, min_size=nrows, max_size=nrows))
    m = random_rows(nrows, ncols, np.array(lengths, np.int64), draw(st.integers(0, 2**32)), dtype, index)
    return CSR(m.indptr.astype(pointer), m.indices, m.data, m.shape)


@QUIET
@given(st.data())
def test_equals_scipy(data):
    draw = data.draw
    nrows, inner, ncols = (draw(st.integers(0, 40)) for _ in range(3))
    types = draw(st.sampled_from(TYPES))
    a, b = draw(matrices(nrows, inner, *types)), draw(matrices(inner, ncols, *types))
    check(a, b)


@pytest.mark.parametrize(
    ("types", "ncols"), [(types, 20_000) for types in TYPES] + [(TYPES[0], 50), (TYPES[1], 3_000_000)]
)
def test_every_class_of_rows(types, ncols):
    dtype, index, _ = types
    lengths = np.concatenate([2 ** np.arange(13), 3 * 2 ** np.arange(11), np.zeros(5, np.int64), [9000, 30_000, 0]])
    a = random_rows(len(lengths), 400, lengths, 1, dtype, index)
    b = random_rows(400, ncols, np.arange(400) % 7, 2, dtype, index)
    check(a, b)


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_shapes(shape):
    nrows, inner, ncols = shape
    check(random_rows(nrows, inner, 0, 1), random_rows(inner, ncols, 0, 1))


def test_entries_without_products():
    a = random_rows(2000, 100, 3, 1)
    b = random_rows(100, 70, np.where(np.arange(100) == 99, 4, 0), 2)
    check(a, b)
    check(random_rows(3, 100, 70_000, 1), b)
    check(a, random_rows(100, 70, 0, 2))


def test_many_rows_of_every_length():
    lengths = np.minimum(np.random.default_rng(1).pareto(0.8, 60_000), 3000).astype(np.int64)
    a = random_rows(60_000, 60_000, lengths, 3)
    check(a, random_rows(60_000, 60_000, 5, 4))


@pytest.mark.parametrize("limit", [None, 2, 3, 16])
def test_any_limit_gives_the_same_bits(limit):
    rng = np.random.default_rng(5)
    lengths = np.where(np.arange(3000) % 100 == 0, 4000, rng.integers(0, 30, 3000))
    a = random_rows(3000, 2500, lengths, 6)
    a = CSR(a.indptr, a.indices, rng.standard_normal(a.nnz), a.shape)
    b = random_rows(2500, 90_000, 1 + np.arange(2500) % 20, 7)
    b = CSR(b.indptr, b.indices, rng.standard_normal(b.nnz), b.shape)
    c = esc.multiply(to_gpu(a), to_gpu(b))
    with poisoned():
        again = esc.multiply(to_gpu(a), to_gpu(b), workspace_limit=None if limit is None else limit << 20)
    truth = host_sums(a, b)
    for m in (to_host(c), to_host(again)):
        np.testing.assert_array_equal(m.indices, truth.indices)
        np.testing.assert_array_equal(m.data, truth.data)


def host_sums(a: CSR, b: CSR) -> CSR:
    """Return A @ B with the products of an entry added in the order of A's entries."""
    b_rows = np.diff(b.indptr)[a.indices]
    entry = np.repeat(np.arange(a.nnz), b_rows)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(b_rows) - b_rows, b_rows)
    at = b.indptr[a.indices[entry]] + within
    row = np.repeat(np.arange(a.nrows), np.diff(a.indptr))[entry]
    key = row.astype(np.int64) * b.ncols + b.indices[at]
    products = a.data[entry] * b.data[at]
    keys, place = np.unique(key, return_inverse=True)
    sums = np.zeros(len(keys), products.dtype)
    np.add.at(sums, place, products)
    indptr = np.searchsorted(keys // b.ncols, np.arange(a.nrows + 1))
    return CSR(indptr, keys % b.ncols, sums, (a.nrows, b.ncols))


def test_wide_columns():
    a = random_rows(5, 400, [3, 200, 5000, 30_000, 0], 1, np.complex128, np.int64)
    b = random_rows(400, 1 << 40, np.arange(400) % 7, 2, np.complex128, np.int64)
    with poisoned():
        c = to_host(esc.multiply(to_gpu(a), to_gpu(b)))
    truth = host_sums(a, b)
    np.testing.assert_array_equal(c.indptr, truth.indptr)
    np.testing.assert_array_equal(c.indices, truth.indices)
    np.testing.assert_array_equal(c.data, truth.data)


def test_one_column_takes_all():
    a = random_rows(3, 50, [40_000, 3, 9000], 1)
    b = random_rows(50, 1_000_000, 2, 2)
    check(a, CSR(b.indptr, np.full(100, 999_999, np.int32), b.data, b.shape))
    check(a, CSR(b.indptr, np.tile(np.array([5, 999_999], np.int32), 50), b.data, b.shape))


def test_a_row_of_millions():
    a = random_rows(2, 3000, [60_000, 20], 1)
    check(a, random_rows(3000, 500_000, 60, 2))
    check(a, random_rows(3000, 500_000, 60, 2), limit=64 << 20)


@pytest.mark.parametrize("limit", [None, 24 << 20, 60 << 20])
def test_peak_stays_within_the_workspace(limit):
    lengths = np.where(np.arange(20_000) % 500 == 0, 9000, 10)
    a, b = to_gpu(random_rows(20_000, 20_000, lengths, 1)), to_gpu(random_rows(20_000, 20_000, 8, 2))
    esc.multiply(a, b)
    with poisoned() as pool:
        c = esc.multiply(a, b, workspace_limit=limit)
        peak = pool.total_bytes() - sum(-(-m.nbytes // 512) * 512 for m in (c.indptr, c.indices, c.data))
    products = 8 * int(lengths.sum())
    rows = int((lengths > 1024).sum())
    sizes = EscSizes(
        20_000, 20_000, products, 72_000, 8, 4, long_rows=rows, long_entries=9000 * rows, long_products=72_000 * rows
    )
    planned = esc_workspace(sizes, 8192, limit)
    assert peak <= planned.total
    assert limit is None or planned.total <= limit


def test_too_small_a_limit_says_what_is_needed():
    a, b = to_gpu(random_rows(2, 3000, [60_000, 20], 1)), to_gpu(random_rows(3000, 5000, 60, 2))
    with pytest.raises(MemoryBoundError, match="esc needs"):
        esc.multiply(a, b, workspace_limit=1 << 20)


def test_mixed_types():
    a = random_rows(30, 40, 9, 1, np.float32, np.int64)
    check(a, random_rows(40, 50, 9, 2, np.complex64, np.int32))


def test_refuses_columns_out_of_range():
    a, b = random_rows(3, 4, 2, 1), random_rows(4, 5, 2, 2)
    a.indices[3] = 4
    with pytest.raises(MatrixError, match="A's offsets or columns"):
        esc.multiply(to_gpu(a), to_gpu(b))


@pytest.mark.slow
def test_more_products_than_32_bits_count():
    import cupy
    import cupyx.scipy.sparse as csp

    a = to_gpu(random_rows(100_000, 1000, 100, 1, np.float64))
    b = to_gpu(random_rows(1000, 1000, 500, 2, np.float64))
    c = esc.multiply(a, b)  # 5e9 products
    x = cupy.arange(1000, dtype=np.float64) % 7
    left, right, product = (csp.csr_matrix((m.data, m.indices, m.indptr.astype(np.int32)), m.shape) for m in (a, b, c))
    assert c.nnz > 9e7
    cupy.testing.assert_array_equal(product @ x, left @ (right @ x))


@pytest.mark.slow
def test_more_entries_than_32_bits_count():
    import cupy

    n = 50_000
    a = CSR(cupy.arange(n + 1), cupy.arange(n, dtype=np.int32) % 3, cupy.arange(n, dtype=np.float32) % 5, (n, 3))
    dense = cupy.tile(cupy.arange(n, dtype=np.int32), 3)
    b = CSR(cupy.arange(4) * n, dense, (cupy.arange(3 * n) % 11).astype(np.float32), (3, n))
    c = esc.multiply(a, b)  # 2.5e9 entries
    assert c.nnz == n * n
    cupy.testing.assert_array_equal(c.indptr, cupy.arange(n + 1) * n)
    for row in (0, 1, n // 2, n - 1):
        cupy.testing.assert_array_equal(c.indices[row * n : (row + 1) * n], cupy.arange(n))
        of_b = b.data[row % 3 * n :][:n]
        cupy.testing.assert_array_equal(c.data[row * n : (row + 1) * n], of_b * (row % 5))
