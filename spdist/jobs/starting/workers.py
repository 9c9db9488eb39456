"""Workers and plan of a product: processes and GPUs start, and begin to read B, while a large product is planned."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from distributed import Client

from spdist.errors import InputError
from spdist.foundation import phases
from spdist.jobs.compiling.ahead import compile_ahead
from spdist.jobs.planning import PlanSource
from spdist.jobs.report import Callbacks
from spdist.jobs.starting.prepared_run import PreparedRun
from spdist.kernels.engine import find_engine
from spdist.options import ExecutionOptions
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.operands.resident import SHARING
from spdist.scheduler.executors.clients.cluster import connect
from spdist.scheduler.executors.clients.members import least_threads, remote_readers, shared_name
from spdist.scheduler.executors.dask import DaskExecutor
from spdist.scheduler.executors.plugins import prefetch
from spdist.scheduler.executors.supervision.supervisor import Supervisor, supervised
from spdist.scheduler.planner.plan import GPU_BLOCK_PRODUCTS, MAX_BLOCK_PRODUCTS, Plan
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.scheduler.planner.request import PlanRequest
from spdist.stores.registry import at


@contextlib.contextmanager
def workers_and_plan(
    source: PlanSource, execution: ExecutionOptions, callbacks: Callbacks, target: str = ""
) -> Iterator[PreparedRun]:
    """Start or find workers and make a plan; stop the workers afterwards if they were started here.

    `execution`: its workers and scheduler count. The engine is the request's, which a stored plan may have changed.
    `callbacks`: its `planned` is called.
    `target`: where C goes; empty if C is not stored.
    Raises `InputError` if there are no workers, or one does not fit: other software, too little memory, another view of
    a matrix or of the place of C.
    Raises `MemoryBoundError` if the smallest block does not fit.

    Workers that take long to start do so while the plan is made, if there is surely a block for each: processes, and
    all that use GPUs. Early workers load libraries, help to plan, and begin to read B if all of B will stay in memory.
    A plan for the workers of a running scheduler depends on their threads. With a stored plan no worker starts early.
    """
    local = _is_local(source.request, target)
    if local and execution.scheduler is not None:
        raise InputError("a memory:// matrix is seen by this process alone: a scheduler's workers cannot read it")
    callbacks.connecting()
    start = RunStartup(source, execution, callbacks, target, local)
    is_early = source.stored_plan is None and (execution.scheduler is not None or start.count_early_workers() > 0)
    with start.workers_first() if is_early else start.plan_first() as ready:
        yield ready


@dataclass(frozen=True)
class RunStartup:
    """What both orders of a start need."""

    source: PlanSource
    execution: ExecutionOptions
    callbacks: Callbacks
    target: str
    local: bool
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def connect(self, blocks: int, host_bytes: int = 1) -> AbstractContextManager[Client]:
        """Start workers for `blocks` blocks, or connect to the running scheduler's."""
        return connect(
            workers=self.execution.workers,
            scheduler=self.execution.scheduler,
            security=self.execution.security,
            processes=not self.local,
            engine=self.source.request.engine,
            blocks=blocks,
            host_bytes=host_bytes,
        )

    @contextlib.contextmanager
    def plan_first(self) -> Iterator[PreparedRun]:
        """Make the plan, then start as many workers as it can use."""
        with phases.during("plan"):
            plan = self.source.make()
        self.callbacks.planned(plan)
        one = self.execution.workers is None and len(plan.blocks) <= 1
        spares = self.execution.scheduler is not None or one
        kernels = None if spares else compile_ahead(self.source.draft().with_plan(plan, ""))
        with (
            self.connect(len(plan.blocks), plan.projected_host_memory) as client,
            supervised(client, self.name) as supervisor,
        ):
            _wait_for(kernels, supervisor)
            supervisor.check(self.source.request, plan, self.target)
            yield PreparedRun(DaskExecutor(client, self.name), plan, supervisor)

    @contextlib.contextmanager
    def workers_first(self) -> Iterator[PreparedRun]:
        """Start or find workers; make the plan while they start, or for the threads that they have."""
        runs = self.execution.scheduler is not None
        kernels = None if runs else compile_ahead(self.source.draft())
        starting = self.connect(max(self.count_early_workers(), 2))  # a single block would need no process of its own
        planning = None if runs else _plan_in_background(self.source, None)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(starting)
            supervisor = stack.enter_context(supervised(client, self.name))
            supervisor.handshake.check_installation()
            _wait_for(kernels, supervisor)
            source = self.source.for_threads(least_threads(client)) if runs else self.source
            helps = not runs or source.request.b.nbytes >= SHARING.least_bytes
            planning = planning or _plan_in_background(source, remote_readers(client) if helps else None)
            if helps:
                job = replace(source.draft(), resident=source.will_be_resident(), shared_name=shared_name(client))
                stack.enter_context(prefetch(client, self.name, job))
            with supervisor.monitor.waiting_for("the plan"), phases.during("plan"):
                plan = planning.result()
            self.callbacks.planned(plan)
            supervisor.check(source.request, plan, self.target)
            yield PreparedRun(DaskExecutor(client, self.name), plan, supervisor)

    def count_early_workers(self) -> int:
        """Return the number of workers to start before there is a plan: 0 to plan first."""
        request, execution = self.source.request, self.execution
        if self.local or find_engine(request.engine).mixes or execution.scheduler is not None:
            return 0
        most = execution.workers or (worker_process.count_gpus() if request.on_gpu else 0)
        a, b = request.a, request.b
        products = a.nnz * b.nnz // max(b.nrows, 1)  # as if all rows of B had one length
        return most if products >= most * (GPU_BLOCK_PRODUCTS if request.on_gpu else MAX_BLOCK_PRODUCTS) else 0


def _wait_for(kernels: Future[None] | None, supervisor: Supervisor) -> None:
    """Wait until the kernels are compiled; workers meet an error again, and say it."""
    if kernels is not None:
        with supervisor.monitor.waiting_for("the kernels to be compiled"):
            kernels.exception()


def _is_local(request: PlanRequest, target: str) -> bool:
    """Whether only this process sees an operand, the mask or C."""
    return request.in_process or at(target).is_private


def _plan_in_background(source: PlanSource, readers: RemoteReaders | None) -> Future[Plan]:
    """Make the plan in a daemon thread, which an interrupted program does not wait for."""
    future: Future[Plan] = Future()

    def make() -> None:
        try:
            future.set_result(source.make(readers))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return future
