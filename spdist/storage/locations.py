"""Paths and fsspec URLs: the stores behind them, and what exists, moves or is removed there."""

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
    """Whether `url` is a path of this machine rather than an fsspec URL such as ``s3://`` or ``memory://``."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """Return the path that a local `url` names."""
    return Path(url.removeprefix("file://"))


def in_process(url: str) -> bool:
    """Whether only this process sees what `url` holds, so that a product of it must run in this process."""
    return url.startswith("memory://")


def normalise(url: str | Path) -> str:
    """Return `url` as workers in other directories understand it: an absolute path with links followed, or a URL."""
    if not isinstance(url, str | os.PathLike):
        raise InputError(f"{url!r} is no path and no URL: write for instance 'C.zarr'")
    text = str(url).rstrip("/")
    return str(local_path(text).resolve()) if is_local(text) else text


def open_store(url: str) -> Store:
    """Return the Zarr store at `url`."""
    if is_local(url):
        return LocalStore(local_path(url))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory:// is not asynchronous; Zarr wraps it and says so each time
            return FsspecStore.from_url(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: no file system for this URL: {error}") from error


def exists(url: str) -> bool:
    """Whether anything lies at `url`."""
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
    """Put what lies at `source` in place of what lies at `target`; one rename on a local file system."""
    if is_local(target):
        old = local_path(target)
        if old.exists():
            aside = old.with_name(old.name + ".spdist-old")
            if aside.exists():  # somebody was killed right here
                shutil.rmtree(aside)
            old.rename(aside)
            try:
                local_path(source).rename(old)
            except BaseException:
                aside.rename(old)
                raise
            shutil.rmtree(aside)
        else:
            local_path(source).rename(old)
        return
    import fsspec

    fs, path = fsspec.core.url_to_fs(target)
    if fs.exists(path):
        fs.rm(path, recursive=True)
    fs.mv(fsspec.core.url_to_fs(source)[1], path, recursive=True)


def stored_bytes(url: str) -> int:
    """Return the bytes that lie at `url`."""
    if is_local(url):
        return sum(path.stat().st_size for path in local_path(url).rglob("*") if path.is_file())
    return sync(open_store(url).getsize_prefix(""))


def unreadable(place: str) -> MatrixError:
    """Return the error to raise when the system denies reading `place`."""
    return MatrixError(f"{place}: may not be read (permission denied): ask whoever owns it for access")
