"""Page-lock operands of the caller in place: a GPU copies from them at full speed, and no core copies them.

Locking memory takes about as long as copying it to locked memory. So an array is locked when a second multiplication
reads it, and unlocked when it is freed. Only large arrays whose memory NumPy owns are locked: a weak reference reports
when NumPy frees it. Each array is locked as a whole, as no copy may begin in locked memory and end in other memory.
Memory in small pages takes far longer to lock than to copy: trials on small parts detect this. After its first
multiplication, NumPy refuses to resize such an array in place, because of the weak reference.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.foundation.units import format_bytes
from spdist.kernels.cuda.pinned import PORTABLE

logger = logging.getLogger("spdist")


@dataclass(frozen=True)
class RegistrationTuning:
    """Which memory is page-locked."""

    least_bytes: int = 64 << 20  # least bytes of an array for which locking is tried
    trial_bytes: int = 8 << 20  # bytes that one trial locks to measure the time
    trials: int = 3  # number of trials before locking is given up as slow
    least_rate: float = 5e9  # bytes a second that one trial must reach


REGISTRATION_TUNING = RegistrationTuning()


class OwnedMemory:
    """Memory that an array owns, page-locked when a second multiplication reads it; `readers` counts them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.readers, self.is_locked = 0, False
        self._lock = threading.Lock()

    def note_reader(self, tuning: RegistrationTuning) -> None:
        """Note a multiplication; lock the memory if it is the second."""
        with self._lock:
            self.readers += 1
            if self.readers == 2:
                self.is_locked = self._is_quick(tuning) and _register(self.address, self.nbytes)
                if self.is_locked:
                    logger.info("%s of an operand are read again: page-locked", format_bytes(self.nbytes))

    def _is_quick(self, tuning: RegistrationTuning) -> bool:
        """Return whether one of several trials locks a part fast enough; other threads may delay a trial."""
        size, trials = tuning.trial_bytes, tuning.trials
        offsets = (trial * self.nbytes // trials for trial in range(trials))
        return any(tuning.least_rate * self._seconds(offset, size) <= size for offset in offsets)

    def _seconds(self, offset: int, size: int) -> float:
        """Return the seconds it takes to lock a part; infinity if the system refuses."""
        begin = time.perf_counter()
        if not _register(self.address + offset, size):
            return float("inf")
        seconds = time.perf_counter() - begin
        _unregister(self.address + offset)
        return seconds

    def unlock(self) -> None:
        """Unlock memory that is about to be freed."""
        _owned.pop(self.address, None)
        if self.is_locked:
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


_owned: dict[int, OwnedMemory] = {}
"""Memory of the arrays that were read, by address."""


def _memory_of(array: npt.NDArray[Any], least_bytes: int) -> OwnedMemory | None:
    """Return the memory that an array lies in; None if the memory is small, or NumPy does not own it."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not owner.flags.owndata or not owner.flags.c_contiguous or owner.nbytes < least_bytes:
        return None
    address = owner.ctypes.data
    if address not in _owned:
        _owned[address] = memory = OwnedMemory(address, owner.nbytes)
        weakref.finalize(owner, memory.unlock).atexit = False  # the driver may be gone by then
    return _owned[address]


def note_operands(arrays: Iterable[npt.NDArray[Any]], tuning: RegistrationTuning = REGISTRATION_TUNING) -> None:
    """Note that a multiplication reads arrays; page-lock each array that an earlier multiplication read.

    Views of one array count once.
    """
    found = (_memory_of(array, tuning.least_bytes) for array in arrays)
    for memory in {id(memory): memory for memory in found if memory is not None}.values():
        memory.note_reader(tuning)
