"""Run a plan for a reduction of the product: compute each block, reduce it on its worker, and throw it away.

A task is a whole block, from reading to its small result, so that a worker has one block a thread in memory. Results
are put together in the order of rows, so that every run of a plan gives the same bits, unless GPUs and CPU workers
share it. Nothing is stored, and there is nothing to resume.
"""

from __future__ import annotations

from typing import Any

from spdist.foundation import phases
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.driver import Driver, announced_run
from spdist.scheduler.execution.executor import Executor
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.telemetry import RunCallbacks
from spdist.scheduler.planner.plan import Plan

TASKS_IN_FLIGHT = 2
"""Tasks that a worker has for each thread: one runs, the other one is there when the first is done."""


class ReductionDriver(Driver):
    """Reduces all blocks of a plan.

    `parts`: the reductions of finished blocks, by their first row.
    """

    first_stage = "reduce"

    def __init__(self, executor: Executor, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks) -> None:
        super().__init__(executor, plan, callbacks, TASKS_IN_FLIGHT * plan.threads, entry_bytes=0)
        self.what = what
        self.parts: dict[int, reduction_spec.PartialReduction] = {}
        self._copied: set[int] = set()  # first rows of blocks that were submitted twice

    def run(self) -> reduction_spec.PartialReduction:
        """Reduce all blocks; return the reduction of all rows."""
        self.drive()
        empty = reduce_rows(self.what, reduction_spec.diagonal_pattern(0, 0, 0), 0)
        return reduction_spec.combine(self.what, [self.parts[row] for row in sorted(self.parts)] or [empty])

    def arguments_of(self, work: BlockWork) -> tuple[Any, ...]:
        """Return the arguments of the stage "reduce"."""
        return work.task, self.what

    def advance(self) -> None:
        """Submit further blocks; when none remain, submit blocks of CPU workers to idle GPUs, too, each once."""
        self.submit_blocks()
        if self.window.remaining:
            return
        if not self.window.in_flight:
            self.subjects.clear()  # of a block that was submitted twice, one result is enough
        known = {*self.parts, *self._copied}
        once = [(b.worker, b.work) for _, b in self.subjects.values() if b.task.start not in known]
        while (backup := self.assigner.backup_for_cpu(once)) is not None:
            once = [each for each in once if each[1] is not backup[1]]
            self._copied.add(backup[1].task.start)
            self.submit_block(*backup, copy=1)

    def complete(self, stage: str, subject: Any, result: Any) -> None:
        """Keep the first result of each block."""
        self.assigner.note_multiplied(subject.worker, subject.work)
        row = subject.task.start
        if row in self.parts:
            self.assigner.note_written(subject.worker)
            return
        self.parts[row] = result
        self.note_written(subject)
        self.done.multiplied = self.done.written
        for block in [block for block in self.window.in_flight if block.task.start == row]:
            self.window.in_flight.remove(block)


def execute_reduction(
    executor: Executor, draft: JobSpec, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks
) -> Any:
    """Return a reduction of a product.

    `draft`: operands and options; the plan decides the rest.
    `callbacks`: `on_timings` is not called.
    Returns as `reduction_spec.final_value` makes it of the reductions of all blocks.
    Raises `SpdistError` if a stage failed.
    """
    title = f"{what if isinstance(what, str) else 'histogram'} of A @ B"
    with executor.running(draft, plan), announced_run(executor, draft, plan, callbacks, title) as (reports, _):
        with phases.during("run"):
            part = ReductionDriver(executor, plan, what, reports).run()
        phases.enter("close")
    return reduction_spec.final_value(what, part, draft.b.ncols)
