"""A preload for workers: gives them a GPU in host memory, unless ``CUDA_VISIBLE_DEVICES`` is empty."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.host_device import HostDevice

LATE = "SPDIST_TEST_LATE"
"""Environment variable: seconds by which a CPU worker is late with its fourth block."""
SHARED = "SPDIST_TEST_SHARED"
"""Environment variable: the number of CPU workers, and a folder. Each of them makes a file `core-*` there when it has
its first block, and multiplies it when all of them have one and there is a file `RELEASED`. The GPU waits for all
`core-*` before its tenth block."""
RELEASED = "released"
PATIENCE = 240.0
"""Seconds after which a wait is given up, so that a test ends that fails."""
SECONDS = 0.05
"""Seconds added to each block: fast enough that the GPU leads, slow enough that CPU workers help."""


class SlowDevice(HostDevice):
    """A device in host memory that sleeps before each product."""

    def __init__(self, memory_limit: int, staging_bytes: int, pack: bool) -> None:
        time.sleep(SECONDS)
        super().__init__(memory_limit, staging_bytes, pack)

    def begin(self, *args: Any) -> int:
        """Sleep before each product; before the tenth, until each CPU worker has a block."""
        time.sleep(SECONDS)
        if SHARED in os.environ and next(_PRODUCTS) == 9:
            _wait_for(_all_have_blocks)
        return super().begin(*args)


_PRODUCTS = itertools.count()


def share(folder: Path, cores: int) -> str:
    """Return the value of `SHARED`."""
    return f"{cores} {folder}"


def _shared() -> tuple[int, Path]:
    cores, folder = os.environ[SHARED].split(" ", 1)
    return int(cores), Path(folder)


def _all_have_blocks() -> bool:
    cores, folder = _shared()
    return len(list(folder.glob("core-*"))) >= cores


def _wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition.__name__} was not true within {PATIENCE:.0f} s")
        time.sleep(0.01)


def dask_setup(worker: Any) -> None:
    """Put the device where a worker looks for its GPU; Dask calls this when the worker starts."""
    from spdist.kernels.cpu.engine import CpuMultiplier
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
    from spdist.kernels.streaming import gpu_device
    from spdist.scheduler.execution import worker_process

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        if LATE in os.environ:
            _be_late(CpuMultiplier, float(os.environ[LATE]))
        if SHARED in os.environ:
            _keep_first(CpuMultiplier)
        return

    worker_process.gpu_name = lambda: "host memory"
    gpu_device.Gpu = SlowDevice  # type: ignore[misc,assignment]
    rowwise_gpu.compile_kernels = lambda *_: None


def _be_late(kind: Any, seconds: float) -> None:
    """Let a CPU worker take longer for its fourth block, and fit only half of that block's rows."""
    multiply, calls = kind.multiply_rows, []

    def late(self: Any, a: Any, b: Any, capacity: int, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            time.sleep(seconds)
            capacity = int(multiply(self, a, b, capacity, *rest).indptr[a.nrows // 2])
        return multiply(self, a, b, capacity, *rest)

    kind.multiply_rows = late


def _keep_first(kind: Any) -> None:
    """Let a CPU worker keep its first block until all have one, and they are released."""
    multiply, (_, folder) = kind.multiply_rows, _shared()

    def is_released() -> bool:
        return _all_have_blocks() and (folder / RELEASED).exists()

    def kept(*args: Any) -> Any:
        (folder / f"core-{os.getpid()}").touch()
        _wait_for(is_released)
        return multiply(*args)

    kind.multiply_rows = kept
