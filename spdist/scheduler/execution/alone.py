"""Run a plan of one block in the calling thread: no scheduler and no workers, and Dask is not loaded.

Such a product is done before workers would have started. The stages are those that workers run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from spdist import phases
from spdist.errors import SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.announcer import announced, run_start
from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.journal import Journal
from spdist.scheduler.execution.records import BlockTask, ChunkFragment, JobSpec, Outcome
from spdist.scheduler.execution.stages import STAGES, CommitTarget, compute, count, stage_failure
from spdist.scheduler.execution.telemetry import Progress, RunCallbacks, add_totals
from spdist.scheduler.execution.worker import WorkerContext
from spdist.scheduler.planner.plan import Plan
from spdist.storage import locations
from spdist.storage.checksums import Checksums
from spdist.storage.writer import Layout

WORKER = "this process"
"""What records call the worker."""


def execute_alone(
    name: str, draft: JobSpec, plan: Plan, layout: Layout, callbacks: RunCallbacks
) -> tuple[Outcome, Layout, Checksums]:
    """Run a plan of one block, from where C's journal says; as `driver.execute`, without workers.

    Parameters
    ----------
    name : str
        Of the job.
    draft : JobSpec
        Operands and options; the plan decides the rest.
    plan : Plan
        Of one block, or of none.
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
        try:
            with phases.during("run"):
                layout, blocks = _write_rows(context, plan, layout, journal)
                written = -(-journal.checkpoint.nnz // layout.chunk)
                journal.set_chunks(journal.chunks.advance(written, wait=True))
                checksums = journal.close()
        finally:
            journal.chunks.close()
        phases.enter("close")
        phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
        done = callbacks.also(announcer.progress).progress
        assert done is not None
        nnz = journal.checkpoint.nnz
        done(Progress(blocks, blocks, plan.expansion, plan.expansion, nnz, journal.checkpoint.row))
        if callbacks.timed is not None:
            callbacks.timed([timing | {"worker": WORKER} for timing in context.telemetry.take_timings()])
        announcer.stages = add_totals([context.telemetry.totals])
        peak = max(worker_process.peak_memory() - idle, 0)
        return Outcome(nnz, blocks, peak, context.gpu_peak(), 1, announcer.stages), layout, checksums


def _write_rows(context: WorkerContext, plan: Plan, layout: Layout, journal: Journal) -> tuple[Layout, int]:
    """Make and write the rows that are not durable yet; return the layout and the number of blocks they took."""
    start = journal.checkpoint
    layout, number = replace(layout, compressed=start.compressed), int(start.row > 0)
    fragments: list[ChunkFragment] = []
    first = number
    for task in _tasks(plan, start.row):
        while task.start < task.stop:
            task = replace(task, number=number)
            counts = count(compute(context, task, context.job.pieces_of(task)), task)
            if number == 0 and counts.compresses:
                journal.set_compressed()
                layout = replace(layout, compressed=True)
            offset, rows = journal.checkpoint.nnz, len(counts.row_nnz)
            target = CommitTarget(layout, offset, start.chunks)
            fragments += STAGES["commit"](context, task, rows, counts.digest, target)
            journal.add_rows(task.start + rows, offset, counts.row_nnz)
            task, number = replace(task, start=task.start + rows), number + 1
    for k in sorted({fragment.offset // layout.chunk for fragment in fragments}):
        STAGES["join"](context, layout, k, fragments)
    return layout, number - first


def reduce_alone(name: str, draft: JobSpec, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks) -> Any:
    """Return a reduction of a product of one block; as `reduction.execute_reduction`, without workers.

    Parameters
    ----------
    name : str
        Of the job.
    draft : JobSpec
    plan : Plan
        Of one block, or of none.
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
        parts = [STAGES["reduce"](context, task, what) for task in _tasks(plan, 0)]
        empty = reduce_rows(what, reduction_spec.diagonal_pattern(0, 0, 0), 0)
        part = reduction_spec.combine(what, parts or [empty])
    phases.enter("close")
    phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
    return reduction_spec.final_value(what, part, draft.b.ncols)


def _tasks(plan: Plan, row: int) -> list[BlockTask]:
    """Return the blocks of a plan from a row on."""
    return [BlockWork.of(block, start=row).task for block in plan.blocks if block.stop > row]


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
        raise stage_failure("of the only block", error) from error
    finally:
        context.release()
