"""Names of files that spdist writes, and errors about them."""

from __future__ import annotations

from spdist.errors import MatrixError

PARTIAL = ".partial"
"""Suffix of the names of files that are being written, by Zarr or spdist."""

FAMILY = ".spdist-"
"""Text after a target's name in all other paths that belong to the target."""

METADATA = "zarr.json"
"""Key of the metadata of a group or an array, which are written last."""

BATCH = 256
"""Files that one thread opens, or that one batch requests from a remote store."""

THREADS = 8
"""Threads that open files; on a network file system their waits for answers overlap."""


def family_of(url: str) -> str:
    """Return the target to which a path belongs: ``C.zarr`` for ``C.zarr.spdist-new`` and for ``C.zarr``.

    Examples
    --------
    >>> family_of("/data/C.zarr.spdist-new.spdist-columns"), family_of("/data/C.zarr")
    ('/data/C.zarr', '/data/C.zarr')
    """
    folder, slash, name = url.rpartition("/")
    cut = name.find(FAMILY)
    return url if cut < 1 else f"{folder}{slash}{name[:cut]}"


def unreadable(url: str) -> MatrixError:
    """Return the error to raise when the system denies reading `url`."""
    return MatrixError(f"{url}: may not be read (permission denied): ask its owner for access")
