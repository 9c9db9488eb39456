"""A resident B that several processes read together, and before the plan: pieces, locks, removal of files, errors."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from distributed import Client
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import spdist
from spdist.api import products as api
from spdist.errors import CorruptError, MatrixError, MemoryBoundError
from spdist.foundation.units import parse_bytes
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.scheduler.clusters.security import security_for
from spdist.scheduler.execution.operands import resident as sharing
from spdist.scheduler.execution.operands.resident import ResidentMatrix, SharingTuning
from spdist.scheduler.execution.worker import CONTEXTS, check_rows
from spdist.scheduler.executors.clients.cluster import workers
from spdist.scheduler.executors.clients.members import share_hosts, shared_name
from spdist.scheduler.executors.plugins import PREFETCHED
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.request import PlanRequest
from spdist.scheduler.planner.tuning import BlockTuning, PlannerTuning
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter
from tests.conftest import random_matrix
from tests.scheduler.execution.test_driver import workers_alive
from tests.support.seals import without_seal

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a system without such memory")


def files() -> set[str]:
    """Return the names of shared files of this user."""
    return {path.name for path in sharing.SHARING.folder.glob(f"{sharing.file_prefix()}*")}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Cut pieces of a few Zarr chunks; files lie in a folder of the test's."""
    tuning = SharingTuning(folder=tmp_path / "shm", piece_bytes=1 << 12, least_bytes=1 << 12)
    tuning.folder.mkdir()
    monkeypatch.setattr(sharing, "SHARING", tuning)
    return tuning


def in_chunks(place: Path, m: sp.csr_matrix, length: int = 100) -> StoredMatrix:
    """Store a matrix in short Zarr chunks, canonical or not."""
    writer = MatrixWriter(str(place), m.shape[1], m.dtype, {})
    writer.layout = replace(writer.layout, chunk=length)
    writer.append(CSR(m.indptr.astype(np.int64), m.indices.astype(np.int32), m.data, m.shape))
    writer.close()
    return open_matrix(place)


@pytest.fixture
def b(tmp_path, small):
    """Return a matrix of some dozen pieces."""
    return in_chunks(tmp_path / "B.zarr", random_matrix(900, 700, 9, 1))


def resident(b: StoredMatrix, name: str = "", **options) -> ResidentMatrix:
    return ResidentMatrix(b, lambda m: check_rows(m, "B"), name, **options)


def assert_same(found: CSR, b: StoredMatrix) -> None:
    whole = b.rows(0, b.nrows)
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        assert getattr(found, name).dtype == getattr(whole, name).dtype


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6), shape=st.tuples(st.integers(0, 300), st.integers(0, 300)), per_row=st.floats(0, 6),
    chunk=st.integers(1, 700), piece=st.integers(1, 1 << 14), shares=st.booleans(),
    dtype=st.sampled_from(["float64", "float32", "bool", "int16", "complex128"]),
)  # fmt: skip
def test_pieces_give_the_whole(tmp_path, small, seed, shape, per_row, chunk, piece, shares, dtype):
    name = uuid.uuid4().hex
    b = in_chunks(tmp_path / name, random_matrix(*shape, per_row, seed, dtype), chunk)
    held = resident(b, name if shares else "", tuning=replace(small, piece_bytes=piece))
    assert_same(held.get(), b)
    assert bool(files()) == (shares and b.nbytes >= small.least_bytes)
    held.drop()
    assert not files()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(1, 3_000) | st.integers(1, 10).map(lambda k: 300 * k),
    shares=st.booleans(),
)  # fmt: skip
def test_what_is_not_canonical_is_said_as_of_the_whole(tmp_path, small, at, shares):
    """Within a piece and from one to the next."""
    m = random_matrix(900, 700, 9, 1)
    row = int(np.searchsorted(m.indptr, at, side="right")) - 1
    assume(at != m.indptr[row])
    m.indices[at] = m.indices[at - 1]
    name = uuid.uuid4().hex
    b = in_chunks(tmp_path / name, m)
    held = resident(b, name if shares else "")
    with pytest.raises(MatrixError, match=f"row {row:,} holds a duplicate") as expected:
        check_canonical(b.rows(0, b.nrows), "B")
    for _ in range(2):  # and again, for who asks again
        with pytest.raises(MatrixError) as raised:
            held.get()
        assert str(raised.value) == str(expected.value)
    held.drop()
    assert not files()


@pytest.mark.parametrize("columns", [(3, 7, 5), (3, 5, 5)])
def test_columns_that_fall_from_one_piece_to_the_next_are_found(tmp_path, small, columns):
    """Though they rise in each, and above the last column but one."""
    m = CSR(np.array([0, 3]), np.array(columns, np.int32), np.ones(3), (1, 9))
    writer = MatrixWriter(str(tmp_path / "B.zarr"), 9, m.dtype, {})
    writer.layout = replace(writer.layout, chunk=2)
    writer.append(m)
    held = resident(writer.close(), tuning=replace(small, piece_bytes=1))
    with pytest.raises(MatrixError, match="row 0 "):
        held.get()


@pytest.mark.parametrize("damage", ["falls", "ends early"])
def test_offsets_that_do_not_fit(tmp_path, small, damage):
    m = random_matrix(900, 700, 9, 1)
    b = in_chunks(tmp_path / "B.zarr", m)
    offsets = m.indptr.astype(np.int64)
    if damage == "falls":
        offsets[450] = offsets[460] + 1
    else:
        offsets[-300:] = offsets[-300]
    without_seal(b.url)
    b = open_matrix(b.url)
    b.indptr.write_chunks(0, offsets)
    with pytest.raises(MatrixError, match=r"indptr falls after row|indptr ends at"):
        resident(b).get()


def test_two_read_each_piece_once(b, monkeypatch):
    """Each with descriptors of its own, as two processes have."""
    original, lengths = StoredMatrix.read_entries, []

    def counting(self, indices, data, origin, first, last):
        lengths.append(last - first)
        time.sleep(0.005)  # so that both have some
        return original(self, indices, data, origin, first, last)

    monkeypatch.setattr(StoredMatrix, "read_entries", counting)
    both = [resident(b, "two") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(ResidentMatrix.get, both))
    assert len(lengths) > 20
    assert sum(lengths) == b.nnz
    monkeypatch.undo()
    for held, m in zip(both, found, strict=True):
        assert isinstance(held.memory, sharing.SharedMemory)
        assert m.data.base is not None
        assert not m.data.flags.owndata  # so that `in_place` leaves it alone
    assert_same(found[0], b)
    found[0].data[0] += 1
    assert found[1].data[0] == found[0].data[0]


def test_the_last_to_leave_removes_the_file(b):
    held = [resident(b, "last") for _ in range(4)]
    found = [one.get() for one in held]
    for one in held[:3]:
        one.drop()
        assert len(files()) == 1
    with ThreadPoolExecutor(4) as threads:  # once more: nobody is hurt
        list(threads.map(ResidentMatrix.drop, held))
    assert not files()
    assert_same(found[0], b)  # who has it keeps it


def test_all_leave_at_once(b):
    for round_ in range(20):
        held = [resident(b, f"round{round_}") for _ in range(6)]
        for one in held:
            one.get()
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(ResidentMatrix.drop, held))
        assert not files()


HOLDER = """
import sys, time
from pathlib import Path
from spdist.scheduler.execution.operands import resident as sharing
from spdist.storage.matrix import StoredMatrix, open_matrix
tuning = sharing.SharingTuning(folder=Path(sys.argv[2]), piece_bytes=1 << 12, least_bytes=1 << 12)
read, seen = StoredMatrix.read_entries, []

def stuck(self, indices, data, origin, first, last):
    seen.append(first)
    if len(seen) > 5 and sys.argv[4] == "stuck":
        data[:] = -1
        print("holds\\n", end="", flush=True)  # several threads may be here: a line in one piece
        time.sleep(600)
    read(self, indices, data, origin, first, last)

StoredMatrix.read_entries = stuck
sharing.ResidentMatrix(open_matrix(sys.argv[1]), lambda m: None, sys.argv[3], tuning=tuning).get()
print("has all", flush=True)
time.sleep(600)
"""


def holder(b: StoredMatrix, name: str, how: str) -> subprocess.Popen:
    """Start a process that reads; return it when it has all pieces, or holds some that it does not finish."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, b.url, str(sharing.SHARING.folder), name, how],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == ("holds" if how == "stuck" else "has all")
    return process


def kill(process: subprocess.Popen) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_pieces_of_a_process_that_is_killed_are_read_by_another(b):
    process = holder(b, "killed", "stuck")
    held, found = resident(b, "killed"), []
    thread = threading.Thread(target=lambda: found.append(held.get()))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()  # waits for what is held
    kill(process)
    thread.join(200)
    assert_same(found[0], b)
    held.drop()
    assert not files()


def test_what_another_process_has_read_is_not_read_again(b, monkeypatch):
    process = holder(b, "there", "well")
    monkeypatch.setattr(StoredMatrix, "read_entries", lambda *_: pytest.fail("it was read again"))
    found = resident(b, "there").get()
    monkeypatch.undo()
    assert_same(found, b)
    kill(process)


def test_files_of_runs_that_were_killed_are_removed_by_the_next(b):
    dead, alive = holder(b, "dead", "stuck"), holder(b, "alive", "well")
    kill(dead)
    assert len(files()) == 2
    held = resident(b, "next")
    held.get()
    assert {name.rpartition("-")[2] for name in files()} == {"alive", "next"}
    kill(alive)
    held.drop()


def test_damage_is_named_to_all_and_nobody_hangs(b):
    chunk = Path(b.url) / "data" / "c" / "20"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes(bytes(content))
    both = [resident(b, "damaged") for _ in range(2)]

    def message(held: ResidentMatrix) -> str:
        with pytest.raises(CorruptError) as raised:
            held.get()
        held.drop()
        return str(raised.value)

    with ThreadPoolExecutor(2) as threads:
        messages = set(threads.map(message, both))
    with pytest.raises(CorruptError) as raised:
        b.rows(0, b.nrows)
    assert len(messages) == 1
    assert messages.pop().partition(" (")[0] == str(raised.value).partition(" (")[0]
    assert not files()


@pytest.mark.parametrize("why", ["no folder", "no room", "full", "another's", "a link", "no locks"])
def test_without_such_memory_it_is_read_alone(b, monkeypatch, caplog, tmp_path, why):
    tuning = sharing.SHARING
    path = tuning.folder / f"{sharing.file_prefix()}alone"
    if why == "no folder":
        tuning = replace(tuning, folder=tmp_path / "nowhere")
    elif why == "no room":
        tuning = replace(tuning, spare_share=1)
    elif why == "full":  # only when pages are asked for
        reserved, original = [], os.posix_fallocate

        def full(*arguments):
            reserved.append(1)
            if len(reserved) > 4:
                raise OSError(28, "No space left on device")
            original(*arguments)

        monkeypatch.setattr(os, "posix_fallocate", full)
    elif why == "another's":
        sharing._lock(os.open(path, os.O_CREAT | os.O_RDWR, 0o644), fcntl.F_RDLCK, sharing.USERS_BYTE)
    elif why == "a link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.delattr("fcntl.F_OFD_SETLK")
    with caplog.at_level(logging.INFO, "spdist"):
        held = resident(b, "alone", tuning=tuning)
        assert_same(held.get(), b)
        held.get()
    assert isinstance(held.memory, sharing.PrivateMemory)
    assert not isinstance(held.memory, sharing.SharedMemory)
    assert caplog.text.count("B is not shared") == 1
    assert why in ("another's", "a link") or not files()


def test_who_drops_it_stops_reading(b, monkeypatch, small):
    """Pieces that are being read are the last."""
    original, begun, dropped, reads = StoredMatrix.read_entries, threading.Event(), threading.Event(), []

    def waiting(*arguments):
        begun.set()
        dropped.wait(200)
        reads.append(1)
        original(*arguments)

    monkeypatch.setattr(StoredMatrix, "read_entries", waiting)
    held = resident(b, "dropped")
    held.begin()
    assert begun.wait(200)
    thread = threading.Thread(target=held.drop)
    thread.start()
    while not held._is_dropped:
        time.sleep(0.001)
    dropped.set()
    thread.join(200)
    assert not thread.is_alive()
    assert 1 <= len(reads) <= small.readers
    assert not files()
    with pytest.raises(CancelledError):
        held.get()


def test_values_are_cast_once(b):
    assert resident(b, dtype="complex128").get().dtype == np.dtype("complex128")


# -- before the plan ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "sizes_", "limit", "guesses"), [
    ("rmat", {"scale": 12, "edge_factor": 8}, "64MiB", (True, True)),
    ("rmat", {"scale": 12, "edge_factor": 8}, "1MiB", (False, False)),
    ("erdos-renyi", {"nrows": 20_000, "ncols": 20_000, "per_row": 6.0}, "64MiB", (True, True)),
    ("poisson", {"dims": (50, 50, 20), "points": 27}, "64MiB", (True, False)),
])  # fmt: skip
def test_what_is_said_to_stay_does(tmp_path, kind, sizes_, limit, guesses, monkeypatch):
    """On cores and on GPUs, where bands are read of a B whose rows are asked for by their neighbours."""
    monkeypatch.setattr("spdist.storage.writer.CHUNK_LENGTH", 1 << 12)
    tuning = PlannerTuning(blocks=BlockTuning(gpu_products=1 << 12))
    a = spdist.generate(kind, tmp_path / "A.zarr", **sizes_)
    bytes_ = parse_bytes(limit)
    for engine, guess in zip(("numba", "cuda"), guesses, strict=True):
        limits = {"memory_limit": bytes_, "host_limit": None if engine == "numba" else bytes_}
        request = PlanRequest(a, a, engine, **limits)
        assert planner.will_be_resident(request, tuning) == guess
        if guess:
            assert planner.make_plan(request, tuning=tuning).resident
    assert not planner.will_be_resident(PlanRequest(a, a, "numba", bytes_, grid=(2, 2, 1)))


def test_of_a_damaged_a_nothing_is_said(b):
    for path in (Path(b.url) / "indices" / "c").iterdir():
        path.write_bytes(b"")
    assert not planner.will_be_resident(PlanRequest(b, b, "cuda", 1 << 30))


@pytest.fixture
def job_files(monkeypatch) -> Callable[[], set[str]]:
    """Return a function that returns the names of shared files of this test's jobs: other processes have some too."""
    names: list[str] = []

    def recorded(client: Client) -> str:
        names.append(shared_name(client))
        return names[-1]

    monkeypatch.setattr("spdist.jobs.starting.workers.shared_name", recorded)
    monkeypatch.setattr("spdist.scheduler.executors.dask.shared_name", recorded)
    return lambda: {name for name in files() if name.rpartition("-")[2] in names}


@pytest.fixture
def large(stored, monkeypatch):
    """Return a matrix of more than a piece, and itself; two workers share it, and begin ahead of the plan."""
    monkeypatch.setattr("spdist.scheduler.executors.clients.members.SHARERS", 2)
    monkeypatch.setattr("spdist.jobs.starting.workers.MAX_BLOCK_PRODUCTS", 0)
    m = random_matrix(40_000, 40_000, 19, 3)
    a = stored("A", m)
    assert a.nbytes > sharing.SHARING.least_bytes
    return a, m


def left_behind() -> tuple[int, int]:
    """Return how many jobs a worker prefetches for, and has installed; for `Client.run`."""
    return len(PREFETCHED), len(CONTEXTS)


def mapped_files() -> list[str]:
    """Return the paths of shared files that workers map; one that is ending maps none."""
    paths: list[str] = []
    for worker in workers_alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            paths += [each.path for each in worker.memory_maps() if "/spdist-" in each.path]
    return paths


@pytest.mark.parametrize("given", [False, True])
def test_workers_share_b_and_leave_nothing(large, job_files, tmp_path, monkeypatch, given):
    """Read while the plan is made, or not; beyond what workers hold idle."""
    a, _ = large
    maps, early = [], []
    make = planner.make_plan

    def slow(*arguments, **options):
        late = time.monotonic() + 90
        while not job_files() and time.monotonic() < late:
            time.sleep(0.01)
        early.extend(job_files())
        return make(*arguments, **options)

    monkeypatch.setattr(planner, "make_plan", slow)
    callbacks = spdist.Callbacks(progress=lambda _: maps.extend(mapped_files()))
    options = {"grid": (12, 1, 1), "callbacks": callbacks}
    if given:
        with workers(2) as scheduler, Client(scheduler, security=security_for(scheduler, None)) as client:
            report = api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, **options)
            assert set(client.run(left_behind).values()) == {(0, 0)}
    else:
        report = api.multiply(a, a, tmp_path / "C.zarr", workers=2, **options)
    assert len(early) == 1
    assert len(maps) >= 2
    assert {Path(path).name.split()[0] for path in maps} == set(early)
    assert not job_files()
    assert report.peak_memory > a.nbytes
    assert report.stages["multiply"]["tasks"] >= 12
    assert api.verify(a, a, tmp_path / "C.zarr").ok


def test_a_worker_that_is_killed_finds_b_again(large, job_files, tmp_path):
    a, _ = large
    victims: list[int] = []

    def kill_one(progress) -> None:
        if progress.blocks >= 2 and not victims:
            victims.append(workers_alive()[0].pid)
            os.kill(victims[0], signal.SIGKILL)

    calls = spdist.Callbacks(progress=kill_one)
    report = api.multiply(a, a, tmp_path / "C.zarr", workers=2, grid=(12, 1, 1), callbacks=calls)
    assert victims
    assert report.phases["close"] < 15  # nobody waits for the one that died
    assert api.verify(a, a, tmp_path / "C.zarr").ok
    assert not job_files()


def test_a_refused_plan_leaves_nothing_on_workers(large, job_files, tmp_path, monkeypatch):
    a, _ = large
    refusal = MemoryBoundError("row 7 of A expands to too much")

    def refuse(*_, **__):
        time.sleep(0.5)
        raise refusal

    monkeypatch.setattr(planner, "make_plan", refuse)
    with workers(2) as scheduler, Client(scheduler, security=security_for(scheduler, None)) as client:
        for run in (
            lambda: api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler),
            lambda: api.reduce(a, a, "nnz", scheduler=scheduler),
        ):
            with pytest.raises(MemoryBoundError) as raised:
                run()
            assert raised.value is refusal
            assert set(client.run(left_behind).values()) == {(0, 0)}
            assert not job_files()
    assert not (tmp_path / "C.zarr").exists()


def test_a_wrong_guess_is_dropped(large, job_files, tmp_path, monkeypatch):
    """The plan cuts B: what was read of it is let go before blocks are made."""
    monkeypatch.setattr(planner, "will_be_resident", lambda *_, **__: True)
    a, _ = large
    maps: list[str] = []
    callbacks = spdist.Callbacks(progress=lambda _: maps.extend(mapped_files()))
    api.multiply(a, a, tmp_path / "C.zarr", workers=2, grid=(3, 2, 2), callbacks=callbacks)
    assert not maps
    assert not job_files()
    assert api.verify(a, a, tmp_path / "C.zarr").ok


def test_a_reduction_begins_before_its_plan_too(large, monkeypatch):
    a, m = large
    begun, make = [], planner.make_plan

    def watched(*arguments, **options):
        late = time.monotonic() + 90
        while not workers_alive() and time.monotonic() < late:
            time.sleep(0.01)
        begun.append(len(workers_alive()))
        return make(*arguments, **options)

    monkeypatch.setattr(planner, "make_plan", watched)
    assert api.reduce(a, a, "nnz", workers=2) > m.nnz
    assert begun[0] >= 1


@pytest.mark.parametrize("damage", ["altered", "not canonical"])
def test_errors_arrive_from_workers_as_they_are(large, job_files, tmp_path, damage):
    a, m = large
    if damage == "altered":
        b, chunk = api.save(tmp_path / "B.zarr", m), tmp_path / "B.zarr" / "data" / "c" / "3"
        content = bytearray(chunk.read_bytes())
        content[len(content) // 2] ^= 4
        chunk.write_bytes(bytes(content))
        expected = CorruptError, "chunk 3 of array 'data'"
    else:
        row = int(np.flatnonzero(np.diff(m.indptr) > 1)[700])
        m.indices[m.indptr[row] + 1] = m.indices[m.indptr[row]]
        b, expected = in_chunks(tmp_path / "B.zarr", m, 1 << 17), (MatrixError, f"row {row:,} holds a duplicate")
    with pytest.raises(expected[0], match=expected[1]):
        api.multiply(a, b, tmp_path / "C.zarr", workers=2)
    assert not job_files()
    assert not workers_alive()


@pytest.mark.parametrize(("hosts", "share"), [
    ([], True), ("ab", False), ("aab", False), ("aba", False), ("abaa", True), ("abcabc", False),
])  # fmt: skip
def test_hosts_of_several_workers_share(hosts, share):
    class Scheduler:
        def scheduler_info(self, n_workers):
            return {"workers": {f"tcp://{host}:{port}": {} for port, host in enumerate(hosts)}}

    assert share_hosts(Scheduler()) == share


def test_memory_goes_with_the_last_who_holds_it(b):
    """And not with the next garbage collection."""
    gc.collect()
    gc.disable()
    try:
        held = resident(b)
        memory = weakref.ref(held.get().data)
        del held
        assert memory() is None
    finally:
        gc.enable()
