"""Messages while a run waits: no workers, nothing finished, workers that join and leave."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from distributed import LocalCluster

import spdist
from spdist.api import products as api
from spdist.scheduler.execution import stages
from spdist.scheduler.execution.telemetry import InFlight
from spdist.scheduler.executors.supervision import monitor as monitors
from spdist.scheduler.executors.supervision.monitor import Monitor, MonitorTuning
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read

QUICK = MonitorTuning(no_workers_seconds=0.2, idle_seconds=0.2, tick_seconds=0.02)


@pytest.fixture
def quick(monkeypatch):
    """Let a monitor speak after a fraction of a second."""
    monkeypatch.setattr(monitors, "TUNING", QUICK)


def fake_client(workers: int = 1, processing: dict | None = None) -> SimpleNamespace:
    """Return what a monitor uses of a client."""
    return SimpleNamespace(
        status="running",
        cluster=None,
        scheduler=SimpleNamespace(address="tcp://node:8786", processing=None),
        sync=lambda call, **options: processing or {},
        subscribe_topic=lambda topic, handler: None,
        unsubscribe_topic=lambda topic: None,
        _scheduler_identity={"n_workers": workers},
    )


def wait_for_lines(caplog, count: int) -> list[str]:
    end = time.monotonic() + 90
    while len(own_lines(caplog)) < count and time.monotonic() < end:
        time.sleep(0.01)
    return own_lines(caplog)


def own_lines(caplog) -> list[str]:
    """Return what the package said, without what Dask logs."""
    return [record.getMessage() for record in caplog.records if record.name == "spdist"]


def test_no_workers_is_said_again_and_again(caplog):
    with Monitor(fake_client(0), "job", QUICK):
        lines = wait_for_lines(caplog, 3)
    assert re.match(r"no workers at tcp://node:8786 for \d+ s: waiting; start some with `dask worker", lines[0])


def test_the_intervals_between_lines_grow():
    clock = monitors._Clock(10.0, MonitorTuning(most_seconds=50.0))
    assert [second for second in range(1, 250) if clock.due(second)] == [10, 20, 40, 80, 130, 180, 230]


def test_nothing_is_said_while_blocks_finish(caplog):
    """A block finishes between any two looks, however long they take."""
    client, looks = fake_client(), threading.Semaphore(0)

    class Identity(dict):
        def get(self, *words):
            monitor.record_in_flight(InFlight(monitor._in_flight.finished + 1, 2, (0, 0, 10)))
            looks.release()
            return 1

    client._scheduler_identity = Identity()
    with Monitor(client, "job", QUICK) as monitor:
        for _ in range(30):
            looks.acquire()
    assert not own_lines(caplog)


@pytest.mark.parametrize(("processing", "where"), [
    ({"tcp://w:1": [("preprocess-other", 4, 0), ("multiply-job", 4, 0)]}, "is in stage multiply on worker tcp://w:1"),
    ({}, "waits for a worker"),
])  # fmt: skip
def test_what_is_in_flight_when_nothing_finishes(caplog, processing, where):
    with Monitor(fake_client(1, processing), "job", QUICK) as monitor:
        monitor.record_in_flight(InFlight(7, 3, (4, 1000, 2500)))
        line = wait_for_lines(caplog, 1)[0]
    assert line == f"nothing finished for 0 s: 3 blocks are in flight; the oldest, rows 1,000 to 2,500, {where}"


def test_what_is_waited_for_before_the_first_block(caplog):
    with Monitor(fake_client(), "job", QUICK) as monitor, monitor.waiting_for("the plan"):
        assert wait_for_lines(caplog, 1)[0] == "waiting for the plan for 0 s"


def test_connections_are_tried_when_nothing_finishes(monkeypatch):
    tried = threading.Event()
    monkeypatch.setattr(monitors, "repair_streams", lambda client, fetching: tried.set())
    with Monitor(fake_client(), "job", replace(QUICK, repair_seconds=0.3)):
        assert tried.wait(200)


def test_of_a_lost_worker_the_blocks_are_counted(caplog):
    client, handlers = fake_client(), {}
    client.subscribe_topic = handlers.__setitem__
    with Monitor(client, "job") as monitor:
        monitor.record_in_flight(InFlight(7, 2, held={"tcp://w:1": 2}))
        for worker in ("tcp://w:1", "tcp://w:2"):
            handlers[monitors.WORKER_EVENTS]((0.0, {"action": "remove-worker", "worker": worker}))
    assert own_lines(caplog) == [
        "worker tcp://w:1 was lost: its 2 blocks are computed again", "worker tcp://w:2 was lost: it held no block",
    ]  # fmt: skip


def test_a_run_without_workers_says_so_and_goes_on_when_they_come(stored, tmp_path, caplog, quick):
    m = random_matrix(300, 300, 5, 1)
    a = stored("A", m)
    options = {"n_workers": 0, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster:

        def start() -> None:
            wait_for_lines(caplog, 1)
            cluster.scale(1)

        thread = threading.Thread(target=start)
        thread.start()
        started: list[int] = []
        callbacks = spdist.Callbacks(started=lambda link: started.append(len(cluster.scheduler.workers)))
        api.multiply(a, a, tmp_path / "C.zarr", scheduler=cluster.scheduler_address, callbacks=callbacks)
        thread.join()
    assert started == [1]
    assert own_lines(caplog)[0].startswith("no workers at inproc://")
    assert any(re.fullmatch("worker inproc://.* has joined", line) for line in own_lines(caplog))
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)


@pytest.mark.parametrize("reduce", [False, True])
def test_a_stage_that_hangs_is_named(stored, tmp_path, scheduler, caplog, monkeypatch, quick, reduce):
    a = stored("A", random_matrix(300, 300, 5, 2))
    preprocess = stages.preprocess

    def hang(context, task, *rest):
        end = time.monotonic() + 90
        while "the oldest" not in caplog.text and time.monotonic() < end:  # lines of a slow start come before
            time.sleep(0.01)
        return preprocess(context, task, *rest)

    monkeypatch.setitem(stages.STAGES, "preprocess", hang)
    monkeypatch.setattr(stages, "preprocess", hang)
    if reduce:
        api.reduce(a, a, "nnz", scheduler=scheduler)
    else:
        api.multiply(a, a, tmp_path / "C.zarr", grid=(4, 1, 1), scheduler=scheduler)
    stage = "reduce" if reduce else "preprocess"
    assert re.search(rf"the oldest, rows 0 to \d+, is in stage {stage} on worker inproc://", caplog.text)
