"""The memory of a worker's process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from spdist.scheduler.executors.clients.local_cluster import SETTINGS

KEPT = """
import sys, numpy as np
from spdist.scheduler.execution import worker_process
if sys.argv[1] == "little":
    worker_process.keep_small_arrays(53 << 20)
before, small = worker_process.resident_memory(), []
arrays = []
for _ in range(40):
    arrays.append(np.ones(1 << 20, np.uint8))  # a Zarr chunk of C
    small.append(bytes(2000))
del arrays
print(worker_process.resident_memory() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it keeps")
def test_arrays_of_a_share_of_the_limit_are_given_back():
    environ = {**os.environ, **{k.rpartition(".")[2]: str(v) for k, v in SETTINGS.items() if "MALLOC" in k}}
    little, much = (
        int(subprocess.run([sys.executable, "-c", KEPT, how], env=environ, capture_output=True, check=True).stdout)
        for how in ("little", "much")
    )
    assert little < 10 << 20
    assert much > 30 << 20  # else nothing is shown
