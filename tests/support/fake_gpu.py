"""A preload for workers: gives them a GPU in host memory, unless ``CUDA_VISIBLE_DEVICES`` is empty."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.support.host_device import HostDevice

LATE = "SPDIST_TEST_LATE"
"""Environment variable: seconds by which a CPU worker is late with its third block."""
SECONDS = 0.05
"""Seconds added to each block: fast enough that the GPU leads, slow enough that CPU workers help."""


class SlowDevice(HostDevice):
    """A device in host memory that sleeps before each product."""

    def __init__(self, memory_limit: int, staging_bytes: int, pack: bool) -> None:
        time.sleep(SECONDS)
        super().__init__(memory_limit, staging_bytes, pack)

    def begin(self, *args: Any) -> int:
        """Sleep before each product."""
        time.sleep(SECONDS)
        return super().begin(*args)


def dask_setup(worker: Any) -> None:
    """Put the device where a worker looks for its GPU; Dask calls this when the worker starts."""
    from spdist.kernels.cpu.engine import CpuMultiplier
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
    from spdist.kernels.streaming import gpu_device
    from spdist.scheduler.execution import worker_process

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        if LATE in os.environ:
            _be_late(CpuMultiplier, float(os.environ[LATE]))
        return

    worker_process.gpu_name = lambda: "host memory"
    gpu_device.Gpu = SlowDevice  # type: ignore[misc,assignment]
    rowwise_gpu.compile_kernels = lambda *_: None


def _be_late(kind: Any, seconds: float) -> None:
    """Let a CPU worker take longer for its third block, and fit only half of that block's rows."""
    multiply, calls = kind.multiply_rows, []

    def late(self: Any, a: Any, b: Any, capacity: int, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # one was to warm up
            time.sleep(seconds)
            capacity = int(multiply(self, a, b, capacity, *rest).indptr[a.nrows // 2])
        return multiply(self, a, b, capacity, *rest)

    kind.multiply_rows = late
