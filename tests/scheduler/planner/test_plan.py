"""Plans on numbers alone: rows covered once, bytes within the bound, the same text each time."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import spdist
from spdist import api
from spdist.errors import CorruptError, InputError, MatrixError, MemoryBoundError, SpdistError
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import from_scipy
from spdist.scheduler.execution.operands import renumber
from spdist.scheduler.planner import planner, row_scan
from spdist.scheduler.planner.plan import Plan, even_bounds
from spdist.scheduler.planner.planner import make_plan
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.row_scan import read_ranges
from spdist.scheduler.planner.sampling import candidate_runs, sample_rows, spread_evenly
from spdist.scheduler.planner.stored_rows import even_rows, row_lengths
from spdist.scheduler.planner.tuning import (
    BlockTuning,
    ChunkTuning,
    PlannerTuning,
    ResidencyTuning,
    SampleTuning,
    ScanTuning,
)
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import open_matrix
from spdist.storage.product_spec import Diagonal, StoredProductSpec
from spdist.storage.writer import MatrixWriter
from spdist.units import parse_bytes
from tests.conftest import random_matrix


def products_of(a: sp.csr_matrix, b: sp.csr_matrix) -> np.ndarray:
    lengths = np.diff(b.indptr)
    return np.array([lengths[a.indices[i:j]].sum() for i, j in zip(a.indptr[:-1], a.indptr[1:], strict=True)])


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.data())
def test_even_bounds_cover_everything_once(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    bounds = even_bounds(np.array(weights), parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert len(bounds) == parts + 1
    assert all(low < high for low, high in itertools.pairwise(bounds))


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


def test_plan_is_a_value(stored):
    a = stored("A", random_matrix(5_000, 5_000, 10, 5))
    first, second = (api.plan(a, a, memory_limit="32MiB") for _ in range(2))
    assert first == second
    assert Plan.from_json(first.to_json()) == first
    assert first.to_json() == second.to_json()


def test_small_and_large_products_agree_on_the_scan(stored):
    """The one-block shortcut gives the numbers that the compiled scan gives."""
    a = stored("A", random_matrix(900, 900, 6, 6))
    request = PlanRequest(a, a, "numba", 1 << 31)
    short, scanned = make_plan(request), make_plan(request, tuning=PlannerTuning(blocks=BlockTuning(small_nnz=0)))
    assert (short.expansion, len(short.blocks)) == (scanned.expansion, 1)
    assert abs(short.c.nnz - scanned.c.nnz) <= 900


def test_parts_that_are_scanned_side_by_side(stored, monkeypatch):
    """Blocks end where parts end; all else is as in one scan."""
    a, b = stored("A", random_matrix(20_000, 3_000, 20, 1)), stored("B", random_matrix(3_000, 40_000, 20, 2))
    request, parts = PlanRequest(a, b, "numba", 64 << 20), PlannerTuning(scan=ScanTuning(part_entries=1 << 17))
    whole, plan = make_plan(request), make_plan(request, tuning=parts)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert make_plan(request, tuning=parts) == plan
    starts = [block.start for block in plan.blocks]
    assert starts == [0, *(block.stop for block in plan.blocks[:-1])]
    assert plan.blocks[-1].stop == 20_000
    bounds = even_rows(a, a.nnz >> 17)
    assert len(bounds) == 4
    assert {*bounds} - {20_000} <= {*starts} != {block.start for block in whole.blocks}
    assert plan.expansion == whole.expansion
    assert plan.projected_memory <= 0.9 * plan.memory_limit


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parts", [1, 2, 7, 32])
def test_parts_have_as_many_entries(stored, monkeypatch, seed, parts):
    """But for one row, the longest at the most; where rows are longer than a part, there are fewer of them."""
    monkeypatch.setattr("spdist.storage.writer.chunk_of", lambda dtype: 50)
    m = random_matrix(400, 300, 5, seed)
    m = sp.vstack([m, np.ones((seed % 3, 300)), m[:: -(seed % 2) or 1]], format="csr")
    a = stored("A", m)
    bounds = even_rows(a, parts)
    assert bounds == even_rows(a, parts, row_lengths(a))
    entries = np.diff(m.indptr[bounds])
    assert (bounds[0], bounds[-1]) == (0, m.shape[0])
    assert len(bounds) <= parts + 1
    assert min(np.diff(bounds)) > 0
    assert entries.max() <= m.nnz / parts + np.diff(m.indptr).max() + 1
    assert parts > 7 or len(bounds) == parts + 1


def test_rows_of_the_sample_are_not_read_far_ahead():
    """Rows may be long: those that wait to be looked at are in memory."""
    reads: list[int] = []

    def read(first: int, last: int) -> np.ndarray:
        reads.append(first)
        return np.zeros(last - first, np.int32)

    a = SimpleNamespace(
        nrows=10_000, ncols=9, nnz=1 << 40, ours=True, url="", read_indices=read,
        offsets_of=lambda rows: (rows, rows + 1),
    )  # fmt: skip
    found = candidate_runs(a)
    assert next(found)[0] == 0
    time.sleep(0.2)
    assert len(reads) <= SampleTuning().threads
    assert sum(block.nrows for _, block in found) == 255 * 8


@pytest.mark.parametrize("piece", [1, 700, 1 << 22])
@pytest.mark.parametrize("chunk", [128, 1000])
def test_each_zarr_chunk_is_decoded_once_by_a_scan(tmp_path, monkeypatch, chunk, piece):
    """Whatever is read at once: the columns are those of the rows, and read ahead into memory that is used again."""
    m = random_matrix(3_000, 500, 7, 1)
    monkeypatch.setattr("spdist.storage.writer.chunk_of", lambda dtype: chunk)
    api.save(tmp_path / "A.zarr", m)
    a = open_matrix(tmp_path / "A.zarr")
    decoded: list[int] = []
    decode = ChunkedArray._decode

    def note(self, k0, k1, out=None):
        decoded.extend(range(k0, k1) if self.name == "indices" else [])
        return decode(self, k0, k1, out)

    monkeypatch.setattr(ChunkedArray, "_decode", note)
    tuning = ScanTuning(read_entries=piece)
    for first, last in ((0, 3_000), (700, 2_222)):
        decoded.clear()
        found = [(start, stop, columns.copy()) for start, stop, _, columns in read_ranges(a, first, last, tuning)]
        assert [start for start, _, _ in found] == [first, *(stop for _, stop, _ in found)][:-1]
        low, high = m.indptr[first], m.indptr[last]
        np.testing.assert_array_equal(np.concatenate([columns for _, _, columns in found]), m.indices[low:high])
        assert sorted(decoded) == list(range(low // chunk, -(-high // chunk)))


class Counting(Executor):
    """Hands on what it is given, in the words of another function if there is one, and counts."""

    def __init__(self, executor: Executor | None = None, through: Callable[..., object] | None = None) -> None:
        self.executor, self.through, self.count = executor, through, 0

    def submit(self, fn, /, *args, **kwargs) -> Future:
        assert self.executor is not None, "nothing may be asked of others"
        self.count += 1
        return self.executor.submit(*([fn] if self.through is None else [self.through, fn]), *args, **kwargs)


@contextmanager
def cluster(count: int):
    """Give an executor of Dask workers that are processes."""
    with spdist.workers(count) as address, Client(address) as client:
        yield client.get_executor(pure=False)


@pytest.fixture
def small_parts(monkeypatch):
    """Return a tuning by which parts of 2,000 entries are scanned, and readers read all that they can."""
    monkeypatch.setattr("spdist.storage.writer.chunk_of", lambda dtype: 1_000)
    return PlannerTuning(
        scan=ScanTuning(part_entries=2_000),
        sample=SampleTuning(read_whole_entries=9_000),
        blocks=BlockTuning(small_nnz=0),
        residency=ResidencyTuning(small_share=0),
    )


def outcome(request: PlanRequest, readers: RemoteReaders | None, tuning: PlannerTuning) -> Plan | str:
    """Return a plan, or why there is none."""
    try:
        return make_plan(request, readers, tuning)
    except SpdistError as error:
        return repr(error)


def problems(stored):
    """Yield requests at random: masks, triangles, cuts, engines, limits and grids."""
    for seed in range(24):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1_500, 5_000))
        a, b, mask = (
            stored(f"{seed}{name}", random_matrix(n, n, per, seed)) for name, per in zip("ABM", (9, 11, 5), strict=True)
        )
        options: dict[str, object] = {"engine": ["numba", "scipy", "cuda"][seed % 3] if seed < 6 else "numba"}
        options["memory_limit"] = int(rng.choice([1, 2, 4, 1024])) << 20
        if options["engine"] == "cuda":
            options["host_limit"] = 1 << 30
        if seed % 7 == 6:
            options["grid"] = (5, 1, 1)
        if seed >= 6:
            cut = [{}, {"triangle": "upper"}, {"top_n": int(rng.integers(1, 50))}][int(rng.integers(3))]
            masks = [None, mask, Diagonal((n, n))]
            chosen = masks[int(rng.integers(3))]
            options["spec"] = StoredProductSpec(
                ProductSpec(**cut), chosen, bool(chosen is not None and rng.integers(2))
            )
        yield PlanRequest(a, a if rng.integers(2) else b, **options)


@pytest.mark.parametrize("kind", ["threads", "processes", "dask"])
def test_readers_make_the_plan_that_threads_make(stored, small_parts, kind):
    context = multiprocessing.get_context("spawn")
    made = {
        "threads": lambda: ThreadPoolExecutor(3),
        "processes": lambda: ProcessPoolExecutor(2, mp_context=context),
        "dask": lambda: cluster(2),
    }
    found = []
    with made[kind]() as executor:
        counting = Counting(executor)
        readers = RemoteReaders(counting, processes=2 if kind == "dask" else 3, threads=2)
        for request in itertools.islice(problems(stored), 24 if kind == "threads" else 8):
            before = counting.count
            alone = outcome(request, None, small_parts)
            assert outcome(request, readers, small_parts) == alone
            assert (counting.count > before) == (request.grid is None)
            found.append(alone)
    assert 0 < sum(isinstance(plan, str) for plan in found) < len(found) / 2  # refused, by the same text
    assert {plan.resident for plan in found if isinstance(plan, Plan)} == {True, False}


def test_readers_read_large_matrices_that_they_see(stored, small_parts):
    m = random_matrix(3_000, 3_000, 9, 1)
    inside = api.save("memory://walked.zarr", m)
    small = stored("small", random_matrix(300, 300, 9, 1))
    for a in (inside, small):
        request = PlanRequest(a, a, "numba", 1 << 30)
        plans = [make_plan(request, readers, small_parts) for readers in (None, RemoteReaders(Counting(), 2, 1))]
        assert plans[0] == plans[1]


@pytest.mark.parametrize("spread", [False, True])
def test_of_several_errors_the_first_in_row_order_is_raised(stored, tmp_path, small_parts, spread):
    """Also if another reader finds a later one sooner; rows out of order, and a Zarr chunk that was altered."""
    tuning = replace(small_parts, sample=replace(small_parts.sample, runs=1))  # of the first rows
    m = random_matrix(3_000, 3_000, 9, 1)
    good, bad, foreign = (stored(name, m) for name in ("good", "bad", "foreign"))
    group = zarr.open_group(foreign.url, mode="r+")
    group.attrs["spdist"] = dict(group.attrs["spdist"]) | {"canonical": False}
    rows = np.flatnonzero(np.diff(m.indptr) > 1)
    wrong = [int(rows[np.searchsorted(rows, row)]) for row in (900, 1_500, 2_100, 2_990)]
    columns = group["indices"][:]
    for row in wrong:
        columns[m.indptr[row] : m.indptr[row] + 2] = columns[m.indptr[row] : m.indptr[row] + 2][::-1]
    group["indices"][:] = columns
    for chunk in (11, 17, 24):
        path = Path(bad.url) / "indices" / "c" / str(chunk)
        path.write_bytes(path.read_bytes()[:-9])
    with ThreadPoolExecutor(4) as executor:
        readers = RemoteReaders(executor, 3, 1) if spread else None
        with pytest.raises(MatrixError, match=rf"foreign.zarr: row {wrong[0]} is not sorted"):
            make_plan(PlanRequest(open_matrix(foreign.url), good, "numba", 1 << 30), readers, tuning)
        with pytest.raises(CorruptError, match=r"bad.zarr: chunk 11 of array 'indices'"):
            make_plan(PlanRequest(bad, good, "numba", 1 << 30), readers, tuning)


def killed_once(marker: str, function: Callable[..., object], *args: object) -> object:
    """Do something in a process that dies the first time, with half of the work done."""
    if function.func is row_scan.scan_parts:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return function(*args)
        function(args[0][:1], *args[1:])
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args)


def test_a_reader_that_is_killed_costs_no_more_than_time(stored, tmp_path, small_parts):
    a = stored("A", random_matrix(4_000, 4_000, 9, 1))
    request = PlanRequest(a, a, "numba", 1 << 30)
    with cluster(2) as executor:
        counting = Counting(executor, functools.partial(killed_once, str(tmp_path / "killed")))
        plan = make_plan(request, RemoteReaders(counting, 2, 1), small_parts)
    assert (tmp_path / "killed").exists()
    assert plan == make_plan(request, tuning=small_parts)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("rows_held", "most"), [(0, 1), (3, 3), (99, 4)])
def test_scans_of_a_process_keep_their_bound(stored, monkeypatch, small_parts, spread, rows_held, most):
    """Of 4 bytes a row of B for each scan that is under way; one thread always scans."""
    a = stored("A", random_matrix(4_000, 4_000, 9, 1))
    tuning = replace(small_parts, scan=replace(small_parts.scan, stamp_bytes=4 * 4_000 * rows_held))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    scan_rows, lock, under_way, seen = row_scan.scan_rows, threading.Lock(), [0], []

    def noted(*args, **kwargs):
        with lock:
            under_way[0] += 1
            seen.append(under_way[0])
        time.sleep(0.02)
        try:
            return scan_rows(*args, **kwargs)
        finally:
            with lock:
                under_way[0] -= 1

    monkeypatch.setattr(row_scan, "scan_rows", noted)
    with ThreadPoolExecutor(1) as executor:  # a process, and the threads it may have
        readers = RemoteReaders(executor, 1, 4) if spread else None
        make_plan(PlanRequest(a, a, "numba", 1 << 30), readers, tuning)
    assert max(seen) == most


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_few_rows_or_none_are_planned(stored, rows):
    plan = api.plan(stored("A", sp.csr_matrix((rows, 5))), stored("B", random_matrix(5, 4, 2, 1)))
    assert (plan.c.shape, plan.c.nnz, plan.expansion) == ((rows, 4), 0, 0)


@pytest.mark.parametrize(("at", "value"), [(0, 1), (-1, 90)])
def test_offsets_that_leave_entries_out_are_refused(stored, tmp_path, at, value):
    """Of an A that another program wrote, too: its product would lack them."""
    m = sp.csr_matrix((np.ones(100), np.arange(100) % 30, np.arange(0, 101, 5)), (20, 30))
    stored("F", m)
    foreign = zarr.open_group(tmp_path / "F.zarr")
    foreign.attrs.put({key: found for key, found in foreign.attrs.items() if key != "spdist"})
    foreign["indptr"][at if at >= 0 else 20] = value
    with pytest.raises(MatrixError, match=r"F.zarr: indptr does not rise from 0 to the 100 entries there are"):
        api.plan(tmp_path / "F.zarr", stored("B", random_matrix(30, 4, 2, 1)))


@pytest.mark.parametrize("wrong", [-3, 307])
def test_a_column_out_of_range_is_found_in_the_sample_too(stored, tmp_path, wrong):
    """And the matrix is named that has it."""
    m = random_matrix(300, 300, 8, 1)
    a = stored("A", m)
    stored("F", m)
    foreign = zarr.open_group(tmp_path / "F.zarr")
    foreign.attrs.put({key: value for key, value in foreign.attrs.items() if key != "spdist"})
    foreign["indices"][int(m.indptr[150])] = wrong
    for grid, runs in ((None, 256), ((5, 1, 1), 1)):  # one run is of the first rows
        request = PlanRequest(open_matrix(tmp_path / "F.zarr"), a, "numba", 1 << 31, grid=grid)
        with pytest.raises(MatrixError, match=rf"F.zarr: column {wrong} in row 150 is outside \[0, 300\)"):
            make_plan(request, tuning=PlannerTuning(sample=SampleTuning(runs=runs)))


def test_estimate_is_near_the_truth(stored):
    for seed, make in enumerate((lambda: random_matrix(30_000, 30_000, 8, 7), lambda: grid_stencil(40))):
        m = make()
        a = stored(f"A{seed}", m)
        ones = sp.csr_matrix((np.ones(m.nnz), m.indices, m.indptr), m.shape)
        plan = api.plan(a, a)
        assert plan.c.nnz == pytest.approx((ones @ ones).nnz, rel=0.15)


def grid_stencil(n: int) -> sp.csr_matrix:
    one = sp.diags([1.0, 1.0, 1.0], [-1, 0, 1], shape=(n, n))
    return sp.csr_matrix(sp.kron(sp.kron(one, one), one))


def test_sample_is_deterministic_and_spread(stored):
    a = stored("A", random_matrix(9_000, 9_000, 9, 8))
    lengths = row_lengths(a)
    assert np.array_equal(sample_rows(a, a, lengths).ratio, sample_rows(a, a, lengths).ratio)
    assert sorted(spread_evenly(100)) == list(range(100))
    assert max(np.diff(sorted(spread_evenly(64)[:8]))) == 8


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
    plan = api.plan(stored("A", a), stored("B", b), memory_limit="36MiB")
    assert plan.resident or plan.inner_blocks > 1
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
    import zarr

    good = stored("A", random_matrix(300, 300, 5, 10))
    group = zarr.open_group(tmp_path / "A.zarr", mode="r+")
    facts = dict(group.attrs["spdist"]) | {"canonical": False}
    group.attrs["spdist"] = facts
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


@pytest.mark.parametrize("engine", ["numba", "cuda"])
@pytest.mark.parametrize("n", [300, 30_000])
@pytest.mark.parametrize("grid", [None, (3, 1, 1)])
def test_offsets_that_were_altered_are_refused(stored, engine, n, grid):
    """Also in what spdist wrote, whose checksums are right: else the walk would read where nothing is."""
    good, bad = stored("good", sp.eye_array(n, format="csr")), stored("bad", random_matrix(n, n, 9.0, 1))
    for offset in (10**8, 0):
        zarr.open_group(bad.url, mode="r+")["indptr"][n // 2] = offset
        for a, b in ((good, bad), (bad, good)):
            with pytest.raises(MatrixError, match=r"bad\.zarr.*indptr"):
                api.plan(a, b, engine=engine, memory_limit="1GiB", grid=grid)


def test_plan_of_an_older_version_is_read(stored):
    a = stored("A", random_matrix(300, 300, 5, 8))
    raw = json.loads(api.plan(a, a).to_json())
    for block in raw["blocks"]:
        del block["b_read"]
    assert [block.b_read for block in Plan.from_json(json.dumps(raw)).blocks] == [0]


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
