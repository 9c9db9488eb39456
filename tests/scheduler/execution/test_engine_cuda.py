"""The engines of GPUs: what is refused where there is none, and products of stored matrices where there is one."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import signal
import sys
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

import spdist
from spdist import Epilogue, Semiring
from spdist.api import products as api
from spdist.errors import InputError, MemoryBoundError
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.kernels.streaming.engine import GpuMultiplier
from spdist.matrices.bsr import BSR, from_rows, from_scipy
from spdist.matrices.csr import from_scipy as csr_from_scipy
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.worker import WorkerContext
from spdist.scheduler.executors.clients import cluster, local_cluster
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.plan import Plan
from tests.conftest import assert_is_product, has_gpu, random_matrix
from tests.kernels.bsr.test_multiply_cpu import assert_is_block_product, block_matrix
from tests.scheduler.execution.test_driver import read, workers_alive
from tests.support.host_device import HostDevice
from tests.support.planning import in_grid


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_no_gpu_is_said_before_anything_is_written(stored, tmp_path, limit):
    a = stored("A", random_matrix(50, 50, 3, 1))
    with pytest.raises(InputError, match="needs a CUDA device and CuPy"):
        api.multiply(a, a, tmp_path / "C.zarr", engine="cuda", memory_limit=limit)
    assert not (tmp_path / "C.zarr").exists()


def test_other_values_are_refused(stored, tmp_path):
    a = stored("A", random_matrix(50, 50, 3, 1, "int32").astype("int16"))
    for run in (api.plan, functools.partial(api.multiply, c=tmp_path / "C.zarr")):
        with pytest.raises(InputError, match=r"whole numbers of 32 or 64 bits, not int16: choose engine='auto'"):
            run(a, a, engine="cuda", memory_limit="1GiB")


def test_host_limit_is_for_gpus(stored, tmp_path):
    a = stored("A", random_matrix(50, 50, 3, 1))
    with pytest.raises(InputError, match="host_limit=1GiB is for GPUs"):
        api.multiply(a, a, tmp_path / "C.zarr", host_limit="1GiB")


def test_a_plan_needs_no_gpu(stored):
    a = stored("A", random_matrix(2000, 2000, 5, 2))
    plan = api.plan(a, a, engine="cuda", memory_limit="1GiB", host_limit="64MiB")
    assert plan.memory_limit == 1 << 30
    assert 0 < plan.projected_memory <= plan.memory_limit
    assert 0 < plan.projected_host_memory <= 64 << 20
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(MemoryBoundError, match=r"host_limit=1.00 MiB leaves .*: raise host_limit to at least"):
        api.plan(a, a, engine="cuda", memory_limit="1GiB", host_limit="1MiB")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_plan_for_gpus_elsewhere_says_what_to_give(stored):
    a = stored("A", random_matrix(50, 50, 3, 1))
    with pytest.raises(InputError, match="say what each may take with memory_limit"):
        api.plan(a, a, engine="cuda")


def test_workers_are_as_many_as_gpus_have_blocks(monkeypatch):
    monkeypatch.setattr(worker_process, "count_gpus", lambda: 4)
    started = []
    monkeypatch.setattr(local_cluster, "cuda_cluster", lambda count, threads: started.append(count) or 1 / 0)
    for blocks, workers in ((3, None), (9, None), (2, 4)):
        with (
            pytest.raises(ZeroDivisionError),
            cluster.connect(workers=workers, scheduler=None, processes=True, blocks=blocks, engine="cuda"),
        ):
            pass
    assert started == [3, 4, 4]
    with (
        pytest.raises(InputError, match="workers=5, but each needs a GPU of its own and there are 4"),
        cluster.connect(workers=5, scheduler=None, processes=True, blocks=9, engine="cuda"),
    ):
        pass


def test_workers_without_a_gpu_are_refused(stored, tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr("spdist.scheduler.executors.clients.members.gpu_name", lambda: None)
    a = stored("A", random_matrix(50, 50, 3, 3))
    with pytest.raises(InputError, match="2 workers of the scheduler see no GPU"):
        api.multiply(a, a, tmp_path / "C.zarr", engine="cuda", memory_limit="1GiB", scheduler=scheduler)


def test_every_stage_of_every_block_is_on_record(stored, tmp_path):
    m = random_matrix(600, 600, 5, 4)
    a = stored("A", m)
    file = tmp_path / "run.jsonl"
    report = api.multiply(a, a, tmp_path / "C.zarr", grid=(7, 1, 1), workers=1, record=file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for stage in ("preprocess", "multiply", "commit"):
        rows = sorted(line["row"] for line in lines if line["stage"] == stage)
        assert len(set(rows)) == report.stages[stage]["tasks"] == 7
        assert rows[0] == 0
        total = sum(line["seconds"] for line in lines if line["stage"] == stage)
        assert total == pytest.approx(report.stages[stage]["seconds"])
    assert all(line["worker"] for line in lines if line["row"] >= 0)


@pytest.mark.parametrize("name", ["nowhere/run.jsonl", ".", "C.zarr"])
def test_a_record_that_cannot_be_written_is_refused_first(stored, tmp_path, name):
    a = stored("A", random_matrix(50, 50, 3, 4))
    with pytest.raises(InputError, match=r"choose (another name|a place outside)"):
        api.multiply(a, a, tmp_path / "C.zarr", record=tmp_path / name)
    assert not (tmp_path / "C.zarr").exists()


@pytest.fixture
def host_gpu(monkeypatch):
    """Let a worker in this process multiply through a device whose memory is the host's."""
    monkeypatch.setattr(worker_process, "count_gpus", lambda: 1)
    monkeypatch.setattr("spdist.kernels.streaming.gpu_device.Gpu", HostDevice)
    monkeypatch.setattr("spdist.kernels.rowwise_gpu.multiply.compile_kernels", lambda dtype, ncols, semiring: None)


@pytest.mark.parametrize("grid", [None, (7, 1, 1), (3, 2, 2)])
def test_through_a_device_block_by_block(host_gpu, tmp_path, grid):
    m = random_matrix(3000, 3000, 6.0, 4)
    a, c = "memory://cuda/a.zarr", "memory://cuda/c.zarr"
    api.save(a, m, overwrite=True)
    file = tmp_path / "run.jsonl"
    options = {"engine": "cuda", "memory_limit": "1MiB", "check": True, "overwrite": True, "record": file}
    report = api.multiply(a, a, c, grid=grid, **options)
    assert report.verification["ok"]
    assert 0 < report.peak_memory <= 1 << 20
    assert_is_product(read(c), m, m, 1e-12)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for name in ("gpu prepare", "gpu upload", "gpu multiply", "gpu download"):
        rows = [line["row"] for line in lines if line["stage"] == name]
        assert len(rows) == report.stages[name]["tasks"]
        assert min(rows) == 0
        assert grid is None or max(rows) >= 3000 * (grid[0] - 1) // grid[0] - 100


WANTED = {
    "top": {"top_n": 3, "threshold": 0.5},
    "min_plus": {"semiring": "min_plus"},
    "plus_pair": {"semiring": "plus_pair", "top_n": 2},
    "own": {"semiring": Semiring(lambda x, y: x if x > y else y, lambda x, y: x - y, -math.inf,
                                 cuda=("y > x ? y : x", "x - y"))},
    "inside": {"semiring": "plus_pair", "mask": True},
    "outside": {"mask": True, "complement": True, "top_n": 4},
    "epilogue": {"epilogue": Epilogue(rows=np.arange(900) % 7 - 3.0, normalize="l1", drop_zeros=True)},
}  # fmt: skip


def as_mask(wanted, m):
    """Return the mask, if there is to be one."""
    return {"mask": m} if "mask" in wanted else {}


@pytest.mark.parametrize("grid", [None, (5, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("name", list(WANTED))
def test_answers_through_a_device(host_gpu, name, grid):
    m, wanted = random_matrix(900, 900, 6.0, 4), WANTED[name]
    a, c = "memory://cuda/a.zarr", "memory://cuda/c.zarr"
    api.save(a, m, overwrite=True)
    options = {"engine": "cuda", "memory_limit": "1MiB", **wanted}
    whole = grid is None  # once is enough: C is compared as well
    report = api.multiply(a, a, c, grid=grid, check=whole, overwrite=True, **options | as_mask(wanted, a))
    assert not whole or report.verification["ok"]
    found, expected = read(c), csr_from_scipy(spdist.spgemm(m, m, **wanted | as_mask(wanted, m)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.data, expected.data, rtol=1e-12)


@pytest.mark.parametrize("grid", [None, (5, 2, 1)])
@pytest.mark.parametrize("what", ["trace", "column_sums", "row_nnz", "frobenius", "histogram"])
def test_reductions_through_a_device(host_gpu, monkeypatch, what, grid):
    m = random_matrix(900, 900, 6.0, 4)
    a = "memory://cuda/a.zarr"
    api.save(a, m, overwrite=True)
    monkeypatch.setattr(planner, "make_plan", in_grid(grid))
    bins = [0, 0.5, 1] if what == "histogram" else None
    for wanted in ({}, WANTED["top"], WANTED["inside"]):
        found = spdist.reduce(a, a, what, bins=bins, engine="cuda", memory_limit="1MiB", **wanted | as_mask(wanted, a))
        expected = spdist.reduce(m, m, what, bins=bins, **wanted | as_mask(wanted, m))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert np.asarray(found).dtype == np.asarray(expected).dtype


@pytest.mark.parametrize("grid", [None, (3, 2, 2)])
def test_block_matrices_through_a_device(host_gpu, grid):
    a, b = block_matrix(700, 600, 6.0, (3, 2), 1), block_matrix(600, 500, 6.0, (2, 4), 2, "float32")
    url = "memory://cuda/{}.zarr".format
    for name, m in (("a", a), ("b", b)):
        api.save(url(name), m.to_scipy(), overwrite=True)
    options = {"engine": "cuda", "memory_limit": "1MiB", "check": True, "overwrite": True}
    report = api.multiply(url("a"), url("b"), url("c"), grid=grid, **options)
    assert report.verification["ok"]
    assert 0 < report.peak_memory <= 1 << 20
    assert report.stages["gpu multiply"]["tasks"] > 1
    c = spdist.open(url("c"))
    assert_is_block_product(from_rows(c.rows(0, c.nrows)), a, b)


def test_block_matrices_from_host_to_host(monkeypatch):
    runtime = SimpleNamespace(getDevice=lambda: 0)
    pool = SimpleNamespace(malloc=None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    devices = []
    monkeypatch.setattr(
        "spdist.kernels.streaming.gpu_device.Gpu", lambda limit, **_: devices.append(HostDevice(limit)) or devices[-1]
    )
    a = block_matrix(700, 700, 6.0, (3, 3), 1)
    for m in (a, a.to_scipy()):
        c = api.matmul(m, m, engine="cuda", memory_limit="1MiB")
        assert type(c) is type(m)
        assert_is_block_product(c if isinstance(c, BSR) else from_scipy(c), a, a)
    assert all(0 < device.most <= 1 << 20 for device in devices)


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_block_matrices_need_a_gpu_too():
    a = block_matrix(7, 7, 2.0, (3, 3), 1)
    with pytest.raises(InputError, match="needs a CUDA device and CuPy"):
        api.matmul(a, a, engine="cuda")


def test_rows_of_a_that_are_in_a_resident_b_are_not_sent(host_gpu):
    """But for the sample of the first block."""
    m = random_matrix(20_000, 20_000, 6.0, 4)
    a, c = "memory://within/a.zarr", "memory://within/c.zarr"
    api.save(a, m, overwrite=True)
    report = api.multiply(a, a, c, engine="cuda", memory_limit="32MiB", grid=(5, 1, 1), overwrite=True)
    assert report.blocks == 5
    assert report.stages["gpu upload"]["bytes"] < m.data.nbytes // 4
    assert_is_product(read(c), m, m, 1e-12)


@pytest.mark.parametrize("empty", [None, 0, 399_999])
def test_rows_of_a_that_are_in_a_band_of_b_are_not_sent(host_gpu, empty):
    """But where they begin or end with an empty row that is no row of the band."""
    n = 400_000
    m = sp.diags_array([np.arange(1.0, n), np.arange(1.0, n + 1), np.arange(1.0, n)], offsets=(-1, 0, 1)).tocsr()
    if empty is not None:
        keep = np.ones(n)
        keep[empty] = 0
        m = (sp.diags_array(keep) @ m @ sp.diags_array(keep)).tocsr()
        m.eliminate_zeros()
    m.sort_indices()
    a, c = "memory://band/a.zarr", "memory://band/c.zarr"
    api.save(a, m, overwrite=True)
    limits = {"engine": "cuda", "memory_limit": "4MiB", "host_limit": "48MiB"}
    assert not api.plan(a, a, **limits).resident
    report = api.multiply(a, a, c, overwrite=True, **limits)
    assert report.blocks > 3
    assert report.stages["gpu upload"]["bytes"] < m.data.nbytes // 2
    c = read(c)
    assert abs(sp.csr_array((c.data, c.indices, c.indptr), c.shape) - m @ m).max() == 0


def test_nothing_of_the_gpu_is_kept_after_a_run(host_gpu, tmp_path, monkeypatch):
    freed, devices = [], []
    monkeypatch.setattr("spdist.kernels.cuda.pinned.free_pinned", lambda: freed.append(1))
    make = GpuMultiplier.device
    monkeypatch.setattr(GpuMultiplier, "device", lambda one: devices.append(weakref.ref(make(one))) or devices[-1]())
    a = "memory://cuda/a.zarr"
    api.save(a, random_matrix(300, 300, 3.0, 6), overwrite=True)
    api.multiply(a, a, "memory://cuda/c.zarr", engine="cuda", memory_limit="1MiB", overwrite=True)
    gc.collect()
    assert freed == [1]
    assert devices
    assert not any(device() for device in devices)


def test_a_run_goes_on_with_more_of_the_gpu(host_gpu, tmp_path):
    m = random_matrix(300, 300, 3.0, 6).tolil()
    m[200] = 2.0
    a, c = "memory://cuda/a.zarr", "memory://cuda/c.zarr"
    api.save(a, m.tocsr(), overwrite=True)
    options = {"engine": "cuda", "grid": (7, 1, 1)}
    with pytest.raises(MemoryBoundError, match=r"row 200 of A .* raise memory_limit"):
        api.multiply(a, a, c, memory_limit=9000, overwrite=True, **options)
    report = api.multiply(a, a, c, memory_limit="1MiB", resume=True, check=True, **options)
    assert (report.state, report.memory_limit) == ("resumed", 1 << 20)


def test_what_is_computed_to_warm_up_is_not_on_record(host_gpu, stored):
    a = stored("A", random_matrix(50, 50, 3, 1))
    context = WorkerContext(JobSpec(a, a, "cuda", True, (0, 50), (0, 50), memory_limit=1 << 20))
    context.warm_up()
    assert context.gpu_peak() > 0
    assert (context.telemetry.totals, context.telemetry.take_timings()) == ({}, [])


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def big(seed: int) -> sp.csr_matrix:
    """Return a matrix whose square has some tens of millions of entries."""
    return random_matrix(400_000, 400_000, 8.0, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_equals_the_cpu(stored, tmp_path, workers, dtype):
    m = random_matrix(30_000, 30_000, 8.0, 5, dtype)
    a = stored("A", m)
    options = {"engine": "cuda", "memory_limit": "64MiB", "workers": workers, "check": True}
    report = api.multiply(a, a, tmp_path / "C.zarr", grid=(5, 1, 1) if workers else None, **options)
    assert report.verification["ok"]
    assert 0 < report.peak_memory <= 64 << 20
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-4 if dtype == "float32" else 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [None, (3, 2, 2)])
def test_block_matrices(stored, tmp_path, grid):
    a, b = block_matrix(9000, 8000, 9.0, (3, 3), 1), block_matrix(8000, 9000, 9.0, (3, 3), 2)
    left, right = (api.save(tmp_path / f"{name}.zarr", m.to_scipy()) for name, m in (("a", a), ("b", b)))
    options = {"engine": "cuda", "memory_limit": "32MiB", "check": True}
    report = api.multiply(left, right, tmp_path / "c.zarr", grid=grid, **options)
    assert report.verification["ok"]
    assert 0 < report.peak_memory <= 32 << 20
    c = from_rows(spdist.open(tmp_path / "c.zarr").rows(0, 9000))
    d = bsr_cpu.multiply(a, b)
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices), (c.data, d.data)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
def test_split_inner_dimension(stored, tmp_path):
    m = random_matrix(3000, 3000, 8.0, 6)
    a = stored("A", m)
    api.multiply(a, a, tmp_path / "C.zarr", grid=(3, 3, 2), engine="cuda", memory_limit="64MiB")
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_killed_worker_costs_its_blocks(stored, tmp_path):
    a = stored("A", big(7))
    api.multiply(a, a, tmp_path / "D.zarr", engine="cuda", memory_limit="256MiB")
    victims = []

    def kill(progress) -> None:
        if progress.blocks >= 2 and not victims:
            victims.append(workers_alive()[0].pid)
            os.kill(victims[0], signal.SIGKILL)

    callbacks = spdist.Callbacks(progress=kill)
    grid = (40, 1, 1)
    api.multiply(
        a, a, tmp_path / "C.zarr", engine="cuda", memory_limit="256MiB", workers=1, grid=grid, callbacks=callbacks
    )
    assert victims
    c, d = read(tmp_path / "C.zarr"), read(tmp_path / "D.zarr")
    np.testing.assert_array_equal(c.indices, d.indices)
    np.testing.assert_allclose(c.data, d.data, rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.slow
def test_an_interrupted_run_resumes(stored, tmp_path):
    m = big(8)
    a = stored("A", m)

    class StopError(Exception):
        pass

    def stop(progress) -> None:
        if progress.blocks >= 3:
            time.sleep(0.7)  # let a checkpoint be written
            raise StopError

    options = {"engine": "cuda", "memory_limit": "256MiB", "grid": (20, 1, 1)}
    with pytest.raises(StopError):
        api.multiply(a, a, tmp_path / "C.zarr", callbacks=spdist.Callbacks(progress=stop), **options)
    report = api.multiply(a, a, tmp_path / "C.zarr", resume=True, check=True, **options)
    assert report.state == "resumed"
    assert report.verification["ok"]


@pytest.mark.gpu
def test_scipy_in_scipy_out():
    import spdist

    m = random_matrix(5000, 5000, 6.0, 9)
    c = spdist.matmul(m, m, engine="cuda", memory_limit="64MiB")
    assert_is_product(csr_from_scipy(c), m, m, 1e-12)
