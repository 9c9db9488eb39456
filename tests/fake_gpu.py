"""A preload for workers: a GPU whose memory is the host's, unless the worker is told that it sees none."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.kernels.host_device import HostDevice

SECONDS = 0.05
"""Of each block beside its work: quick enough to lead, slow enough for cores to help."""


class SlowDevice(HostDevice):
    """Host memory that takes its time."""

    def __init__(self, memory_limit: int, ahead: int, pack: bool) -> None:
        time.sleep(SECONDS)
        super().__init__(memory_limit, ahead, pack)

    def begin(self, *args: Any) -> int:
        """Take a while, each time."""
        time.sleep(SECONDS)
        return super().begin(*args)


def dask_setup(worker: Any) -> None:
    """Put the device where a worker looks for its GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    from spdist.kernels import gpu, gpu_device, packing
    from spdist.scheduler import stages

    stages.gpu_name = lambda: "host memory"
    gpu_device.Gpu = SlowDevice  # type: ignore[misc,assignment]
    gpu.compile_kernels = lambda *_: None
    packing.compile_kernels = lambda *_: None
