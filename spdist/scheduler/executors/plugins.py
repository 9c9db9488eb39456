"""Dask plugins that put a job on every worker: install it for a run, or prefetch for it while its plan is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from dask.utils import key_split
from distributed import Client, Worker, WorkerPlugin
from tornado.ioloop import PeriodicCallback

from spdist.foundation import phases
from spdist.scheduler.dashboard.messages import ANNOUNCEMENTS, TIMINGS
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.worker import CONTEXTS, WorkerContext
from spdist.scheduler.executors.clients.worker_setup import dask_setup
from spdist.scheduler.executors.supervision.calls import register, unregister
from spdist.scheduler.executors.supervision.late_workers import JoinCheck, stay_out, take_part_again
from spdist.shown import without_secrets

PUBLISH_SECONDS = 0.5
"""Seconds between two publications of a worker's timings."""
FORGET_SECONDS = 2.0
"""Seconds between two clearings of the cache in which Dask keeps the names of the last 100,000 tasks."""

PREFETCHED: dict[str, WorkerContext] = {}
"""Contexts of this process whose plans are still being made, by name of the job."""
IDLE_MEMORY: dict[str, int] = {}
"""Resident bytes of each worker of this process before its first block, by address."""


class InstallPlugin(WorkerPlugin):
    """Installs a job on every worker, also on workers that join later.

    `check`: check that each worker runs first.
    """

    def __init__(self, name: str, job: JobSpec, check: JoinCheck) -> None:
        self.name, self.job, self.check = name, job, check

    def setup(self, worker: Worker) -> None:
        """Make the job's context from the prefetched one, if there is one, and start to publish its timings.

        A worker that does not fit the job stays out of it.
        """
        if problem := self.check.problem():
            stay_out(worker, self.name, problem)
            return
        context = CONTEXTS[self.name] = WorkerContext(job_on(worker, self.job))
        prefetched = PREFETCHED.pop(self.name, None)
        if prefetched is not None:
            context.take_over(prefetched)
        if prefetched is None or not self.job.resident:
            warm_up(context, worker)
        calls = {
            "forget": (key_split.cache_clear, FORGET_SECONDS),
            "publish": (lambda: self._publish(worker), PUBLISH_SECONDS),
        }
        for what, (call, seconds) in calls.items():
            worker.periodic_callbacks[f"{what}-{self.name}"] = PeriodicCallback(call, 1e3 * seconds)
            worker.periodic_callbacks[f"{what}-{self.name}"].start()

    def teardown(self, worker: Worker) -> None:
        """Remove the job and everything that it holds."""
        if (context := CONTEXTS.pop(self.name, None)) is not None:
            context.release()
        for what in ("forget", "publish"):
            if (callback := worker.periodic_callbacks.pop(f"{what}-{self.name}", None)) is not None:
                callback.stop()
        take_part_again(worker, self.name)

    def _publish(self, worker: Worker) -> None:
        """Send new timings to the topic `TIMINGS`, and announcements to the topic `ANNOUNCEMENTS`."""
        telemetry = CONTEXTS[self.name].telemetry
        limits = telemetry.limits
        telemetry.publish(
            lambda timings: worker.log_event(TIMINGS, {"product": self.name, "timings": timings, "limits": limits})
        )
        for text in telemetry.take_announcements():
            line = without_secrets(f"worker {worker.address}: {text}")
            worker.log_event(ANNOUNCEMENTS, {"product": self.name, "text": line})


class PrefetchPlugin(WorkerPlugin):
    """Warms workers up while the plan is made, and begins to read B if it is sure to be resident.

    `job`: as far as it is known without a plan.
    """

    def __init__(self, name: str, job: JobSpec) -> None:
        self.name, self.job = name, job

    def setup(self, worker: Worker) -> None:
        """Prefetch; ignore an error, which appears again when the job is installed."""
        context = WorkerContext(self.job)
        try:
            warm_up(context, worker)
        except Exception:
            context.release()
            return
        PREFETCHED[self.name] = context
        if self.job.resident:
            context.resident_b().begin()

    def teardown(self, worker: Worker) -> None:
        """Release what no job took over."""
        if (context := PREFETCHED.pop(self.name, None)) is not None:
            context.release()


def job_on(worker: Worker, job: JobSpec) -> JobSpec:
    """Return the job for one worker: a worker in the client's process shares no memory with others.

    Returns `job` itself if the worker is a process; otherwise a copy with an empty `shared_name`.
    """
    return job if worker.nanny else replace(job, shared_name="")


def warm_up(context: WorkerContext, worker: Worker) -> None:
    """Load what the stages need, then measure the idle worker's memory.

    A worker in the client's process loads and compiles for a single block when it must.

    `context`: loads and compiles for its job.
    `worker`: its idle memory is stored in `IDLE_MEMORY`.
    """
    if worker.nanny:
        dask_setup(worker)
    if worker.nanny or not context.job.is_one_block:
        context.warm_up()
    worker_process.reset_peak()
    IDLE_MEMORY[worker.address] = worker_process.resident_memory()


@contextlib.contextmanager
def installed(client: Client, name: str, job: JobSpec, place: str = "") -> Iterator[None]:
    """Install a job on all workers, and remove it at the end.

    `name`: of the job, unique among the jobs of these workers.
    `place`: path or URL of the unfinished C; empty if C is not stored.
    Yields while the job is installed.
    """
    try:
        register(client, InstallPlugin(name, job, JoinCheck.of(client, job, place)), name)
        yield
    finally:
        unregister(client, name)


@contextlib.contextmanager
def prefetch(client: Client, name: str, job: JobSpec) -> Iterator[None]:
    """Let workers prefetch for a job until its run is over; a run that installs the job takes over the prefetched data.

    `name`: under which the job will be installed.
    `job`: as far as it is known without a plan; `resident` if B is sure to be.
    Yields while workers may prefetch.
    """
    try:
        register(client, PrefetchPlugin(name, job), f"{name}-prefetch")
        yield
    finally:
        unregister(client, f"{name}-prefetch")


def peak_memory(name: str, dask_worker: Worker) -> tuple[int, int]:
    """Return a worker's peak bytes of host memory beyond its idle memory, and of GPU memory; for `Client.run`.

    `dask_worker`: passed by Dask, which knows this parameter by its name.
    Returns `host, device`: bytes; `device` is 0 if the worker has no GPU or no longer has the job.
    """
    peak = worker_process.peak_memory() - IDLE_MEMORY[dask_worker.address]
    return max(peak, 0), CONTEXTS[name].gpu_peak() if name in CONTEXTS else 0


def compilations(client: Client) -> list[phases.Span]:
    """Return when the workers of a client compiled kernels, since the call began whose clock runs.

    Returns begin and end in seconds since 1970, as the workers' clocks tell them.
    """
    found = client.run(_compilations, phases.call_begin(), on_error="ignore")
    return [span for spans in found.values() for span in spans]


def _compilations(begin: float) -> list[phases.Span]:
    return phases.COMPILATIONS.since(begin)
