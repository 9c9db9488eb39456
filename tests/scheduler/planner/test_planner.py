"""Plans of stored matrices: rows covered once, bytes within the bound, refusals that say how much is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.foundation.units import parse_bytes
from spdist.matrices.csr import from_scipy
from spdist.scheduler.execution.operands.of_block import renumber
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.planner import make_plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.tuning import (
    BlockTuning,
    ChunkTuning,
    PlannerTuning,
    ResidencyTuning,
)
from spdist.storage.direct.object_chunks import most_moving
from spdist.storage.matrix import open_matrix
from spdist.storage.writer import MatrixWriter
from tests.conftest import random_matrix
from tests.support.seals import without_seal


def products_of(a: sp.csr_matrix, b: sp.csr_matrix) -> np.ndarray:
    lengths = np.diff(b.indptr)
    return np.array([lengths[a.indices[i:j]].sum() for i, j in zip(a.indptr[:-1], a.indptr[1:], strict=True)])


@pytest.mark.parametrize("limit", ["32MiB", "64MiB", "1GiB"])
@pytest.mark.parametrize("grid", [None, (13, 1, 1), (60, 3, 2)])
def test_blocks_cover_rows_once_and_keep_the_bound(stored, limit, grid):
    a, b = random_matrix(20_000, 3_000, 20, 1), random_matrix(3_000, 40_000, 20, 2)
    plan = api.plan(stored("A", a), stored("B", b), memory_limit=limit, grid=grid)
    assert [block.start for block in plan.blocks] == [0, *(block.stop for block in plan.blocks[:-1])]
    assert plan.blocks[-1].stop == 20_000
    assert plan.projected_memory <= 0.9 * plan.memory_limit
    products = products_of(a, b)
    assert plan.expansion == products.sum()
    assert all(block.products == products[block.start : block.stop].sum() for block in plan.blocks)
    if grid:
        assert (len(plan.blocks), plan.inner_blocks, plan.column_blocks) == grid


@pytest.mark.parametrize(("limit", "resident"), [("32MiB", False), ("64MiB", True)])
def test_blocks_of_short_rows_keep_the_bound_they_were_cut_by(stored, limit, resident):
    """Of rows of one entry, the offsets of C are much of what is counted."""
    a = stored("A", sp.eye_array(1_000_000, format="csr"))
    plan = api.plan(a, a, memory_limit=limit)
    assert len(plan.blocks) > 1
    assert plan.resident is resident
    assert plan.projected_memory <= 0.9 * plan.memory_limit


def test_distinct_rows_of_b_are_counted_exactly(stored, monkeypatch):
    monkeypatch.setattr(Plan, "rereads", False)  # blocks that are joined count some twice
    a, b = random_matrix(4_000, 60_000, 20, 3), random_matrix(60_000, 60_000, 120, 4)
    plan = api.plan(stored("A", a), stored("B", b), memory_limit="64MiB")
    assert not plan.resident
    assert len(plan.blocks) > 1
    for block in plan.blocks:
        needed = np.unique(a.indices[a.indptr[block.start] : a.indptr[block.stop]])
        assert block.b_bytes == np.diff(b.indptr)[needed].sum() * 12 + 24 * len(needed)


def test_small_and_large_products_agree_on_the_scan(stored):
    """The one-block shortcut gives the numbers that the compiled scan gives."""
    a = stored("A", random_matrix(900, 900, 6, 6))
    request = PlanRequest(a, a, "numba", 1 << 31)
    short, scanned = make_plan(request), make_plan(request, tuning=PlannerTuning(blocks=BlockTuning(small_nnz=0)))
    assert (short.expansion, len(short.blocks)) == (scanned.expansion, 1)
    assert abs(short.c.nnz - scanned.c.nnz) <= 900


def test_the_one_block_of_a_small_product_has_room_for_its_mask(stored):
    a, mask = stored("A", random_matrix(900, 900, 6, 6)), stored("M", random_matrix(900, 900, 9, 7))
    whole, masked = api.plan(a, a), api.plan(a, a, mask=mask)
    assert len(whole.blocks) == len(masked.blocks) == 1
    held = mask.rows_indices(0, 900)
    assert masked.blocks[0].a_bytes - whole.blocks[0].a_bytes >= 4 * held.nnz + 8 * 900


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_few_rows_or_none_are_planned(stored, rows):
    plan = api.plan(stored("A", sp.csr_matrix((rows, 5))), stored("B", random_matrix(5, 4, 2, 1)))
    assert (plan.c.shape, plan.c.nnz, plan.expansion) == ((rows, 4), 0, 0)


@pytest.mark.parametrize(("at", "value"), [(0, 1), (-1, 90)])
def test_offsets_that_leave_entries_out_are_refused(stored, tmp_path, at, value):
    """Of an A that another program wrote, too: its product would lack them."""
    m = sp.csr_matrix((np.ones(100), np.arange(100) % 30, np.arange(0, 101, 5)), (20, 30))
    stored("F", m)
    foreign = without_seal(tmp_path / "F.zarr")
    foreign["indptr"][at if at >= 0 else 20] = value
    with pytest.raises(MatrixError, match=r"F.zarr: indptr does not rise from 0 to the 100 entries there are"):
        api.plan(tmp_path / "F.zarr", stored("B", random_matrix(30, 4, 2, 1)))


def test_memory_too_small_says_how_much_is_needed(stored):
    n = 3_000_000
    row = sp.csr_matrix((np.ones(n), (np.zeros(n, int), np.arange(n))), shape=(1, n))
    a, b = stored("A", sp.csr_matrix(np.ones((2, 1)))), stored("B", row)
    with pytest.raises(MemoryBoundError, match=r"row 0 of A expands to 3,000,000 products.*at least \d+MiB") as refusal:
        api.plan(a, b, memory_limit="32MiB")
    enough = str(refusal.value).rsplit(" ", 1)[1]
    assert api.plan(a, b, memory_limit=enough).projected_memory > 2**25


@pytest.mark.parametrize(("n", "limit", "held"), [(300, 3, ", workspace and B:"), (200_000, 19, " and workspace:")])
def test_a_refusal_names_the_least_that_is_held(stored, n, limit, held):
    """With B on the worker or read block by block, whichever takes less: what it names is what a limit is short of."""
    a = stored("A", random_matrix(n, n, 5, 1))
    with pytest.raises(MemoryBoundError, match=f"for buffers{held} raise") as refusal:
        api.plan(a, a, memory_limit=f"{limit}MiB")
    enough = str(refusal.value).rsplit(" ", 1)[1]
    held_bytes = parse_bytes(re.findall(r"after ([\d.]+ MiB) for", str(refusal.value))[0].replace(" ", ""))
    assert 0.9 * (limit << 20) < held_bytes < parse_bytes(enough)
    api.plan(a, a, memory_limit=enough)


def test_inner_split_where_one_row_needs_too_much_of_b(stored):
    n = 1_500_000
    columns = np.arange(n) // 500
    b = sp.csr_matrix((np.ones(n), (columns, np.arange(n) % 40_000)), shape=(3_000, 40_000))
    a = sp.csr_matrix(np.ones((3, 3_000)))
    plan = api.plan(stored("A", a), stored("B", b), memory_limit="24MiB")
    assert plan.inner_blocks > 1
    assert plan.projected_memory <= 0.9 * plan.memory_limit


@pytest.mark.parametrize("grid", [(0, 1, 1), (11, 1, 1), (1, 1, 99)])
def test_grid_that_cannot_be(stored, grid):
    a = stored("A", random_matrix(10, 10, 3, 9))
    with pytest.raises(InputError, match="grid"):
        api.plan(a, a, grid=grid)


def test_shapes_that_do_not_fit(stored):
    with pytest.raises(InputError, match="5 x 6 and B is 5 x 6"):
        api.plan(stored("A", random_matrix(5, 6, 2, 1)), stored("B", random_matrix(5, 6, 2, 1)))


def test_foreign_matrix_out_of_order_is_refused_before_work(stored, tmp_path):
    good = stored("A", random_matrix(300, 300, 5, 10))
    group = without_seal(tmp_path / "A.zarr")
    row = int(np.argmax(np.diff(good.read_indptr(0, 300)) > 1))
    at = int(good.read_indptr(row, row)[0])
    values = group["indices"][:]
    values[at], values[at + 1] = values[at + 1], values[at]
    group["indices"][:] = values
    with pytest.raises(MatrixError, match=f"row {row} is not sorted"):
        api.plan(tmp_path / "A.zarr", tmp_path / "A.zarr")


def test_renumber():
    a, needed = renumber(from_scipy(sp.csr_matrix(np.array([[0, 5, 0, 7], [0, 0, 0, 1]]))))
    assert needed.tolist() == [1, 3]
    assert a.indices.tolist() == [0, 1, 1]
    wide = sp.csr_matrix((np.ones(2), np.array([3, 10**9 - 1]), np.array([0, 2])), shape=(1, 10**9))
    a, needed = renumber(from_scipy(wide))
    assert needed.tolist() == [3, 10**9 - 1]
    assert a.indices.tolist() == [0, 1]


def test_one_block_in_flight_where_b_is_read_again_and_again(stored):
    """Rows of B lie scattered over all its Zarr chunks: blocks are twice as large, and B is read half as often."""
    m = random_matrix(400_000, 400_000, 6, 7)
    a = stored("A", m)
    plan = api.plan(a, a, memory_limit="32MiB")
    assert plan.blocks_in_flight == 1
    assert [block.start for block in plan.blocks] == [0, *(block.stop for block in plan.blocks[:-1])]
    assert plan.blocks[-1].stop == 400_000
    assert plan.projected_memory <= 0.9 * plan.memory_limit
    assert plan.expansion == products_of(m, m).sum()
    every_chunk = a.indices.nchunks * a.indices.chunk * 12
    assert all(block.b_read == every_chunk for block in plan.blocks[:-1])


def test_a_gpu_does_not_wait_for_all_of_b_where_blocks_need_neighbours(stored):
    """Blocks that together read B about once, and no other product or engine, read their own rows of it."""
    tuning = PlannerTuning(blocks=BlockTuning(gpu_products=1 << 22), residency=ResidencyTuning(small_share=0))
    n = 1_000_000
    banded = stored("band", sp.diags_array([np.ones(n)] * 5, offsets=range(-2, 3), shape=(n, n)).tocsr())
    anywhere = stored("any", random_matrix(n, n, 5.0, 1))
    limits = {"memory_limit": 1 << 30, "host_limit": 1 << 30}
    plans = {m: make_plan(PlanRequest(m, m, "cuda", **limits), tuning=tuning) for m in (banded, anywhere)}
    assert (plans[banded].resident, plans[anywhere].resident) == (False, True)
    assert all(len(plan.blocks) > 4 and plan.projected_host_memory <= 1 << 30 for plan in plans.values())
    assert sum(block.b_bytes for block in plans[banded].blocks) < 1.5 * plans[banded].b.nbytes
    assert make_plan(PlanRequest(banded, banded, "numba", 1 << 30), tuning=tuning).resident


def test_neighbours_that_read_much_of_each_others_rows_are_joined(tmp_path):
    """Blocks of a GPU: as few as it takes for no more than half of B to be read again; where three do not do, none."""
    whole = spdist.generate("poisson", tmp_path / "whole.zarr", dims=(60, 30, 30), points=27)
    writer = MatrixWriter(tmp_path / "A.zarr", whole.ncols, whole.dtype, {})
    writer.layout = replace(writer.layout, chunk=1 << 11)
    writer.append(whole.rows(0, whole.nrows))
    a = writer.close()
    request, found = PlanRequest(a, a, "cuda", 1 << 30, 1 << 30), {}
    for mebibytes in (16, 8, 4, 2):
        blocks, residency = BlockTuning(gpu_bytes=mebibytes << 20), ResidencyTuning(small_share=0)
        plan = make_plan(request, tuning=PlannerTuning(blocks=blocks, residency=residency))
        found[mebibytes] = len(plan.blocks), sum(block.b_read for block in plan.blocks) / plan.b.nbytes
        assert not plan.resident
        assert [0, *(block.stop for block in plan.blocks)] == [*(block.start for block in plan.blocks), a.nrows]
        assert plan.projected_host_memory <= 1 << 30
    assert found[8][0] >= 2 * found[16][0]  # by themselves
    assert 0.8 * found[8][0] < found[4][0] <= found[8][0]  # two and two
    assert all(1.1 < found[mebibytes][1] <= 1.5 for mebibytes in (16, 8, 4))
    assert found[2][0] == 1  # three and three would read too much: not cut by bytes


def test_blocks_that_a_gpu_only_reduces_grow_fewer_towards_the_end(stored):
    """The last ones are as small as those that are written; cores get no larger ones."""
    least, most = 1 << 12, 1 << 15
    tuning = PlannerTuning(blocks=BlockTuning(gpu_products=least, gpu_reduced_products=most, small_nnz=0))
    a = stored("A", random_matrix(40_000, 40_000, 8.0, 1))
    where = {"memory_limit": 1 << 30, "host_limit": 1 << 30}

    def products(writes_c: bool, engine: str) -> np.ndarray:
        plan = make_plan(PlanRequest(a, a, engine, writes_c=writes_c, **where), tuning=tuning)
        assert [0, *(block.stop for block in plan.blocks)] == [*(block.start for block in plan.blocks), a.nrows]
        assert plan.expansion == sum(block.products for block in plan.blocks)
        return np.array([block.products for block in plan.blocks])

    reduced, written = products(False, "cuda"), products(True, "cuda")
    left = np.cumsum(reduced[::-1])[::-1]
    bound = np.clip(left // tuning.blocks.taper, least, most)
    assert np.all(reduced <= bound)
    assert np.all(reduced[:-1] >= bound[:-1] - 2 * least)
    assert reduced[0] > most - 2 * least
    assert 0.8 * least < reduced[-2] <= least
    assert written.max() <= least
    assert products(False, "hybrid").max() <= least
    none = stored("none", sp.csr_matrix((0, 40_000)))
    assert make_plan(PlanRequest(none, a, "cuda", writes_c=False, **where), tuning=tuning).blocks == ()


def test_chunks_of_c_are_long_where_gpus_write_many(stored):
    a = stored("A", random_matrix(300, 300, 5, 8))
    many = PlannerTuning(chunks=ChunkTuning(many=0))

    def chunk(engine: str, tuning: PlannerTuning, host_limit: int | None = None) -> int:
        return make_plan(PlanRequest(a, a, engine, 1 << 30, host_limit), tuning=tuning).chunk

    assert {chunk(engine, PlannerTuning()) for engine in ("numba", "cuda")} == {1 << 17}
    assert [chunk(engine, many) for engine in ("numba", "cuda")] == [1 << 17, 1 << 19]
    assert chunk("cuda", many, 64 << 20) <= 1 << 17


def test_zarr_chunks_for_object_stores_are_long_if_the_memory_bears_their_requests(stored):
    a = stored("A", random_matrix(300, 300, 5, 8))
    many = PlannerTuning(chunks=ChunkTuning(many=0))

    def plan(limit: str, to_objects: bool, tuning: PlannerTuning = many) -> Plan:
        return make_plan(PlanRequest(a, a, "numba", parse_bytes(limit), to_objects=to_objects), tuning=tuning)

    assert plan("1GiB", True, PlannerTuning()).chunk == 1 << 17
    assert [plan("1GiB", to_objects).chunk for to_objects in (False, True)] == [1 << 17, 1 << 19]
    local, remote = (plan("256MiB", to_objects) for to_objects in (False, True))
    assert remote.chunk == local.chunk
    assert remote.projected_memory - local.projected_memory == most_moving(8 * remote.chunk)


@pytest.mark.parametrize("engine", ["numba", "cuda"])
@pytest.mark.parametrize("n", [300, 30_000])
@pytest.mark.parametrize("grid", [None, (3, 1, 1)])
def test_offsets_that_were_altered_are_refused(stored, engine, n, grid):
    """Also after a matrix was found sound: else the scan would read where nothing is."""
    good, bad = stored("good", sp.eye_array(n, format="csr")), stored("bad", random_matrix(n, n, 9.0, 1))
    for offset in (10**8, 0):
        without_seal(bad.url)["indptr"][n // 2] = offset
        known = replace(open_matrix(bad.url), known="sound before")
        for a, b in ((good, known), (known, good)):
            with pytest.raises(MatrixError, match=r"bad\.zarr.*indptr"):
                api.plan(a, b, engine=engine, memory_limit="1GiB", grid=grid)


def test_a_reduction_on_gpus_has_blocks_by_products_alone(stored, monkeypatch):
    """C is not on the host: no sample of it is multiplied, and its bytes bound nothing."""
    a = stored("A", random_matrix(30_000, 30_000, 40, 1))
    options = {"memory_limit": 1 << 30, "host_limit": 160 << 20, "writes_c": False}
    request = PlanRequest(a, a, "cuda", **options)
    by_cores = make_plan(PlanRequest(a, a, "hybrid", **options))

    def refuse(*_: object) -> None:
        raise AssertionError("a sample")

    monkeypatch.setattr(planner, "sample_rows", refuse)
    plan = make_plan(request)
    assert plan.expansion == by_cores.expansion
    assert 1 == len(plan.blocks) < len(by_cores.blocks)
    blocks = make_plan(request, tuning=PlannerTuning(blocks=BlockTuning(gpu_products=plan.expansion // 5))).blocks
    assert 5 <= len(blocks) <= 6
    assert max(block.products for block in blocks) <= plan.expansion // 5


def test_partial_products_of_a_reduction_have_room_on_the_host(stored):
    """Where a row of A asks for more of B than fits, they come to the host, and are added there."""
    n, each = 3_000, 1_000
    columns = np.random.default_rng(1).integers(0, 2_000, (n, each)) + 2_000 * np.arange(each)
    a = stored("A", sp.csr_matrix(np.ones((1, n))))
    b = stored("B", sp.csr_matrix((np.ones(n * each), columns.ravel(), np.arange(n + 1) * each), (n, 2_000_000)))
    request = PlanRequest(a, b, "cuda", 1 << 30, 40 << 20, writes_c=False)
    with pytest.raises(MemoryBoundError, match="raise host_limit to at least"):
        make_plan(request)
    whole = make_plan(replace(request, host_limit=120 << 20)).blocks[0]
    assert (whole.split, whole.c_bytes) == (False, 8)
