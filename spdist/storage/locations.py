"""Locations of matrices, which are paths or fsspec URLs: open the store, look, move, remove."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore

from spdist.errors import InputError, MatrixError


def is_local(url: str) -> bool:
    """Whether `url` is a path of this machine rather than an fsspec URL such as ``s3://`` or ``memory://``.

    Examples
    --------
    >>> is_local("/data/A.zarr"), is_local("s3://bucket/A.zarr")
    (True, False)
    """
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """Return the path that a local `url` names."""
    return Path(url.removeprefix("file://"))


def in_process(url: str) -> bool:
    """Whether `url` is in the memory of this process, so that a product must run in this process too.

    Examples
    --------
    >>> in_process("memory://A.zarr")
    True
    """
    return url.startswith("memory://")


def normalise(url: str | Path) -> str:
    """Return `url` as workers in other directories understand it: an absolute path with links followed, or a URL.

    Raises
    ------
    InputError
        If `url` is neither text nor a path.

    Examples
    --------
    >>> normalise("memory://A.zarr/")
    'memory://A.zarr'
    """
    if not isinstance(url, str | os.PathLike):
        raise InputError(f"{url!r} is no path and no URL: write for instance 'C.zarr'")
    text = str(url).rstrip("/")
    return str(local_path(text).resolve()) if is_local(text) else text


def open_store(url: str) -> Store:
    """Return the Zarr store at `url`.

    Raises
    ------
    InputError
        If no file system is installed for the URL.
    """
    if is_local(url):
        return LocalStore(local_path(url))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory:// is not asynchronous; Zarr wraps it and says so each time
            return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: no file system for this URL: {error}") from error


def exists(url: str) -> bool:
    """Whether anything exists at `url`."""
    if is_local(url):
        return local_path(url).exists()
    return not sync(open_store(url).is_empty(""))


def remove(url: str) -> None:
    """Delete everything at `url`."""
    if is_local(url):
        shutil.rmtree(local_path(url))
    else:
        sync(open_store(url).delete_dir(""))


def move(source: str, target: str) -> None:
    """Move `source` to `target`, replacing anything at `target`.

    On a local file system this is one rename, and if it fails the old target is restored. A remote target is deleted
    first.

    Parameters
    ----------
    source, target : str
        Two paths on one file system, or two URLs of one fsspec file system.

    Raises
    ------
    OSError
        If the local rename fails.
    """
    if is_local(target):
        old = local_path(target)
        if old.exists():
            backup = old.with_name(old.name + ".spdist-old")
            if backup.exists():  # a process was killed between the two renames
                shutil.rmtree(backup)
            old.rename(backup)
            try:
                local_path(source).rename(old)
            except BaseException:
                backup.rename(old)
                raise
            shutil.rmtree(backup)
        else:
            local_path(source).rename(old)
        return
    import fsspec

    fs, path = fsspec.core.url_to_fs(target)
    if fs.exists(path):
        fs.rm(path, recursive=True)
    fs.mv(fsspec.core.url_to_fs(source)[1], path, recursive=True)


def stored_bytes(url: str) -> int:
    """Return the bytes that the files at `url` take."""
    if is_local(url):
        return sum(path.stat().st_size for path in local_path(url).rglob("*") if path.is_file())
    return sync(open_store(url).getsize_prefix(""))


def unreadable(url: str) -> MatrixError:
    """Return the error to raise when the system denies reading `url`."""
    return MatrixError(f"{url}: may not be read (permission denied): ask whoever owns it for access")
