"""Several GPUs in this process: the same files as with one, B read once, errors, and how many GPUs take part."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spdist.api import products as api
from spdist.errors import SpdistError
from spdist.jobs.starting import short
from spdist.kernels.streaming.engine import GpuMultiplier
from spdist.scheduler.execution import stages, worker_process
from spdist.scheduler.execution.operands.resident import ResidentMatrix
from spdist.scheduler.planner import planner
from tests.conftest import assert_is_product, has_gpu, random_matrix
from tests.scheduler.execution.test_driver import files, read
from tests.support.host_device import HostDevice
from tests.support.planning import SHORT_CHUNKS

CUDA = {"engine": "cuda", "memory_limit": "1MiB", "overwrite": True}


@pytest.fixture
def host_gpus(monkeypatch):
    """Return a function that sets the number of GPUs, whose memory is the host's, and a list of the selected ones."""
    selected: list[int] = []

    def begin(count: int) -> list[int]:
        monkeypatch.setattr(worker_process, "count_gpus", lambda: count)
        for name, value in (("SECONDS_PER_GPU", 1e-12), ("READERS", 10**12), ("WRITERS", 10**12)):
            monkeypatch.setattr(short, name, value)
        return selected

    @contextlib.contextmanager
    def select(self):
        if self.limits.gpu is not None:
            selected.append(self.limits.gpu)
        yield

    monkeypatch.setattr(GpuMultiplier, "_selected", select)
    monkeypatch.setattr("spdist.kernels.streaming.gpu_device.Gpu", HostDevice)
    monkeypatch.setattr("spdist.kernels.rowwise_gpu.multiply.compile_kernels", lambda dtype, ncols, semiring: None)
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    return begin


@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize("grid", [(9, 1, 1), (5, 3, 2)])
def test_the_files_are_those_of_a_single_gpu(host_gpus, stored, tmp_path, monkeypatch, grid, part):
    """Also if rows do not fit their block and come again, on either GPU."""
    m, make = random_matrix(900, 900, 8.0, 4), planner.make_plan
    a = stored("A", m)

    def cut_short(*args, **keywords):
        plan = make(*args, **keywords)
        return replace(plan, blocks=tuple(replace(b, capacity=b.capacity // part + 1) for b in plan.blocks))

    monkeypatch.setattr(planner, "make_plan", cut_short)
    host_gpus(1)
    api.multiply(a, a, tmp_path / "one.zarr", grid=grid, **CUDA)
    selected = host_gpus(3)
    record = tmp_path / "run.jsonl"
    report = api.multiply(a, a, tmp_path / "three.zarr", grid=grid, record=record, **CUDA)
    assert files(tmp_path / "one.zarr") == files(tmp_path / "three.zarr")
    assert_is_product(read(tmp_path / "three.zarr"), m, m, 1e-5)
    assert report.workers == 3
    assert set(selected) == {0, 1, 2}
    workers = {json.loads(line)["worker"] for line in record.read_text().splitlines()}
    assert {"GPU 0", "GPU 1", "GPU 2"} <= workers


def test_gpus_share_a_resident_b(host_gpus, stored, tmp_path, monkeypatch):
    a, reads, read_whole = stored("A", random_matrix(900, 900, 8.0, 4)), [], ResidentMatrix._read

    def counted(self):
        reads.append(self)
        return read_whole(self)

    monkeypatch.setattr(ResidentMatrix, "_read", counted)
    host_gpus(2)
    assert api.plan(a, a, engine="cuda", memory_limit="1MiB").resident
    api.multiply(a, a, tmp_path / "C.zarr", grid=(6, 1, 1), **CUDA)
    assert len(reads) == 1


@pytest.mark.parametrize("what", ["frobenius", "nnz"])
def test_reductions(host_gpus, stored, what):
    m = random_matrix(9_000, 9_000, 8.0, 5)
    a, c = stored("A", m), m @ m
    assert len(set(host_gpus(2))) == 0
    found = api.reduce(a, a, what, engine="cuda", memory_limit="1MiB", host_limit="8MiB")
    assert set(host_gpus(2)) == {0, 1}
    expected = {"frobenius": np.sqrt((c.data**2).sum()), "nnz": c.nnz}
    np.testing.assert_allclose(found, expected[what], rtol=1e-5)


@pytest.mark.parametrize("stage", ["preprocess", "multiply", "commit", "join"])
def test_a_failed_stage_ends_the_run_and_resume_goes_on(host_gpus, stored, tmp_path, monkeypatch, stage):
    m = random_matrix(900, 900, 8.0, 6)
    works = stages.make if stage == "multiply" else stages.STAGES[stage]
    a, c, left = stored("A", m), tmp_path / "C.zarr", [4]

    def failing(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise ZeroDivisionError("of no use")
        return works(*arguments)

    host_gpus(2)
    with monkeypatch.context() as patch:
        patch.setitem(stages.STAGES, stage, failing)
        patch.setattr("spdist.scheduler.executors.gpus.make", failing if stage == "multiply" else stages.make)
        with pytest.raises(SpdistError, match="stage on a GPU failed: ZeroDivisionError: of no use; continue with"):
            api.multiply(a, a, c, grid=(11, 1, 1), **CUDA)
    api.multiply(a, a, c, grid=(11, 1, 1), **CUDA | {"overwrite": False, "resume": True})
    assert_is_product(read(c), m, m, 1e-5)


@pytest.mark.parametrize(
    ("blocks", "room", "multiply", "commit", "expected"),
    [
        (9, 100, 99, 0, 4), (3, 100, 99, 0, 3), (1, 100, 99, 0, 1), (9, 25, 99, 0, 2), (9, 5, 99, 0, 1),
        (9, 100, 0.5, 0, 1), (9, 100, 1.5, 0, 2), (9, 100, 0.5, 30, 1), (9, 100, 9, 30, 3), (9, 100, 9, 300, 1),
    ],
)  # fmt: skip
def test_how_many_gpus_take_part(monkeypatch, blocks, room, multiply, commit, expected):
    """Of four: no more than there are blocks, and memory of the host for, and than the host's writers keep up with."""
    monkeypatch.setattr(worker_process, "count_gpus", lambda: 4)
    monkeypatch.setattr(short, "room", lambda: room)
    plan = SimpleNamespace(
        on_gpu=True, blocks=[None] * blocks, projected_host_memory=10,
        stage_seconds=lambda: {"preprocess": 0.0, "multiply": multiply, "commit": commit},
    )  # fmt: skip
    assert short.count_gpus_for(plan) == expected


def test_a_gpu_that_is_left_out_is_said(host_gpus, stored, tmp_path, monkeypatch, caplog):
    a = stored("A", random_matrix(300, 300, 8.0, 4))
    plan = api.plan(a, a, engine="cuda", memory_limit="1MiB", grid=(6, 1, 1))
    host_gpus(4)
    monkeypatch.setattr(short, "room", lambda: 2 * plan.projected_host_memory)
    with caplog.at_level(logging.WARNING):
        report = api.multiply(a, a, tmp_path / "C.zarr", grid=(6, 1, 1), **CUDA)
    assert report.workers == 2
    assert "2 of 4 GPUs are used" in caplog.text
    assert "lower host_limit" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="there is no GPU")
@pytest.mark.parametrize("options", [{}, {"top_n": 3}, {"semiring": "min_plus"}, {"grid": (6, 2, 2)}])
def test_on_all_gpus_of_this_host(stored, tmp_path, options):
    m = random_matrix(20_000, 20_000, 10.0, 4)
    a = stored("A", m)
    words = {"engine": "cuda", "memory_limit": "256MiB", "grid": (6, 1, 1)} | options
    report = api.multiply(a, a, tmp_path / "C.zarr", check=True, **words)
    assert report.workers == min(worker_process.count_gpus(), 6)
    api.multiply(a, a, tmp_path / "one.zarr", workers=1, **words)
    assert files(tmp_path / "C.zarr") == files(tmp_path / "one.zarr")
