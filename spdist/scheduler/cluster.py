"""Where a run's workers come from: a cluster of our own on this machine, or a scheduler that is already there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator

import dask
from distributed import Client, LocalCluster

from spdist.errors import InputError

SETTINGS = {
    "distributed.scheduler.work-stealing": False,  # the driver balances: a stolen block would leave its memory bound
    "distributed.scheduler.worker-saturation": math.inf,  # and it bounds what waits
    "distributed.scheduler.dashboard.tasks.task-stream-length": 10_000,
    "distributed.worker.memory.target": False,  # nothing is spilled: the plan holds the bound
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.low-level-log-length": 100,
    # Arrays up to the longest that malloc keeps are reused: touching fresh pages costs four times as much as reading a
    # block into used ones. What a worker keeps beyond what it holds stays below the trim threshold.
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 32 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 16 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": 2,
    "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": 1,
    "distributed.nanny.pre-spawn-environ.NUMBA_NUM_THREADS": 1,
}
CLOSE_SECONDS = 10
CONNECT_SECONDS = 20


@contextlib.contextmanager
def connect(*, workers: int | None, scheduler: str | None, processes: bool, blocks: int) -> Iterator[Client]:
    """Give a client whose workers run the stages, and clean up afterwards.

    Parameters
    ----------
    workers : int, optional
        Worker processes on this machine, one core each; by default one a core, and no more than there are blocks.
    scheduler : str, optional
        Address of a running scheduler to use instead.
    processes : bool
        Whether workers are processes; else threads of this one, for matrices that only this process sees.
    blocks : int
        Row blocks of the plan: one block alone runs in this process, which saves starting another.

    Raises
    ------
    InputError
        If there is no scheduler at the address.
    """
    if scheduler is not None:
        with _remote(scheduler) as client:
            yield client
        return
    count = workers or max(1, min(os.cpu_count() or 1, blocks))
    processes = processes and (workers is not None or blocks > 1)
    with dask.config.set(SETTINGS):
        cluster = LocalCluster(
            n_workers=count if processes else 1,
            threads_per_worker=1,
            processes=processes,
            memory_limit=0,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        )
        client = Client(cluster)
        try:
            yield client
        finally:
            with contextlib.suppress(Exception):  # a nanny that is restarting its worker can keep close() waiting
                client.close(timeout=CLOSE_SECONDS)
                cluster.close(timeout=CLOSE_SECONDS)


@contextlib.contextmanager
def _remote(scheduler: str) -> Iterator[Client]:
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no Dask scheduler answers at {scheduler}: {error}; start one with `dask scheduler`"
        ) from error
    try:
        yield client
    finally:
        client.close()
