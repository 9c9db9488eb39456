"""Runs stages as Dask tasks on the workers of a client: keys and dependencies only, no arithmetic.

Every task is named by its stage, so that the ordinary Dask dashboard already shows the pipeline::

    preprocess ─▶ multiply ─▶ (next piece: preprocess ─▶ multiply ─▶ merge) ─▶ commit ─▶ join
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dask.utils import key_split
from distributed import Client, Future, Reschedule, as_completed, get_worker

from spdist.errors import SpdistError
from spdist.foundation import phases
from spdist.scheduler.dashboard.messages import TIMINGS, Message
from spdist.scheduler.execution.executor import RunCosts
from spdist.scheduler.execution.journal import is_seen
from spdist.scheduler.execution.records import BlockTask, JobSpec, StageTotal
from spdist.scheduler.execution.stages import STAGES, stage_failure
from spdist.scheduler.execution.telemetry import TimingRecord, TimingSubscriber
from spdist.scheduler.execution.worker import CONTEXTS, stage_totals, unpublished_timings
from spdist.scheduler.executors.clients.members import dashboard_link, fetch, shared_name, with_gpu, workers_of
from spdist.scheduler.executors.clients.publishing import publish, totals_of_lost
from spdist.scheduler.executors.plugins import compilations, installed, peak_memory
from spdist.scheduler.executors.supervision.calls import addresses, is_connected, lost_scheduler
from spdist.scheduler.executors.supervision.late_workers import STAYING_OUT
from spdist.scheduler.executors.supervision.silence import wait_until_known
from spdist.scheduler.planner.plan import Plan
from spdist.storage.chunked_array import ChunkedArray

COMMIT_PRIORITY = 10
"""Dask priority of commits, joins and spills. They run before the stages of later blocks, because they free memory."""

WRITING_STAGES = "commit", "join"
"""Stages that write to C."""

TASK_NAMES = {"join": "assemble", "spill": "hold"}
"""Display names for tasks whose stage name Dask would misread. Dask's page of groups takes ``dask.order`` for a
topological sort, which it is for these tasks only if names descend along dependencies: preprocess, multiply, merge,
hold, commit, assemble."""


class DaskExecutor:
    """The workers of a client; see `Executor`.

    `name`: of the job on the workers; `plugins.prefetch` may have used it.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name, self.link = client, name, dashboard_link(client)
        self._pieces = 1
        self._completed = as_completed(loop=client.loop)
        self._fetched: set[Any] = set()  # keys of tasks whose results are fetched

    def publish(self, messages: Sequence[Message]) -> None:
        """Send messages of the run to the scheduler; one of progress alone without waiting."""
        publish(self.client, messages)

    @contextmanager
    def running(
        self, draft: JobSpec, plan: Plan, url: str = "", on_timings: Callable[[list[TimingRecord]], None] | None = None
    ) -> Iterator[None]:
        """Have the job installed on the workers, without searches for garbage among the objects that there are."""
        job = draft.with_plan(plan, shared_name(self.client))
        if not url:
            job = replace(job, blocks_in_flight=plan.threads)  # of a reduction each thread has one block
        self._pieces = len(job.pieces)
        timings = TimingSubscriber(self.name, on_timings) if on_timings is not None else None
        if timings is not None:  # before workers have the job: they begin to publish as soon as they have it
            self.client.subscribe_topic(TIMINGS, timings.receive)
        gc.freeze()  # millions of tasks make garbage; the objects before them need not be searched each time
        try:
            with installed(self.client, self.name, job, url):
                yield
                phases.add_compiled(compilations(self.client))
                if timings is not None:
                    timings.finish(self.client.run(unpublished_timings, self.name, on_error="ignore"))
        finally:
            gc.unfreeze()
            if timings is not None:
                self.client.unsubscribe_topic(TIMINGS)

    def workers(self) -> list[str]:
        """Return the addresses of the workers; waits until there is one."""
        key_split.cache_clear()
        return workers_of(self.client)

    def with_gpu(self, workers: list[str]) -> dict[str, bool]:
        """Ask workers whether they see a GPU; those that have left are left out."""
        return with_gpu(self.client, workers)

    def submit(
        self,
        stage: str,
        *arguments: Any,
        key: tuple[int, int],
        worker: str = "",
        after: Sequence[Any] = (),
        wanted: bool = True,
    ) -> Future[Any]:
        """Submit a stage as a task, and each piece of a block as tasks of its own."""
        if stage == "multiply":
            (task,) = arguments
            future = self._submit_pieces(task, key[0], worker)
        elif stage == "join":
            future = self._submit_task(stage, *arguments, *after, key=key, worker=worker)
        else:
            future = self._submit_task(stage, *arguments, key=key, worker=worker, after=next(iter(after), None))
        if wanted:
            self._fetched.add(future.key)
        self._completed.add(future)
        return future

    def _submit_pieces(self, task: BlockTask, number: int, worker: str) -> Future[Any]:
        """Submit the stages up to the commit of a block; the result is its counts.

        Pieces of a split block run one after the other, so that only one is in memory.
        """
        last: Future[Any] | None = None
        for piece in range(self._pieces if task.split else 1):
            key = number, piece
            last = self._submit_task("preprocess", task, piece, key=key, worker=worker, after=last)
            last = self._submit_task("multiply", task, last, piece, key=key, worker=worker)
            if piece:
                last = self._submit_task("merge", task, piece, key=key, worker=worker, after=last)
        assert last is not None
        return last

    def _submit_task(
        self, stage: str, *arguments: object, key: tuple[int, int], worker: str, after: Future[Any] | None = None
    ) -> Future[Any]:
        """Submit one task; with `after`, once that task is done."""
        call = (run_stage, self.name, stage) if after is None else (_run_stage_after, after, self.name, stage)
        return self.client.submit(
            *call,
            *arguments,
            key=(f"{TASK_NAMES.get(stage, stage)}-{self.name}", *key),
            workers=[worker] if worker else None,
            allow_other_workers=bool(worker),
            priority=COMMIT_PRIORITY if stage in (*WRITING_STAGES, "spill") else 0,
            pure=False,
        )

    def next_completed(self) -> list[tuple[Future[Any], Any]]:
        """Wait for tasks, and fetch the results that the driver needs.

        A result that was lost with its worker is computed again; its task completes once more.

        Raises `SpdistError` if a task failed.
        """
        finished, wanted = [], []
        for future in self._completed.next_batch(block=True):
            status = future.status  # another thread changes it
            if status in ("error", "cancelled"):
                raise failure(future)
            if status != "finished":
                self._completed.add(future)
            elif future.key in self._fetched:
                wanted.append(future)
            else:
                finished.append((future, None))
        self._fetched.difference_update(future.key for future in wanted)
        return [*zip(wanted, fetch(self.client, wanted), strict=True), *finished]

    def costs(self, workers: Collection[str]) -> RunCosts:
        """Ask the workers for peaks and stage totals; a worker may die at the last moment."""
        alive = set(addresses(self.client))  # Dask would try to reach one that died for half a minute
        used = [address for address in workers if address in alive] or None
        peaks = self.client.run(peak_memory, self.name, workers=used, on_error="ignore")
        stages = self.client.run(stage_totals, self.name, on_error="ignore")
        known = totals_of_lost(self.client, self.name)
        lost = [{stage: StageTotal(*sums) for stage, sums in stages.items()} for stages in known]
        return RunCosts(list(peaks.values()), [*stages.values(), *lost])

    def workers_that_see(self, array: ChunkedArray, k: int) -> list[str]:
        """Ask the workers whether they see a Zarr chunk."""
        seen = self.client.run(is_seen, array, k, on_error="ignore")
        return [address for address, sees in seen.items() if sees]


def failure(future: Future[Any]) -> Exception:
    """Return the exception to raise for a failed task."""
    if not is_connected(future.client):
        return lost_scheduler(future.client)
    if future.cancelled():
        return SpdistError(f"stage {future.key!s} was cancelled on the scheduler; continue with --resume")
    error = future.exception()
    assert error is not None
    return stage_failure(str(future.key), error)


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
