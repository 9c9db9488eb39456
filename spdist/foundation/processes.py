"""Identify the process that wrote a file, by boot, namespace, process id and start time, and see if it is alive."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path
from uuid import uuid4


def process_start(pid: int) -> str:
    """Return the start of a process, as text to compare; empty if the process has ended.

    Examples
    --------
    >>> process_start(os.getpid()) == process_start(os.getpid()) != ""
    True
    """
    try:  # ticks since boot: unlike psutil's time of day, they do not change when the clock is set
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except (OSError, ValueError, IndexError):
        pass
    import psutil  # where there is no /proc

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.Error:
        return ""


def boot() -> str:
    """Return text that identifies this boot of this host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"{platform.node()}-{psutil.boot_time():.0f}"


def namespace() -> str:
    """Return text that identifies the namespace of process ids of this process."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


@functools.cache
def _here() -> str:
    return hashlib.blake2b(f"{boot()} {namespace()}".encode(), digest_size=4).hexdigest()


def name_of_writer() -> str:
    """Return a suffix for the name of a temporary file: it identifies this process and differs on each call."""
    pid = os.getpid()
    return f"{_here()}-{pid}-{process_start(pid)}-{uuid4().hex[:8]}"


def writer_lives(name: str) -> bool | None:
    """Whether the process that named a temporary file is alive; None if this process cannot see that process.

    Examples
    --------
    >>> writer_lives(f"C.zarr.spdist-lock.{name_of_writer()}"), writer_lives("C.zarr.spdist-lock")
    (True, None)
    """
    parts = name.rpartition(".")[2].split("-")
    if len(parts) != 4 or parts[0] != _here() or not parts[1].isdigit():
        return None
    return process_start(int(parts[1])) == parts[2]
