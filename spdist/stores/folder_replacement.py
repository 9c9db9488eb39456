"""Replace the matrix in a local folder in one step for every reader; finish or undo a replacement of a killed run.

The step is an exchange of two folders (Linux), else two renames by way of ``C.zarr.spdist-old``. The new folder holds a
note while it is moved, which identifies it after a crash.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from pathlib import Path
from typing import Any

from spdist.stores.names import FAMILY, METADATA
from spdist.stores.removal import discard

logger = logging.getLogger("spdist")

OLD, NEW = ".spdist-old", ".spdist-new"
"""Suffixes to the target's name: for the old matrix between two renames, and for the matrix that will replace it."""

NOTE = "spdist-replaces"
"""File in a new matrix that is being moved to the target; its content is the name of the folder before the move."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def replace(source: Path, target: Path) -> None:
    """Move a finished matrix to its target, replacing the matrix there."""
    if not os.path.lexists(target):
        source.rename(target)
        return
    (source / NOTE).write_text(os.path.relpath(source, target.parent))
    if not _exchange(source, target):
        old = _named(target, OLD)
        discard(old)
        target.rename(old)
        try:
            source.rename(target)
        except BaseException:
            old.rename(target)
            raise
    _clean_up(target)


def recover(target: Path) -> None:
    """Finish or undo a replacement that a killed run began."""
    if (target / NOTE).is_file():
        _clean_up(target)
        logger.warning("%s: removed the old matrix, which a run had replaced that ended before it was removed", target)
    elif not os.path.lexists(target):
        _fill(target)


def whole_path(target: Path) -> Path:
    """Return the path of the whole matrix of a target: the target, unless a replacement was interrupted."""
    if os.path.lexists(target):
        return target
    new, old = _named(target, NEW), _named(target, OLD)
    if old.is_dir() and not (new / NOTE).is_file():
        return old
    return new if _is_complete(new) else target


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
    paths = [_named(target, OLD)]
    if before.startswith(f"{target.name}{FAMILY}") and ".." not in Path(before).parts:
        paths.append(target.parent / before)
    for path in paths:
        discard(path)
        if path.exists():
            logger.warning("%s: the old matrix could not be removed whole: remove %s", target, path)
    (target / NOTE).unlink(missing_ok=True)


def _fill(target: Path) -> None:
    """Put the new matrix at a target that is empty, or else put back the old one."""
    new, old = _named(target, NEW), _named(target, OLD)
    is_new = (new / NOTE).is_file() or (not old.is_dir() and _is_complete(new))
    if not is_new and not old.is_dir():
        return
    (new if is_new else old).rename(target)
    if is_new:
        discard(old)
        (target / NOTE).unlink(missing_ok=True)
    what = "finished the replacement" if is_new else "put back the old matrix"
    logger.warning("%s: %s of a run that ended before it was done", target, what)


def _named(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _is_complete(folder: Path) -> bool:
    """Whether a folder holds a finished matrix of spdist's."""
    try:
        found = json.loads((folder / METADATA).read_bytes())
        return bool(found["attributes"]["spdist"]["state"] == "complete")
    except (OSError, ValueError, KeyError, TypeError):
        return False
