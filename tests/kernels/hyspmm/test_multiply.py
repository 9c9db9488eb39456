"""The CPU side of hySpMM: blocks cut, prepared and placed; checked without a GPU against slow references."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels.cuda import constants
from spdist.kernels.cuda.pinned import pinned_bytes
from spdist.kernels.hyspmm import workspace as hyspmm_sizes
from spdist.kernels.hyspmm.plan import CountedProducts, HyspmmPlan, HyspmmTuning, choose, plan_product
from spdist.kernels.hyspmm.preparation import BlockPreparation, PreparedBlock
from spdist.kernels.hyspmm.workspace import BlockSizes, ItemBytes
from spdist.matrices.csr import CSR, from_scipy
from tests.conftest import random_matrix
from tests.support.strategies import csr_matrices, csr_pairs

FEW = settings(max_examples=40, deadline=None)
VARIANTS = ["duplicated", "distinct"]


def sent_arrays(plan: HyspmmPlan, prepared: PreparedBlock) -> dict[str, Any]:
    """Return the arrays that a block sends, by name."""
    block, layout = prepared.block, prepared.layout

    def array(name: str, count: int, dtype: Any) -> Any:
        start = getattr(layout, name)
        return prepared.sent[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    return {
        "a_values": array("a_values", block.entries, plan.dtype),
        "b_values": array("b_values", block.b_entries, plan.dtype),
        "b_columns": array("b_columns", block.b_entries, plan.b.indices.dtype),
        "b_starts": array("b_starts", block.b_rows + 1, plan.pointer),
        "row_entries": array("row_entries", block.rows + 1, plan.pointer),
        "row_products": array("row_products", block.rows + 1, plan.pointer),
        "a_rows": array("a_rows", block.entries, np.uint32) if block.distinct else np.arange(block.entries),
    }


def blocks_of(plan: HyspmmPlan) -> list[PreparedBlock]:
    """Return all blocks; each is copied, for the ring is used again."""
    blocks = BlockPreparation(plan)
    out = []
    for number in range(len(plan.cuts) - 1):
        prepared = blocks.take(number)
        out.append(dataclasses.replace(prepared, sent=prepared.sent.copy()))
        blocks.release(prepared)
    blocks.close()
    return out


def cut_again(plan: HyspmmPlan, budget: int, **changes: Any) -> HyspmmPlan:
    """Return the plan with blocks of another size."""
    return dataclasses.replace(plan, budget=budget, **changes)


def row_by_row(plan: HyspmmPlan, prepared: PreparedBlock) -> list[list[tuple[int, Any]]]:
    """Multiply, sort and compress a block as the GPU does, slowly."""
    sent, rows = sent_arrays(plan, prepared), []
    for row in range(prepared.block.rows):
        products = []
        for entry in range(sent["row_entries"][row], sent["row_entries"][row + 1]):
            k = sent["a_rows"][entry]
            part = slice(sent["b_starts"][k], sent["b_starts"][k + 1])
            products += zip(
                sent["b_columns"][part].tolist(), sent["a_values"][entry] * sent["b_values"][part], strict=True
            )
        assert len(products) == sent["row_products"][row + 1] - sent["row_products"][row]
        sums: dict[int, Any] = {}
        for column, product in products:
            sums[column] = sums.get(column, plan.dtype.type(0)) + product
        rows.append(sorted(sums.items()))
    return rows


def reference(a: CSR, b: CSR) -> list[list[tuple[int, Any]]]:
    """Return the rows of the structural product."""
    rows = []
    for row in range(a.nrows):
        sums: dict[int, Any] = {}
        for at in range(a.indptr[row], a.indptr[row + 1]):
            k = a.indices[at]
            for i in range(b.indptr[k], b.indptr[k + 1]):
                sums[int(b.indices[i])] = sums.get(int(b.indices[i]), b.dtype.type(0)) + a.data[at] * b.data[i]
        rows.append(sorted(sums.items()))
    return rows


@st.composite
def loose_pairs(draw: Any, dtype: Any = np.float64) -> tuple[CSR, CSR]:
    """Draw a pair whose A has unsorted rows and duplicates."""
    a, b = draw(csr_pairs(dtypes=(dtype, dtype)))
    order = draw(st.permutations(range(a.nnz))) if a.nnz else []
    columns = a.indices[np.array(order, np.int64)] if a.nnz else a.indices
    return CSR(a.indptr, columns, a.data, a.shape), b


@FEW
@given(pair=loose_pairs(), variant=st.sampled_from(VARIANTS), tight=st.booleans())
def test_blocks_hold_the_product(pair, variant, tight):
    a, b = pair
    plan = plan_product(a, b, variant=variant, memory_limit=1 << 30, threads=1)
    if tight:
        plan = cut_again(plan, 0)  # a row a block
    blocks = blocks_of(plan)
    assert [p.start for p in blocks] == [0, *(p.stop for p in blocks[:-1])][: len(blocks)]
    assert [row for p in blocks for row in row_by_row(plan, p)] == reference(a, b)
    for p in blocks:
        assert p.layout.end <= plan.cost.bytes(p.block.rows, p.block.entries, p.block.products)
        assert p.layout.sent <= plan.ring_bytes()
        assert p.lengths.sum() == np.count_nonzero(np.diff(sent_arrays(plan, p)["row_products"]))


@FEW
@given(csr_matrices((9, 300)), st.data())
def test_distinct_rows_are_sent_once_and_in_order(a, data):
    b = data.draw(csr_matrices((300, 5)))
    plan = plan_product(a, b, variant="distinct", memory_limit=1 << 30, threads=1)
    for p in blocks_of(plan):
        wanted = np.unique(a.indices[a.indptr[p.start] : a.indptr[p.stop]])
        sent = sent_arrays(plan, p)
        assert p.block.b_rows == len(wanted)
        assert_array_equal(np.diff(sent["b_starts"]), (b.indptr[1:] - b.indptr[:-1])[wanted])
        assert_array_equal(wanted[sent["a_rows"]], a.indices[a.indptr[p.start] : a.indptr[p.stop]])


def test_duplicated_rows_come_in_the_order_of_the_entries():
    a = CSR(np.array([0, 1, 4, 5, 6]), np.array([0, 1, 2, 3, 3, 1], np.int32), np.arange(10.0, 70, 10), (4, 4))
    b = CSR(np.array([0, 1, 3, 5, 7]), np.array([0, 1, 3, 0, 1, 1, 3], np.int32), np.arange(1.0, 8), (4, 4))
    (prepared,) = blocks_of(plan_product(a, b, variant="duplicated", memory_limit=1 << 30, threads=1))
    sent = sent_arrays(plan_product(a, b, variant="duplicated", memory_limit=1 << 30, threads=1), prepared)
    assert_array_equal(sent["b_values"], [1, 2, 3, 4, 5, 6, 7, 6, 7, 2, 3])  # figure 3.1 of the thesis
    assert_array_equal(np.diff(sent["b_starts"]), [1, 2, 2, 2, 2, 2])


@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_counted_by_threads(threads):
    tuning = HyspmmTuning(parallel_entries=10)
    m = from_scipy(random_matrix(500, 500, 6, seed=1))
    plan = plan_product(m, m, variant="distinct", memory_limit=1 << 30, threads=threads, tuning=tuning)
    lengths = np.diff(m.indptr)
    wanted = [lengths[m.indices[m.indptr[i] : m.indptr[i + 1]]].sum() for i in range(m.nrows)]
    assert_array_equal(plan.counted.products(), wanted)
    assert plan.total == sum(wanted)


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(0, 10**5), st.integers(0, 10**5), st.integers(1, 1000), st.integers(0, 40),
)  # fmt: skip
def test_blocks_are_cut_by_bytes_and_products(rows, budget, first_budget, most, part):
    from spdist.kernels.hyspmm.prepare import RISE, cut

    products = np.array([p * e for p, e in rows], np.int64)
    indptr = np.cumsum([0, *(e for _, e in rows)])
    starts = np.array([0, min(part, len(rows)), len(rows)])
    sums = [np.cumsum(products[i:j]) for i, j in itertools.pairwise(starts)]
    bases = np.array([0, products[: starts[1]].sum(), products.sum()])
    counted = CountedProducts(np.concatenate([[0], *sums]), starts, bases)
    assert_array_equal(counted.products(), products)
    cost, cuts = hyspmm_sizes.block_cost(ItemBytes(8, 4, 4)), np.empty(len(rows) + 1, np.int64)
    count = cut(tuple(counted), indptr, budget, first_budget, most, cost[:3], cuts)
    allowed = first_budget
    for start, stop in itertools.pairwise(cuts[: count + 1].tolist()):

        def fits(end: int, start: int = start, allowed: int = allowed) -> bool:
            entries, total = int(indptr[end] - indptr[start]), int(products[start:end].sum())
            taken = cost.bytes(end - start, entries, total) - cost.fixed
            return taken <= allowed and total <= most and entries <= most

        assert stop == start + 1 or (stop > start and fits(stop))
        assert stop == len(rows) or not fits(stop + 1)
        allowed = min(allowed + allowed // RISE, budget)
    assert cuts[0] == 0
    assert cuts[count] == len(rows)


@FEW
@given(
    st.integers(1, 10**6), st.integers(0, 10**9), st.integers(0, 10**12), st.integers(0, 10**9), st.booleans(),
    st.sampled_from([4, 8, 16]), st.sampled_from([4, 8]), st.sampled_from([4, 8]), st.data(),
)  # fmt: skip
def test_a_block_never_takes_more_than_its_bound(
    rows, entries, products, b_rows, distinct, value, index, pointer, data
):
    types = ItemBytes(value, index, pointer)
    b_rows = min(b_rows, entries) if distinct else entries
    b_entries = data.draw(st.integers(0, products)) if distinct else products
    layout = hyspmm_sizes.block_layout(BlockSizes(rows, entries, products, b_rows, b_entries, distinct), types)
    assert layout.end <= hyspmm_sizes.block_cost(types).bytes(rows, entries, products)
    own = sorted(set(layout))
    assert all(offset % constants.ALIGNMENT == 0 for offset in own)
    assert layout.sent <= layout.counts < layout.end


def test_limits():
    m = from_scipy(random_matrix(200, 200, 5, seed=2))
    with pytest.raises(MemoryBoundError, match=r"needs [\d,]+ bytes on the GPU, but memory_limit=5,000 bytes"):
        plan_product(m, m, memory_limit=5000)
    needed = plan_product(m, m, memory_limit=1 << 20, pairs=1)
    widest = int(needed.counted.products().argmax())
    row = needed.cost.bytes(1, int(np.diff(m.indptr)[widest]), int(needed.counted.products()[widest]))
    assert plan_product(m, m, memory_limit=int(row * 1.2), pairs=4).pairs == 1
    for pairs in (1, 2, 3):
        plan = plan_product(m, m, memory_limit=100_000, pairs=pairs)
        assert plan.pairs * plan.budget <= 0.9 * 100_000
        sizes = [plan.cost.bytes(p.block.rows, p.block.entries, p.block.products) for p in blocks_of(plan)]
        assert len(sizes) > pairs
        assert max(sizes) <= plan.budget


def test_choice_by_bytes(caplog):
    caplog.set_level(logging.INFO, "spdist")
    n = 100
    diagonal = CSR(np.arange(n + 1), np.arange(n, dtype=np.int32), np.ones(n), (n, n))
    b = from_scipy(random_matrix(n, n, 4, seed=3))
    assert choose(diagonal, b)[0] == "duplicated"  # every row of B is asked for once
    variant, duplicated, distinct = choose(from_scipy(random_matrix(n, n, 9, seed=4)), b)
    assert variant == "distinct"
    assert distinct < duplicated
    assert "bytes duplicated" in caplog.text


def test_wrong_input():
    m = from_scipy(random_matrix(20, 30, 3, seed=5))
    square = from_scipy(random_matrix(30, 30, 3, seed=5))
    with pytest.raises(MatrixError, match="as many columns as B has rows"):
        plan_product(m, m, memory_limit=1 << 30)
    for columns in (m.indices + 30, m.indices - 30):
        with pytest.raises(MatrixError, match="of A: offsets or columns out of range"):
            plan_product(CSR(m.indptr, columns, m.data, m.shape), square, memory_limit=1 << 30)
    with pytest.raises(MatrixError, match="not multiplied on the GPU"):
        plan_product(
            from_scipy(m.to_scipy().astype(int)), from_scipy(square.to_scipy().astype(int)), memory_limit=1 << 30
        )
    for options in ({"pairs": 0}, {"threads": 0}, {"memory_limit": 0}, {"variant": "other"}):
        with pytest.raises(InputError):
            plan_product(m, square, **{"memory_limit": 1 << 30, **options})


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 10**6, 10**9 + 1])
def test_pinned_sizes_are_few_and_close(size):
    assert size <= pinned_bytes(size) <= max(65536, size * 9 / 8 + 65536)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 4])
def test_threads_hand_blocks_over_in_order(variant, threads):
    tuning = HyspmmTuning(ring_bytes=1 << 16)  # threads must wait for room
    m = from_scipy(random_matrix(3000, 3000, 8, seed=6))
    plan = cut_again(plan_product(m, m, variant=variant, memory_limit=1 << 30, tuning=tuning), 1 << 18, threads=threads)
    blocks = blocks_of(plan)
    assert len(blocks) > 8
    for p in blocks:
        sent = sent_arrays(plan, p)
        k = m.indices[m.indptr[p.start] : m.indptr[p.stop]]
        rows = np.unique(k) if p.block.distinct else k
        columns = [m.indices[m.indptr[row] : m.indptr[row + 1]] for row in rows]
        assert_array_equal(sent["b_columns"], np.concatenate([*columns, k[:0]]))
        assert_array_equal(sent["a_values"], m.data[m.indptr[p.start] : m.indptr[p.stop]])
        assert_array_equal(np.diff(sent["row_products"]), plan.counted.products()[p.start : p.stop])


def test_threads_stop_when_asked():
    m = from_scipy(random_matrix(3000, 3000, 8, seed=6))
    plan = cut_again(plan_product(m, m, variant="distinct", memory_limit=1 << 30), 1 << 18, threads=3)
    blocks = BlockPreparation(plan)
    blocks.take(0)
    blocks.close()
    assert all(future.done() for future in blocks.futures)


def test_a_thread_that_fails_is_heard(monkeypatch):
    m = from_scipy(random_matrix(3000, 3000, 8, seed=6))
    plan = cut_again(plan_product(m, m, variant="distinct", memory_limit=1 << 30), 1 << 18, threads=3)

    def full(self: Any) -> Any:
        raise MemoryError("no room for marks")

    monkeypatch.setattr(HyspmmPlan, "scratch", full)
    blocks = BlockPreparation(plan)
    with pytest.raises(MemoryError, match="no room for marks"):
        blocks.take(0)
