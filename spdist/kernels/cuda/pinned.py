"""Page-locked host memory, to and from which a GPU copies at full speed and while the CPU goes on.

What was locked is kept and used again, up to a share of the machine's memory. Memory is taken from the system by all
cores and then registered, which is ten times as fast as to have the driver allocate it.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MemoryBoundError
from spdist.units import format_bytes

Bytes = npt.NDArray[np.uint8]

PORTABLE = 1
"""Flag of `cudaHostRegister`: page-locked for every GPU."""
PAGE = 4096
PIECE = 32 << 20
"""Bytes that a thread takes from the system at a time."""


SPARE = 1.5
"""Memory that is kept may be so many times as large as what is asked for: else each size of C would keep its own."""

IDLE_SHARE = 1 / 4
"""Of the machine's memory, what may be kept though nobody uses it, when more is locked."""


class _Lease:
    """Memory on loan from a pool: goes back with the last array on it."""

    def __init__(self, pool: Pool, memory: Bytes) -> None:
        self.pool, self.memory = pool, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self.pool.give_back(self.memory)


class Pool:
    """Page-locked memory of this process.

    Parameters
    ----------
    most_idle : int, optional
        Bytes that nobody uses and that are kept; by default a quarter of the machine's memory.

    Attributes
    ----------
    most : int or None
        Bytes in all beyond which what nobody uses is not kept, when more is locked; None: no such bound.
    held : int
        Bytes that are locked.
    """

    def __init__(self, most_idle: int | None = None) -> None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.most_idle = int(IDLE_SHARE * total) if most_idle is None else most_idle
        self.idle: list[Bytes] = []  # the last used last
        self.most: int | None = None
        self.held = 0
        self.lock = threading.RLock()  # the garbage collector may give back while this thread takes

    def take(self, size: int) -> Bytes:
        """Return `size` bytes, a size of `pinned_bytes`."""
        with self.lock:
            fitting = [at for at, memory in enumerate(self.idle) if size <= len(memory) <= SPARE * size]
            memory = self.idle.pop(min(fitting, key=lambda at: len(self.idle[at]))) if fitting else None
        if memory is None:
            self.shrink(max(0, self._spare() - size))
            memory = _lock(size)
            with self.lock:
                self.held += size
        return np.asarray(_Lease(self, memory))[:size]

    def _spare(self) -> int:
        """Return how much more may be locked beside what is in use, though nobody used it."""
        if self.most is None:
            return self.most_idle
        with self.lock:
            used = self.held - sum(map(len, self.idle))
        return min(self.most_idle, self.most - used)

    def give_back(self, memory: Bytes) -> None:
        """Keep memory for the next to take."""
        with self.lock:
            self.idle.append(memory)

    def shrink(self, most: int) -> None:
        """Give what nobody uses back to the system, what was not used for longest first, until `most` bytes stay."""
        with self.lock:
            kept, held = len(self.idle), 0
            while kept and held + len(self.idle[kept - 1]) <= most:
                kept -= 1
                held += len(self.idle[kept])
            gone, self.idle = self.idle[:kept], self.idle[kept:]
            self.held -= sum(map(len, gone))
        for memory in gone:
            _unlock(memory)


def _unlock(memory: Bytes) -> None:
    import cupy

    cupy.cuda.runtime.hostUnregister(memory.ctypes.data)


def _lock(size: int) -> Bytes:
    """Return new page-locked memory."""
    import cupy

    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # whole pages, which no other array shares
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)

    def touch(first: int) -> None:
        memory[first : first + PIECE : PAGE] = 0

    if size <= PIECE:
        touch(0)
    else:
        list(_touchers().map(touch, range(0, size, PIECE)))
    try:
        cupy.cuda.runtime.hostRegister(memory.ctypes.data, size, PORTABLE)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryBoundError(
            f"the system does not page-lock another {format_bytes(size)} of host memory ({error}): lower host_limit, "
            f"or free memory that is in use"
        ) from None
    return memory


@functools.cache
def _touchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "spdist-touch")


@functools.cache
def _pool() -> Pool:
    return Pool()


def bound_pinned(most: int | None) -> None:
    """Keep no page-locked memory that nobody uses where more than so many bytes would be locked in all; None: any."""
    _pool().most = most


def free_pinned() -> None:
    """Give the page-locked memory that no block and no result uses back to the system; there is no bound then."""
    _pool().shrink(0)
    _pool().most = None


def pinned_bytes(size: int) -> int:
    """Return the bytes that are page-locked for `size`: at most an eighth more, so that few sizes serve all blocks.

    Examples
    --------
    >>> pinned_bytes(1_000_000)
    1048576
    """
    step = max(1 << 16, 1 << max(size.bit_length() - 4, 0))
    return max(-(-size // step), 1) * step


def pinned(size: int) -> Bytes:
    """Return `size` page-locked bytes; they go back to the pool with the last array on them."""
    return _pool().take(pinned_bytes(size))[:size]  # a copy of more would run over what lies behind its target


def pageable(size: int) -> Bytes:
    """Return ordinary bytes, for preparing a block where there is no GPU."""
    return np.empty(-(-size // 16), np.complex128).view(np.uint8)


def array_at(memory: Bytes, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of `count` items on memory, from byte `offset` on."""
    dtype = np.dtype(dtype)
    return memory[offset : offset + count * dtype.itemsize].view(dtype)
