"""A worker as a process: its memory now and at its peak, its allocator, and its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spdist.errors import InputError, install
from spdist.foundation.cpus import count_cpus

COPY_BYTES, COPIES = 16 << 20, 3
"""To measure one core's copy rate: bytes of a copy, more than its caches hold, and the number of copies."""
KEPT_FROM, KEPT_SHARE, KEPT_LEAST, KEPT_MOST = 16 << 20, 128, 128 << 10, 4 << 20
"""The allocator keeps arrays below ``(memory_limit - KEPT_FROM) // KEPT_SHARE`` bytes for reuse, within the bounds.

Fresh pages cost several times as much to touch as used ones, but memory that is kept may never go back to the system.
Below a limit of 144 MiB the buffers of C's Zarr chunks go back: kept ones grew to half of a limit of 53 MiB.
Workers start with the upper bound."""
MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8
"""Parameters of glibc's `mallopt`."""
USUAL_KEPT = 32 << 20
"""Bytes of the arrays that glibc keeps at most when it adjusts the threshold by itself."""
ARENAS = 2
"""Arenas of the allocator, as in `deploy/dask.yaml`; each keeps freed memory of its own."""
ARENA_LIMIT = 64 << 20
"""Bytes of memory limit for each CPU below which the memory that all arenas keep would matter."""
_STATUS = Path("/proc/self/status")
GPU_SIGNS = "/dev/nvidiactl", "/dev/dxg"
"""A system with a GPU has one of these files; the second one in Windows's subsystem for Linux."""


def may_have_gpu() -> bool:
    """Whether the system shows a GPU, and CuPy is installed; neither is asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    if visible in ("", "-1") or not any(map(os.path.exists, GPU_SIGNS)):
        return False
    return "cupy" in sys.modules or _is_cupy_installed()


@functools.cache
def _is_cupy_installed() -> bool:
    return importlib.util.find_spec("cupy") is not None


def resident_memory() -> int:
    """Return the resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def reset_peak() -> None:
    """Reset the peak that `peak_memory` returns, if the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak resident bytes since `reset_peak`; without Linux, the bytes that the process holds now."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    except OSError:
        return resident_memory()
    return int(line.split()[1]) * 1024


def keep_small_arrays(memory_limit: int) -> None:
    """Let glibc's allocator keep small arrays for reuse and return larger ones to the system at once.

    `memory_limit`: bytes of host memory that this worker may take.
    """
    _set_allocator({ARENA_MAX: ARENAS})
    _keep_arrays(_most_kept(memory_limit))


@contextlib.contextmanager
def small_arrays_kept(memory_limit: int) -> Iterator[None]:
    """Keep small arrays as a worker does, in the caller's process; return what is free first.

    Arenas become few only where the limit is small, and stay so: with few, threads wait for each other.
    """
    if memory_limit < ARENA_LIMIT * count_cpus():
        _set_allocator({ARENA_MAX: ARENAS})
    _keep_arrays(_most_kept(memory_limit))
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        yield
    finally:
        _keep_arrays(USUAL_KEPT)


def _most_kept(memory_limit: int) -> int:
    """Return the bytes of the largest arrays that are kept."""
    return min(max((memory_limit - KEPT_FROM) // KEPT_SHARE, KEPT_LEAST), KEPT_MOST)


def _keep_arrays(most: int) -> None:
    """Keep freed arrays of at most `most` bytes."""
    _set_allocator({MMAP_THRESHOLD: most, TRIM_THRESHOLD: most})


def _set_allocator(parameters: dict[int, int]) -> None:
    """Set parameters of glibc's allocator; other C libraries have none of them."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        for parameter, value in parameters.items():
            ctypes.CDLL(None).mallopt(parameter, value)


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


@functools.cache
def gpu_name() -> str | None:
    """Return the name of the GPU of this process; None without a GPU, or without CuPy."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        return str(runtime.getDeviceProperties(runtime.getDevice())["name"].decode())
    except Exception:  # no CuPy, no driver, no device: each has an error of its own
        return None


def count_gpus() -> int:
    """Return how many GPUs this process sees.

    Raises `InputError` without a GPU or CuPy.
    """
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # no CuPy, no driver, no device: each has an error of its own
        raise InputError(
            f"the engine needs a CUDA device and CuPy ({error}): {install('cu13')} on a machine with a GPU, or "
            f"choose engine='auto'"
        ) from None
