"""Calls to workers that die: real processes, killed while they start, load the product, and multiply."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, WorkerPlugin
from distributed.comm.core import CommClosedError

import spdist
from spdist.api import products as api
from spdist.errors import SpdistError
from spdist.scheduler.executors.clients.cluster import connect
from spdist.scheduler.executors.supervision import calls
from spdist.scheduler.executors.supervision.calls import describe, persistent, register, within
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read, workers_alive


class Fragile(WorkerPlugin):
    """Kills the first worker that loads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def setup(self, worker) -> None:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_it_loads_a_plugin(tmp_path, caplog):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        before = set(client.scheduler_info(n_workers=-1)["workers"])
        register(client, Fragile(tmp_path / "mark"), "fragile")
        assert re.search(r"a worker was lost while it loaded the product \(CommClosedError", caplog.text)
        end = time.monotonic() + 60
        while time.monotonic() < end and len(client.scheduler_info(n_workers=-1)["workers"]) < 2:
            time.sleep(0.05)
        after = set(client.scheduler_info(n_workers=-1)["workers"])
        assert len(before & after) == 1
        assert client.run(lambda dask_worker: "fragile" in dask_worker.plugins) == dict.fromkeys(after, True)


def test_what_a_plugin_raises_is_raised(scheduler):
    class Broken(WorkerPlugin):
        def setup(self, worker) -> None:
            raise SpdistError("broken")

    with Client(scheduler) as client:
        with pytest.raises(SpdistError, match="broken"):
            register(client, Broken(), "broken")
        calls.unregister(client, "broken")


@pytest.mark.parametrize("when", ["starting", "planned", "started"])
def test_a_worker_that_is_killed_while_a_product_starts(stored, tmp_path, caplog, when):
    m = random_matrix(2000, 2000, 10, 1)
    a, victims = stored("A", m), []

    def kill(*_) -> None:
        while not (alive := workers_alive()):
            time.sleep(0.01)
        if not victims:
            victims.append(alive[0].pid)
            os.kill(alive[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    if when == "starting":
        thread.start()
    callbacks = spdist.Callbacks(**({} if when == "starting" else {when: lambda _: thread.start()}))
    api.multiply(a, a, tmp_path / "C.zarr", grid=(10, 1, 1), workers=1, callbacks=callbacks)
    thread.join(200)
    assert victims
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    assert all(message for message in caplog.messages)


def test_messages_are_never_empty():
    assert describe(CommClosedError()) == "CommClosedError"
    assert describe(ValueError("two\nlines")) == "ValueError: two lines"


def test_a_start_that_fails_is_tried_again(caplog, monkeypatch):
    monkeypatch.setattr(calls, "PAUSE_SECONDS", 0.0)
    tried = []

    def start() -> str:
        tried.append(1)
        if len(tried) < 3:
            raise RuntimeError("Nanny failed to start.")
        return "up"

    assert persistent(start, "2 workers did not start") == "up"
    assert caplog.messages[0] == (
        "2 workers did not start (RuntimeError: Nanny failed to start.): trying again, attempt 2 of 5"
    )
    tried[:] = [1] * -10
    monkeypatch.setattr(calls, "ATTEMPTS", 1)
    with pytest.raises(SpdistError, match=r"did not start \(RuntimeError: Nanny"):
        persistent(lambda: (_ for _ in ()).throw(RuntimeError("Nanny failed")), "2 workers did not start")


def test_a_start_that_hangs_is_given_up():
    with pytest.raises(SpdistError, match="2 workers did not start within 0 s: look for what stops them"):
        within(0.05, lambda: time.sleep(5), "2 workers did not start")


def test_a_cluster_leaves_the_log_of_the_caller_alone(caplog):
    with connect(workers=None, scheduler=None, processes=False, blocks=1):
        logging.getLogger("spdist").warning("said")
        logging.getLogger("distributed.scheduler").error("not said")
    assert caplog.messages == ["said"]
