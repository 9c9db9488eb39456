"""Run a plan: a window of blocks over the workers, places in C handed out in order, everything finished on record.

The driver is the one writer of what must be in order: the place of each block (known once the blocks before it are
counted), the row offsets, and the journal from which ``--resume`` continues. Workers write C's Zarr chunks, each chunk
once: by the block that fills it, or by a join of the blocks that share it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import json
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from dask.utils import key_split
from distributed import Client, Future, Worker, WorkerPlugin, as_completed
from tornado.ioloop import PeriodicCallback

from spdist.errors import SpdistError
from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.assignment import BlockAssigner, Work, work_of
from spdist.scheduler.execution.cluster import dashboard_link, fetch, share_hosts, with_gpu, workers_of
from spdist.scheduler.execution.graph import Graph
from spdist.scheduler.execution.stages import PRODUCTS, Counted, Product, StageTotal, Task
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.storage import groups
from spdist.storage.atomic_replace import full_disk, is_full
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import WHOLE, StoredProductSpec
from spdist.storage.writer import ChunkBuffer, Layout

CHECKPOINT_SECONDS = 0.5
WORKERS_SECONDS = 2.0
TELL_SECONDS = 0.5
FORGET_SECONDS = 2.0
"""Dask remembers the names of the last 100,000 tasks: we make it forget them this often."""

IDLE: dict[str, int] = {}
"""Resident bytes of each worker of this process when it was idle, by address."""


class Install(WorkerPlugin):
    """Puts a product on every worker, those that join later too, and measures their memory from then on."""

    def __init__(self, name: str, product: Any) -> None:
        self.name, self.product = name, product

    def setup(self, worker: Worker) -> None:
        """Load what the stages need before the idle worker is weighed, unless that was done ahead."""
        PRODUCTS[self.name] = self.product
        ahead = AHEAD.pop(self.name, None)
        if ahead is not None:
            self.product.follow(ahead)
        if ahead is None or not self.product.resident:
            load(self.product, worker)
        calls = {"forget": (key_split.cache_clear, FORGET_SECONDS), "tell": (lambda: self.tell(worker), TELL_SECONDS)}
        for what, (call, seconds) in calls.items():
            worker.periodic_callbacks[f"{what}-{self.name}"] = PeriodicCallback(call, 1e3 * seconds)
            worker.periodic_callbacks[f"{what}-{self.name}"].start()

    def teardown(self, worker: Worker) -> None:
        """Let go of the product, and of what still waits there."""
        if (product := PRODUCTS.pop(self.name, None)) is not None:
            product.release()
        for what in ("forget", "tell"):
            worker.periodic_callbacks.pop(f"{what}-{self.name}").stop()

    def tell(self, worker: Worker) -> None:
        """Send what was timed since the last time to all who subscribed to the topic ``spdist``."""
        product = PRODUCTS[self.name]
        if timings := product.take_timings():
            product.told += len(timings)
            worker.log_event("spdist", {"product": self.name, "timings": [asdict(timing) for timing in timings]})


class Ahead(WorkerPlugin):
    """Has workers load what a product needs while its plan is made, and begin to read B if that is sure to stay."""

    def __init__(self, name: str, product: Product) -> None:
        self.name, self.product = name, product

    def setup(self, worker: Worker) -> None:
        """Do so where the worker is a process; what goes wrong is met again when the plan is there."""
        if not worker.nanny:
            return
        try:
            load(self.product, worker)
        except Exception:
            self.product.release()
            return
        AHEAD[self.name] = self.product
        if self.product.resident:
            self.product.whole_b().begin()

    def teardown(self, worker: Worker) -> None:
        """Let go of what no plan asked for."""
        if (product := AHEAD.pop(self.name, None)) is not None:
            product.release()


AHEAD: dict[str, Product] = {}
"""Products of this process whose plans are being made, by name."""


def load(product: Any, worker: Worker) -> None:
    """Load what the stages of a product need, then weigh the idle worker."""
    if worker.nanny:  # a worker that is a thread of this process compiles when it must, and shares nothing
        worker_process.dask_setup(worker)
        product.warm()
    else:
        product.shared = ""
    worker_process.reset_peak()
    IDLE[worker.address] = worker_process.resident_memory()


@contextlib.contextmanager
def ahead(client: Client, name: str, product: Product) -> Iterator[None]:
    """Have the workers do what can be done before the plan of a product is there; in the end nothing of it is left."""
    client.register_plugin(Ahead(name, product), name=f"{name}-ahead")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # of a worker that has just died
            client.unregister_worker_plugin(f"{name}-ahead")


def shared_name(client: Client) -> str:
    """Return a name that nobody guesses for what workers of one host share; none where each has a host of its own."""
    return uuid.uuid4().hex if share_hosts(client) else ""


def helpers_of(client: Client) -> RemoteReaders | None:
    """Return the workers as helpers with a plan; None where there is none yet."""
    threads = client.nthreads()
    return RemoteReaders(client.get_executor(pure=False), len(threads), min(threads.values())) if threads else None


def worker_memory(name: str, dask_worker: Worker) -> tuple[int, int]:
    """Return the most bytes a worker took beyond its idle memory, of the host's and of its GPU's; for `Client.run`."""
    peak = worker_process.peak_memory() - IDLE[dask_worker.address]
    return max(peak, 0), PRODUCTS[name].gpu_peak() if name in PRODUCTS else 0


def worker_timings(name: str) -> tuple[int, list[dict[str, Any]]]:
    """Return how many timings a worker has told, and those it has not told yet; for `Client.run`."""
    if name not in PRODUCTS:
        return 0, []
    product = PRODUCTS[name]
    return product.told, [asdict(timing) for timing in product.take_timings()]


def worker_totals(name: str) -> dict[str, StageTotal]:
    """Return what each stage took on a worker; for `Client.run`."""
    return dict(PRODUCTS[name].totals) if name in PRODUCTS else {}


@dataclass(frozen=True)
class Progress:
    """How far a run is: blocks and products done and in all, entries of C placed."""

    blocks: int
    blocks_total: int
    products: int
    products_total: int
    nnz: int


@dataclass(frozen=True)
class Front:
    """How much of C is durable: all Zarr chunks before `chunks`, and the block from which work goes on.

    Attributes
    ----------
    row, nnz : int
        First row of that block, and its place in C.
    chunks : int
        Zarr chunks of `indices` and `data` that are written.
    compressed : bool
        Whether the values are compressed.
    """

    row: int = 0
    nnz: int = 0
    chunks: int = 0
    compressed: bool = False


@dataclass
class _Block:
    """A block in flight."""

    work: Work
    worker: str
    multiplied: Future[Any]
    counted: Counted | None = None
    at: int = -1
    committed: bool = False

    @property
    def task(self) -> Task:
        """What the worker was told; ends where its room did, once that is known."""
        return self.work.task


@dataclass
class Outcome:
    """What a run did: `nnz`, blocks, seconds and bytes by stage.

    Attributes
    ----------
    peak_host_memory, peak_device_memory : int
        Most bytes that a worker took beyond what it held idle.
    workers : int
    """

    nnz: int
    blocks: int
    peak_host_memory: int
    peak_device_memory: int
    workers: int
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


JOURNAL = "journal"


def write_journal(url: str, front: Front, offsets: Int64Array) -> None:
    """Record how far C is durable, in one file so that it is true as a whole.

    Parameters
    ----------
    offsets : (n,) int64
        Row offsets since the last whole Zarr chunk of `indptr`.
    """
    head = json.dumps(front.__dict__, sort_keys=True).encode()
    groups.write_note(url, JOURNAL, head + b"\n" + offsets.astype("<i8").tobytes())


def read_journal(url: str) -> tuple[Front, Int64Array]:
    """Return what `write_journal` wrote; the beginning where there is nothing."""
    content = groups.read_note(url, JOURNAL)
    if content is None:
        return Front(), np.zeros(1, np.int64)
    head, _, body = content.partition(b"\n")
    return Front(**json.loads(head)), np.frombuffer(body, "<i8").astype(np.int64)


class Driver:
    """Runs one plan from `front` on; `run` returns when C's entries and offsets are all written.

    Parameters
    ----------
    client : distributed.Client
    plan : Plan
    product : Product
        Or anything with its stages.
    layout : Layout
        Of C.
    name : str
        Of the product, in the tasks' keys.
    front, offsets
        From `read_journal`.
    progress : callable, optional
        Called with a `Progress` after each step.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        product: Any,
        layout: Layout,
        name: str,
        front: Front,
        offsets: Int64Array,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.client, self.plan, self.product, self.name = client, plan, product, name
        self.front, self.progress = front, progress
        self.layout = replace(layout, compressed=front.compressed)
        pieces = (len(plan.inner_bounds) - 1) * (len(plan.column_bounds) - 1)
        self.graph = Graph(client, name, pieces, self.layout)
        self.offsets = ChunkBuffer(layout.array("indptr"), (front.row + 1) - len(offsets))
        self.offsets.append(offsets)
        # What comes first in C lies last and goes first, or all slots could wait for it.
        self.todo = list(self._remaining())[::-1]
        self.number = 0 if front.row == 0 else 1  # block 0 decides on compression
        self.inflight: deque[_Block] = deque()  # in order of rows; placed ones leave when they are durable
        self.by_future: dict[Any, tuple[str, Any]] = {}
        self.crew = BlockAssigner(plan, plan.blocks_in_flight, functools.partial(with_gpu, client))
        self.nnz, self.blocks_done = front.nnz, 0
        self.products_done = plan.expansion - sum(work.products for work in self.todo)
        self.placed = 0
        self.committing: dict[int, int] = {}
        self.sharers: dict[int, list[Future[Any]]] = {}
        self.joining: set[int] = set()
        self.completed = as_completed()
        self.last_checkpoint = self.last_workers = 0.0

    def _remaining(self) -> Iterable[Work]:
        """Yield the blocks that are not durable, the first one from the row where the durable part ends."""
        return (work_of(block, start=self.front.row) for block in self.plan.blocks if block.stop > self.front.row)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Submit, place, commit and join until everything is durable."""
        self._fill()
        while self.inflight:
            self._finished(self.completed.next_batch(block=True))
            self._place()
            self._fill()
            self._checkpoint()
            self._tell()
        self._checkpoint(force=True)
        self.offsets.close()

    def _fill(self) -> None:
        """Submit blocks to the workers that have a slot free."""
        if not self.todo:
            return
        self._find_workers()
        while self.todo:
            chosen = self.crew.choose(reversed(self.todo), stuck=not self.by_future)
            if chosen is None:
                return
            worker, ahead = chosen
            work = self.todo.pop(-1 - ahead)
            self._submit(work._replace(task=replace(work.task, number=self._next_number())), worker)

    def _next_number(self) -> int:
        self.number += 1
        return self.number - 1

    def _submit(self, work: Work, worker: str) -> None:
        block = _Block(work, worker, self.graph.block(work.task, worker))
        self.crew.give(worker, work)
        at = bisect.bisect(self.inflight, work.task.start, key=lambda other: other.task.start)
        self.inflight.insert(at, block)
        self._watch(block.multiplied, "count", block)

    def _find_workers(self) -> None:
        """Learn which workers there are."""
        now = time.monotonic()
        if len(self.crew) and now - self.last_workers < WORKERS_SECONDS:
            return
        self.last_workers = now
        key_split.cache_clear()
        meet(self.crew, self.client)

    def _watch(self, future: Future[Any], what: str, subject: Any) -> None:
        self.by_future[future.key] = (what, subject)
        self.completed.add(future)

    def _finished(self, futures: list[Future[Any]]) -> None:
        futures = settled(futures, self.completed)
        subjects = [self.by_future.pop(future.key) for future in futures]
        counts = [i for i, (what, _) in enumerate(subjects) if what == "count"]
        for i, counted in zip(counts, fetch(self.client, [futures[i] for i in counts]), strict=True):
            self._counted(subjects[i][1], counted)
        for what, subject in subjects:
            if what == "commit":
                self._committed(subject)
            elif what == "join":
                self.joining.discard(subject)

    # -- counted, placed, committed, joined ----------------------------------------------------------------------------

    def _counted(self, block: _Block, counted: Counted) -> None:
        """Take a block's row lengths; rows for which its room was too small become the next block."""
        if block.task.number == 0 and counted.compresses:
            self.front = replace(self.front, compressed=True)
            self.layout = self.graph.layout = replace(self.layout, compressed=True)
        done = block.task.start + len(counted.row_nnz)
        if done < block.task.stop:
            block.work, rest = block.work.cut(done)
            bisect.insort(self.todo, rest, key=lambda work: -work.task.start)
        self.crew.counted(block.worker, block.work)
        block.counted = counted

    def _place(self) -> None:
        """Give each counted block its place in C, as far as all blocks before it are counted; commit it."""
        while self.placed < len(self.inflight):
            block = self.inflight[self.placed]
            follows = self.inflight[self.placed - 1].task.stop if self.placed else self.front.row
            if block.counted is None or block.task.start != follows:
                return
            self.placed += 1
            block.at, nnz = self.nnz, block.counted.nnz
            self.nnz += nnz
            future = self.graph.commit(
                block.task, block.counted, block.at, self.front.chunks, block.worker, block.multiplied
            )
            self.committing[block.task.number] = block.at
            self._watch(future, "commit", block)
            self._share(block, future, nnz)

    def _share(self, block: _Block, commit: Future[Any], nnz: int) -> None:
        """Note which Zarr chunks a block shares with others; those that are complete are joined."""
        length = self.layout.chunk
        first, last = block.at // length, (block.at + nnz) // length
        shared = ({first} if block.at % length else set()) | ({last} if (block.at + nnz) % length else set())
        for k in sorted(shared):
            if k >= self.front.chunks and nnz:
                self.sharers.setdefault(k, []).append(commit)
        final = block.task.stop == self.plan.a.shape[0]
        for k in sorted(self.sharers):
            if (k + 1) * length <= self.nnz or final:
                self.joining.add(k)
                self._watch(self.graph.join(k, self.sharers.pop(k)), "join", k)

    def _committed(self, block: _Block) -> None:
        block.committed = True
        del self.committing[block.task.number]
        self.crew.done(block.worker)
        self.blocks_done += 1
        self.products_done += block.work.products

    # -- what is durable -----------------------------------------------------------------------------------------------

    def _durable_chunks(self) -> int:
        """Return how many Zarr chunks from the first are written."""
        open_chunks = [*self.joining, *self.sharers, *(at // self.layout.chunk for at in self.committing.values())]
        return min(open_chunks, default=-(-self.nnz // self.layout.chunk))

    def _checkpoint(self, *, force: bool = False) -> None:
        """Let go of the blocks that are durable and, now and then, record how far C is."""
        chunks = max(self._durable_chunks(), self.front.chunks)
        front, end = self.front, chunks * self.layout.chunk
        while self.placed and (block := self.inflight[0]).committed and block.counted is not None:
            after = block.at + block.counted.nnz
            if after > end and not (after == self.nnz and not self.joining and not self.sharers):
                break
            self.offsets.append(block.at + np.cumsum(block.counted.row_nnz, dtype=np.int64))
            front = replace(front, row=block.task.stop, nnz=after)
            self.inflight.popleft()
            self.placed -= 1
        self.front = replace(front, chunks=chunks)
        now = time.monotonic()
        if force or (front != self.front and now - self.last_checkpoint > CHECKPOINT_SECONDS):
            self.last_checkpoint = now
            self.write()

    def write(self) -> None:
        """Record how far C is durable."""
        write_journal(self.layout.url, self.front, np.concatenate(self.offsets.parts))

    def _tell(self) -> None:
        if self.progress is not None:
            total = self.blocks_done + len(self.inflight) + len(self.todo)
            self.progress(Progress(self.blocks_done, total, self.products_done, self.plan.expansion, self.nnz))


def meet(crew: BlockAssigner, client: Client) -> None:
    """Let a crew learn which workers there are; waits until one of them says what it is."""
    crew.meet(workers_of(client))
    while not len(crew):
        time.sleep(0.1)
        crew.meet(workers_of(client))


def settled(futures: Iterable[Future[Any]], completed: as_completed) -> list[Future[Any]]:
    """Return those of the completed futures that still are.

    One whose result has meanwhile gone with its worker is being computed again: it goes back to `completed`.

    Raises
    ------
    SpdistError
        If one failed.
    """
    finished = []
    for future in futures:
        status = future.status  # another thread changes it
        if status in ("error", "cancelled"):
            raise failure(future)
        if status == "finished":
            finished.append(future)
        else:
            completed.add(future)
    return finished


def failure(future: Future[Any]) -> Exception:
    """Return the exception to raise for a task that failed, in words."""
    if future.cancelled():
        return SpdistError(f"stage {future.key!s} was cancelled on the scheduler; continue with --resume")
    error = future.exception()
    if isinstance(error, SpdistError):
        return error
    if is_full(error):
        return full_disk("C", error)
    return SpdistError(f"stage {future.key!s} failed: {type(error).__name__}: {error}; continue with --resume")


def execute(
    client: Client,
    plan: Plan,
    a: StoredMatrix,
    b: StoredMatrix,
    layout: Layout,
    name: str,
    started: Callable[[str], None] = lambda link: None,
    progress: Callable[[Progress], None] | None = None,
    timed: Callable[[list[dict[str, Any]]], None] | None = None,
    spec: StoredProductSpec = WHOLE,
) -> tuple[Outcome, Layout]:
    """Run `plan` on the workers of `client`, from where C's journal says.

    Parameters
    ----------
    timed : callable, optional
        Called now and then with what the stages of blocks took, as `stages.Timing` has it.
    spec : StoredProductSpec
        What becomes of the product.

    Raises
    ------
    SpdistError
        If a stage failed. What is durable stays and is on record.
    """
    cuts = plan.inner_bounds, plan.column_bounds
    limits = plan.blocks_in_flight, plan.memory_limit, plan.host_limit
    product = Product(a, b, plan.engine, plan.resident, *cuts, *limits, spec, shared_name(client))
    client.register_plugin(Install(name, product), name=name)
    timings = _Timings(name, timed) if timed is not None else None
    if timings is not None:
        client.subscribe_topic("spdist", timings.hear)
    started(dashboard_link(client))
    try:
        driver = Driver(client, plan, product, layout, name, *read_journal(layout.url), progress)
        gc.freeze()  # millions of tasks make garbage; what was there before them need not be searched each time
        try:
            driver.run()
        except BaseException:
            driver.write()
            raise
        finally:
            gc.unfreeze()
        peaks = client.run(worker_memory, name, on_error="ignore").values()  # a worker may die at the last moment
        stages = add_totals(client.run(worker_totals, name, on_error="ignore").values())
        host, device = (max((peak[i] for peak in peaks), default=0) for i in (0, 1))
        if timings is not None:
            timings.fetch(client)
        return Outcome(driver.nnz, driver.blocks_done, host, device, len(peaks), stages), driver.layout
    finally:
        if timings is not None:
            client.unsubscribe_topic("spdist")
        with contextlib.suppress(OSError):  # of a worker that has just died
            client.unregister_worker_plugin(name)


@dataclass
class _Timings:
    """Hands on what the workers tell of a product."""

    name: str
    timed: Callable[[list[dict[str, Any]]], None]
    heard: Counter[str] = field(default_factory=Counter)

    def hear(self, event: tuple[Any, dict[str, Any]]) -> None:
        """Take an event of the topic ``spdist``; called by the client's thread."""
        told = event[1]
        if told.get("product") == self.name:
            self._hand_on(told["worker"], told["timings"])
            self.heard[told["worker"]] += len(told["timings"])

    def fetch(self, client: Client) -> None:
        """Wait for what was told, which goes another way than answers, and ask for the rest."""
        late = time.monotonic() + WORKERS_SECONDS
        for worker, (told, rest) in client.run(worker_timings, self.name, on_error="ignore").items():
            while self.heard[worker] < told and time.monotonic() < late:
                time.sleep(0.01)
            self._hand_on(worker, rest)

    def _hand_on(self, worker: str, timings: list[dict[str, Any]]) -> None:
        self.timed([timing | {"worker": worker} for timing in timings])


def add_totals(workers: Iterable[dict[str, StageTotal]]) -> dict[str, dict[str, float]]:
    """Return seconds, bytes and tasks by stage, over all workers, and the quickest worker's limit in bytes/s."""
    added: dict[str, dict[str, float]] = {}
    for totals in workers:
        for stage, total in totals.items():
            sums = added.setdefault(stage, {"seconds": 0.0, "bytes": 0, "tasks": 0, "limit": 0.0})
            sums["seconds"] += total.seconds
            sums["bytes"] += total.nbytes
            sums["tasks"] += total.tasks
            sums["limit"] = max(sums["limit"], total.limit)
    return added
