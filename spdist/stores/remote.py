"""Kinds of URLs, as far as they differ from what `Location` does for any."""

from __future__ import annotations

import functools
import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from spdist.errors import InputError, one_line
from spdist.shown import as_cause
from spdist.stores import service
from spdist.stores.location import CONNECT_SECONDS, READ_SECONDS, Location
from spdist.stores.names import THREADS

if TYPE_CHECKING:
    from zarr.abc.store import Store
    from zarr.storage import FsspecStore


class FolderLocation(Location):
    """A URL of a server with folders, such as ``sftp://``."""

    is_writable = True


class MemoryLocation(Location):
    """A ``memory://`` URL: bytes in the memory of this process."""

    is_writable, is_private, has_folders = True, True, False

    def _patience(self) -> None:
        """Wait for ever."""

    def options(self) -> dict[str, Any]:
        """Return no options."""
        return {}

    def lock_files(self) -> None:
        """Return None: other processes do not see the target."""

    def _fsspec_store(self) -> FsspecStore:
        from zarr.storage import FsspecStore

        return FsspecStore(_memory(), path=_memory()._strip_protocol(self.url))

    def clear_errors(self) -> AbstractContextManager[None]:
        """Leave errors as they are."""
        return nullcontext()


class HttpLocation(Location):
    """A URL of a web server, which lists nothing."""

    def _facts(self, keys: list[str]) -> dict[str, dict[str, Any]]:
        """Return what the server tells of each file."""
        fs, root = self.file_system()

        def ask(key: str) -> tuple[str, dict[str, Any]]:
            try:
                return key, fs.info(f"{root}/{key}")
            except FileNotFoundError:
                return key, {}

        with ThreadPoolExecutor(THREADS) as threads:
            return dict(threads.map(ask, keys))

    def _fsspec_store(self) -> FsspecStore:
        from spdist.stores.http import HttpStore

        return HttpStore.from_url(self.url, storage_options=self.options())

    def _file_options(self) -> dict[str, Any]:
        aiohttp: Any = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        return {"client_kwargs": {"timeout": timeout}}


class ObjectLocation(Location):
    """A URL of S3, Google Cloud Storage or Azure; obstore transfers the objects if it is installed."""

    is_writable, has_folders, transfers_chunks = True, False, True

    def options(self) -> dict[str, Any]:
        """Return fsspec's options: do not cache listings, and fail soon if S3 cannot be reached."""
        from fsspec.config import conf

        scheme, fresh = self.url.partition("://")[0], super().options()
        if scheme not in ("s3", "s3a") or "config_kwargs" in conf.get("s3", {}):
            return fresh
        return fresh | {"config_kwargs": {"connect_timeout": CONNECT_SECONDS, "retries": {"max_attempts": 3}}}

    def zarr_store(self) -> Store:
        """Return Zarr's store of obstore, or of fsspec's file system."""
        if not service.opens(self.url):
            return super().zarr_store()
        try:
            return service.open_objects(self.url)
        except Exception as error:  # obstore's own are subclasses of Exception alone
            raise InputError(f"{one_line(self.url)}: cannot be reached: {one_line(error)}") from as_cause(error)

    def object_store(self) -> Any:
        """Return obstore's store; None if it is not installed."""
        return getattr(self.zarr_store(), "store", None)

    def _facts(self, keys: list[str]) -> dict[str, dict[str, Any]]:
        """Return what the service tells of all objects here."""
        return service.list_objects(self.zarr_store()) if service.opens(self.url) else super()._facts(keys)


@functools.cache
def _memory() -> Any:
    """Return the file system of memory:// in Zarr's wrapper, made once: wrapping takes as long as a read."""
    import fsspec
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    return AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True)
