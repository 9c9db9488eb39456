"""Clients that stop within seconds, whatever happened to the scheduler and the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psutil
from distributed import Client, Nanny, SpecCluster

logger = logging.getLogger("spdist")

STOP_SECONDS, RELEASE_SECONDS = 1.0, 30.0
"""Seconds to wait for each step of a stop: workers let the job go, the client says goodbye, the workers end. After a
run that went well, workers have longer to let the job go, because the next one needs their memory."""


QUESTIONS = frozenset({
    "_run", "_run_on_scheduler", "_register_worker_plugin", "_register_scheduler_plugin", "_update_scheduler_info",
    "send_recv_from_rpc",
})  # fmt: skip
"""Coroutines of Dask that ask a scheduler, or workers through it, and may be called again."""
ANSWER_SECONDS = 75.0
"""Seconds to wait for an answer from a cluster that others started, before the question is asked once more."""


class RunClient(Client):
    """A client that gives a lost scheduler up at once. Dask's own would look for it for as long as it took to connect.

    It is not the default client of this process: what a user computes with Dask meanwhile stays where it was, and a
    failed connection leaves no setting behind.

    `**options`: of Dask's client.
    `lost`: whether the connection to the scheduler broke. All futures are gone then; a scheduler that comes back has no
    task of this run.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self.lost = False
        try:
            super().__init__(address, set_as_default=False, **options)  # type: ignore[no-untyped-call]
        except BaseException:
            self.status = "closed"  # else it would try to say goodbye, and wait, when it is collected
            raise

    async def _start(self, *args: Any, **options: Any) -> Any:
        """Connect; Dask waits without end for the answer of a scheduler that others started."""
        async with asyncio.timeout(ANSWER_SECONDS if self.cluster is None else None):
            return await super()._start(*args, **options)  # type: ignore[no-untyped-call]

    def sync(self, func: Any, *args: Any, **options: Any) -> Any:
        """Wait for a coroutine; ask a question again, over another connection, if there is no answer to it.

        Raises `TimeoutError` if there is no answer the second time either.
        """
        is_question = getattr(func, "__name__", "") in QUESTIONS and options.get("callback_timeout") is None
        if not is_question or self.cluster is not None or self.asynchronous:
            return super().sync(func, *args, **options)  # type: ignore[no-untyped-call]
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                return super().sync(func, *args, **{**options, "callback_timeout": ANSWER_SECONDS})  # type: ignore[no-untyped-call]
        raise TimeoutError(f"the scheduler, or a worker, gave no answer for {2 * ANSWER_SECONDS:.0f} s")

    async def _reconnect(self) -> None:
        self.lost, self._timeout = True, 0
        await super()._reconnect()

    def unregister_worker_plugin(self, name: str, nanny: bool | None = None) -> Any:
        """Remove a plugin from all workers; raise TimeoutError if they take long, above all while an error is raised.

        Workers that end with this client remove it themselves when they end.
        """
        stopping = sys.exc_info()[0] is not None
        if stopping and self.cluster is not None:
            return {}
        seconds = STOP_SECONDS if stopping else RELEASE_SECONDS
        sync: Any = self.sync
        return sync(self._unregister_worker_plugin, name=name, nanny=nanny, callback_timeout=seconds)


def close_client(client: Client) -> None:
    """Close a client; leave it behind if that takes longer than `STOP_SECONDS`."""
    with contextlib.suppress(Exception):  # the run is over; whatever Dask raises here changes nothing for the user
        client.close(timeout=STOP_SECONDS)


@contextlib.contextmanager
def closed_if_interrupted() -> Iterator[None]:
    """Close the clusters whose start is interrupted, and end their processes: nobody else has them yet."""
    clusters, processes = set(SpecCluster._instances), _spawned()
    try:
        yield
    except KeyboardInterrupt:
        for cluster in set(SpecCluster._instances) - clusters:
            close_cluster(cluster)
        for process in _spawned() - processes:  # its nanny does not know of it before it has imported everything
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        raise


def _spawned() -> set[psutil.Process]:
    """Return this process's children that multiprocessing started, its resource tracker left out."""
    spawned = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if any("spawn_main" in word for word in child.cmdline()):
                spawned.add(child)
    return spawned


def close_cluster(cluster: SpecCluster) -> None:
    """End a cluster of this machine; kill worker processes that take longer than two `STOP_SECONDS`.

    `cluster`: nothing on its workers is needed any more.
    """
    nannies = [nanny for nanny in cluster._created if isinstance(nanny, Nanny)]  # those that are starting too
    with contextlib.suppress(RuntimeError):  # the loop has not begun to run
        loop: Any = cluster.loop
        loop.asyncio_loop.set_exception_handler(lambda *_: None)  # nobody is left to read the errors of killed workers
    try:
        cluster.close(timeout=2 * STOP_SECONDS)
    except Exception as error:  # a worker that is stuck, or a nanny that is restarting its worker
        logger.debug("the cluster did not close: %s", error)
    cluster.shutdown_on_close = False  # Dask would try again, and wait, when the interpreter ends
    for nanny in nannies:
        if nanny.pid:
            with contextlib.suppress(OSError):
                os.kill(nanny.pid, signal.SIGKILL)
