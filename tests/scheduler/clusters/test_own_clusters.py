"""A client or a cluster of the caller's in place of an address: used with its keys, and left as it was."""

from __future__ import annotations

import asyncio
import re
import time

import dask.config
import numpy as np
import pytest
from distributed import Client, LocalCluster, Security
from distributed.client import _get_global_client

import spdist
from spdist.scheduler.executors.clients.running_scheduler import NoStealing
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.test_cli import wait_for


@pytest.fixture(scope="module")
def cluster():
    """Return a cluster of processes with keys, as a user starts it."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with (
        dask.config.set({"distributed.scheduler.work-stealing": True}),  # Dask's default; other tests set spdist's
        LocalCluster(security=Security.temporary(), protocol="tls", **options) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture
def squared(stored):
    m = random_matrix(400, 400, 6, 1)
    return m, stored("A", m)


def state_of(client: Client) -> dict:
    """Return what a product could leave behind; the page of runs stays until the scheduler ends."""

    def on_scheduler(dask_scheduler):
        steals = "stealing" in dask_scheduler.periodic_callbacks
        return sorted(set(dask_scheduler.plugins) - {"spdist-runs"}), len(dask_scheduler.tasks), steals

    return {
        "scheduler": client.run_on_scheduler(on_scheduler),
        "workers": client.run(lambda dask_worker: (sorted(dask_worker.plugins), len(dask_worker.data))),
        "clients": client.run_on_scheduler(lambda dask_scheduler: sorted(dask_scheduler.clients)),
    }


def test_the_same_bytes_by_address_client_and_cluster(squared, tmp_path, cluster, client):
    m, a = squared
    ways = {"address": cluster.scheduler_address, "client": client, "cluster": cluster}
    for name, scheduler in ways.items():
        keys = {"security": cluster.security} if name == "address" else {}
        spdist.multiply(a, a, tmp_path / name, scheduler=scheduler, grid=(4, 1, 1), **keys)
    found = {name: read(tmp_path / name) for name in ways}
    assert_is_product(found["client"], m, m)
    chunks = [
        {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("c/*")}
        for name in ways
    ]
    assert chunks[0] == chunks[1] == chunks[2] != {}


def test_nothing_is_left_on_it(squared, tmp_path, client):
    _, a = squared
    before = state_of(client)
    spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=client, grid=(4, 1, 1))
    assert spdist.reduce(a, a, "nnz", scheduler=client) > 0
    end = time.monotonic() + 90
    while (after := state_of(client)) != before and time.monotonic() < end:
        time.sleep(0.05)
    assert after == before
    assert client.submit(sum, [1, 2]).result() == 3


def test_no_block_is_stolen_during_a_run(squared, tmp_path, cluster, client):
    _, a = squared
    scheduler, steals = cluster.scheduler, []

    def note(progress: spdist.Progress) -> None:
        steals.append("stealing" in scheduler.periodic_callbacks)

    with Client(cluster) as other:  # a second run that ends first leaves it to the first one
        other.register_plugin(NoStealing(other.id))
        spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=client, grid=(4, 1, 1),
                        callbacks=spdist.Callbacks(progress=note))  # fmt: skip
        assert set(steals) == {False}
        assert "stealing" not in scheduler.periodic_callbacks
    wait_for(lambda: "stealing" in scheduler.periodic_callbacks)


def test_an_adaptive_cluster_grows_for_a_run_and_shrinks_after_it(squared, tmp_path):
    """Each block waits until all workers are there."""
    m, a = squared
    options = {"n_workers": 0, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster:
        cluster.adapt(minimum=0, maximum=3, interval="50ms", wait_count=2)

        def wait(progress: spdist.Progress) -> None:
            wait_for(lambda: len(cluster.scheduler.workers) == 3)

        spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=cluster, grid=(12, 1, 1), memory_limit="32MiB",
                        callbacks=spdist.Callbacks(progress=wait))  # fmt: skip
        wait_for(lambda: not cluster.scheduler.workers)
    assert_is_product(read(tmp_path / "C.zarr"), m, m)


def test_solvers_and_operators_take_it(cluster, client):
    m = random_matrix(60, 60, 3, 2)
    with spdist.partitioned(m, scheduler=client) as a:
        x = np.ones(60)
        assert np.allclose(a @ x, m @ x)
    ranks = spdist.pagerank(abs(m), scheduler=cluster).x
    assert np.allclose(ranks, spdist.pagerank(abs(m)).x)


def test_a_cluster_of_threads(squared, tmp_path):
    m, a = squared
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
        spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=client)
    assert_is_product(read(tmp_path / "C.zarr"), m, m)


def test_what_is_no_scheduler_is_refused(squared, tmp_path, cluster):
    _, a = squared
    closed = Client(cluster)
    closed.close()
    for wrong, says in ((8786, "is a int"), (closed, "Client that is closed"), (Security(), "is a Security")):
        with pytest.raises(spdist.InputError, match=says):
            spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=wrong)
    assert not (tmp_path / "C.zarr").exists()


def test_an_asynchronous_client_is_refused(squared, tmp_path, cluster):
    _, a = squared

    async def attempt() -> None:
        async with Client(cluster.scheduler_address, security=cluster.security, asynchronous=True) as client:
            with pytest.raises(spdist.InputError, match=re.escape(cluster.scheduler_address)):
                spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=client)

    asyncio.run(attempt())


def test_a_client_that_is_not_the_default_one(squared, tmp_path, cluster):
    m, a = squared
    with Client(cluster, set_as_default=False) as client:
        spdist.multiply(a, a, tmp_path / "C.zarr", scheduler=client)
        assert spdist.reduce(a, a, "sum", scheduler=client) == pytest.approx((m @ m).sum())
    assert_is_product(read(tmp_path / "C.zarr"), m, m)


def test_the_default_client_stays_the_users(squared, tmp_path, cluster):
    _, a = squared
    seen = []

    def look(*_):
        seen.append((dask.config.get("scheduler"), _get_global_client()))

    keys = {"scheduler": cluster.scheduler_address, "security": cluster.security}
    with Client(cluster) as mine, dask.config.set(scheduler="threads"):
        spdist.multiply(a, a, tmp_path / "C.zarr", callbacks=spdist.Callbacks(progress=look), **keys)
        with pytest.raises(spdist.InputError, match="no scheduler"):
            spdist.multiply(a, a, tmp_path / "D.zarr", **keys | {"scheduler": cluster.workers[0].worker_address})
        look()
    assert len(seen) > 1
    assert set(seen) == {("threads", mine)}
