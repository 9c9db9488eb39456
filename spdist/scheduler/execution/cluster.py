"""Where a run's workers come from: a cluster of our own on this machine, or a scheduler that is already there."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import dask
import psutil
from distributed import Client, LocalCluster, Nanny, SchedulerPlugin
from distributed.scheduler import DEFAULT_EXTENSIONS

from spdist.engines import GPU_ENGINES
from spdist.errors import InputError
from spdist.scheduler.execution.stages import gpu_name
from spdist.scheduler.execution.worker_process import NICE_VARIABLE
from spdist.units import check_count

logger = logging.getLogger("spdist")

SETTINGS = {
    "distributed.scheduler.work-stealing": False,  # the driver balances: a stolen block would leave its memory bound
    "distributed.scheduler.worker-saturation": math.inf,  # and it bounds what waits
    "distributed.scheduler.dashboard.tasks.task-stream-length": 10_000,
    "distributed.worker.memory.target": False,  # nothing is spilled: the plan holds the bound
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.low-level-log-length": 100,
    # Arrays below 4 MiB are kept for reuse: touching fresh small pages costs four times as much as reading a block into
    # used ones. Longer ones get huge pages, which are cheap to touch, and go straight back to the system.
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 4 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 4 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": 2,
    "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": 1,
    "distributed.nanny.pre-spawn-environ.NUMBA_NUM_THREADS": 1,
}
MOST_THREADS = 8
"""Threads of a worker with a GPU: blocks are read, multiplied and written at the same time."""
PRELOAD = ["spdist.scheduler.execution.worker_process"]
HOST_SHARE = 0.5
"""Of the free memory, what workers may take together with engine ``hybrid``; their number follows."""
CORE_NICE = 19
"""Priority of its workers without a GPU."""
ENGINES_THAT_START = "auto", "scipy", "numba", "cuda"
SHARERS = 3
"""Workers of a host that share a B that stays, at the least: pages of shared memory are small, and to fill them takes
longer than to read to memory of one's own."""
START_SECONDS = 60
CLOSE_SECONDS = 10
CONNECT_SECONDS = 20


class NoSpans:
    """Stands in for Dask's spans, which note every submission for as long as tasks follow one another: that grows."""

    def __init__(self, scheduler: Any) -> None:
        """Keep nothing."""

    def observe_tasks(self, tss: Any, code: Any, span_metadata: Any) -> dict[Any, Any]:
        """Annotate no task."""
        return {}

    def heartbeat(self, worker: Any, data: Any) -> None:
        """Take no metrics."""


class Stranded(SchedulerPlugin):
    """Lets tasks whose worker has died run on the next one to come.

    A task that may run elsewhere does so while there are other workers; without any, Dask keeps it for its own, for
    ever.
    """

    name = "spdist-stranded"
    idempotent = True  # one for all clients of a scheduler

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Let go of the workers that are no more."""
        for task in scheduler.unrunnable:
            asked = task.worker_restrictions
            if asked and task.loose_restrictions and scheduler.workers.keys().isdisjoint(asked):
                task.worker_restrictions = None


@contextlib.contextmanager
def connect(
    *,
    workers: int | None,
    scheduler: str | None,
    processes: bool,
    blocks: int,
    engine: str = "auto",
    host_bytes: int = 1,
) -> Iterator[Client]:
    """Give a client whose workers run the stages, and clean up afterwards.

    Parameters
    ----------
    workers : int, optional
        Worker processes on this machine, one core each; by default one a core, and no more than there are blocks. With
        an engine of GPUs, one GPU each and its share of the cores; by default one a GPU, as many as have blocks. With
        engine ``hybrid`` there are others, one core each, beside those.
    scheduler : str, optional
        Address of a running scheduler to use instead.
    processes : bool
        Whether workers are processes; else threads of this one, for matrices that only this process sees.
    blocks : int
        Row blocks of the plan: one block alone runs in this process, which saves starting another.
    engine : str
    host_bytes : int
        Bytes of the host's memory that a worker may take.

    Raises
    ------
    InputError
        If there is no scheduler at the address, or no GPU for an engine that needs one.
    """
    on_gpu = engine in GPU_ENGINES
    if scheduler is not None:
        with _remote(scheduler) as client:
            if on_gpu:
                _check_gpus(client, engine)
            yield client
        return
    gpus = count_gpus() if on_gpu else 0
    most = _check_count(workers, gpus) if on_gpu else os.cpu_count() or 1
    count = workers or max(1, min(most, blocks))
    processes = processes and (workers is not None or blocks > 1)
    count = count if processes else 1
    with dask.config.set(SETTINGS), _main_left_out():
        threads = min(MOST_THREADS, max(2, (os.cpu_count() or 1) // count)) if on_gpu else 1
        cluster = cuda_cluster(count, threads) if count > 1 and on_gpu else local_cluster(count, threads, processes)
        client = _client_of(cluster)
        try:
            if engine == "hybrid" and processes:
                add_cores(cluster, client, beside_gpus(count, host_bytes))
            yield client
        finally:
            with contextlib.suppress(Exception):  # a nanny that is restarting its worker can keep close() waiting
                client.close(timeout=CLOSE_SECONDS)
                cluster.close(timeout=CLOSE_SECONDS)


@contextlib.contextmanager
def workers(count: int | None = None, *, engine: str = "auto") -> Iterator[str]:
    """Start workers on this machine for several products, and stop them afterwards.

    Parameters
    ----------
    count : int, optional
        Processes; by default one a core or, with an engine of GPUs, one a GPU.
    engine : {"auto", "scipy", "numba", "cuda"}
        What the products will ask for. "hybrid" knows from the plan how many cores there is room for.

    Yields
    ------
    str
        Their scheduler's address, for the argument `scheduler` of `multiply`, `reduce` and others.

    Raises
    ------
    InputError
        If the count is not positive, or there are no GPUs, or fewer, for an engine that needs them.

    Examples
    --------
    ::

        with spdist.workers(4) as scheduler:
            for a, c in jobs:
                spdist.multiply(a, a, c, scheduler=scheduler)
    """
    check_count("count", count, "one a core or a GPU")
    if engine not in ENGINES_THAT_START:
        known = ", ".join(ENGINES_THAT_START)
        raise InputError(f"engine={engine!r} starts no workers for several products; write one of {known}")
    most = count or max(2, os.cpu_count() or 1)
    with connect(workers=count, scheduler=None, processes=True, blocks=most, engine=engine) as client:
        yield str(client.scheduler_info(n_workers=0)["address"])


def local_cluster(count: int, threads: int, processes: bool) -> LocalCluster:
    """Return a cluster of processes, or of threads of this one; to be started under `SETTINGS`."""
    return LocalCluster(
        n_workers=count,
        threads_per_worker=threads,
        processes=processes,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        scheduler_kwargs=_scheduler_options(processes),
        **({"preload": PRELOAD} if processes else {}),
    )


def cuda_cluster(count: int, threads: int) -> LocalCluster:
    """Return a cluster of one process a GPU, each on the cores next to it; to be started under `SETTINGS`."""
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise InputError(
            f"{count} GPUs need dask-cuda ({error}): install 'spdist[cu13]', or ask for one worker"
        ) from None
    cluster: LocalCluster = LocalCUDACluster(
        n_workers=count,
        threads_per_worker=threads,
        memory_limit=None,
        device_memory_limit=None,  # what is on the GPU is bounded by the plan, not spilled
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        scheduler_kwargs=_scheduler_options(True),
        preload=PRELOAD,
    )
    return cluster


def beside_gpus(gpus: int, host_bytes: int) -> int:
    """Return the workers of one core each for which there is room beside those of GPUs, which keep half of the cores.

    All together take no more than `HOST_SHARE` of the memory that is free, at `host_bytes` a worker.
    """
    room = int(HOST_SHARE * psutil.virtual_memory().available) // max(host_bytes, 1)
    cores = max(0, min((os.cpu_count() or 1) // 2, room - gpus))
    logger.info("hybrid: %d GPUs, and %d cores beside them", gpus, cores)
    return cores


def add_cores(cluster: LocalCluster, client: Client, count: int) -> None:
    """Start workers of one core each that see no GPU; the GPUs' go first where both want a core."""
    options = {
        "nthreads": 1,
        "memory_limit": 0,
        "env": {"CUDA_VISIBLE_DEVICES": "", NICE_VARIABLE: str(CORE_NICE)},
        "preload": PRELOAD,
        "silence_logs": logging.CRITICAL,
    }
    before = len(workers_of(client))
    names = [f"core-{i}" for i in range(count)]
    cluster.worker_spec.update({name: {"cls": Nanny, "options": options | {"name": name}} for name in names})
    cluster.scale(len(cluster.worker_spec))
    try:
        client.wait_for_workers(before + count, timeout=START_SECONDS)
    except TimeoutError:
        logger.warning("%d of %d cores have not started yet: the run goes on without them",
                       before + count - len(workers_of(client)), count)  # fmt: skip


def count_gpus() -> int:
    """Return how many GPUs this process sees.

    Raises
    ------
    InputError
        If there is none, or no CuPy to reach it.
    """
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # no CuPy, no driver, no device: each has an error of its own
        raise InputError(
            f"the engine needs a CUDA device and CuPy ({error}): install 'spdist[cu13]' on a machine with a GPU, or "
            f"choose engine='auto'"
        ) from None


def _check_count(workers: int | None, gpus: int) -> int:
    """Return the most workers to start: one a GPU."""
    if workers is not None and workers > gpus:
        raise InputError(
            f"workers={workers}, but each needs a GPU of its own and there are {gpus}: ask for at most {gpus}"
        )
    return gpus


def workers_of(client: Client) -> list[str]:
    """Return the addresses of the workers; waits until there is one."""
    while not (workers := client.scheduler_info(n_workers=-1)["workers"]):
        time.sleep(0.1)
    return list(workers)


def share_hosts(client: Client) -> bool:
    """Whether so many workers are on one host that to share what they read pays, or there are none yet."""
    hosts = Counter(urlsplit(address).hostname for address in client.scheduler_info(n_workers=-1)["workers"])
    return max(hosts.values(), default=SHARERS) >= SHARERS


def with_gpu(client: Client, workers: list[str]) -> dict[str, bool]:
    """Say of some workers whether they see a GPU; of those that have left, nothing."""
    names = client.run(gpu_name, workers=workers, on_error="ignore")
    return {address: name is not None for address, name in names.items()}


def _check_gpus(client: Client, engine: str) -> None:
    """Refuse workers without a GPU, or, for engine ``hybrid``, if none has one."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    missing = sorted(address for address, gpu in with_gpu(client, workers).items() if not gpu)
    if missing and (engine == "cuda" or len(missing) == len(workers)):
        raise InputError(
            f"engine={engine!r}, but {len(missing)} workers of the scheduler see no GPU, {missing[0]} among them: "
            f"start them with `dask cuda worker`, or choose engine='{'auto' if engine == 'hybrid' else 'hybrid'}'"
        )


def _scheduler_options(processes: bool) -> dict[str, Any]:
    """Return what the scheduler of our own does otherwise: it listens to this process without a socket, too."""
    extensions = {name: made for name, made in DEFAULT_EXTENSIONS.items() if name != "stealing"} | {"spans": NoSpans}
    listens = {"protocol": ["tcp", "inproc"], "host": ["127.0.0.1", None]} if processes else {}
    return {"extensions": extensions, "plugins": [Stranded()], **listens}


def _client_of(cluster: LocalCluster) -> Client:
    """Return a client that hands messages to the scheduler in this process: a fifth of a block's cost was sockets."""
    scheduler: Any = cluster.scheduler
    client = Client(scheduler.listeners[-1].contact_address, loop=cluster.loop)
    client.cluster = cluster
    return client


def fetch(client: Client, futures: Any) -> Any:
    """Return results that may be large: from the workers, not by way of a scheduler in this process.

    Dask sends an array of more than 64 MiB in parts, and puts together only those that came through a socket.
    """
    scheduler: Any = client.scheduler
    return client.gather(futures, direct=True if scheduler.address.startswith("inproc:") else None)


@contextlib.contextmanager
def _main_left_out() -> Iterator[None]:
    """Keep new processes from importing the caller's script.

    A worker needs nothing of it, and a script without the usual guard would start a cluster in each worker, for ever.
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


def dashboard_link(client: Client) -> str:
    """Return the address of the Dask dashboard; that of a cluster of our own is on this machine alone."""
    link = str(client.dashboard_link)
    cluster = getattr(client, "cluster", None)
    if not isinstance(cluster, LocalCluster):
        return link
    return urlsplit(link)._replace(netloc=f"127.0.0.1:{urlsplit(link).port}").geturl()


@contextlib.contextmanager
def _remote(scheduler: str) -> Iterator[Client]:
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no Dask scheduler answers at {scheduler}: {error}; start one with `dask scheduler`"
        ) from error
    try:
        client.register_plugin(Stranded())
    except (ImportError, ValueError) as error:  # no spdist there, or it takes no code from clients
        logger.warning(
            "the scheduler at %s takes no plugin (%s): should all workers die at once, the run will wait for ever; "
            "install spdist where the scheduler runs", scheduler, error,
        )  # fmt: skip
    try:
        yield client
    finally:
        client.close()
