"""A resident B: read once, in pieces, by all workers of one host together, into memory that they share.

The memory is a file of tmpfs that each worker maps. A piece is a range of whole Zarr chunks. A worker locks the byte
whose number is the piece's, reads the piece, and sets a mark in the mapping that says how it went. The kernel releases
the locks of a dead process; then another worker reads the piece. All users hold a shared lock on one more byte: a user
that leaves and finds no other one removes the file. Files of killed runs are removed by the next product. Nobody may
write to the memory. If a worker cannot have it, it reads all pieces by itself, into private memory.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import format_bytes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix

logger = logging.getLogger("spdist")

TO_READ, SOUND, WRONG = range(3)
"""Marks of pieces; rows of a wrong piece are not canonical."""
USERS_BYTE = 1 << 62
"""Byte on which users hold their shared lock."""
PAGE = 4096
"""Bytes to which arrays in shared memory are aligned."""


@dataclass(frozen=True)
class SharingTuning:
    """How a resident B is read and shared."""

    folder: Path = Path("/dev/shm")  # A tmpfs
    # bytes of a piece. It holds whole Zarr chunks, enough of them for several threads.
    piece_bytes: int = 16 << 20
    least_bytes: int = 8 << 20  # bytes of the smallest matrix that is shared
    readers: int = 4  # threads of a worker that read, at most
    spare_share: float = 1 / 8  # share of the tmpfs that is left to others


SHARING = SharingTuning()

ArraySizes = list[tuple[int, np.dtype[Any]]]
"""Lengths and dtypes of arrays in one memory: first the marks, then the arrays of the matrix."""
NO_ARRAYS: ArraySizes = [(0, np.dtype(np.uint8))]


class Piece(NamedTuple):
    """Elements ``[first:last)`` of an array; `number` is its mark and its lock."""

    number: int
    first: int
    last: int


def _lock(descriptor: int, kind: int, at: int, *, wait: bool = False) -> bool:
    """Lock or unlock a byte of an open file; return False if others hold it.

    The lock belongs to the open file: the kernel releases it when the last process closes the file.
    """
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)  # struct flock of Linux
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


class PrivateMemory:
    """Arrays of one process.

    `sizes`: the first array, the marks, is filled with zeros; the others are not initialised.
    """

    def __init__(self, sizes: ArraySizes) -> None:
        self.arrays: list[ValueArray] = [np.zeros(*sizes[0]), *itertools.starmap(np.empty, sizes[1:])]

    def lock_piece(self, number: int, wait: bool) -> bool:
        """Lock a piece; return False if another user has it and `wait` is False."""
        return True

    def unlock_piece(self, number: int) -> None:
        """Unlock a piece."""

    def reserve(self, part: ValueArray) -> None:
        """Make sure that there is memory for a part of an array."""

    def leave(self) -> None:
        """Stop being a user; arrays live as long as they are referenced."""


class SharedMemory(PrivateMemory):
    """Arrays that all processes of this user share under one name.

    Raises `OSError` if there is no such memory, or too little, or the file of this name belongs to another user.
    """

    def __init__(self, name: str, sizes: ArraySizes, tuning: SharingTuning) -> None:
        nbytes = [-(-length * dtype.itemsize // PAGE) * PAGE for length, dtype in sizes]
        *starts, size = itertools.accumulate(nbytes, initial=0)
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise OSError("this system has no locks of open files")
        remove_abandoned(tuning.folder)
        self.path = tuning.folder / f"{file_prefix()}{name}"
        self.descriptor = _enter(self.path)
        try:
            _check_room(self.descriptor, size, tuning)
            os.ftruncate(self.descriptor, size)  # every user does so
            os.posix_fallocate(self.descriptor, 0, nbytes[0])
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            self.leave()
            raise
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.arrays = [
            np.frombuffer(self.memory, dtype, length, start) if length else np.empty(0, dtype)
            for (length, dtype), start in zip(sizes, starts, strict=True)
        ]

    def lock_piece(self, number: int, wait: bool) -> bool:
        """Lock a piece; return False if another user has it and `wait` is False."""
        return _lock(self.descriptor, fcntl.F_WRLCK, number, wait=wait)

    def unlock_piece(self, number: int) -> None:
        """Unlock a piece."""
        _lock(self.descriptor, fcntl.F_UNLCK, number)

    def reserve(self, part: ValueArray) -> None:
        """Take pages from the file system, which raises an error if it is full; a full mapping would kill us."""
        if part.nbytes:
            os.posix_fallocate(self.descriptor, part.ctypes.data - self.arrays[0].ctypes.data, part.nbytes)

    def leave(self) -> None:
        """Close the file; the last user removes it."""
        _leave(self.descriptor, self.path)


def file_prefix() -> str:
    """Return the prefix of the names of this user's shared files."""
    return f"spdist-{os.getuid()}-"


def _check_room(descriptor: int, size: int, tuning: SharingTuning) -> None:
    """Refuse to grow a file beyond the tmpfs, less the share that is left to others."""
    room, used = os.fstatvfs(descriptor), os.fstat(descriptor).st_blocks * 512
    left = room.f_frsize * (room.f_bavail - int(tuning.spare_share * room.f_blocks))
    if left < size - used:
        raise OSError(f"{tuning.folder} has {format_bytes(max(left, 0))} to spare for {format_bytes(size)}")


def _enter(path: Path) -> int:
    """Open or create a file that only this user may read, and become one of its users."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _lock(descriptor, fcntl.F_RDLCK, USERS_BYTE, wait=True)
        facts = os.fstat(descriptor)
        if facts.st_nlink == 1 and stat.S_IMODE(facts.st_mode) == 0o600 and facts.st_uid == os.getuid():
            return descriptor
        os.close(descriptor)
        if facts.st_nlink:  # its last user has not just removed it
            raise PermissionError(f"{path} is not this user's alone")


def _leave(descriptor: int, path: Path) -> None:
    # Unlock first: two users that leave at once would both find another user.
    _lock(descriptor, fcntl.F_UNLCK, USERS_BYTE)
    if _lock(descriptor, fcntl.F_WRLCK, USERS_BYTE) and os.fstat(descriptor).st_nlink:
        path.unlink()
    _lock(descriptor, fcntl.F_UNLCK, USERS_BYTE)  # a mapping keeps the file open
    os.close(descriptor)


def remove_abandoned(folder: Path = SHARING.folder) -> None:
    """Remove this user's shared files without users; their runs were killed.

    `folder`: the tmpfs.
    """
    for path in folder.glob(f"{file_prefix()}*"):
        with contextlib.suppress(OSError):  # already removed, or not a file
            if path.lstat().st_uid == os.getuid():
                _leave(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path)


def _cut(number: int, length: int, piece_bytes: int, *arrays: ChunkedArray) -> list[Piece]:
    """Cut ``range(length)`` into pieces of whole Zarr chunks of some arrays, numbered from `number` on."""
    unit = max(array.chunk for array in arrays)
    step = max(1, piece_bytes // (unit * sum(array.dtype.itemsize for array in arrays))) * unit
    return [Piece(number + i, first, min(first + step, length)) for i, first in enumerate(range(0, length, step))]


class ResidentMatrix:
    """The whole of a matrix in memory, read on the first request or before.

    `check`: takes rows; raises a `MatrixError` if they are not canonical.
    `name`: name under which other processes of this host share this matrix. If it is empty, this process reads alone.
    `dtype`: dtype of the values in memory.
    """

    def __init__(
        self,
        b: StoredMatrix,
        check: Callable[[CSR], Any],
        name: str = "",
        dtype: npt.DTypeLike | None = None,
        tuning: SharingTuning | None = None,
    ) -> None:
        self.b, self.check, self.name = b, check, name
        self.dtype = b.dtype if dtype is None else np.dtype(dtype)
        self.tuning = tuning or SHARING
        self.memory = PrivateMemory(NO_ARRAYS)
        self._whole: CSR | None = None
        self._is_dropped = False
        self._lock = threading.Lock()

    def get(self, add_bytes: Callable[[int], None] = lambda nbytes: None) -> CSR:
        """Return the matrix.

        `add_bytes`: called with the bytes of the matrix if this call reads it.
        Raises `SpdistError` if a Zarr chunk is missing or altered, or rows are not canonical.
        Raises `CancelledError` After `drop`.
        """
        with self._lock:
            if self._is_dropped:
                raise CancelledError
            if self._whole is None:
                try:
                    b = self._read()
                except BaseException:
                    self._leave()
                    raise
                self._whole = CSR(b.indptr, b.indices, b.data.astype(self.dtype, copy=False), b.shape)
                add_bytes(self._whole.nbytes)
            return self._whole

    def begin(self) -> None:
        """Begin to read in a thread. An error is ignored: `get` raises it again."""

        def read() -> None:
            with contextlib.suppress(Exception):
                self.get()

        threading.Thread(target=read, daemon=True).start()

    def drop(self) -> None:
        """Release the matrix; stops reading it."""
        self._is_dropped = True
        with self._lock:
            self._whole = None
            self._leave()

    def _read(self) -> CSR:
        """Read the matrix, into shared memory if that is wanted and possible."""
        b = self.b
        offsets = _cut(0, b.nrows + 1, self.tuning.piece_bytes, b.indptr)
        entries = _cut(len(offsets), b.nnz, self.tuning.piece_bytes, b.indices, b.data)
        marks = len(offsets) + len(entries), np.dtype(np.uint8)
        sizes: ArraySizes = [marks, (b.nrows + 1, np.dtype(np.int64)), (b.nnz, index_dtype(b.ncols)), (b.nnz, b.dtype)]
        if self.name and b.nbytes >= self.tuning.least_bytes:
            try:
                self.memory = SharedMemory(self.name, sizes, self.tuning)
                return self._fill(offsets, entries)
            except OSError as error:
                self._leave()
                logger.info("B is not shared by the workers of this host (%s): this one reads it by itself", error)
        self.memory = PrivateMemory(sizes)
        return self._fill(offsets, entries)

    def _leave(self) -> None:
        memory, self.memory = self.memory, PrivateMemory(NO_ARRAYS)
        memory.leave()

    def _fill(self, offsets: list[Piece], entries: list[Piece]) -> CSR:
        """Read the pieces that nobody else reads, wait for the others, and return the matrix.

        All offsets come before the entries, whose check needs them.
        """
        marks, indptr, indices, data = self.memory.arrays
        with ThreadPoolExecutor(min(self.tuning.readers, count_cpus())) as threads:
            for read, pieces in ((self._read_offsets, offsets), (self._read_entries, entries)):
                left = pieces
                for wait in (False, True):
                    done = list(threads.map(functools.partial(self._read_piece, read, wait), left))
                    left = [piece for piece, is_done in zip(left, done, strict=True) if not is_done]
        whole = CSR(indptr, indices, data, self.b.shape)
        starts = np.array([piece.first for piece in entries[1:]], np.int64)
        if np.any(marks == WRONG) or not _pieces_fit(whole, starts):
            self.check(whole)  # raises, with the reason
        return whole

    def _read_piece(self, read: Callable[[int, int], int], wait: bool, piece: Piece) -> bool:
        """Read a piece unless it has been read; return False if another worker is reading it and `wait` is False."""
        marks = self.memory.arrays[0]
        if self._is_dropped:
            raise CancelledError
        if not self.memory.lock_piece(piece.number, wait):
            return False
        try:
            if marks[piece.number] == TO_READ:
                marks[piece.number] = read(piece.first, piece.last)
            return True
        finally:
            self.memory.unlock_piece(piece.number)

    def _read_offsets(self, first: int, last: int) -> int:
        offsets = self.memory.arrays[1][first:last]
        self.memory.reserve(offsets)
        offsets[:] = self.b.read_indptr(first, last - 1)
        return SOUND

    def _read_entries(self, first: int, last: int) -> int:
        """Read entries, and check them as if their first and last rows began and ended with them."""
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


def _pieces_fit(m: CSR, starts: Int64Array) -> bool:
    """Whether offsets rise to the number of entries, and columns rise in the rows that two pieces share."""
    if m.indptr[0] != 0 or m.indptr[-1] != m.nnz or np.any(m.indptr[1:] < m.indptr[:-1]):
        return False
    begins = m.indptr[np.searchsorted(m.indptr, starts)] == starts
    return bool(np.all(begins | (m.indices[starts] > m.indices[starts - 1])))
