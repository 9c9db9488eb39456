"""Plans made with the help of other threads and processes: the same plans, the same errors."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import spdist
from spdist.api import products as api
from spdist.errors import CorruptError, MatrixError, SpdistError
from spdist.kernels.product_spec import ProductSpec
from spdist.scheduler.clusters.security import security_for
from spdist.scheduler.planner import row_scan
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.planner import make_plan
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.tuning import (
    BlockTuning,
    PlannerTuning,
    ResidencyTuning,
    SampleTuning,
    ScanTuning,
)
from spdist.storage.matrix import open_matrix
from spdist.storage.product_spec import Diagonal, StoredProductSpec
from tests.conftest import random_matrix
from tests.support.cpus import pretend_cpus
from tests.support.seals import without_seal


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
    with spdist.workers(count) as address, Client(address, security=security_for(address, None)) as client:
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
    inside = api.save("memory://scanned.zarr", m)
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
    group = without_seal(foreign.url)
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
        with pytest.raises(CorruptError, match=r"bad.zarr: Zarr chunk 11 of array 'indices'"):
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
    pretend_cpus(monkeypatch, 4)
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
