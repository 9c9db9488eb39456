"""Replace the matrix at a target in one step for every reader; finish or undo a replacement of a killed run.

On a file system the step is an exchange of two folders (Linux), else two renames by way of ``C.zarr.spdist-old``. The
new folder holds a note while it is moved, which identifies it after a crash.

An object store cannot rename. There the step is one PUT: it writes a ``C.zarr/zarr.json`` that says from where the
matrix is moving, and readers read it from there. After it the old arrays are deleted, the new arrays are copied, and
the final ``zarr.json`` is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
from pathlib import Path
from typing import Any

from spdist.errors import SpdistError
from spdist.storage import locations

logger = logging.getLogger("spdist")

OLD, NEW = ".spdist-old", ".spdist-new"
"""Suffixes to the target's name: for the old matrix between two renames, and for the matrix that will replace it."""

NOTE = "spdist-replaces"
"""File in a new matrix that is being moved to the target; its content is the name of the folder before the move."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_METADATA = "zarr.json"


def replace(source: str, target: str) -> None:
    """Move a finished matrix to its target, replacing the matrix there.

    If the run is killed at any moment, the target holds the whole old matrix or the whole new one. On an object store,
    and on a file system that cannot exchange folders, `recover` may have to complete the step first.

    `source, target`: two paths on one file system, or two URLs of one fsspec file system. The name of `source`, or of
    its parent folder, begins with the name of `target` and ``.spdist-``.
    Raises `OSError` if the system refuses; the old matrix is still at the target.
    """
    if locations.is_local(target):
        _replace_folder(locations.local_path(source), locations.local_path(target))
    else:
        _replace_objects(source, target)


def recover(target: str) -> None:
    """Finish or undo a replacement that a killed run began; the lock of the target must be held.

    `target`: normalised.
    """
    if not locations.is_local(target):
        source = _moves_from(target)
        if source is not None:
            logger.warning("%s: finishing the replacement of a run that ended during it, from %s", target, source)
            _move_objects(source, target)
        return
    place = locations.local_path(target)
    if (place / NOTE).is_file():
        _clean_up(place)
        logger.warning("%s: removed the old matrix, which a run had replaced that ended before it was removed", target)
    elif not os.path.lexists(place):
        _fill(place)


def whole_place(target: str) -> str:
    """Return the path of the whole matrix of a target: the target, unless a replacement was interrupted.

    `target`: normalised.
    """
    if not locations.is_local(target):
        return _moves_from(target) or target
    place = locations.local_path(target)
    if os.path.lexists(place):
        return target
    new, old = _named(place, NEW), _named(place, OLD)
    if old.is_dir() and not (new / NOTE).is_file():
        return str(old)
    return str(new) if _is_complete(new) else target


# -- file systems ------------------------------------------------------------------------------------------------------


def _replace_folder(source: Path, target: Path) -> None:
    if not os.path.lexists(target):
        source.rename(target)
        return
    (source / NOTE).write_text(os.path.relpath(source, target.parent))
    if not _exchange(source, target):
        old = _named(target, OLD)
        locations.discard(str(old))
        target.rename(old)
        try:
            source.rename(target)
        except BaseException:
            old.rename(target)
            raise
    _clean_up(target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False if the system or the file system cannot."""
    rename = _renameat2()
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _renameat2() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or an old C library
        return None


def _clean_up(target: Path) -> None:
    """Remove the old matrix, which is where the new one was before, then the note."""
    before = (target / NOTE).read_text()
    places = [_named(target, OLD)]
    if before.startswith(f"{target.name}{locations.FAMILY}") and ".." not in Path(before).parts:
        places.append(target.parent / before)
    for place in places:
        locations.discard(str(place))
        if place.exists():
            logger.warning("%s: the old matrix could not be removed whole: remove %s", target, place)
    (target / NOTE).unlink(missing_ok=True)


def _fill(target: Path) -> None:
    """Put the new matrix at a target that is empty, or else put back the old one."""
    new, old = _named(target, NEW), _named(target, OLD)
    is_new = (new / NOTE).is_file() or (not old.is_dir() and _is_complete(new))
    if not is_new and not old.is_dir():
        return
    (new if is_new else old).rename(target)
    if is_new:
        locations.discard(str(old))
        (target / NOTE).unlink(missing_ok=True)
    what = "finished the replacement" if is_new else "put back the old matrix"
    logger.warning("%s: %s of a run that ended before it was done", target, what)


def _named(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _is_complete(folder: Path) -> bool:
    """Whether a folder holds a finished matrix of spdist's."""
    try:
        found = json.loads((folder / _METADATA).read_bytes())
        return bool(found["attributes"]["spdist"]["state"] == "complete")
    except (OSError, ValueError, KeyError, TypeError):
        return False


# -- object stores -----------------------------------------------------------------------------------------------------


def _replace_objects(source: str, target: str) -> None:
    fs, place = locations.file_system(target)
    moving = {"state": "moving", "from": source.rpartition("/")[2]}
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"spdist": moving}}
    fs.pipe_file(f"{place}/{_METADATA}", json.dumps(document).encode())  # from here on readers look at `source`
    _move_objects(source, target)


def _move_objects(source: str, target: str) -> None:
    """Copy the arrays of a matrix to a target whose metadata say that it moves; then its metadata; remove `source`."""
    fs, place = locations.file_system(target)
    origin = locations.file_system(source)[1]
    final = fs.cat_file(f"{origin}/{_METADATA}")
    keys = [key[len(origin) :] for key in fs.find(origin) if key != f"{origin}/{_METADATA}"]
    old = [key for key in fs.find(place) if key != f"{place}/{_METADATA}"]
    if old:
        fs.rm(old)
    if keys:
        _copy(fs, [origin + key for key in keys], [place + key for key in keys])
    fs.invalidate_cache()
    if len(fs.find(place)) != len(keys) + 1:
        raise SpdistError(f"{target}: the storage lacks objects just copied from {source}, where the matrix is whole")
    fs.pipe_file(f"{place}/{_METADATA}", final)
    with contextlib.suppress(FileNotFoundError):
        fs.rm(origin, recursive=True)


def _copy(fs: Any, sources: list[str], targets: list[str]) -> None:
    if not locations.is_object_store(fs):
        for folder in {key.rpartition("/")[0] for key in targets}:
            fs.makedirs(folder, exist_ok=True)
    try:
        fs.copy(sources, targets)
    except NotImplementedError:  # a file system without a copy of its own
        for one, other in zip(sources, targets, strict=True):
            fs.pipe_file(other, fs.cat_file(one))


def _moves_from(target: str) -> str | None:
    """Return where the matrix is that moves to a target; None if none does."""
    content = locations.read_object(target, _METADATA)
    try:
        facts = json.loads(content or b"")["attributes"]["spdist"]
        name = str(facts["from"]) if facts["state"] == "moving" else ""
    except (ValueError, KeyError, TypeError):
        return None
    family = f"{target.rpartition('/')[2]}{locations.FAMILY}"
    return f"{target.rpartition('/')[0]}/{name}" if name.startswith(family) and "/" not in name else None
