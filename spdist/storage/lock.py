"""One writer for each target: a lock next to the target names the run that holds it.

The lock of ``C.zarr`` is the file ``C.zarr.spdist-lock``, on an object store the object of that name. It covers every
path that begins with ``C.zarr.spdist-``: staged matrices, transposed copies, partial products.

If a lock exists, four rules decide what a new run does:

* The lock's run is alive on this host: the new run is refused. Process id and start time identify the run's process.
* The lock's run was on this host and is dead: the new run takes the lock over, with a warning.
* The lock's run is on another host: its heartbeat decides, by the clock of the storage. Without a heartbeat for
  `STALE_SECONDS` the lock is stale, and only ``--steal`` takes it.
* The lock is empty or all zeros, as after a power loss: once it is as old as a stale lock, the new run takes it over.

A lock ends only once: a run that releases or takes it first creates ``C.zarr.spdist-lock.end-<digest of the lock>``,
then reads the lock again. A run whose lock was taken notices at its next heartbeat, or in `TargetLock.check`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from spdist.errors import InputError, SpdistError
from spdist.foundation.processes import writer_lives
from spdist.storage.targets.owner import STALE_SECONDS, owner_from, this_process
from spdist.stores.lock_files import LockFiles
from spdist.stores.names import FAMILY, family_of
from spdist.stores.registry import at, check_writable, normalise
from spdist.stores.removal import not_removable

logger = logging.getLogger("spdist")

HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of a run that holds a lock."""

CLOCK_SECONDS = 60.0
"""Seconds that a heartbeat may lie in the future; beyond that somebody set the clock of the storage."""

PATIENCE_SECONDS = 5.0
"""Seconds to wait for another run that is taking over or releasing a lock, or replacing a matrix."""


# -- the lock ----------------------------------------------------------------------------------------------------------


class TargetLock:
    """The right to write one target; `hold_target` returns it.

    `target`: normalised.
    `lost`: whether another run has taken the lock.
    `depth`: how many ``with`` blocks hold the target.
    `found`: paths of the target that existed before the lock was held: files of dead runs.
    """

    def __init__(self, target: str) -> None:
        self.target, self.thread = target, threading.get_ident()
        self.owner = this_process(uuid4().hex[:12])
        self.content = self.owner.to_bytes()
        self.path = f"{target}.spdist-lock"
        self.files: LockFiles | None = at(target).lock_files()
        self.lost, self.depth, self.found = False, 1, list[str]()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._heartbeat, name=f"heartbeat of {self.path}", daemon=True)

    @property
    def run_id(self) -> str:
        """Name of the run that holds the lock."""
        return self.owner.run

    def check(self) -> None:
        """Raise if another run has taken the lock."""
        if self.files is not None and not self.lost:
            self.lost = self.files.read(self.path) != self.content
        if self.lost:
            raise self.stolen()

    def keep(self, path: str) -> None:
        """Keep the files of a dead run at a path, and all paths that belong to it: they are no longer removed."""
        self.found = [p for p in self.found if p != path and not p.startswith(f"{path}{FAMILY}")]

    def stolen(self) -> SpdistError:
        """Return the error to raise if another run has taken the lock."""
        return SpdistError(
            f"{self.target}: another run took the lock of this run ({self.run_id}), or the lock was deleted: this run "
            f"stops here and leaves what is at {self.target}"
        )

    def acquire(self, *, steal: bool) -> None:
        """Create the lock, or take over the lock of a dead run.

        Raises `InputError` if a live run holds the lock, or it is stale and `steal` is false; or the target's name is
        too long.
        """
        if self.files is None:
            return
        at(self.target).check_name()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._create():
            content = self.files.read(self.path)
            if content is not None:
                self._check_can_take_over(content, steal=steal)
                if self._take(content):
                    _warn_taken(self.target, content)
                    break
            if time.monotonic() > deadline:
                raise InputError(f"{self.target}: other runs are locking it; wait for them, or choose another name")
            time.sleep(0.05)
        self._heart.start()

    def _take(self, content: bytes) -> bool:
        """Put the lock of this run in place of a dead run's; return False if another run was faster."""
        try:
            return self._end(self.path, content, self.content)
        except PermissionError as error:
            raise not_removable(self.path, why=str(error.strerror)) from error

    def _create(self) -> bool:
        assert self.files is not None
        try:
            return self.files.create(self.path, self.content)
        except OSError as error:
            raise _cannot_write(self.target, error) from error

    def _check_can_take_over(self, content: bytes, *, steal: bool) -> None:
        """Refuse to take the lock of a live run, or a stale lock unless it is to be stolen."""
        owner, age = owner_from(content), self._age(self.path)
        if owner is not None and owner.is_near and not owner.is_process_alive:
            return
        if _is_empty(content) and age is not None and age >= STALE_SECONDS:
            return
        held = f"run {owner}" if owner is not None else f"a run that {self.path} does not name"
        if age is not None and age < -CLOCK_SECONDS and (owner is None or not owner.is_near):
            raise InputError(
                f"{self.target} is or was being written by {held}; its last heartbeat lies {-age:,.0f} s in the "
                f"future, as a clock was set: wait for it or, if it is dead, remove {self.path}"
            )
        if age is None or age < STALE_SECONDS or (owner is not None and owner.is_near):
            seen = "" if age is None else f", last heartbeat {max(age, 0.0):.0f} s ago"
            raise InputError(f"{self.target} is being written by {held}{seen}; wait for it, or choose another name")
        if not steal:
            raise InputError(
                f"{self.target} was being written by {held}, which had no heartbeat for {age:,.0f} s; if it is "
                f"dead, take over with --steal (steal=True), or remove {self.path}"
            )

    def _age(self, path: str) -> float | None:
        """Return the seconds since the last heartbeat, by the storage's clock; None if the storage has no times."""
        assert self.files is not None
        return self.files.age(path)

    def _end(self, path: str, content: bytes, new: bytes | None) -> bool:
        """End a lock file: replace it by `new`, or delete it. Of all runs that try, one succeeds, even if some die.

        The right to end a lock file is another file, created exclusively; it may in turn belong to a dead run.
        """
        assert self.files is not None
        right = f"{self.path}.end-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
        mine = dataclasses.replace(self.owner, record=uuid4().hex).to_bytes()
        if not self.files.create(right, mine):
            other = self.files.read(right)
            if other is None or self.is_live(right, other) or not self._end(right, other, mine):
                return False
        try:
            if self.files.read(path) != content:
                return False
            if new is None:
                self.files.delete(path)
            else:
                self.files.put(path, new)
            return True
        finally:
            self.files.delete(right)

    def is_live(self, path: str, content: bytes) -> bool:
        """Whether the run that wrote a lock file is alive, or may be."""
        owner = owner_from(content)
        if owner is not None and owner.is_near:
            return owner.is_process_alive
        age = self._age(path)
        return age is None or age < STALE_SECONDS

    def _heartbeat(self) -> None:
        """Renew the heartbeat until the lock ends; stop the run if another run has taken the lock."""
        assert self.files is not None
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                held = self.files.read(self.path) == self.content
                if held:
                    self.files.touch(self.path)
            except Exception:  # the storage does not answer for now; each file system has errors of its own
                continue
            if not held:
                self.lost = True
                _interrupt(self.thread)
                return

    def release(self) -> None:
        """End the lock, unless another run has taken it."""
        self._ended.set()
        if self.files is None or self.owner.pid != os.getpid():  # a process that was forked while the lock was held
            return
        if self._heart.ident is not None:
            self._heart.join()
        if self.lost:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.01)  # so that the interrupt of the heartbeat thread arrives here, not later
            return
        problem = None
        for _ in range(2):  # an error may be temporary
            try:
                if self._end(self.path, self.content, None) or problem is None:
                    return
            except OSError as error:
                problem = error
        with contextlib.suppress(OSError, NotImplementedError):
            self.files.delete_own(self.path, self.content)
            return
        assert problem is not None
        logger.warning("%s could not be removed (%s): remove it", self.path, problem.strerror or problem)


def _interrupt(thread: int) -> None:
    """Raise KeyboardInterrupt in a thread: the main thread at once, others when their next call of the system ends."""
    if thread == threading.main_thread().ident and callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(thread, signal.SIGINT)
    else:  # also where SIGINT is ignored, as in a job that a shell started in the background
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))


def _cannot_write(target: str, error: OSError) -> SpdistError:
    """Return the error to raise if the lock of a target cannot be created."""
    folder = target.rpartition("/")[0]
    problem = str(error.strerror or error).replace("\n", " ")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpdistError(f"{target}: the disk is full ({problem}); nothing was written")
    return InputError(f"{target}: {folder} may not be written to ({problem}); choose another place")


def _is_empty(content: bytes) -> bool:
    """Whether a lock file has lost its content, as an unsynchronised file may after a power loss."""
    return not content.strip(b"\0")


def _warn_taken(target: str, content: bytes) -> None:
    dead, what = owner_from(content), "an empty" if _is_empty(content) else "a damaged"
    who = f"run {dead}" if dead is not None else f"a run that left {what} lock"
    logger.warning("%s: took over from %s, which ended before it was done", target, who)


# -- holding a target --------------------------------------------------------------------------------------------------

_held: dict[str, TargetLock] = {}
_guard = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_held.clear)


@contextlib.contextmanager
def hold_target(url: str | Path, *, steal: bool = False) -> Iterator[TargetLock]:
    """Hold the right to write a target; first complete a replacement that a dead run began.

    The thread that holds a target may hold it again, and any path that begins with the target's and ``.spdist-``: the
    lock is shared and ends with the outermost ``with`` block. Other threads count as other runs.

    `url`: A path or an fsspec URL; the folder of a path must exist.
    `steal`: whether to take the lock of a run on another host that had no heartbeat for `STALE_SECONDS`.
    Raises `InputError` if another run holds the target, its folder may not be written to, or files of another user for
    it lie there.
    Raises `SpdistError` at the end of the block, if another run took the lock meanwhile.

    Examples
    --------
    >>> with hold_target("memory://C.zarr") as outer, hold_target("memory://C.zarr.spdist-new") as inner:
    ...     inner is outer
    True
    """
    target = family_of(normalise(url))
    check_writable(target)
    with _guard:
        outer = _held.get(target)
        lock = outer or _held.setdefault(target, TargetLock(target))
    if outer is not None:
        if outer.thread != threading.get_ident():
            raise InputError(
                f"{target} is being written by run {outer.owner}, another thread of this process; wait for it, or "
                f"choose another name"
            )
        outer.depth += 1
        try:
            yield outer
        finally:
            outer.depth -= 1
        return
    try:
        with at(target).clear_errors():
            lock.acquire(steal=steal)
        try:
            _recover(lock)
            lock.found = at(target).relatives()
            yield lock
        except (Exception, KeyboardInterrupt) as error:
            if lock.lost:
                raise lock.stolen() from error
            raise
        finally:
            lock.release()
    finally:
        _held.pop(target, None)


def _recover(lock: TargetLock) -> None:
    """Complete a replacement that a dead run began, unless what it takes is another user's."""
    for path in at(lock.target).relatives():
        if not path.startswith(lock.path):
            at(path).check_removable()
    try:
        at(lock.target).recover()
    except PermissionError as error:
        raise not_removable(lock.target, why=str(error)) from error


def check_held(url: str) -> None:
    """Raise if another run has taken the lock of a target that this process holds.

    `url`: the target, normalised, or a path that its lock covers.
    """
    lock = _held.get(family_of(url))
    if lock is not None:
        lock.check()


def is_held(url: str) -> bool:
    """Whether this process holds the lock of a target: then nobody else writes what is at `url`, a path of the target.

    `url`: normalised.
    """
    return family_of(url) in _held


def replace(source: str, target: str) -> None:
    """Move a finished matrix to its target in one step, unless another run has taken the lock of the target.

    Raises `SpdistError` if another run has the lock; nothing is replaced.
    """
    check_held(target)
    at(target).replace_by(at(source))


def remove_remains(target: str, keep: tuple[str, ...] = ()) -> None:
    """Remove files that dead runs left next to a target, with a warning; the lock of the target must be held.

    `target`: normalised; or a path that belongs to the target, to remove only paths that begin with it.
    `keep`: paths to keep, with all paths that belong to them.
    """
    lock = _held[family_of(target)]
    removed = []
    for path in [path for path in lock.found if path.startswith(f"{target}{FAMILY}")]:
        if not any(path == kept or path.startswith(f"{kept}{FAMILY}") for kept in keep):
            lock.found.remove(path)
            if not _in_use(lock, path) and at(path).lies_there():
                at(path).clear()
                removed.append(path)
    if removed:
        logger.warning("%s: removed what a run left that ended before it was done: %s", target, ", ".join(removed))


def _in_use(lock: TargetLock, path: str) -> bool:
    """Whether a path is a file of the lock that is held, or of a run that is about to ask for it."""
    if not path.startswith(lock.path) or lock.files is None:
        return False
    content = None if path == lock.path else lock.files.read(path)
    if content is None:
        return True
    lives = writer_lives(path)
    return lock.is_live(path, content) if lives is None else lives


def readable_url(url: str) -> str:
    """Return where to read the matrix of a target that a dead run may have been replacing.

    Usually this is `url`, which must be normalised. If the run was killed between two steps, the replacement is
    finished or undone first; if that is not allowed, the result is the path of the whole matrix.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (path := at(url).whole_url()) != url and at(url).may_recover():
        try:
            with hold_target(url):
                pass
        except (InputError, OSError):  # a run that lives is replacing the matrix just now; or no right to write here
            if time.monotonic() > deadline:
                return path
            time.sleep(0.05)
    return path
