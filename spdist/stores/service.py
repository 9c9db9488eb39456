"""Objects of S3, Google Cloud Storage and Azure by obstore.

obstore transfers objects faster than fsspec's file systems and repeats requests when a server fails. Only Zarr's
objects use obstore; locks and replacements are single small requests of fsspec.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from spdist.stores import credentials

if TYPE_CHECKING:
    from zarr.abc.store import Store

CONNECT_SECONDS, REQUEST_SECONDS = 8, 180
"""Seconds to connect, and for a request with all of its data: an object of 64 MiB at 3 Mbit/s."""

RETRIES, RETRY_SECONDS = 8, 120
"""Retries after a server answers that it is busy or broken, with growing pauses, and their seconds in all."""

SERVICES = {
    "s3": credentials.s3, "s3a": credentials.s3, "gs": credentials.google, "gcs": credentials.google,
    "az": credentials.azure, "abfs": credentials.azure, "abfss": credentials.azure,
}  # fmt: skip
"""The function that opens obstore's store, by the scheme of the URL."""

PACKAGES = {"s3": "botocore", "gs": "gcsfs", "gcs": "gcsfs", "s3a": "botocore"}
"""The package that a scheme needs besides obstore: adlfs unless the scheme is listed."""


def opens(url: str) -> bool:
    """Whether obstore opens a URL: it knows the scheme, and the packages of the extra are installed."""
    scheme = url.partition("://")[0]
    if scheme in ("gs", "gcs") and "STORAGE_EMULATOR_HOST" in os.environ:
        return False  # emulators speak the protocol of Google's own client alone
    return scheme in SERVICES and _are_installed(("obstore", PACKAGES.get(scheme, "adlfs")))


@functools.cache
def _are_installed(names: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def open_objects(url: str) -> Store:
    """Return the Zarr store of a URL that obstore opens.

    Raises `ValueError` if no credentials are there, or the URL lacks a part; says what to set.
    """
    scheme, _, path = url.partition("://")
    bucket, _, prefix = path.partition("/")
    seconds = {"connect_timeout": CONNECT_SECONDS, "timeout": REQUEST_SECONDS}
    common = {
        "prefix": prefix or None,
        "client_options": {**{name: timedelta(seconds=n) for name, n in seconds.items()}, "allow_http": True},
        "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
    }
    store: Store = _store_class()(SERVICES[scheme](bucket, common))
    return store


def put(store: Any, key: str, content: Any) -> None:
    """Write an object in one request; raise OSError if the service refuses, or cannot be reached."""
    import obstore

    with _in_a_line():
        obstore.put(store, key, content, use_multipart=False)


def get(store: Any, key: str) -> Any:
    """Return an object as a buffer.

    Raises `FileNotFoundError` if there is no such object.
    Raises `OSError` if the service refuses, or cannot be reached.
    """
    import obstore

    with _in_a_line():
        return obstore.get(store, key).bytes()


def list_objects(store: Any) -> dict[str, dict[str, Any]]:
    """Return what the service tells of each object of a store, by key: its ETag, size and time.

    Raises `OSError` if the service refuses, or cannot be reached.
    """
    import obstore

    with _in_a_line():
        return {each["path"]: dict(each) for some in obstore.list(store.store) for each in some}


@functools.cache
def _store_class() -> Any:
    """Return a subclass of Zarr's store for obstore that raises OSError instead of obstore's own errors."""
    from zarr.storage import ObjectStore

    class Objects(ObjectStore):  # type: ignore[type-arg]
        """Objects of a service."""

    for name, method in inspect.getmembers(ObjectStore, inspect.isfunction):
        if not name.startswith("_") and name not in ("close", "with_read_only"):
            setattr(Objects, name, _raising_oserror(method))
    return Objects


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
