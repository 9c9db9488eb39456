"""What a worker process does when it starts; `local_cluster` names this module as Dask's preload."""

from __future__ import annotations

import contextlib
import os
import signal

from distributed import Worker

from spdist.scheduler.executors.supervision.silence import come_back

NICE_VARIABLE = "SPDIST_NICE"
"""Environment variable: by how much a worker lowers its priority (`os.nice`)."""


def dask_setup(worker: Worker) -> None:
    """Ignore Ctrl-C, lower the priority, and come back after a cut of the network; Dask calls this at the start."""
    come_back(worker)
    os.nice(int(os.environ.get(NICE_VARIABLE, 0)))
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
