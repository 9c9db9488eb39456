"""How object stores are reached: what is configured where, and one line if nothing is."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from fsspec.config import conf

from spdist.errors import InputError
from spdist.stores import credentials, service
from spdist.stores.registry import at

KEY = "a2V5"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch):
    for scheme in service.SERVICES:
        monkeypatch.delitem(conf, scheme, raising=False)
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN", "CONNECTION_STRING", "ANON"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)


@pytest.fixture
def without_google_credentials(monkeypatch):
    class DefaultCredentialsError(Exception):
        pass

    def default(scopes):
        raise DefaultCredentialsError("long\ntext")

    auth = ModuleType("google.auth")
    auth.default, auth.exceptions = default, SimpleNamespace(DefaultCredentialsError=DefaultCredentialsError)
    monkeypatch.setitem(sys.modules, "google.auth", auth)


def test_google(monkeypatch):
    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    assert credentials.google_options() == {"skip_signature": True}
    monkeypatch.setitem(conf, "gs", {"token": "/keys/service.json", "endpoint_url": "http://one:1"})
    assert credentials.google_options() == {
        "base_url": "http://one:1", "application_credentials": "/keys/service.json"
    }  # fmt: skip
    monkeypatch.setitem(conf, "gs", {"endpoint_url": "http://one:1"})
    assert credentials.google_options()["credential_provider"]()["token"]


@pytest.mark.parametrize(
    ("environment", "url", "expected"),
    [
        ({"ACCOUNT_NAME": "one", "ACCOUNT_KEY": KEY}, "", {"account_name": "one", "account_key": KEY}),
        ({"ACCOUNT_NAME": "one", "SAS_TOKEN": "sv=1"}, "two", {"account_name": "two", "sas_key": "sv=1"}),
        ({"ACCOUNT_NAME": "one", "ANON": "true"}, "", {"account_name": "one", "skip_signature": True}),
        (
            {"CONNECTION_STRING": f"AccountName=one;AccountKey={KEY};BlobEndpoint=http://here:1/one"},
            "",
            {"account_name": "one", "account_key": KEY, "endpoint": "http://here:1/one"},
        ),
    ],
)
def test_azure(monkeypatch, environment, url, expected):
    for name, value in environment.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    assert credentials.azure_options(url) == expected


def test_stores_are_built_from_urls(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    store = service.open_objects("abfs://box@account.dfs.core.windows.net/deep/A.zarr").store
    assert (store.config["container_name"], store.config["account_name"], store.prefix) == (
        "box",
        "account",
        "deep/A.zarr",
    )
    store = service.open_objects("gs://bucket/deep/A.zarr").store
    assert (store.config["bucket"], store.prefix) == ("bucket", "deep/A.zarr")


@pytest.mark.parametrize(("url", "remedy"), [("gs://b/A.zarr", "gcloud auth"), ("az://c/A.zarr", "AZURE_STORAGE_")])
def test_without_credentials_there_is_one_line(monkeypatch, without_google_credentials, url, remedy):
    monkeypatch.setattr(service, "opens", lambda url: True)
    with pytest.raises(InputError, match=f"^{url}: cannot be reached: no .*{remedy}") as caught:
        at(url).zarr_store()
    assert "\n" not in str(caught.value)


def test_emulators_of_google_are_left_to_fsspec(monkeypatch):
    monkeypatch.setattr(service, "_are_installed", lambda names: True)
    assert service.opens("gs://bucket/A.zarr")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://here:1")
    assert not service.opens("gs://bucket/A.zarr")
    assert not service.opens("memory://A.zarr")
