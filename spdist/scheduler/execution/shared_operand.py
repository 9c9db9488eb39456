"""A B that stays: read once, in pieces, by all workers of one host together, into memory that they share.

The memory is a file of tmpfs that each worker maps. A piece is a range of whole Zarr chunks. Who reads it holds a lock
on the byte of that number until a mark in the mapping says how it went; the kernel lets go of what a dead process
held, and then another reads the piece. All users hold a shared lock on one byte more: whoever leaves and finds no other
user removes the file, and so does the next product with those of runs that were killed. Such memory may not be written
to. Where it is not to be had, a worker reads all pieces by itself, to memory of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix
from spdist.units import format_bytes

logger = logging.getLogger("spdist")

FOLDER = Path("/dev/shm")
PIECE = 16 << 20
"""Bytes of a piece, in whole Zarr chunks: of small ones zarrs decodes too few at once."""
LEAST = 8 << 20
"""Bytes of a matrix that is shared."""
READERS = 4
"""Threads of a worker that read, at the most."""
SPARE_SHARE = 1 / 8
"""Of the file system, what others keep."""
TO_READ, SOUND, WRONG = range(3)
"""Marks of pieces; rows of a wrong one are not canonical."""
USERS = 1 << 62
"""The byte on which users hold their lock."""
PAGE = 4096

Layout = list[tuple[int, np.dtype[Any]]]
"""Lengths and dtypes of arrays: first the marks, then what they tell of."""
NOTHING: Layout = [(0, np.dtype(np.uint8))]


def _lock(descriptor: int, kind: int, at: int, *, wait: bool = False) -> bool:
    """Lock or unlock a byte of an open file; False if others hold it. The kernel unlocks what its last process held."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)  # struct flock of Linux
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


class Alone:
    """Memory of one process."""

    def __init__(self, layout: Layout) -> None:
        self.arrays: list[ValueArray] = [np.zeros(*layout[0]), *itertools.starmap(np.empty, layout[1:])]

    def claim(self, number: int, wait: bool) -> bool:
        """Whether a piece is the caller's, until it lets go; if another has it, wait or not."""
        return True

    def let_go(self, number: int) -> None:
        """Leave a piece to others."""

    def reserve(self, part: ValueArray) -> None:
        """Make sure that there is memory for a part of an array."""

    def leave(self) -> None:
        """Be no user any more; arrays stay as long as they are used."""


class Together(Alone):
    """Memory of all processes of this user that ask for it by one name.

    Raises
    ------
    OSError
        If there is none, or too little; or the file of this name is not this user's alone.
    """

    def __init__(self, name: str, layout: Layout) -> None:
        sizes = [-(-length * dtype.itemsize // PAGE) * PAGE for length, dtype in layout]
        *starts, size = itertools.accumulate(sizes, initial=0)
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise OSError("this system has no locks of open files")
        remove_abandoned()
        self.path = FOLDER / f"{_prefix()}{name}"
        self.descriptor = _enter(self.path)
        try:
            room, used = os.fstatvfs(self.descriptor), os.fstat(self.descriptor).st_blocks * 512
            left = room.f_frsize * (room.f_bavail - int(SPARE_SHARE * room.f_blocks))
            if left < size - used:
                raise OSError(f"{FOLDER} has {format_bytes(max(left, 0))} to spare for {format_bytes(size)}")
            os.ftruncate(self.descriptor, size)  # as all who come do
            os.posix_fallocate(self.descriptor, 0, sizes[0])
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            self.leave()
            raise
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.arrays = [
            np.frombuffer(self.memory, dtype, length, start) if length else np.empty(0, dtype)
            for (length, dtype), start in zip(layout, starts, strict=True)
        ]

    def claim(self, number: int, wait: bool) -> bool:
        """Lock a piece."""
        return _lock(self.descriptor, fcntl.F_WRLCK, number, wait=wait)

    def let_go(self, number: int) -> None:
        """Unlock it."""
        _lock(self.descriptor, fcntl.F_UNLCK, number)

    def reserve(self, part: ValueArray) -> None:
        """Take pages from the file system, which says so if it has none left: to touch them then would be the end."""
        if part.nbytes:
            os.posix_fallocate(self.descriptor, part.ctypes.data - self.arrays[0].ctypes.data, part.nbytes)

    def leave(self) -> None:
        """Let go of the file; the last one removes it."""
        _leave(self.descriptor, self.path)


def _prefix() -> str:
    return f"spdist-{os.getuid()}-"


def _enter(path: Path) -> int:
    """Open a file of this user's alone, made if need be, as one of its users."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _lock(descriptor, fcntl.F_RDLCK, USERS, wait=True)
        facts = os.fstat(descriptor)
        if facts.st_nlink == 1 and stat.S_IMODE(facts.st_mode) == 0o600 and facts.st_uid == os.getuid():
            return descriptor
        os.close(descriptor)
        if facts.st_nlink:  # not just removed by its last user
            raise PermissionError(f"{path} is not this user's alone")


def _leave(descriptor: int, path: Path) -> None:
    _lock(descriptor, fcntl.F_UNLCK, USERS)  # first: two who leave at once would keep each other from the next
    if _lock(descriptor, fcntl.F_WRLCK, USERS) and os.fstat(descriptor).st_nlink:
        path.unlink()
    _lock(descriptor, fcntl.F_UNLCK, USERS)  # a mapping keeps the file open
    os.close(descriptor)


def remove_abandoned() -> None:
    """Remove the files of this user's that have no user left, as all were killed."""
    for path in FOLDER.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):  # gone already, or no file
            if path.lstat().st_uid == os.getuid():
                _leave(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path)


def _ranges(length: int, *arrays: ChunkedArray) -> list[tuple[int, int]]:
    """Cut a length into ranges of whole Zarr chunks of arrays."""
    unit = max(array.chunk for array in arrays)
    step = max(1, PIECE // (unit * sum(array.dtype.itemsize for array in arrays))) * unit
    return [(first, min(first + step, length)) for first in range(0, length, step)]


class Resident:
    """The whole of a matrix, read when it is first asked for, or ahead of that.

    Parameters
    ----------
    b : StoredMatrix
    check : callable
        Takes rows, and raises a `MatrixError` if they are not canonical.
    name : str
        Of the memory in which other processes of this host want the same matrix; empty: this one reads by itself.
    dtype : dtype, optional
        In which values are kept.
    """

    def __init__(
        self, b: StoredMatrix, check: Callable[[CSR], Any], name: str = "", dtype: npt.DTypeLike | None = None
    ) -> None:
        self.b, self.check, self.name = b, check, name
        self.dtype = b.dtype if dtype is None else np.dtype(dtype)
        self.lock = threading.Lock()
        self.whole: CSR | None = None
        self.memory = Alone(NOTHING)
        self.stopped = False

    def get(self, moved: Callable[[int], None] = lambda nbytes: None) -> CSR:
        """Return the matrix; `moved` is told its bytes if it is read now.

        Raises
        ------
        SpdistError
            If a Zarr chunk is missing or altered, or rows are not canonical.
        """
        with self.lock:
            if self.stopped:
                raise CancelledError
            if self.whole is None:
                try:
                    b = self._read()
                except BaseException:
                    self._leave()
                    raise
                self.whole = CSR(b.indptr, b.indices, b.data.astype(self.dtype, copy=False), b.shape)
                moved(self.whole.nbytes)
            return self.whole

    def begin(self) -> None:
        """Read ahead, in a thread; what goes wrong is met again by who needs the matrix."""

        def read() -> None:
            with contextlib.suppress(Exception):
                self.get()

        threading.Thread(target=read, daemon=True).start()

    def drop(self) -> None:
        """Let go of the matrix; stops reading it."""
        self.stopped = True
        with self.lock:
            self.whole = None
            self._leave()

    def _read(self) -> CSR:
        b, offsets = self.b, _ranges(self.b.nrows + 1, self.b.indptr)
        entries = _ranges(b.nnz, b.indices, b.data)
        marks = len(offsets) + len(entries), np.dtype(np.uint8)
        layout: Layout = [marks, (b.nrows + 1, np.dtype(np.int64)), (b.nnz, index_dtype(b.ncols)), (b.nnz, b.dtype)]
        if self.name and b.nbytes >= LEAST:
            try:
                self.memory = Together(self.name, layout)
                return self._fill(offsets, entries)
            except OSError as error:
                self._leave()
                logger.info("B is not shared by the workers of this host (%s): this one reads it by itself", error)
        self.memory = Alone(layout)
        return self._fill(offsets, entries)

    def _leave(self) -> None:
        memory, self.memory = self.memory, Alone(NOTHING)
        memory.leave()

    def _fill(self, offsets: list[tuple[int, int]], entries: list[tuple[int, int]]) -> CSR:
        """Read the pieces that nobody else reads, then those that others left; return the whole."""
        marks, indptr, indices, data = self.memory.arrays
        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as threads:
            for read, pieces in (
                (self._read_offsets, list(enumerate(offsets))),
                (self._read_entries, list(enumerate(entries, len(offsets)))),
            ):
                for wait in (False, True):
                    done = threads.map(functools.partial(self._piece, read, wait), pieces)
                    pieces = [piece for piece, is_done in zip(pieces, list(done), strict=True) if not is_done]
        whole = CSR(indptr, indices, data, self.b.shape)
        starts = np.array([first for first, _ in entries[1:]], np.int64)
        if np.any(marks == WRONG) or not _fit(whole, starts):
            self.check(whole)  # says what is wrong
        return whole

    def _piece(self, read: Callable[[int, int], int], wait: bool, piece: tuple[int, tuple[int, int]]) -> bool:
        """Read a piece if it is still to be read; False if another is at it, and that is not waited for."""
        number, (first, last) = piece
        marks = self.memory.arrays[0]
        if self.stopped:
            raise CancelledError
        if not self.memory.claim(number, wait):
            return False
        try:
            if marks[number] == TO_READ:
                marks[number] = read(first, last)
            return True
        finally:
            self.memory.let_go(number)

    def _read_offsets(self, first: int, last: int) -> int:
        offsets = self.memory.arrays[1][first:last]
        self.memory.reserve(offsets)
        offsets[:] = self.b.read_indptr(first, last - 1)
        return SOUND

    def _read_entries(self, first: int, last: int) -> int:
        """Read entries, and look at them as if rows began and ended with them."""
        _, indptr, *arrays = self.memory.arrays
        indices, data = (array[first:last] for array in arrays)
        self.memory.reserve(indices)
        self.memory.reserve(data)
        self.b.read_entries(indices, data, first, first, last)
        low, high = int(np.searchsorted(indptr, first, "right")) - 1, int(np.searchsorted(indptr, last))
        offsets = np.clip(indptr[max(low, 0) : high + 1] - first, 0, last - first)
        try:
            self.check(CSR(offsets, indices, data, (len(offsets) - 1, self.b.ncols)))
        except MatrixError:
            return WRONG
        return SOUND


def _fit(m: CSR, starts: Int64Array) -> bool:
    """Whether offsets rise to the number of entries, and columns do where a row goes on at the start of a piece."""
    if m.indptr[0] != 0 or m.indptr[-1] != m.nnz or np.any(m.indptr[1:] < m.indptr[:-1]):
        return False
    begins = m.indptr[np.searchsorted(m.indptr, starts)] == starts
    return bool(np.all(begins | (m.indices[starts] > m.indices[starts - 1])))
