"""S3 by obstore, which transfers objects faster than fsspec's file system and repeats requests when a server fails.

Keys, region and endpoint are read where boto and s3fs read them: the environment, ``~/.aws``, roles of machines, and
fsspec's configuration. Only Zarr's objects use obstore; locks and replacements are single small requests of fsspec.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from zarr.abc.store import Store

SCHEMES = ("s3", "s3a")
CONNECT_SECONDS, REQUEST_SECONDS = 8, 180
"""Seconds to connect, and for a request with all of its data: a shard of 64 MiB at 3 Mbit/s."""
RETRIES, RETRY_SECONDS = 8, 120
"""Retries after a server answers that it is busy or broken, with growing pauses, and their seconds in all."""


@functools.cache
def is_installed() -> bool:
    """Whether obstore and botocore are installed; the extra ``s3`` installs them."""
    return all(importlib.util.find_spec(name) is not None for name in ("obstore", "botocore"))


def open_s3(url: str) -> Store:
    """Return the Zarr store of an ``s3://`` URL.

    Parameters
    ----------
    url : str
    """
    from obstore.store import S3Store

    bucket, _, prefix = url.partition("://")[2].partition("/")
    store: Store = _store_class()(S3Store(bucket, prefix=prefix or None, **_options()))
    return store


@functools.cache
def _store_class() -> Any:
    """Return a subclass of Zarr's store for obstore that raises OSError instead of obstore's own errors."""
    from zarr.storage import ObjectStore

    class S3(ObjectStore):  # type: ignore[type-arg]
        """Objects of S3."""

    for name, method in inspect.getmembers(ObjectStore, inspect.isfunction):
        if not name.startswith("_") and name not in ("close", "with_read_only"):
            setattr(S3, name, _raising_oserror(method))
    return S3


def _raising_oserror(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        if inspect.isawaitable(found):
            return _awaited(found)
        return _iterated(found) if hasattr(found, "__aiter__") else found

    return call


async def _awaited(found: Awaitable[Any]) -> Any:
    with _in_a_line():
        return await found


async def _iterated(found: AsyncIterator[Any]) -> AsyncIterator[Any]:
    with _in_a_line():
        async for each in found:
            yield each


@contextmanager
def _in_a_line() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        raise OSError(errno.EIO, str(error).partition("\n")[0]) from error


def _options() -> dict[str, Any]:
    """Return obstore's options for S3, from the configuration of botocore and fsspec."""
    from fsspec.config import conf

    given = conf.get("s3", {})
    botocore: Any = importlib.import_module("botocore.session")
    session = botocore.get_session()
    client = given.get("client_kwargs", {})
    region = client.get("region_name") or session.get_config_variable("region") or "us-east-1"
    options: dict[str, Any] = {
        "region": region,
        "client_options": {"connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                           "timeout": timedelta(seconds=REQUEST_SECONDS), "allow_http": True},
        "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
    }  # fmt: skip
    endpoint = given.get("endpoint_url") or client.get("endpoint_url") or _endpoint()
    if endpoint:
        options["endpoint"] = endpoint
    if given.get("anon"):
        return options | {"skip_signature": True}
    if given.get("key"):
        keys = {"access_key_id": given["key"], "secret_access_key": given.get("secret", "")}
        return options | keys | ({"session_token": given["token"]} if given.get("token") else {})
    return options | {"credential_provider": _credentials_of(session)}


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _credentials_of(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that obstore calls for keys, first and whenever its keys expire."""

    def credentials() -> dict[str, Any]:
        found = session.get_credentials()
        if found is None:
            raise PermissionError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws")
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token,
            "expires_at": getattr(found, "_expiry_time", None),
        }  # fmt: skip

    return credentials
