"""A worker as a process: its resident memory, now and at its peak, and what it does not listen to."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

NICE_VARIABLE = "SPDIST_NICE"
"""By how much a worker's priority is to be lower."""
COPY_BYTES, COPIES = 16 << 20, 3
"""Bytes that are copied to see how quick that is, more than a core's caches hold, and how often."""
KEPT_SHARE, KEPT_LEAST, KEPT_MOST = 32, 128 << 10, 4 << 20
"""Arrays of so small a part of a memory limit are kept by the allocator for reuse, within these bounds: to touch fresh
pages costs several times as much as to use old ones, but what is kept in pieces between others is not given back. The
most is what workers start with."""
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Parameters of glibc's `mallopt`."""
_STATUS = Path("/proc/self/status")


def resident_memory() -> int:
    """Return the bytes of memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def reset_peak() -> None:
    """Let `peak_memory` count from now on, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the most bytes this process has held since `reset_peak`; elsewhere than on Linux, what it holds now."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    except OSError:
        return resident_memory()
    return int(line.split()[1]) * 1024


def keep_small_arrays(memory_limit: int) -> None:
    """Have the allocator give larger arrays back to the system at once, where it is glibc's."""
    most = min(max(memory_limit // KEPT_SHARE, KEPT_LEAST), KEPT_MOST)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        for parameter in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, most)


@functools.cache
def copy_rate() -> float:
    """Return the bytes/s at which one core copies in memory."""
    source = np.ones(COPY_BYTES, np.uint8)
    target, best = np.empty_like(source), math.inf
    for _ in range(COPIES):
        begin = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - begin)
    return COPY_BYTES / best


def dask_setup(worker: Any) -> None:
    """Leave Ctrl-C to the client, which closes its workers, and step back if told so: Dask calls this at the start."""
    os.nice(int(os.environ.get(NICE_VARIABLE, 0)))
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
