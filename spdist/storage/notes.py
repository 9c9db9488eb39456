"""Notes, which are small files of spdist in a Zarr group; removing files of a dead run.

The first line of a note names its kind and has a digest of its content. A crash leaves the old or the new content.
"""

from __future__ import annotations

import json

from spdist.errors import CorruptError, ResumeError
from spdist.storage.checksums import NOTE as TABLE
from spdist.storage.checksums import digest_of
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.groups import ARRAYS
from spdist.storage.names.names import ARRAYS as NAME_ARRAYS
from spdist.stores.names import METADATA, unreadable
from spdist.stores.registry import at

NOTE_FORMAT = 1
"""Format of notes, written and read by this version of spdist."""

UNFINISHED_NOTES = ("plan", "journal", "events")
"""Notes that only an unfinished group has."""


def write_note(url: str, name: str, content: bytes) -> None:
    """Write the small file ``spdist-<name>`` into a group; a crash leaves the old or the new content.

    The first line is JSON: kind and format of the note, length and digest of its content. On a local file system the
    content reaches the disk before the name does.
    """
    at(url).write_durably(f"spdist-{name}", _first_line(name, content) + b"\n" + content)


def note_path(url: str, name: str) -> str:
    """Return the path or URL of the file of a note."""
    return f"{url}/spdist-{name}"


def read_note(url: str, name: str) -> bytes | None:
    """Return the content that `write_note` wrote; None if there is no such file.

    Raises `CorruptError` if the note is damaged.
    Raises `ResumeError` if the note has another format.
    """
    try:
        head, _, content = at(url).read(f"spdist-{name}").partition(b"\n")
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
    """Return the error to raise if the note `name` of the group at `url` is damaged."""
    return CorruptError(f"{url}/spdist-{name} is damaged ({why}); write the matrix again, with --overwrite")


def foreign_note(url: str, name: str) -> ResumeError:
    """Return the error to raise if another version of spdist wrote the note `name` of the group at `url`."""
    return ResumeError(
        f"{url}/spdist-{name} was written by another version of spdist; continue with that version, or write the "
        f"matrix again, with --overwrite"
    )


def remove_note(url: str, name: str) -> None:
    """Delete the file that `write_note` wrote."""
    at(url).delete(f"spdist-{name}")


def has_notes(url: str) -> bool:
    """Whether `url` is an unfinished group, or holds notes of one."""
    return any(at(url).has(f"spdist-{note}") for note in UNFINISHED_NOTES)


def remove_remains(url: str) -> list[str]:
    """Delete files of a dead run in a group: plan, journal, and files that were being written."""
    removed = []
    for note in UNFINISHED_NOTES:
        if at(url).has(f"spdist-{note}"):
            remove_note(url, note)
            removed.append(f"spdist-{note}")
    return removed + at(url).remove_partial()


def refresh(array: ChunkedArray) -> None:
    """List the folder of the Zarr chunks, so that a network file system forgets which ones it did not find."""
    array.location.refresh(f"{array.name}/c")


def sync_metadata(url: str) -> None:
    """Wait until metadata and tables of checksums of a local group are on the disk; its Zarr chunks may be late."""
    at(url).sync((*ARRAYS, *NAME_ARRAYS), (METADATA, TABLE))


def remove_chunks(array: ChunkedArray, kept: int) -> None:
    """Delete all Zarr chunks of an array except the first `kept`; nobody may be writing them."""
    array.location.remove_members(f"{array.name}/c", lambda name: name.isdigit() and int(name) < kept)
