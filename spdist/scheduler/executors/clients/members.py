"""Ask the workers of a client: who is there, who sees a GPU, what they share; fetch their results."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, Future, LocalCluster

from spdist.scheduler.execution.worker_process import gpu_name
from spdist.scheduler.executors.supervision.calls import addresses
from spdist.scheduler.planner.remote_readers import RemoteReaders

SHARERS = 3
"""Least number of workers on a host that share a resident B. Pages of shared memory are small, so that filling them
takes longer than filling private memory; two workers lose more than they save."""
POLL_SECONDS = 0.1
"""Seconds between two looks for workers while no worker is there."""


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

    `workers`: addresses of the workers to ask.
    Returns by address: True if the worker sees a GPU.
    """
    names = client.run(gpu_name, workers=workers, on_error="ignore")
    return {address: name is not None for address, name in names.items()}


def fetch(client: Client, futures: Future[Any] | list[Future[Any]]) -> Any:
    """Return the results of one future, or of a list of futures; they may be large.

    Results come directly from the workers, not through a scheduler in this process: Dask sends an array of more than
    64 MiB in parts, and joins only parts that came through a socket.

    Returns the result of the future, or the results in the order of the list.
    """
    scheduler: Any = client.scheduler
    return client.gather(futures, direct=True if scheduler.address.startswith("inproc:") else None)


def dashboard_link(client: Client) -> str:
    """Return the address of the Dask dashboard; a cluster that spdist started serves it on this machine alone."""
    link = str(client.dashboard_link)
    cluster = getattr(client, "cluster", None)
    if not isinstance(cluster, LocalCluster):
        return link
    return urlsplit(link)._replace(netloc=f"127.0.0.1:{urlsplit(link).port}").geturl()
