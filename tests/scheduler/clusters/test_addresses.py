"""Addresses that are none, or of something else: one line each, soon."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator

import dask
import pytest
from distributed import LocalCluster, Security

from spdist.errors import InputError
from spdist.scheduler.clusters import addresses
from spdist.scheduler.clusters.addresses import of_scheduler, wait_until_reachable
from spdist.scheduler.executors.clients import running_scheduler
from spdist.scheduler.executors.clients.cluster import connect


@contextlib.contextmanager
def service(greeting: bytes) -> Iterator[str]:
    """Listen, send a greeting to whoever connects, and close after a while; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = server.accept()
                    with link:
                        link.sendall(greeting)
                        time.sleep(0.5)

        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_the_file_that_a_scheduler_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = tmp_path / "scheduler.json"
    with pytest.raises(
        InputError, match=r"'scheduler\.json': No such file or directory; start `dask scheduler --scheduler-file"
    ):
        of_scheduler("scheduler.json", None)
    for text in ("", "[]", "{}"):
        written.write_text(text)
        with pytest.raises(InputError, match="holds no address"):
            of_scheduler("scheduler.json", None)
    with LocalCluster(n_workers=0, dashboard_address=None, protocol="tcp") as cluster:
        written.write_text(json.dumps(cluster.scheduler.identity()))
        assert of_scheduler("scheduler.json", None) == (cluster.scheduler_address, None)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:8786", "Dask knows no protocol 'http'; write tcp://HOST:PORT"),
        ("tpc://127.0.0.1:8786", "Dask knows no protocol 'tpc'"),
        ("tcp://127.0.0.1", "names no host and port"),
        ("tcp://127.0.0.1:99999", "names no host and port"),
        ("tcp://127.0.0.1:port", "names no host and port"),
        ("tcp:/127.0.0.1:8786", "names no host and port"),
        ("node1", "names no host and port"),
        ("", "names no host and port"),
        ("tcp://127.0.0.1:8786/status", "names no host and port"),
        ("tcp://nowhere.invalid:8786", "no host 'nowhere.invalid'"),
        ("tcp://127.0.0.1:9", "no Dask scheduler answers at tcp://127.0.0.1:9: .*refused; start one"),
        ("127.0.0.1:9", "no Dask scheduler answers at 127.0.0.1:9"),
    ],
)
def test_what_is_wrong_with_an_address(address, message):
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1 hour"}),  # it is not this that ends the wait
        pytest.raises(InputError, match=message) as caught,
    ):
        wait_until_reachable(address, Security(), 0.5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (b"", "accepts connections and is silent"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "is no Dask scheduler; correct host and port"),
        (b"abc", "is silent|is no Dask scheduler"),
    ],
)
def test_another_service_answers(monkeypatch, greeting, message):
    monkeypatch.setattr(addresses, "SILENT_SECONDS", 0.3)
    with service(greeting) as address, pytest.raises(InputError, match=message):
        wait_until_reachable(address, Security(), 5)


def test_a_scheduler_that_starts_late_is_waited_for():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    found = []
    waiting = threading.Thread(target=lambda: found.append(wait_until_reachable(f"127.0.0.1:{port}", Security(), 200)))
    waiting.start()
    time.sleep(0.5)
    with LocalCluster(0, processes=False, protocol="tcp", scheduler_port=port, dashboard_address="127.0.0.1:0"):
        waiting.join(200)
    assert found == [None]


def test_a_worker_is_no_scheduler():
    options = {"processes": False, "protocol": "tcp", "dashboard_address": "127.0.0.1:0", "threads_per_worker": 1}
    with LocalCluster(1, **options) as cluster:
        address = cluster.workers[0].address
        with pytest.raises(InputError, match=f"a Dask worker or nanny answers at {re.escape(address)}"):
            connect(workers=None, scheduler=address, processes=True, blocks=1).__enter__()


@pytest.mark.parametrize("length", [3, 1000])
def test_a_service_that_greets_as_dask_does_is_no_scheduler(monkeypatch, length):
    """It sends as many bytes as it says, and no greeting; or fewer."""
    monkeypatch.setattr(running_scheduler, "CONNECT_SECONDS", 0.5)
    with (
        service(struct.pack("Q", length) + b"abc") as address,
        pytest.raises(InputError, match=f"no Dask scheduler answers at {re.escape(address)}: .*start one"),
    ):
        connect(workers=None, scheduler=address, processes=True, blocks=1).__enter__()


@pytest.mark.parametrize(("protocol", "warns"), [("tcp", True), ("inproc", False)])
def test_an_open_scheduler_is_used_with_a_warning(caplog, protocol, warns):
    options = {"processes": False, "protocol": protocol, "dashboard_address": "127.0.0.1:0", "threads_per_worker": 1}
    with LocalCluster(1, **options) as cluster:
        address = cluster.scheduler_address
        with connect(workers=None, scheduler=address, processes=True, blocks=1) as client:
            assert client.submit(abs, -1).result() == 1
    assert [address in record.getMessage() for record in caplog.records if record.name == "spdist"] == [True] * warns
