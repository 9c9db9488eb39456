"""Files in the way of a target that this user may not remove: refused before any work, with their owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spdist.errors import InputError
from spdist.storage import locations


def check_removable(*places: str) -> None:
    """Refuse files and folders that this user may not remove.

    Where the system says otherwise than it acts, as NFS does for root, the removal fails, with the same line.

    Raises `InputError` Names the owner.
    """
    for place in places:
        if locations.is_local(place) and (stuck := _stuck(locations.local_path(place))) is not None:
            raise not_removable(place, stuck)


def not_removable(place: str, stuck: Path | None = None, why: str = "permission denied") -> InputError:
    """Return the error to raise if something cannot be removed or replaced.

    `place`: A local path.
    `stuck`: what in it, or around it, does not let it go.
    `why`: what the system says.
    """
    where = f" because of {stuck}" if stuck is not None and str(stuck) != place else ""
    return InputError(
        f"{place}, of user {owner_of(place)}, cannot be removed{where} ({why}): ask its owner to remove it, or choose "
        f"another name"
    )


def owner_of(place: str | Path) -> str:
    """Return the name of the user who owns a path, or the number of one without a name."""
    try:
        return locations.local_path(str(place)).owner()
    except (OSError, KeyError):
        pass
    try:
        return str(locations.local_path(str(place)).lstat().st_uid)
    except OSError:
        return "unknown"


def _stuck(path: Path) -> Path | None:
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
