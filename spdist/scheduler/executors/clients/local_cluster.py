"""Start workers on this machine: threads of this process, processes that share the cores, one for each GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import dask
from distributed import Client, LocalCluster, Nanny, Scheduler
from distributed.scheduler import DEFAULT_EXTENSIONS, TaskState, WorkerState

from spdist.errors import InputError, SpdistError, install
from spdist.foundation.cpus import count_cpus, cpus_per_worker
from spdist.foundation.memory import available_memory
from spdist.foundation.processes import name_of_writer, writer_lives
from spdist.foundation.units import counted
from spdist.kernels.engine import Engine
from spdist.scheduler.clusters.client import RunClient, close_client, close_cluster, closed_if_interrupted
from spdist.scheduler.clusters.pageless_worker import PagelessWorker
from spdist.scheduler.clusters.security import remembered, temporary_keys
from spdist.scheduler.clusters.system_limits import check_limits
from spdist.scheduler.dashboard.hosts import check_hosts
from spdist.scheduler.dashboard.late_pages import load_pages_late
from spdist.scheduler.dashboard.routes import add_to_menu
from spdist.scheduler.executors.clients.members import workers_of
from spdist.scheduler.executors.clients.running_scheduler import ReleaseStrandedTasks
from spdist.scheduler.executors.clients.worker_setup import NICE_VARIABLE
from spdist.scheduler.executors.supervision.calls import (
    describe,
    first_cause,
    kept_handlers,
    persistent,
    silenced_dask,
    within,
)

logger = logging.getLogger("spdist")


SETTINGS = {
    "distributed.scheduler.work-stealing": False,  # the driver balances: a stolen block would leave its memory bound
    "distributed.scheduler.worker-saturation": math.inf,  # and it bounds what waits
    "distributed.scheduler.dashboard.tasks.task-stream-length": 10_000,
    "distributed.worker.memory.target": False,  # nothing is spilled: the plan holds the bound
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.profile.enabled": False,  # it keeps megabytes of lines of code, none of them of kernels
    "distributed.admin.low-level-log-length": 100,
    # The allocator keeps arrays below 4 MiB for reuse: reading a block into fresh small pages costs four times as much
    # as into used ones. Longer arrays get huge pages, which are cheap to touch, and go straight back to the system.
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 4 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 4 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": 2,
    "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": 1,
    "distributed.nanny.pre-spawn-environ.NUMBA_NUM_THREADS": 1,
}
"""Configuration of Dask for clusters that spdist starts."""
MOST_THREADS = 8
"""Most threads of a worker with a GPU, which reads, multiplies and writes blocks at the same time."""
SILENT = logging.CRITICAL + 1
"""Level of Dask's loggers: what matters of their messages is an error or a warning of the package."""
NANNY = functools.partial(Nanny, worker_class=PagelessWorker)
"""Starts and watches a worker process."""
WORKERS = "spdist-workers"
"""How the names of folders for workers begin, in the folder for temporary files."""
PRELOAD = ["spdist.scheduler.executors.clients.worker_setup"]
"""Modules that workers load first."""
HOST_SHARE = 0.5
"""Share of the free host memory that all workers of engine ``hybrid`` may take together."""
CORE_NICE = 19
"""Priority (`os.nice`) of the workers without a GPU of engine ``hybrid``."""
START_SECONDS = 60
"""Seconds in which workers of this machine should start, and one second more for each of them; the run goes on without
CPU workers of engine ``hybrid`` that do not."""


class NoSpans:
    """Replaces Dask's spans, which keep a record of every submission as long as tasks depend on each other.

    `scheduler`: passed by Dask to each of its extensions; ignored.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Ignore the scheduler."""

    def observe_tasks(self, tss: Iterable[TaskState], code: object, span_metadata: object) -> dict[Any, Any]:
        """Annotate no task."""
        return {}

    def heartbeat(self, worker: WorkerState, data: object) -> None:
        """Take no metrics."""


@contextlib.contextmanager
def started(count: int, engine: Engine, host_bytes: int, *, processes: bool) -> Iterator[Client]:
    """Yield a client of a cluster that is started here; close both afterwards.

    `count`: workers, each with its share of the cores and, with a GPU engine, a GPU of its own.
    `engine`: of a mixed one, processes of one core each are added.
    `host_bytes`: bytes of host memory that a worker may take.
    `processes`: whether workers are processes; else one is in this process.
    Raises `InputError` if this machine's limits are too small for the workers.
    Raises `SpdistError` if the workers do not start.
    """
    if processes:
        check_limits(count)
    with _folder() as folder, dask.config.set(SETTINGS | folder), _without_main_module(), silenced_dask():
        cluster = _started_cluster(count, engine.uses_gpu, processes)
        check_hosts(cast(Scheduler, cluster.scheduler))
        load_pages_late(cast(Scheduler, cluster.scheduler), add_to_menu)
        client = _client_of(cluster)
        try:
            if engine.mixes and processes:
                with kept_handlers():
                    add_cpu_workers(cluster, client, count_cpu_workers(count, host_bytes))
            with remembered(cluster.scheduler_address, cluster.security):
                yield client
        finally:
            close_client(client)
            close_cluster(cluster)


@contextlib.contextmanager
def _folder() -> Iterator[dict[str, str]]:
    """Yield Dask's setting of the folder that its workers make folders in; remove it afterwards.

    Dask's own stays for ever. A killed run's is removed by the next one.
    """
    base = Path(str(dask.config.get("temporary-directory") or tempfile.gettempdir()))
    for left in base.glob(f"{WORKERS}.*"):
        if writer_lives(left.name) is False:
            shutil.rmtree(left, ignore_errors=True)
    folder = base / f"{WORKERS}.{name_of_writer()}"
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise InputError(
            f"{base}: no folder for workers can be made there ({error.strerror}): set TMPDIR, or Dask's "
            f"temporary-directory, to a folder that may be written to"
        ) from error
    try:
        yield {"temporary-directory": str(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # A cluster that did not start removes its own folder when the process ends, and logs that it is gone.
        logging.getLogger("distributed.diskutils").setLevel(logging.CRITICAL)


def _started_cluster(count: int, on_gpu: bool, processes: bool) -> LocalCluster:
    threads = min(MOST_THREADS, max(2, count_cpus() // count)) if on_gpu else cpus_per_worker(count)

    def start() -> LocalCluster:
        with kept_handlers():
            if count > 1 and on_gpu:
                return cuda_cluster(count, threads)
            return local_cluster(count, threads, processes)

    what = f"{counted(count, 'worker')} of this machine did not start"
    with _starting(count), closed_if_interrupted():
        return persistent(lambda: within(START_SECONDS + count, start, what), what)


@contextlib.contextmanager
def _starting(count: int) -> Iterator[None]:
    """Turn an error of the start of workers into one line, with its first cause."""
    try:
        yield
    except (OSError, MemoryError, EOFError) as error:
        raise SpdistError(
            f"{counted(count, 'worker')} did not start: {describe(first_cause(error))}; start fewer (workers=1), or "
            f"raise the limits of processes and memory (ulimit -a)"
        ) from error


def local_cluster(count: int, threads: int, processes: bool) -> LocalCluster:
    """Start a cluster of processes, or of threads of this process. The caller sets Dask's configuration to `SETTINGS`.

    `count, threads`: workers, and threads of each.
    Returns the caller closes it.
    """
    return LocalCluster(
        n_workers=count,
        threads_per_worker=threads,
        processes=processes,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
        silence_logs=SILENT,
        death_timeout=START_SECONDS if processes else None,
        protocol="tls" if processes else "inproc",
        security=temporary_keys() if processes else None,
        scheduler_kwargs=_scheduler_options(processes),
        **({"preload": PRELOAD, "worker_class": NANNY} if processes else {"worker_class": PagelessWorker}),
    )


def cuda_cluster(count: int, threads: int) -> LocalCluster:
    """Start a cluster of one process for each GPU, on the cores next to it. The caller sets Dask's configuration.

    `count, threads`: workers, and threads of each.
    Returns A `LocalCUDACluster`; the caller closes it.
    Raises `InputError` if dask-cuda is not installed.
    """
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise InputError(f"{count} GPUs need dask-cuda ({error}): {install('cu13')}, or ask for one worker") from None
    cluster: LocalCluster = LocalCUDACluster(
        n_workers=count,
        threads_per_worker=threads,
        memory_limit=None,
        device_memory_limit=None,  # the plan bounds GPU memory; nothing is spilled
        dashboard_address="127.0.0.1:0",
        silence_logs=SILENT,
        death_timeout=START_SECONDS,
        protocol="tls",
        security=temporary_keys(),
        scheduler_kwargs=_scheduler_options(True),
        worker_class=PagelessWorker,
        preload=PRELOAD,
    )
    return cluster


def count_cpu_workers(gpus: int, host_bytes: int) -> int:
    """Return how many CPU workers of engine ``hybrid`` there is room for; workers with a GPU keep half of the cores.

    `gpus`: workers with a GPU.
    `host_bytes`: bytes of host memory that each worker may take; all take `HOST_SHARE` of the free memory, at most.
    Returns from 0 to half of the cores.
    """
    room = int(HOST_SHARE * available_memory()) // max(host_bytes, 1)
    cores = max(0, min(count_cpus() // 2, room - gpus))
    logger.info("hybrid: %d GPUs, and %d cores beside them", gpus, cores)
    return cores


def add_cpu_workers(cluster: LocalCluster, client: Client, count: int) -> None:
    """Start workers of one core each that see no GPU and have a lower priority than the workers with a GPU.

    `cluster`: with the workers that have a GPU.
    `count`: CPU workers to add. If some do not start in time, a warning says so.
    """
    options = {
        "nthreads": 1,
        "memory_limit": 0,
        "env": {"CUDA_VISIBLE_DEVICES": "", NICE_VARIABLE: str(CORE_NICE)},
        "preload": PRELOAD,
        "security": cluster.security,
        "silence_logs": SILENT,
    }
    before = len(workers_of(client))
    names = [f"core-{i}" for i in range(count)]
    cluster.worker_spec.update({name: {"cls": NANNY, "options": options | {"name": name}} for name in names})
    cluster.scale(len(cluster.worker_spec))
    try:
        client.wait_for_workers(before + count, timeout=START_SECONDS)
    except TimeoutError:
        logger.warning("%d of %d cores have not started yet: the run goes on without them",
                       before + count - len(workers_of(client)), count)  # fmt: skip


def _scheduler_options(processes: bool) -> dict[str, Any]:
    """Return the options of a scheduler that spdist starts: it also listens to this process without a socket."""
    extensions = {name: made for name, made in DEFAULT_EXTENSIONS.items() if name != "stealing"} | {"spans": NoSpans}
    listens = {"protocol": ["tls", "inproc"], "host": ["127.0.0.1", None]} if processes else {}
    return {"extensions": extensions, "plugins": [ReleaseStrandedTasks()], "dashboard": False, **listens}


def _client_of(cluster: LocalCluster) -> Client:
    """Return a client without a socket to the scheduler in this process: sockets were a fifth of a block's cost."""
    scheduler: Any = cluster.scheduler
    client = RunClient(scheduler.listeners[-1].contact_address, loop=cluster.loop, security=cluster.security)
    client.cluster = cluster
    return client


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep new processes from importing the caller's script.

    Workers need nothing from it, and a script without ``if __name__ == "__main__"`` would start a cluster in each of
    them.
    """
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in kept:
        del main.__file__
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)
