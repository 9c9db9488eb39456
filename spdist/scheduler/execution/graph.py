"""From blocks to Dask tasks: keys and dependencies only, no arithmetic.

Every task is named by its stage, so that the ordinary Dask dashboard already shows the pipeline::

    preprocess ─▶ multiply ─▶ (next piece: preprocess ─▶ multiply ─▶ merge) ─▶ commit ─▶ join
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributed import Client, Future, Reschedule, get_worker

from spdist.scheduler.execution.records import BlockCounts, BlockTask
from spdist.scheduler.execution.stages import STAGES, CommitTarget
from spdist.scheduler.execution.supervision.late_workers import STAYING_OUT
from spdist.scheduler.execution.supervision.silence import wait_until_known
from spdist.scheduler.execution.worker import CONTEXTS
from spdist.storage.writer import Layout

COMMIT_PRIORITY = 10
"""Dask priority of commits and joins. They run before the stages of later blocks, because they free memory."""

WRITING_STAGES = "commit", "join"
"""Stages that write to C."""

TASK_NAMES = {"join": "assemble"}
"""Names of tasks that are not those of their stages. Dask's page of groups takes ``dask.order`` for a topological sort,
which it is for these tasks only if names descend along dependencies: preprocess, multiply, merge, commit, assemble."""


class TaskGraph:
    """Submits the tasks of one job.

    `job`: name of the job on the workers.
    `pieces`: pieces of a split block.
    """

    def __init__(self, client: Client, job: str, pieces: int, layout: Layout) -> None:
        self.client, self.job, self.pieces, self.layout = client, job, pieces, layout

    def compress(self) -> None:
        """Let commits from now on compress values."""
        self.layout = replace(self.layout, compressed=True)

    def multiply(self, task: BlockTask, worker: str) -> Future[BlockCounts]:
        """Submit the stages up to the commit of a block; the result is its counts.

        Pieces of a split block run one after the other, so that only one is in memory.
        """
        last: Future[Any] | None = None
        for piece in range(self.pieces if task.split else 1):
            key = task.number, piece
            last = self._submit("preprocess", task, piece, key=key, worker=worker, after=last)
            last = self._submit("multiply", task, last, piece, key=key, worker=worker)
            if piece:
                last = self._submit("merge", task, piece, key=key, worker=worker, after=last)
        assert last is not None
        return last

    def commit(
        self, task: BlockTask, counts: BlockCounts, offset: int, done_chunks: int, worker: str, multiplied: Future[Any]
    ) -> Future[Any]:
        """Submit the commit of a multiplied block; the result is its fragments of shared Zarr chunks.

        `offset, done_chunks`: see `CommitTarget`.
        `worker`: address of the worker that multiplied the block.
        `multiplied`: as `multiply` returned it.
        """
        target = CommitTarget(self.layout, offset, done_chunks)
        arguments = task, len(counts.row_nnz), counts.digest, target
        return self._submit("commit", *arguments, key=(task.number, 0), worker=worker, after=multiplied)

    def join(self, k: int, commits: Sequence[Future[Any]]) -> Future[Any]:
        """Submit the join of Zarr chunk `k`, which several blocks share."""
        return self._submit("join", self.layout, k, *commits, key=(k, 0))

    def _submit(
        self,
        stage: str,
        *arguments: object,
        key: tuple[int, int],
        worker: str | None = None,
        after: Future[Any] | None = None,
    ) -> Future[Any]:
        """Submit a stage; with `after`, once that task is done."""
        call = (run_stage, self.job, stage) if after is None else (_run_stage_after, after, self.job, stage)
        return self.client.submit(
            *call,
            *arguments,
            key=(f"{TASK_NAMES.get(stage, stage)}-{self.job}", *key),
            workers=[worker] if worker else None,
            allow_other_workers=bool(worker),
            priority=COMMIT_PRIORITY if stage in WRITING_STAGES else 0,
            pure=False,
        )


def _run_stage_after(_: object, job: str, stage: str, *arguments: object) -> Any:
    """Run a stage once another task is done; its result is not needed."""
    return run_stage(job, stage, *arguments)


def run_stage(job: str, stage: str, *arguments: object) -> Any:
    """Run one stage of a job on this worker: the function of every Dask task.

    `job`: name of an installed job (`worker.CONTEXTS`).
    `stage`: one of `STAGES`.
    `*arguments`: passed to the stage after its context.
    Returns what the stage returns.
    Raises `Reschedule` if this worker does not fit the job, or may no longer write to C: Dask runs the stage on another
    worker.
    """
    if job in STAYING_OUT:
        raise Reschedule
    if stage in WRITING_STAGES:
        wait_until_known(get_worker())
    return STAGES[stage](CONTEXTS[job], *arguments)
