"""Connect to a running scheduler, and leave nothing there."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator

from distributed import Client, Scheduler, SchedulerPlugin, Security

from spdist.errors import InputError, SpdistError
from spdist.scheduler.clusters.addresses import check_address, wait_until_reachable
from spdist.scheduler.clusters.client import RunClient, close_client
from spdist.scheduler.clusters.security import security_for
from spdist.scheduler.executors.supervision.calls import silenced_dask

logger = logging.getLogger("spdist")


CONNECT_SECONDS = 15
"""Seconds in which a running scheduler should answer."""
OPEN = (
    "the scheduler at %s has no keys: whoever reaches its port, or a worker's, runs code as its owner; see `spdist "
    "cluster-keys --help`"
)


class ClientPlugin(SchedulerPlugin):
    """Does something for one client, and goes when the client has gone; with an empty client it stays."""

    idempotent = True

    def __init__(self, client: str, what: str) -> None:
        self.client, self.name = client, f"spdist-{what}-{client}"

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Go with the client."""
        if client == self.client:
            scheduler.remove_plugin(self.name)
            self.undo(scheduler)

    def undo(self, scheduler: Scheduler) -> None:
        """Undo what `start` did; nothing by default."""


class ReleaseStrandedTasks(ClientPlugin):
    """Lets tasks run on the next worker to join if all workers have died.

    A task of a dead worker runs on another worker, if there is one. Without another worker, Dask would wait for the
    dead worker for ever.
    """

    def __init__(self, client: str = "") -> None:
        super().__init__(client, "stranded")

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Remove the restriction to workers that have died."""
        for task in scheduler.unrunnable:
            asked = task.worker_restrictions
            if asked and task.loose_restrictions and scheduler.workers.keys().isdisjoint(asked):
                task.worker_restrictions = None


class NoStealing(ClientPlugin):
    """Stops Dask's work stealing while a client is there: a stolen block leaves the memory that was planned for it."""

    def __init__(self, client: str) -> None:
        super().__init__(client, "no-stealing")
        self.stopped = False

    async def start(self, scheduler: Scheduler) -> None:
        """Stop stealing, unless the scheduler does not steal."""
        if "stealing" in scheduler.periodic_callbacks:
            self.stopped = True
            await scheduler.extensions["stealing"].stop()

    def undo(self, scheduler: Scheduler) -> None:
        """Let the scheduler steal again; if there is another such client, that is left to its plugin."""
        others = [plugin for plugin in scheduler.plugins.values() if isinstance(plugin, NoStealing)]
        if self.stopped and others:
            others[0].stopped = True
        elif self.stopped:
            scheduler.loop.add_callback(scheduler.extensions["stealing"].start)


class AdaptiveDemand(ClientPlugin):
    """Tells an adaptive cluster how many workers a run wants.

    Dask counts the tasks that were submitted, and the driver submits no more than the workers that are there can hold.
    """

    def __init__(self, client: str, workers: int) -> None:
        super().__init__(client, f"demand-{workers}")
        self.workers = workers

    async def start(self, scheduler: Scheduler) -> None:
        """Answer adaptive clusters in place of Dask; without a run the answer is Dask's."""

        def target(target_duration: float | None = None) -> int:
            wanted = [plugin.workers for plugin in scheduler.plugins.values() if isinstance(plugin, AdaptiveDemand)]
            return max([scheduler.adaptive_target(target_duration), *wanted])

        scheduler.handlers["adaptive_target"] = target


def want_workers(client: Client, count: int) -> None:
    """Let an adaptive cluster have `count` workers, or its maximum, until the client leaves."""
    if client.cluster is None:
        with contextlib.suppress(ImportError, ValueError):  # no spdist at the scheduler, which a warning has said
            client.register_plugin(AdaptiveDemand(client.id, count))


@contextlib.contextmanager
def connected(scheduler: str, given: Security | None) -> Iterator[Client]:
    """Yield a client of a running scheduler; say in one line that it cannot be reached, or is gone."""
    security = security_for(scheduler, given)
    with silenced_dask():  # what matters is in the one line
        client = _client_at(scheduler, security)
        try:
            if check_address(scheduler, security).scheme == "tcp":
                logger.warning(OPEN, scheduler)
            _prepare_scheduler(client, scheduler)
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
    except (OSError, ValueError, ImportError, struct.error) as error:
        raise InputError(
            f"no Dask scheduler answers at {scheduler}: {error or type(error).__name__}; start one with `dask "
            f"scheduler`, or correct host and port"
        ) from error


def _prepare_scheduler(client: Client, scheduler: str) -> None:
    """Have a running scheduler move only tasks of dead workers, and ask an adaptive cluster for a worker."""
    try:
        for plugin in (ReleaseStrandedTasks(client.id), NoStealing(client.id), AdaptiveDemand(client.id, 1)):
            client.register_plugin(plugin)
    except (ImportError, ValueError) as error:  # no spdist there, or it takes no code from clients
        logger.warning(
            "the scheduler at %s takes no plugin (%s): should all workers die at once, the run will wait for ever; "
            "install spdist where the scheduler runs", scheduler, error,
        )  # fmt: skip
