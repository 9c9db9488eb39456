"""Workers and plan of a product: for large products the workers start, and begin to read B, while the plan is made."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from distributed import Client

from spdist import phases
from spdist.cpus import count_cpus
from spdist.engines import GPU_ENGINES
from spdist.errors import InputError
from spdist.jobs.compiling.ahead import compile_ahead
from spdist.jobs.planning import PlanSource
from spdist.jobs.report import Callbacks
from spdist.options import ExecutionOptions
from spdist.scheduler.execution import cluster
from spdist.scheduler.execution.cluster import connect, remote_readers, shared_name
from spdist.scheduler.execution.plugins import prefetch
from spdist.scheduler.execution.shared_operand import SHARING
from spdist.scheduler.execution.supervision.supervisor import Supervisor, supervised
from spdist.scheduler.planner.plan import GPU_BLOCK_PRODUCTS, MAX_BLOCK_PRODUCTS, Plan
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.scheduler.planner.request import PlanRequest
from spdist.storage.locations import in_process


class Ready(NamedTuple):
    """What a product needs to run.

    Attributes
    ----------
    client : distributed.Client
        Connected to the workers.
    plan : Plan
    name : str
        Name under which workers know the product.
    supervisor : Supervisor
        Looks after the workers; it has found that they fit the plan.
    """

    client: Client
    plan: Plan
    name: str
    supervisor: Supervisor


@contextlib.contextmanager
def workers_and_plan(
    source: PlanSource, execution: ExecutionOptions, callbacks: Callbacks, target: str = ""
) -> Iterator[Ready]:
    """Start or find workers and make a plan; stop the workers afterwards if they were started here.

    Parameters
    ----------
    source : PlanSource
    execution : ExecutionOptions
        Its workers and scheduler count. The engine is the request's, which a stored plan may have changed.
    callbacks : Callbacks
        Its `planned` is called.
    target : str
        Where C goes; empty if C is not stored.

    Yields
    ------
    Ready

    Raises
    ------
    InputError
        If there are no workers, or one does not fit: other software, too little memory, another view of a matrix or of
        the place of C.
    MemoryBoundError
        If the smallest block does not fit.

    Notes
    -----
    Workers start while the plan is made if there is surely a block for each. Workers of a running scheduler are used
    at once if B is not small. Early workers load libraries, help to plan, and begin to read B if all of B will stay in
    memory. With a stored plan no worker starts early.
    """
    request = source.request
    name = uuid.uuid4().hex[:8]
    local = _is_local(request, target)
    if local and execution.scheduler is not None:
        raise InputError("a memory:// matrix is seen by this process alone: a scheduler's workers cannot read it")
    cluster_options: dict[str, Any] = {
        "workers": execution.workers,
        "scheduler": execution.scheduler,
        "security": execution.security,
        "processes": not local,
        "engine": request.engine,
    }
    count = None if source.stored_plan is not None else _count_early_workers(request, execution, local=local)
    if count is None:
        with phases.during("plan"):
            plan = source.make()
        callbacks.planned(plan)
        spawns = execution.scheduler is None and not local and (execution.workers is not None or len(plan.blocks) > 1)
        kernels = compile_ahead(source.draft().with_plan(plan, "")) if spawns else None
        with (
            connect(**cluster_options, blocks=len(plan.blocks), host_bytes=plan.projected_host_memory) as client,
            supervised(client, name) as supervisor,
        ):
            _wait_for(kernels, supervisor)
            supervisor.check(request, plan, target)
            yield Ready(client, plan, name, supervisor)
        return
    kernels = None if execution.scheduler else compile_ahead(source.draft())
    starting = connect(**cluster_options, blocks=max(count, 2))  # a single block would need no process of its own
    planning = None if execution.scheduler else _plan_in_background(source, None)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(starting)
        supervisor = stack.enter_context(supervised(client, name))
        supervisor.handshake.check_installation()
        _wait_for(kernels, supervisor)
        planning = planning or _plan_in_background(source, remote_readers(client))
        job = replace(source.draft(), resident=source.will_be_resident(), shared_name=shared_name(client))
        stack.enter_context(prefetch(client, name, job))
        with supervisor.monitor.waiting_for("the plan"), phases.during("plan"):
            plan = planning.result()
        callbacks.planned(plan)
        supervisor.check(request, plan, target)
        yield Ready(client, plan, name, supervisor)


def _wait_for(kernels: Future[None] | None, supervisor: Supervisor) -> None:
    """Wait until the kernels are compiled; workers meet an error again, and say it."""
    if kernels is not None:
        with supervisor.monitor.waiting_for("the kernels to be compiled"):
            kernels.exception()


def _is_local(request: PlanRequest, target: str) -> bool:
    """Whether only this process sees an operand, the mask or C."""
    mask = request.spec.mask
    return any(in_process(url) for url in (request.a.url, request.b.url, target, "" if mask is None else mask.url))


def _count_early_workers(request: PlanRequest, execution: ExecutionOptions, *, local: bool) -> int | None:
    """Return the number of workers to start before there is a plan, 0 if workers run already; None to plan first."""
    a, b = request.a, request.b
    if execution.scheduler is not None:
        return 0 if b.nbytes >= SHARING.least_bytes else None
    if local or request.engine == "hybrid":
        return None
    on_gpu = request.engine in GPU_ENGINES
    most = execution.workers or (cluster.count_gpus() if on_gpu else count_cpus())
    products = a.nnz * b.nnz // max(b.nrows, 1)  # as if all rows of B had one length
    return most if products >= most * (GPU_BLOCK_PRODUCTS if on_gpu else MAX_BLOCK_PRODUCTS) else None


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
