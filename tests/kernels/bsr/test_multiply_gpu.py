"""Products of block matrices on a GPU against SciPy; every output is poisoned before it is written."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.kernels.cuda.constants import TASK_PAIRS
from spdist.kernels.shipped.every_kernel import BLOCK_SIDES
from spdist.matrices.bsr import BSR, entries
from spdist.matrices.csr import CSR
from tests.kernels.bsr.test_multiply_cpu import assert_is_block_product, block_matrix
from tests.kernels.esc.test_multiply_gpu import poisoned as poisoned_pool
from tests.support.strategies import csr_pairs

pytestmark = pytest.mark.gpu

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
SIDES = st.sampled_from([1, 2, 3, 4, 6, 8])
TYPES = (  # values, block columns, offsets: each choice is compiled apart
    ("float64", np.int32, np.int32),
    ("float32", np.int32, np.int64),
    ("complex128", np.int64, np.int64),
)


def to_gpu(m: BSR, index=np.int32, pointer=np.int32) -> BSR:
    import cupy

    arrays = m.indptr.astype(pointer), m.indices.astype(index), m.data
    return BSR(*map(cupy.asarray, arrays), m.shape)


def to_host(m: BSR) -> BSR:
    return BSR(m.indptr.get(), m.indices.get(), m.data.get(), m.shape)


def assert_multiplies(a: BSR, b: BSR, index=np.int32, pointer=np.int32) -> BSR:
    left = to_gpu(a, index, pointer)
    c = bsr_gpu.multiply(left, left if b is a else to_gpu(b, index, pointer))
    assert_is_block_product(to_host(c), a, b)
    return c


@pytest.fixture(autouse=True)
def poisoned():
    """Allocate from a separate pool, whose bytes are all 0xa5 before they are written."""
    with poisoned_pool() as pool:
        yield pool


@QUIET
@given(csr_pairs(), st.tuples(SIDES, SIDES, SIDES), st.sampled_from(TYPES), st.integers(0, 2**32 - 1))
def test_equals_scipy(pair, sides, types, seed):
    rng = np.random.default_rng(seed)
    sides = sides if seed % 4 else sides[:1] * 3
    a, b = (
        BSR(m.indptr, m.indices, rng.integers(-3, 4, (m.nnz, *size)).astype(types[0]), _scaled(m.shape, size))
        for m, size in zip(pair, (sides[:2], sides[1:]), strict=True)
    )
    assert_multiplies(a, b, *types[1:])


def _scaled(shape, size):
    return shape[0] * size[0], shape[1] * size[1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("side", BLOCK_SIDES)
def test_sizes_of_their_own(side, dtype):
    a = block_matrix(400, 400, 9.0, (side, side), side, dtype)
    assert_multiplies(a, a)


@pytest.mark.parametrize("sides", [(17, 3, 5), (1, 40, 1), (33, 1, 33), (7, 7, 7), (16, 12, 8), (2, 9, 3)])
def test_any_sizes(sides):
    a, b = block_matrix(60, 50, 4.0, sides[:2], 1), block_matrix(50, 70, 4.0, sides[1:], 2)
    assert_multiplies(a, b)


@pytest.mark.parametrize("sides", [(8, 8, 8), (16, 16, 16), (16, 8, 8), (15, 7, 16), (8, 16, 5), (6, 6, 6)])
def test_tf32(sides, caplog):
    """Small whole numbers are exact; others off by no more than their rounding, blocks that are too small by none."""
    a, b = block_matrix(90, 80, 6.0, sides[:2], 1, "float32"), block_matrix(80, 70, 6.0, sides[1:], 2, "float32")
    with caplog.at_level("INFO", "spdist"):
        assert_is_block_product(to_host(bsr_gpu.multiply(to_gpu(a), to_gpu(b), tf32=True)), a, b)
    full = min(sides) < 7
    assert ("in full" in caplog.text) == full
    rng = np.random.default_rng(3)
    a, b = (BSR(m.indptr, m.indices, rng.standard_normal(m.data.shape).astype("f4"), m.shape) for m in (a, b))
    c = to_host(bsr_gpu.multiply(to_gpu(a), to_gpu(b), tf32=True)).to_scipy().toarray().astype(float)
    left, right = (m.to_scipy().toarray().astype(float) for m in (a, b))
    off = abs(c - left @ right) / (abs(left) @ abs(right)).clip(1e-30)
    assert off.max() <= 2**-10 + 2**-20
    assert (off.max() > 2**-14) != full  # as it is not in single precision


def test_tf32_is_for_float32():
    a = to_gpu(block_matrix(20, 20, 3.0, (8, 8), 1))
    with pytest.raises(InputError, match="tf32 is for float32, and C is float64"):
        spdist.spgemm(a, a, "tf32")


@pytest.mark.parametrize("side", [2, 3, 8, 16, 17])
def test_many_pairs_in_few_blocks(side):
    """A block of C with more pairs than are held at a time is written more than once."""
    a, b = (
        BSR(
            m.indptr.astype(np.int64),
            m.indices,
            np.tile(np.arange(-3.0, 4.0), m.nnz * side * side)[: m.nnz * side**2].reshape(-1, side, side),
            _scaled(m.shape, (side, side)),
        )
        for m in (sp.csr_array(np.ones((3, 5000))), sp.csr_array(np.ones((5000, 4))))
    )
    assert_multiplies(a, b)


@pytest.mark.parametrize("side", [2, 8])
def test_long_rows_are_cut(side):
    pattern = sp.random(300, 9000, density=0.02, random_state=1, format="lil")
    pattern[5] = 1.0
    pattern[11, ::2] = 1.0
    pattern = pattern.tocsr()
    values = np.random.default_rng(2).integers(-3, 4, (pattern.nnz, side, side)).astype(float)
    a = BSR(pattern.indptr.astype(np.int64), pattern.indices, values, (300 * side, 9000 * side))
    assert_multiplies(a, block_matrix(9000, 5000, 3.0, (side, side), 3))


@pytest.mark.parametrize("room", [0.0, 0.3, 1.1])
@pytest.mark.parametrize("sides", [(1, 1, 1), (2, 2, 2), (3, 2, 1), (3, 3, 3)])
@pytest.mark.parametrize("per_row", [2.0, 12.0, 40.0])
def test_rows_are_taken_whole_or_in_parts(monkeypatch, room, sides, per_row):
    monkeypatch.setattr(bsr_gpu, "ROW_PAIRS", 10**9)
    monkeypatch.setattr(bsr_gpu, "ROW_ROOM", room)
    monkeypatch.setattr(bsr_gpu, "ROW_SHARED", 160 << 10)
    monkeypatch.delattr(bsr_gpu, "_fill_by_tasks")
    a, b = block_matrix(300, 200, per_row, sides[:2], 1), block_matrix(200, 400, per_row, sides[1:], 2)
    assert_multiplies(a, b)
    assert_multiplies(a, b, np.int64, np.int64)


@pytest.mark.parametrize("side", [2, 3])
def test_small_blocks_in_tasks_have_the_same_bits(monkeypatch, side):
    a = block_matrix(400, 400, 9.0, (side, side), side)
    a = to_gpu(BSR(a.indptr, a.indices, np.random.default_rng(1).standard_normal(a.data.shape), a.shape))
    whole = bsr_gpu.multiply(a, a)
    monkeypatch.setattr(bsr_gpu, "ROW_SIDE", 0)
    monkeypatch.delattr(bsr_gpu, "row_kernel")
    np.testing.assert_array_equal(bsr_gpu.multiply(a, a).data.get(), whole.data.get())


@pytest.mark.parametrize("most", [1, 40, 5000])
def test_tasks_have_all_blocks_once_and_about_as_many_pairs(most):
    import cupy

    from spdist.kernels.cuda.module import module

    rng = np.random.default_rng(most)
    lengths = rng.integers(1, 200, 300) * (rng.random(300) < 0.5)
    indptr = np.append(0, np.cumsum(lengths)).astype(np.int32)
    ends = np.cumsum(rng.integers(1, most + 1, indptr[-1]))
    tasks = -(-int(ends[-1]) // TASK_PAIRS)
    firsts, rows = cupy.empty(tasks + 1, np.int64), cupy.empty((tasks, 2), np.int64)
    args = tasks, len(ends), len(lengths), cupy.asarray(ends), cupy.asarray(indptr), firsts, rows
    names = bsr_gpu.kernels("double", "int", "int", bsr_gpu.method_of("double", (2, 2, 2), True))
    module("bsr/bsr.cu", names)(names[0], -(-tasks // 256), 256, args)
    firsts, rows, starts = firsts.get(), rows.get(), np.append(0, ends)[:-1]
    assert (firsts[0], firsts[-1]) == (0, len(ends))
    assert (np.diff(firsts) >= 0).all()
    for task, (first, stop) in enumerate(itertools.pairwise(firsts)):
        assert stop - first <= 2 * TASK_PAIRS
        assert stop == len(starts) or starts[stop] >= (task + 1) * TASK_PAIRS
        if first < stop:
            assert starts[stop - 1] - starts[first] < 2 * TASK_PAIRS
            assert indptr[rows[task, 0]] <= first < indptr[rows[task, 0] + 1]
            assert indptr[rows[task, 1]] < stop <= indptr[rows[task, 1] + 1]


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)])
def test_empty(shape):
    sides = (2, 2)
    assert_multiplies(block_matrix(*shape[:2], 1.0, sides, 1), block_matrix(*shape[1:], 1.0, sides, 2))


def test_the_same_bits_on_every_run():
    a = block_matrix(500, 500, 20.0, (4, 4), 1)
    a = to_gpu(BSR(a.indptr, a.indices, np.random.default_rng(1).standard_normal(a.data.shape), a.shape))
    assert len({bsr_gpu.multiply(a, a).data.get().tobytes() for _ in range(5)}) == 1


def test_more_pairs_than_float32_counts(monkeypatch):
    monkeypatch.setattr(bsr_gpu, "EXACT", 3)
    a = block_matrix(100, 100, 9.0, (3, 3), 1)
    assert bsr_gpu._count_pairs(to_gpu(a), to_gpu(a))[0].data.dtype == np.float64
    assert_multiplies(a, a)


def test_values_that_are_not_aligned():
    import cupy

    a = block_matrix(50, 50, 4.0, (2, 2), 1)
    memory = cupy.zeros(a.nnz + 1)
    memory[1:] = cupy.asarray(a.data.reshape(-1))
    left = to_gpu(a)
    shifted = BSR(left.indptr, left.indices, memory[1:].reshape(a.data.shape), a.shape)
    assert_is_block_product(to_host(bsr_gpu.multiply(shifted, left)), a, a)


def test_through_spgemm(caplog):
    a = block_matrix(50, 50, 4.0, (2, 3), 1)
    b = block_matrix(50, 30, 4.0, (3, 4), 2)
    c = spdist.spgemm(to_gpu(a), to_gpu(b))
    assert isinstance(c, BSR)
    assert_is_block_product(to_host(c), a, b)
    with pytest.raises(InputError, match="choose one of auto"):
        spdist.spgemm(to_gpu(a), to_gpu(b), "esc")
    with pytest.raises(MatrixError, match="copy both"):
        spdist.spgemm(to_gpu(a), b)


def test_entries_and_mixed_products():
    import cupyx.scipy.sparse as csp

    a = block_matrix(50, 50, 4.0, (2, 2), 1)
    out: CSR = entries(to_gpu(a))
    truth = a.to_scipy().tocsr()
    np.testing.assert_array_equal(out.indices.get(), truth.indices)
    np.testing.assert_array_equal(out.data.get(), truth.data)
    c = spdist.spgemm(to_gpu(a), csp.csr_matrix(truth))
    assert isinstance(c, csp.csr_matrix)
    np.testing.assert_array_equal(c.get().toarray(), (truth @ truth).toarray())


def test_bad_operands_are_refused():
    a = block_matrix(50, 50, 4.0, (2, 2), 1)
    broken = a.indices.copy()
    broken[3] = 50
    with pytest.raises(MatrixError, match="B: "):
        bsr_gpu.multiply(to_gpu(a), to_gpu(BSR(a.indptr, broken, a.data, a.shape)))
    with pytest.raises(MatrixError, match="shapes do not fit"):
        bsr_gpu.multiply(to_gpu(a), to_gpu(block_matrix(49, 50, 4.0, (2, 2), 1)))


def test_too_little_memory_is_said(poisoned):
    a = to_gpu(block_matrix(2000, 2000, 20.0, (8, 8), 1))
    poisoned.set_limit(size=poisoned.total_bytes() + (60 << 20))
    with pytest.raises(MemoryBoundError, match=r"C takes .* blocks of 8 x 8"):
        bsr_gpu.multiply(a, a)


@pytest.mark.parametrize("side", [2, 8])
def test_workspace(side, poisoned):
    a = to_gpu(block_matrix(20000, 20000, 9.0, (side, side), 1))
    bsr_gpu.multiply(a, a)
    poisoned.free_all_blocks()
    before = poisoned.total_bytes()
    c = bsr_gpu.multiply(a, a)
    assert poisoned.total_bytes() - before - c.nbytes <= 1.5 * c.nbytes + (256 << 20)
