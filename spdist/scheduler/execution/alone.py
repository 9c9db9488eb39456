"""Run a plan in this process, block by block: no scheduler and no workers, and Dask is not loaded.

Such a product is done before workers would have started. The stages are those that workers run; each has all cores, and
a block is written while the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from spdist import phases
from spdist.errors import SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.announcer import announced, run_start
from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.journal import Journal
from spdist.scheduler.execution.records import BlockCounts, BlockTask, ChunkFragment, JobSpec, Outcome
from spdist.scheduler.execution.stages import STAGES, CommitTarget, compute, count, stage_failure
from spdist.scheduler.execution.telemetry import Progress, RunCallbacks, add_totals
from spdist.scheduler.execution.worker import WorkerContext
from spdist.scheduler.planner.plan import Plan
from spdist.storage import locations
from spdist.storage.checksums import Checksums
from spdist.storage.writer import Layout
from spdist.threads import run_now

WORKER = "this process"
"""What records call the worker."""


def execute_alone(
    name: str, draft: JobSpec, plan: Plan, layout: Layout, callbacks: RunCallbacks
) -> tuple[Outcome, Layout, Checksums]:
    """Run a plan, from where C's journal says; as `driver.execute`, without workers.

    Parameters
    ----------
    name : str
        Of the job.
    draft : JobSpec
        Operands and options; the plan decides the rest.
    plan : Plan
    layout : Layout
        Of C, which was begun (`storage.matrix.begin`).
    callbacks : RunCallbacks
        `started` is not called: there is no dashboard.

    Returns
    -------
    Outcome
    Layout
        Of C as it was written: block 0 decides on compression.
    Checksums
        Of C's Zarr chunks.

    Raises
    ------
    SpdistError
        If a stage failed.
    """
    journal = Journal(layout)
    start = run_start(plan, draft, locations.family_of(layout.url), journal.checkpoint.row)
    with (
        _context(draft.with_plan(plan, "")) as (context, idle),
        announced(None, name, start, callbacks.heard) as announcer,
    ):
        told = callbacks.also(announcer.progress).progress
        assert told is not None
        try:
            with phases.during("run"):
                writer = _write_rows(context, plan, layout, journal, told)
                written = -(-journal.checkpoint.nnz // layout.chunk)
                journal.set_chunks(journal.chunks.advance(written, wait=True))
                checksums = journal.close()
        finally:
            journal.chunks.close()
        phases.enter("close")
        phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
        nnz, blocks = journal.checkpoint.nnz, writer.blocks
        told(Progress(blocks, blocks, plan.expansion, plan.expansion, nnz, journal.checkpoint.row))
        if callbacks.timed is not None:
            callbacks.timed([timing | {"worker": WORKER} for timing in context.telemetry.take_timings()])
        announcer.stages = add_totals([context.telemetry.totals])
        peak = max(worker_process.peak_memory() - idle, 0)
        outcome = Outcome(nnz, blocks, peak, context.gpu_peak(), 1, announcer.stages)
        return outcome, writer.layout, checksums


class _Writer:
    """Writes blocks to C one after the other, and the Zarr chunks that they share as soon as all of one is there.

    Attributes
    ----------
    layout : Layout
        Of C; block 0 decides on compression.
    blocks : int
        Blocks that are written.
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
        whole = (offset + int(counts.row_nnz.sum(dtype=np.int64))) // self.layout.chunk
        self.join_before(whole)
        return whole

    def join_before(self, stop: int | None = None) -> None:
        """Write the shared Zarr chunks before a number, or all."""
        numbers = {fragment.offset // self.layout.chunk for fragment in self._fragments}
        for k in sorted(k for k in numbers if stop is None or k < stop):
            STAGES["join"](self._context, self.layout, k, self._fragments)
        self._fragments = [f for f in self._fragments if stop is not None and f.offset // self.layout.chunk >= stop]


def _write_rows(
    context: WorkerContext, plan: Plan, layout: Layout, journal: Journal, told: Callable[[Progress], None]
) -> _Writer:
    """Make and write the rows that are not durable yet; return what wrote them."""
    start = journal.checkpoint
    writer = _Writer(context, replace(layout, compressed=start.compressed), start.chunks)
    number, products, before = int(start.row > 0), 0, run_now(lambda: start.chunks)
    overlaps = plan.blocks_in_flight > 1
    with ThreadPoolExecutor(1, "spdist-commit") as pool:
        for work in _works(plan, start.row):
            task = work.task
            while task.start < task.stop:
                task = replace(task, number=number)
                counts = count(compute(context, task, context.job.pieces_of(task)), task)
                journal.chunks.advance(before.result())  # one block at a time is written
                if number == 0 and counts.compresses:
                    journal.set_compressed()
                    writer.layout = replace(writer.layout, compressed=True)
                offset, end = journal.checkpoint.nnz, task.start + len(counts.row_nnz)
                submit = pool.submit if overlaps and end < plan.blocks[-1].stop else run_now
                before = submit(writer.write, task, counts, offset)
                journal.add_rows(end, offset, counts.row_nnz)
                task, number = replace(task, start=end), number + 1
            products += work.products
            if len(plan.blocks) > 1:
                told(Progress(writer.blocks, len(plan.blocks), products, plan.expansion, journal.checkpoint.nnz))
    writer.join_before()
    return writer


def reduce_alone(name: str, draft: JobSpec, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks) -> Any:
    """Return a reduction of a product; as `reduction.execute_reduction`, without workers.

    Parameters
    ----------
    name : str
        Of the job.
    draft : JobSpec
    plan : Plan
    what : Reduction
    callbacks : RunCallbacks

    Returns
    -------
    float or array
        As `reduction_spec.final_value` makes it.

    Raises
    ------
    SpdistError
        If a stage failed.
    """
    title = f"{what if isinstance(what, str) else 'histogram'} of A @ B"
    with (
        _context(draft.with_plan(plan, "")) as (context, _),
        announced(None, name, run_start(plan, draft, title, 0), callbacks.heard),
        phases.during("run"),
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
def _context(job: JobSpec) -> Iterator[tuple[WorkerContext, int]]:
    """Yield the context of a job in this process, and the resident bytes before it; release its memory afterwards."""
    worker_process.reset_peak()
    idle, context = worker_process.resident_memory(), WorkerContext(job)
    try:
        yield context, idle
    except SpdistError:
        raise
    except Exception as error:
        raise stage_failure("in this process", error) from error
    finally:
        context.release()
