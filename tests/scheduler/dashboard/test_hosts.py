"""Which names the pages answer: this machine's, and no name of a website that points to it."""

from __future__ import annotations

import http.client
import socket
from urllib.parse import urlsplit

import dask
import psutil
import pytest
from distributed import Client, LocalCluster

from spdist.scheduler.dashboard.collector import RunCollector
from spdist.scheduler.dashboard.hosts import VARIABLE, refused_name
from spdist.scheduler.executors.clients.cluster import connect
from spdist.scheduler.executors.clients.members import dashboard_link

OWN = ("status", "spdist", "spdist/data.json", "info/main/workers.html", "metrics", "health", "nothing")
WEBSOCKET = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


def status(port: int, page: str, host: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/{page}", headers={"Host": host} | headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.fixture(scope="module")
def port():
    """Return the port of the pages of a scheduler that spdist started."""
    with connect(workers=None, scheduler=None, processes=True, blocks=2) as client:
        client.register_plugin(RunCollector())
        yield urlsplit(dashboard_link(client)).port


@pytest.mark.parametrize("page", OWN)
def test_no_page_answers_a_strange_name(port, page):
    code, text = status(port, page, "rebound.example:8787")
    assert (code, "rebound.example" in text, VARIABLE in text, "\n" in text.strip()) == (403, True, True, False)
    assert status(port, page, f"localhost:{port}", Origin="https://other.example")[0] == 403
    assert status(port, page, f"localhost:{port}")[0] not in (403, 500)


def test_no_stream_for_a_strange_website(port):
    status(port, "status", "localhost")  # loads Dask's pages
    assert status(port, "status/ws", f"127.0.0.1:{port}", Origin="https://other.example", **WEBSOCKET)[0] == 403


def own_addresses() -> list[str]:
    return [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]


def test_names_of_this_machine():
    names = ["localhost", "LOCALHOST.", "127.0.0.1", "[::1]", socket.gethostname(), socket.getfqdn(), *own_addresses()]
    assert [name for name in names for port in ("", ":8787") if refused_name(name + port)] == []
    assert refused_name("localhost:1", "http://127.0.0.1:1") == ""


@pytest.mark.parametrize("name", ["localhost.evil.example", "evil.example", "203.0.113.9:80", "127.0.0.1.evil.example"])
def test_other_names(name):
    assert refused_name(name) == name
    assert refused_name("localhost", f"http://{name}") == name


def test_a_page_without_a_website_is_refused():
    assert refused_name("localhost", "null") == "null"


def test_names_of_proxies_are_added(monkeypatch):
    monkeypatch.setenv(VARIABLE, "proxy.example, other.example:443")
    monkeypatch.setenv("JUPYTERHUB_PUBLIC_URL", "https://hub.example/user/one/")
    with dask.config.set({"distributed.dashboard.link": "https://link.example/proxy/{port}/status"}):
        for name in ("proxy.example", "other.example", "hub.example", "link.example:80"):
            assert refused_name(name) == ""
        assert refused_name("third.example") == "third.example"
    monkeypatch.setenv(VARIABLE, "*")
    assert refused_name("third.example") == ""


def test_on_a_scheduler_of_others_only_the_page_checks():
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(RunCollector())
        port = cluster.scheduler.http_server.port
        assert [status(port, page, "rebound.example")[0] for page in ("spdist", "spdist/data.json")] == [403, 403]
        assert [status(port, page, "rebound.example")[0] for page in ("health", "metrics")] == [200, 200]
        assert status(port, "spdist", f"127.0.0.1:{port}")[0] == 200
