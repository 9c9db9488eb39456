"""The workers of a run: start a cluster on this machine, or connect to a running scheduler."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import dask
import psutil
from distributed import Client, Future, LocalCluster, Nanny, Scheduler, SchedulerPlugin, Security, Worker
from distributed.deploy.cluster import Cluster
from distributed.scheduler import DEFAULT_EXTENSIONS, TaskState, WorkerState

from spdist.errors import InputError, SpdistError
from spdist.foundation.cpus import count_cpus, cpus_per_worker
from spdist.foundation.engines import GPU_ENGINES
from spdist.foundation.units import check_count, counted
from spdist.scheduler.clusters.addresses import check_address, of_scheduler, wait_until_reachable
from spdist.scheduler.clusters.client import RunClient, close_client, close_cluster, closed_if_interrupted
from spdist.scheduler.clusters.security import remembered, security_for, temporary_keys
from spdist.scheduler.clusters.system_limits import check_limits
from spdist.scheduler.dashboard.late_pages import load_pages_late
from spdist.scheduler.dashboard.routes import add_to_menu
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.supervision.calls import (
    addresses,
    describe,
    first_cause,
    kept_handlers,
    persistent,
    silenced_dask,
    within,
)
from spdist.scheduler.execution.worker_process import NICE_VARIABLE, gpu_name
from spdist.scheduler.planner.remote_readers import RemoteReaders

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
PRELOAD = ["spdist.scheduler.execution.worker_process"]
"""Modules that workers load first."""
HOST_SHARE = 0.5
"""Share of the free host memory that all workers of engine ``hybrid`` may take together."""
CORE_NICE = 19
"""Priority (`os.nice`) of the workers without a GPU of engine ``hybrid``."""
ENGINES_THAT_START = "auto", "scipy", "numba", "cuda"
"""Engines for which `workers` starts workers."""
SHARERS = 3
"""Least number of workers on a host that share a resident B. Pages of shared memory are small, so that filling them
takes longer than filling private memory; two workers lose more than they save."""
START_SECONDS = 60
"""Seconds in which workers of this machine should start, and one second more for each of them; the run goes on without
CPU workers of engine ``hybrid`` that do not."""
CONNECT_SECONDS = 15
"""Seconds in which a running scheduler should answer."""
OPEN = (
    "the scheduler at %s has no keys: whoever reaches its port, or a worker's, runs code as its owner; see `spdist "
    "cluster-keys --help`"
)
POLL_SECONDS = 0.1
"""Seconds between two looks for workers while there are none."""


class NoSpans:
    """Replaces Dask's spans, which keep a record of every submission as long as tasks depend on each other.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Passed by Dask to each of its extensions; ignored.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Ignore the scheduler."""

    def observe_tasks(self, tss: Iterable[TaskState], code: object, span_metadata: object) -> dict[Any, Any]:
        """Annotate no task."""
        return {}

    def heartbeat(self, worker: WorkerState, data: object) -> None:
        """Take no metrics."""


class LoopbackWorker(Worker):
    """A worker in this process, whose page of metrics is for this machine. Dask's own serves it on all networks."""

    def start_http_server(
        self, routes: Any, dashboard_address: str | None, default_port: int = 0, ssl_options: Any = None
    ) -> None:
        """Serve on the loopback address unless the configuration names another."""
        where = dashboard_address or "127.0.0.1:0"
        super().start_http_server(routes, where, default_port, ssl_options)  # type: ignore[no-untyped-call]


class ReleaseStrandedTasks(SchedulerPlugin):
    """Lets tasks run on the next worker to join if all workers have died.

    A task of a dead worker runs on another worker, if there is one. If there is none, Dask would wait for the dead
    worker for ever.

    Parameters
    ----------
    client : str
        Of which client; the plugin goes when the client has gone. Empty to stay.
    """

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.name = f"spdist-stranded-{client}"

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Go with the client."""
        if client == self.client:
            scheduler.remove_plugin(self.name)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Remove the restriction to workers that have died."""
        for task in scheduler.unrunnable:
            asked = task.worker_restrictions
            if asked and task.loose_restrictions and scheduler.workers.keys().isdisjoint(asked):
                task.worker_restrictions = None


@contextlib.contextmanager
def connect(
    *,
    workers: int | None,
    scheduler: str | Client | Cluster | None,
    processes: bool,
    blocks: int,
    engine: str = "auto",
    host_bytes: int = 1,
    security: Security | None = None,
) -> Iterator[Client]:
    """Yield a client with workers; close what was started for it afterwards.

    Connections between the processes of a cluster that is started here need keys, which are made for it.

    Parameters
    ----------
    workers : int, optional
        Worker processes on this machine. CPU engines: each has its share of the cores; by default one worker is in this
        process, with a thread for each core. GPU engines: one GPU and its share of the cores each; by default one for
        each GPU, but no more than there are blocks; a single one is in this process. Engine ``hybrid`` adds processes
        of one core each.
    scheduler : str, distributed.Client or cluster, optional
        A running scheduler to use, by its address or by a client or cluster of the caller; nothing is started.
    processes : bool
        Whether workers may be processes. Matrices in this process's memory need a worker in this process.
    blocks : int
        Row blocks of the plan. A single block runs in this process, unless `workers` is given.
    engine : str
    host_bytes : int
        Bytes of host memory that a worker may take.
    security : distributed.Security, optional
        Keys for the running scheduler; see `security_for`.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        If no scheduler answers at the address, it does not take the keys, there is no GPU for an engine that needs one,
        or this machine's limits are too small for the workers.
    SpdistError
        If the workers do not start, or the connection to a running scheduler breaks.
    """
    on_gpu = engine in GPU_ENGINES
    if scheduler is not None:
        with _remote(*of_scheduler(scheduler, security)) as client:
            if on_gpu:
                _check_gpus(client, engine)
            yield client
        return
    gpus = worker_process.count_gpus() if on_gpu else 0
    most = _check_count(workers, gpus) if on_gpu else 1
    count = workers or max(1, min(most, blocks))
    processes = processes and (workers is not None or count > 1 or (engine == "hybrid" and blocks > 1))
    count = count if processes else 1
    if processes:
        check_limits(count)
    with dask.config.set(SETTINGS), _without_main_module(), silenced_dask():
        threads = min(MOST_THREADS, max(2, count_cpus() // count)) if on_gpu else cpus_per_worker(count)

        def start() -> LocalCluster:
            with kept_handlers():
                if count > 1 and on_gpu:
                    return cuda_cluster(count, threads)
                return local_cluster(count, threads, processes)

        what = f"{counted(count, 'worker')} of this machine did not start"
        with _starting(count), closed_if_interrupted():
            cluster = persistent(lambda: within(START_SECONDS + count, start, what), what)
        load_pages_late(cast(Scheduler, cluster.scheduler), add_to_menu)
        client = _client_of(cluster)
        try:
            if engine == "hybrid" and processes:
                with kept_handlers():
                    add_cpu_workers(cluster, client, count_cpu_workers(count, host_bytes))
            with remembered(cluster.scheduler_address, cluster.security):
                yield client
        finally:
            close_client(client)
            close_cluster(cluster)


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


@contextlib.contextmanager
def workers(count: int | None = None, *, engine: str = "auto") -> Iterator[str]:
    """Start workers on this machine for several products, and stop them afterwards.

    Parameters
    ----------
    count : int, optional
        Number of processes, which share the cores; by default one or, with a GPU engine, one for each GPU.
    engine : {"auto", "scipy", "numba", "cuda"}
        Engine of the products. "hybrid" is refused: it needs a plan to know how many CPU workers there is room for.

    Yields
    ------
    str
        Address of their scheduler, for the argument `scheduler` of `multiply`, `reduce` and others.

    Raises
    ------
    InputError
        If the count is not positive, or a GPU engine has fewer GPUs than that.

    Examples
    --------
    >>> with spdist.workers(4) as scheduler:  # doctest: +SKIP
    ...     for a, c in jobs:
    ...         spdist.multiply(a, a, c, scheduler=scheduler)
    """
    check_count("count", count, "one, or one a GPU")
    if engine not in ENGINES_THAT_START:
        known = ", ".join(ENGINES_THAT_START)
        raise InputError(f"engine={engine!r} starts no workers for several products; write one of {known}")
    count = count or (worker_process.count_gpus() if engine in GPU_ENGINES else 1)
    with connect(workers=count, scheduler=None, processes=True, blocks=count, engine=engine) as client:
        yield str(client.scheduler_info(n_workers=0)["address"])


def local_cluster(count: int, threads: int, processes: bool) -> LocalCluster:
    """Start a cluster of processes, or of threads of this process. The caller sets Dask's configuration to `SETTINGS`.

    Parameters
    ----------
    count, threads : int
        Workers, and threads of each.
    processes : bool

    Returns
    -------
    LocalCluster
        The caller closes it.
    """
    return LocalCluster(
        n_workers=count,
        threads_per_worker=threads,
        processes=processes,
        memory_limit=0,
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        death_timeout=START_SECONDS if processes else None,
        protocol="tls" if processes else "inproc",
        security=temporary_keys() if processes else None,
        scheduler_kwargs=_scheduler_options(processes),
        **({"preload": PRELOAD} if processes else {"worker_class": LoopbackWorker}),
    )


def cuda_cluster(count: int, threads: int) -> LocalCluster:
    """Start a cluster of one process for each GPU, on the cores next to it. The caller sets Dask's configuration.

    Parameters
    ----------
    count, threads : int
        Workers, and threads of each.

    Returns
    -------
    LocalCluster
        A `LocalCUDACluster`; the caller closes it.

    Raises
    ------
    InputError
        If dask-cuda is not installed.
    """
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
        device_memory_limit=None,  # the plan bounds GPU memory; nothing is spilled
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        death_timeout=START_SECONDS,
        protocol="tls",
        security=temporary_keys(),
        scheduler_kwargs=_scheduler_options(True),
        preload=PRELOAD,
    )
    return cluster


def count_cpu_workers(gpus: int, host_bytes: int) -> int:
    """Return how many CPU workers of engine ``hybrid`` there is room for; workers with a GPU keep half of the cores.

    Parameters
    ----------
    gpus : int
        Workers with a GPU.
    host_bytes : int
        Bytes of host memory that each worker may take; all take `HOST_SHARE` of the free memory, at most.

    Returns
    -------
    int
        From 0 to half of the cores.
    """
    room = int(HOST_SHARE * psutil.virtual_memory().available) // max(host_bytes, 1)
    cores = max(0, min(count_cpus() // 2, room - gpus))
    logger.info("hybrid: %d GPUs, and %d cores beside them", gpus, cores)
    return cores


def add_cpu_workers(cluster: LocalCluster, client: Client, count: int) -> None:
    """Start workers of one core each that see no GPU and have a lower priority than the workers with a GPU.

    Parameters
    ----------
    cluster : LocalCluster
        With the workers that have a GPU.
    client : distributed.Client
    count : int
        CPU workers to add. If some do not start in time, a warning says so.
    """
    options = {
        "nthreads": 1,
        "memory_limit": 0,
        "env": {"CUDA_VISIBLE_DEVICES": "", NICE_VARIABLE: str(CORE_NICE)},
        "preload": PRELOAD,
        "security": cluster.security,
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


def _check_count(workers: int | None, gpus: int) -> int:
    """Return the most workers to start, one for each GPU; refuse to start more."""
    if workers is not None and workers > gpus:
        raise InputError(
            f"workers={workers}, but each needs a GPU of its own and there are {gpus}: ask for at most {gpus}"
        )
    return gpus


def workers_of(client: Client) -> list[str]:
    """Return the addresses of the workers; waits until there is one."""
    while not (workers := addresses(client)):
        time.sleep(POLL_SECONDS)
    return workers


def share_hosts(client: Client) -> bool:
    """Whether a host has enough workers to share a resident B, or none has started yet."""
    hosts = Counter(urlsplit(address).hostname for address in client.scheduler_info(n_workers=-1)["workers"])
    return max(hosts.values(), default=SHARERS) >= SHARERS


def shared_name(client: Client) -> str:
    """Return a name that nobody can guess for memory that the workers of a host share; empty if they share none."""
    return uuid.uuid4().hex if share_hosts(client) else ""


def remote_readers(client: Client) -> RemoteReaders | None:
    """Return the workers as readers for the planner; None if none has started yet."""
    threads = client.nthreads()
    return RemoteReaders(client.get_executor(pure=False), len(threads), min(threads.values())) if threads else None


def least_threads(client: Client) -> int:
    """Return the threads of the worker that has fewest; 1 if none has started yet."""
    return max(1, min(client.nthreads().values(), default=1))


def with_gpu(client: Client, workers: list[str]) -> dict[str, bool]:
    """Return for each of some workers whether it sees a GPU; workers that have left are left out.

    Parameters
    ----------
    client : distributed.Client
    workers : list of str
        Addresses of the workers to ask.

    Returns
    -------
    dict
        By address: True if the worker sees a GPU.
    """
    names = client.run(gpu_name, workers=workers, on_error="ignore")
    return {address: name is not None for address, name in names.items()}


def _check_gpus(client: Client, engine: str) -> None:
    """Refuse workers without a GPU; for engine ``hybrid`` refuse only if no worker has one."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    missing = sorted(address for address, gpu in with_gpu(client, workers).items() if not gpu)
    if missing and (engine == "cuda" or len(missing) == len(workers)):
        see = f"{counted(len(missing), 'worker')} of the scheduler {'sees' if len(missing) == 1 else 'see'} no GPU"
        raise InputError(
            f"engine={engine!r}, but {see}, {missing[0]} among them: "
            f"start them with `dask cuda worker`, or choose engine='{'auto' if engine == 'hybrid' else 'hybrid'}'"
        )


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


def fetch(client: Client, futures: Future[Any] | list[Future[Any]]) -> Any:
    """Return the results of one future, or of a list of futures; they may be large.

    Results come directly from the workers, not through a scheduler in this process: Dask sends an array of more than
    64 MiB in parts, and joins only parts that came through a socket.

    Parameters
    ----------
    client : distributed.Client
    futures : Future or list of Future

    Returns
    -------
    object or list of object
        The result of the future, or the results in the order of the list.
    """
    scheduler: Any = client.scheduler
    return client.gather(futures, direct=True if scheduler.address.startswith("inproc:") else None)


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


def dashboard_link(client: Client) -> str:
    """Return the address of the Dask dashboard; a cluster that spdist started serves it on this machine alone."""
    link = str(client.dashboard_link)
    cluster = getattr(client, "cluster", None)
    if not isinstance(cluster, LocalCluster):
        return link
    return urlsplit(link)._replace(netloc=f"127.0.0.1:{urlsplit(link).port}").geturl()


@contextlib.contextmanager
def _remote(scheduler: str, given: Security | None) -> Iterator[Client]:
    """Yield a client of a running scheduler; say in one line that it cannot be reached, or is gone."""
    security = security_for(scheduler, given)
    with silenced_dask():  # what matters is in the one line
        client = _client_at(scheduler, security)
        try:
            if check_address(scheduler, security).scheme == "tcp":
                logger.warning(OPEN, scheduler)
            _release_stranded_tasks(client, scheduler)
            yield client
        except Exception as error:
            if client.lost:
                raise SpdistError(f"the connection to the scheduler at {scheduler} broke: see whether it still runs; "
                                  f"durable rows stay, continue with --resume") from error  # fmt: skip
            raise
        finally:
            close_client(client)


def _client_at(scheduler: str, security: Security) -> RunClient:
    """Connect to a running scheduler."""
    wait_until_reachable(scheduler, security, CONNECT_SECONDS)
    try:
        return RunClient(scheduler, timeout=CONNECT_SECONDS, security=security)
    except TypeError:  # the process that answers is no scheduler: it does not know the call
        raise InputError(
            f"a Dask worker or nanny answers at {scheduler}, no scheduler: correct host and port"
        ) from None
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"no Dask scheduler answers at {scheduler}: {error or type(error).__name__}; start one with `dask "
            f"scheduler`, or correct host and port"
        ) from error


def _release_stranded_tasks(client: Client, scheduler: str) -> None:
    """Have a running scheduler let tasks of dead workers run elsewhere."""
    try:
        client.register_plugin(ReleaseStrandedTasks(client.id))
    except (ImportError, ValueError) as error:  # no spdist there, or it takes no code from clients
        logger.warning(
            "the scheduler at %s takes no plugin (%s): should all workers die at once, the run will wait for ever; "
            "install spdist where the scheduler runs", scheduler, error,
        )  # fmt: skip
