"""Run a plan for a reduction of the product: compute each block, reduce it on its worker, and throw it away.

A task is a whole block, from reading to its small result, so that a worker has one block a thread in memory. Results
are put together in the order of rows, so that every run of a plan gives the same bits, unless GPUs and CPU workers
share it. Nothing is stored, and there is nothing to resume.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from distributed import Client, as_completed

from spdist.foundation import phases
from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.scheduler.execution.announcer import announced, run_start
from spdist.scheduler.execution.assignment import BlockAssigner, BlockWork
from spdist.scheduler.execution.clients.members import dashboard_link, fetch, shared_name, with_gpu
from spdist.scheduler.execution.driver import completed_results, update_workers
from spdist.scheduler.execution.graph import run_stage
from spdist.scheduler.execution.plugins import compilations, installed
from spdist.scheduler.execution.records import BlockNumber, JobSpec
from spdist.scheduler.execution.telemetry import InFlight, Progress, RunCallbacks
from spdist.scheduler.planner.plan import Plan

TASKS_IN_FLIGHT = 2
"""Tasks that a worker has for each thread: one runs, the other one is there when the first is done."""


def execute_reduction(
    client: Client, name: str, draft: JobSpec, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks
) -> Any:
    """Return a reduction of a product.

    `name`: of the job, unique among the jobs of these workers; `plugins.prefetch` may have used it.
    `draft`: operands and options; the plan decides the rest.
    `callbacks`: `timed` is not called.
    Returns as `reduction_spec.final_value` makes it of the reductions of all blocks.
    Raises `SpdistError` if a task failed.
    """
    job = replace(draft.with_plan(plan, shared_name(client)), blocks_in_flight=plan.threads)
    with installed(client, name, job):
        callbacks.started(dashboard_link(client))
        title = f"{what if isinstance(what, str) else 'histogram'} of A @ B"
        start = run_start(plan, draft, title, 0, callbacks.expects(plan))
        with announced(client, name, start, callbacks.heard) as announcer, phases.during("run"):
            part = _Reducer(client, name, plan, what, callbacks.also(announcer.progress)).run()
        phases.enter("close")
        phases.add_compiled(compilations(client))
    return reduction_spec.final_value(what, part, draft.b.ncols)


class _Reducer:
    """Reduces all blocks of a plan."""

    def __init__(
        self, client: Client, name: str, plan: Plan, what: reduction_spec.Reduction, callbacks: RunCallbacks
    ) -> None:
        self.client, self.name, self.plan, self.what, self.callbacks = client, name, plan, what, callbacks
        self.remaining = [BlockWork.of(block, number) for number, block in enumerate(plan.blocks)][::-1]
        self.assigner = BlockAssigner(plan, TASKS_IN_FLIGHT * plan.threads, functools.partial(with_gpu, client))
        self.completed = as_completed(loop=client.loop)
        self.parts: dict[BlockNumber, reduction_spec.PartialReduction] = {}
        self.products_done = self.work_done = 0
        self.work = sum(map(self._microseconds, self.remaining))
        self.submitted: dict[Any, tuple[str, BlockWork]] = {}
        self.submitted_twice: set[BlockNumber] = set()

    def run(self) -> reduction_spec.PartialReduction:
        """Reduce all blocks; return the reduction of all rows."""
        total = len(self.plan.blocks)
        while len(self.parts) < total:
            update_workers(self.assigner, self.client, self.callbacks)
            while self.remaining and (chosen := self.assigner.choose(reversed(self.remaining))) is not None:
                self._submit(chosen[0], self.remaining.pop(-1 - chosen[1]))
            if not self.remaining:
                self._back_up_cpu_workers()
            self._note_in_flight()
            self._take_results()
            if self.callbacks.progress is not None:
                self.callbacks.progress(self._progress())
        empty = reduce_rows(self.what, reduction_spec.diagonal_pattern(0, 0, 0), 0)
        return reduction_spec.combine(self.what, [self.parts[number] for number in range(total)] or [empty])

    def _progress(self) -> Progress:
        done, total = len(self.parts), len(self.plan.blocks)
        in_flight, reduced = len(self.submitted), self.work_done
        return Progress(
            done, total, self.products_done, self.plan.expansion, 0, 0, in_flight, reduced, reduced, self.work
        )

    def _microseconds(self, work: BlockWork) -> int:
        """Return what a block should take a typical worker."""
        return work.microseconds(0, on_gpu=self.plan.on_gpu)

    def _submit(self, worker: str, work: BlockWork) -> None:
        key = f"reduce-{self.name}", work.task.number, len(self.submitted_twice)
        future = self.client.submit(
            run_stage, self.name, "reduce", work.task, self.what, key=key, pure=False, workers=[worker],
            allow_other_workers=True,
        )  # fmt: skip
        self.submitted[future.key] = worker, work
        self.assigner.assign(worker, work)
        self.completed.add(future)

    def _back_up_cpu_workers(self) -> None:
        """Submit blocks that CPU workers have not finished to idle GPUs, too, each block once."""
        known = {*self.parts, *self.submitted_twice}
        once = [each for each in self.submitted.values() if each[1].task.number not in known]
        while (backup := self.assigner.backup_for_cpu(once)) is not None:
            once = [each for each in once if each[1] is not backup[1]]
            self.submitted_twice.add(backup[1].task.number)
            self._submit(*backup)

    def _note_in_flight(self) -> None:
        works = [work for _, work in self.submitted.values()]
        oldest = min((work.task for work in works), key=lambda task: task.start)
        rows = oldest.number, oldest.start, oldest.stop
        self.callbacks.note(InFlight(len(self.parts), len(works), rows, dict(self.assigner.held)))

    def _take_results(self) -> None:
        """Wait for the next completed tasks, and keep the first result of each block."""
        for future in completed_results(self.completed.next_batch(block=True), self.completed):
            worker, work = self.submitted.pop(future.key)
            self.assigner.note_multiplied(worker, work)
            self.assigner.note_written(worker)
            if work.task.number not in self.parts:
                self.parts[work.task.number] = fetch(self.client, future)
                self.products_done += work.products
                self.work_done += self._microseconds(work)
