"""Runs stages in this process: no scheduler and no workers, and Dask is not loaded.

The calling thread makes one block at a time, with all cores, while another thread reads the next block and a third one
writes the last ones. A product of one block starts no thread.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from spdist.errors import SpdistError
from spdist.foundation import phases
from spdist.scheduler.dashboard.messages import Message
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.executor import RunCosts
from spdist.scheduler.execution.records import BlockCounts, BlockOperands, JobSpec
from spdist.scheduler.execution.stages import STAGES, compute, count, stage_failure
from spdist.scheduler.execution.telemetry import TimingRecord
from spdist.scheduler.execution.worker import WorkerContext, fix_engine
from spdist.scheduler.planner.plan import Plan
from spdist.storage.chunked_array import ChunkedArray

WORKER = "this process"
"""What records call the worker."""


class StageCall:
    """A stage that was submitted, and then its result or error."""

    def __init__(self, stage: str, arguments: tuple[Any, ...], after: Sequence[StageCall]) -> None:
        self.stage, self.arguments, self.after = stage, arguments, after
        self.operands: Future[BlockOperands] | None = None  # of a block that is read ahead
        self.result: Any = None
        self.error: Exception | None = None

    def run(self, context: WorkerContext) -> None:
        """Run the stage; its error is kept."""
        try:
            self.result = self._call(context)
        except Exception as error:
            self.error = error

    def _call(self, context: WorkerContext) -> Any:
        if self.stage != "multiply":
            commits = [call.result for call in self.after] if self.stage == "join" else []
            return STAGES[self.stage](context, *self.arguments, *commits)
        (task,) = self.arguments
        if self.operands is None:
            return count(context, task, compute(context, task, context.job.pieces_of(task)))
        operands, self.operands = self.operands.result(), None
        return STAGES["multiply"](context, task, operands)


class ThreadExecutor:
    """One worker, which is this process; see `Executor`.

    It holds blocks that are read ahead, one that is made and one that is written: no more than the plan has in flight.
    """

    link = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self._blocks: list[StageCall] = []  # to multiply or reduce, by rising rows
        self._writes: deque[StageCall] = deque()  # commits and joins that nobody runs yet
        self._writing: deque[Future[None]] = deque()  # those that the writer has
        self._done: deque[StageCall] = deque()
        self._was_cut = False  # whether rows of the last block remain

    def publish(self, messages: Sequence[Message]) -> None:
        """Do nothing: there is no scheduler."""

    @contextmanager
    def running(
        self, draft: JobSpec, plan: Plan, url: str = "", on_timings: Callable[[list[TimingRecord]], None] | None = None
    ) -> Iterator[None]:
        """Have the job in this process; release its memory afterwards."""
        self._context = context = WorkerContext(fix_engine(draft.with_plan(plan, ""), plan))
        with phases.during("run"):
            context.load(plan)
        self._writes_beside = plan.blocks_in_flight > 1
        self._reads_ahead = plan.blocks_in_flight > 2  # one is made, and one is written
        self._reader = ThreadPoolExecutor(1, "spdist-read")
        self._writer = ThreadPoolExecutor(1, "spdist-commit")
        with worker_process.small_arrays_kept(context.job.host_bytes):
            worker_process.reset_peak()
            self._idle = worker_process.resident_memory()
            try:
                yield
                phases.add_compiled(phases.COMPILATIONS.since(phases.call_begin()))
                if on_timings is not None:
                    on_timings([timing | {"worker": WORKER} for timing in context.telemetry.take_timings()])
            finally:
                for threads in (self._reader, self._writer):
                    threads.shutdown(cancel_futures=True)
                context.release()

    def workers(self) -> list[str]:
        """Return the name of the one worker."""
        return [WORKER]

    def with_gpu(self, workers: list[str]) -> dict[str, bool]:
        """Return that this process multiplies on its cores."""
        return dict.fromkeys(workers, False)

    def submit(
        self,
        stage: str,
        *arguments: Any,
        key: tuple[int, int],
        worker: str = "",
        after: Sequence[Any] = (),
        wanted: bool = True,
    ) -> StageCall:
        """Queue a stage; `next_completed` runs it, or lets the writer run it."""
        call = StageCall(stage, arguments, after)
        if stage in ("commit", "join"):
            self._writes.append(call)
        else:
            bisect.insort(self._blocks, call, key=lambda call: call.arguments[0].start)
        return call

    def next_completed(self) -> list[tuple[StageCall, Any]]:
        """Make the next block while earlier ones are written; without one, wait for the writer or write here.

        Raises `SpdistError` if a stage failed, once the stages before it were returned.
        """
        if not self._done:
            self._run_next()
        completed: list[tuple[StageCall, Any]] = []
        while self._done:
            call = self._done[0]
            if call.error is not None:
                if completed:
                    break
                raise _failure(call.error)
            completed.append((self._done.popleft(), call.result))
        return completed

    def _run_next(self) -> None:
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        if self._done:
            return  # by the writer, meanwhile
        if self._blocks and not self._must_write():
            self._hand_over_writes()
            self._run_block()
        elif self._writing:  # a join may need what the writer has not written yet
            self._hand_over_writes()
            self._writing.popleft().result()
        else:
            self._run(self._writes.popleft())

    def _must_write(self) -> bool:
        """Whether a write comes before the next block: one block at a time waits to be written.

        After a block whose rows did not fit, its write makes room for the remaining rows, which come next.
        """
        if self._was_cut:
            return bool(self._writes or self._writing)
        return bool(self._writes) and (bool(self._writing) or not self._writes_beside)

    def _run(self, call: StageCall) -> None:
        call.run(self._context)
        self._done.append(call)

    def _run_block(self) -> None:
        """Make the first block; begin to read the one that follows, unless it has several pieces."""
        first = self._blocks.pop(0)
        for call in self._blocks[:1] if self._reads_ahead else ():
            task = call.arguments[0]
            if call.stage == "multiply" and call.operands is None and self._context.job.pieces_of(task) == 1:
                call.operands = self._reader.submit(STAGES["preprocess"], self._context, task)
        self._run(first)
        task, counts = first.arguments[0], first.result
        self._was_cut = isinstance(counts, BlockCounts) and task.start + counts.rows < task.stop

    def _hand_over_writes(self) -> None:
        while self._writes:
            self._writing.append(self._writer.submit(self._run, self._writes.popleft()))

    def costs(self, workers: Collection[str]) -> RunCosts:
        """Return the memory that this process took since the job was loaded, and its stages."""
        peak = max(worker_process.peak_memory() - self._idle, 0)
        return RunCosts([(peak, self._context.gpu_peak())], [self._context.telemetry.totals])

    def workers_that_see(self, array: ChunkedArray, k: int) -> list[str]:
        """Return none: there is no other process."""
        return []


def _failure(error: Exception) -> Exception:
    """Return the exception to raise for the error of a stage."""
    if isinstance(error, SpdistError):
        return error
    failure = stage_failure("in this process", error)
    failure.__cause__ = error
    return failure
