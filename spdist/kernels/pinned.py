"""Page-locked host memory, to and from which a GPU copies at full speed and while the CPU goes on.

What was locked is kept and used again. Memory is taken from the system by all cores and then registered, which is ten
times as fast as to have the driver allocate it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MemoryBoundError
from spdist.text import format_bytes

Bytes = npt.NDArray[np.uint8]

PORTABLE = 1
"""Flag of `cudaHostRegister`: page-locked for every GPU."""
PAGE = 4096
PIECE = 32 << 20
"""Bytes that a thread takes from the system at a time."""


SPARE = 1.5
"""Memory that is kept may be so many times as large as what is asked for: else each size of C would keep its own."""


class _Lease:
    """Memory on loan from a pool: goes back with the last array on it."""

    def __init__(self, pool: Pool, memory: Bytes) -> None:
        self.pool, self.memory = pool, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self.pool.give_back(self.memory)


class Pool:
    """Page-locked memory of this process by size."""

    def __init__(self) -> None:
        self.free: dict[int, list[Bytes]] = {}
        self.lock = threading.RLock()  # the garbage collector may give back while this thread takes

    def take(self, size: int) -> Bytes:
        """Return `size` bytes, a size of `pinned_bytes`."""
        with self.lock:
            fitting = [other for other, kept in self.free.items() if size <= other <= SPARE * size and kept]
            memory = self.free[min(fitting)].pop() if fitting else None
        return np.asarray(_Lease(self, _lock(size) if memory is None else memory))[:size]

    def give_back(self, memory: Bytes) -> None:
        """Keep memory for the next to take."""
        with self.lock:
            self.free.setdefault(len(memory), []).append(memory)

    def free_all(self) -> None:
        """Give what nobody uses back to the system."""
        import cupy

        with self.lock:
            free, self.free = self.free, {}
        for memory in itertools.chain.from_iterable(free.values()):
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


def free_pinned() -> None:
    """Give the page-locked memory that no block and no result uses back to the system."""
    _pool().free_all()


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
    """Return page-locked bytes; they go back to the pool with the last array on them."""
    return _pool().take(pinned_bytes(size))


def pageable(size: int) -> Bytes:
    """Return ordinary bytes, for preparing a block where there is no GPU."""
    return np.empty(-(-size // 16), np.complex128).view(np.uint8)


def array_at(memory: Bytes, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of `count` items on memory, from byte `offset` on."""
    dtype = np.dtype(dtype)
    return memory[offset : offset + count * dtype.itemsize].view(dtype)
