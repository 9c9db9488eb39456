"""The small files that form a lock: created exclusively, read, replaced, and touched as a heartbeat."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from spdist.errors import InputError
from spdist.foundation.processes import name_of_writer
from spdist.stores.regular_files import open_regular
from spdist.stores.removal import owner_of

SETTLE_SECONDS = 1.0
"""Seconds to wait before reading a file back from a storage that cannot create files exclusively."""

LOCK_BYTES = 1 << 16
"""Bytes of a lock that are read; one that spdist wrote has fewer than 2,000."""

NO_FILE = (FileNotFoundError, NotADirectoryError)


class LocalFiles:
    """Files on a file system; their heartbeat is their time of modification, which the file system sets."""

    def create(self, path: str, content: bytes) -> bool:
        """Create a file with its whole content; return False if it exists."""
        ready = _temporary(path)
        try:
            ready.write_bytes(content)
            return self._link(ready, path, content)
        finally:
            ready.unlink(missing_ok=True)

    def _link(self, ready: Path, path: str, content: bytes) -> bool:
        """Link a written file to its path, so that nobody sees half of it."""
        try:
            os.link(ready, path)
        except FileExistsError:
            return False
        except FileNotFoundError:  # another run removed `ready` as a file of a dead run
            return False
        except OSError:  # a file system without hard links
            return self._create_without_links(path, content)
        return True

    @staticmethod
    def _create_without_links(path: str, content: bytes) -> bool:
        try:
            with Path(path).open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if it does not exist.

        Raises `InputError` if it is no regular file, which could be waited for, or may not be read.
        """
        try:
            descriptor, _ = open_regular(path)
        except NO_FILE:
            return None
        except OSError as error:
            what = "may not be read" if isinstance(error, PermissionError) else "is no ordinary file"
            raise InputError(f"{path}, of user {owner_of(path)}, {what}: remove it, or choose another name") from error
        with os.fdopen(descriptor, "rb") as file:
            return file.read(LOCK_BYTES)

    def put(self, path: str, content: bytes) -> None:
        """Replace a file in one step."""
        ready = _temporary(path)
        try:
            ready.write_bytes(content)
            ready.replace(path)
        finally:
            ready.unlink(missing_ok=True)

    def delete(self, path: str) -> None:
        """Delete a file, if it is there."""
        Path(path).unlink(missing_ok=True)

    def delete_own(self, path: str, content: bytes) -> bool:
        """Delete a file that has this content without making another, for which there may be no room on the disk.

        It gets another name first, so that what is read is what is deleted.
        """
        aside = _temporary(path)
        try:
            Path(path).rename(aside)
        except NO_FILE:
            return False
        is_own = self.read(str(aside)) == content
        if not is_own:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
        return is_own

    def touch(self, path: str) -> None:
        """Renew the heartbeat."""
        os.utime(path)

    def age(self, path: str) -> float | None:
        """Return the seconds since the last heartbeat, by the clock of the storage; negative if that clock was set."""
        probe = _temporary(path)
        try:
            with Path(path).open("rb") as file:  # a network file system refreshes attributes when a file is opened
                last = os.fstat(file.fileno()).st_mtime
            with probe.open("wb") as file:
                now = os.fstat(file.fileno()).st_mtime
        except NO_FILE:
            return 0.0
        finally:
            probe.unlink(missing_ok=True)
        return now - last


def _temporary(path: str) -> Path:
    return Path(f"{path}.{name_of_writer()}")


class RemoteFiles:
    """Objects of an fsspec file system; the heartbeat is a separate object, so that it never replaces a lock.

    `is_exclusive`: whether it creates an object exclusively by one conditional request.
    """

    def __init__(self, fs: Any, *, is_exclusive: bool) -> None:
        self._fs, self._is_exclusive = fs, is_exclusive

    def create(self, path: str, content: bytes) -> bool:
        """Create an object with its whole content; return False if it exists."""
        if self.read(path) is not None:
            return False
        try:
            self._fs.pipe_file(self._key(path), content, mode="create")
        except OSError:
            if self.read(path) is None:
                raise
            return False
        if not self._is_exclusive:
            time.sleep(SETTLE_SECONDS)
        return self.read(path) == content  # some stores ignore the condition

    def read(self, path: str) -> bytes | None:
        """Return the content of an object; None if it does not exist."""
        try:
            return bytes(self._fs.cat_file(self._key(path)))
        except NO_FILE:
            return None

    def put(self, path: str, content: bytes) -> None:
        """Replace an object in one step."""
        self._fs.pipe_file(self._key(path), content)

    def delete(self, path: str) -> None:
        """Delete an object, and its heartbeat, if they are there."""
        for each in (path, heartbeat_path(path)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._key(each))

    def delete_own(self, path: str, content: bytes) -> bool:
        """Raise NotImplementedError: an object cannot be renamed, so what is read may not be what is deleted."""
        raise NotImplementedError

    def touch(self, path: str) -> None:
        """Renew the heartbeat."""
        self._fs.pipe_file(self._key(heartbeat_path(path)), b"1")

    def age(self, path: str) -> float | None:
        """Return the seconds since the last heartbeat, by the storage's clock; None if it has no times."""
        probe = f"{path}.{name_of_writer()}"
        try:
            self._fs.pipe_file(self._key(probe), b"1")
            now = self._modified(probe)
            last = max(filter(None, (self._modified(path), self._modified(heartbeat_path(path)))), default=now)
        except NotImplementedError:
            return None
        finally:
            self._fs.rm_file(self._key(probe))
        return now - last if now is not None and last is not None else None

    def _key(self, path: str) -> str:
        return str(self._fs._strip_protocol(path))

    def _modified(self, path: str) -> float | None:
        try:
            found: datetime = self._fs.modified(self._key(path))
        except FileNotFoundError:
            return None
        return found.timestamp()


LockFiles: TypeAlias = LocalFiles | RemoteFiles
"""The files of a lock: each path that their methods take begins with the path of the lock."""


def heartbeat_path(path: str) -> str:
    """Return the path of a lock's heartbeat on an object store; on a file system the lock's own time serves."""
    return f"{path}.heartbeat"
