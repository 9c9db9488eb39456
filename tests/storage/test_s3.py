"""Matrices in S3 through a server that fails: what passes is asked again, what stays is one line, nothing is wrong."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import s3fs
import scipy.sparse as sp
import zarr
from moto.server import ThreadedMotoServer

import spdist
from spdist.scheduler.planner import planner
from spdist.storage import notes
from spdist.storage.foreign import versions
from spdist.stores import credentials, service
from spdist.stores.registry import at
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.support.failing_proxy import FailingProxy


@pytest.fixture(scope="module")
def proxy():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = FailingProxy(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(use_listings_cache=False).mkdir("failing")
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()
    proxy.stop()
    server.stop()


def is_of_zarr(path: str) -> bool:
    return "/c/" in path or "zarr.json" in path


@pytest.mark.parametrize("what", ["busy", "reset"])
def test_what_passes_is_asked_again(proxy, what):
    m = random_matrix(200, 200, 4, 1)
    drawn = random.Random(7)
    proxy.failed.clear()
    proxy.fault = lambda number, method, path: what if is_of_zarr(path) and drawn.random() < 0.15 else ""
    a = spdist.save("s3://failing/A.zarr", m, overwrite=True)
    spdist.multiply(a, a, "s3://failing/C.zarr", overwrite=True, check=True)
    assert_is_product(read("s3://failing/C.zarr"), m, m, 1e-12)
    assert proxy.failed
    proxy.fault = lambda number, method, path: ""
    assert spdist.check("s3://failing/C.zarr").ok


def test_names_are_kept(proxy):
    proxy.fault = lambda number, method, path: ""
    rows = [f"row {i} é" for i in range(30)]
    a = spdist.save("s3://failing/N.zarr", random_matrix(30, 20, 4, 1), row_names=rows, overwrite=True)
    for _ in range(2):
        spdist.multiply(a, a, "s3://failing/P.zarr", transpose_b=True, overwrite=True)
        c = spdist.open("s3://failing/P.zarr")
        assert c.row_names.tolist() == c.column_names.tolist() == rows
    assert spdist.check("s3://failing/P.zarr").ok


@pytest.mark.parametrize("seed", [0, 3])
def test_answers_that_are_cut_off_make_nothing_wrong(proxy, seed):
    m, drawn = random_matrix(200, 200, 4, 1), random.Random(seed)
    proxy.fault = lambda number, method, path: ""
    a = spdist.save("s3://failing/A.zarr", m, overwrite=True)
    spdist.multiply(a, a, "s3://failing/C.zarr", overwrite=True)
    proxy.fault = lambda number, method, path: "cut" if method == "GET" and drawn.random() < 0.1 else ""
    with contextlib.suppress(spdist.SpdistError, OSError):
        spdist.multiply(a, a, "s3://failing/C.zarr", overwrite=True)
    proxy.fault = lambda number, method, path: ""
    assert_is_product(read("s3://failing/C.zarr"), m, m, 1e-12)


def test_damaged_and_missing_objects_are_named(proxy):
    proxy.fault = lambda number, method, path: ""
    a = spdist.save("s3://failing/E.zarr", random_matrix(200, 200, 4, 1), overwrite=True)
    files = s3fs.S3FileSystem(use_listings_cache=False)
    whole = files.cat("failing/E.zarr/data/c/0")
    files.pipe("failing/E.zarr/data/c/0", whole[:50] + b"?" + whole[51:])
    with pytest.raises(spdist.CorruptError, match=r"Zarr chunk 0 of array 'data' .*truncated or altered"):
        a.data.read(0, 10)
    files.rm("failing/E.zarr/indices/c/0")
    with pytest.raises(spdist.CorruptError, match=r"Zarr chunk 0 of array 'indices' .* is missing"):
        a.indices.read(0, 10)


def test_a_server_that_stays_busy_ends_in_a_line(proxy, monkeypatch):
    proxy.fault = lambda number, method, path: ""
    a = spdist.save("s3://failing/A.zarr", random_matrix(50, 50, 4, 1), overwrite=True)
    proxy.fault = lambda number, method, path: "busy" if is_of_zarr(path) else ""
    monkeypatch.setattr(service, "RETRIES", 1)
    try:
        with pytest.raises(spdist.InputError, match=r"A\.zarr: the storage cannot be used"):
            spdist.open("s3://failing/A.zarr")
    finally:
        proxy.fault = lambda number, method, path: ""
    assert spdist.open(a.url).nnz == a.nnz


def test_keys_of_fsspec_and_of_the_machine(monkeypatch):
    from fsspec.config import conf

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://one:1")
    assert credentials.s3_options()["endpoint"] == "http://one:1"
    assert credentials.s3_options()["credential_provider"]()["access_key_id"]
    monkeypatch.setitem(conf, "s3", {"anon": True, "endpoint_url": "http://two:2"})
    assert credentials.s3_options()["skip_signature"]
    assert credentials.s3_options()["endpoint"] == "http://two:2"
    monkeypatch.setitem(conf, "s3", {"key": "k", "secret": "s", "token": "t", "client_kwargs": {"region_name": "mars"}})
    found = credentials.s3_options()
    assert (found["access_key_id"], found["secret_access_key"], found["session_token"]) == ("k", "s", "t")
    assert found["region"] == "mars"


def test_objects_of_google(proxy, monkeypatch):
    """Google's XML interface is that of S3, which is what the simulated server speaks."""
    from fsspec.config import conf

    proxy.fault = lambda number, method, path: ""
    monkeypatch.setitem(conf, "gs", {"endpoint_url": proxy.url})
    store = service.open_objects("gs://failing/G.zarr")
    array = zarr.create_array(store, name="data", shape=1000, chunks=100, dtype="f8", fill_value=0)
    array[:] = np.arange(1000)
    kept = zarr.open_array(service.open_objects("gs://failing/G.zarr"), path="data", mode="r")
    np.testing.assert_array_equal(kept[:], np.arange(1000))


def test_without_obstore_fsspec_serves(proxy, monkeypatch):
    monkeypatch.setattr(service, "opens", lambda url: False)
    assert type(at("s3://failing/A.zarr").zarr_store()).__name__ == "FsspecStore"
    assert spdist.save("s3://failing/B.zarr", sp.eye_array(3), overwrite=True).nnz == 3


def test_objects_that_stand_for_folders_are_no_chunks(proxy):
    """Consoles and some servers leave an empty object ``.../c/`` where objects were removed."""
    a = spdist.save("s3://failing/D.zarr", random_matrix(50, 50, 4, 1), overwrite=True)
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.call_s3("put_object", Bucket="failing", Key="D.zarr/data/c/", Body=b"")
    notes.remove_chunks(a.data, 0)
    assert not a.data.files.exists(0)
    assert a.indices.files.exists(0)


def test_the_plan_knows_that_c_goes_to_objects(proxy, stored, monkeypatch, tmp_path):
    proxy.fault = lambda number, method, path: ""
    seen, make_plan = [], planner.make_plan
    monkeypatch.setattr(
        planner, "make_plan", lambda asked, *more: (seen.append(asked.to_objects), make_plan(asked, *more))[1]
    )
    a = stored("A", random_matrix(50, 50, 4, 1))
    for url in ("s3://failing/F.zarr", str(tmp_path / "F.zarr")):
        spdist.multiply(a, a, url)
    assert seen == [True, False]


def test_an_operand_that_is_rewritten_meanwhile_is_named(proxy):
    proxy.fault = lambda number, method, path: ""
    m, files = random_matrix(200, 200, 4, 1), s3fs.S3FileSystem(use_listings_cache=False)
    a = spdist.save("s3://failing/A.zarr", m, overwrite=True)
    assert versions._versions_of(a).can_tell

    def rewrite(plan) -> None:
        content = files.cat_file("failing/A.zarr/data/c/0")
        files.pipe_file("failing/A.zarr/data/c/0", content[::-1])

    spdist.multiply(a, a, "s3://failing/W.zarr", overwrite=True)
    with pytest.raises(spdist.CorruptError, match=r"A.zarr was rewritten .*Zarr chunk 0 of array 'data'"):
        spdist.multiply(a, a, "s3://failing/V.zarr", callbacks=spdist.Callbacks(planned=rewrite))
    assert not at("s3://failing/V.zarr").exists()
