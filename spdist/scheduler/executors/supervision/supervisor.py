"""What looks after the workers of one run: the handshake, and the monitor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from distributed import Client

from spdist.scheduler.executors.clients.running_scheduler import want_workers
from spdist.scheduler.executors.supervision.calls import clear_of_dask
from spdist.scheduler.executors.supervision.handshake import Handshake, StorageQuestion
from spdist.scheduler.executors.supervision.monitor import Monitor
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.request import PlanRequest
from spdist.storage.matrix import StoredMatrix


class Supervisor(NamedTuple):
    """Looks after the workers of one run."""

    handshake: Handshake
    monitor: Monitor

    def check(self, request: PlanRequest, plan: Plan, target: str) -> None:
        """Ask for as many workers as a plan can use; refuse those that do not fit it, or see other matrices or folders.

        `target`: where C goes; empty if C is not stored.
        Raises `InputError` Names a worker, what is wrong with it, and the remedy.
        """
        matrices = {"A": request.a, "B": request.b}
        if isinstance(request.spec.mask, StoredMatrix):
            matrices["the mask"] = request.spec.mask
        want_workers(self.handshake.client, -(-len(plan.blocks) // plan.threads))
        question = replace(StorageQuestion.about(matrices.items()), target=target)
        self.handshake.check(plan.projected_host_memory, question)


@contextmanager
def supervised(client: Client, name: str) -> Iterator[Supervisor]:
    """Look after a client's workers during a ``with`` block.

    `name`: name of the job.
    Raises `SpdistError` if workers, or the scheduler, were lost and the run could not go on.
    """
    with clear_of_dask(client), Monitor(client, name) as monitor:
        yield Supervisor(Handshake(client, name), monitor)
