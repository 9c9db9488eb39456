"""What a worker does to one block: preprocess, multiply, merge, commit, join, or reduce; one method each.

A task's result is small (counts, slices of Zarr chunks). Blocks themselves stay in the worker's own store until they
are committed, so that their memory is free the moment they are written and not when the scheduler says so. A block
that is not there when it is to be committed (its worker died) is computed again on the spot.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spdist.engines import GPU_ENGINES
from spdist.errors import SpdistError
from spdist.kernels import reduction_spec
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.cuda.pinned import array_at
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.streaming import pipeline
from spdist.kernels.streaming.history import BlockHistory
from spdist.kernels.streaming.layout import SubmatrixOffset
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, blocksize, index_dtype, number_dtype
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.shared_operand import Resident
from spdist.scheduler.planner.plan import gpu_staging
from spdist.storage.chunked_array import compresses
from spdist.storage.matrix import Allocate, Held, StoredMatrix
from spdist.storage.product_spec import WHOLE, StoredProductSpec
from spdist.storage.writer import Layout

BlockKey = int


@dataclass(frozen=True)
class Task:
    """A block of rows as the driver hands it out.

    Attributes
    ----------
    number, start, stop : int
        Its number, and its rows ``[start:stop)``.
    capacity : int
        Room for entries of C.
    split : bool
        Whether the inner dimension is cut.
    b_bytes : int
        Room for rows of B.
    """

    number: BlockKey
    start: int
    stop: int
    capacity: int
    split: bool
    b_bytes: int = 0


@dataclass(frozen=True)
class Counted:
    """What the driver learns of a multiplied block: entries of each row done, their digest, whether values compress."""

    row_nnz: Int64Array
    digest: bytes
    compresses: bool

    @property
    def nnz(self) -> int:
        """Entries of the block."""
        return int(self.row_nnz.sum(dtype=np.int64))


@dataclass(frozen=True)
class Part:
    """A slice of a block that shares its Zarr chunk with its neighbours: `at` is its place in C."""

    at: int
    indices: ValueArray
    data: ValueArray


@dataclass(frozen=True)
class Operands:
    """Rows of A, their columns renumbered to the rows of B beside them; no B where it is resident; the mask's rows.

    `within` says where these rows lie in B, if they do.
    """

    a: CSR
    b: CSR | None
    mask: CSR | None = None
    within: SubmatrixOffset | None = None


@dataclass
class StageTotal:
    """What one stage took on this worker: seconds of wall time, bytes moved, tasks run.

    `limit` is what the machine moves at best, in bytes/s: a core in memory, or the bus; 0 where that is not known.
    """

    seconds: float = 0.0
    nbytes: int = 0
    tasks: int = 0
    limit: float = 0.0


@dataclass(frozen=True)
class Timing:
    """One stage of one block: first row of the block, when it began (seconds since 1970), its seconds and bytes."""

    stage: str
    row: int
    begin: float
    seconds: float
    nbytes: int


@dataclass
class Product:
    """One product on one worker: what all its tasks share, and the blocks that wait there.

    Attributes
    ----------
    a, b : StoredMatrix
    engine : str
    memory_limit, host_limit : int
        Of the GPU, and of the host's memory beside it, where a GPU multiplies.
    told : int
        Timings that were sent to whom it may concern.
    learnt : BlockHistory
        What blocks came to on this worker's GPU.
    limits : dict
        Of stages that only move bytes; see `StageTotal`.
    resident : bool
        Whether all of B is kept in memory.
    inner_bounds, column_bounds : tuple of int
        Cuts of a block that is split.
    pairs : int
        Block pairs in flight.
    spec : StoredProductSpec
        What becomes of the product.
    shared : str
        Name of the memory in which workers of one host keep such a B together; empty: each keeps its own.
    """

    a: StoredMatrix
    b: StoredMatrix
    engine: str
    resident: bool
    inner_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    pairs: int = 1
    memory_limit: int = 0
    host_limit: int = 0
    spec: StoredProductSpec = WHOLE
    shared: str = ""
    waiting: dict[BlockKey, tuple[int, CSR]] = field(default_factory=dict, compare=False)
    partial: dict[BlockKey, tuple[int, CSR]] = field(default_factory=dict, compare=False)
    totals: dict[str, StageTotal] = field(default_factory=dict, compare=False)
    timings: list[Timing] = field(default_factory=list, compare=False)
    told: int = field(default=0, compare=False)
    learnt: BlockHistory = field(default_factory=BlockHistory, compare=False)
    limits: dict[str, float] = field(default_factory=dict, compare=False)
    _b: Resident | None = field(default=None, compare=False)
    _band: Held | None = field(default=None, compare=False)
    _lock: Any = field(default=None, compare=False)
    _gpu: Any = field(default=None, compare=False)
    _gpu_lock: Any = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Travel without blocks, totals and locks."""
        fields = (
            "a",
            "b",
            "engine",
            "resident",
            "inner_bounds",
            "column_bounds",
            "pairs",
            "memory_limit",
            "host_limit",
            "spec",
            "shared",
        )
        return {name: getattr(self, name) for name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive with nothing waiting."""
        self.__init__(**state)  # type: ignore[misc]

    def __post_init__(self) -> None:
        self._lock, self._gpu_lock = threading.Lock(), threading.Lock()

    @property
    def on_gpu(self) -> bool:
        """Whether this worker has a GPU, which multiplies."""
        return self.engine in GPU_ENGINES and (self.engine != "hybrid" or gpu_name() is not None)

    @property
    def pieces(self) -> tuple[tuple[int, int, int, int], ...]:
        """Inner and column ranges of a split block, in order of k."""
        inner = list(zip(self.inner_bounds[:-1], self.inner_bounds[1:], strict=True))
        columns = list(zip(self.column_bounds[:-1], self.column_bounds[1:], strict=True))
        return tuple((*k, *j) for j in columns for k in inner)

    def warm(self) -> None:
        """Load and compile what the stages need, on a product of one entry, before the idle worker is weighed."""
        worker_process.keep_small_arrays(self.host_limit or self.memory_limit)
        a, b = (
            CSR(np.array([0, n]), np.zeros(n, index_dtype(m.ncols)), np.ones(n, m.dtype), (1, m.ncols))
            for m in (self.a, self.b)
            for n in [min(1, m.ncols)]
        )
        one = CSR(a.indptr, a.indices, a.data, (1, 1))
        spec = self.spec.of_rows(0, 1, None if self.spec.mask is None else b)
        if self.on_gpu:
            from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

            if not self.limits:
                self.limits |= self.gpu().copy_rates()  # before slots take the memory
            dtype = number_dtype(self.spec.dtype(self.a, self.b))
            rowwise_gpu.compile_kernels(dtype, self.b.ncols, self.spec.per_row.semiring)
            c = self.product(one, b, 1, 0, spec)
            self.totals.clear()  # of no block of the run
            self.take_timings()
        for engine in self._host_engines():
            c = self.on_host(one, b, 1, engine, spec)
        if len(self.pieces) > 1:
            self.add(c, c, 0, spec)
        for m, row in ((self.a, a), (self.b, b)):
            m.rows(0, min(m.nrows, 1))
            self.check(row, m.url)
        self.limits |= dict.fromkeys(("preprocess", "merge", "commit", "join"), worker_process.copy_rate())

    def _host_engines(self) -> tuple[Any, ...]:
        """Return the CPU engines that may multiply here."""
        if self.on_gpu:
            return ()
        if self._host_engine == "auto":
            return ("numba", "scipy") if self.spec.plain else ("numba",)
        return (self._host_engine,)

    @property
    def _host_engine(self) -> Any:
        return "auto" if self.engine == "hybrid" else self.engine

    def product(
        self, a: CSR, b: CSR, capacity: int, row: int, spec: ProductSpec = PLAIN, within: SubmatrixOffset | None = None
    ) -> CSR:
        """Multiply as many rows of A, the first of them `row`, as fit in `capacity` entries, where the engine says."""
        if not self.on_gpu:
            return self.on_host(a, b, capacity, self._host_engine, spec)
        with self._gpu_lock:
            note = functools.partial(self._note_gpu, row)
            rows = pipeline.RowSlice(0, capacity, row, within, self.learnt)
            return pipeline.multiply_rows(a, b, self.gpu(), rows, report=note, spec=spec)

    @staticmethod
    def on_host(a: CSR, b: CSR, capacity: int, engine: Any, spec: ProductSpec) -> CSR:
        """Multiply as many rows of A as fit on the CPU; blocks by the one kernel there is for them."""
        if blocksize(a.dtype) is None:
            return cpu.multiply_rows(a, b, 0, capacity, engine=engine, spec=spec)
        from spdist.kernels.bsr import multiply_cpu as bsr_cpu  # loads Numba

        return bsr_cpu.multiply_rows(a, b, 0, capacity)

    def add(self, c: CSR, partial: CSR, piece: int, spec: ProductSpec) -> CSR:
        """Return the sum so far with the partial product of `piece` added; cut, if that is the last."""
        from spdist.kernels.bsr import multiply_cpu as bsr_cpu  # both load Numba
        from spdist.kernels.cpu.merge import merge

        if blocksize(c.dtype) is not None:
            return bsr_cpu.merge(c, partial)
        c = merge(c, partial, spec)
        return cpu.cut(c, spec) if piece == len(self.pieces) - 1 else c

    def gpu(self) -> Any:
        """Return this worker's GPU within its memory limit."""
        from spdist.kernels.cuda.pinned import bound_pinned
        from spdist.kernels.streaming.gpu_device import Gpu

        with self._lock:
            if self._gpu is None:
                bound_pinned(self.host_limit or None)
                # Not packed: cores that would unpack C have enough to do with reading and writing.
                self._gpu = Gpu(self.memory_limit, staging_bytes=gpu_staging(self.host_limit), pack=False)
            return self._gpu

    def gpu_peak(self) -> int:
        """Return the most bytes of the GPU's memory that were held."""
        return self._gpu.peak if self._gpu is not None else 0

    def follow(self, before: Product) -> None:
        """Go on from a product that was there before the plan: with its GPU, and with its B if that stays."""
        self.limits = before.limits
        self._gpu, before._gpu = before._gpu, None
        self._b, before._b = before._b, None
        if self._b is not None and not self.resident:
            self._b.drop()
            self._b = None

    def release(self) -> None:
        """Let go of B, of the GPU's memory, and of the page-locked memory that no block uses any more."""
        if self._b is not None:
            self._b.drop()
        if self._gpu is not None:
            from spdist.kernels.cuda.pinned import free_pinned

            self._gpu = None
            free_pinned()

    # -- the stages ----------------------------------------------------------------------------------------------------

    def preprocess(self, task: Task, piece: int = 0) -> Operands:
        """Read the rows of A and the rows of B that they need."""
        with self.report("preprocess", task.start) as done:
            mask = self.spec.read_mask(task.start, task.stop)
            resident = self.resident and not task.split
            if resident and (rows := self.rows_of_resident(task, done)) is not None:
                return Operands(rows, None, mask, SubmatrixOffset(task.start))
            a = self.a.rows(task.start, task.stop, self.allocate)
            reach = self.check(a, self.a.url, task.start)
            if resident:
                self.resident_b(done)
                done(a.nbytes)
                return Operands(a, None, mask)
            if not task.split and (operands := self.band(task, a, *reach)) is not None:
                done(operands.a.nbytes + operands.b.nbytes)  # type: ignore[union-attr]
                return replace(operands, mask=mask)
            k0, k1, j0, j1 = self.pieces[piece] if task.split else (0, self.a.ncols, 0, self.b.ncols)
            if task.split:
                a = columns_between(a, k0, k1)
            a, needed = renumber(a)
            b = self.b.take(needed)
            self.check(b, self.b.url)
            if j1 - j0 < self.b.ncols:
                b = columns_between(b, j0, j1)
            done(a.nbytes + b.nbytes)
            return Operands(a, b, mask)

    @property
    def allocate(self) -> Allocate | None:
        """What blocks are read to: memory from which the GPU copies; None: any."""
        return self._for_gpu if self.on_gpu else None

    def _for_gpu(self, count: int, dtype: np.dtype[Any]) -> ValueArray:
        dtype = np.dtype(dtype)
        return array_at(self.gpu().allocate(count * dtype.itemsize), 0, count, dtype)

    def check(self, m: CSR, name: str, first_row: int = 0) -> tuple[int, int]:
        """Return the least column and the one after the greatest; refuse rows that are not canonical."""
        return check_rows(self.engine, m, name, first_row)

    def band(self, task: Task, a: CSR, low: int, high: int) -> Operands | None:
        """Return the operands of a block that asks for rows of B that lie side by side; None if they do not.

        All rows from the first to the last are taken, so that columns need no numbers of their own: the bytes that
        renumbering would take make room for rows nobody asked for. Rows in the last such block, and in A where it is
        B, are not read again. Where only one pair is in flight, there is no room to keep them.
        """
        if not a.nnz:
            return None
        room = task.b_bytes + 8 * a.nnz - 24 * (high - low)
        if room <= 0:
            return None
        offsets = self.b.read_indptr(low, high)
        first, last = int(offsets[0]), int(offsets[-1])
        if (last - first) * self.b.entry_nbytes > room:
            return None
        held = [self._band] if self._band is not None else []
        at = int(self.a.read_indptr(task.start, task.start)[0]) if self.a == self.b else -1
        if at >= 0:
            held.append((at, a))
        allocate = self.allocate or np.empty
        b = CSR(offsets - first, *self.b.entries(first, last, held, allocate), (high - low, self.b.ncols))
        self.check(b, self.b.url, low)
        self._band = (first, b) if self.pairs > 1 else None
        data = b.data[at - first : at - first + a.nnz] if first <= at and at + a.nnz <= last else a.data
        columns = np.subtract(a.indices, low, out=allocate(a.nnz, a.indices.dtype))
        renumbered = CSR(a.indptr, columns, data, (a.nrows, high - low))
        rows = self.a == self.b and low <= task.start and task.stop <= high  # empty ones may lie outside of the band
        return Operands(renumbered, b, within=SubmatrixOffset(task.start - low, low) if rows else None)

    def rows_of_resident(self, task: Task, moved: Callable[[int], None]) -> CSR | None:
        """Return the rows of A out of the B that stays, if they are the same."""
        if self.a != self.b:
            return None
        b = self.resident_b(moved)
        return b.rows(task.start, task.stop) if b.dtype == self.a.dtype else None

    def multiply(self, task: Task, operands: Operands, piece: int = 0) -> Counted:
        """Multiply as many rows as fit the block's capacity; the result waits here."""
        with self.report("multiply", task.start) as done:
            b = self.resident_b() if operands.b is None else operands.b
            partial = task.split and len(self.pieces) > 1
            spec = self.spec.of_rows(task.start, task.stop, operands.mask, partial=partial)
            c = self.product(operands.a, b, task.capacity, task.start, spec, operands.within)
            done(c.nbytes)
        if piece:
            self.partial[task.number] = (piece, c)
        else:
            self.waiting[task.number] = (0, c)
        return self.count(c, task)

    def merge(self, task: Task, piece: int) -> Counted:
        """Add the partial product of `piece` to the sum of those before it."""
        before, c = self.waiting.get(task.number, (-1, None))
        here, partial = self.partial.pop(task.number, (-1, None))
        if c is None or partial is None or (before, here) != (piece - 1, piece):
            return self.count(self.compute(task, piece + 1), task)  # a worker was lost in between
        with self.report("merge", task.start) as done:
            c = self.add(c, partial, piece, self.spec.of_rows(task.start, task.stop, None))
            done(2 * c.nbytes)
        self.waiting[task.number] = (piece, c)
        return self.count(c, task)

    def compute(self, task: Task, pieces: int) -> CSR:
        """Run all stages before the commit here, one after the other; the result waits here too."""
        for piece in range(pieces):
            self.multiply(task, self.preprocess(task, piece), piece)
            if piece:
                self.merge(task, piece)
        return self.waiting[task.number][1]

    def reduce(self, task: Task, what: reduction_spec.Reduction) -> reduction_spec.PartialReduction:
        """Make a block, as many rows at a time as it has room for, and return what they come to."""
        if self.on_gpu and not task.split:
            return self._reduce_on_gpu(task, what)
        parts: list[reduction_spec.PartialReduction] = []
        while task.start < task.stop or not parts:
            c = self.compute(task, len(self.pieces) if task.split else 1)
            del self.waiting[task.number]
            with self.report("reduce", task.start) as done:
                parts.append(reduce_rows(what, c, task.start))
                done(c.nbytes)
            task = replace(task, start=task.start + c.nrows)
        return reduction_spec.combine(what, parts)

    def _reduce_on_gpu(self, task: Task, what: reduction_spec.Reduction) -> reduction_spec.PartialReduction:
        """Return what a block comes to; its rows of C stay on the GPU."""
        operands = self.preprocess(task)
        b = self.resident_b() if operands.b is None else operands.b
        spec = self.spec.of_rows(task.start, task.stop, operands.mask)
        note = functools.partial(self._note_gpu, task.start)
        with self.report("reduce", task.start) as done, self._gpu_lock:
            done(0)
            rows = pipeline.RowSlice(0, None, task.start, operands.within, self.learnt)
            return pipeline.reduce(operands.a, b, what, self.gpu(), rows, report=note, spec=spec)

    @staticmethod
    def count(c: CSR, task: Task) -> Counted:
        """Return what the driver needs to place the block."""
        lengths = np.diff(c.indptr)
        small = len(lengths) == 0 or lengths.max() <= np.iinfo(np.uint32).max
        lengths = lengths.astype(np.uint32) if small else lengths
        return Counted(lengths, _digest(c), task.number == 0 and compresses(c.data))

    def commit(self, task: Task, rows: int, digest: bytes, layout: Layout, at: int, done_chunks: int) -> list[Part]:
        """Write the Zarr chunks that lie inside the block; return what it shares with its neighbours.

        Parameters
        ----------
        rows, digest
            As the block was counted.
        at : int
            Place of the block's first entry in C.
        done_chunks : int
            Zarr chunks before this one are written already.
        """
        c = self.waiting[task.number][1] if task.number in self.waiting else self.again(task, rows, digest)
        with self.report("commit", task.start) as done:
            first, last = -(-at // layout.chunk), (at + c.nnz) // layout.chunk
            first, last = max(first, done_chunks), max(last, done_chunks)
            if first < last:
                body = slice(first * layout.chunk - at, last * layout.chunk - at)
                layout.write_entries(first, c.indices[body], c.data[body])
                done((body.stop - body.start) * (c.indices.itemsize + c.data.itemsize))
        parts = [
            Part(at + low, c.indices[low:high].copy(), c.data[low:high].copy())
            for low, high in shared_slices(at, c.nnz, layout.chunk)
            if (at + low) // layout.chunk >= done_chunks
        ]
        self.waiting.pop(task.number, None)
        return parts

    def again(self, task: Task, rows: int, digest: bytes) -> CSR:
        """Compute a block whose worker was lost, and make sure that it is the block that was placed."""
        c = self.compute(task, len(self.pieces) if task.split else 1)
        c = c.rows(0, min(c.nrows, rows))
        if _digest(c) != digest:
            raise SpdistError(
                f"rows {task.start:,}-{task.stop:,} gave another pattern when computed again: A or B changed while "
                f"they were multiplied"
            )
        return c

    def join(self, layout: Layout, k: int, *parts: list[Part]) -> None:
        """Write Zarr chunk `k` from the slices that several blocks have in it."""
        with self.report("join", -1) as done:
            mine = sorted(
                (part for some in parts for part in some if part.at // layout.chunk == k), key=lambda part: part.at
            )
            layout.write_entries(
                k, np.concatenate([part.indices for part in mine]), np.concatenate([part.data for part in mine])
            )
            done(sum(part.indices.nbytes + part.data.nbytes for part in mine))

    # -- what they share -----------------------------------------------------------------------------------------------

    def resident_b(self, moved: Callable[[int], None] = lambda nbytes: None) -> CSR:
        """Return the whole of B, read once; `moved` is told the bytes if this is the time."""
        return self.whole_b().get(moved)

    def whole_b(self) -> Resident:
        """Return the B that stays. Where a CPU would cast the values of each block, it is cast once, and not shared."""
        with self._lock:
            if self._b is None:
                dtype = self.spec.dtype(self.a, self.b)
                read = "b" in self.spec.per_row.semiring.reads and blocksize(dtype) is None
                casts = read and not self.on_gpu and dtype != self.b.dtype
                check = functools.partial(check_rows, self.engine, name=self.b.url)
                self._b = Resident(self.b, check, "" if casts else self.shared, dtype if casts else None)
            return self._b

    @contextmanager
    def report(self, stage: str, row: int) -> Iterator[Callable[[int], None]]:
        """Time a stage of the block from `row` on: the one place through which every stage reports.

        The caller tells the bytes it moved.
        """
        moved: list[int] = []
        begin, clock = time.time(), time.perf_counter()
        yield moved.append
        self._note(Timing(stage, row, begin, time.perf_counter() - clock, sum(moved)))

    def _note(self, timing: Timing) -> None:
        with self._lock:
            total = self.totals.setdefault(timing.stage, StageTotal(limit=self.limits.get(timing.stage, 0.0)))
            total.seconds += timing.seconds
            total.nbytes += timing.nbytes
            total.tasks += 1
            self.timings.append(timing)

    def _note_gpu(self, row: int, stage: pipeline.Stage) -> None:
        """Take what a stage of a block on the GPU took; such blocks lie within one of ours, which starts at `row`."""
        self._note(Timing(f"gpu {stage.name}", row + stage.start, stage.begin, stage.seconds, stage.nbytes))

    def take_timings(self) -> list[Timing]:
        """Return what was timed since the last call."""
        with self._lock:
            taken, self.timings = self.timings, []
        return taken


def check_rows(engine: str, m: CSR, name: str, first_row: int = 0) -> tuple[int, int]:
    """Return the least column and the one after the greatest; refuse rows that are not canonical."""
    if engine == "scipy" or not m.nnz:  # Numba need not be loaded
        check_canonical(m, name, first_row)
        return (int(m.indices.min()), int(m.indices.max()) + 1) if m.nnz else (0, 0)
    from spdist.kernels.hyspmm.prepare import survey

    low, high, is_canonical = survey(m.indptr, m.indices)
    if not is_canonical or low < 0 or high >= m.ncols:
        check_canonical(m, name, first_row)  # says what is wrong
    return low, high + 1


def _digest(c: CSR) -> bytes:
    """Return a digest of the entries of each row."""
    return hashlib.blake2b(np.diff(c.indptr).astype("<i8", copy=False).tobytes(), digest_size=16).digest()


def shared_slices(at: int, nnz: int, chunk: int) -> list[tuple[int, int]]:
    """Return the ranges of a block that do not fill a Zarr chunk: its head and its tail.

    Examples
    --------
    >>> shared_slices(90, 130, 100)
    [(0, 10), (110, 130)]
    >>> shared_slices(110, 20, 100)
    [(0, 20)]
    """
    head = min(-at % chunk, nnz)
    tail = (at + nnz) % chunk
    if head == nnz:
        return [(0, nnz)] if nnz else []
    return [(0, head)] * (head > 0) + [(nnz - tail, nnz)] * (tail > 0)


def columns_between(m: CSR, low: int, high: int) -> CSR:
    """Return `m` without the entries whose columns are outside ``[low, high)``; columns keep their numbers."""
    keep = (m.indices >= low) & (m.indices < high)
    kept = np.concatenate([[0], np.cumsum(keep)])
    return CSR(kept[m.indptr], m.indices[keep], m.data[keep], m.shape)


def renumber(a: CSR) -> tuple[CSR, Int64Array]:
    """Renumber the columns of `a` to ``0, 1, ...`` in rising order; return them with the columns that occur."""
    if not a.nnz:
        return CSR(a.indptr, a.indices, a.data, (a.nrows, 0)), np.empty(0, np.int64)
    low, high = int(a.indices.min()), int(a.indices.max())
    if high - low <= 8 * a.nnz:
        used = np.zeros(high - low + 1, bool)
        used[a.indices - low] = True
        needed = np.flatnonzero(used) + low
        number = np.cumsum(used, dtype=a.indices.dtype)
        number -= 1
        indices = number[a.indices - low]
    else:
        needed, indices = np.unique(a.indices, return_inverse=True)
        indices = indices.astype(a.indices.dtype)
    return CSR(a.indptr, indices, a.data, (a.nrows, len(needed))), needed.astype(np.int64)


# -- on the worker -----------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Any] = {}
"""The products that this process works on, by name; set by `run.Install`."""


@functools.cache
def gpu_name() -> str | None:
    """Return the name of the GPU of this process; None where there is none, or no CuPy to reach it."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        return str(runtime.getDeviceProperties(runtime.getDevice())["name"].decode())
    except Exception:  # no CuPy, no driver, no device: each has an error of its own
        return None


def stage(product: str, name: str, *arguments: Any) -> Any:
    """Run one stage of a product: what every task in the graph calls."""
    return getattr(PRODUCTS[product], name)(*arguments)
