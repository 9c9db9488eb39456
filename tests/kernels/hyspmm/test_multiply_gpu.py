"""hySpMM on a GPU against SciPy: pattern, values, order of additions, many blocks, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.cuda.constants import BlockStatus
from spdist.kernels.cuda.pinned import pinned
from spdist.kernels.hyspmm import multiply as hyspmm
from spdist.kernels.hyspmm import workspace as hyspmm_sizes
from spdist.kernels.hyspmm.pipeline import BlockPipeline
from spdist.kernels.hyspmm.plan import HyspmmPlan, HyspmmTuning, plan_product
from spdist.kernels.hyspmm.preparation import BlockPreparation, PreparedBlock
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype
from tests.support.strategies import csr_pairs

pytestmark = pytest.mark.gpu
MANY = settings(max_examples=60, deadline=None)
VARIANTS = ["duplicated", "distinct"]
DTYPES = [np.dtype(t) for t in ("f4", "f8", "c8", "c16")]


def scipy_of(m: CSR) -> sp.csr_matrix:
    return sp.csr_matrix((m.data, m.indices, m.indptr), shape=m.shape)


def assert_product(c: CSR, a: CSR, b: CSR) -> None:
    """Pattern and values equal to SciPy's, bit for bit: both add products in the order of A's entries to a zero."""
    left, right = scipy_of(a), scipy_of(b)
    ones = [sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), shape=m.shape) for m in (a, b)]
    pattern = sp.csr_matrix(ones[0] @ ones[1])
    pattern.sort_indices()
    assert c.shape == pattern.shape
    assert c.indptr.dtype == np.int64
    assert c.indices.dtype == index_dtype(b.ncols)
    assert c.dtype == np.result_type(a.dtype, b.dtype)
    assert_array_equal(c.indptr, pattern.indptr)
    assert_array_equal(c.indices, pattern.indices)
    expected = sp.csr_matrix(left @ right)
    expected.sort_indices()
    keep = c.data != 0
    assert_array_equal(c.data[keep], expected.data[expected.data != 0])
    assert keep.sum() == np.count_nonzero(expected.data)


def ragged(nrows: int, inner: int, ncols: int, seed: int, dtype: Any = np.float64, long: int = 0) -> tuple[CSR, CSR]:
    """Rows of all lengths, some empty, `long` of them with every column."""
    rng = np.random.default_rng(seed)

    def make(rows: int, columns: int, full: int) -> CSR:
        lengths = np.minimum((rng.exponential(1.0, rows) ** 3 * 3).astype(int), columns)
        lengths[rng.integers(0, rows, full)] = columns
        picks = [np.sort(rng.choice(columns, n, replace=False)) for n in lengths]
        values = rng.standard_normal((2, int(lengths.sum())))
        values = values[0] + 1j * values[1] if np.dtype(dtype).kind == "c" else values[0]
        indices = np.concatenate([*picks, np.empty(0, int)]).astype(np.int32)
        return CSR(np.cumsum([0, *lengths]), indices, values.astype(dtype), (rows, columns))

    return make(nrows, inner, long), make(inner, ncols, long)


@st.composite
def loose_pairs(draw: Any) -> tuple[CSR, CSR]:
    """Draw a pair of any of the dtypes; A has unsorted rows and duplicates."""
    dtype = draw(st.sampled_from(DTYPES))
    a, b = draw(csr_pairs(dtypes=(dtype, draw(st.sampled_from(DTYPES)))))
    order = draw(st.permutations(range(a.nnz))) if a.nnz else []
    columns = a.indices[np.array(order, np.int64)] if a.nnz else a.indices
    return CSR(a.indptr, columns, a.data, a.shape), b


@MANY
@given(loose_pairs(), st.sampled_from(VARIANTS), st.sampled_from([None, 40_000]))
def test_equals_scipy(pair, variant, limit):
    assert_product(hyspmm.multiply(*pair, variant=variant, memory_limit=limit), *pair)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_group_of_lengths(variant, dtype):
    a, b = ragged(400, 300, 500, seed=1, dtype=dtype, long=3)  # narrow: shared memory
    assert_product(hyspmm.multiply(a, b, variant=variant), a, b)
    a, b = ragged(300, 200, 20_000, seed=2, dtype=dtype)  # wide: shared memory
    assert_product(hyspmm.multiply(a, b, variant=variant), a, b)
    a, b = ragged(200, 150, 3_000_000, seed=3, dtype=dtype)  # registers of all sizes, device memory
    assert_product(hyspmm.multiply(a, b, variant=variant), a, b)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_many_blocks_have_the_same_bits(variant, pairs):
    a, b = ragged(2000, 300, 40_000, seed=4)
    whole = hyspmm.multiply(a, b, variant="distinct")
    cost = hyspmm_sizes.block_cost(hyspmm_sizes.ItemBytes(8, 4, 4))
    lengths = np.diff(b.indptr)
    longest = max(int(lengths[a.indices[a.indptr[i] : a.indptr[i + 1]]].sum()) for i in range(a.nrows))
    limit = int(pairs * cost.bytes(1, 300, longest) / 0.9) + 1
    c = hyspmm.multiply(a, b, variant=variant, memory_limit=limit, pairs=pairs, threads=4)
    assert_array_equal(c.indptr, whole.indptr)
    assert_array_equal(c.indices, whole.indices)
    assert_array_equal(c.data, whole.data)


@pytest.mark.parametrize("variant", VARIANTS)
def test_column_numbers_beyond_32_bits(variant):
    a, b = ragged(200, 150, 60_000, seed=5)
    wide = CSR(b.indptr, b.indices.astype(np.int64) * (1 << 30), b.data, (b.nrows, 60_000 << 30))
    near = hyspmm.multiply(a, b, variant=variant)
    far = hyspmm.multiply(CSR(a.indptr, a.indices.astype(np.int64), a.data, a.shape), wide, variant=variant)
    assert far.indices.dtype == np.int64
    assert_array_equal(far.indices, near.indices.astype(np.int64) << 30)
    assert_array_equal(far.data, near.data)


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty(shape):
    nrows, inner, ncols = shape
    a = from_scipy(sp.csr_matrix((nrows, inner)))
    b = from_scipy(sp.csr_matrix((inner, ncols)))
    c = hyspmm.multiply(a, b)
    assert c.shape == (nrows, ncols)
    assert c.nnz == 0
    assert_array_equal(c.indptr, np.zeros(nrows + 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_b_out_of_order_is_refused(variant):
    a, b = ragged(50, 40, 60, seed=6, long=2)
    row = int(np.diff(b.indptr).argmax())
    for change in (lambda c: c[::-1], lambda c: np.repeat(c[:1], len(c)), lambda c: c + 60):
        columns = b.indices.copy()
        part = slice(b.indptr[row], b.indptr[row + 1])
        columns[part] = change(columns[part])
        with pytest.raises(MatrixError, match="pass B in canonical form"):
            hyspmm.multiply(a, CSR(b.indptr, columns, b.data, b.shape), variant=variant)
    assert_product(hyspmm.multiply(a, b, variant=variant), a, b)


def test_a_limit_below_the_longest_row_is_refused():
    a, b = ragged(50, 40, 60, seed=7, long=2)
    with pytest.raises(MemoryBoundError, match="bytes on the GPU"):
        hyspmm.multiply(a, b, memory_limit=6000)


@pytest.mark.parametrize("variant", VARIANTS)
def test_device_memory_stays_within_the_limit(variant):
    import cupy

    a, b = ragged(3000, 400, 30_000, seed=8)
    pool = cupy.cuda.MemoryPool()
    limit = 8 << 20
    with cupy.cuda.using_allocator(pool.malloc):
        c = hyspmm.multiply(a, b, variant=variant, memory_limit=limit)
        assert 0 < pool.total_bytes() <= limit
    assert_product(c, a, b)


def multiply_block(prepared: PreparedBlock, plan: HyspmmPlan) -> CSR:
    """Multiply one prepared block of `plan`; arrays of CuPy out, offsets from 0."""
    import cupy

    pipeline = BlockPipeline(plan)
    slot = pipeline.slots[0]
    pipeline.start(slot, prepared)
    slot.stream.synchronize()
    nnz, layout, block = int(slot.status[BlockStatus.ENTRIES_OF_C]), prepared.layout, prepared.block

    def array(offset: int, count: int, dtype: str | np.dtype[Any]) -> Any:
        return cupy.ndarray((count,), dtype, slot.memory + offset).copy()

    indptr = array(layout.c_indptr, block.rows + 1, plan.pointer)
    indices, data = array(layout.c_columns, nnz, plan.b.indices.dtype), array(layout.c_values, nnz, plan.dtype)
    return CSR(indptr, indices, data, (block.rows, plan.b.ncols))


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_prepared_block(variant):
    a, b = ragged(300, 200, 900, seed=9, long=1)
    plan = plan_product(a, b, variant=variant, memory_limit=1 << 30)
    assert len(plan.cuts) == 2
    block = multiply_block(BlockPreparation(plan, pinned).take(0), plan)
    c = CSR(block.indptr.get().astype(np.int64), block.indices.get(), block.data.get(), block.shape)
    assert_product(c, a, b)


def test_result_outlives_the_next_product():
    a, b = ragged(500, 300, 900, seed=10)
    first = hyspmm.multiply(a, b)
    kept = first.data.copy()
    hyspmm.multiply(CSR(a.indptr, a.indices, -a.data, a.shape), b)
    assert_array_equal(first.data, kept)


@pytest.mark.parametrize("bound", [0, 1 << 40])
def test_a_result_larger_than_estimated(bound):
    """The first rows compress well, the rest not at all."""
    tuning = HyspmmTuning(small_result=bound, margin=1.0)
    dense = sp.csr_matrix(np.ones((200, 200)))
    a = from_scipy(sp.block_diag([dense, sp.identity(30_000)], "csr"))
    c = hyspmm.multiply(a, a, memory_limit=4 << 20, tuning=tuning)
    assert_product(c, a, a)
