"""Paths of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from spdist.errors import InputError, SpdistError
from spdist.stores import folder_replacement, regular_files, removal
from spdist.stores.location import Location
from spdist.stores.lock_files import LocalFiles
from spdist.stores.names import BATCH, FAMILY, PARTIAL, THREADS
from spdist.stores.regular_files import open_regular, write_whole

if TYPE_CHECKING:
    from zarr.abc.store import Store

T = TypeVar("T")

SAME_TIME_NS = 2_000_000_000
"""Nanoseconds within which a file system may give two writes the same time."""

NAME_BYTES = 255 - 85
"""Most bytes of a local target's name: the file-name limit minus the longest suffix that we add."""

MARKS = ("zarr.json", ".zgroup", ".zarray")
"""Files that tell a folder of Zarr from another."""


class LocalLocation(Location):
    """A path of this machine. Zarr takes longer to load than a small command to run: only `zarr_store` loads it."""

    is_writable = True
    has_files = True
    codec_pipeline = "zarrs.ZarrsCodecPipeline"

    @property
    def path(self) -> Path:
        """The path."""
        return Path(self.url.removeprefix("file://"))

    def _at(self, key: str) -> str:
        return f"{self.url.removeprefix('file://')}/{key}"

    # -- files, by key -------------------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        with self.open(key) as file:
            return file.read()

    def read_without_zarr(self, key: str) -> bytes:
        return self.read(key)

    def open(self, key: str) -> BinaryIO:
        return os.fdopen(open_regular(self._at(key))[0], "rb", buffering=0)

    def read_ends(self, keys: list[str], nbytes: int) -> list[bytes | OSError]:

        def read_end(key: str) -> bytes | OSError:
            try:
                descriptor, size = open_regular(self._at(key))
            except OSError as error:
                return error
            try:
                return os.pread(descriptor, nbytes, max(size - nbytes, 0))
            finally:
                os.close(descriptor)

        return _in_threads(read_end, keys)

    def write(self, key: str, content: bytes) -> None:
        write_whole(self.path / key, content)

    def take(self, key: str, source: Location) -> None:
        (self.path / key).parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another file system, or one without hard links
            os.link(source.path / key, self.path / key)
            return
        super().take(key, source)

    def write_durably(self, key: str, content: bytes) -> None:
        write_whole(self.path / key, content, durable=True)

    def create_with(self, key: str, content: bytes) -> bool:
        """Create a folder with its first file beside its path, and rename it."""
        if self.exists():
            return False
        begun = LocalLocation(f"{self.url}.spdist-begin")
        begun.discard()
        begun.write(key, content)
        begun.path.rename(self.path)
        return True

    def has(self, key: str) -> bool:
        return (self.path / key).is_file()

    def holds(self, key: str) -> bool:
        return os.access(self._at(key), os.F_OK)

    def delete(self, key: str) -> None:
        (self.path / key).unlink(missing_ok=True)

    def remove_members(self, folder: str, is_kept: Callable[[str], bool]) -> None:
        path = self.path / folder
        for entry in list(os.scandir(path)) if path.is_dir() else ():
            if is_kept(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink()

    def stat(self, key: str) -> os.stat_result | None:
        try:
            return (self.path / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def versions(self, keys: list[str]) -> tuple[list[int], bool]:
        """Return a number for each file, of its size, times and file number."""
        latest = time.time_ns() - SAME_TIME_NS
        found = _in_threads(self.version_and_time, keys)
        return [version for version, _ in found], max((written for _, written in found), default=0) < latest

    def version_and_time(self, key: str) -> tuple[int, int]:
        """Return a number for a file, and when it was written, in nanoseconds since 1970; zeros if it is not there.

        It is opened, so that a network file system asks its server for the times.
        """
        try:
            descriptor, size = open_regular(self._at(key))
        except OSError:  # whoever reads it says so
            return 0, 0
        try:
            facts = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        version = hash((size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino))
        return version, max(facts.st_mtime_ns, facts.st_ctime_ns)

    # -- all that is here ----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self.path.exists()

    def lies_there(self) -> bool:
        return os.path.lexists(self.path)

    def remove(self) -> None:
        removal.remove(self.path)

    def discard(self) -> None:
        removal.discard(self.path)

    def clear(self) -> None:
        """Delete a file or a folder; InputError if something is left of it."""
        self.discard()
        if self.lies_there():
            raise removal.not_removable(self.url)

    def relatives(self) -> list[str]:
        folder, name = self.path.parent, self.url.rpartition("/")[2] + FAMILY
        return sorted(str(folder / entry) for entry in os.listdir(folder) if entry.startswith(name))  # noqa: PTH208

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def modified(self) -> float | None:
        try:
            return self.path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None

    # -- files of this machine -----------------------------------------------------------------------------------------

    def is_file(self) -> bool:
        return self.path.is_file()

    def may_be_file(self) -> bool:
        return self.is_file()

    def is_folder(self) -> bool:
        return self.path.is_dir()

    def is_zarr(self) -> bool:
        return any(self.has(mark) for mark in MARKS)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir()) if self.is_folder() else []

    def keys_below(self, folder: str) -> list[str]:
        return [
            os.path.relpath(f"{folder_path}/{name}", self.path)
            for folder_path, _, names in os.walk(self._at(folder))
            for name in sorted(names)
        ]

    def folders(self) -> list[str]:
        found = (path for pattern in ("*", "*/*") for path in self.path.glob(pattern))
        return sorted(str(path.relative_to(self.path)) for path in found if path.is_dir())

    def free_bytes(self) -> float:
        return shutil.disk_usage(self.path.parent).free

    def unnamed_file(self, room: float) -> BinaryIO | None:
        """Open a file without a name, which the system deletes when nobody has it any more; see `Location`."""
        if self.free_bytes() < room:
            return None
        return cast(BinaryIO, tempfile.TemporaryFile(dir=self.path, buffering=0))

    def refresh(self, folder: str) -> None:
        """List a folder, so that a network file system forgets which files it did not find."""
        with suppress(OSError):
            list((self.path / folder).iterdir())

    def remove_partial(self) -> list[str]:
        found = [path for path in self.path.rglob(f"*{PARTIAL}") if path.is_file()]
        for path in found:
            path.unlink(missing_ok=True)
        return [str(path.relative_to(self.path)) for path in found]

    def sync(self, folders: tuple[str, ...], names: tuple[str, ...]) -> None:
        inner = (self.path / name for name in folders)
        for folder in (*(path for path in inner if path.is_dir()), self.path):
            for path in (folder / name for name in names):
                if path.is_file():
                    regular_files.sync(path)
            regular_files.sync(folder)

    def sync_disk(self) -> None:
        regular_files.sync_disk(self.path)

    # -- a target ------------------------------------------------------------------------------------------------------

    def check_name(self) -> None:
        size = len(os.fsencode(self.url.rpartition("/")[2]))
        if size > NAME_BYTES:
            raise InputError(
                f"{self.url}: its name has {size} bytes, and files beside it have longer ones: choose a name of at "
                f"most {NAME_BYTES} bytes"
            )

    def check_parent(self) -> None:
        parent = self.path.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            problem = "may not be written to; ask for access" if parent.is_dir() else "is not a folder; create it"
            raise InputError(f"{self.url}: {parent} {problem} or choose another place")

    def check_removable(self) -> None:
        """Refuse files and folders that this user may not remove.

        Where the system says otherwise than it acts, as NFS does for root, the removal fails, with the same line.
        """
        if (stuck := removal.what_keeps(self.path)) is not None:
            raise removal.not_removable(self.url, stuck)

    def make_parent(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def make_folder(self, mode: int) -> None:
        try:
            self.make_parent()
            self.path.mkdir(mode)
        except OSError as error:
            raise InputError(
                f"{self.path.parent}: may not be written to ({error.strerror}); choose another folder"
            ) from error

    def scratch_folder(self, *, is_first: bool) -> tuple[str, Path | None]:
        """Return a name beside the target: a disk with room for the matrix has room for temporary files."""
        return f"{self.path.name}.spdist-scratch-", self.path.parent

    def staged(self, scratch: Path) -> str:
        """Return a path in the scratch folder, which is on the target's file system."""
        return str(scratch / "whole.zarr")

    def lock_files(self) -> LocalFiles:
        return LocalFiles()

    def replace_by(self, source: Location) -> None:
        """Move a finished matrix to this target by one exchange of folders."""
        folder_replacement.replace(source.path, self.path)

    def recover(self) -> None:
        folder_replacement.recover(self.path)

    def whole_url(self) -> str:
        path = folder_replacement.whole_path(self.path)
        return self.url if path == self.path else str(path)

    def may_recover(self) -> bool:
        """Whether this user may rename folders beside the target."""
        return os.access(self.path.parent, os.W_OK)

    # -- libraries -----------------------------------------------------------------------------------------------------

    def zarr_store(self) -> Store:
        from zarr.storage import LocalStore

        return LocalStore(self.path)

    def wait(self, answer: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Run what a Zarr store answers in this thread.

        Zarr's own `sync` hands over to two other threads, which made reads of a small block a third slower. zarrs
        decodes in threads of its own in either case.
        """
        import asyncio

        if asyncio._get_running_loop() is not None:  # as in the thread of a notebook
            from zarr.core.sync import sync

            return sync(answer, timeout=timeout)
        if not hasattr(_loops, "kept"):
            _loops.kept = _Loop()
        return _loops.kept.loop.run_until_complete(answer)

    def clear_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def opened(self, scratch: Path | None) -> Iterator[BinaryIO]:
        """Open a file; SpdistError if it was written to meanwhile."""
        with self.path.open("rb") as file:
            before = os.fstat(file.fileno())
            yield file
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise SpdistError(
                f"{self.url} was written to while it was read: what was read is a mixture and is discarded; run the "
                f"command again when nothing writes to {self.url}"
            )


def _in_threads(function: Callable[[str], T], keys: list[str]) -> list[T]:
    """Return the result for each key; more than a batch are shared among threads."""
    if len(keys) <= BATCH:
        return list(map(function, keys))
    batches = [keys[first : first + BATCH] for first in range(0, len(keys), BATCH)]
    with ThreadPoolExecutor(THREADS) as threads:
        return [found for batch in threads.map(lambda batch: list(map(function, batch)), batches) for found in batch]


class _Inline(ThreadPoolExecutor):
    """An executor that calls each function at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function and return a finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Loop:
    """The event loop of one thread; closed when the thread ends, before the interpreter tears down its modules."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_Inline())
        weakref.finalize(self, self.loop.close)


_loops = threading.local()
