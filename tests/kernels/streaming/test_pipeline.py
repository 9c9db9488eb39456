"""Products through a device that holds neither operand nor C: the host's part, against SciPy, without a GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.foundation import threads
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.semirings import SEMIRINGS
from spdist.kernels.streaming import layout, partition, pipeline, results, staging
from spdist.kernels.streaming.layout import DeviceDtypes, SubmatrixOffset
from spdist.kernels.streaming.multiplication import RowSlice, plan_multiplication
from spdist.kernels.streaming.partition import BlockHistory, BlockTuning, CountTuning
from spdist.kernels.streaming.pipeline import PipelineTuning
from spdist.matrices.bsr import BSR, from_rows
from spdist.matrices.csr import CSR, from_scipy
from tests.conftest import random_matrix
from tests.kernels.bsr.test_multiply_cpu import assert_is_block_product, block_matrix
from tests.support.host_device import HostDevice, HostSlot, poisoned
from tests.support.strategies import csr_pairs


def assert_same(c: CSR, d: CSR) -> None:
    assert c.shape == d.shape
    assert (c.dtype, c.indices.dtype) == (d.dtype, d.indices.dtype)
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices), (c.data, d.data)):
        assert_array_equal(x, y)


def oracle(a: CSR, b: CSR) -> CSR:
    return cpu.multiply(a, b, engine="scipy")


BLOCKS = BlockTuning(first_bytes=0, scratch_bytes=1 << 10, row_bytes=16)
"""First blocks are small, as they are of multiplications that take some time; and so are margins."""
TUNING = PipelineTuning(small_entries=-1, blocks=BLOCKS)


def tuned(small_entries: int = -1, **blocks: float) -> PipelineTuning:
    return replace(TUNING, small_entries=small_entries, blocks=replace(BLOCKS, **blocks))


def multiply(a: CSR, b: CSR, device: HostDevice, **options: Any) -> CSR:
    return pipeline.multiply(a, b, device, **({"tuning": TUNING} | options))


def multiply_rows(a: CSR, b: CSR, device: HostDevice, *rows: Any, **options: Any) -> CSR:
    return pipeline.multiply_rows(a, b, device, RowSlice(*rows), **({"tuning": TUNING} | options))


@pytest.mark.parametrize("share", [1e-3, 0.5, 1, 2, 1e3])
def test_planned_products_may_be_wrong(share):
    """They decide how blocks are cut, and how much memory C gets at first: a wrong number costs time alone."""
    a, b = from_scipy(random_matrix(900, 700, 9.0, 1)), from_scipy(random_matrix(700, 800, 7.0, 2))
    planned = max(1, int(share * np.diff(b.indptr)[a.indices].sum()))
    for device in (HostDevice(1 << 16), HostDevice(1 << 20)):
        rows = RowSlice(capacity=10**6, products=planned)
        assert_same(pipeline.multiply_rows(a, b, device, rows, tuning=TUNING), oracle(a, b))


@given(csr_pairs(), st.integers(12, 24), st.integers(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_equals_scipy_whatever_the_limit(pair, log_limit, slots, locked):
    a, b = pair
    if a.dtype.kind not in "fc" or b.dtype.kind not in "fc":
        return
    device = HostDevice(1 << log_limit)
    device.locked = locked
    try:
        c = multiply(a, b, device, tuning=replace(TUNING, blocks_in_flight=slots))
    except MemoryBoundError:
        assert log_limit < 16
        return
    assert_same(c, oracle(a, b))
    assert device.most <= 1 << log_limit


@pytest.mark.parametrize("limit", [1 << 15, 1 << 16, 1 << 18, 1 << 22, 1 << 28])
@pytest.mark.parametrize("kind", ["random", "banded", "skewed"])
@pytest.mark.parametrize("locked", [False, True])
def test_blocks_of_many_sizes(kind, limit, locked):
    if kind == "random":
        a = from_scipy(random_matrix(900, 900, 6.0, 3))
    elif kind == "banded":
        a = from_scipy(sp.diags_array([np.ones(1500)] * 9, offsets=range(-4, 5), shape=(1500, 1500)).tocsr())
    else:
        m = random_matrix(800, 800, 3.0, 4).tolil()
        m[5] = 1.0
        a = from_scipy(m.tocsr())
    device, b = HostDevice(limit), CSR(a.indptr, a.indices, 2 * a.data, a.shape)
    device.locked = locked
    if kind == "skewed" and limit < 1 << 16:
        with pytest.raises(MemoryBoundError, match="raise memory_limit"):
            multiply(a, a, device)
        return
    for right in (a, b):
        assert_same(multiply(a, right, device), oracle(a, right))


@pytest.mark.parametrize(("limit", "small", "copies"), [(1 << 22, -1, 2), (1 << 24, -1, 1), (1 << 28, 1 << 20, 2)])
def test_operands_in_locked_memory_are_sent_from_where_they_are(limit, small, copies):
    """In windows of B, A alone with B resident, and both as one block; but for their offsets."""
    a = from_scipy(sp.diags_array([np.ones(30_000)] * 9, offsets=range(-4, 5), shape=(30_000, 30_000)).tocsr())
    b = CSR(a.indptr, a.indices, 2 * a.data, a.shape)
    taken = {}
    for locked in (False, True):
        device = HostDevice(limit)
        device.locked = locked
        assert_same(multiply(a, b, device, tuning=tuned(small)), oracle(a, b))
        taken[locked] = device.allocated
    assert taken[False] - taken[True] > 0.9 * copies * 12 * a.nnz


@pytest.mark.parametrize("limit", [1 << 17, 1 << 19, 1 << 28])
@pytest.mark.parametrize("sides", [(2, 2, 2), (3, 2, 4)])
@pytest.mark.parametrize("kind", ["random", "banded", "mixed"])
@pytest.mark.parametrize("locked", [False, True])
def test_values_that_are_blocks(kind, sides, limit, locked):
    """In rows, in windows of B, with B resident; of float32 times float64; A as a part of B's window."""
    if kind == "banded":
        pattern = sp.diags_array([np.ones(1500)] * 9, offsets=range(-4, 5), shape=(1500, 1500)).tocsr()
        a, b = (
            BSR(pattern.indptr.astype(np.int64), pattern.indices, numbers, (1500 * size[0], 1500 * size[1]))
            for size in (sides[:2], sides[1:])
            for numbers in [np.random.default_rng(1).integers(-3, 4, (pattern.nnz, *size)).astype(np.float64)]
        )
    else:
        a = block_matrix(700, 800, 6.0, sides[:2], 1, "float32" if kind == "mixed" else "float64")
        b = block_matrix(800, 900, 6.0, sides[1:], 2)
    left = a.rows()
    right = left if kind == "banded" and len(set(sides)) == 1 else b.rows()
    device, stages = HostDevice(limit), []
    device.locked = locked
    c = multiply(left, right, device, report=stages.append)
    assert_is_block_product(from_rows(c), a, from_rows(right))
    assert device.most <= limit
    assert (len({stage.start for stage in stages}) > 2) == (limit < 1 << 28)
    part = multiply_rows(left, right, HostDevice(limit), 5, 1000)
    assert_same(part, c.rows(5, 5 + part.nrows))
    assert part.nnz <= 1000 < c.indptr[6 + part.nrows] - c.indptr[5]


def test_blocks_that_do_not_fit_are_refused():
    a, b = block_matrix(20, 20, 3.0, (2, 3), 1).rows(), block_matrix(20, 20, 3.0, (2, 3), 2).rows()
    with pytest.raises(MatrixError, match=r"blocks of 2 x 3: both need blocks"):
        multiply(a, b, HostDevice(1 << 20))


def test_b_stays_where_it_fits_and_is_sent_in_parts_where_not():
    a = from_scipy(random_matrix(2000, 2000, 5.0, 5))
    for limit, resident in ((1 << 17, False), (1 << 22, True)):
        device = HostDevice(limit)
        assert_same(multiply(a, a, device), oracle(a, a))
        assert (device.b is not None) == resident


def test_a_long_row_gets_all_the_room():
    m = random_matrix(400, 400, 3.0, 6).tolil()
    m[200] = 2.0
    a = from_scipy(m.tocsr())
    device = HostDevice(34_000)
    assert_same(multiply(a, a, device), oracle(a, a))
    assert [count for count, _ in device.taken] == [TUNING.blocks_without_upload, 1]


@pytest.mark.parametrize("staging", [1 << 30, 1 << 12])
@pytest.mark.parametrize("row", [0, 1000, 2019])
def test_a_long_row_gets_the_room_of_b(staging, row):
    """B stays on the device until a row needs most of it, and more than the memory left."""
    lengths = np.repeat([1500, 5], [20, 2000])
    columns = np.concatenate([np.arange(length) + 1500 * (row % 20) for row, length in enumerate(lengths)])
    b = CSR(np.concatenate([[0], np.cumsum(lengths)]), columns.astype(np.int32), np.ones(40_000), (2020, 30_000))
    a = sp.eye_array(2020, format="lil")
    a[:20] = 0
    a[row, :20] = 3.0
    a = from_scipy(a.tocsr())
    device = HostDevice(int((b.nnz * 12 + 2021 * 4) / 0.59), staging)
    assert_same(multiply(a, b, device), oracle(a, b))
    assert [count for count, _ in device.taken] == [TUNING.blocks_in_flight, 1, 1]
    assert device.b is None


def test_a_row_that_fits_nowhere_is_refused_with_its_number():
    a = from_scipy(sp.csr_array(np.ones((3, 2000))))
    with pytest.raises(MemoryBoundError, match="row 0 of A expands to 4,000,000 products"):
        multiply(a, from_scipy(sp.csr_array(np.ones((2000, 2000)))), HostDevice(1 << 16))


@pytest.mark.parametrize("capacity", [0, 1, 40, 400, 5000, 10**9])
@pytest.mark.parametrize("start", [0, 7, 299])
def test_rows_that_fit_a_capacity(capacity, start):
    a = from_scipy(random_matrix(300, 300, 4.0, 7))
    whole = oracle(a, a).rows(start, 300)
    c = multiply_rows(a, a, HostDevice(1 << 16), start, capacity)
    assert c.nrows >= 1
    assert_same(c, whole.rows(0, c.nrows))
    assert c.nnz <= capacity or c.nrows == 1
    assert c.nrows == whole.nrows or int(whole.indptr[c.nrows + 1]) > capacity


def test_an_estimate_too_low_grows(monkeypatch):
    """The rows of the sample compress well, the rest not at all."""

    def assume(work, *_):
        work.rows.history.assume(1e-9)
        return results.NO_SAMPLE

    monkeypatch.setattr(pipeline, "_learn_from_sample", assume)
    a = from_scipy(random_matrix(500, 500, 5.0, 8))
    tuning = replace(tuned(margin=1.0, first_share=64), unsampled_products=0)
    assert_same(multiply(a, a, HostDevice(1 << 18), tuning=tuning), oracle(a, a))


@pytest.mark.parametrize("capacity", [None, 10, 10**9])
def test_c_has_room_before_all_is_counted(monkeypatch, capacity):
    """Nothing but the sample is known, which sees none of the rows with most of the products."""
    monkeypatch.setattr(partition.CountedProducts, "so_far", lambda products: (0, 0))
    sizes, grow = [], results.ResultBuffer.grow
    monkeypatch.setattr(results.ResultBuffer, "grow", lambda buffer, size: sizes.append(size) or grow(buffer, size))
    a = from_scipy(sp.eye(701, 700, format="csr"))  # its last row, which is in the sample, is empty
    lengths = np.where(np.arange(700) < 600, 1, 20_000)  # too uneven to go by their mean
    columns = np.concatenate([np.arange(length) for length in lengths])
    b = CSR(np.concatenate([[0], np.cumsum(lengths)]), columns, np.ones(len(columns)), (700, 20_000))
    whole, tuning = oracle(a, b), replace(TUNING, sample_rows=3)
    c = multiply_rows(a, b, HostDevice(1 << 22), 0, capacity, tuning=tuning)
    assert_same(c, whole.rows(0, c.nrows))
    assert c.nrows == (10 if capacity == 10 else whole.nrows)
    assert capacity == 10 or len(sizes) > 1


@pytest.mark.parametrize("most", [1000, 1 << 30])
def test_a_small_square_inside_a_resident_b_is_not_sampled(monkeypatch, most):
    """And no thread is woken to prepare its blocks, which are cut by what those before came to."""
    sampled, tasks, wake, sample = [], [], threads.thread_pool, pipeline._learn_from_sample
    monkeypatch.setattr(pipeline, "_learn_from_sample", lambda *args: sampled.append(args) or sample(*args))
    monkeypatch.setattr(threads, "thread_pool", lambda count, task: tasks.append(task) or wake(count, task))
    tuning = replace(TUNING, unsampled_products=most, counts=CountTuning(caller_entries=0))
    m = random_matrix(3000, 3000, 5.0, 4).tolil()
    m[0], m[2000] = 1.0, 1.0  # the first block compresses as no other does
    a, device, stages = from_scipy(m.tocsr()), HostDevice(1 << 21), []
    assert_same(multiply(a, a, device, report=stages.append, tuning=tuning), oracle(a, a))
    assert device.b is a
    assert bool(sampled) == (most == 1000)
    assert "count" in tasks  # its rows are uneven: entries would not say how many products a block has
    assert "stage" not in tasks
    assert len({stage.start for stage in stages}) > 3
    b = CSR(a.indptr, a.indices.copy(), a.data, a.shape)
    assert_same(multiply(a, b, device, tuning=tuning), oracle(a, a))
    assert "stage" in tasks


@pytest.mark.parametrize("limit", [1 << 15, 1 << 20])
def test_rows_are_not_counted_if_rows_of_b_are_alike(monkeypatch, limit):
    of, count = [], partition.CountedProducts
    monkeypatch.setattr(pipeline, "CountedProducts", lambda a, *args: of.append(a.nrows) or count(a, *args))
    a = from_scipy(random_matrix(3000, 2000, 5.0, 4))
    even = from_scipy(
        sp.csr_matrix(sp.diags_array([np.arange(1.0, 2001)] * 5, offsets=range(-2, 3), shape=(2000, 2000)))
    )
    m = random_matrix(2000, 2000, 5.0, 4).tolil()
    m[::100] = 1.0
    uneven = from_scipy(m.tocsr())
    for b, counted in ((even, False), (uneven, True)):
        of.clear()
        assert_same(multiply(a, b, HostDevice(limit << 2 * counted)), oracle(a, b))
        assert (a.nrows in of) == counted  # besides the rows of a sample


def test_the_last_blocks_are_smaller():
    rows = {}
    a = from_scipy(random_matrix(20_000, 20_000, 5.0, 4))
    for last in (1 << 16, 1 << 30):
        stages: list[pipeline.Stage] = []
        c = multiply(a, a, HostDevice(1 << 24), report=stages.append, tuning=tuned(last_bytes=last))
        assert_same(c, oracle(a, a))
        starts = sorted({stage.start for stage in stages})
        rows[last] = np.diff([*starts, a.nrows])
    assert rows[1 << 16][-1] < 0.1 * rows[1 << 16].max()
    assert rows[1 << 30][-2:].max() > 0.5 * rows[1 << 30].max()


@pytest.mark.parametrize("limit", [1 << 14, 1 << 25])
def test_small_products_are_not_sampled(monkeypatch, limit):
    """They are one block that brings B, and wake no threads, where they fit."""
    woken, wake = [], threads.thread_pool
    monkeypatch.setattr(threads, "thread_pool", lambda *args: woken.append(args) or wake(*args))
    a, stages, device = from_scipy(random_matrix(3000, 3000, 5.0, 4)), [], HostDevice(limit)
    assert_same(multiply(a, a, device, report=stages.append, tuning=tuned(1 << 20)), oracle(a, a))
    assert device.b is None
    if limit == 1 << 25:
        assert sorted(stage.name for stage in stages) == ["download", "multiply", "prepare", "upload"]
        assert not woken
    else:
        assert woken


@pytest.mark.parametrize("reduction", [None, "nnz"])
def test_a_small_product_that_needs_more_than_was_thought_is_several_blocks(monkeypatch, reduction):
    monkeypatch.setattr(pipeline, "single_block_bytes", lambda *args: 0)
    a, stages, device = from_scipy(random_matrix(3000, 3000, 5.0, 4)), [], HostDevice(1 << 20)
    work = plan_multiplication(a, a, ProductSpec(), reduction, RowSlice())
    run = pipeline.StreamingPipeline(work, device, stages.append, tuned(1 << 20))
    run.run()
    if reduction is None:
        assert_same(run.collector.result(), oracle(a, a))
    else:
        assert run.collector.result().values == [oracle(a, a).nnz]
    assert len({stage.start for stage in stages}) > 1


def test_types_and_shapes_are_checked():
    a = from_scipy(random_matrix(5, 4, 2.0, 9))
    with pytest.raises(MatrixError, match="4 columns but B has 5 rows"):
        multiply(a, a, HostDevice(1 << 20))
    with pytest.raises(InputError, match="start=6"):
        multiply_rows(a, from_scipy(random_matrix(4, 4, 2.0, 9)), HostDevice(1 << 20), 6, 1)
    with pytest.raises(InputError, match="blocks_in_flight=0"):
        PipelineTuning(blocks_in_flight=0)
    bad = CSR(a.indptr, np.full_like(a.indices, 9), a.data, a.shape)
    with pytest.raises(MatrixError, match="row 0 of A"):
        multiply(bad, from_scipy(random_matrix(4, 4, 2.0, 9)), HostDevice(1 << 20))


def test_every_stage_of_every_block_is_reported():
    seen: list[pipeline.Stage] = []
    a, b = (from_scipy(random_matrix(900, 900, 6.0, 3)) for _ in range(2))
    multiply(a, b, HostDevice(1 << 18), report=seen.append)
    prepared = [stage for stage in seen if stage.name == "prepare"]
    assert len(prepared) > 3
    assert [s.start for s in prepared] == sorted({s.start for s in prepared})
    assert all(s.seconds > 0 and s.nbytes > 0 for s in prepared)


def test_offsets_pass_32_bits():
    dtypes = DeviceDtypes(*map(np.dtype, ("f8", "i4", "i4", "f8", "f8")))
    buffer = results.ResultBuffer((4, 9), 0, dtypes, poisoned)
    buffer.offsets[:] = [1, 3, 5, 6]
    buffer.shift_offsets(0, 2, 2**31 - 2)
    buffer.shift_offsets(2, 2, 2**33)
    assert_array_equal(buffer.indptr, [0, 2**31 - 1, 2**31 + 1, 2**33 + 5, 2**33 + 6])


def test_columns_of_c_are_as_wide_as_c_needs(monkeypatch):
    """B has more rows than 31 bits count, but not more columns."""
    monkeypatch.setattr(partition, "INT32_MAX", 500)
    monkeypatch.setattr(layout, "INT32_MAX", 500)
    a, b = from_scipy(random_matrix(70, 600, 5.0, 10)), from_scipy(random_matrix(600, 80, 5.0, 11))
    assert_same(multiply(a, b, HostDevice(1 << 20)), oracle(a, b))


def test_a_block_has_entries_that_31_bits_count(monkeypatch):
    monkeypatch.setattr(partition, "INT32_MAX", 50)
    monkeypatch.setattr(layout, "INT32_MAX", 50)
    a = from_scipy(random_matrix(40, 40, 4.0, 12))
    b = from_scipy(sp.csr_array(sp.diags_array([1.0] + [0.0] * 39)))
    b = CSR(np.minimum(np.arange(41), 1), b.indices[:1], b.data[:1], b.shape)  # all rows but the first are empty
    taken = []
    prepare = staging.BlockPreparer.prepare
    monkeypatch.setattr(staging.BlockPreparer, "prepare", lambda *args: (s := prepare(*args), taken.append(s.a.nnz))[0])
    assert_same(multiply(a, b, HostDevice(1 << 20)), oracle(a, b))
    assert max(taken[1:]) <= 50  # the first is the sample


def test_rows_of_b_without_entries_are_not_sent():
    """A block uses the first and the last of 200,000 rows of B; all rows between are empty."""
    far = sp.csr_array((np.ones(400), (np.repeat(np.arange(200), 2), np.tile([0, 199_999], 200))), (200, 200_000))
    b = sp.csr_array((np.ones(40), (np.repeat([0, 199_999], 20), np.tile(np.arange(20), 2))), (200_000, 20))
    assert_same(multiply(from_scipy(far), from_scipy(b), HostDevice(1 << 16)),
                oracle(from_scipy(far), from_scipy(b)))  # fmt: skip


def test_rows_without_products_are_halved():
    """They need more than was expected: a row at a time would be as many calls in each other as there are rows."""
    a = from_scipy(sp.csr_array(([1.0], ([4999], [0])), (5000, 3)))
    b = from_scipy(sp.csr_array(np.ones((3, 3))))
    tuning = replace(tuned(row_bytes=0), blocks_in_flight=1)
    assert_same(multiply(a, b, HostDevice(1 << 13), tuning=tuning), oracle(a, b))


@pytest.mark.parametrize("limit", [1 << 15, 1 << 20])
def test_arrays_that_a_and_b_share_have_offsets_of_their_own(limit):
    """A's second half is B's first half and refers to B's second half; under the larger limit B is resident."""
    n = 640
    b = from_scipy(sp.csr_array((np.arange(2.0 * n), (np.arange(2 * n), n + np.arange(2 * n) % n)), (2 * n, 2 * n)))
    a = CSR(np.concatenate([np.zeros(n, np.int64), np.arange(n), [2 * n]]), b.indices, b.data, b.shape)
    assert_same(multiply(a, b, HostDevice(limit)), oracle(a, b))


def rows_inside(seed: int) -> tuple[CSR, CSR, SubmatrixOffset]:
    """Return B, some rows of it with lower columns as A, and where they lie."""
    rng = np.random.default_rng(seed)
    rows, row, low = (int(x) for x in rng.integers(1, 120, 3))
    n = row + rows + int(rng.integers(0, 50))
    b = random_matrix(n, low + n, 5.0, seed)
    b.indices = (low + b.indices % n).astype(b.indices.dtype)
    b.has_canonical_format = False
    b.sum_duplicates()
    b = from_scipy(b)
    part = b.rows(row, row + rows)
    return CSR(part.indptr, part.indices - low, part.data, (rows, n)), b, SubmatrixOffset(row, low)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), limit=st.sampled_from([1 << 13, 1 << 15, 1 << 20]), small=st.booleans(),
    semiring=st.sampled_from(["plus_times", "plus_first", "plus_second", "plus_pair", "max_times"]),
)  # fmt: skip
def test_rows_of_b_that_are_a(seed, limit, small, semiring):
    """Multiply all rows, then the later half with the history of the earlier blocks."""
    a, b, offset = rows_inside(seed)
    spec, history, cut = ProductSpec(SEMIRINGS[semiring]), BlockHistory(), a.nrows // 2
    expected, device = cpu.multiply(a, b, engine="numba", spec=spec), HostDevice(limit)
    options = {"spec": spec, "tuning": tuned(1 << 20 if small else -1)}
    try:
        c = multiply_rows(a, b, device, 0, None, 0, offset, history, **options)
        later, shifted = a.rows(cut, a.nrows), SubmatrixOffset(offset.row + cut, offset.column)
        half = multiply_rows(later, b, device, 0, 1 << 30, 0, shifted, history, **options)
    except MemoryBoundError:
        assert limit == 1 << 13
        return
    assert_same(c, expected)
    assert_same(half, expected.rows(cut, a.nrows))


def test_rows_of_a_resident_b_are_not_sent_and_a_sample_only_once(monkeypatch):
    a, b, offset = rows_inside(3)
    sent, prepare, history = [], staging.BlockPreparer.prepare, BlockHistory()
    monkeypatch.setattr(staging.BlockPreparer, "prepare", lambda *args: (s := prepare(*args), sent.append(s.nbytes))[0])
    for known in (False, True):
        sent.clear()
        multiply_rows(a, b, HostDevice(1 << 20), 0, 1 << 30, 0, offset, history)
        assert [nbytes > 0 for nbytes in sent] == [not known] * (not known) + [False] * (len(sent) - (not known))
    assert 0 < history.held_ratio <= 1
    assert history.kept_ratio == history.held_ratio


def test_blocks_of_a_known_multiplication_are_large():
    """None is small, first or last, where others of the product told what to expect and nothing is sent."""
    a, history, device = from_scipy(random_matrix(4_000, 4_000, 5.0, 4)), BlockHistory(), HostDevice(1 << 22)
    tuning = tuned(first_bytes=1 << 12, last_bytes=1 << 12)
    expected, blocks = oracle(a, a), {}
    for known in (False, True):
        stages: list[pipeline.Stage] = []
        c = multiply_rows(a, a, device, 0, 10**9, 0, SubmatrixOffset(), history, tuning=tuning, report=stages.append)
        assert_same(c, expected)
        starts = sorted({stage.start for stage in stages})
        blocks[known] = np.diff([*starts, a.nrows])
    assert len(blocks[True]) < 0.5 * len(blocks[False])
    assert blocks[True].min() > 4 * blocks[False].min()
    assert device.taken[-1][0] == TUNING.blocks_without_upload


@pytest.mark.parametrize("limit", [1 << 13, 1 << 20])
@pytest.mark.parametrize("even", [0, 1000])
@pytest.mark.parametrize("locked", [False, True])
def test_a_bad_row_is_called_by_its_number(limit, even, locked):
    """Whether products are counted first or not, and B is resident or not."""
    tuning = replace(TUNING, counts=CountTuning(even=even))
    a = from_scipy(random_matrix(5000, 40, 4.0, 14))
    b = from_scipy(random_matrix(40, 40, 4.0, 14))
    indices, indptr = a.indices.copy(), a.indptr.copy()
    indices[a.indptr[-2]] = 41
    indptr[-2] = a.nnz + 1
    for bad in (CSR(a.indptr, indices, a.data, a.shape), CSR(indptr, a.indices, a.data, a.shape)):
        device = HostDevice(limit)
        device.locked = locked
        with pytest.raises(MatrixError, match=r"row 4,99[89] of A"):
            multiply(bad, b, device, tuning=tuning)


@pytest.mark.parametrize("wrong", [-1, 40])
@pytest.mark.parametrize("locked", [False, True])
def test_columns_are_checked_before_they_are_sent(wrong, locked):
    a, b = from_scipy(random_matrix(500, 40, 4.0, 14)), from_scipy(random_matrix(40, 40, 4.0, 14))
    indices = a.indices.copy()
    indices[a.indptr[400]] = wrong
    bad, device = CSR(a.indptr, indices, a.data, a.shape), HostDevice(1 << 20)
    device.locked = locked  # then nobody copies them: the device looks at them
    preparer = staging.WindowPreparer(plan_multiplication(bad, b, ProductSpec(), None, RowSlice()), device)
    with pytest.raises(MatrixError, match="row 400 of A"):
        multiply(bad, b, device) if locked else preparer.prepare_all()


@pytest.mark.parametrize("banded", [True, False])
@pytest.mark.parametrize("wrong", [10**9, -1, 0])
def test_bad_offsets_of_b_are_refused_before_they_are_read(banded, wrong):
    tuning = replace(TUNING, counts=CountTuning(even=1e9))  # nothing is counted
    pattern = sp.diags_array([np.ones(4000)] * 3, offsets=(-1, 0, 1), shape=(4000, 4000)).tocsr()
    a = from_scipy(sp.csr_matrix(pattern if banded else random_matrix(4000, 4000, 4.0, 14)))
    indptr = a.indptr.copy()
    indptr[2000] = wrong
    with pytest.raises(MatrixError, match=r"offsets of B|offsets or columns"):
        multiply(a, CSR(indptr, a.indices.copy(), a.data, a.shape), HostDevice(1 << 18), tuning=tuning)


@pytest.mark.parametrize("entries", [-1, 1 << 20])
@pytest.mark.parametrize("square", [True, False])
def test_a_bad_row_that_the_device_finds_is_called_by_its_number_too(monkeypatch, square, entries):
    def refuse(slot, expected=0, while_busy=None):
        raise MatrixError("columns are out of range")

    monkeypatch.setattr(HostSlot, "multiply", refuse)
    a = from_scipy(random_matrix(400, 400, 4.0, 14))
    bad = CSR(a.indptr, np.where(np.arange(a.nnz) == a.nnz // 2, 400, a.indices), a.data, a.shape)
    row = int(np.searchsorted(a.indptr, a.nnz // 2, side="right")) - 1
    with pytest.raises(MatrixError, match=rf"row {row} of A"):
        multiply(bad, bad if square else a, HostDevice(1 << 24), tuning=tuned(entries))
    with pytest.raises(MatrixError, match="columns are out of range"):
        multiply(a, bad, HostDevice(1 << 24), tuning=tuned(entries))
    cut = CSR(np.minimum(a.indptr, a.nnz - 1), a.indices, a.data, a.shape)
    with pytest.raises(MatrixError, match=r"rows? .*of A|columns are"):
        multiply(cut, a, HostDevice(1 << 24), tuning=tuned(entries))


def test_what_was_done_before_the_capacity_was_reached_is_reported():
    seen: list[pipeline.Stage] = []
    a, b = (from_scipy(random_matrix(300, 300, 4.0, 7)) for _ in range(2))
    multiply_rows(a, b, HostDevice(1 << 20), 0, 1000, report=seen.append)
    assert [stage.name for stage in seen] == ["upload", "multiply", "download", "prepare"]


@pytest.mark.parametrize("method", ["upload", "multiply", "download", "wait"])
def test_the_first_error_comes_out_and_the_device_can_be_used_again(method, monkeypatch):
    a = from_scipy(random_matrix(900, 900, 6.0, 3))
    device, errors = HostDevice(1 << 17), []

    def failing(name, sound):
        def call(slot, *args):
            if slot.staged is not None and slot.staged.start > 100 and (errors or name == method):
                errors.append(OSError(f"{name}, after {len(errors)}"))
                raise errors[-1]
            return sound(slot, *args)

        return call

    for name in {method, "wait"}:
        monkeypatch.setattr(HostSlot, name, failing(name, getattr(HostSlot, name)))
    with pytest.raises(OSError, match=f"{method}, after 0"):
        multiply(a, a, device)
    assert len(errors) > 1
    monkeypatch.undo()
    assert_same(multiply(a, a, device), oracle(a, a))


@pytest.mark.parametrize("staging", [0, 1 << 12, 1 << 16])
def test_blocks_on_their_way_keep_to_the_memory_of_the_host(staging):
    a = from_scipy(random_matrix(2000, 2000, 5.0, 5))
    longest = int(np.diff(a.indptr).max())
    for limit in (1 << 17, 1 << 22):  # B in parts, B resident
        seen: list[pipeline.Stage] = []
        assert_same(multiply(a, a, HostDevice(limit, staging), report=seen.append), oracle(a, a))
        sizes = [stage.nbytes for stage in seen if stage.name == "prepare"]
        one_row = longest * (longest + 1) * 16 + 8192  # and of B what it asks for
        assert max(sizes) <= max(staging // 2, one_row)
        assert len(sizes) > 10 or staging > 1 << 12


def test_where_a_is_b_its_entries_are_sent_once():
    a = from_scipy(sp.diags_array([np.ones(9000)] * 27, offsets=range(-13, 14), shape=(9000, 9000)).tocsr())
    other = CSR(a.indptr, a.indices.copy(), a.data, a.shape)
    sent = []
    for b in (a, other):
        seen: list[pipeline.Stage] = []
        assert_same(multiply(a, b, HostDevice(4 << 20), report=seen.append), oracle(a, a))
        sent.append(sum(stage.nbytes for stage in seen if stage.name == "prepare"))
    assert sent[0] < 0.7 * sent[1]


@pytest.mark.parametrize("limit", [1 << 17, 1 << 22, 1 << 28])
def test_no_cycle_of_references_keeps_memory(limit):
    """Page-locked memory is free as soon as C is gone."""
    a, device, arrays = from_scipy(random_matrix(900, 900, 6.0, 3)), HostDevice(limit), []
    allocate = device.allocate
    device.allocate = lambda size: (memory := allocate(size), arrays.append(weakref.ref(memory.base)))[0]
    gc.collect()
    gc.disable()
    try:
        c = multiply(a, a, device, tuning=tuned(1 << 20 if limit == 1 << 28 else -1))
        assert any(array() is not None for array in arrays)
        del c
        device.slots(1, 1 << 10, 0)  # drops blocks that slots hold
        assert not any(array() is not None for array in arrays)
    finally:
        gc.enable()
