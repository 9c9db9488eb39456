"""Page-locked host memory, to and from which a GPU copies at full speed while the CPU works on.

A pool keeps idle locked memory, up to a share of the machine's memory, and lends it again. New memory is touched by all
cores, then registered with the driver: ten times as fast as an allocation by the driver.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MemoryBoundError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.memory import host_memory
from spdist.foundation.units import format_bytes

Bytes = npt.NDArray[np.uint8]

PORTABLE = 1
"""Flag of `cudaHostRegister`: page-locked for every GPU."""
PAGE = 4096
"""Bytes of the system's smallest page."""
PIECE = 32 << 20
"""Bytes that a thread touches at a time, so that the system provides their pages."""
SPARE = 1.5
"""Idle memory is lent to a request if it is at most this many times as large."""
IDLE_SHARE = 1 / 4
"""Share of the memory that this process may take that may be locked and idle."""


class _Lease:
    """Memory on loan from a pool: it goes back when the last array on it is gone."""

    def __init__(self, pool: Pool, memory: Bytes) -> None:
        self.pool, self.memory = pool, memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self.pool.give_back(self.memory)


class Pool:
    """Page-locked memory of this process; sizes are in bytes.

    `most_idle`: most that may be locked and idle; by default a quarter of the machine's memory. `most`: most that may
    be locked if any is idle; None for no bound. `held`: locked, idle or in use.
    """

    def __init__(self, most_idle: int | None = None) -> None:
        self._most_idle = most_idle
        self.idle: list[Bytes] = []  # least recently used first
        self.most: int | None = None
        self.held = 0
        # Reentrant: the garbage collector may give memory back while this thread takes some.
        self.lock = threading.RLock()

    @functools.cached_property
    def most_idle(self) -> int:
        """Most bytes that may be locked and idle; found out when memory is first locked, not on import."""
        return int(IDLE_SHARE * host_memory()) if self._most_idle is None else self._most_idle

    def take(self, size: int) -> Bytes:
        """Lend `size` bytes, a size of `pinned_bytes`."""
        with self.lock:
            fitting = [at for at, memory in enumerate(self.idle) if size <= len(memory) <= SPARE * size]
            memory = self.idle.pop(min(fitting, key=lambda at: len(self.idle[at]))) if fitting else None
        if memory is None:
            self.shrink(max(0, self._spare() - size))
            memory = _lock(size)
            with self.lock:
                self.held += size
        return np.asarray(_Lease(self, memory))[:size]

    def reserve(self, size: int) -> None:
        """Lock `size` bytes, a size of `pinned_bytes`, for a later `take`; none beyond what may be idle."""
        with self.lock:
            idle = sum(map(len, self.idle))
        if idle + size > self._spare():
            return
        memory = _lock(size)
        with self.lock:
            self.held += size
            self.idle.append(memory)

    def _spare(self) -> int:
        """Return how many bytes may be locked besides those in use."""
        if self.most is None:
            return self.most_idle
        with self.lock:
            used = self.held - sum(map(len, self.idle))
        return min(self.most_idle, self.most - used)

    def give_back(self, memory: Bytes) -> None:
        """Keep memory as idle, to be lent again."""
        with self.lock:
            self.idle.append(memory)

    def shrink(self, most: int) -> None:
        """Give idle memory back to the system, least recently used first, until at most `most` idle bytes stay."""
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

    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # whole pages: no other array shares them
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
    return ThreadPoolExecutor(count_cpus(), "spdist-touch")


POOL = Pool()
"""Of this process. Made on import: threads that asked for one at once would each make one, and lose all but one."""


def bound_pinned(most: int | None) -> None:
    """Keep no idle memory while more than `most` bytes would be locked in all; None for no bound."""
    POOL.most = most


def free_pinned() -> None:
    """Give all idle page-locked memory back to the system, and remove the bound."""
    POOL.shrink(0)
    POOL.most = None


def pinned_bytes(size: int) -> int:
    """Return the bytes to page-lock for `size`: at most an eighth more, so that few sizes serve all blocks."""
    step = max(1 << 16, 1 << max(size.bit_length() - 4, 0))
    return max(-(-size // step), 1) * step


def pinned(size: int) -> Bytes:
    """Return `size` page-locked bytes, which go back to the pool when the last array on them is gone.

    Raises `MemoryBoundError` if the system locks no more memory.
    """
    return POOL.take(pinned_bytes(size))[:size]  # a copy of more bytes would overrun its target


def reserve_pinned(size: int) -> None:
    """Page-lock `size` bytes ahead, as far as so much may be idle.

    Raises `MemoryBoundError` if the system locks no more memory.
    """
    POOL.reserve(pinned_bytes(size))


def pageable(size: int) -> Bytes:
    """Return `size` ordinary bytes: a substitute for `pinned` without a GPU."""
    return np.empty(-(-size // 16), np.complex128).view(np.uint8)


def numbers(count: int) -> npt.NDArray[np.uint64]:
    """Return page-locked memory of CuPy's pool for a few numbers that kernels write."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(8 * count), np.uint64, count)


def array_at(memory: Bytes, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a view of `count` items that lie in memory from byte `offset` on."""
    dtype = np.dtype(dtype)
    return memory[offset : offset + count * dtype.itemsize].view(dtype)
