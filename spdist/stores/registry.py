"""From a path or URL to its `Location`: which class stands for which scheme."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from spdist.errors import InputError, one_line
from spdist.foundation.other_objects import refuse_other_objects
from spdist.foundation.standard_output import STANDARD_OUTPUT
from spdist.shown import remember_place
from spdist.stores.local import LocalLocation
from spdist.stores.location import Location
from spdist.stores.remote import FolderLocation, HttpLocation, MemoryLocation, ObjectLocation
from spdist.stores.service import SERVICES

_KINDS: dict[str, type[Location]] = {
    "": LocalLocation,
    "file": LocalLocation,
    "memory": MemoryLocation,
    **dict.fromkeys(SERVICES, ObjectLocation),
    **dict.fromkeys(("http", "https"), HttpLocation),
    **dict.fromkeys(("sftp", "ssh", "smb", "hdfs", "webhdfs"), FolderLocation),
}
"""The class of each scheme; others are read by fsspec."""


def register(scheme: str, kind: type[Location]) -> None:
    """Let a class stand for the URLs of a scheme."""
    _KINDS[scheme] = kind
    at.cache_clear()


@functools.lru_cache(maxsize=1024)
def at(url: str) -> Location:
    """Return the location that a path or URL names.

    Examples
    --------
    >>> at("/data/A.zarr").has_files, at("memory://A.zarr").is_private, at("s3://bucket/A.zarr").transfers_chunks
    (True, True, True)
    """
    scheme, mark, _ = url.partition("://")
    return _KINDS.get(scheme if mark else "", Location)(url)


def _named(thing: object) -> str:
    """Return what a thing is that stands where a path is wanted."""
    shape: tuple[int, ...] = getattr(thing, "shape", ())
    if len(shape) != 2:
        return f"{one_line(repr(thing), 100)} is no path and no URL"
    return f"a {type(thing).__name__} of {shape[0]:,} x {shape[1]:,} is a matrix in memory, and no path or URL of one"


def normalise(url: str | Path) -> str:
    """Return `url` in a form that holds in every directory: an absolute path with links followed, or a URL.

    Raises `InputError` if `url` is neither text nor a path, or no file can have that name, or it stands for standard
    input.

    Examples
    --------
    >>> normalise("memory://A.zarr/")
    'memory://A.zarr'
    """
    refuse_other_objects(url)
    if not isinstance(url, str | os.PathLike):
        raise InputError(f"{_named(url)}: write for instance 'C.zarr'")
    if not str(url) or str(url).endswith("://"):
        raise InputError(f"{str(url)!r} is an empty path or URL: write for instance 'C.zarr'")
    text = str(url).removeprefix("local://").rstrip("/") or "/"
    if text == STANDARD_OUTPUT:  # and standard input
        raise InputError(
            "- stands for standard input or output, which cannot be used here: import and the tasks on files read it, "
            "export and markov-clustering write it; for a path of this name write ./-"
        )
    if not at(text).has_files:
        remember_place(text)
        return text
    try:
        text.encode()  # zarrs takes no other names
        path = at(text).path.resolve()
        path.exists()  # a name that is too long raises
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, a zero byte
        problem = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise InputError(f"{one_line(text, 100)}: cannot be a path ({one_line(problem, 60)}); name another") from error
    return str(path)


def check_writable(url: str) -> None:
    """Refuse a URL of a storage that is only read, or that nobody knows."""
    if not at(url).is_writable:
        schemes = sorted(scheme for scheme, kind in _KINDS.items() if kind.is_writable and not kind.has_files)
        raise InputError(
            f"{one_line(url)}: nothing is written to {one_line(url.partition('://')[0])}://; choose a path, or a URL "
            f"of {', '.join(schemes)}"
        )
