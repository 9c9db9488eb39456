"""Connections that are open and carry nothing: streams are tried and given up, questions are asked again."""

from __future__ import annotations

import asyncio
import time

import pytest
from distributed import LocalCluster

from spdist.scheduler.clusters import client as clients
from spdist.scheduler.clusters.client import RunClient
from spdist.scheduler.executors.supervision.streams import StreamTuning, repair_streams
from tests.test_cli import wait_for

QUICK = StreamTuning(tries=5, pause_seconds=0.3)


@pytest.fixture
def cluster():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as started:
        yield started


@pytest.fixture
def client(cluster):
    """Return a client of a scheduler that it did not start."""
    with RunClient(cluster.scheduler_address) as connected:
        yield connected


def swallow(*messages) -> None:
    """Take messages, and deliver none."""


def test_streams_that_carry_are_left_alone(client, caplog):
    repair_streams(client, None, QUICK)
    assert not [record for record in caplog.records if record.name == "spdist"]
    assert client.submit(int, 5).result(90) == 5


def test_a_client_that_hears_nothing_gives_the_scheduler_up(cluster, client, caplog):
    cluster.scheduler.client_comms[client.id].send = swallow
    repair_streams(client, None, QUICK)
    wait_for(lambda: client.lost)
    assert "tells this client nothing any more" in caplog.text


@pytest.mark.parametrize("way", ["hears nothing", "says nothing"])
def test_a_worker_without_its_stream_is_removed(cluster, client, caplog, way):
    worker = cluster.workers[0]
    if way == "hears nothing":
        cluster.scheduler.stream_comms[worker.address].send = swallow
    else:
        worker.batched_stream.send = swallow
    future = client.submit(int, 5, workers=[worker.address], allow_other_workers=True, pure=False)
    time.sleep(0.2)
    assert future.status == "pending"
    repair_streams(client, None, QUICK)
    assert f"worker {worker.address} answers questions, but no longer hears and is heard" in caplog.text
    assert future.result(90) == 5
    assert cluster.workers[1].address not in caplog.text


def test_a_worker_that_fetches_for_ever_is_removed(cluster, client, caplog):
    holder, fetcher = (worker.address for worker in cluster.workers.values())
    answer, asked = cluster.workers[0].handlers["get_data"], list[int]()

    async def once_never(comm, **options):
        asked.append(1)
        if len(asked) == 1:
            await asyncio.sleep(60)
        return await answer(comm, **options)

    cluster.workers[0].handlers["get_data"] = once_never
    there = client.submit(int, 5, workers=[holder], pure=False)
    future = client.submit(int, there, workers=[fetcher], allow_other_workers=True, pure=False)
    wait_for(lambda: asked)
    fetching = repair_streams(client, None, QUICK)
    assert fetching == {(fetcher, there.key)}
    assert "answers questions" not in caplog.text
    repair_streams(client, fetching, QUICK)
    assert f"worker {fetcher} answers questions, but no longer hears another one" in caplog.text
    assert future.result(90) == 5


def hang(client, cluster, times: int) -> None:
    """Let a scheduler leave a question unanswered, some times."""
    answer, asked = cluster.scheduler.handlers["ncores"], list[int]()

    async def slow(*args, **options):
        asked.append(1)
        if len(asked) <= times:
            await asyncio.sleep(60)
        return answer(*args, **options)

    cluster.scheduler.handlers["ncores"] = slow


def test_a_question_without_an_answer_is_asked_again(cluster, client, monkeypatch):
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.3)
    hang(client, cluster, 1)
    assert sorted(client.nthreads().values()) == [1, 1]


def test_a_scheduler_that_never_answers_is_told(cluster, client, monkeypatch):
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.3)
    hang(client, cluster, 5)
    with pytest.raises(TimeoutError, match="gave no answer for 1 s"):
        client.nthreads()
