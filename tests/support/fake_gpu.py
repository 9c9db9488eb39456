"""A preload for workers: gives them a GPU in host memory, unless ``CUDA_VISIBLE_DEVICES`` is empty."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

from tests.support.host_device import HostDevice

LATE = "SPDIST_TEST_LATE"
"""Environment variable: seconds by which a CPU worker is late with its fourth block."""
HELD = "SPDIST_TEST_HELD"
"""Environment variable: a folder. A CPU worker makes the file `TAKEN` in it when it has its first block, and keeps this
block until there is a file `RELEASED`; the GPU waits for `TAKEN` before its tenth block."""
TAKEN, RELEASED = "taken", "released"
PATIENCE = 300.0
"""Seconds after which a wait is given up, so that a test ends that fails."""
SECONDS = 0.05
"""Seconds added to each block: fast enough that the GPU leads, slow enough that CPU workers help."""


class SlowDevice(HostDevice):
    """A device in host memory that sleeps before each product."""

    def __init__(self, memory_limit: int, staging_bytes: int, pack: bool) -> None:
        time.sleep(SECONDS)
        super().__init__(memory_limit, staging_bytes, pack)

    def begin(self, *args: Any) -> int:
        """Sleep before each product; before the tenth, until a CPU worker has a block that it is to keep."""
        time.sleep(SECONDS)
        if HELD in os.environ and next(_PRODUCTS) == 9:
            _wait_for(Path(os.environ[HELD], TAKEN))
        return super().begin(*args)


_PRODUCTS = itertools.count()


def _wait_for(file: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no file {file}")
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
        if HELD in os.environ:
            _keep_first(CpuMultiplier, Path(os.environ[HELD]))
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


def _keep_first(kind: Any, folder: Path) -> None:
    """Let a CPU worker keep its first block until it is released."""
    multiply = kind.multiply_rows

    def kept(*args: Any) -> Any:
        (folder / TAKEN).touch()
        _wait_for(folder / RELEASED)
        return multiply(*args)

    kind.multiply_rows = kept
