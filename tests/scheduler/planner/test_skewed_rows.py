"""Plans of skewed matrices: no block, and no row that is longer than expected, breaks the memory bound."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.errors import MemoryBoundError
from spdist.matrices.csr import CSR
from spdist.scheduler.execution.operands.of_block import renumber
from spdist.scheduler.planner.candidates import join_blocks
from spdist.scheduler.planner.cut_rows import BlockRecord, block_table
from spdist.scheduler.planner.estimate import NO_COMPRESSION, row_limits
from spdist.scheduler.planner.memory import block_budget
from spdist.scheduler.planner.planner import DEFAULT_TUNING, make_plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.sampling import count_row
from spdist.scheduler.planner.stored_rows import row_lengths
from spdist.scheduler.planner.tuning import BlockTuning
from spdist.scheduler.planner.worker_memory import B_ROW_BYTES, RENUMBER_BYTES, WorkerMemory
from spdist.storage.matrix import StoredMatrix, open_matrix

MIB = 1 << 20
NUMBERS = count()


def stored(m) -> StoredMatrix:
    url = f"memory://skewed-{next(NUMBERS)}.zarr"
    spdist.save(url, m)
    return open_matrix(url)


def by_rows(rows: list[np.ndarray], ncols: int) -> sp.csr_array:
    """Return a matrix of ones with sorted columns in each row."""
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return sp.csr_array((np.ones(indptr[-1]), np.concatenate(rows).astype(np.int32), indptr), (len(rows), ncols))


def budget_of(plan) -> int:
    return block_budget(plan.memory_limit, plan.reserved_memory, plan.blocks_in_flight)


def assert_blocks_fit(plan, row_nnz: np.ndarray) -> None:
    """Each block fits full to its capacity, and so does the longest of its rows, which is made whole."""
    entry = plan.c.entry_bytes
    for block in plan.blocks:
        copies, rows = 3 if block.split else 1, 8 * (block.stop - block.start)
        left = (budget_of(plan) - block.a_bytes - block.b_bytes) // copies - rows
        assert block.needed <= budget_of(plan)
        assert block.capacity <= max(left // entry, 1)
        assert row_nnz[block.start : block.stop].max() * entry <= left


def test_one_hub_row_among_small_rows_is_refused_with_a_limit_that_is_enough():
    n, k, length = 4000, 1000, 3000
    hub, small = np.arange(k), [np.array([i]) for i in range(k, n)]
    b_rows = [np.arange(i, k * length, k) for i in range(k)] + [np.array([i]) for i in range(k, n)]
    a, b = stored(by_rows([hub, *small], n)), stored(by_rows(b_rows, k * length))
    with pytest.raises(
        MemoryBoundError, match=r"row 0 of A expands to 3,000,000 products .* raise memory_limit"
    ) as one:
        make_plan(PlanRequest(a, b, "numba", 32 * MIB))
    enough = int(str(one.value).rpartition("at least ")[2].removesuffix("MiB"))
    plan = make_plan(PlanRequest(a, b, "numba", enough * MIB))
    assert_blocks_fit(plan, np.array([k * length, *[1] * (n - k)]))
    with pytest.raises(MemoryBoundError):
        make_plan(PlanRequest(a, b, "numba", enough * MIB * 15 // 16 - MIB))


@pytest.fixture(scope="module")
def misleading():
    """Rows whose products all fall on few columns, and one with as many products that fall on different columns."""
    rng, k, length, ncols = np.random.default_rng(1), 500, 1000, 600_000
    same = [np.sort(rng.choice(1500, length, replace=False)) for _ in range(k)]
    apart = [np.arange(i, k * length, k) + 2000 for i in range(k)]
    a_rows = [np.sort(rng.choice(k, 490, replace=False)) for _ in range(300)]
    a_rows[171] = np.arange(k, 2 * k)
    a, b = by_rows(a_rows, 2 * k), by_rows(same + apart, ncols)
    return stored(a), stored(b), np.diff((a @ b).indptr)


@pytest.mark.parametrize("mebibytes", [36, 48, 256])
def test_a_row_that_is_longer_than_rows_of_its_size_fits(misleading, mebibytes):
    a, b, row_nnz = misleading
    plan = make_plan(PlanRequest(a, b, "numba", mebibytes * MIB))
    assert row_nnz.max() == 500_000
    assert_blocks_fit(plan, row_nnz)


def test_whatever_limit_is_accepted_is_enough():
    """One row needs much of B, so that its inner dimension is cut, and has more entries than rows of its size have."""
    k, length, refused = 300, 700, 0
    rows = [np.arange(i, k * length, k) for i in range(k)] + [np.arange(length)] * k
    a_rows = [np.arange(k, 2 * k)] * 40 + [np.arange(k)] + [np.arange(k, 2 * k)] * 40
    row_nnz = np.full(81, length)
    row_nnz[40] = k * length
    a, b = stored(by_rows(a_rows, 2 * k)), stored(by_rows(rows, k * length))
    for mebibytes in range(12, 80, 4):
        try:
            plan = make_plan(PlanRequest(a, b, "numba", mebibytes * MIB))
        except MemoryBoundError:
            refused += 1
            continue
        assert_blocks_fit(plan, row_nnz)
    assert 0 < refused < 17


def test_a_row_that_is_shorter_than_its_bound_is_counted():
    """Its products are many times its entries, which fit; the bound on them does not."""
    k, length, ncols = 400, 5000, 2_000_000
    rows = [np.arange(0, ncols, ncols // length)[:length]] * k
    a, b = stored(by_rows([np.arange(k), np.array([1])], k)), stored(by_rows(rows, ncols))
    assert [count_row(a, b, row_lengths(b), row) for row in (0, 1)] == [length, length]
    plan = make_plan(PlanRequest(a, b, "numba", 40 * MIB))
    assert_blocks_fit(plan, np.array([length, length]))
    unknown = replace(DEFAULT_TUNING, sample=replace(DEFAULT_TUNING.sample, products=1))
    plan = make_plan(PlanRequest(a, b, "numba", 32 * MIB), tuning=unknown)
    assert any(block.split for block in plan.blocks)
    assert_blocks_fit(plan, np.array([length, length]))


def test_a_split_block_has_room_for_two_partial_products_and_their_sum():
    k, length = 300, 700
    b = stored(by_rows([np.arange(i, k * length, k) for i in range(k)], k * length))
    plan = make_plan(PlanRequest(stored(by_rows([np.arange(k)] * 4, k)), b, "numba", 96 * MIB, grid=(4, 3, 1)))
    assert [block.split for block in plan.blocks] == [True] * 4
    assert all(block.c_bytes >= 3 * k * length * plan.c.entry_bytes for block in plan.blocks)


def test_rows_are_counted_as_scipy_counts_them():
    rng = np.random.default_rng(2)
    a, b = (sp.random_array((60, 60), density=0.1, format="csr", rng=rng) for _ in range(2))
    left, right = stored(a), stored(b)
    found = [count_row(left, right, row_lengths(right), row) for row in range(60)]
    assert found == np.diff((a.astype(bool).astype(int) @ b.astype(bool).astype(int)).indptr).tolist()


def test_more_blocks_in_flight_get_no_more_memory():
    """Blocks that something else keeps small, and of which each might outgrow what is expected of it."""
    rng, k = np.random.default_rng(3), 300
    rows = [np.sort(rng.choice(400, 200, replace=False)) for _ in range(k)]
    a = stored(by_rows([np.sort(rng.choice(k, 150, replace=False)) for _ in range(2000)], k))
    b = stored(by_rows(rows, 100_000))
    tuning = replace(DEFAULT_TUNING, blocks=BlockTuning(cpu_products=3_000_000, least_products=3_000_000, small_nnz=0))
    plan = make_plan(PlanRequest(a, b, "numba", 96 * MIB), tuning=tuning)
    assert plan.blocks_in_flight > 2
    assert_blocks_fit(plan, np.full(2000, 400))


def test_blocks_are_joined_only_with_room_for_the_longest_row_of_both():
    m = stored(sp.eye_array(10, format="csr"))
    wide = stored(sp.eye_array(10, 100_000, format="csr"))
    request = PlanRequest(m, wide, "numba", 32 * MIB)
    limits = row_limits(request.spec, m, wide, row_lengths(wide))
    memory = WorkerMemory(request, limits, NO_COMPRESSION, 32 * MIB, True, DEFAULT_TUNING)
    few = BlockRecord(0, 2, 9, 9, 100, 0, 0, 9, 9)
    long = few._replace(start=2, stop=4, longest=50_000)
    budget = 10_000 * memory.c_entry_on_host
    short = long._replace(longest=9)
    assert len(join_blocks(memory, block_table([few, short]), budget)) == 1
    assert len(join_blocks(memory, block_table([few, long]), budget)) == 2
    assert len(join_blocks(memory, block_table([few, long]), 10 * budget)) == 1


def test_fragments_of_a_block_take_what_is_planned_for_it():
    """A block in flight may hold all but one entry of two Zarr chunks until others complete them."""
    from spdist.scheduler.execution.records import BlockTask, JobSpec
    from spdist.scheduler.execution.stages import CommitTarget, commit
    from spdist.scheduler.execution.worker import PartialResult, WorkerContext
    from spdist.storage.writer import Layout

    m = stored(sp.eye_array(10, format="csr"))
    request = PlanRequest(m, m, "numba", 32 * MIB)
    limits = row_limits(request.spec, m, m, row_lengths(m))
    memory = WorkerMemory(request, limits, NO_COMPRESSION, 32 * MIB, True, DEFAULT_TUNING)
    planned = memory.reserved(False, 1, 3) - memory.reserved(False, 1, 2)
    nnz = 2 * memory.chunk_length - 2
    c = CSR(np.array([0, nnz]), np.zeros(nnz, np.int32), np.zeros(nnz), (1, 10))
    context = WorkerContext(JobSpec(m, m, "numba", False, (0, 10), (0, 10)))
    context.results[0] = PartialResult(0, c)
    tracemalloc.start()
    committed = commit(context, BlockTask(0, 0, 1, nnz, False), 1, b"", CommitTarget(
        Layout("memory://fragments.zarr", 10, np.dtype(np.float64), memory.chunk_length), 1, 0))  # fmt: skip
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    fragments = committed.fragments
    assert len(fragments) == 2
    assert nnz * memory.c_entry <= held <= planned + 4096


def test_planning_takes_less_than_the_limit():
    n, limit = 500_000, 32 * MIB
    hub = by_rows([np.arange(n), *[np.array([i]) for i in range(1, 2000)], *[np.empty(0)] * (n - 2000)], n)
    request = PlanRequest(stored(hub), stored(hub), "numba", limit)
    for compiles in (True, False):
        if not compiles:
            tracemalloc.start()
        with pytest.raises(MemoryBoundError, match="row 0 of A"):
            make_plan(request)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= limit * 3 // 4


@pytest.mark.parametrize("spread", [1, 3, 20, 100])
def test_renumbering_takes_what_is_planned(spread):
    rng, nnz = np.random.default_rng(spread), 300_000
    columns = np.sort(rng.choice(spread * nnz, nnz, replace=False)).astype(np.int32) + 5
    a = CSR(np.array([0, nnz]), columns, np.ones(nnz), (1, spread * nnz + 5))
    tracemalloc.start()
    found, needed = renumber(a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(needed[found.indices], columns)
    assert found.shape == (1, len(needed))
    assert peak <= nnz * RENUMBER_BYTES + len(needed) * B_ROW_BYTES + 8 * MIB


@pytest.mark.parametrize(("entries", "limit", "length"), [
    (10**6, 64 << 30, 1 << 17), (1 << 27, 64 << 30, 1 << 18), (8_650_000_000, 64 << 30, 1 << 23),
    (10**13, 64 << 30, 1 << 23), (8_650_000_000, 2 << 30, 1 << 22),
])  # fmt: skip
def test_a_large_c_has_long_zarr_chunks_as_the_memory_allows(monkeypatch, entries, limit, length):
    m = stored(sp.eye_array(10, format="csr"))
    limits = row_limits(PlanRequest(m, m, "numba", limit).spec, m, m, row_lengths(m))
    monkeypatch.setattr(WorkerMemory, "_rough_nnz", lambda memory: float(entries))
    memory = WorkerMemory(PlanRequest(m, m, "numba", limit), limits, NO_COMPRESSION, limit, True, DEFAULT_TUNING)
    assert memory.chunk_length == length
    writing = memory.reserved(False, 1, 3) - memory.reserved(False, 1, 2)
    assert writing == 2 * length * memory.c_entry <= memory.usable // 8


def test_files_of_a_c_of_100_gb():
    ones = np.ones(93_000)
    a, b = (stored(sp.csr_array(one)) for one in (ones[:, None], ones[None, :]))
    plan = make_plan(PlanRequest(a, b, "numba", 8 << 30))
    assert plan.c.nbytes > 100e9
    assert 2 * -(-plan.c.nnz // plan.chunk) < 2_900
