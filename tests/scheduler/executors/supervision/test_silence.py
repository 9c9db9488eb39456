"""Workers without a sign of life: who is silent, whose blocks are given away, who may write, who comes back."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace

import dask
import psutil
import pytest
from distributed import Client, LocalCluster, Reschedule, get_worker
from distributed.core import Status

import spdist
from spdist.scheduler.executors.supervision import monitor as monitors
from spdist.scheduler.executors.supervision import silence
from spdist.scheduler.executors.supervision.calls import remove_worker
from spdist.scheduler.executors.supervision.monitor import MonitorTuning
from spdist.scheduler.executors.supervision.silence import SignsOfLife, come_back, wait_until_known
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.test_cli import wait_for

HELD = {"a": 2, "b": 2, "c": 0}


def test_who_is_silent():
    """Worker `b`: `a` is heard, and `c` has no block until the end."""
    life = SignsOfLife(0.0)
    for second in range(10):
        assert life.find_silent({"a": second, "b": 0.0, "c": 0.0}, HELD, second, 10) == []
    assert life.find_silent({"a": 10, "b": 0.0, "c": 0.0}, HELD, 10, 10) == ["b"]
    assert life.find_silent({"a": 11, "b": 0.0, "c": 0.0}, HELD | {"c": 1}, 11, 10) == ["b"]
    assert life.find_silent({"a": 12, "b": 1.0, "c": 0.0}, HELD, 12, 10) == []  # heard at last
    assert life.find_silent({"a": 12, "c": 0.0}, HELD, 13, 10) == []


@pytest.mark.parametrize("heard", [{"a": 0.0, "b": 0.0}, {"a": 0.0}, {}])
def test_nobody_is_silent_while_the_scheduler_hears_nobody(heard):
    life = SignsOfLife(0.0)
    assert all(life.find_silent(heard, HELD, second, 10) == [] for second in range(100))


def test_a_pause_of_the_whole_machine_is_no_silence():
    life = SignsOfLife(0.0)
    life.find_silent({"a": 0.0, "b": 0.0}, HELD, 0.0, 10)
    assert life.find_silent({"a": 3600.0, "b": 0.0}, HELD, 3600.0, 10) == []


def test_blocks_of_a_silent_worker_go_to_others_and_it_comes_back(stored, tmp_path, caplog, monkeypatch):
    """One of two processes is stopped as if its host were cut off; it goes on when the other has its blocks."""
    monkeypatch.setattr(monitors, "TUNING", MonitorTuning(silent_seconds=5.0))
    m = random_matrix(2000, 2000, 10, 2)
    a, stopped = stored("A", m), list[psutil.Process]()
    names = list[str]()
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": ":0"}
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "90s"}),  # a host keeps a nanny for longer
        LocalCluster(**options) as cluster,
        Client(cluster) as client,
    ):

        def cut(progress: spdist.Progress) -> None:
            if progress.blocks >= 2 and not stopped:
                address, pid = min(client.run(os.getpid).items())
                stopped.append(psutil.Process(pid))
                stopped[0].suspend()
                names.append(address)
            if "no sign of life" in caplog.text:
                stopped[0].resume()

        callbacks = spdist.Callbacks(progress=cut)
        report = spdist.multiply(a, a, tmp_path / "C.zarr", grid=(60, 1, 1), scheduler=cluster.scheduler_address,
                                 callbacks=callbacks)  # fmt: skip
        wait_for(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 2)  # its nanny has started it anew
        assert stopped[0].pid not in client.run(os.getpid).values()
    assert report.state == "computed"
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    lines = [record.getMessage() for record in caplog.records if record.name == "spdist"]
    assert sum(line.startswith(f"worker {names[0]} has given no sign of life for 5 s: its ") for line in lines) == 1
    assert not any(line.startswith(f"worker {names[0]} was lost") for line in lines)


def test_only_a_worker_that_its_scheduler_knows_may_write(monkeypatch):
    asked = []

    def write() -> str:
        try:
            wait_until_known(get_worker())
        except Reschedule:
            return "refused"
        return "written"

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        worker = cluster.workers[0]
        answer = cluster.scheduler.handlers["ncores"]
        cluster.scheduler.handlers["ncores"] = lambda workers=None: asked.append(workers) or answer(workers)
        with Client(cluster) as client:
            assert client.submit(write, pure=False).result() == "written"
            assert client.submit(write, pure=False).result() == "written"
            assert asked.count([worker.address]) == 1  # the first answer lasts for a while
            silence._KNOWN_AT.clear()
            remove_worker(client, worker.address, 10.0)
            with pytest.raises(Reschedule):
                wait_until_known(worker)


class CutWorker:
    """What `come_back` uses of a worker, and whether its nanny ended with it."""

    nanny, address = "tcp://nanny", "tcp://worker"

    def __init__(self, port: int, status: Status = Status.running) -> None:
        self.scheduler = SimpleNamespace(address=f"tcp://127.0.0.1:{port}")
        self.status, self.nanny_ended = status, list[bool]()

    async def close(self, nanny: bool = True, reason: str = "") -> None:
        self.nanny_ended.append(nanny)


@pytest.mark.parametrize(("reason", "status", "listens", "ends"), [
    (silence.CUT[0], Status.running, True, False),
    (silence.CUT[1], Status.paused, True, False),
    (silence.CUT[0], Status.running, False, True),  # the scheduler has ended
    (silence.CUT[1], Status.closing, True, True),  # the scheduler lets it go
    ("worker-close", Status.running, True, True),
])  # fmt: skip
def test_a_worker_that_was_cut_off_starts_anew(monkeypatch, caplog, reason, status, listens, ends):
    monkeypatch.setattr(silence, "ASK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker = CutWorker(server.getsockname()[1], status)
        come_back(worker)
        come_back(worker)  # as each job does
        if not listens:
            server.close()
        asyncio.run(worker.close(reason=reason))
    assert worker.nanny_ended == [ends]
    assert ("the worker starts anew" in caplog.text) == (not ends)
