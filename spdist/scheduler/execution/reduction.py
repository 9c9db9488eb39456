"""Run a plan for a reduction of the product: blocks are made, reduced where they are, and thrown away.

A task is a whole block, from reading to its small result, so that a worker has one in memory at a time. Results are
put together in the order of rows: the same on every run of a plan, unless GPUs and cores share it. Nothing is stored,
and there is nothing to resume.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from distributed import Client, as_completed

from spdist.kernels import reduction_spec
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.scheduler.execution.assignment import BlockAssigner, Work, work_of
from spdist.scheduler.execution.cluster import dashboard_link, fetch, with_gpu
from spdist.scheduler.execution.driver import Install, Progress, meet, settled, shared_name
from spdist.scheduler.execution.stages import Product, stage
from spdist.scheduler.planner.plan import Plan
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import StoredProductSpec

AHEAD = 2
"""Tasks a worker that are submitted: one runs, the other is there when that is done."""


def execute_reduction(
    client: Client,
    plan: Plan,
    a: StoredMatrix,
    b: StoredMatrix,
    what: reduction_spec.Reduction,
    spec: StoredProductSpec,
    name: str,
    started: Callable[[str], None] = lambda link: None,
    progress: Callable[[Progress], None] | None = None,
) -> Any:
    """Return a reduction of A @ B, or of what `spec` makes of it.

    Raises
    ------
    SpdistError
        If a task failed.
    """
    cuts = plan.inner_bounds, plan.column_bounds
    limits = plan.memory_limit, plan.host_limit
    product = Product(a, b, plan.engine, plan.resident, *cuts, 1, *limits, spec, shared_name(client))
    client.register_plugin(Install(name, product), name=name)
    started(dashboard_link(client))
    try:
        part = _run(client, plan, name, what, progress)
    finally:
        with contextlib.suppress(OSError):  # of a worker that has just died
            client.unregister_worker_plugin(name)
    return reduction_spec.final_value(what, part, b.ncols)


def _run(
    client: Client, plan: Plan, name: str, what: reduction_spec.Reduction, progress: Callable[[Progress], None] | None
) -> reduction_spec.PartialReduction:
    """Have all blocks reduced; what a core is late with is given to a GPU that has nothing to do as well."""
    todo = [work_of(block, number) for number, block in enumerate(plan.blocks)][::-1]
    total, products = len(todo), 0
    found: dict[int, reduction_spec.PartialReduction] = {}
    completed, crew = as_completed(), BlockAssigner(plan, AHEAD, functools.partial(with_gpu, client))
    sent: dict[Any, tuple[str, Work]] = {}
    sent_twice: set[int] = set()

    def send(worker: str, work: Work) -> None:
        key = f"reduce-{name}", work.task.number, len(sent_twice)
        future = client.submit(
            stage, name, "reduce", work.task, what, key=key, pure=False, workers=[worker], allow_other_workers=True,
        )  # fmt: skip
        sent[future.key] = worker, work
        crew.give(worker, work)
        completed.add(future)

    while len(found) < total:
        meet(crew, client)
        while todo and (chosen := crew.choose(reversed(todo))) is not None:
            send(chosen[0], todo.pop(-1 - chosen[1]))
        once = [each for each in sent.values() if each[1].task.number not in {*found, *sent_twice}]
        while not todo and (relief := crew.relief(once)) is not None:
            once = [each for each in once if each[1] is not relief[1]]
            sent_twice.add(relief[1].task.number)
            send(*relief)
        for future in settled(completed.next_batch(block=True), completed):
            worker, work = sent.pop(future.key)
            crew.counted(worker, work)
            crew.done(worker)
            if work.task.number not in found:
                found[work.task.number] = fetch(client, future)
                products += work.products
        if progress is not None:
            progress(Progress(len(found), total, products, plan.expansion, 0))
    empty = reduce_rows(what, reduction_spec.diagonal_pattern(0, 0, 0), 0)
    return reduction_spec.combine(what, [found[number] for number in range(total)] or [empty])
