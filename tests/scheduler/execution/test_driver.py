"""The driver: places in C, resume, recomputation, splitting; on a cluster inside this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from dask.utils import key_split
from distributed import as_completed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spdist
from spdist.api import products as api
from spdist.errors import CorruptError, InputError, MemoryBoundError, ResumeError, SpdistError
from spdist.matrices.csr import CSR
from spdist.scheduler.execution import stages
from spdist.scheduler.execution.driver import DriverTuning
from spdist.scheduler.execution.journal import JournalTuning
from spdist.scheduler.execution.records import StageTiming
from spdist.scheduler.execution.unfinished import read_journal
from spdist.scheduler.execution.worker import CONTEXTS
from spdist.scheduler.executors import plugins
from spdist.scheduler.executors.clients.cluster import connect, workers
from spdist.scheduler.planner import planner
from spdist.storage import groups, notes
from tests.conftest import assert_is_product, random_matrix
from tests.jobs.reports.test_run_report import data_of
from tests.support.planning import SHORT_CHUNKS
from tests.support.worker_processes import workers_below


def files(url: str | Path) -> dict[str, str]:
    """Return a digest of every file of a matrix."""
    root = Path(url)
    return {str(p.relative_to(root)): hashlib.md5(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


def read(url) -> CSR:
    m = spdist.open(url)
    m.check()
    return m.rows(0, m.nrows)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_grid_gives_the_product(tmp_path, scheduler, seed, data):
    rng = np.random.default_rng(seed)
    m, k, n = (int(x) for x in rng.integers(1, 40, 3))
    dtype = data.draw(st.sampled_from(["float64", "float32", "complex128", "int32", "bool", "uint8"]))
    a, b = random_matrix(m, k, 4, seed, dtype), random_matrix(k, n, 4, seed + 1, dtype)
    grid = tuple(data.draw(st.integers(1, min(size, most))) for size, most in ((m, 12), (k, 3), (n, 3)))
    place = tmp_path / f"{seed}"
    place.mkdir(exist_ok=True)
    for name, matrix in (("a", a), ("b", b)):
        api.save(place / name, matrix, overwrite=True)
    api.multiply(place / "a", place / "b", place / "c", grid=grid, scheduler=scheduler, overwrite=True)
    rtol = 1e-5 if a.dtype.kind in "fc" else 0.0
    assert_is_product(read(place / "c"), a, b, rtol)


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_shapes(stored, tmp_path, executor, shape):
    m, k, n = shape
    a, b = sp.csr_matrix((m, k)), sp.csr_matrix((k, n))
    stored("A", a), stored("B", b)
    report = api.multiply(tmp_path / "A.zarr", tmp_path / "B.zarr", tmp_path / "C.zarr", **executor)
    assert report.nnz == 0
    c = read(tmp_path / "C.zarr")
    assert (c.shape, c.nnz) == ((m, n), 0)


@pytest.mark.parametrize("engine", ["scipy", "numba", "auto"])
@pytest.mark.parametrize("grid", [None, (7, 1, 1), (40, 1, 1)])
def test_same_bytes_whatever_the_engine_and_the_rows(stored, tmp_path, executor, engine, grid):
    a = stored("A", random_matrix(800, 800, 12, 1))
    reference = tmp_path / "R.zarr"
    api.multiply(a, a, reference, engine="scipy", **executor)
    api.multiply(a, a, tmp_path / "C.zarr", engine=engine, grid=grid, **executor)
    assert files(tmp_path / "C.zarr") == files(reference)


def test_rows_that_do_not_fit_their_room_become_blocks_of_their_own(stored, tmp_path, executor, monkeypatch):
    m = random_matrix(500, 500, 10, 2)
    a = stored("A", m)
    plan = api.plan(a, a, grid=(9, 1, 1))
    short = replace(plan, blocks=tuple(replace(block, capacity=block.capacity // 7 + 1) for block in plan.blocks))
    monkeypatch.setattr("spdist.scheduler.planner.planner.make_plan", lambda *_, **__: short)
    report = api.multiply(a, a, tmp_path / "C.zarr", **executor)
    assert report.blocks > 9
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


@pytest.mark.parametrize(("grid", "stop_after"), [((30, 1, 1), 1), ((30, 1, 1), 17), ((6, 3, 2), 1), ((6, 3, 2), 4)])
def test_resume_gives_the_bytes_of_an_undisturbed_run(stored, tmp_path, executor, monkeypatch, grid, stop_after):
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0))
    a = stored("A", random_matrix(900, 900, 12, 3))
    options = {"grid": grid, **executor}
    api.multiply(a, a, tmp_path / "R.zarr", **options)
    commits = []
    commit = stages.commit

    def failing(context, task, *rest):
        commits.append(task.number)
        if len(commits) > stop_after:
            raise OSError(28, "No space left on device")
        return commit(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "commit", failing)
    with pytest.raises(SpdistError, match=r"disk is full.*--resume"):
        api.multiply(a, a, tmp_path / "C.zarr", **options)
    monkeypatch.setitem(stages.STAGES, "commit", commit)
    assert api.info(tmp_path / "C.zarr")["state"] == "unfinished"
    with pytest.raises(InputError, match="unfinished"):
        spdist.open(tmp_path / "C.zarr")
    front = read_journal(str(tmp_path / "C.zarr")).checkpoint
    report = api.multiply(a, a, tmp_path / "C.zarr", resume=True, **options)
    assert report.state == "resumed"
    assert front.row == 0 or report.blocks < grid[0]
    assert files(tmp_path / "C.zarr") == files(tmp_path / "R.zarr")


@pytest.mark.parametrize("step", ["begin", "write_note", "finish_group"])
def test_a_disk_that_the_driver_finds_full(stored, tmp_path, executor, monkeypatch, step):
    """Said as the workers say it; and what is left can be resumed, or is nothing."""
    a, c = stored("A", random_matrix(300, 300, 5, 1)), tmp_path / "C.zarr"

    def full(*_):
        c.mkdir(exist_ok=True)
        raise RuntimeError("No space left on device (os error 28)")  # as zarrs does

    with monkeypatch.context() as patch:
        patch.setattr(notes if step == "write_note" else groups, step, full)
        with pytest.raises(SpdistError, match=r"C\.zarr: the disk is full.*--resume"):
            api.multiply(a, a, c, **executor)
    assert c.exists() == (step != "begin")
    if step != "begin":
        with pytest.raises(InputError, match=r"C\.zarr is an unfinished product.*--resume.*--overwrite"):
            api.multiply(a, a, c, **executor)
    assert api.multiply(a, a, c, **executor, resume=True, check=True).verification["ok"]


def test_resume_goes_on_from_the_durable_part(stored, tmp_path, executor, monkeypatch):
    """Rows before the front are not computed again: a trap on them is never sprung."""
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    monkeypatch.setattr("spdist.scheduler.execution.journal.TUNING", JournalTuning(seconds=0.0))
    a = stored("A", random_matrix(900, 900, 12, 4))
    preprocess = stages.preprocess

    def stop_late(context, task, *rest):
        if task.start > 500:
            deadline = time.monotonic() + 2  # for workers whose only thread waits here
            while not read_journal(str(tmp_path / "C.zarr")).checkpoint.row and time.monotonic() < deadline:
                time.sleep(0.01)
            raise OSError(5, "the disk is gone")
        return preprocess(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "preprocess", stop_late)
    with pytest.raises(SpdistError, match="the disk is gone"):
        api.multiply(a, a, tmp_path / "C.zarr", grid=(40, 1, 1), **executor)
    front = read_journal(str(tmp_path / "C.zarr")).checkpoint
    assert 0 < front.row < 520

    def refuse_early(context, task, *rest):
        assert task.start >= front.row
        return preprocess(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "preprocess", refuse_early)
    api.multiply(a, a, tmp_path / "C.zarr", **executor, resume=True)
    assert api.verify(a, a, tmp_path / "C.zarr").ok


def test_resume_refuses_another_product(stored, tmp_path, executor, monkeypatch):
    a, other = stored("A", random_matrix(50, 50, 3, 5)), stored("B", random_matrix(50, 50, 3, 6))
    monkeypatch.setattr("spdist.jobs.by_rows.execute", lambda *_: (_ for _ in ()).throw(SpdistError("stopped")))
    with pytest.raises(SpdistError, match="stopped"):
        api.multiply(a, a, tmp_path / "C.zarr", **executor)
    with pytest.raises(ResumeError, match="A, B, the mask or an option changed"):
        api.multiply(a, other, tmp_path / "C.zarr", **executor, resume=True)


def test_resume_on_a_finished_product_does_nothing(stored, tmp_path, executor):
    a = stored("A", random_matrix(50, 50, 3, 7))
    api.multiply(a, a, tmp_path / "C.zarr", **executor, resume=True)
    before = files(tmp_path / "C.zarr")
    assert api.multiply(a, a, tmp_path / "C.zarr", **executor, resume=True).state == "already finished"
    assert files(tmp_path / "C.zarr") == before


def test_a_lost_block_is_computed_again(stored, tmp_path, executor, monkeypatch):
    m = random_matrix(600, 600, 10, 8)
    a = stored("A", m)
    commit, recompute = stages.commit, stages.recompute
    lost = []

    def forget(context, task, *rest):
        if task.number % 3 == 0 and task.number not in lost:
            lost.append(task.number)
            del context.results[task.number]
        return commit(context, task, *rest)

    recomputed = []
    monkeypatch.setitem(stages.STAGES, "commit", forget)
    monkeypatch.setattr(stages, "recompute", lambda *args: recomputed.append(1) or recompute(*args))
    for grid in ((12, 1, 1), (4, 2, 2)):
        lost.clear()
        api.multiply(a, a, tmp_path / "C.zarr", **executor, grid=grid, overwrite=True)
        assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    assert len(recomputed) == 4 + 2


@pytest.mark.parametrize("room", [True, False])
def test_blocks_wait_in_files_for_a_slow_one(stored, tmp_path, scheduler, monkeypatch, room):
    """Workers go on meanwhile, and C is the same; also where files were lost with their worker, or have no room."""
    a, multiply, spill = stored("A", random_matrix(900, 900, 12, 8)), stages.multiply, stages.spill
    spilled, waited = [], threading.Event()

    def slow(context, task, *rest):
        if task.number == 0:
            assert waited.wait(60)
        return multiply(context, task, *rest)

    def lose(context, task, url, reserve):
        done = spill(context, task, url, reserve if room else 1 << 62)
        assert done == room
        spilled.append(task.number)
        if len(spilled) % 3 == 2:
            context.results.pop(task.number)
        if len(spilled) > 6 or not room:
            waited.set()
        return done

    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    api.multiply(a, a, tmp_path / "R.zarr", grid=(60, 1, 1))
    monkeypatch.setitem(stages.STAGES, "multiply", slow)
    monkeypatch.setitem(stages.STAGES, "spill", lose)
    report = api.multiply(a, a, tmp_path / "C.zarr", grid=(60, 1, 1), scheduler=scheduler)
    assert files(tmp_path / "C.zarr") == files(tmp_path / "R.zarr")
    assert report.stages["spill"]["tasks"] >= len(spilled) > 0
    assert not [path for path in (tmp_path / "C.zarr").iterdir() if "tmp" in path.name]


def test_a_block_that_changed_is_not_written(stored, tmp_path, executor, monkeypatch):
    a = stored("A", random_matrix(100, 100, 5, 9))
    commit = stages.commit

    def other(context, task, rows, digest, *rest):
        del context.results[task.number]
        return commit(context, task, rows, digest[::-1], *rest)

    monkeypatch.setitem(stages.STAGES, "commit", other)
    with pytest.raises(SpdistError, match="gave another pattern when computed again"):
        api.multiply(a, a, tmp_path / "C.zarr", **executor)
    assert api.info(tmp_path / "C.zarr")["state"] == "unfinished"


@pytest.mark.parametrize("array", ["indptr", "indices", "data"])
@pytest.mark.parametrize("damage", ["missing", "flipped", "truncated"])
def test_damaged_operand_is_named_and_leaves_no_matrix(stored, tmp_path, executor, array, damage):
    a = stored("A", random_matrix(300, 300, 6, 10))
    chunk = tmp_path / "A.zarr" / array / "c" / "0"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes({"flipped": bytes(content), "truncated": bytes(content[:-9]), "missing": b""}[damage])
    if damage == "missing":
        chunk.unlink()
    with pytest.raises(CorruptError, match=f"chunk 0 of array '{array}'"):
        api.multiply(a, a, tmp_path / "C.zarr", **executor)
    assert not (tmp_path / "C.zarr" / "indptr" / "zarr.json").exists()


def test_overwrite_replaces_only_at_the_end(stored, tmp_path, executor, monkeypatch):
    a, b = stored("A", random_matrix(60, 60, 4, 11)), stored("B", random_matrix(60, 60, 4, 12))
    api.multiply(a, a, tmp_path / "C.zarr", **executor)
    before = files(tmp_path / "C.zarr")
    with pytest.raises(InputError, match=r"exists.*--overwrite"):
        api.multiply(a, b, tmp_path / "C.zarr", **executor)
    commit = stages.commit
    monkeypatch.setitem(stages.STAGES, "commit", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(SpdistError, match="broken"):
        api.multiply(a, b, tmp_path / "C.zarr", **executor, overwrite=True)
    assert files(tmp_path / "C.zarr") == before
    monkeypatch.setitem(stages.STAGES, "commit", commit)
    api.multiply(a, b, tmp_path / "C.zarr", **executor, resume=True)
    assert api.verify(a, b, tmp_path / "C.zarr").ok
    assert sorted(p.name for p in tmp_path.glob("C*")) == ["C.zarr"]


def test_output_may_not_be_an_input(stored, tmp_path, scheduler):
    a = stored("A", random_matrix(20, 20, 3, 13))
    for c in (tmp_path / "A.zarr", tmp_path / "." / "A.zarr", tmp_path / "x" / ".." / "A.zarr"):
        with pytest.raises(InputError, match="C may not be A or B"):
            api.multiply(a, a, c, scheduler=scheduler, overwrite=True)


def test_memory_urls(scheduler):
    m = random_matrix(70, 70, 4, 14)
    api.save("memory://run/a.zarr", m, overwrite=True)
    api.multiply("memory://run/a.zarr", "memory://run/a.zarr", "memory://run/c.zarr", overwrite=True, check=True)
    assert_is_product(read("memory://run/c.zarr"), m, m, 1e-12)
    with pytest.raises(InputError, match="this process alone"):
        api.multiply("memory://run/a.zarr", "memory://run/a.zarr", "memory://run/d.zarr", scheduler=scheduler)


def test_a_dask_client_that_is_not_used_is_said_once(stored, tmp_path, caplog):
    from distributed import Client

    a = stored("A", random_matrix(50, 50, 4, 3))
    with (
        Client(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as client,
        caplog.at_level(logging.WARNING, logger="spdist"),
    ):
        address = client.scheduler.address
        for name, options in (("C", {}), ("D", {}), ("E", {"scheduler": client})):
            api.multiply(a, a, tmp_path / f"{name}.zarr", **options)
    said = [one.getMessage() for one in caplog.records if "scheduler=client" in one.getMessage()]
    assert len(said) == 1
    assert address in said[0]


def test_no_scheduler_at_the_address(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("spdist.scheduler.executors.clients.running_scheduler.CONNECT_SECONDS", 0.5)
    a = stored("A", random_matrix(20, 20, 3, 15))
    with pytest.raises(InputError, match="no Dask scheduler answers"):
        api.multiply(a, a, tmp_path / "C.zarr", scheduler="tcp://127.0.0.1:9")
    assert not (tmp_path / "C.zarr").exists()


def test_anndata_reads_the_product(stored, tmp_path, scheduler):
    anndata = pytest.importorskip("anndata")
    import zarr

    m = random_matrix(200, 200, 5, 16)
    a = stored("A", m)
    api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, grid=(5, 1, 1))
    c = anndata.io.read_elem(zarr.open_group(tmp_path / "C.zarr", mode="r"))
    assert abs(c - m @ m).max() < 1e-12


def test_what_dask_remembers_of_a_run_does_not_grow(stored, tmp_path, monkeypatch):
    """Neither a name of each task nor a record of each submission stays with the scheduler of our own cluster."""
    monkeypatch.setattr("spdist.scheduler.execution.driver.TUNING", DriverTuning(worker_seconds=0.0))
    a = stored("A", random_matrix(600, 600, 4, 9))
    with connect(workers=1, scheduler=None, processes=False, blocks=60) as client:
        monkeypatch.setattr("spdist.jobs.starting.workers.connect", lambda **_: contextlib.nullcontext(client))
        api.multiply(a, a, tmp_path / "C.zarr", grid=(60, 1, 1))
        assert not hasattr(client.cluster.scheduler.extensions["spans"], "spans")
    assert key_split.cache_info().currsize < 60


def workers_alive() -> list[psutil.Process]:
    return workers_below(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [False, True])
def test_all_workers_killed_at_once(stored, tmp_path, foreign):
    """Blocks go to workers by address: those of the dead must go to the next that come."""
    from distributed import LocalCluster

    m = random_matrix(4000, 4000, 20, 14)
    a, victims = stored("A", m), []

    def kill(progress) -> None:
        if progress.blocks >= 2 and not victims:
            victims.extend(worker.pid for worker in workers_alive())
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

    with contextlib.ExitStack() as stack:
        options = {"workers": 1}
        if foreign:
            cluster = stack.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0"))
            options = {"scheduler": cluster.scheduler_address}
        callbacks = spdist.Callbacks(progress=kill)
        api.multiply(a, a, tmp_path / "C.zarr", grid=(40, 1, 1), callbacks=callbacks, **options)
    assert len(victims) == 1 + foreign
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


def test_a_lost_worker_is_on_stderr_in_the_report_and_in_the_totals(stored, tmp_path, caplog):
    """One of two workers is killed once it has made blocks: its stages stay counted, and every line is an event."""
    m = random_matrix(4000, 4000, 20, 14)
    a, victims, timings = stored("A", m), [], []

    def kill(progress) -> None:
        if progress.blocks >= 12 and not victims:
            while len({one["worker"] for one in timings}) < 2:  # what nobody has published is lost with its worker
                time.sleep(0.01)
            victims.append(workers_alive()[0].pid)
            os.kill(victims[0], signal.SIGKILL)

    record = tmp_path / "run.jsonl"
    callbacks = spdist.Callbacks(progress=kill, on_timings=timings.extend)
    with caplog.at_level(logging.WARNING, logger="spdist"):
        report = api.multiply(
            a, a, tmp_path / "C.zarr", grid=(80, 1, 1), workers=2, callbacks=callbacks, record=record,
            report=tmp_path / "run.html",
        )  # fmt: skip
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    said = [one.getMessage() for one in caplog.records if "was lost" in one.getMessage()]
    assert said
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    events = [line["content"]["text"] for line in lines if line.get("what") == "event"]
    assert set(said) <= set(events)
    run = data_of(tmp_path / "run.html")["runs"][0]
    assert set(said) <= {text for _, text in run["events"]}
    for stage in ("multiply", "commit"):
        published = sum(one["stage"] == stage for one in timings)
        assert report.stages[stage]["tasks"] == run["stages"][stage]["tasks"] == published > 40
    (end,) = (line for line in lines if line.get("what") == "end")
    assert end["content"]["stages"] == report.stages


@pytest.mark.parametrize("reduce", [None, "nnz"])
def test_a_result_lost_before_it_was_looked_at_is_waited_for(stored, tmp_path, scheduler, monkeypatch, reduce):
    m = random_matrix(300, 300, 5, 17)
    a, taken, lost = stored("A", m), as_completed.next_batch, []

    def late(completed, block=True):
        batch = taken(completed, block)
        if not lost:
            for future in batch:
                lost.append(future.key)
                future._state.lose()  # as the scheduler's word that its worker is gone has it
                told = {"op": "report-key", "key": future.key}
                future.client.loop.add_callback(
                    future.client.loop.call_later, 0.2, future.client._send_to_scheduler, told
                )
        return batch

    monkeypatch.setattr(as_completed, "next_batch", late)
    if reduce:
        assert api.reduce(a, a, reduce, scheduler=scheduler) == (m @ m).nnz
    else:
        api.multiply(a, a, tmp_path / "C.zarr", grid=(5, 1, 1), scheduler=scheduler)
        assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    assert lost


def test_only_a_matrix_is_overwritten(stored, tmp_path):
    a = stored("A", random_matrix(30, 30, 3, 18))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "notes.txt").write_text("note")
    for place in ("mine", "notes.txt"):
        with pytest.raises(InputError, match="is not a matrix, so it is not replaced"):
            api.multiply(a, a, tmp_path / place, overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    assert (tmp_path / "notes.txt").read_text() == "note"


@pytest.mark.parametrize("place", [".", "A.zarr/C.zarr", "A.zarr"])
def test_c_is_apart_from_its_operands(stored, tmp_path, place):
    a = stored("A", random_matrix(30, 30, 3, 19))
    before = files(a.url)
    with pytest.raises(InputError, match="nor lie in one or around one"):
        api.multiply(a, a, tmp_path / place, overwrite=True)
    assert files(a.url) == before


@pytest.mark.slow
def test_matrices_without_columns_go_through_workers(stored, tmp_path):
    a, b = stored("A", sp.csr_array((4, 5))), stored("B", sp.csr_array((5, 0)))
    api.multiply(a, b, tmp_path / "C.zarr", workers=1)
    assert spdist.open(tmp_path / "C.zarr").shape == (4, 0)


@pytest.mark.parametrize("workers", [-1, 0, 1.5, "2", True])
def test_a_number_of_workers_is_one(stored, tmp_path, workers):
    a = stored("A", random_matrix(30, 30, 3, 20))
    for run in (lambda **k: api.multiply(a, a, tmp_path / "C.zarr", **k), lambda **k: api.reduce(a, a, "nnz", **k)):
        with pytest.raises(InputError, match="must be a whole number of at least 1"):
            run(workers=workers)


def test_less_memory_than_it_was_begun_with_is_refused(stored, tmp_path, executor, monkeypatch):
    a, target = stored("A", random_matrix(3000, 3000, 20, 21)), tmp_path / "C.zarr"
    monkeypatch.setattr(
        "spdist.scheduler.execution.driver.ProductDriver.run", lambda driver: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        api.multiply(a, a, target, memory_limit="64MiB", grid=(3, 1, 1), **executor)
    monkeypatch.undo()
    with pytest.raises(ResumeError, match=r"take up to .* MiB on a worker, more than memory_limit=1MiB"):
        api.multiply(a, a, target, memory_limit="1MiB", resume=True)
    api.multiply(a, a, target, memory_limit="64MiB", resume=True, **executor)
    assert api.verify(a, a, target).ok


def test_a_scheduler_that_takes_no_plugin_is_named(scheduler, caplog, monkeypatch):
    def refuse(self, plugin):
        raise ModuleNotFoundError("No module named 'spdist'")

    monkeypatch.setattr("distributed.Client.register_plugin", refuse)
    with (
        caplog.at_level(logging.WARNING, "spdist"),
        connect(workers=None, scheduler=scheduler, processes=True, blocks=1),
    ):
        pass
    assert f"the scheduler at {scheduler} takes no plugin (No module named 'spdist')" in caplog.text


@pytest.fixture
def at_once(monkeypatch):
    """Let workers start while the plan is made, however small the product."""
    monkeypatch.setattr("spdist.jobs.starting.workers.MAX_BLOCK_PRODUCTS", 0)


def test_workers_start_while_the_plan_is_made(stored, tmp_path, monkeypatch, at_once):
    m = random_matrix(300, 300, 5, 10)
    a = stored("A", m)
    make, alive = planner.make_plan, []

    def slow(*args, **kwargs):
        deadline = time.monotonic() + 90
        while not workers_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        alive.append(len(workers_alive()))
        return make(*args, **kwargs)

    monkeypatch.setattr(planner, "make_plan", slow)
    api.multiply(a, a, tmp_path / "C.zarr", workers=1)
    assert alive == [1]
    assert not workers_alive()
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


def test_a_plan_that_is_refused_leaves_no_worker_and_no_file(stored, tmp_path, at_once):
    a = stored("A", random_matrix(300, 300, 5, 11))
    with pytest.raises(MemoryBoundError):
        api.multiply(a, a, tmp_path / "C.zarr", workers=1, memory_limit="1KiB")
    assert not workers_alive()
    assert not (tmp_path / "C.zarr").exists()


@pytest.mark.parametrize(("place", "grid"), [("no/such/C.zarr", None), ("A.zarr", None), ("C.zarr", (500, 1, 1))])
def test_bad_input_is_refused_before_workers_start(stored, tmp_path, monkeypatch, at_once, place, grid):
    a, b = stored("A", random_matrix(300, 300, 5, 12)), stored("B", random_matrix(300, 300, 5, 13))
    monkeypatch.setattr("spdist.jobs.starting.workers.connect", lambda **_: pytest.fail("workers were started"))
    with pytest.raises(InputError):
        api.multiply(b, a, tmp_path / place, workers=1, grid=grid)


def test_workers_for_several_products(stored, tmp_path):
    m = random_matrix(500, 500, 5, 1)
    a = stored("A", m)
    with workers(2) as scheduler:
        for engine in ("numba", "scipy"):
            report = api.multiply(a, a, tmp_path / engine, engine=engine, grid=(6, 1, 1), scheduler=scheduler)
            assert report.workers == 2
            assert_is_product(read(tmp_path / engine), m, m, 1e-12)


@pytest.mark.parametrize(("asked", "said"), [
    ({"count": 0}, "count=0"), ({"engine": "hybrid"}, "engine='hybrid' starts no workers"), ({"engine": "cuda"}, "GPU"),
])  # fmt: skip
def test_workers_that_there_are_not(monkeypatch, asked, said):
    monkeypatch.setattr("spdist.scheduler.execution.worker_process.count_gpus", lambda: 0)
    with pytest.raises(InputError, match=said), workers(**{"count": 1} | asked):
        pass


def test_a_small_memory_limit_is_kept(tmp_path):
    """B is read block by block, and the allocator keeps little of what was read."""
    for name, nrows in (("A", 150_000), ("B", 500_000)):
        spdist.generate("erdos-renyi", tmp_path / f"{name}.zarr", nrows=nrows, ncols=500_000, per_row=5.0)
    a, b, limit = tmp_path / "A.zarr", tmp_path / "B.zarr", "32MiB"
    assert not spdist.plan(a, b, memory_limit=limit).resident
    report = spdist.multiply(a, b, tmp_path / "C.zarr", memory_limit=limit, workers=1)
    assert report.blocks > 8
    assert report.peak_memory <= 32 << 20


def test_blocks_of_many_rows(tmp_path):
    """Their lengths are more than Dask sends in one part."""
    n = 17 << 20
    m = sp.csr_array((np.ones(1000), (np.arange(1000) * 1000, np.arange(1000) * 1000)), shape=(n, n))
    spdist.save(tmp_path / "A.zarr", m)
    report = spdist.multiply(
        tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr", memory_limit="3GiB", workers=1
    )
    assert (report.nnz, report.blocks) == (1000, 1)


def test_a_record_has_what_workers_publish_before_the_first_block(stored, tmp_path, monkeypatch):
    """Workers publish as soon as they have the job; a record that missed it would wait for it at the end."""

    def slow_register(client, plugin, name):
        register(client, plugin, name)
        telemetry = CONTEXTS[plugin.name].telemetry
        telemetry.record(StageTiming("preprocess", 0, time.time(), 0.0, 0))
        while not telemetry.published:
            time.sleep(0.01)

    register = plugins.register
    monkeypatch.setattr(plugins, "PUBLISH_SECONDS", 0.01)
    monkeypatch.setattr(plugins, "register", slow_register)
    a = stored("A", sp.random_array((60, 60), density=0.1, format="csr", random_state=0))
    record = tmp_path / "run.jsonl"
    with connect(workers=1, scheduler=None, security=None, processes=False, engine="numba", blocks=7) as client:
        report = api.multiply(a, a, tmp_path / "C.zarr", grid=(7, 1, 1), scheduler=client, record=record)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    written = sum(line.get("stage") in report.stages for line in lines)
    assert written == sum(total["tasks"] for total in report.stages.values())
