"""Products that the caller's process makes without Dask: the same files as with workers, and what is not loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist.api import products as api
from spdist.errors import InputError, SpdistError
from spdist.foundation.memory import resident_memory
from spdist.jobs.starting import short, this_process
from spdist.scheduler.execution import stages, worker_process
from spdist.scheduler.execution.records import BlockTask
from spdist.scheduler.executors import threads
from spdist.scheduler.executors.threads import WORKER, ThreadExecutor
from spdist.scheduler.planner import planner
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import files, read
from tests.support.planning import SHORT_CHUNKS

OPTIONS: list[dict[str, Any]] = [
    {}, {"top_n": 2}, {"threshold": 0.5}, {"semiring": "min_plus"}, {"triangle": "upper"},
{"engine": "scipy"}, {"engine": "numba"}, {"grid": (1, 2, 2)}, {"grid": (2, 1, 1)}, {"grid": (2, 2, 1)},
]  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6), n=st.integers(2, 60), part=st.integers(1, 9), options=st.sampled_from(OPTIONS),
    dtype=st.sampled_from(["float64", "int16"]),
)  # fmt: skip
def test_the_files_are_those_of_a_worker(tmp_path, scheduler, seed, n, part, options, dtype):
    """Short Zarr chunks and small capacities: blocks are cut, and their pieces share chunks."""
    a, b = random_matrix(n, n, 4, seed, dtype), random_matrix(n, n, 4, seed + 1, dtype)
    place = tmp_path / f"{seed}-{part}"
    place.mkdir(exist_ok=True)
    for name, matrix in (("a", a), ("b", b)):
        spdist.save(place / name, matrix, overwrite=True)

    def cut_short(*args, **keywords):
        plan = made(*args, **keywords)
        return replace(plan, blocks=tuple(replace(one, capacity=one.capacity // part + 1) for one in plan.blocks))

    made = planner.make_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
        patch.setattr(planner, "make_plan", cut_short)
        report = api.multiply(place / "a", place / "b", place / "C", overwrite=True, **options)
        api.multiply(place / "a", place / "b", place / "W", overwrite=True, scheduler=scheduler, **options)
    found, expected = files(place / "C"), files(place / "W")
    assert found == expected
    assert (report.workers, report.nnz) == (1, spdist.open(place / "C").nnz)
    if not options:
        assert_is_product(read(place / "C"), a, b, 1e-5)


@pytest.mark.parametrize("what", ["nnz", "frobenius", "row_sums", "trace"])
def test_reductions(stored, scheduler, what):
    m = random_matrix(300, 300, 5, 1)
    a = stored("A", m)
    np.testing.assert_array_equal(api.reduce(a, a, what), api.reduce(a, a, what, scheduler=scheduler))


LOADED = """
import sys, spdist, spdist.cli
if sys.argv[1] == "long":
    import spdist.jobs.starting.short
    sys.argv[1], spdist.jobs.starting.short.SHORT_SECONDS = "multiply", -1.0
code = spdist.cli.main(sys.argv[1:])
heavy = "distributed", "dask", "bokeh", "numba", "cupy", "pandas", "zarr", "scipy.sparse", "scipy.linalg", "rich"
print(*(name for name in heavy if name in sys.modules), code, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (["info", "A.zarr"], []),
        (["status", "A.zarr"], []),
        (["multiply", "A.zarr", "A.zarr", "C.zarr", "--json"], ["scipy.sparse"]),
        (["multiply", "A.zarr", "A.zarr", "C.zarr", "--engine", "numba", "--json"], ["numba"]),
        (["reduce", "nnz", "A.zarr", "A.zarr", "--json"], ["numba"]),
        (["plan", "A.zarr", "A.zarr", "--json"], []),
        (["plan", "A.zarr", "A.zarr"], ["rich"]),
        (["multiply", "A.zarr", "A.zarr", "C.zarr", "--grid", "4,1,1", "--json"], ["scipy.sparse"]),
        (["long", "A.zarr", "A.zarr", "C.zarr", "--grid", "4,1,1"], ["distributed", "dask", "numba"]),
    ],
    ids=lambda words: " ".join(words[:1] + words[4:]) if words else "",
)
def test_what_a_command_loads(stored, tmp_path, words, loaded):
    """In a fresh process that finds its kernels in the cache, so that Numba loads nothing that it compiles with.

    A long product needs Dask, and the dashboard's pages come last of all.
    """
    stored("A", sp.csr_matrix(random_matrix(50, 50, 3, 1)))
    words = [*words, "--overwrite"] if words[0] in ("multiply", "long") else words
    for _ in range(2 if "numba" in loaded else 1):
        run = subprocess.run(
            [sys.executable, "-c", LOADED, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    *found, code = run.stderr.splitlines()[-1].split()
    assert code == "0", run.stderr
    assert set(loaded) <= set(found) if "dask" in loaded else loaded == found, run.stderr


def test_records_and_messages(stored, tmp_path):
    a, file, heard = stored("A", random_matrix(200, 200, 5, 1)), tmp_path / "run.jsonl", []
    links: list[str] = []
    callbacks = spdist.Callbacks(on_message=heard.append, started=links.append)
    report = api.multiply(a, a, tmp_path / "C.zarr", record=file, callbacks=callbacks)
    assert [message["what"] for message in heard] == ["start", "progress", "progress", "end"]
    assert heard[0]["content"]["expected"] > 0.0
    assert heard[-1]["content"]["state"] == "finished"
    assert links == []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    stages_seen = {line["stage"] for line in lines if line["worker"] == WORKER}
    assert stages_seen == {"preprocess", "multiply", "commit", "join"} == set(report.stages)
    assert {"run", "close"} <= report.phases.keys()


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 1)])
def test_a_failure_is_one_line_and_the_message_says_so(stored, tmp_path, monkeypatch, grid):
    a, heard = stored("A", random_matrix(200, 200, 5, 1)), []

    def failing(*args):
        raise ZeroDivisionError("of no use")

    monkeypatch.setitem(stages.STAGES, "commit", failing)
    with pytest.raises(SpdistError, match="ZeroDivisionError: of no use; continue with --resume"):
        api.multiply(a, a, tmp_path / "C.zarr", grid=grid, callbacks=spdist.Callbacks(on_message=heard.append))
    assert heard[-1]["content"]["state"] == "failed"
    monkeypatch.undo()
    assert api.multiply(a, a, tmp_path / "C.zarr", resume=True, check=True).verification["ok"]


def test_a_full_disk_is_named(stored, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    a = stored("A", random_matrix(200, 200, 5, 1))
    monkeypatch.setitem(stages.STAGES, "commit", full)
    with pytest.raises(SpdistError, match="disk is full"):
        api.multiply(a, a, tmp_path / "C.zarr")


def test_memory_that_is_not_there_is_refused_before_anything_is_written(stored, tmp_path, monkeypatch):
    a = stored("A", random_matrix(200, 200, 5, 1))
    monkeypatch.setattr(short, "host_memory", lambda: resident_memory() + (1 << 20))
    with pytest.raises(InputError, match=r"the plan needs .* leaves (1\.00 M|10\d\d\.00 K)iB"):
        api.multiply(a, a, tmp_path / "C.zarr")
    assert not Path(tmp_path / "C.zarr").exists()


def test_workers_that_a_control_group_cannot_hold_are_refused(stored, tmp_path, monkeypatch):
    a = stored("A", random_matrix(200, 200, 5, 1))
    monkeypatch.setattr(this_process, "host_memory", lambda: 150 << 20)
    with pytest.raises(InputError, match=r"this process and 1 worker would take \d+\.\d\d MiB .* has 150\.00 MiB"):
        api.multiply(a, a, tmp_path / "C.zarr", workers=1)
    assert not (tmp_path / "C.zarr").exists()


def test_only_short_products_without_workers(stored, tmp_path, monkeypatch):
    a, links = stored("A", random_matrix(200, 200, 5, 1)), []
    callbacks = spdist.Callbacks(started=links.append)
    api.multiply(a, a, tmp_path / "C.zarr", grid=(3, 1, 1), callbacks=callbacks)
    assert not links
    monkeypatch.setattr(short, "SHORT_SECONDS", 0.0)
    api.multiply(a, a, tmp_path / "D.zarr", grid=(3, 1, 1), callbacks=callbacks)
    assert len(links) == 1
    assert files(tmp_path / "C.zarr") == files(tmp_path / "D.zarr")


@pytest.mark.parametrize(("gpus", "seconds", "alone"), [(1, 10.0, True), (2, 10.0, True), (2, 0.0, False)])
def test_short_products_of_gpus_need_no_worker(stored, monkeypatch, gpus, seconds, alone):
    a = stored("A", random_matrix(200, 200, 5, 1))
    plan = api.plan(a, a, engine="cuda", memory_limit=1 << 30, host_limit=1 << 30, grid=(3, 1, 1))
    monkeypatch.setattr(worker_process, "count_gpus", lambda: gpus)
    monkeypatch.setattr(short, "GPU_SHORT_SECONDS", seconds)
    monkeypatch.setattr(short, "SHORT_SECONDS", 0.0)  # of CPUs
    assert short.is_short(plan) == alone


@pytest.mark.parametrize("most", [0, 1, 3])
def test_blocks_are_read_ahead(monkeypatch, most):
    """As many as there is room for; none of several pieces, and the first by whoever makes it."""
    tasks = [BlockTask(k, 10 * k, 10 * k + 10, 100, False) for k in range(6)]
    job = SimpleNamespace(pieces_of=lambda task: 2 if task.number == 4 else 1, host_bytes=1 << 30)
    context = SimpleNamespace(job=job, load=lambda plan: None, release=lambda: None)
    draft = SimpleNamespace(with_plan=lambda plan, name: job)
    plan = SimpleNamespace(on_gpu=True, blocks_in_flight=most + 2)
    ahead: list[int] = []
    made: list[int] = []
    monkeypatch.setattr(threads, "WorkerContext", lambda job: context)
    monkeypatch.setattr(threads, "fix_engine", lambda job, plan: job)
    monkeypatch.setattr(threads, "compute", lambda context, task, pieces: made.append(task.number) or task.number)
    monkeypatch.setattr(threads, "count", lambda context, task, c: c)
    monkeypatch.setitem(stages.STAGES, "preprocess", lambda context, task: ahead.append(task.number) or task.number)
    monkeypatch.setitem(stages.STAGES, "multiply", lambda context, task, operands: operands)

    def begin(executor):
        for task in reversed(tasks):
            executor.submit("multiply", task, key=(task.number, 0))

    executor = ThreadExecutor("job")
    with executor.running(draft, plan):
        begin(executor)
        assert [result for _ in range(6) for _, result in executor.next_completed()] == list(range(6))
    assert sorted(ahead) == ([1, 2, 3, 5] if most else [])
    assert made == ([0, 4] if most else list(range(6)))
    ahead.clear()
    executor = ThreadExecutor("job")
    with executor.running(draft, plan):
        begin(executor)
        executor.next_completed()
    assert len(ahead) <= most


def test_progress_counts_the_blocks(stored, tmp_path):
    a, seen = stored("A", random_matrix(300, 300, 5, 1)), []
    report = api.multiply(a, a, tmp_path / "C.zarr", grid=(4, 1, 1), callbacks=spdist.Callbacks(progress=seen.append))
    assert {now.blocks_total for now in seen} == {4}
    assert [now.blocks for now in seen] == sorted(now.blocks for now in seen)
    assert len(seen) >= 4
    assert [now.products for now in seen] == sorted(now.products for now in seen)
    assert (seen[-1].blocks, seen[-1].products, seen[-1].durable_row) == (4, seen[-1].products_total, 300)
    assert report.blocks == 4


def test_durable_rows_of_a_failed_run_are_kept(stored, tmp_path, monkeypatch):
    """Short Zarr chunks; the third block fails to be written, and rows before it are not made again."""
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    a, resumed, commit = stored("A", random_matrix(300, 300, 5, 1)), [], stages.STAGES["commit"]

    def failing(context, task, *rest):
        if task.number == 2:
            raise ZeroDivisionError("of no use")
        return commit(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "commit", failing)
    with pytest.raises(SpdistError, match="ZeroDivisionError"):
        api.multiply(a, a, tmp_path / "C.zarr", grid=(5, 1, 1))
    monkeypatch.undo()
    callbacks = spdist.Callbacks(resumed=resumed.append)
    report = api.multiply(a, a, tmp_path / "C.zarr", resume=True, check=True, callbacks=callbacks)
    assert report.verification["ok"]
    assert re.match(r"[1-9]\d* of 300 rows", resumed[0])


def test_an_error_of_the_callers_own_function_stays_as_it_is(stored, tmp_path):
    def stop(progress):
        raise StopIteration("of the caller")

    a = stored("A", random_matrix(300, 300, 5, 1))
    with pytest.raises(StopIteration, match="of the caller"):
        api.multiply(a, a, tmp_path / "C.zarr", grid=(4, 1, 1), callbacks=spdist.Callbacks(progress=stop))
    assert api.multiply(a, a, tmp_path / "C.zarr", resume=True, check=True).verification["ok"]
