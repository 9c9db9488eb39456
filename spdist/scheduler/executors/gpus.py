"""Runs stages on GPUs of this host, all in this process: no scheduler, no further processes, no Dask.

Each GPU is a worker with threads of its own: one multiplies a block while others read the blocks that the driver has
assigned to the worker, and write the last ones. All GPUs share the B in the host's memory.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from spdist.foundation import phases
from spdist.foundation.threads import lower_priority
from spdist.matrices.csr import CSR
from spdist.scheduler.dashboard.messages import Message
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.executor import RunCosts
from spdist.scheduler.execution.records import BlockOperands, BlockTask, JobSpec
from spdist.scheduler.execution.stages import STAGES, compute, count, make, stage_failure
from spdist.scheduler.execution.telemetry import TimingRecord
from spdist.scheduler.execution.worker import WorkerContext, fix_engine
from spdist.scheduler.planner.plan import Plan
from spdist.storage.chunked_array import ChunkedArray

READERS = 6
"""Threads that read blocks ahead for a GPU, which makes a block sooner than one thread reads it."""
WRITERS = 10
"""Threads that write blocks of a GPU: one thread fills fresh pages of a file far more slowly than a GPU fills a block.
"""


class GpuWorker:
    """The state of a job on one GPU, and the threads that read, multiply and write its blocks.

    The thread that keeps the GPU busy must get a core at once: the others run at low priority.
    """

    def __init__(self, job: JobSpec, gpu: int, gpus: int) -> None:
        self.context = WorkerContext(job, gpu if gpus > 1 else None, gpus)  # one GPU is every thread's anyway
        self._multiplier = ThreadPoolExecutor(1, f"spdist-multiply-{gpu}")
        self._counter = ThreadPoolExecutor(1, f"spdist-count-{gpu}")
        self._readers, self._writers, self._joiner = (
            ThreadPoolExecutor(threads, f"spdist-{task}-{gpu}", lower_priority)
            for threads, task in ((READERS, "read"), (WRITERS, "commit"), (1, "join"))
        )

    def reserve(self, plan: Plan) -> None:
        """Get memory ready for the C of as many blocks as will be in flight, while the first ones are read."""
        blocks = plan.blocks[: plan.blocks_in_flight]
        sizes = [block.capacity * each for block in blocks for each in (plan.c.index_bytes, plan.c.value_bytes)]
        self._joiner.submit(self.context.multiplier.reserve, sizes)  # there is nothing to join yet

    def submit(self, stage: str, arguments: tuple[Any, ...], after: Sequence[Future[Any]]) -> Future[Any]:
        """Queue a stage; a block's operands are read ahead, unless it has several pieces.

        `after`: of a join, the commits whose fragments it takes.
        """
        if stage in ("commit", "spill"):
            return self._writers.submit(STAGES[stage], self.context, *arguments)
        if stage == "join":  # mostly it waits, so it keeps no writer
            return self._joiner.submit(self._join, arguments, after)
        if stage == "multiply":
            (task,) = arguments
            is_whole = self.context.job.pieces_of(task) == 1
            operands = self._readers.submit(STAGES["preprocess"], self.context, task) if is_whole else None
            c = self._multiplier.submit(self._make, task, operands)
            return self._counter.submit(lambda: count(self.context, task, c.result()))  # beside the next block
        return self._multiplier.submit(STAGES[stage], self.context, *arguments)

    def _join(self, arguments: tuple[Any, ...], commits: Sequence[Future[Any]]) -> Any:
        return STAGES["join"](self.context, *arguments, *(commit.result() for commit in commits))

    def _make(self, task: BlockTask, operands: Future[BlockOperands] | None) -> CSR:
        if operands is None:
            return compute(self.context, task, self.context.job.pieces_of(task))
        return make(self.context, task, operands.result())

    def close(self) -> None:
        """Wait for the stages that run, drop the others, and release the memory."""
        for threads in (self._readers, self._multiplier, self._counter, self._writers, self._joiner):
            threads.shutdown(cancel_futures=True)
        self.context.release()


class GpuExecutor:
    """One worker for each of some GPUs of this host; see `Executor`.

    `gpus`: how many, from the first one on.
    """

    link = ""

    def __init__(self, name: str, gpus: int) -> None:
        self.name, self._gpus = name, gpus
        self._completed: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._failed: Future[Any] | None = None

    def publish(self, messages: Sequence[Message]) -> None:
        """Do nothing: there is no scheduler."""

    @contextmanager
    def running(
        self, draft: JobSpec, plan: Plan, url: str = "", on_timings: Callable[[list[TimingRecord]], None] | None = None
    ) -> Iterator[None]:
        """Have the job on all GPUs, which share a resident B; release their memory afterwards."""
        job = fix_engine(draft.with_plan(plan, ""), plan)
        self._workers = {f"GPU {gpu}": GpuWorker(job, gpu, self._gpus) for gpu in range(self._gpus)}
        first, *others = (worker.context for worker in self._workers.values())
        first.load(plan)
        if job.resident:
            for context in others:
                context.share_b(first)
            first.resident_b().begin()
        with worker_process.small_arrays_kept(self._gpus * job.host_bytes):
            worker_process.reset_peak()
            self._idle = worker_process.resident_memory()
            if url and len(plan.blocks) > 1:
                for worker in self._workers.values():
                    worker.reserve(plan)
            try:
                yield
                phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
                if on_timings is not None:
                    for name, worker in self._workers.items():
                        timings = worker.context.telemetry.take_timings()
                        on_timings([timing | {"worker": name} for timing in timings])
            finally:
                for worker in self._workers.values():
                    worker.close()

    def workers(self) -> list[str]:
        """Return the names of the GPUs."""
        return list(self._workers)

    def with_gpu(self, workers: list[str]) -> dict[str, bool]:
        """Return that each worker has a GPU."""
        return dict.fromkeys(workers, True)

    def submit(
        self,
        stage: str,
        *arguments: Any,
        key: tuple[int, int],
        worker: str = "",
        after: Sequence[Any] = (),
        wanted: bool = True,
    ) -> Future[Any]:
        """Queue a stage on a GPU; joins take turns."""
        chosen = worker or list(self._workers)[key[0] % self._gpus]
        future = self._workers[chosen].submit(stage, arguments, after)
        future.add_done_callback(self._completed.put)
        return future

    def next_completed(self) -> list[tuple[Future[Any], Any]]:
        """Wait for a stage, and return it with all others that have completed.

        Raises `SpdistError` if a stage failed, once the stages before it were returned.
        """
        completed: deque[tuple[Future[Any], Any]] = deque()
        while self._failed is None and not (completed and self._completed.empty()):
            future = self._completed.get()
            if future.exception() is None:
                completed.append((future, future.result()))
            else:
                self._failed = future
        if not completed:
            assert self._failed is not None
            error = self._failed.exception()
            assert error is not None
            failure = stage_failure("on a GPU", error)
            raise failure from (None if failure is error else error)
        return list(completed)

    def costs(self, workers: Collection[str]) -> RunCosts:
        """Return the memory that each GPU took, with its share of the host's memory, and the stages."""
        host = max(worker_process.peak_memory() - self._idle, 0) // self._gpus
        contexts = [self._workers[name].context for name in workers]
        return RunCosts(
            [(host, context.gpu_peak()) for context in contexts], [context.telemetry.totals for context in contexts]
        )

    def workers_that_see(self, array: ChunkedArray, k: int) -> list[str]:
        """Return none: there is no other process."""
        return []
