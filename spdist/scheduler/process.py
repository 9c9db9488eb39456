"""A worker as a process: its resident memory, now and at its peak, and what it does not listen to."""

from __future__ import annotations

import contextlib
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
