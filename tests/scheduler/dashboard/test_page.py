"""The page, its data and the metrics on a scheduler with real runs; with Chromium where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from urllib.error import HTTPError

import dask
import pytest
from distributed import Client, LocalCluster
from prometheus_client.parser import text_string_to_metric_families

from spdist.api import products as api
from spdist.errors import SpdistError
from spdist.scheduler.dashboard.messages import RUNS, TIMINGS
from spdist.scheduler.dashboard.page import PAGE
from spdist.scheduler.execution import announcer, stages
from spdist.scheduler.executors.clients.local_cluster import SETTINGS
from tests.conftest import random_matrix
from tests.support.worker_processes import ROOT

GRAFANA = json.loads((ROOT / "deploy" / "grafana" / "spdist.json").read_text())
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def cluster():
    """Return a cluster whose dashboard is behind a prefix."""
    with (
        dask.config.set(SETTINGS),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", memory_limit=0,
            scheduler_kwargs={"http_prefix": "proxy"},
        ) as started,
    ):  # fmt: skip
        yield started


@pytest.fixture(scope="module")
def a(tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "A.zarr"
    api.save(place, random_matrix(600, 600, 8, 1))
    return place


def address(cluster, page: str) -> str:
    return f"http://127.0.0.1:{cluster.scheduler.http_server.port}/proxy/{page}"


def get(cluster, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address(cluster, page), timeout=90) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def newest(cluster) -> dict:
    return json.loads(get(cluster, "spdist/data.json")[1])["runs"][0]


def multiply(cluster, a, name: str, **options):
    return api.multiply(a, a, a.parent / name, scheduler=cluster.scheduler_address, **options)


@pytest.mark.parametrize("grid", [(20, 1, 1), (4, 2, 2)], ids=str)
def test_a_run_is_on_the_page(cluster, a, grid):
    statuses = []
    done = threading.Event()

    def look():
        while not done.wait(0.1):
            statuses.append(get(cluster, "groups")[0])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        report = multiply(cluster, a, f"C{grid[0]}.zarr", grid=grid)
    finally:
        done.set()
        looking.join()
    assert set(statuses) == {200}, "Dask's page of groups must work during a run"
    run = newest(cluster)
    assert run["state"] == "finished"
    assert run["start"]["target"] == str(a.parent / f"C{grid[0]}.zarr")
    assert run["progress"]["blocks"] == run["progress"]["blocks_total"] == report.blocks
    assert run["progress"]["durable_row"] == 600
    assert set(run["cells"]) == {3}
    assert run["start"]["grid"] == report.grid


def test_page_menu_and_data(cluster, a):
    multiply(cluster, a, "P.zarr")
    for page in ("spdist", "spdist/"):
        status, text = get(cluster, page)
        assert (status, text) == (200, PAGE.read_text())
    assert 'href="spdist"' in get(cluster, "status")[1]
    first = json.loads(get(cluster, "spdist/data.json")[1])
    assert len(json.dumps(first)) < 50_000
    assert "cells" in first["runs"][0]
    assert "cells" not in first["runs"][-1]
    oldest = first["runs"][-1]["product"]
    chosen = json.loads(get(cluster, f"spdist/data.json?run={oldest}")[1])
    assert ["cells" in run for run in chosen["runs"]] == [run["product"] == oldest for run in chosen["runs"]]
    limit = first["runs"][0]["start"]["host_limit"] or first["runs"][0]["start"]["memory_limit"]
    assert all(one["host_limit"] == limit for one in first["memory"].values())


def test_the_page_asks_nobody_else():
    text = PAGE.read_text()
    assert not re.search(r"(src|href)=\"(?!data:,)", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in text, "names of matrices are text, not markup"


def test_metrics(cluster, a):
    multiply(cluster, a, "M1.zarr", grid=(2, 1, 1))
    few = samples(cluster)
    multiply(cluster, a, "M2.zarr", grid=(40, 1, 1))
    many = samples(cluster)
    assert few.keys() == many.keys(), "the number of series must not grow with blocks"
    assert many["spdist_blocks", "done"] == 40
    assert many["spdist_durable_ratio", ""] == 1.0
    assert many["spdist_stage_seconds_total", "multiply"] > 0
    assert many["spdist_products_total", ""] > 0
    assert many["spdist_host_memory_bytes", "limit"] > 0
    assert many["spdist_device_memory_bytes", "used"] == many["spdist_device_memory_bytes", "limit"] == 0.0


def test_the_grafana_dashboard_asks_for_metrics_that_exist(cluster, a):
    multiply(cluster, a, "G.zarr")
    served = {name for name, _ in samples(cluster)} | {"spdist_run_info"}
    expressions = " ".join(target["expr"] for panel in GRAFANA["panels"] for target in panel["targets"])
    asked = set(re.findall(r"spdist_\w+", expressions))
    assert asked == served


def samples(cluster) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(get(cluster, "metrics")[1]):
        for one in family.samples:
            if one.name.startswith("spdist_") and one.name != "spdist_run_info":
                found[one.name, next(iter(one.labels.values()), "")] = one.value
    return found


def test_a_failed_run_and_a_reduction(cluster, a, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(stages.STAGES, "multiply", lambda *args: 1 / 0)
        with pytest.raises(SpdistError, match="division"):
            multiply(cluster, a, "F.zarr")
    failed = newest(cluster)
    assert failed["state"] == "failed"
    assert "division" in failed["error"]
    api.reduce(a, a, "frobenius", scheduler=cluster.scheduler_address)
    assert newest(cluster)["start"]["target"] == "frobenius of A @ B"
    assert newest(cluster)["progress"]["blocks"] >= 1


def test_events_that_are_not_understood_do_no_harm(cluster, a):
    multiply(cluster, a, "E.zarr")
    before = newest(cluster)
    with Client(cluster) as client:
        for topic in (RUNS, TIMINGS):
            for event in ({}, "text", {"product": before["product"], "what": "progress", "content": {}}, None):
                client.log_event(topic, event)
    assert newest(cluster)["progress"] == before["progress"]


def test_workers_that_come_and_go_are_events(cluster, a, monkeypatch):
    kept = stages.STAGES["multiply"]

    def slow(*args):
        time.sleep(0.05)
        return kept(*args)

    monkeypatch.setitem(stages.STAGES, "multiply", slow)
    run = threading.Thread(target=multiply, args=(cluster, a, "W.zarr"), kwargs={"grid": (60, 1, 1)})
    run.start()
    while newest(cluster)["start"]["target"] != str(a.parent / "W.zarr"):
        time.sleep(0.02)
    cluster.scale(3)
    run.join()
    cluster.scale(2)
    assert any(text.endswith(" joined") for _, text in newest(cluster)["events"])


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_draws_the_page(cluster, a):
    multiply(cluster, a, "<b>D & E.zarr")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    drawn = subprocess.run(
        [*command, "--enable-logging=stderr", address(cluster, "spdist")], capture_output=True, text=True, timeout=100
    )
    assert "CONSOLE" not in drawn.stderr
    assert "&lt;b&gt;D &amp; E.zarr" in drawn.stdout
    for text in ("Stages by worker", "rows durable", "Map of blocks", "Memory of the workers", "finished"):
        assert text in drawn.stdout


def test_a_package_that_is_not_installed_stops_no_run(cluster, a, monkeypatch):
    """Its source may be on the path alone, as on a cluster's shared file system."""
    monkeypatch.setattr(announcer, "PACKAGES", ("spdist", "no-such-package"))
    multiply(cluster, a, "V.zarr")
    assert newest(cluster)["start"]["versions"]["no-such-package"] == "unknown"
