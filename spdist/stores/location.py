"""What a path or URL names: a file, or a folder of files that keys name; and all that callers do there.

Here are URLs: objects by Zarr's stores, requests for single objects by fsspec. Paths of this machine, in `local`, have
answers of their own, and so have some schemes, in `remote`.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, cast
from uuid import uuid4

from spdist.errors import InputError, SpdistError, one_line
from spdist.shown import as_cause
from spdist.stores import removal
from spdist.stores.lock_files import LockFiles, RemoteFiles
from spdist.stores.names import BATCH, FAMILY, METADATA

if TYPE_CHECKING:
    import os

    from zarr.abc.store import Store
    from zarr.storage import FsspecStore

logger = logging.getLogger("spdist")

REMOTE_SECONDS = 15.0
"""Seconds within which a remote storage must answer a first request."""

CONNECT_SECONDS = 8
"""Seconds to connect to an S3 endpoint, three times at most, and within which a file of a URL must be reached."""

READ_SECONDS = 8
"""Longest pause of the server of a file, in seconds."""

READ_BYTES = 1 << 20
"""Bytes of a file that are copied at a time."""

ZARR_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
"""Zarr's own codecs."""

TELLING = {"etag", "e_tag", "last-modified", "last_modified", "lastmodified", "modified", "mtime", "created", "updated"}
"""Names, in small letters, of facts that change whenever an object is written."""


@dataclass(frozen=True)
class Location:
    """A path or URL, with the operations of its storage; hashable, and pickles as its text.

    What concerns only files of this machine does nothing for a URL.
    """

    url: str

    is_writable: ClassVar[bool] = False
    """Whether matrices are written to this kind of storage."""

    is_private: ClassVar[bool] = False
    """Whether the bytes are in the memory of this process: no other process sees them, or needs a lock."""

    has_files: ClassVar[bool] = False
    """Whether it is in files of this machine, read by system calls and zarrs; power failures may lose what is new."""

    transfers_chunks: ClassVar[bool] = False
    """Whether threads hold encoded Zarr chunks while obstore transfers them."""

    has_folders: ClassVar[bool] = True
    """Whether folders are made before files; without them one conditional request creates an object exclusively."""

    codec_pipeline: ClassVar[str] = ZARR_PIPELINE
    """What decodes Zarr chunks: the name that Zarr's configuration takes."""

    def __str__(self) -> str:
        return self.url

    @property
    def path(self) -> Path:
        """The path in the file system; InputError if files cannot be written there."""
        raise InputError(f"{self.url}: files are exported to local paths only; export there, then copy")

    def _patience(self) -> float | None:
        """Return the seconds to wait for a first answer; None is for ever."""
        return REMOTE_SECONDS

    # -- files, by key -------------------------------------------------------------------------------------------------

    def _get(self, key: str, timeout: float | None = None) -> bytes | None:
        from zarr.core.buffer import default_buffer_prototype

        found = self.wait(self.zarr_store().get(key, default_buffer_prototype()), timeout)
        return None if found is None else cast(bytes, found.to_bytes())

    def read(self, key: str) -> bytes:
        """Return the content of a small file; FileNotFoundError if it does not exist."""
        if (found := self._get(key)) is None:
            raise FileNotFoundError(key)
        return found

    def read_without_zarr(self, key: str) -> bytes | None:
        """Return the content of a small file of this machine; None elsewhere, where Zarr is to read it."""
        return None

    def open(self, key: str) -> BinaryIO:
        """Open a file for reading and seeking; FileNotFoundError if it does not exist."""
        return io.BytesIO(self.read(key))

    def read_ends(self, keys: list[str], nbytes: int) -> list[bytes | OSError]:
        """Return the last bytes of each file, or the error of one that is missing or cannot be opened."""
        import asyncio

        from zarr.abc.store import SuffixByteRequest
        from zarr.core.buffer import default_buffer_prototype

        store, prototype, end = self.zarr_store(), default_buffer_prototype(), SuffixByteRequest(nbytes)

        async def get(some: list[str]) -> list[Any]:
            return await asyncio.gather(*(store.get(key, prototype, end) for key in some))

        found = (self.wait(get(keys[first : first + BATCH])) for first in range(0, len(keys), BATCH))
        buffers = (buffer for batch in found for buffer in batch)
        return [
            FileNotFoundError(key) if buffer is None else buffer.to_bytes()
            for key, buffer in zip(keys, buffers, strict=True)
        ]

    def write(self, key: str, content: bytes) -> None:
        """Write a file; a killed process leaves it whole, or as it was."""
        from zarr.core.buffer import default_buffer_prototype

        self.wait(self.zarr_store().set(key, default_buffer_prototype().buffer.from_bytes(content)))

    def take(self, key: str, source: Location) -> None:
        """Write a file that is at `source` by the same key, and is never changed in place; files may be shared."""
        self.write(key, source.read(key))

    def write_durably(self, key: str, content: bytes) -> None:
        """Write a file; after a crash or a power failure it has the old or the new content."""
        self.write(key, content)

    def create_with(self, key: str, content: bytes) -> bool:
        """Create a folder and its first file in one step; return False if it exists or the storage has no such step."""
        return False

    def has(self, key: str) -> bool:
        """Whether there is a file at a key."""
        return bool(self.wait(self.zarr_store().exists(key)))

    def holds(self, key: str) -> bool:
        """Whether anything is at a key."""
        return self.has(key)

    def delete(self, key: str) -> None:
        """Delete a file, if it is there."""
        self.wait(self.zarr_store().delete(key))

    def remove_members(self, folder: str, is_kept: Callable[[str], bool]) -> None:
        """Delete all files and folders in a folder but those with a name that is kept."""
        store = self.zarr_store()
        for name in self.wait(_names(store, folder)):
            if not is_kept(name):
                self.wait(store.delete_dir(f"{folder}/{name}"))
                self.wait(store.delete(f"{folder}/{name}"))

    def stat(self, key: str) -> os.stat_result | None:
        """Return what the file system says of a file; None if nothing is there, or readers need not be protected."""
        return None

    def versions(self, keys: list[str]) -> tuple[list[int], bool]:
        """Return a number for each object, of what the storage tells of it."""
        known = self._facts(keys)
        texts = {key: repr(sorted((name, str(fact)) for name, fact in facts.items())) for key, facts in known.items()}
        can_tell = all(TELLING & {name.lower() for name in facts} for facts in known.values())
        return [hash(texts.get(key, 0)) for key in keys], can_tell

    def _facts(self, keys: list[str]) -> dict[str, dict[str, Any]]:
        """Return what the storage tells of objects, by key: of all here, by one listing."""
        fs, root = self.file_system()
        return {path[len(root.rstrip("/")) + 1 :]: facts for path, facts in fs.find(root, detail=True).items()}

    # -- all that is here ----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether anything is here; InputError if a remote storage refuses or does not answer."""
        with self.clear_errors():
            return not self.wait(self.zarr_store().is_empty(""), self._patience())

    def lies_there(self) -> bool:
        """Whether anything is here, even a broken link."""
        return self.exists()

    def remove(self) -> None:
        """Delete everything here; a process that is killed meanwhile leaves no part of a local folder in its place."""
        self.wait(self.zarr_store().delete_dir(""))

    def discard(self) -> None:
        """Delete everything here as far as the system allows; it need not exist."""
        with suppress(Exception):  # each file system of fsspec raises its own
            fs, path = self.file_system()
            fs.rm(path, recursive=True)

    def clear(self) -> None:
        """Delete everything here; InputError if the system keeps a local file."""
        self.discard()

    def relatives(self) -> list[str]:
        """Return all other paths that belong to this target, sorted: temporary files of live and dead runs."""
        name = self.url.rpartition("/")[2] + FAMILY
        fs, path = self.file_system()
        try:
            found = fs.ls(path.rpartition("/")[0], detail=False)
        except FileNotFoundError:
            return []
        parent = self.url.rpartition("/")[0]
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found}
        return sorted(f"{parent}/{entry}" for entry in names if entry.startswith(name))

    def parent_url(self) -> str:
        """Return the enclosing folder; empty if it is a bucket, which is no group, or there is no such folder."""
        scheme, remote, path = self.url.rstrip("/").rpartition("://")
        parent = path.rpartition("/")[0]
        return f"{scheme}{remote}{parent}" if parent and (not remote or "/" in parent) else ""

    def stored_bytes(self) -> int:
        """Return the bytes that the files take."""
        return int(self.wait(self.zarr_store().getsize_prefix("")))

    def modified(self) -> float | None:
        """Return when this file was last written, by the clock of the storage, in seconds since 1970.

        None if there is no such file, or the storage has no times.
        """
        try:
            fs, key = self.file_system()
            return float(fs.modified(key).timestamp())
        except (FileNotFoundError, NotADirectoryError, NotImplementedError):
            return None

    def is_zarr(self) -> bool:
        """Whether a group or an array of Zarr is at a path, or a URL has the name of one."""
        return any(part.endswith(".zarr") for part in self.url.split("/")[3:])

    # -- files of this machine -----------------------------------------------------------------------------------------

    def is_file(self) -> bool:
        """Whether this is a regular file of this machine."""
        return False

    def may_be_file(self) -> bool:
        """Whether this can be opened as a file: a pipe may wait for ever, and a device never ends."""
        return True

    def is_folder(self) -> bool:
        """Whether this is a folder of this machine."""
        return False

    def names(self) -> list[str]:
        """Return the sorted names in a folder of this machine; of other storages none."""
        return []

    def keys_below(self, folder: str) -> list[str]:
        """Return the keys of all files below a folder of this machine; of other storages none."""
        return []

    def folders(self) -> list[str]:
        """Return the keys of folders and of folders in folders of this machine; of other storages none."""
        return []

    def unnamed_file(self, room: float) -> BinaryIO | None:
        """Open a file without a name beside the matrix; None if it is in no files, or `room` bytes are not free."""
        return None

    def free_bytes(self) -> float:
        """Return the bytes that are free beside this path."""
        return math.inf

    def refresh(self, folder: str) -> None:
        """Let a network file system forget which files of a folder it did not find."""

    def remove_partial(self) -> list[str]:
        """Delete files that a dead process was writing; return their keys."""
        return []

    def sync(self, folders: tuple[str, ...], names: tuple[str, ...]) -> None:
        """Wait until some files in some folders, and in this one, are on the disk."""

    def sync_disk(self) -> None:
        """Sync the whole file system to the disk, so that no power failure loses its files."""

    # -- a target ------------------------------------------------------------------------------------------------------

    def check_name(self) -> None:
        """Refuse a name that leaves no room for the longer names of files beside it."""

    def check_parent(self) -> None:
        """Refuse a target whose parent is not a directory, or may not be written to."""

    def check_removable(self) -> None:
        """Refuse files and folders that this user may not remove; InputError names the owner."""

    def make_parent(self) -> None:
        """Create the folder of a target."""

    def make_folder(self, mode: int) -> None:
        """Create a folder; InputError if the system refuses."""

    def scratch_folder(self, *, is_first: bool) -> tuple[str, Path | None]:
        """Return prefix and parent of a folder for temporary files; None is the system's folder for them.

        `is_first`: whether no other block of this run has a folder, so that those there are of dead runs.
        """
        name = f".spdist-{hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()}-"
        if is_first:
            for path in Path(tempfile.gettempdir()).glob(f"{name}*"):
                removal.discard(path)
        return name, None

    def staged(self, scratch: Path) -> str:
        """Return where a matrix is written that is moved to this target when it is whole."""
        return f"{self.url}.spdist-{uuid4().hex[:8]}"

    def lock_files(self) -> LockFiles | None:
        """Return the files of the lock of this target; None if nobody else sees it."""
        return RemoteFiles(self.file_system()[0], is_exclusive=not self.has_folders)

    def replace_by(self, source: Location) -> None:
        """Move a finished matrix to this target, where objects cannot be renamed.

        The step is one PUT: it writes a ``zarr.json`` that says from where the matrix is moving, and readers read it
        from there. After it the old arrays are deleted, the new arrays are copied, and the final ``zarr.json`` is
        written.
        """
        fs, root = self.file_system()
        moving = {"state": "moving", "from": source.url.rpartition("/")[2]}
        document = {"zarr_format": 3, "node_type": "group", "attributes": {"spdist": moving}}
        fs.pipe_file(f"{root}/{METADATA}", json.dumps(document).encode())  # from here on readers look at `source`
        self._complete_move(source)

    def recover(self) -> None:
        """Finish or undo a replacement that a killed run began; the lock of the target must be held."""
        if (source := self._moves_from()) is not None:
            logger.warning("%s: finishing the replacement of a run that ended during it, from %s", self, source)
            self._complete_move(type(self)(source))

    def whole_url(self) -> str:
        """Return where the whole matrix of a target is: here, unless a replacement was interrupted."""
        return self._moves_from() or self.url

    def may_recover(self) -> bool:
        """Whether readers are to recover an interrupted replacement before they read."""
        return False

    def _complete_move(self, source: Location) -> None:
        """Copy the arrays of a matrix to here, where the metadata say that it moves; then its metadata; remove it."""
        fs, root = self.file_system()
        origin = source.file_system()[1]
        final = fs.cat_file(f"{origin}/{METADATA}")
        keys = [key[len(origin) :] for key in fs.find(origin) if key != f"{origin}/{METADATA}"]
        old = [key for key in fs.find(root) if key != f"{root}/{METADATA}"]
        if old:
            fs.rm(old)
        if keys:
            self._copy(fs, [origin + key for key in keys], [root + key for key in keys])
        fs.invalidate_cache()
        if len(fs.find(root)) != len(keys) + 1:
            raise SpdistError(f"{self}: the storage lacks objects just copied from {source}, where the matrix is whole")
        fs.pipe_file(f"{root}/{METADATA}", final)
        with suppress(FileNotFoundError):
            fs.rm(origin, recursive=True)

    def _copy(self, fs: Any, sources: list[str], targets: list[str]) -> None:
        if self.has_folders:
            for folder in {key.rpartition("/")[0] for key in targets}:
                fs.makedirs(folder, exist_ok=True)
        try:
            fs.copy(sources, targets)
        except NotImplementedError:  # a file system without a copy of its own
            for one, other in zip(sources, targets, strict=True):
                fs.pipe_file(other, fs.cat_file(one))

    def _moves_from(self) -> str | None:
        """Return where the matrix is that moves here; None if none does."""
        with self.clear_errors():
            content = self._get(METADATA, self._patience())
        try:
            facts = json.loads(content or b"")["attributes"]["spdist"]
            name = str(facts["from"]) if facts["state"] == "moving" else ""
        except (ValueError, KeyError, TypeError):
            return None
        folder, _, own = self.url.rpartition("/")
        return f"{folder}/{name}" if name.startswith(f"{own}{FAMILY}") and "/" not in name else None

    # -- libraries -----------------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return fsspec's options: no listings are cached, since other processes write there too."""
        return {"use_listings_cache": False}

    def file_system(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it; InputError if no file system is installed for the URL."""
        import fsspec

        try:
            fs, path = fsspec.core.url_to_fs(self.url, **self.options())
        except Exception as error:  # each file system of fsspec connects and checks its arguments in its own way
            raise self._no_file_system(error) from as_cause(error)
        return fs, str(path)

    def zarr_store(self) -> Store:
        """Return Zarr's store; InputError if no file system is installed for the URL, or there are no credentials."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a file system that is not asynchronous is wrapped, with a warning
                return self._fsspec_store()
        except Exception as error:  # each file system of fsspec checks its arguments in its own way
            raise self._no_file_system(error) from as_cause(error)

    def _fsspec_store(self) -> FsspecStore:
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.url, storage_options=self.options())

    def _no_file_system(self, error: Exception) -> InputError:
        return InputError(f"{one_line(self.url)}: no file system for this URL: {one_line(error)}")

    def object_store(self) -> Any:
        """Return obstore's store, whose Zarr chunks threads code and transfer; None if Zarr is to do it."""
        return None

    def wait(self, answer: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Return what a Zarr store answers."""
        from zarr.core.sync import sync

        return sync(answer, timeout=timeout)

    @contextmanager
    def opened(self, scratch: Path | None) -> Iterator[BinaryIO]:
        """Open a file for reading and seeking; a copy in `scratch` if the storage sends it from the start alone."""
        fsspec: Any = importlib.import_module("fsspec")
        options = self._file_options()
        try:
            file = fsspec.open(self.url, "rb", **options).open()
            whole = _comes_whole(file)
            if whole:
                file = fsspec.open(self.url, "rb", block_size=0, **options).open()
        except Exception as error:  # each file system of fsspec raises its own: no such scheme, no answer
            cause = error.__cause__ or error
            problem = one_line(cause) or type(cause).__name__
            raise InputError(
                f"{self.url}: cannot be opened ({problem}); correct the address, or copy the file here"
            ) from as_cause(error)
        with file:
            if not whole:
                yield file
                return
            with copied(file.read, scratch) as copy:
                yield copy

    def _file_options(self) -> dict[str, Any]:
        """Return options with which fsspec's file systems soon fail if a server does not answer."""
        return self.options()

    def clear_errors(self) -> AbstractContextManager[None]:
        """Replace errors of libraries by one line: no such bucket, access denied, no answer."""
        return self._in_a_line()

    @contextmanager
    def _in_a_line(self) -> Iterator[None]:
        try:
            yield
        except SpdistError:
            raise
        except Exception as error:
            problem = str(error).replace("\n", " ") or type(error).__name__
            if isinstance(error, TimeoutError):
                problem = f"no answer within {REMOTE_SECONDS:.0f} s"
            raise InputError(
                f"{self.url}: the storage cannot be used ({problem}); check the URL, the endpoint and the credentials"
            ) from as_cause(error)


async def _names(store: Store, folder: str) -> set[str]:
    """Return the names in a folder; leave out the empty object that some servers keep for the folder itself."""
    keys = [key async for key in store.list_prefix(f"{folder}/")]
    return {key.removeprefix(f"{folder}/").partition("/")[0] for key in keys if key.startswith(f"{folder}/")}


@contextmanager
def copied(read: Callable[[int], bytes], scratch: Path | None) -> Iterator[BinaryIO]:
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
