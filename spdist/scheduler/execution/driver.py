"""Run a plan: keep a window of blocks in flight, give blocks their positions in C in order, and journal durable rows.

The driver alone decides what must be in order: the position of each block (known once the blocks before it are
counted), C's row offsets, and the journal from which ``--resume`` continues. Workers write C's Zarr chunks, each chunk
once: by the block that fills it, or by a join of the blocks that share it.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dask.utils import key_split
from distributed import Client, Future, as_completed

from spdist.errors import SpdistError
from spdist.foundation import phases
from spdist.scheduler.dashboard.messages import TIMINGS
from spdist.scheduler.execution.announcer import announced, run_start
from spdist.scheduler.execution.assignment import BlockAssigner, BlockWork
from spdist.scheduler.execution.clients.members import (
    POLL_SECONDS,
    dashboard_link,
    fetch,
    shared_name,
    with_gpu,
    workers_of,
)
from spdist.scheduler.execution.graph import TaskGraph
from spdist.scheduler.execution.journal import Journal, UnseenChunkError, is_seen
from spdist.scheduler.execution.plugins import compilations, installed, peak_memory
from spdist.scheduler.execution.records import JobSpec, Outcome
from spdist.scheduler.execution.stages import stage_failure
from spdist.scheduler.execution.supervision.calls import addresses, is_connected, lost_scheduler
from spdist.scheduler.execution.telemetry import InFlight, Progress, RunCallbacks, TimingSubscriber, add_totals
from spdist.scheduler.execution.window import BlockInFlight, BlockWindow, SharedChunks
from spdist.scheduler.execution.worker import stage_totals, unpublished_timings
from spdist.scheduler.planner.plan import Plan
from spdist.storage.checksums import Checksums
from spdist.storage.writer import Layout
from spdist.stores.names import family_of


@dataclass(frozen=True)
class DriverTuning:
    """Intervals of the driver's periodic work."""

    worker_seconds: float = 2.0  # seconds between two looks for new workers


TUNING = DriverTuning()


@dataclass
class Done:
    """Finished work of a run."""

    nnz: int  # entries of C with a known position
    # of this run
    tasks: int = 0
    blocks: int = 0
    products: int = 0  # products of finished blocks, blocks of earlier runs included


class Driver:
    """Runs one plan from C's journal on; `run` returns when C's entries and row offsets are all written.

    `client`: its workers have the job installed.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        plan: Plan,
        layout: Layout,
        callbacks: RunCallbacks,
        tuning: DriverTuning,
    ) -> None:
        self.plan, self.callbacks, self.tuning = plan, callbacks, tuning
        self.journal = Journal(layout)
        start = self.journal.checkpoint
        pieces = (len(plan.inner_bounds) - 1) * (len(plan.column_bounds) - 1)
        self.graph = TaskGraph(client, name, pieces, replace(layout, compressed=start.compressed))
        works = [BlockWork.of(block, start=start.row) for block in plan.blocks if block.stop > start.row]
        self.window = BlockWindow(works, start.row)
        self.chunks = SharedChunks(layout.chunk, start.chunks)
        self.assigner = BlockAssigner(plan, plan.blocks_in_flight, functools.partial(with_gpu, client))
        self.done = Done(start.nnz, products=plan.expansion - sum(work.products for work in works))
        self.work_multiplied = self.work_written = 0
        self.work = sum(map(self._microseconds, works))
        self._completed = as_completed(loop=client.loop)
        self._subjects: dict[Any, tuple[str, Any]] = {}
        self._last_look = 0.0

    def run(self) -> Checksums:
        """Submit, commit and join blocks until everything is durable; return the checksums of C."""
        self._submit_blocks()
        while self._subjects:
            self._note_in_flight()
            self._handle(self._completed.next_batch(block=True))
            self._commit_blocks()
            self._submit_blocks()
            self._checkpoint()
            self._report_progress()
        self._checkpoint(is_last=True)
        self._report_progress()
        assert not self.window.in_flight
        return self.journal.close()

    # -- submission ----------------------------------------------------------------------------------------------------

    def _submit_blocks(self) -> None:
        """Submit blocks as long as a worker should take one."""
        remaining = self.window.remaining
        if not remaining:
            return
        self._look_for_workers()
        while remaining:
            chosen = self.assigner.choose(reversed(remaining), stuck=not self._subjects)
            if chosen is None:
                return
            worker, position = chosen
            work = self.window.take(position)
            block = BlockInFlight(work, worker, self.graph.multiply(work.task, worker))
            self.assigner.assign(worker, work)
            self.window.submit(block)
            self._watch(block.multiplied, "multiply", block)

    def _look_for_workers(self) -> None:
        """Update the assigner's workers now and then."""
        now = time.monotonic()
        if len(self.assigner) and now - self._last_look < self.tuning.worker_seconds:
            return
        self._last_look = now
        key_split.cache_clear()
        update_workers(self.assigner, self.graph.client, self.callbacks)

    def _watch(self, future: Future[Any], stage: str, subject: BlockInFlight | int) -> None:
        """Handle a future when it completes; its subject is a block or, of a join, a Zarr chunk."""
        self._subjects[future.key] = (stage, subject)
        self._completed.add(future)

    # -- completed tasks -----------------------------------------------------------------------------------------------

    def _handle(self, futures: list[Future[Any]]) -> None:
        """Take the results of completed tasks."""
        futures = completed_results(futures, self._completed)
        subjects = [self._subjects.pop(future.key) for future in futures]
        self.done.tasks += len(subjects)
        multiplied = [i for i, (stage, _) in enumerate(subjects) if stage == "multiply"]
        results = fetch(self.graph.client, [futures[i] for i in multiplied])
        for i, counts in zip(multiplied, results, strict=True):
            block = subjects[i][1]
            if block.task.number == 0 and counts.compresses:
                self.journal.set_compressed()
                self.graph.compress()
            self.window.set_counts(block, counts)
            self.work_multiplied += self._microseconds(block.work)
            self.assigner.note_multiplied(block.worker, block.work)
        for stage, subject in subjects:
            if stage == "commit":
                self._end_commit(subject)
            elif stage == "join":
                self.chunks.end_join(subject)

    def _end_commit(self, block: BlockInFlight) -> None:
        block.committed = True
        self.chunks.end_commit(block.task.number)
        self.assigner.note_written(block.worker)
        self.done.blocks += 1
        self.done.products += block.work.products
        self.work_written += self._microseconds(block.work)

    def _microseconds(self, work: BlockWork) -> int:
        """Return what a block should take a typical worker."""
        return work.microseconds(self.plan.c.entry_bytes, on_gpu=self.plan.on_gpu)

    def _commit_blocks(self) -> None:
        """Submit the commit of each block whose predecessors are all counted, and the joins that are complete then."""
        for block in self.window.set_offsets(self.done.nnz):
            assert block.counts is not None
            self.done.nnz = block.offset + block.nnz
            commit = self.graph.commit(
                block.task, block.counts, block.offset, self.journal.checkpoint.chunks, block.worker, block.multiplied
            )
            self._watch(commit, "commit", block)
            self.chunks.begin_commit(block, commit)
            is_last = block.task.stop == self.plan.a.shape[0]
            for k, commits in self.chunks.take_complete(self.done.nnz, is_last=is_last):
                self._watch(self.graph.join(k, commits), "join", k)

    # -- durable rows --------------------------------------------------------------------------------------------------

    def _checkpoint(self, *, is_last: bool = False) -> None:
        """Drop the blocks that are durable and, now and then, write the journal."""
        try:
            chunks = self.journal.chunks.advance(self.chunks.count_durable(self.done.nnz), wait=is_last)
        except UnseenChunkError as error:
            raise unseen_chunk(self.graph.client, error) from error
        while (block := self.window.first_committed()) is not None and block.counts is not None:
            if block.offset + block.nnz > chunks * self.chunks.length:
                break
            self.journal.add_rows(block.task.stop, block.offset, block.counts.row_nnz)
            self.window.drop_first()
        self.journal.keep(chunks, is_last=is_last)

    def _note_in_flight(self) -> None:
        if not self.window.in_flight:
            return
        oldest = self.window.in_flight[0].task
        blocks, rows = len(self.window.in_flight), (oldest.number, oldest.start, oldest.stop)
        self.callbacks.note(InFlight(self.done.tasks, blocks, rows, dict(self.assigner.held)))

    def _report_progress(self) -> None:
        if self.callbacks.progress is not None:
            unwritten = sum(not block.committed for block in self.window.in_flight)
            total = self.done.blocks + unwritten + len(self.window.remaining)
            self.callbacks.progress(
                Progress(
                    self.done.blocks,
                    total,
                    self.done.products,
                    self.plan.expansion,
                    self.done.nnz,
                    self.journal.checkpoint.row,
                    unwritten,
                    self.work_multiplied,
                    self.work_written,
                    self.work,
                )
            )


def update_workers(assigner: BlockAssigner, client: Client, callbacks: RunCallbacks) -> None:
    """Tell an assigner which workers there are; waits until one may be used.

    `assigner`: gets the addresses of the workers.
    `client`: asked every `POLL_SECONDS` until it knows a worker.
    `callbacks`: its `admit` says which workers may be used.
    """
    assigner.update_workers(callbacks.admit(workers_of(client)))
    while not len(assigner):
        time.sleep(POLL_SECONDS)
        assigner.update_workers(callbacks.admit(workers_of(client)))


def completed_results(futures: Iterable[Future[Any]], completed: as_completed) -> list[Future[Any]]:
    """Return the completed futures whose results are still there.

    `futures`: as `completed` returned them.
    `completed`: futures whose result was lost with a worker are computed again; they are added here.
    Returns in the order of `futures`.
    Raises `SpdistError` if a task failed.
    """
    finished = []
    for future in futures:
        status = future.status  # another thread changes it
        if status in ("error", "cancelled"):
            raise failure(future)
        if status == "finished":
            finished.append(future)
        else:
            completed.add(future)
    return finished


def unseen_chunk(client: Client, error: UnseenChunkError) -> SpdistError:
    """Return the exception to raise if a Zarr chunk of C was written and this process does not see it."""
    seen = client.run(is_seen, error.array, error.k, on_error="ignore")
    who = ", ".join(address for address, sees in seen.items() if sees)
    url = error.array.url
    if not who:
        return SpdistError(
            f"{error} was written and is not there any more: nothing else may touch {url} while it is made; continue "
            f"with --resume"
        )
    return SpdistError(
        f"worker {who} wrote {error}, but it is not there for this process: the workers see another folder at {url}; "
        f"put C where all of them see the same files, then continue with --resume"
    )


def failure(future: Future[Any]) -> Exception:
    """Return the exception to raise for a failed task."""
    if not is_connected(future.client):
        return lost_scheduler(future.client)
    if future.cancelled():
        return SpdistError(f"stage {future.key!s} was cancelled on the scheduler; continue with --resume")
    error = future.exception()
    assert error is not None
    return stage_failure(str(future.key), error)


def execute(
    client: Client, name: str, draft: JobSpec, plan: Plan, layout: Layout, callbacks: RunCallbacks
) -> tuple[Outcome, Layout, Checksums]:
    """Run a plan on the workers of a client, from where C's journal says.

    `name`: of the job, unique among the jobs of these workers; `plugins.prefetch` may have used it.
    `draft`: operands and options; the plan decides the rest.
    `layout`: of C, which was begun (`storage.matrix.begin`).
    Returns of C as it was written: block 0 decides on compression.
    Returns of C's Zarr chunks.
    Raises `SpdistError` if a stage failed. Durable rows stay, and the journal says how many they are.
    """
    timings = TimingSubscriber(name, callbacks.timed) if callbacks.timed is not None else None
    if timings is not None:  # before workers have the job: they begin to publish as soon as they have it
        client.subscribe_topic(TIMINGS, timings.receive)
    try:
        with installed(client, name, draft.with_plan(plan, shared_name(client)), layout.url):
            callbacks.started(dashboard_link(client))
            driver = Driver(client, name, plan, layout, callbacks, TUNING)
            durable, expected = driver.journal.checkpoint.row, callbacks.expects(plan)
            start = run_start(plan, draft, family_of(layout.url), durable, expected)
            with announced(client, name, start, callbacks.heard) as announcer:
                driver.callbacks = callbacks.also(announcer.progress)
                with phases.during("run"):
                    checksums = _run(driver)
                phases.enter("close")
                outcome = _outcome(client, name, driver)
                announcer.stages = outcome.stages
            phases.add_compiled(compilations(client))
            if timings is not None:
                timings.finish(client.run(unpublished_timings, name, on_error="ignore"))
            return outcome, driver.graph.layout, checksums
    finally:
        if timings is not None:
            client.unsubscribe_topic(TIMINGS)


def _run(driver: Driver) -> Checksums:
    """Run a driver without searches for garbage among old objects; the journal is written whatever happens."""
    gc.freeze()  # millions of tasks make garbage; the objects before them need not be searched each time
    try:
        return driver.run()
    except BaseException:
        with suppress(OSError):  # an older journal is there, and the first error matters
            driver.journal.write()
        raise
    finally:
        driver.journal.chunks.close()
        gc.unfreeze()


def _outcome(client: Client, name: str, driver: Driver) -> Outcome:
    """Ask the workers for peaks and stage totals; a worker may die at the last moment."""
    alive = set(addresses(client))  # Dask would try to reach one that died for half a minute
    used = [address for address in driver.assigner.held if address in alive] or None
    peaks = client.run(peak_memory, name, workers=used, on_error="ignore").values()
    stages = add_totals(client.run(stage_totals, name, on_error="ignore").values())
    host, device = (max((peak[i] for peak in peaks), default=0) for i in (0, 1))
    return Outcome(driver.done.nnz, driver.done.blocks, host, device, len(peaks), stages)
