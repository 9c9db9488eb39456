"""Workers that join during a run: each checks itself before its first task, and stays out of the run if it cannot help.

The driver gives such a worker no block. Dask might, so the worker pauses: the scheduler gives no task to a paused
worker, and a task that it already has is rescheduled (`distributed.Reschedule`). It resumes when the run is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker
from distributed.core import Status

from spdist.errors import SpdistError
from spdist.scheduler.dashboard.messages import ANNOUNCEMENTS
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.executors.supervision import probe
from spdist.scheduler.executors.supervision.calls import started_here
from spdist.scheduler.executors.supervision.handshake import StorageQuestion, inspect_storage
from spdist.shown import without_secrets
from spdist.storage import groups
from spdist.storage.matrix import StoredMatrix

STAYING_OUT: dict[str, Any] = {}
"""Jobs that this process stays out of: the share of memory at which Dask paused it before, by name of the job."""


@dataclass(frozen=True)
class JoinCheck:
    """What a worker checks before it takes part in a job."""

    # the client's `probe.source_digest`; empty for workers that the client's process started, which it knows
    source: str
    question: StorageQuestion  # about the operands
    place: str  # path or URL of the unfinished C; empty if C is not stored
    product: str  # what the client reads there: the record of the product

    @staticmethod
    def of(client: Client, job: JobSpec, place: str) -> JoinCheck:
        """Return the check for a job; `place` is the path of its unfinished C, empty if C is not stored."""
        if started_here(client):
            return JoinCheck("", StorageQuestion(), "", "")
        matrices = {"A": job.a, "B": job.b}
        if isinstance(job.product.mask, StoredMatrix):
            matrices["the mask"] = job.product.mask
        return JoinCheck(probe.source_digest(), StorageQuestion.about(matrices.items()), place, _product_at(place))

    def problem(self) -> str:
        """Return why this process cannot take part; empty if it can."""
        if not self.source:
            return ""
        if self.source != probe.source_digest():
            return "has spdist of another source than the client"
        if problem := inspect_storage(self.question).problem:
            return problem
        try:
            return "" if _product_at(self.place) == self.product else f"sees another folder at {self.place}"
        except (SpdistError, OSError) as error:
            return f"cannot read {self.place}: {error}"


def _product_at(place: str) -> str:
    return repr(groups.read_facts(place).get("product")) if place else ""


def stay_out(worker: Worker, job: str, problem: str) -> None:
    """Let a worker take no tasks while a job runs, and tell the user.

    `job`: name of the job.
    `problem`: why the worker does not fit, for the message.
    """
    memory: Any = worker.memory_manager
    STAYING_OUT[job] = memory.memory_pause_fraction
    memory.memory_pause_fraction = False  # else Dask would resume the worker
    worker.status = Status.paused
    text = without_secrets(f"worker {worker.address} {problem}; it is not used")
    worker.log_event(ANNOUNCEMENTS, {"product": job, "text": text})


def take_part_again(worker: Worker, job: str) -> None:
    """Undo `stay_out` when the job is over.

    `job`: name of the job.
    """
    if job in STAYING_OUT:
        memory: Any = worker.memory_manager
        memory.memory_pause_fraction = STAYING_OUT.pop(job)
        worker.status = Status.running
