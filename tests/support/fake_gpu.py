"""A preload for workers: a GPU whose memory is the host's, unless the worker is told that it sees none."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.support.host_device import HostDevice

LATE = "SPDIST_TEST_LATE"
"""Environment variable: the seconds by which a core is late once."""
SECONDS = 0.05
"""Of each block beside its work: quick enough to lead, slow enough for cores to help."""


class SlowDevice(HostDevice):
    """Host memory that takes its time."""

    def __init__(self, memory_limit: int, staging_bytes: int, pack: bool) -> None:
        time.sleep(SECONDS)
        super().__init__(memory_limit, staging_bytes, pack)

    def begin(self, *args: Any) -> int:
        """Take a while, each time."""
        time.sleep(SECONDS)
        return super().begin(*args)


def dask_setup(worker: Any) -> None:
    """Put the device where a worker looks for its GPU."""
    from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
    from spdist.kernels.streaming import gpu_device
    from spdist.scheduler.execution import stages

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        if LATE in os.environ:
            _be_late(stages.Product, float(os.environ[LATE]))
        return

    stages.gpu_name = lambda: "host memory"
    gpu_device.Gpu = SlowDevice  # type: ignore[misc,assignment]
    rowwise_gpu.compile_kernels = lambda *_: None


def _be_late(product: Any, seconds: float) -> None:
    """Let a core take longer for its third block, and have room for half of its rows alone."""
    multiply, calls = product.product, []

    def late(self: Any, a: Any, b: Any, capacity: int, *told: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # one was to warm up
            time.sleep(seconds)
            capacity = int(multiply(self, a, b, capacity, *told).indptr[a.nrows // 2])
        return multiply(self, a, b, capacity, *told)

    product.product = late
