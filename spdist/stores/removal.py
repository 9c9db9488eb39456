"""Remove local files and folders; refuse those that this user may not remove before any work, and name their owner."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from spdist.errors import InputError
from spdist.foundation.processes import name_of_writer
from spdist.stores.names import FAMILY, family_of


def remove(folder: Path) -> None:
    """Delete a folder; a process that is killed meanwhile leaves no part of it in its place."""
    shutil.rmtree(_set_aside(folder))


def discard(path: Path) -> None:
    """Delete a file or a folder, as `remove`, as far as the system allows; it need not exist.

    What an error left of a folder is tried once more, since most errors of a disk or of a network pass.
    """
    if path.is_dir() and not path.is_symlink():
        aside = _set_aside(path)
        for _ in range(2):
            shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):
            aside.rename(path)  # if it could not be deleted whole
    else:
        with suppress(OSError):
            path.unlink()


def _set_aside(folder: Path) -> Path:
    """Rename a folder that is to be deleted; return its new path, or the old one if the system refuses."""
    aside = Path(f"{family_of(str(folder))}{FAMILY}gone.{name_of_writer()}")
    try:
        return folder if folder.is_symlink() else folder.rename(aside)
    except OSError:
        return folder


def not_removable(path: str, stuck: Path | None = None, why: str = "permission denied") -> InputError:
    """Return the error to raise if something cannot be removed or replaced.

    `stuck`: what in it, or around it, does not let it go.
    """
    where = f" because of {stuck}" if stuck is not None and str(stuck) != path else ""
    return InputError(
        f"{path}, of user {owner_of(path)}, cannot be removed{where} ({why}): ask its owner to remove it, or choose "
        f"another name"
    )


def owner_of(path: str | Path) -> str:
    """Return the name of the user who owns a path, or the number of one without a name."""
    try:
        return Path(path).owner()
    except (OSError, KeyError):
        pass
    try:
        return str(Path(path).lstat().st_uid)
    except OSError:
        return "unknown"


def what_keeps(path: Path) -> Path | None:
    """Return the path that keeps another one from being removed: itself, or a folder in or around it; None if none."""
    if not os.path.lexists(path):
        return None
    if not _lets_go(path.parent, path):
        return path.parent
    if path.is_symlink() or not path.is_dir():
        return None
    for folder, _, _ in os.walk(path, onerror=_ignore):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return Path(folder)
    return None


def _ignore(error: OSError) -> None:
    """Leave a folder that cannot be listed to the check of its permissions."""


def _lets_go(folder: Path, entry: Path) -> bool:
    """Whether this user may remove an entry of a folder; from a sticky one, such as /tmp, only what is the user's."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    facts, user = folder.stat(), os.geteuid()
    return not facts.st_mode & stat.S_ISVTX or user in (0, facts.st_uid, entry.lstat().st_uid)
