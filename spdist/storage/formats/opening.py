"""Open what is imported: a path, a URL, or standard input, which is copied to a file first."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from spdist.errors import InputError, SpdistError, one_line
from spdist.shown import as_cause
from spdist.storage import locations

logger = logging.getLogger("spdist")

STANDARD_INPUT = "-"
"""The path that stands for standard input."""

READ_BYTES = 1 << 20
"""Bytes of standard input that are copied at a time."""

CONNECT_SECONDS = 8
"""Seconds within which the server of a URL must be reached."""

READ_SECONDS = 8
"""Longest pause of the server of a URL, in seconds."""


def check_file(path: str) -> None:
    """Refuse a local path that is no file: reading a pipe may wait for ever, and a device never ends."""
    if path != STANDARD_INPUT and locations.is_local(path) and not locations.local_path(path).is_file():
        problem = "is no ordinary file" if locations.exists(path) else "there is no such file"
        raise InputError(f"{path}: {problem}; name a file, or - for standard input")


@contextmanager
def opened_source(path: str, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """Open a local path, an fsspec URL or standard input for reading and seeking.

    `scratch`: folder for a copy of standard input; by default the system's for temporary files.
    """
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            logger.warning(
                "reading from the terminal: type the file, then Ctrl-D in a new line", extra={"notice": True}
            )
        with _copied(cast(io.BufferedReader, sys.stdin.buffer).read1, scratch) as copy:
            yield copy
        return
    if locations.is_local(path):
        with locations.local_path(path).open("rb") as local:
            before = os.fstat(local.fileno())
            yield local
            after = os.fstat(local.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise SpdistError(
                f"{path} was written to while it was read: what was read is a mixture and is discarded; run the "
                f"command again when nothing writes to {path}"
            )
        return
    fsspec: Any = importlib.import_module("fsspec")
    try:
        file = fsspec.open(path, "rb", **_patience(path)).open()
        whole = _comes_whole(file)
        if whole:
            file = fsspec.open(path, "rb", block_size=0, **_patience(path)).open()
    except Exception as error:  # each file system of fsspec raises its own: no such scheme, no credentials, no answer
        cause = error.__cause__ or error
        problem = one_line(cause) or type(cause).__name__
        raise InputError(
            f"{path}: cannot be opened ({problem}); correct the address, or copy the file here"
        ) from as_cause(error)
    with file:
        if not whole:
            yield file
            return
        with _copied(file.read, scratch) as copy:
            yield copy


@contextmanager
def _copied(read: Callable[[int], bytes], scratch: Path | None) -> Iterator[BinaryIO]:
    """Yield a temporary file with what `read` returns until its end, to seek in."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        while found := read(READ_BYTES):  # a terminal says only once that its text ends
            file.write(found)
        file.seek(0)
        yield cast(BinaryIO, file)


def _comes_whole(file: Any) -> bool:
    """Whether a file comes from a server that sends it from the start alone; else it is at its start afterwards."""
    try:
        file.seek(1)
        file.read(1)
        file.seek(0)
    except ValueError:  # of fsspec's HTTP files
        return True
    return False


def _patience(path: str) -> dict[str, Any]:
    """Return options with which fsspec's file systems soon fail if a server does not answer."""
    scheme = path.partition("://")[0]
    if scheme in ("http", "https"):
        aiohttp: Any = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        return {"client_kwargs": {"timeout": timeout}}
    return locations.storage_options(path)
