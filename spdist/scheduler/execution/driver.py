"""Run a plan: keep a window of blocks in flight, give blocks their positions in C in order, and journal durable rows.

The driver alone decides what must be in order: the position of each block (known once the blocks before it are
counted), C's row offsets, and the journal from which ``--resume`` continues. An executor runs the stages; they write
C's Zarr chunks, each once: by the block that fills it, or by a join of the blocks that share it.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from spdist.errors import SpdistError
from spdist.foundation import phases
from spdist.scheduler.execution.announcer import Announcer, announced, run_start
from spdist.scheduler.execution.assignment import BlockAssigner, BlockWork
from spdist.scheduler.execution.executor import Executor, Handle
from spdist.scheduler.execution.journal import Journal, UnseenChunkError
from spdist.scheduler.execution.records import JobSpec, Outcome
from spdist.scheduler.execution.stages import CommitTarget
from spdist.scheduler.execution.telemetry import InFlight, Progress, RunCallbacks, add_totals
from spdist.scheduler.execution.unfinished import note_event
from spdist.scheduler.execution.window import BlockInFlight, BlockWindow, SharedChunks
from spdist.scheduler.planner.plan import Plan
from spdist.storage.checksums import Checksums
from spdist.storage.writer import Layout
from spdist.stores.names import family_of


@dataclass(frozen=True)
class DriverTuning:
    """Intervals of the driver's periodic work."""

    worker_seconds: float = 2.0  # seconds between two looks for new workers
    poll_seconds: float = 0.1  # seconds between two looks for workers while no worker is there


TUNING = DriverTuning()


@dataclass
class RunTotals:
    """Finished work of a run."""

    nnz: int  # entries of C with a known position
    durable_row: int  # rows of C that are durable
    products: int  # products of finished blocks, blocks of earlier runs included
    # of this run
    tasks: int = 0
    blocks: int = 0
    # microseconds that a typical worker takes for the blocks that were multiplied, and for those that were written
    multiplied: int = 0
    written: int = 0


class Driver(ABC):
    """The loop of every run: hand out blocks, and take what their stages return.

    `executor`: runs the plan's job (`Executor.running`).
    `blocks_in_flight`: blocks that a worker holds at most.
    `start`: row, and position in C, from which the run goes on.
    """

    first_stage: ClassVar[str]

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        callbacks: RunCallbacks,
        blocks_in_flight: int,
        entry_bytes: int,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.executor, self.plan, self.callbacks, self._entry_bytes = executor, plan, callbacks, entry_bytes
        row, nnz = start
        works = [BlockWork.of(block, start=row) for block in plan.blocks if block.stop > row]
        self.window = BlockWindow(works, row)
        self.assigner = BlockAssigner(plan, blocks_in_flight, executor.with_gpu)
        self.done = RunTotals(nnz, row, plan.expansion - sum(work.products for work in works))
        self.work = sum(map(self.microseconds, works))
        self.subjects: dict[Handle, tuple[str, Any]] = {}
        self._last_look = 0.0

    def drive(self) -> None:
        """Run all stages of all blocks."""
        self.advance()
        while self.subjects:
            self._report_in_flight()
            for handle, result in self.executor.next_completed():
                self.done.tasks += 1
                self.complete(*self.subjects.pop(handle), result)
            self.advance()
            self.report_progress()

    @abstractmethod
    def complete(self, stage: str, subject: Any, result: Any) -> None:
        """Take the result of a stage; its subject is a block or, of a join, a Zarr chunk."""

    @abstractmethod
    def advance(self) -> None:
        """Submit the stages that may run now."""

    def watch(self, handle: Handle, stage: str, subject: Any) -> None:
        """Let `complete` take the result of a stage."""
        self.subjects[handle] = stage, subject

    def submit_blocks(self) -> None:
        """Submit blocks as long as a worker should take one."""
        remaining = self.window.remaining
        if not remaining:
            return
        self._look_for_workers()
        while remaining:
            chosen = self.assigner.choose(reversed(remaining), stuck=not self.subjects)
            if chosen is None:
                return
            worker, position = chosen
            self.window.submit(self.submit_block(worker, self.window.take(position)))

    def submit_block(self, worker: str, work: BlockWork, copy: int = 0) -> BlockInFlight:
        """Submit the first stage of a block; `copy` numbers further calls for the same block."""
        arguments, key = self.arguments_of(work), (work.task.number, copy)
        handle = self.executor.submit(self.first_stage, *arguments, key=key, worker=worker)
        block = BlockInFlight(work, worker, handle)
        self.assigner.assign(worker, work)
        self.watch(handle, self.first_stage, block)
        return block

    def arguments_of(self, work: BlockWork) -> tuple[Any, ...]:
        """Return the arguments of a block's first stage."""
        return (work.task,)

    def _look_for_workers(self) -> None:
        """Update the assigner's workers now and then; wait until one may be used."""
        now = time.monotonic()
        if len(self.assigner) and now - self._last_look < TUNING.worker_seconds:
            return
        self._last_look = now
        self.assigner.update_workers(self.callbacks.admit(self.executor.workers()))
        while not len(self.assigner):
            time.sleep(TUNING.poll_seconds)
            self.assigner.update_workers(self.callbacks.admit(self.executor.workers()))

    def microseconds(self, work: BlockWork) -> int:
        """Return what a block should take a typical worker."""
        return work.microseconds(self._entry_bytes, on_gpu=self.plan.on_gpu)

    def note_written(self, block: BlockInFlight) -> None:
        """Count a block whose worker is done with it."""
        block.committed = True
        if not block.spilled:
            self.assigner.note_written(block.worker)
        self.done.blocks += 1
        self.done.products += block.work.products
        self.done.written += self.microseconds(block.work)

    def _report_in_flight(self) -> None:
        if not self.window.in_flight:
            return
        oldest = self.window.in_flight[0].task
        blocks, rows = len(self.window.in_flight), (oldest.number, oldest.start, oldest.stop)
        self.callbacks.on_step(InFlight(self.done.tasks, blocks, rows, dict(self.assigner.held)))

    def report_progress(self) -> None:
        """Say how far the run is."""
        if self.callbacks.progress is None:
            return
        done, unwritten = self.done, self.window.submitted - self.done.blocks
        total = done.blocks + unwritten + len(self.window.remaining)
        rows = done.nnz, done.durable_row, unwritten
        work = done.multiplied, done.written, self.work
        self.callbacks.progress(Progress(done.blocks, total, done.products, self.plan.expansion, *rows, *work))


class ProductDriver(Driver):
    """Makes a stored C, from its journal on."""

    first_stage = "multiply"

    def __init__(
        self, executor: Executor, plan: Plan, layout: Layout, journal: Journal, callbacks: RunCallbacks
    ) -> None:
        start = journal.checkpoint
        super().__init__(executor, plan, callbacks, plan.blocks_in_flight, plan.c.entry_bytes, (start.row, start.nnz))
        self.journal, self.layout = journal, replace(layout, compressed=start.compressed)
        self.chunks = SharedChunks(layout.chunk, start.chunks)
        self._counted: list[BlockInFlight] = []  # since blocks were spilled last
        self._may_spill, self._commits = True, 0

    def run(self) -> Checksums:
        """Submit, commit and join blocks until everything is durable; return the checksums of C.

        The journal is written whatever happens.
        """
        try:
            self.drive()
            self._checkpoint(is_last=True)
            self.report_progress()
            assert not self.window.in_flight
            return self.journal.close()
        except BaseException:
            for keep in (functools.partial(self._checkpoint, is_last=True), self.journal.write):
                with suppress(Exception):  # an older journal is there, and the first error matters
                    keep()
            raise
        finally:
            self.journal.chunks.close()

    def advance(self) -> None:
        """Submit commits, joins and further blocks; note what is durable."""
        self._commit_blocks()
        self._spill_blocks()
        self.submit_blocks()
        self._checkpoint()

    def complete(self, stage: str, subject: Any, result: Any) -> None:
        """Take the counts of a block, or the end of a commit or a join."""
        if stage == "join":
            self.journal.chunks.add(result)
            return
        if stage == "spill":
            self._may_spill &= result
            if result and not subject.committed:
                subject.spilled = True
                self.assigner.note_written(subject.worker)
            return
        if stage == "commit":
            self._commits -= 1
            if result is not None:  # otherwise a join brings what the commit wrote
                self.journal.chunks.add(result.written)
            self.note_written(subject)
            return
        if subject.task.number == 0 and result.compresses:
            self.journal.set_compressed()
            self.layout = replace(self.layout, compressed=True)
        self.window.set_counts(subject, result)
        self._counted.append(subject)
        self.done.multiplied += self.microseconds(subject.work)
        self.assigner.note_multiplied(subject.worker, subject.work)

    def _commit_blocks(self) -> None:
        """Submit the commit of each block whose predecessors are all counted, and the joins that are complete then."""
        for block in self.window.set_offsets(self.done.nnz):
            assert block.counts is not None
            self.done.nnz = block.offset + block.nnz
            target = CommitTarget(self.layout, block.offset, self.journal.checkpoint.chunks)
            arguments, number = (block.counts.rows, block.counts.digest, target), block.task.number
            shared = self.chunks.of_block(block)
            commit = self.executor.submit(
                "commit", block.task, *arguments, key=(number, 0), worker=block.worker, after=[block.multiplied],
                wanted=not shared,
            )  # fmt: skip
            self.watch(commit, "commit", block)
            self._commits += 1
            for k in shared:
                self.chunks.add(k, commit)
            is_last = block.task.stop == self.plan.a.shape[0]
            for k, commits in self.chunks.take_complete(self.done.nnz, is_last=is_last):
                join = self.executor.submit("join", self.layout, k, key=(k, 0), after=commits)
                self.watch(join, "join", k)

    def _spill_blocks(self) -> None:
        """Spill the last block of each worker whose blocks all wait for a slow one before them, if storage is idle."""
        if self._commits:
            return  # what is spilled is written twice, and C would be finished later
        last = {block.worker: block for block in self._counted if block.offset < 0}
        self._counted.clear()
        for block in last.values() if self._may_spill and self.window.remaining else ():
            if self.assigner.is_stuck(block.worker):
                reserve = max(self.plan.c.nnz - self.done.nnz, 0) * self.plan.c.entry_bytes
                block.multiplied = self.executor.submit(
                    "spill", block.task, self.layout.url, reserve, key=(block.task.number, 0), worker=block.worker,
                    after=[block.multiplied],
                )  # fmt: skip
                self.watch(block.multiplied, "spill", block)

    def _checkpoint(self, *, is_last: bool = False) -> None:
        """Drop the blocks that are durable and, now and then, write the journal."""
        try:
            self.journal.chunks.look(wait=is_last)
        except UnseenChunkError as error:
            raise unseen_chunk(self.executor.workers_that_see(error.array, error.k), error) from error
        while (block := self.window.first_committed()) is not None and block.counts is not None:
            if block.offset + block.nnz > self.journal.chunks.count * self.chunks.length:
                break
            self.journal.add_rows(block.task, block.offset, block.counts)
            self.window.drop_first()
        self.journal.keep(is_last=is_last)
        self.done.durable_row = self.journal.checkpoint.row


def unseen_chunk(workers: list[str], error: UnseenChunkError) -> SpdistError:
    """Return the exception to raise if a Zarr chunk of C was written and this process does not see it.

    `workers`: that see it.
    """
    url = error.array.url
    if not workers:
        return SpdistError(
            f"{error} was written and is not there any more: nothing else may touch {url} while it is made; continue "
            f"with --resume"
        )
    return SpdistError(
        f"worker {', '.join(workers)} wrote {error}, but it is not there for this process: the workers see another "
        f"folder at {url}; put C where all of them see the same files, then continue with --resume"
    )


@contextmanager
def announced_run(
    executor: Executor, draft: JobSpec, plan: Plan, callbacks: RunCallbacks, title: str, row: int = 0
) -> Iterator[tuple[RunCallbacks, Announcer]]:
    """Announce the run of a plan from a row on; yield callbacks that announce the progress, too, and the announcer."""
    if executor.link:
        callbacks.started(executor.link)
    start = run_start(plan, draft, title, row, callbacks.expects(plan))
    with announced(executor, start, callbacks.on_message) as announcer:
        yield callbacks.with_progress(announcer.progress), announcer


def execute(
    executor: Executor, draft: JobSpec, plan: Plan, layout: Layout, callbacks: RunCallbacks
) -> tuple[Outcome, Layout, Checksums]:
    """Run a plan, from where C's journal says.

    `draft`: operands and options; the plan decides the rest.
    `layout`: of C, which was begun (`groups.begin`).
    Returns the layout of C as it was written (block 0 decides on compression), and the checksums of its Zarr chunks.
    Raises `SpdistError` if a stage failed. Durable rows stay, and the journal says how many they are.
    """
    journal = Journal(layout)
    title, row = family_of(layout.url), journal.checkpoint.row
    callbacks = callbacks.with_events(functools.partial(note_event, layout.url))
    with (
        executor.running(draft, plan, layout.url, callbacks.on_timings),
        announced_run(executor, draft, plan, callbacks, title, row) as (reports, announcer),
    ):
        driver = ProductDriver(executor, plan, layout, journal, reports)
        with phases.during("run"):
            checksums = driver.run()
        phases.enter("close")
        costs = executor.costs(driver.assigner.held)
        announcer.stages = add_totals(costs.stages)
        host, device = (max((peak[i] for peak in costs.peaks), default=0) for i in (0, 1))
        outcome = Outcome(driver.done.nnz, driver.done.blocks, host, device, len(costs.peaks), announcer.stages)
        return outcome, driver.layout, checksums
