"""The handshake: workers with other software, too little memory or another view are refused before C is begun."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from distributed import Client, LocalCluster

import spdist
from spdist.api import products as api
from spdist.errors import InputError
from spdist.scheduler.execution import driver
from spdist.scheduler.executors.clients.cluster import connect
from spdist.scheduler.executors.supervision import probe
from spdist.scheduler.executors.supervision.handshake import (
    Handshake,
    StorageQuestion,
    inspect_storage,
    installation_problem,
    memory_problem,
)
from spdist.scheduler.executors.supervision.nonce import NonceFolder
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.support.worker_processes import NO_SPDIST, OTHER_FOLDER, ROOT, other_source, worker_process
from tests.test_cli import wait_for

MISFITS = {
    "no spdist": (NO_SPDIST, (), r"has no spdist \(Python 3.*install there what the client has"),
    "other source": ("", (), r"has spdist .* of another source \(\w+\), the client has .*: install the same on both"),
    "other folder": (OTHER_FOLDER, (), r"on \S+ sees another folder than the client at the place of .*C\.zarr: mount"),
    "little memory": (
        "",
        ("--memory-limit", "100MiB"),
        r"has 80.00 MiB of memory \(80% of its --memory-limit.*: start it with 1",
    ),
}


@pytest.fixture(scope="module")
def misfits(tmp_path_factory):
    """Return for each kind of misfit the address of a scheduler with one such worker; all start at once."""
    folder = tmp_path_factory.mktemp("misfits")
    with contextlib.ExitStack() as stack:
        clusters = {}
        for kind, (text, options, _) in MISFITS.items():
            cluster = LocalCluster(n_workers=0, processes=True, dashboard_address=":0")
            clusters[kind] = stack.enter_context(cluster)
            preload = folder / f"{kind.replace(' ', '_')}.py"
            preload.write_text(text)
            path = other_source(folder / "copy") if kind == "other source" else ROOT
            address = cluster.scheduler_address
            stack.enter_context(worker_process(address, *options, path=path, preload=preload if text else None))
        yield {kind: cluster.scheduler_address for kind, cluster in clusters.items()}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_worker_that_does_not_fit_is_refused_by_name(stored, tmp_path, misfits, kind):
    a = stored("A", random_matrix(300, 300, 5, 1))
    with pytest.raises(InputError, match=rf"worker tcp://\S+ {MISFITS[kind][2]}"):
        api.multiply(a, a, tmp_path / "C.zarr", scheduler=misfits[kind])
    assert [path.name for path in tmp_path.iterdir()] == ["A.zarr"]


def test_a_worker_that_joins_and_does_not_fit_is_not_used(stored, tmp_path, caplog, monkeypatch):
    """Neither by the driver nor by Dask, when the worker that had a block is gone."""
    monkeypatch.setattr(driver, "TUNING", driver.DriverTuning(worker_seconds=0.0))  # looks before each submission
    m = random_matrix(2000, 2000, 10, 2)
    a, joined = stored("A", m), []
    copy, preload = other_source(tmp_path / "copy"), tmp_path / "other_folder.py"
    preload.write_text(OTHER_FOLDER)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        contextlib.ExitStack() as stack,
    ):

        def join(progress) -> None:
            if progress.blocks >= 2 and not joined:
                joined.append(True)
                for options in ({"path": copy}, {"preload": preload}):
                    stack.enter_context(worker_process(cluster.scheduler_address, **options))
                wait_for(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 3)

        callbacks = spdist.Callbacks(progress=join)
        report = api.multiply(
            a, a, tmp_path / "C.zarr", grid=(60, 1, 1), scheduler=cluster.scheduler_address, callbacks=callbacks
        )
        assert {info["status"] for info in client.scheduler_info(n_workers=-1)["workers"].values()} == {"running"}
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    assert report.workers == 1
    assert re.search(r"worker tcp://\S+ has spdist .*another source.*; it is not used", caplog.text)
    assert re.search(r"worker tcp://\S+ .*sees another folder.*; it is not used", caplog.text)
    assert not list(tmp_path.glob(".spdist-*"))


def test_files_of_a_killed_run_are_removed_by_the_next_for_the_same_target(stored, tmp_path, scheduler):
    a = stored("A", random_matrix(100, 100, 5, 3))
    own, other = NonceFolder(str(tmp_path / "C.zarr")).write(), NonceFolder(str(tmp_path / "D.zarr")).write()
    assert {own, other} <= {path.name for path in tmp_path.iterdir()}
    api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler)
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "C.zarr", other}


def test_another_matrix_at_the_same_place_is_seen(stored, tmp_path):
    m = random_matrix(300, 300, 5, 4)
    a = stored("A", m)
    question = StorageQuestion.about([("A", a)])
    assert inspect_storage(question).problem == ""
    m.data[:] += 1
    api.save(a.url, m, overwrite=True)
    assert "sees another matrix than the client as A" in inspect_storage(question).problem
    (tmp_path / "A.zarr").rename(tmp_path / "B.zarr")
    assert "cannot read A" in inspect_storage(question).problem


def test_a_folder_that_is_not_there(tmp_path):
    problem = inspect_storage(StorageQuestion(target=f"{tmp_path}/no/C.zarr")).problem
    assert re.search("cannot write next to C.*FileNotFoundError", problem)


def test_object_stores_have_nonces_too():
    """Through fsspec, which has a store in memory."""
    folder = NonceFolder("memory://bucket/run/C.zarr")
    assert not folder.is_shared
    folder.is_shared = True
    name = folder.write()
    assert folder.is_there(name, time.monotonic())
    folder.clear()
    assert not folder.is_there(name, time.monotonic())


def test_versions_are_compared():
    answer = probe.answer(probe.source_digest(), b"")
    assert installation_problem(answer) == ""
    for name, version in (("dask", "2020.1.0"), ("distributed", "2020.1.0"), ("python", "2.7.1"), ("zarr", "2.1.0")):
        other = answer | {"versions": answer["versions"] | {name: version}}
        assert re.match(
            f"has {name} {version}, the client has .*: install the same on both", installation_problem(other)
        )
    micro = answer["versions"]["python"].rpartition(".")[0] + ".99"
    assert installation_problem(answer | {"versions": answer["versions"] | {"python": micro}}) == ""


@pytest.mark.parametrize(("limit", "share", "fits"), [(0, 0.8, True), (400, 1.0, True), (400, 0.7, False)])
def test_memory_of_a_worker(limit, share, fits):
    answer = {"pid": -1, "host": "node", "host_limit": 1000 << 20, "resident": 100 << 20, "memory_share": share}
    problem = memory_problem(answer, {"memory_limit": limit << 20, "nthreads": 1}, 300 << 20)
    assert (problem == "") == fits
    assert memory_problem(answer, {"memory_limit": limit << 20}, 901 << 20)
    if problem:
        assert problem.endswith(
            "needs 300.00 MiB more: start it with 571.43 MiB or more, or plan with memory_limit=180.00 MiB"
        )
    full = memory_problem(answer | {"resident": 990 << 20}, {"memory_limit": limit << 20}, 300 << 20)
    assert "plan with" not in full
    assert "start it with 1." in full
    assert "has no threads" in memory_problem(answer, {"nthreads": 0}, 0)


def test_the_digest_is_of_the_source(tmp_path):
    digest = probe._digest_of(ROOT / "spdist")
    assert digest == probe._digest_of(ROOT / "spdist")
    assert digest != probe._digest_of(other_source(tmp_path) / "spdist")


def test_a_handshake_is_one_call(stored, scheduler, monkeypatch):
    a = stored("A", random_matrix(100, 100, 5, 5))
    with Client(scheduler) as client:
        asked, run = [], client._run
        monkeypatch.setattr(client, "_run", lambda *args, **kwargs: asked.append(kwargs) or run(*args, **kwargs))
        handshake = Handshake(client)
        handshake.check(0, StorageQuestion.about([("A", a)]))
        assert len(handshake.accepted) == 2
        assert handshake.admit(sorted(handshake.accepted)) == sorted(handshake.accepted)
    assert len(asked) == 1


def test_own_workers_are_asked_for_their_memory_alone(stored, tmp_path, monkeypatch):
    a = stored("A", random_matrix(100, 100, 5, 6))
    with connect(workers=1, scheduler=None, processes=False, blocks=1) as client:
        monkeypatch.setattr(probe, "source_digest", lambda: pytest.fail("the digest of the source was taken"))
        handshake = Handshake(client)
        handshake.check_installation()
        handshake.check(0, StorageQuestion.about([("A", a)]))
        assert len(handshake.accepted) == 1
