"""Who may connect: nobody without the keys, to no port of a run; key files; schedulers with keys of their own."""

from __future__ import annotations

import asyncio
import json
import pickle
import stat
import subprocess
import sys

import psutil
import pytest
from distributed import LocalCluster, rpc

import spdist
from spdist import cli
from spdist.api import products as api
from spdist.errors import InputError
from spdist.scheduler.clusters.security import remembered, security_of_files, temporary_keys, write_keys
from spdist.scheduler.executors.clients.cluster import connect
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read

OUTSIDER = """
import asyncio, json, sys
from distributed import rpc
from spdist.scheduler.clusters.security import temporary_keys

async def entered(address, keys):
    try:
        async with rpc(address, connection_args=keys, timeout=2) as there:
            return "id" in await asyncio.wait_for(there.identity(), 2)
    except Exception:
        return False

async def main():
    keys = temporary_keys().get_connection_args("client")
    tried = [(f"{kind}://{place}", args) for place in sys.argv[1:] for kind, args in (("tcp", {}), ("tls", keys))]
    found = await asyncio.gather(*(entered(*one) for one in tried))
    print(json.dumps([address for (address, _), inside in zip(tried, found) if inside]))

asyncio.run(main())
"""
"""A process of somebody else on this host: prints the addresses at which it could run code."""


def entered_by_an_outsider(*ports: int) -> list[str]:
    places = [f"127.0.0.1:{port}" for port in ports]
    done = subprocess.run([sys.executable, "-c", OUTSIDER, *places], capture_output=True, text=True, timeout=100)
    return json.loads(done.stdout)


def listening() -> set[tuple[str, int]]:
    """Return the addresses at which this process and its children listen."""
    me = psutil.Process()
    family = {me.pid, *(child.pid for child in me.children(recursive=True))}
    return {tuple(c.laddr) for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in family}


async def answers(address: str, keys: object) -> bool:
    async with rpc(address, connection_args=keys) as there:
        return "id" in await there.identity()


def test_nobody_without_the_keys_reaches_a_port_of_a_run():
    before = listening()
    with connect(workers=2, scheduler=None, processes=True, blocks=8) as client:
        ports = listening() - before
        assert {host for host, _ in ports} == {"127.0.0.1"}
        cluster = client.cluster
        members = [cluster.scheduler_address, *cluster.scheduler.workers]
        members += [nanny.address for nanny in cluster.workers.values()]
        keys = client.security.get_connection_args("client")
        assert [asyncio.run(answers(address, keys)) for address in members] == [True] * 5
        assert {int(address.rpartition(":")[2]) for address in members} <= {port for _, port in ports}
        assert len(ports) == 6  # of members and of the scheduler's pages: workers have no pages
        assert entered_by_an_outsider(*(port for _, port in ports)) == []


def test_an_outsider_reaches_a_port_without_keys():
    """The test above could fail."""
    with LocalCluster(n_workers=0, processes=False, protocol="tcp", dashboard_address="127.0.0.1:0") as cluster:
        port = int(cluster.scheduler_address.rpartition(":")[2])
        assert entered_by_an_outsider(port) == [cluster.scheduler_address]


def test_a_worker_in_this_process_listens_to_nobody():
    """The dashboard has a port; it runs no code."""
    before = listening()
    with connect(workers=None, scheduler=None, processes=False, blocks=1) as client:
        assert client.cluster.scheduler_address.startswith("inproc:")
        ports = listening() - before
        assert [host for host, _ in ports] == ["127.0.0.1"]
        assert entered_by_an_outsider(*(port for _, port in ports)) == []


def test_calls_in_the_process_of_workers_find_their_keys(stored, tmp_path):
    m = random_matrix(60, 60, 4, 1)
    a = stored("A", m)
    with spdist.workers(1) as scheduler:
        assert scheduler.startswith("tls://127.0.0.1:")
        api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler)
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    with pytest.raises(InputError, match="needs keys, and there are none: name the files"):
        api.multiply(a, a, tmp_path / "D.zarr", scheduler=scheduler)


def test_keys_for_a_client_of_ones_own():
    keys = temporary_keys()
    with remembered("tls://127.0.0.1:1", keys):
        assert spdist.cluster_security("tls://127.0.0.1:1") is keys
    with pytest.raises(InputError, match=r"this process started no workers at tls://127\.0\.0\.1:1"):
        spdist.cluster_security("tls://127.0.0.1:1")


def test_no_tickets_are_given():
    keys = pickle.loads(pickle.dumps(temporary_keys()))
    assert {keys.get_listen_args(role)["ssl_context"].num_tickets for role in ("scheduler", "worker")} == {0}


def test_key_files_are_for_their_owner_alone(tmp_path):
    files = write_keys(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    before = files["key"].read_bytes()
    with pytest.raises(InputError, match="is not empty: name a new folder"):
        write_keys(tmp_path / "keys")
    assert files["key"].read_bytes() == before
    with pytest.raises(InputError, match="name a folder that you may write"):
        write_keys("/proc/keys")


def test_the_environment_sets_all_roles(tmp_path):
    assert cli.main(["cluster-keys", str(tmp_path / "my keys"), "--json"]) == 0
    script = (
        "from distributed import Security; s = Security(); "
        "print(s.require_encryption, *(s.get_tls_config_for_role(r)['key'] for r in ('client', 'scheduler', 'worker')))"
    )
    words = [
        "bash",
        "-c",
        f'source "$1"; exec {sys.executable} -c "{script}"',
        "-",
        tmp_path / "my keys/environment.sh",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split(None, 1) == ["True", " ".join([f"{tmp_path}/my keys/key.pem"] * 3) + "\n"]


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory):
    """Return the address of a cluster with keys, and their files."""
    files = write_keys(tmp_path_factory.mktemp("with") / "keys")
    keys = security_of_files(*(str(files[name]) for name in ("ca-file", "cert", "key")))
    options = {"processes": False, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "protocol": "tls"}
    with LocalCluster(n_workers=1, security=keys, **options) as cluster:
        yield cluster.scheduler_address, files


def test_a_scheduler_with_keys(with_keys, stored, tmp_path, capsys):
    address, files = with_keys
    m = random_matrix(60, 60, 4, 2)
    stored("A", m)
    words = ["multiply", str(tmp_path / "A.zarr"), str(tmp_path / "A.zarr"), str(tmp_path / "C.zarr")]
    options = [word for name in ("ca-file", "cert", "key") for word in (f"--tls-{name}", str(files[name]))]
    assert cli.main([*words, "--scheduler", address, *options]) == 0
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    capsys.readouterr()
    assert cli.main([*words, "--overwrite", "--scheduler", address, *options[:4]]) == 2
    assert capsys.readouterr().err == (
        "spdist: --tls-key missing: name all three files that `spdist cluster-keys` writes\n"
    )


@pytest.mark.parametrize(
    ("scheme", "keys", "message"),
    [
        ("tls", lambda: None, "needs keys, and there are none: name .* --tls-ca-file"),
        ("tls", temporary_keys, "the keys are not those of the scheduler .*: name the files"),
        ("tcp", lambda: None, "is silent for 0 s: is it tls://"),
        ("tcp", temporary_keys, "is open, but keys are given"),
    ],
)
def test_wrong_keys_are_one_line(with_keys, stored, tmp_path, monkeypatch, scheme, keys, message):
    monkeypatch.setattr("spdist.scheduler.clusters.addresses.SILENT_SECONDS", 0.4)
    a, address = stored("A", random_matrix(20, 20, 3, 15)), with_keys[0].replace("tls", scheme)
    with pytest.raises(InputError, match=message) as caught:
        api.multiply(a, a, tmp_path / "C.zarr", scheduler=address, security=keys())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "C.zarr").exists()


def test_files_that_hold_no_keys(tmp_path):
    path = tmp_path / "no.pem"
    with pytest.raises(InputError, match=r"--tls-ca-file .*no.pem: No such file"):
        security_of_files(str(path), str(path), str(path))
