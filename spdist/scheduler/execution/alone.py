"""Run a plan in this process, block by block: no scheduler and no workers, and Dask is not loaded.

Such a product is done before workers would have started. The stages are those that workers run. One block is made at a
time, by all cores or by a GPU, while the next ones are read and the last one is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from spdist.errors import SpdistError
from spdist.foundation import phases
from spdist.foundation.threads import run_now
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.announcer import announced, run_start
from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.journal import Journal
from spdist.scheduler.execution.records import BlockCounts, BlockOperands, BlockTask, ChunkFragment, JobSpec, Outcome
from spdist.scheduler.execution.stages import STAGES, CommitTarget, compute, count, stage_failure
from spdist.scheduler.execution.telemetry import Progress, RunCallbacks, add_totals
from spdist.scheduler.execution.worker import WorkerContext, fix_engine
from spdist.scheduler.planner.plan import Plan
from spdist.storage.checksums import Checksums
from spdist.storage.writer import Layout
from spdist.stores.names import family_of

Submit = Callable[..., Future[int]]
"""Calls a function that writes a block, at once or in a thread."""
WORKER = "this process"
"""What records call the worker."""
GPU_READERS = 6
"""Threads that read blocks ahead for a GPU, which makes a block sooner than one thread reads it."""


def execute_alone(
    name: str, draft: JobSpec, plan: Plan, layout: Layout, callbacks: RunCallbacks
) -> tuple[Outcome, Layout, Checksums]:
    """Run a plan, from where C's journal says; as `driver.execute`, without workers.

    `draft`: operands and options; the plan decides the rest.
    `layout`: of C, which was begun (`storage.matrix.begin`).
    `callbacks`: `started` is not called: there is no dashboard.
    Returns of C as it was written: block 0 decides on compression.
    Returns of C's Zarr chunks.
    Raises `SpdistError` if a stage failed.
    """
    journal = Journal(layout)
    title, durable = family_of(layout.url), journal.checkpoint.row
    start = run_start(plan, draft, title, durable, callbacks.expects(plan))
    with (
        _context(draft, plan) as (context, idle),
        announced(None, name, start, callbacks.heard) as announcer,
    ):
        report = callbacks.also(announcer.progress).progress
        assert report is not None
        with phases.during("run"):
            pipeline = _Pipeline(context, plan, layout, journal, report)
            checksums = pipeline.run()
        phases.enter("close")
        phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
        pipeline.report_progress()
        if callbacks.timed is not None:
            callbacks.timed([timing | {"worker": WORKER} for timing in context.telemetry.take_timings()])
        announcer.stages = add_totals([context.telemetry.totals])
        peak = max(worker_process.peak_memory() - idle, 0)
        outcome = Outcome(pipeline.nnz, pipeline.writer.blocks, peak, context.gpu_peak(), 1, announcer.stages)
        return outcome, pipeline.writer.layout, checksums


class _Writer:
    """Writes blocks to C one after the other, and the Zarr chunks that they share as soon as all of one is there.

    `layout`: of C; block 0 decides on compression.
    `blocks`: blocks that are written.
    """

    def __init__(self, context: WorkerContext, layout: Layout, done_chunks: int) -> None:
        self.layout, self.blocks = layout, 0
        self._context, self._done_chunks = context, done_chunks
        self._fragments: list[ChunkFragment] = []

    def write(self, task: BlockTask, counts: BlockCounts, offset: int) -> int:
        """Write a block whose entries begin at `offset`; return how many Zarr chunks of C are whole."""
        target = CommitTarget(self.layout, offset, self._done_chunks)
        self._fragments += STAGES["commit"](self._context, task, len(counts.row_nnz), counts.digest, target)
        self.blocks += 1
        whole = (offset + _entries(counts)) // self.layout.chunk
        self.join_before(whole)
        return whole

    def join_before(self, stop: int) -> None:
        """Write the shared Zarr chunks before a number."""
        chunk = self.layout.chunk
        numbers = {fragment.offset // chunk for fragment in self._fragments}
        for k in sorted(k for k in numbers if k < stop):
            STAGES["join"](self._context, self.layout, k, self._fragments)
        self._fragments = [fragment for fragment in self._fragments if fragment.offset // chunk >= stop]


class _ReadAhead:
    """Reads blocks in threads while those before them are made.

    `works`: all blocks, in order.
    `most`: blocks that are read ahead.
    """

    def __init__(self, context: WorkerContext, works: list[BlockWork], most: int) -> None:
        self._context, self._works, self._most = context, works, most
        self._threads = ThreadPoolExecutor(max(most, 1), "spdist-read")
        self._reads: dict[int, Future[BlockOperands]] = {}
        self._begun = 1  # the first block is read when it is made

    def take(self, number: int) -> Future[BlockOperands] | None:
        """Begin to read the blocks after a number; return the operands of this one, or None if nobody reads them."""
        for later in range(max(self._begun, number + 1), min(number + self._most + 1, len(self._works))):
            task = self._works[later].task
            if self._context.job.pieces_of(task) == 1:
                self._reads[later] = self._threads.submit(STAGES["preprocess"], self._context, task)
            self._begun = later + 1
        return self._reads.pop(number, None)

    def close(self) -> None:
        """Wait for blocks that are being read; no more are."""
        self._threads.shutdown(cancel_futures=True)


class _Pipeline:
    """Makes the blocks of a plan in the calling thread; other threads read the next blocks, and one writes the last.

    `plan`: allows for blocks to read and a block to write beside the one that is made, or they take turns.
    `journal`: of C; says which rows are durable already.
    `report`: takes the progress.
    `nnz`: entries of C with a known position.
    """

    def __init__(
        self, context: WorkerContext, plan: Plan, layout: Layout, journal: Journal, report: Callable[[Progress], None]
    ) -> None:
        self._context, self._plan, self._journal, self._report = context, plan, journal, report
        start = journal.checkpoint
        self.writer = _Writer(context, replace(layout, compressed=start.compressed), start.chunks)
        self.nnz, self._number = start.nnz, int(start.row > 0)
        self._products = plan.expansion
        self._multiplied = self._written_before = self._work = 0
        self._written, self._writing = start.chunks, run_now(lambda: start.chunks)
        self._made: deque[tuple[int, int, BlockCounts]] = deque()

    def run(self) -> Checksums:
        """Make and write the rows that are not durable yet; return the checksums of C."""
        try:
            with ThreadPoolExecutor(1, "spdist-commit") as writer:
                self._run(writer)
            last = -(-self.nnz // self.writer.layout.chunk)
            with _clear_errors():
                self.writer.join_before(last)
            self._checkpoint(last, wait=True)
            self._written_before = self._multiplied
            return self._journal.close()
        except BaseException:
            with suppress(OSError, SpdistError):  # an older journal is there, and the first error matters
                self._checkpoint(self._written, wait=True)
                self._journal.write()
            raise
        finally:
            self._journal.chunks.close()

    def _run(self, writer: ThreadPoolExecutor) -> None:
        works = _works(self._plan, self._journal.checkpoint.row)
        self._products -= sum(work.products for work in works)
        self._work = sum(map(self._microseconds, works))
        room, readers = self._plan.blocks_in_flight, GPU_READERS if self._plan.on_gpu else 1
        reads = _ReadAhead(self._context, works, min(max(room - 2, 0), readers))
        with closing(reads):
            for number, work in enumerate(works):
                is_last = number == len(works) - 1
                submit = run_now if room == 1 else writer.submit
                self._make_rows(work.task, reads.take(number), submit, run_now if is_last else submit)
                self._products += work.products
                # The block before is written by now, this one perhaps not.
                self._written_before, self._multiplied = self._multiplied, self._multiplied + self._microseconds(work)
                if not is_last:
                    self.report_progress()
        self._checkpoint(self._wait_for_writer())

    def _make_rows(
        self, task: BlockTask, operands: Future[BlockOperands] | None, submit: Submit, submit_last: Submit
    ) -> None:
        """Make and write all rows of a task, in as many blocks as C needs."""
        while task.start < task.stop:
            numbered = replace(task, number=self._number)
            counts = self._make(numbered, operands)
            end, operands = task.start + len(counts.row_nnz), None
            self._write(numbered, counts, submit_last if end == task.stop else submit)
            task, self._number = replace(task, start=end), self._number + 1

    def _make(self, task: BlockTask, operands: Future[BlockOperands] | None) -> BlockCounts:
        """Make a block, of operands that were read ahead if there are any."""
        with _clear_errors():
            if operands is None:
                return count(compute(self._context, task, self._context.job.pieces_of(task)), task)
            counts: BlockCounts = STAGES["multiply"](self._context, task, operands.result())
            return counts

    def _write(self, task: BlockTask, counts: BlockCounts, submit: Submit) -> None:
        """Begin to write a block, once the block before it is written."""
        self._checkpoint(self._wait_for_writer())
        if task.number == 0 and counts.compresses:
            self._journal.set_compressed()
            self.writer.layout = replace(self.writer.layout, compressed=True)
        self._made.append((task.start + len(counts.row_nnz), self.nnz, counts))
        with _clear_errors():
            self._writing = submit(self.writer.write, task, counts, self.nnz)
        self.nnz += _entries(counts)

    def _wait_for_writer(self) -> int:
        """Wait until the last block is written; return how many Zarr chunks of C are whole."""
        with _clear_errors():
            return self._writing.result()

    def _checkpoint(self, written: int, *, wait: bool = False) -> None:
        """Add to the journal the rows that are durable when so many Zarr chunks are written."""
        self._written = written
        chunks = self._journal.chunks.advance(written, wait=wait)
        while self._made:
            end, offset, counts = self._made[0]
            if offset + _entries(counts) > chunks * self.writer.layout.chunk:
                break
            self._journal.add_rows(end, offset, counts.row_nnz)
            self._made.popleft()
        self._journal.keep(chunks)

    def report_progress(self) -> None:
        """Say how far the run is."""
        done, known = self.writer.blocks, max(len(self._plan.blocks), self.writer.blocks)
        row = self._journal.checkpoint.row
        left = self._multiplied, self._written_before, self._work
        self._report(Progress(done, known, self._products, self._plan.expansion, self.nnz, row, 0, *left))

    def _microseconds(self, work: BlockWork) -> int:
        """Return what a block should take a typical worker."""
        return work.microseconds(self._plan.c.entry_bytes, on_gpu=self._plan.on_gpu)


def _entries(counts: BlockCounts) -> int:
    return int(counts.row_nnz.sum(dtype=np.int64))


def reduce_alone(name: str, draft: JobSpec, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks) -> Any:
    """Return a reduction of a product; as `reduction.execute_reduction`, without workers.

    Returns as `reduction_spec.final_value` makes it.
    Raises `SpdistError` if a stage failed.
    """
    title = f"{what if isinstance(what, str) else 'histogram'} of A @ B"
    with (
        _context(draft, plan) as (context, _),
        announced(None, name, run_start(plan, draft, title, 0, callbacks.expects(plan)), callbacks.heard),
        phases.during("run"),
        _clear_errors(),
    ):
        parts = [STAGES["reduce"](context, work.task, what) for work in _works(plan, 0)]
        empty = reduce_rows(what, reduction_spec.diagonal_pattern(0, 0, 0), 0)
        part = reduction_spec.combine(what, parts or [empty])
    phases.enter("close")
    phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
    return reduction_spec.final_value(what, part, draft.b.ncols)


def _works(plan: Plan, row: int) -> list[BlockWork]:
    """Return the blocks of a plan from a row on."""
    return [BlockWork.of(block, start=row) for block in plan.blocks if block.stop > row]


@contextmanager
def _context(draft: JobSpec, plan: Plan) -> Iterator[tuple[WorkerContext, int]]:
    """Yield the context of a job in this process, and the resident bytes before it; release its memory afterwards."""
    context = WorkerContext(fix_engine(draft.with_plan(plan, ""), plan))
    with phases.during("run"):
        context.load(plan)
    with worker_process.small_arrays_kept(context.job.host_bytes):
        worker_process.reset_peak()
        idle = worker_process.resident_memory()
        try:
            yield context, idle
        finally:
            context.release()


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Raise errors of stages as workers do; those of the caller's own functions stay as they are."""
    try:
        yield
    except SpdistError:
        raise
    except Exception as error:
        raise stage_failure("in this process", error) from error
