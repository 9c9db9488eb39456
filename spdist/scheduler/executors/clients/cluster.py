"""The workers of a run: start a cluster on this machine, or connect to a running scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distributed import Client, Security
from distributed.deploy.cluster import Cluster

from spdist.errors import InputError
from spdist.foundation.units import check_count, counted
from spdist.kernels.engine import ENGINES, Engine, find_engine
from spdist.scheduler.clusters.addresses import of_scheduler
from spdist.scheduler.execution import worker_process
from spdist.scheduler.executors.clients.local_cluster import started
from spdist.scheduler.executors.clients.members import with_gpu
from spdist.scheduler.executors.clients.running_scheduler import connected


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

    `workers`: worker processes on this machine. CPU engines: each has its share of the cores; by default one worker is
    in this process, with a thread for each core. GPU engines: one GPU and its share of the cores each; by default one
    for each GPU, but no more than there are blocks; a single one is in this process. Engine ``hybrid`` adds processes
    of one core each.
    `scheduler`: A running scheduler to use, by its address or by a client or cluster of the caller; nothing is started.
    `processes`: whether workers may be processes. Matrices in this process's memory need a worker in this process.
    `blocks`: row blocks of the plan. A single block runs in this process, unless `workers` is given.
    `host_bytes`: bytes of host memory that a worker may take.
    `security`: keys for the running scheduler; see `security_for`.
    Raises `InputError` if no scheduler answers at the address, it does not take the keys, there is no GPU for an engine
    that needs one, or this machine's limits are too small for the workers.
    Raises `SpdistError` if the workers do not start, or the connection to a running scheduler breaks.
    """
    multiplies = find_engine(engine)
    on_gpu = multiplies.uses_gpu
    if scheduler is not None:
        with connected(*of_scheduler(scheduler, security)) as client:
            if on_gpu:
                _check_gpus(client, multiplies)
            yield client
        return
    most = _check_count(workers, worker_process.count_gpus()) if on_gpu else 1
    count = workers or max(1, min(most, blocks))
    if not (processes and (workers is not None or count > 1 or (multiplies.mixes and blocks > 1))):
        count, processes = 1, False
    with started(count, multiplies, host_bytes, processes=processes) as client:
        yield client


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
    check_count("count", count, "one, or one per GPU")
    if engine not in ENGINES or find_engine(engine).mixes:
        known = ", ".join(name for name in ENGINES if not find_engine(name).mixes)
        raise InputError(f"engine={engine!r} starts no workers for several products; write one of {known}")
    count = count or (worker_process.count_gpus() if find_engine(engine).uses_gpu else 1)
    with connect(workers=count, scheduler=None, processes=True, blocks=count, engine=engine) as client:
        yield str(client.scheduler_info(n_workers=0)["address"])


def _check_count(workers: int | None, gpus: int) -> int:
    """Return the most workers to start, one for each GPU; refuse to start more."""
    if workers is not None and workers > gpus:
        raise InputError(
            f"workers={workers}, but each needs a GPU of its own and there are {gpus}: ask for at most {gpus}"
        )
    return gpus


def _check_gpus(client: Client, engine: Engine) -> None:
    """Refuse workers without a GPU; if they may multiply too, refuse only if no worker has one."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    missing = sorted(address for address, gpu in with_gpu(client, workers).items() if not gpu)
    if missing and (not engine.uses_cpus or len(missing) == len(workers)):
        see = f"{counted(len(missing), 'worker')} of the scheduler {'sees' if len(missing) == 1 else 'see'} no GPU"
        raise InputError(
            f"engine={engine.name!r}, but {see}, {missing[0]} among them: "
            f"start them with `dask cuda worker`, or choose engine={engine.alternative!r}"
        )
