"""Resident memory of this process: what it is now, and the peak since a moment of our choosing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

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
