"""Engine hybrid: GPUs and cores on one product; with a GPU whose memory is the host's."""

from __future__ import annotations

import json
import logging
import os
import threading
import time

import numpy as np
import pytest

import spdist
from spdist.api import products as api
from spdist.errors import InputError
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.assignment import BlockAssigner
from spdist.scheduler.executors.clients import cluster, local_cluster, members
from spdist.scheduler.planner import planner
from tests.conftest import assert_is_product, has_gpu, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.support import fake_gpu
from tests.support.cpus import pretend_cpus
from tests.support.planning import SMALL_GPU_BLOCKS


@pytest.fixture
def one_gpu(monkeypatch):
    """Let the first worker of a cluster have a GPU, of a sort."""
    monkeypatch.setattr(worker_process, "count_gpus", lambda: 1)
    monkeypatch.setattr(local_cluster, "PRELOAD", [*local_cluster.PRELOAD, "tests.support.fake_gpu"])


@pytest.mark.slow
def test_a_worker_with_a_gpu_starts_while_a_large_product_is_planned(stored, tmp_path, one_gpu, monkeypatch):
    started, plan, start = threading.Event(), planner.make_plan, local_cluster.local_cluster
    monkeypatch.setattr(local_cluster, "local_cluster", lambda *args: started.set() or start(*args))

    def planned(*args, **options):
        found.append(started.wait(200))
        return plan(*args, **options)

    monkeypatch.setattr(planner, "make_plan", planned)
    monkeypatch.setattr("spdist.jobs.starting.workers.GPU_BLOCK_PRODUCTS", 1)
    m, found = random_matrix(3000, 3000, 4.0, 4), []
    a = stored("A", m)
    limits = {"engine": "cuda", "memory_limit": "4MiB", "workers": 1, "grid": (9, 1, 1)}
    report = api.multiply(a, a, tmp_path / "C.zarr", check=True, **limits)
    assert found == [True]
    assert (report.engine, report.workers) == ("cuda", 1)
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


@pytest.mark.slow
def test_cores_multiply_beside_a_gpu(stored, tmp_path, one_gpu, monkeypatch, caplog):
    pretend_cpus(monkeypatch, 4)
    monkeypatch.setenv(fake_gpu.SHARED, fake_gpu.share(tmp_path, 2))
    (tmp_path / fake_gpu.RELEASED).touch()
    m = random_matrix(6000, 6000, 4.0, 4)
    a, file = stored("A", m), tmp_path / "run.jsonl"
    options = {"engine": "hybrid", "memory_limit": "4MiB", "check": True, "record": file}
    with caplog.at_level(logging.INFO, "spdist"):
        report = api.multiply(a, a, tmp_path / "C.zarr", grid=(80, 1, 1), **options)
    assert "1 GPUs, and 2 cores beside them" in caplog.text
    assert report.engine == "hybrid"
    assert report.workers == 3
    assert report.stages["commit"]["limit"] > 1e8
    assert report.stages["gpu upload"]["limit"] == 1e9
    assert 0 < report.peak_memory <= 4 << 20
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    rows = {
        worker: {line["row"] for line in lines if line["stage"] == "multiply" and line["worker"] == worker}
        for worker in {line["worker"] for line in lines if line["worker"]}
    }
    on_gpu = {line["worker"] for line in lines if line["stage"] == "gpu multiply"}
    assert len(on_gpu) == 1
    assert len(rows) == 3
    assert min(map(len, rows.values())) > 0
    assert sum(map(len, rows.values())) == 80
    assert 0 in rows[on_gpu.pop()]


@pytest.mark.slow
def test_a_core_that_is_late_and_has_too_little_room_ends_no_run(stored, tmp_path, one_gpu, monkeypatch):
    """The rest of its rows comes first, when all hands are full of blocks that wait for it."""
    pretend_cpus(monkeypatch, 4)
    monkeypatch.setenv(fake_gpu.LATE, "3")
    m = random_matrix(3000, 3000, 4.0, 4)
    a = stored("A", m)
    api.multiply(a, a, tmp_path / "C.zarr", engine="hybrid", memory_limit="4MiB", grid=(80, 1, 1))
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


@pytest.mark.slow
def test_reductions_too(stored, tmp_path, one_gpu, monkeypatch):
    pretend_cpus(monkeypatch, 4)
    monkeypatch.setenv(fake_gpu.SHARED, fake_gpu.share(tmp_path, 2))
    (tmp_path / fake_gpu.RELEASED).touch()
    monkeypatch.setattr(planner, "DEFAULT_TUNING", SMALL_GPU_BLOCKS)
    m = random_matrix(3000, 3000, 4.0, 5)
    a, sent, assign = stored("A", m), [], BlockAssigner.assign
    monkeypatch.setattr(
        BlockAssigner, "assign", lambda assigner, worker, work: (sent.append(worker), assign(assigner, worker, work))
    )
    assert api.reduce(a, a, "nnz", engine="hybrid", memory_limit="4MiB") == np.diff((m @ m).indptr).sum()
    assert len(sent) > 20
    assert len(set(sent)) == 3


@pytest.mark.slow
def test_no_reduction_waits_for_a_late_core(stored, tmp_path, one_gpu, monkeypatch):
    """The GPU makes its block, too; the core keeps it until all blocks are done."""
    pretend_cpus(monkeypatch, 2)
    monkeypatch.setattr(planner, "DEFAULT_TUNING", SMALL_GPU_BLOCKS)
    monkeypatch.setenv(fake_gpu.SHARED, fake_gpu.share(tmp_path, 1))
    m = random_matrix(3000, 3000, 4.0, 5)
    a, sent, assign = stored("A", m), [], BlockAssigner.assign
    monkeypatch.setattr(
        BlockAssigner,
        "assign",
        lambda assigner, worker, work: (sent.append(work.task.number), assign(assigner, worker, work)),
    )

    def release(told):
        if told.blocks == told.blocks_total:
            (tmp_path / fake_gpu.RELEASED).touch()

    callbacks = spdist.Callbacks(progress=release)
    total = api.reduce(a, a, "nnz", engine="hybrid", memory_limit="4MiB", callbacks=callbacks)
    assert total == np.diff((m @ m).indptr).sum()
    twice = {number for number in sent if sent.count(number) > 1}
    assert 1 <= len(twice) == len(sent) - len(set(sent))


@pytest.mark.slow
def test_cores_step_back_for_good(one_gpu, monkeypatch):
    """Also when they start again."""
    pretend_cpus(monkeypatch, 2)
    with cluster.connect(workers=1, scheduler=None, processes=True, blocks=9, engine="hybrid") as client:
        for again in (False, True):
            nice = client.run(os.nice, 0)
            assert sorted(nice.values()) == [os.nice(0), min(os.nice(0) + local_cluster.CORE_NICE, 19)]
            if not again:
                core = max(nice, key=nice.get)
                client.run(os._exit, 1, workers=[core], on_error="ignore")
                deadline = time.monotonic() + 60
                while core in members.workers_of(client) and time.monotonic() < deadline:
                    time.sleep(0.05)
                client.wait_for_workers(2, timeout=60)


def test_the_host_is_not_overbooked(monkeypatch):
    pretend_cpus(monkeypatch, 32)
    monkeypatch.setattr(local_cluster, "available_memory", lambda: 100 << 30)
    assert local_cluster.count_cpu_workers(2, 1 << 30) == 16
    assert local_cluster.count_cpu_workers(2, 8 << 30) == 4
    assert local_cluster.count_cpu_workers(2, 40 << 30) == 0


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_any_gpu_it_is_refused(stored, tmp_path, scheduler):
    a = stored("A", random_matrix(50, 50, 3, 1))
    with pytest.raises(InputError, match="needs a CUDA device and CuPy"):
        api.multiply(a, a, tmp_path / "C.zarr", engine="hybrid")
    with pytest.raises(InputError, match=r"engine='hybrid', but 2 workers .* see no GPU.* choose engine='auto'"):
        api.multiply(a, a, tmp_path / "C.zarr", engine="hybrid", memory_limit="1GiB", scheduler=scheduler)
    assert not (tmp_path / "C.zarr").exists()


def test_its_plan_has_room_for_both(stored):
    a = stored("A", random_matrix(5000, 5000, 20.0, 6))
    limits = {"memory_limit": "1GiB", "host_limit": "64MiB"}
    plans = {engine: api.plan(a, a, engine=engine, **limits) for engine in ("cuda", "hybrid")}
    assert plans["hybrid"].reserved_memory >= plans["cuda"].reserved_memory
    assert plans["hybrid"].projected_memory == plans["cuda"].projected_memory > 0
    assert plans["hybrid"].projected_host_memory <= 64 << 20
