"""Write next to a locked target and replace it at the end: after a failure or Ctrl-C the old target is still there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spdist.errors import InputError, MatrixError, SpdistError
from spdist.storage import groups, lock, notes
from spdist.storage.foreign.parents import check_parents, refresh_parent_metadata
from spdist.storage.matrix import open_matrix
from spdist.storage.names.anndata_frames import check_axes, frames_around
from spdist.stores.registry import at, normalise

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)``."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full file system."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full; zarrs raises the system's error as a RuntimeError.

    Examples
    --------
    >>> is_full(OSError(errno.ENOSPC, "No space left on device"))
    True
    """
    return getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL)


def full_disk(what: str, error: BaseException) -> SpdistError:
    """Return the exception to raise when the disk has no room for C."""
    return SpdistError(
        f"{what}: the disk is full ({error}); finished rows are kept. Free space and continue with --resume"
    )


def ignore_progress(done: int, total: int) -> None:
    """Ignore a progress report."""


@dataclass(frozen=True)
class Stage:
    """Place to which a target is written until it is complete."""

    url: str  # path or URL to write to. It is on the target's file system, so that one rename moves it to the target.
    scratch: Path  # an empty local directory for temporary files
    target: str  # where the matrix goes, normalised


@contextmanager
def staged_matrix(
    target: str | Path, *, overwrite: bool, steal: bool = False, shape: tuple[int, int] | None = None
) -> Iterator[Stage]:
    """Yield a place to write a matrix to; move it to `target` on a normal exit, delete it on any other.

    Temporary files are next to a local target, because a disk with room for the matrix has room for them; for a URL
    they are in ``$TMPDIR``.

    `shape`: (nrows, ncols), optional: of the matrix, in single rows and columns, if it is known: one that does not fit
    the AnnData around `target` is refused before anything is written, and not only at the end.
    Raises `InputError` if `target` exists and `overwrite` is false, or it holds something other than a matrix; or the
    matrix does not fit the AnnData around it.
    Raises `SpdistError` if the disk is full.
    """
    url = normalise(target)
    check_parents(url)
    _check_free(url, overwrite, is_matrix=True)
    if shape is not None:
        check_axes(url, shape)
    with _clear_errors(url), _scratch(url, overwrite, steal=steal, is_matrix=True) as scratch:
        staged = at(url).staged(scratch)
        (scratch / "scratch").mkdir()
        whole = False
        try:
            yield Stage(staged, scratch / "scratch", url)
            _check_free(url, overwrite, is_matrix=True)  # another program may have written it in the meantime
            _check_fits(url, staged)
            whole = True
            if at(url).exists():
                at(staged).sync_disk()  # the old matrix goes
            lock.replace(staged, url)
        finally:
            if not whole and not staged.startswith(f"{scratch}/"):
                at(staged).discard()
    refresh_parent_metadata(url)


@contextmanager
def staged_file(target: str | Path, *, overwrite: bool, steal: bool = False) -> Iterator[Path]:
    """Yield a path to write a local file to; rename it to `target` on a normal exit, delete it on any other.

    Raises `InputError` if `target` exists and `overwrite` is false, or it is a directory.
    Raises `SpdistError` if the disk is full.
    """
    url = normalise(target)
    path = at(url).path
    _check_free(url, overwrite, is_matrix=False)
    with _clear_errors(url), _scratch(url, overwrite, steal=steal, is_matrix=False) as scratch:
        yield scratch / path.name
        _check_free(url, overwrite, is_matrix=False)
        lock.check_held(url)
        (scratch / path.name).replace(path)


@contextmanager
def _scratch(url: str, overwrite: bool, *, steal: bool, is_matrix: bool) -> Iterator[Path]:
    """Hold a target and yield an empty local folder; remove files of dead runs for the target."""
    at(url).make_parent()
    with lock.hold_target(url, steal=steal) as held:
        _check_free(url, overwrite, is_matrix=is_matrix)
        if held.depth == 1:
            lock.remove_remains(url)
        name, parent = at(url).scratch_folder(is_first=held.depth == 1)
        try:
            scratch = Path(tempfile.mkdtemp(prefix=name, dir=parent))
        except OSError as error:
            if is_full(error):
                raise
            where = parent or tempfile.gettempdir()
            raise InputError(
                f"{url}: {where} may not be written to ({error.strerror}); choose another place"
            ) from error
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def clear_of_full_disks(refusal: Callable[[Exception], SpdistError]) -> Iterator[None]:
    """Replace an error that says that there is no room to write by ``refusal(error)``; others pass."""
    try:
        yield
    except SpdistError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise refusal(error) from error


@contextmanager
def _clear_errors(url: str) -> Iterator[None]:
    """Replace the operating system's errors by one line that says what to do."""
    full = SpdistError(
        f"{url}: the disk is full; nothing was kept. Free space for the matrix and for temporary files of its size, or "
        f"write to another disk"
    )
    try:
        with clear_of_full_disks(lambda error: full):
            yield
    except OSError as error:
        if error.strerror:
            raise InputError(f"{error.filename or url}: {error.strerror}") from error
        raise


def _check_free(url: str, overwrite: bool, *, is_matrix: bool) -> None:
    """Refuse a target that exists, unless it may be replaced and is of the kind that replaces it."""
    if not at(url).exists():
        return
    if not overwrite:
        raise InputError(f"{url}: already exists; choose another target, or pass --overwrite to replace it")
    if is_matrix and not is_ours(url):
        raise InputError(f"{url}: exists and is not a matrix, so it is not replaced; remove it yourself")
    if not is_matrix and not at(url).is_file():
        what = "a directory" if at(url).is_folder() else "no ordinary file"
        raise InputError(f"{url}: is {what}, so it is not replaced by a file; choose another place")
    at(url).check_removable()


def _check_fits(url: str, staged: str) -> None:
    """Refuse a finished matrix that does not fit the AnnData around its target."""
    if frames_around(url) is not None:
        attributes = groups.read_attributes(staged)
        rows, columns = attributes.get("shape", (0, 0))
        check_axes(url, (rows, columns), str(attributes.get("encoding-type")))


def is_ours(url: str) -> bool:
    """Whether `url` holds a matrix, complete or unfinished: the only thing that --overwrite deletes.

    An unfinished one counts however damaged it is, by its notes.
    """
    if groups.read_facts(url) or notes.has_notes(url):
        return True
    try:
        open_matrix(url)
    except MatrixError:
        return False
    return True
