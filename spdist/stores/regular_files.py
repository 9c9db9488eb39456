"""Local files: opened without waiting, written whole, synced to the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from uuid import uuid4

from spdist.stores.names import PARTIAL


class NotRegularError(OSError):
    """A path that should be a regular file is something else, such as a FIFO."""


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file for reading; never wait, as opening a FIFO or a device may.

    Returns `descriptor, size`: the open file, to be closed by the caller, and its bytes.
    Raises `OSError` if there is no such file; a `NotRegularError` if it is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularError(errno.EINVAL, "is no regular file", path) from error
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise NotRegularError(errno.EINVAL, "is no regular file", path)
    return descriptor, facts.st_size


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file; a killed process leaves it whole, or as it was.

    `durable`: whether its content reaches the disk before its name does, so that the same holds of a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not sync folders
            raise
    finally:
        os.close(descriptor)


def sync_disk(path: Path) -> None:
    """Sync the whole file system of a path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:  # no Linux
            os.sync()
        elif syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)
