"""Locations of matrices, which are paths or fsspec URLs: normalise them, open their stores, list and remove.

Zarr takes longer to load than a small command to run. Nothing here loads it for a local path but `open_store`.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from spdist.errors import InputError, MatrixError, SpdistError, one_line
from spdist.foundation.standard_output import STANDARD_OUTPUT
from spdist.matrices.other_objects import refuse_other_objects
from spdist.shown import as_cause, remember_place
from spdist.storage.objects import service
from spdist.storage.targets.processes import name_of_writer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zarr.abc.store import Store

T = TypeVar("T")

REMOTE_SECONDS = 15.0
"""Seconds within which a remote storage must answer a first request."""

CONNECT_SECONDS = 8
"""Seconds to connect to an S3 endpoint, three times at most."""

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Protocols of object stores."""

WRITABLE = OBJECT_STORES | {"sftp", "ssh", "smb", "hdfs", "webhdfs"}
"""Protocols of storages that can be written to, besides local paths."""

PARTIAL = ".partial"
"""Suffix of the names of files that are being written, by Zarr or spdist."""

FAMILY = ".spdist-"
"""Text after a target's name in all other paths that belong to the target."""


def is_local(url: str) -> bool:
    """Whether `url` is a path of this machine rather than an fsspec URL such as ``s3://`` or ``memory://``.

    Examples
    --------
    >>> is_local("/data/A.zarr"), is_local("s3://bucket/A.zarr")
    (True, False)
    """
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """Return the path that a local `url` names."""
    return Path(url.removeprefix("file://"))


def in_process(url: str) -> bool:
    """Whether `url` is in the memory of this process, so that a product must run in this process too.

    Examples
    --------
    >>> in_process("memory://A.zarr")
    True
    """
    return url.startswith("memory://")


def in_object_store(url: str) -> bool:
    """Whether `url` is in an object store whose objects obstore can move.

    Examples
    --------
    >>> in_object_store("s3://bucket/A.zarr"), in_object_store("memory://A.zarr"), in_object_store("/data/A.zarr")
    (True, False, False)
    """
    return url.partition("://")[0] in service.SERVICES


def normalise(url: str | Path) -> str:
    """Return `url` in a form that holds in every directory: an absolute path with links followed, or a URL.

    Raises `InputError` if `url` is neither text nor a path, or no file can have that name, or it stands for standard
    input.

    Examples
    --------
    >>> normalise("memory://A.zarr/")
    'memory://A.zarr'
    """
    refuse_other_objects(url)
    if not isinstance(url, str | os.PathLike):
        raise InputError(f"{one_line(repr(url), 100)} is no path and no URL: write for instance 'C.zarr'")
    if not str(url) or str(url).endswith("://"):
        raise InputError(f"{str(url)!r} is an empty path or URL: write for instance 'C.zarr'")
    text = str(url).removeprefix("local://").rstrip("/") or "/"
    if text == STANDARD_OUTPUT:  # and standard input
        raise InputError(
            "- stands for standard input or output, which cannot be used here: import and the tasks on files read it, "
            "export and markov-clustering write it; for a path of this name write ./-"
        )
    if not is_local(text):
        remember_place(text)
        return text
    try:
        text.encode()  # zarrs takes no other names
        path = local_path(text).resolve()
        path.exists()  # a name that is too long raises
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, a zero byte
        problem = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise InputError(f"{one_line(text, 100)}: cannot be a path ({one_line(problem, 60)}); name another") from error
    return str(path)


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


def storage_options(url: str) -> dict[str, Any]:
    """Return fsspec's options for a URL: do not cache listings, and fail soon if S3 cannot be reached."""
    from fsspec.config import conf

    scheme = url.partition("://")[0]
    fresh = {} if in_process(url) else {"use_listings_cache": False}  # other processes write there too
    if scheme not in ("s3", "s3a") or "config_kwargs" in conf.get("s3", {}):
        return fresh
    return fresh | {"config_kwargs": {"connect_timeout": CONNECT_SECONDS, "retries": {"max_attempts": 3}}}


def open_store(url: str) -> Store:
    """Return the Zarr store at `url`.

    Raises `InputError` if no file system is installed for the URL, or there are no credentials.
    """
    from zarr.storage import FsspecStore, LocalStore

    if is_local(url):
        return LocalStore(local_path(url))
    if service.opens(url):
        try:
            return service.open_objects(url)
        except Exception as error:  # obstore's own are subclasses of Exception alone
            raise InputError(f"{one_line(url)}: cannot be reached: {one_line(error)}") from as_cause(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # memory:// is not asynchronous; Zarr wraps it and warns each time
            if in_process(url):
                return FsspecStore(_memory(), path=_memory()._strip_protocol(url))
            kind: type[FsspecStore] = FsspecStore
            if url.startswith(("http://", "https://")):
                from spdist.storage.objects.http import HttpStore as kind  # noqa: N813
            return kind.from_url(url, storage_options=storage_options(url))
    except Exception as error:  # each file system of fsspec checks its arguments in its own way
        raise InputError(f"{one_line(url)}: no file system for this URL: {one_line(error)}") from as_cause(error)


def wait(answer: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Return what a Zarr store answers."""
    from zarr.core.sync import sync

    return sync(answer, timeout=timeout)


def get(url: str, key: str, timeout: float | None = None) -> bytes | None:
    """Return an object of the Zarr store at a URL; None if there is none."""
    from zarr.core.buffer import default_buffer_prototype

    found = wait(open_store(url).get(key, default_buffer_prototype()), timeout)
    return None if found is None else found.to_bytes()


def put(url: str, key: str, content: bytes) -> None:
    """Write an object of the Zarr store at a path or URL; a killed process leaves it whole, or as it was."""
    if is_local(url):
        path = local_path(url) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL}")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return
    from zarr.core.buffer import default_buffer_prototype

    wait(open_store(url).set(key, default_buffer_prototype().buffer.from_bytes(content)))


def has(url: str, key: str) -> bool:
    """Whether there is an object in the Zarr store at a path or URL."""
    return (local_path(url) / key).is_file() if is_local(url) else wait(open_store(url).exists(key))


def delete(url: str, key: str) -> None:
    """Delete an object of the Zarr store at a path or URL, if it is there."""
    if is_local(url):
        (local_path(url) / key).unlink(missing_ok=True)
    else:
        wait(open_store(url).delete(key))


@functools.cache
def _memory() -> Any:
    """Return the file system of memory:// in Zarr's wrapper, made once: wrapping takes as long as a read."""
    import fsspec
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    return AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True)


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises `InputError` if no file system is installed for the URL.
    """
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url, **storage_options(url))
    except Exception as error:  # each file system of fsspec connects and checks its arguments in its own way
        raise InputError(f"{one_line(url)}: no file system for this URL: {one_line(error)}") from as_cause(error)
    return fs, str(path)


def check_writable(url: str) -> None:
    """Refuse a URL of a storage that is only read, or that nobody knows."""
    scheme = url.partition("://")[0]
    if not is_local(url) and scheme not in WRITABLE:
        raise InputError(
            f"{one_line(url)}: nothing is written to {one_line(scheme)}://; choose a path, or a URL of "
            f"{', '.join(sorted(WRITABLE))}"
        )


def is_object_store(fs: Any) -> bool:
    """Whether an fsspec file system has no folders, and creates an object exclusively by one conditional request."""
    names = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not OBJECT_STORES.isdisjoint(names)


@contextmanager
def clear_of_remote_errors(url: str) -> Iterator[None]:
    """Replace errors of libraries when a remote storage refuses or does not answer by one line.

    Raises `InputError` if there is no such bucket, access is denied, or nothing answers.
    """
    try:
        yield
    except SpdistError:
        raise
    except Exception as error:
        if is_local(url) or in_process(url):
            raise
        problem = str(error).replace("\n", " ") or type(error).__name__
        if isinstance(error, TimeoutError):
            problem = f"no answer within {REMOTE_SECONDS:.0f} s"
        raise InputError(
            f"{url}: the storage cannot be used ({problem}); check the URL, the endpoint and the credentials"
        ) from as_cause(error)


def exists(url: str) -> bool:
    """Whether anything exists at `url`.

    Raises `InputError` if a remote storage refuses or does not answer.
    """
    if is_local(url):
        return local_path(url).exists()
    with clear_of_remote_errors(url):
        return not wait(open_store(url).is_empty(""), _patience(url))


def read_object(url: str, key: str) -> bytes | None:
    """Return an object of the Zarr store at a remote URL; None if there is none.

    `url, key`: the store, and the key of the object in it.
    Raises `InputError` if the storage refuses or does not answer.
    """
    with clear_of_remote_errors(url):
        return get(url, key, _patience(url))


def _patience(url: str) -> float | None:
    return None if in_process(url) else REMOTE_SECONDS


def remove(url: str) -> None:
    """Delete everything at `url`; of a local folder, a process that is killed meanwhile leaves no part at its place."""
    if is_local(url):
        shutil.rmtree(_set_aside(local_path(url)))
    else:
        wait(open_store(url).delete_dir(""))


def _set_aside(folder: Path) -> Path:
    """Rename a folder that is to be deleted; return its new path, or the old one if the system refuses."""
    aside = Path(f"{family_of(str(folder))}{FAMILY}gone.{name_of_writer()}")
    try:
        return folder if folder.is_symlink() else folder.rename(aside)
    except OSError:
        return folder


def discard(url: str) -> None:
    """Delete a file or a folder, as `remove`, as far as the system allows; it need not exist.

    What an error left of a folder is tried once more, since most errors of a disk or of a network pass.
    """
    if not is_local(url):
        with suppress(Exception):  # each file system of fsspec raises its own
            fs, path = file_system(url)
            fs.rm(path, recursive=True)
        return
    place = local_path(url)
    if place.is_dir() and not place.is_symlink():
        aside = _set_aside(place)
        for _ in range(2):
            shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):
            aside.rename(place)  # if it could not be deleted whole
    else:
        with suppress(OSError):
            place.unlink()


def any_there(url: str) -> bool:
    """Whether anything is at a path, even a broken link."""
    return os.path.lexists(local_path(url)) if is_local(url) else exists(url)


def relatives(target: str) -> list[str]:
    """Return all other paths that belong to a target: temporary files of live and dead runs.

    `target`: normalised.
    Returns sorted.
    """
    name = target.rpartition("/")[2] + FAMILY
    if is_local(target):
        folder = local_path(target).parent
        return sorted(str(folder / entry) for entry in os.listdir(folder) if entry.startswith(name))  # noqa: PTH208
    fs, path = file_system(target)
    try:
        found = fs.ls(path.rpartition("/")[0], detail=False)
    except FileNotFoundError:
        return []
    parent = target.rpartition("/")[0]
    names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found}
    return sorted(f"{parent}/{entry}" for entry in names if entry.startswith(name))


def stored_bytes(url: str) -> int:
    """Return the bytes that the files at `url` take."""
    if is_local(url):
        return sum(path.stat().st_size for path in local_path(url).rglob("*") if path.is_file())
    return wait(open_store(url).getsize_prefix(""))


def modified(path: str) -> float | None:
    """Return when a file or object was last written, in seconds since 1970, by the clock of the storage.

    `path`: A path or URL of one file or object.
    Returns none if there is no such file, or the storage has no times.
    """
    try:
        if is_local(path):
            return local_path(path).stat().st_mtime
        fs, key = file_system(path)
        return float(fs.modified(key).timestamp())
    except (FileNotFoundError, NotADirectoryError, NotImplementedError):
        return None


def unreadable(url: str) -> MatrixError:
    """Return the error to raise when the system denies reading `url`."""
    return MatrixError(f"{url}: may not be read (permission denied): ask its owner for access")


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file for reading; never wait, as opening a FIFO or a device may.

    Returns `descriptor, size`: the open file, to be closed by the caller, and its bytes.
    Raises `OSError` if there is no such file; a `NotRegularError` if it is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularError(errno.EINVAL, "is no regular file", path) from error
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise NotRegularError(errno.EINVAL, "is no regular file", path)
    return descriptor, facts.st_size


class NotRegularError(OSError):
    """A path that should be a regular file is something else, such as a FIFO."""
