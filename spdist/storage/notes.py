"""Notes, which are small files of spdist in a Zarr group; syncing to the disk; removing files of a dead run.

The first line of a note names its kind and has a digest of its content. A crash leaves the old or the new content.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from spdist.errors import CorruptError, ResumeError
from spdist.storage import locations
from spdist.storage.checksums import NOTE as TABLE
from spdist.storage.checksums import digest_of, read_small
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.groups import ARRAYS
from spdist.storage.locations import PARTIAL, unreadable, wait
from spdist.storage.names.names import ARRAYS as NAME_ARRAYS

if TYPE_CHECKING:
    from zarr.abc.store import Store

NOTE_FORMAT = 1
"""Format of notes, written and read by this version of spdist."""

UNFINISHED_NOTES = ("plan", "journal")
"""Notes that only an unfinished group has."""


def write_note(url: str, name: str, content: bytes) -> None:
    """Write the small file ``spdist-<name>`` into a group; a crash leaves the old or the new content.

    The first line is JSON: kind and format of the note, length and digest of its content. On a local file system the
    content reaches the disk before the name does.

    `url`: A group.
    `name`: kind of the note.
    """
    write_durably(url, f"spdist-{name}", _first_line(name, content) + b"\n" + content)


def note_path(url: str, name: str) -> str:
    """Return the path or URL of the file of a note.

    `url`: the group.
    `name`: "plan" or "journal", for instance.
    """
    return f"{url}/spdist-{name}"


def read_note(url: str, name: str) -> bytes | None:
    """Return the content that `write_note` wrote; None if there is no such file.

    `url, name`: as for `write_note`.
    Raises `CorruptError` if the note is damaged.
    Raises `ResumeError` if the note has another format.
    """
    try:
        head, _, content = read_small(url, f"spdist-{name}").partition(b"\n")
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise unreadable(f"{url}/spdist-{name}") from error
    except OSError as error:
        raise damaged_note(url, name, error.strerror or str(error)) from error
    if head == _first_line(name, content):
        return content
    try:
        facts = json.loads(head)
        written = facts.get("format", 0 if "blake2b" not in facts else None)
    except (ValueError, RecursionError, AttributeError) as error:
        raise damaged_note(url, name, "its first line was changed") from error
    if isinstance(written, int) and written != NOTE_FORMAT:
        raise foreign_note(url, name)
    raise damaged_note(url, name, "its first line does not fit the rest")


def _first_line(name: str, content: bytes) -> bytes:
    """Return the line before the content of a note."""
    facts = {"kind": name, "format": NOTE_FORMAT, "length": len(content), "blake2b": digest_of(content)}
    return json.dumps(facts).encode()


def damaged_note(url: str, name: str, why: str) -> CorruptError:
    """Return the error to raise if the note `name` of the group at `url` is damaged.

    `why`: what is wrong with it, for the message.
    """
    return CorruptError(f"{url}/spdist-{name} is damaged ({why}); write the matrix again, with --overwrite")


def foreign_note(url: str, name: str) -> ResumeError:
    """Return the error to raise if another version of spdist wrote the note `name` of the group at `url`."""
    return ResumeError(
        f"{url}/spdist-{name} was written by another version of spdist; continue with that version, or write the "
        f"matrix again, with --overwrite"
    )


def remove_note(url: str, name: str) -> None:
    """Delete the file that `write_note` wrote.

    `url, name`: as for `write_note`.
    """
    locations.delete(url, f"spdist-{name}")


def write_durably(url: str, key: str, content: bytes) -> None:
    """Write a small file of a group; after a crash or a power failure it has the old or the new content.

    `url, key`: the group, and the name of the file in it.
    """
    if not locations.is_local(url):
        locations.put(url, key, content)
        return
    path = locations.local_path(url) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not sync folders
            raise
    finally:
        os.close(descriptor)


def has_notes(url: str) -> bool:
    """Whether `url` is an unfinished group, or holds notes of one."""
    return any(locations.has(url, f"spdist-{note}") for note in UNFINISHED_NOTES)


def remove_remains(url: str) -> list[str]:
    """Delete files of a dead run in a group: plan, journal, and files that were being written.

    `url`: A group that nobody writes.
    Returns names of the deleted files.
    """
    removed = []
    for note in UNFINISHED_NOTES:
        if locations.has(url, f"spdist-{note}"):
            remove_note(url, note)
            removed.append(f"spdist-{note}")
    if locations.is_local(url):
        root = locations.local_path(url)
        for path in [path for path in root.rglob(f"*{PARTIAL}") if path.is_file()]:
            path.unlink(missing_ok=True)
            removed.append(str(path.relative_to(root)))
    return removed


def refresh(array: ChunkedArray) -> None:
    """List the folder of the Zarr chunks, so that a network file system forgets which ones it did not find."""
    if locations.is_local(array.url):
        with suppress(OSError):
            list((locations.local_path(array.url) / f"{array.name}/c").iterdir())


def sync_metadata(url: str) -> None:
    """Wait until metadata and tables of checksums of a local group are on the disk; its Zarr chunks may be late."""
    if not locations.is_local(url):
        return
    root = locations.local_path(url)
    arrays = (root / name for name in (*ARRAYS, *NAME_ARRAYS))
    for folder in (*(array for array in arrays if array.is_dir()), root):
        for path in (folder / "zarr.json", folder / TABLE):
            if path.is_file():
                _sync(path)
        _sync(folder)


def sync_disk(url: str) -> None:
    """Sync the whole file system of a local `url` to the disk, so that no power failure loses its files."""
    if not locations.is_local(url):
        return
    descriptor = os.open(locations.local_path(url), os.O_RDONLY)
    try:
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:  # no Linux
            os.sync()
        elif syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), url)
    finally:
        os.close(descriptor)


def remove_chunks(array: ChunkedArray, kept: int) -> None:
    """Delete all Zarr chunks of an array except the first `kept`; nobody may be writing them."""
    folder = f"{array.name}/c"
    if not locations.is_local(array.url):
        store = locations.open_store(array.url)
        for name in wait(_names(store, folder)):
            if not name.isdigit() or int(name) >= kept:
                wait(store.delete_dir(f"{folder}/{name}"))
                wait(store.delete(f"{folder}/{name}"))
        return
    path = locations.local_path(array.url) / folder
    for entry in list(os.scandir(path)) if path.is_dir() else ():
        if entry.name.isdigit() and int(entry.name) < kept:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()


async def _names(store: Store, folder: str) -> set[str]:
    """Return the names in a folder; an empty object that stands for the folder, as some servers keep, is none."""
    keys = [key async for key in store.list_prefix(f"{folder}/")]
    return {key.removeprefix(f"{folder}/").partition("/")[0] for key in keys if key.startswith(f"{folder}/")}
