"""Arrays of others, page-locked where they lie: a GPU copies from them at full speed, and no core has to copy them.

To lock memory takes about as long as to copy it to memory that is locked: an array is locked when a second product
reads it, and stays so as long as it lives. Only large arrays whose memory NumPy owns are: their end is known. Each is
locked as a whole, for no copy may begin in locked memory and end in other. Memory in small pages takes far longer to be
locked than to be copied; small parts of it, tried first, tell. NumPy refuses to resize such an array in place from its
first product on: it has a weak reference, by which the end of its memory is known.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.pinned import PORTABLE
from spdist.units import format_bytes

logger = logging.getLogger("spdist")

LEAST = 64 << 20
"""Bytes of an array for which locking is tried."""
TRIED, TRIES = 8 << 20, 3
"""Bytes that are locked to see how long it takes, and how often if it takes long."""
LEAST_RATE = 5e9
"""Bytes of these that must be locked a second."""


class Memory:
    """What an array owns, and how many products read it; locked with the second."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.products, self.locked = 0, False
        self.lock = threading.Lock()

    def note(self) -> None:
        """Take note of a product; lock the memory if it is the second."""
        with self.lock:
            self.products += 1
            if self.products == 2:
                self.locked = self._is_quick() and _register(self.address, self.nbytes)
                if self.locked:
                    logger.info("%s of an operand are read again: page-locked", format_bytes(self.nbytes))

    def _is_quick(self) -> bool:
        """Whether parts of the memory are soon locked; others may have kept this thread from it."""
        return any(LEAST_RATE * self._seconds(try_ * self.nbytes // TRIES) <= TRIED for try_ in range(TRIES))

    def _seconds(self, offset: int) -> float:
        """Return how long it takes to lock a part; for ever if that is refused."""
        begin = time.perf_counter()
        if not _register(self.address + offset, TRIED):
            return float("inf")
        seconds = time.perf_counter() - begin
        _unregister(self.address + offset)
        return seconds

    def unlock(self) -> None:
        """Unlock what is about to go."""
        _known.pop(self.address, None)
        if self.locked:
            _unregister(self.address)


def _register(address: int, size: int) -> bool:
    import cupy

    try:
        cupy.cuda.runtime.hostRegister(address, size, PORTABLE)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        logger.info("%s of an operand are not page-locked: %s", format_bytes(size), error)
        return False
    return True


def _unregister(address: int) -> None:
    import cupy

    cupy.cuda.runtime.hostUnregister(address)


_known: dict[int, Memory] = {}
"""By address."""


def _memory_of(array: npt.NDArray[Any]) -> Memory | None:
    """Return the large memory that an array lies in; None if it does not, or NumPy does not own it."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not owner.flags.owndata or not owner.flags.c_contiguous or owner.nbytes < LEAST:
        return None
    address = owner.ctypes.data
    if address not in _known:
        _known[address] = memory = Memory(address, owner.nbytes)
        weakref.finalize(owner, memory.unlock).atexit = False  # the driver may be gone by then
    return _known[address]


def note(arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Take note of a product that reads arrays; those that one read before are page-locked."""
    found = {id(memory): memory for memory in map(_memory_of, arrays) if memory is not None}
    for memory in found.values():
        memory.note()
