"""C = A @ B from host memory to host memory, through a GPU that need not hold any of the three.

A is cut into blocks of rows by the memory bound of hySpMM; each is multiplied row by row (`gpu`) in a slot of the GPU's
memory. Several are under way: threads prepare blocks ahead in page-locked memory, one is sent, one is computed, and the
C of a third comes back, so that both directions of the bus are busy while the GPU computes::

    threads    prepare: A's rows, and of B what they ask for
    slot 0     upload ─▶ count, multiply ─▶ download
    slot 1               upload ─▶ count, multiply ─▶ download
    slot 2                         upload ─▶ ...

B stays on the GPU where it fits beside the slots. Else each block brings its rows of B: all from the first to the last
where they lie side by side, else each that it asks for, once.

References
----------
X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015: equations 3 and 5, and the pipeline of section 3.4.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels.cuda.pinned import Bytes, array_at
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import Part, Reduction, of_rows, together
from spdist.kernels.rounding import ceil_div
from spdist.kernels.streaming.partition import (
    BRIEF_GROWTH,
    COUNT_SHARE,
    FIRST_BYTES,
    FIRST_SHARE,
    MARGIN,
    Copier,
    Cutter,
    DeviceDtypes,
    Expected,
    Host,
    Products,
    Staged,
    Stager,
    SubmatrixOffset,
    bad_row,
    cores,
    kinds_of,
    lay_out_whole,
    now,
    pool,
    share_entries,
)
from spdist.kernels.streaming.workspace import PAIRS, device_shares
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR, empty
from spdist.matrices.dtypes import INT32_MAX, Int64Array, index_dtype
from spdist.units import format_bytes

logger = logging.getLogger("spdist")

AHEAD = 2
"""Blocks that are sent before they are computed."""
PAIRS_UNSENT = 3
"""Blocks on the device at once where nothing of them is sent: fewer, for they can be larger."""
SAMPLE_ROWS, SAMPLE_ENTRIES = 2048, {True: 1 << 16, False: 1 << 15}
"""Rows of A, evenly spaced, that the estimate of nnz(C) multiplies, and their entries at most: with B resident, and
where they bring their rows of it."""


SMALL_ENTRIES, SMALL_PRODUCTS = 1 << 20, 1 << 24
"""Entries of A and of B, and products to be expected from these numbers, up to which a product is one block that brings
all of A and B, and no threads are woken; if its slot has room for C whatever that comes to."""


LEARNT_PRODUCTS = 1 << 30
"""Products to be expected up to which nothing is counted, and no sample multiplied, where A lies in the B that is
resident: each block is cut by what the one before came to, and the first, small, says how large C will be."""


class ArenaFullError(Exception):
    """A block needs more device memory than its slot has; `needed` is what it asked for, in bytes, so far."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class Stage(NamedTuple):
    """What one stage of one block took: first row, name, when it began (seconds since 1970), seconds and bytes."""

    start: int
    name: str
    begin: float
    seconds: float
    nbytes: int


Report = Callable[[Stage], None]


# -- the device --------------------------------------------------------------------------------------------------------


class Slot(Protocol):
    """Room of `size` bytes for a block on a device; `held` entries of C, made and kept, took of it what C takes."""

    size: int
    held: int

    def upload(self, staged: Staged) -> None:
        """Send a block; returns at once."""

    def multiply(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Multiply the block that was sent; return the entries of C that are kept.

        What is to be done `meanwhile` is called while the device is busy, if it is. Raises `ArenaFullError` if the slot
        has no room for C.
        """

    def reduce(self, first: int) -> None:
        """Fetch what a reduction makes of C; `first` is the number of row 0 of the product; returns at once."""

    def take_part(self) -> Part:
        """Return what the block has come to."""

    @property
    def is_packing(self) -> bool:
        """Whether C is packed now: `download` would wait for that."""

    def download(self, rows: int, nnz: int, offsets: Any, indices: Any, data: Any) -> None:
        """Fetch the first `rows` rows of C: where each ends, columns, values; returns at once."""

    def wait(self) -> list[Stage]:
        """Wait until all that was asked of the slot is done; say what it took."""

    def take_work(self) -> list[Callable[[], None]]:
        """Return what is left to be done on the host for the block that has come back: its columns, unpacked."""


class Device(Host, Protocol):
    """A device with memory for slots, and perhaps for B; blocks on their way there take `ahead` bytes of the host's."""

    ahead: int

    def slots(self, count: int, size: int, kept: int) -> list[Any]:
        """Return slots of `size` bytes each, or less where the device has less; `kept` bytes stay free for B.

        Those given before lose their memory first.
        """

    def begin(self, spec: ProductSpec, reduction: Reduction | None, shape: tuple[int, int], dtype: Any) -> int:
        """Take what blocks are to be made into; return the bytes of the device that this takes besides B and slots."""

    def keep(self, b: CSR | None, kinds: DeviceDtypes) -> bool:
        """Keep B on the device for the blocks to come, or nothing; return whether B is there."""

    def take_sums(self) -> Part:
        """Return the sums of the columns of all blocks."""


# -- the run -----------------------------------------------------------------------------------------------------------


class Result:
    """C on the host, in page-locked memory that grows where the estimate of its entries was too low."""

    def __init__(
        self, nrows: int, ncols: int, capacity: int, kinds: DeviceDtypes, allocate: Callable[[int], Bytes]
    ) -> None:
        self.kinds, self.ncols, self.allocate = kinds, ncols, allocate
        self.offsets = array_at(allocate(kinds.pointer.itemsize * nrows), 0, nrows, kinds.pointer)
        self.indptr = array_at(allocate(8 * (nrows + 1)), 0, nrows + 1, np.dtype(np.int64))
        self.indptr[0] = 0
        self.rows = self.nnz = 0
        self.indices = np.empty(0, kinds.index)
        self.data = np.empty(0, kinds.value)
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Entries for which there is room."""
        return len(self.indices)

    def grow(self, capacity: int) -> None:
        """Make room; nothing may be on its way to it."""
        indices = array_at(self.allocate(capacity * self.kinds.index.itemsize), 0, capacity, self.kinds.index)
        data = array_at(self.allocate(capacity * self.kinds.value.itemsize), 0, capacity, self.kinds.value)
        indices[: self.nnz], data[: self.nnz] = self.indices[: self.nnz], self.data[: self.nnz]
        self.indices, self.data = indices, data

    def place(self, rows: int, nnz: int) -> tuple[Any, Any, Any]:
        """Return where the next block goes: offsets of its rows, columns, values."""
        out = self.offsets[self.rows : self.rows + rows], self.indices[self.nnz :][:nnz], self.data[self.nnz :][:nnz]
        self.rows, self.nnz = self.rows + rows, self.nnz + nnz
        return out

    def shift(self, first: int, rows: int, base: int) -> None:
        """Turn the offsets inside a block that has come back into those of C."""
        ends = self.indptr[first + 1 : first + rows + 1]
        np.add(self.offsets[first : first + rows], base, out=ends, dtype=np.int64)  # else 32-bit offsets add in 32 bits

    def matrix(self) -> CSR:
        """Return C."""
        shape = self.rows, self.ncols
        indices = self.indices[: self.nnz].astype(index_dtype(self.ncols), copy=False)  # B may have more rows
        return CSR(self.indptr[: self.rows + 1], indices, self.data[: self.nnz], shape)


@dataclass
class InFlightBlock:
    """A block on the device: what was sent; once it is multiplied, which rows of C it fills, and where."""

    slot: Any
    staged: Staged
    filled: tuple[int, int, int] | None = None
    reduced: bool = False
    target: tuple[Any, ...] = ()


@dataclass
class Learnt:
    """What blocks of a product came to, for those of its other rows.

    Attributes
    ----------
    kept, c_ratio, b_ratio : float
        Entries of C that are kept (of a triangle: would be, of whole rows), entries of C, and rows of B's entries that
        are sent, for each product; 0: not known.
    """

    kept: float = 0.0
    c_ratio: float = 0.0
    b_ratio: float = 0.0


@dataclass
class Run:
    """One product, or the first rows of one, through a device.

    Attributes
    ----------
    capacity : int or None
        Entries of C for which there is room; None: all.
    first_row : int
        What messages, and reductions, call row 0 of A.
    spec : ProductSpec
        What becomes of rows on the device.
    alone : bool
        Whether the product was a single block, which brought all of A and B.
    reduction : Reduction, optional
        What is made of C, instead of C.
    within : Within, optional
        Where A lies in B; found out where A is B.
    learnt : Learnt
        What other rows of the product came to; with what these come to, in the end.
    """

    a: CSR
    b: CSR
    device: Device
    memory_limit: int
    pairs: int
    start: int
    capacity: int | None
    report: Report
    first_row: int = 0
    spec: ProductSpec = PLAIN
    reduction: Reduction | None = None
    within: SubmatrixOffset | None = None
    learnt: Learnt = field(default_factory=Learnt)

    def __post_init__(self) -> None:
        plain, semiring = self.spec.plain, self.spec.semiring
        if share_entries(self.a, self.b) and _same(self.a.indptr, self.b.indptr):
            self.within = SubmatrixOffset()
        value = None if plain else semiring.result_dtype(self.a.dtype, self.b.dtype)
        if value is not None:
            self.a, self.b = _without_unread(self.a, self.b, semiring.reads, value)
        self.kinds = kinds_of(self.a, self.b, value)
        if ("a" in semiring.reads) != ("b" in semiring.reads) or self.kinds.a != self.kinds.b:
            self.within = None  # values of one alone
        self.shape = self.a.nrows, self.b.ncols
        self.spec.check(self.shape, self.kinds.value)
        self.spec.check_device()
        self.memory_limit -= self._begin()
        _, self.b_bytes = lay_out_whole(self.b, self.kinds)
        self.resident = device_shares(self.b_bytes, self.memory_limit).kept > 0
        self.flying: collections.deque[InFlightBlock] = collections.deque()  # on their way back
        self.waiting: collections.deque[InFlightBlock] = collections.deque()  # on the device
        self.backlog: collections.deque[tuple[int, int]] = collections.deque()  # rows to prepare once more
        self.leaving: InFlightBlock | None = None  # the last of those: its C is packed, and not sent for yet
        self.finishing: collections.deque[list[Future[None]]] = collections.deque()
        self.slots: list[Any] = []
        self.stager: Any = None
        self.alone = False
        self.per_entry, self.kept, self.sampled = 0.0, 1.0, 0.0
        self.parts: list[Part] = []

    def _begin(self) -> int:
        """Tell the device what is wanted; return the bytes that this takes of its memory."""
        taken = self.device.begin(self.spec, self.reduction, self.shape, self.kinds.value)
        if 2 * taken > self.memory_limit:
            raise MemoryBoundError(
                f"factors of rows and columns, edges, and sums of columns, take {format_bytes(taken)} of the GPU's "
                f"{format_bytes(self.memory_limit)}, and no more than half may go to them: raise memory_limit"
            )
        return taken

    @property
    def _is_empty(self) -> bool:
        return 0 in (self.a.nrows - self.start, self.a.nnz, self.b.nnz)

    def multiply(self) -> CSR:
        """Return C, or as many of its rows as there is room for."""
        if self._is_empty:
            return empty((self.a.nrows - self.start, self.b.ncols), self.kinds.value)
        self._run()
        return self.result.matrix()

    def reduce(self) -> Part:
        """Return what the reduction makes of C."""
        assert self.reduction is not None
        if self._is_empty:
            return of_rows(self.reduction, empty(self.shape, self.kinds.value), self.first_row)
        self._run()
        return self.device.take_sums() if self.reduction == "column_sums" else together(self.reduction, self.parts)

    def _run(self) -> None:
        """Take the rows through the device."""
        try:
            if not (self._is_small and self._run_as_one()):
                self._run_in_blocks()
        except MatrixError:
            self._close()
            Products(self.a, self.b, 1).most(0)  # the error of a bad row of A says which it is
            raise
        except BaseException:
            self._close()
            raise
        for error in self._close():
            raise error

    @property
    def _is_small(self) -> bool:
        """Whether all rows are wanted, and so few entries come to so few products that one block takes least time."""
        a, b = self.a, self.b
        few = max(a.nnz, b.nnz) <= SMALL_ENTRIES and a.nnz * b.nnz <= SMALL_PRODUCTS * b.nrows
        return few and not self.kinds.blocked and self.start == 0 and self.capacity is None

    def _run_as_one(self) -> bool:
        """Take all rows through the device as one block; return False where a slot may have no room for their C."""
        resident, self.resident = self.resident, False
        self._take_slots(self.pairs)
        slot, copier = self.slots[0], Copier(self.a, self.b, self.kinds, self.device, self.within)
        most = Expected(self.a, self.b).most(0)
        if copier.is_sound and 0 <= most <= INT32_MAX and copier.cost(most) <= slot.size:
            self.device.keep(None, self.kinds)
            self.alone = self._finish_alone(self._send(slot, copier.whole()))
        self.resident = resident and not self.alone
        return self.alone

    def _finish_alone(self, flight: InFlightBlock) -> bool:
        """Multiply the only block, and wait until it has come back; return False where its slot had no room for it."""
        try:
            nnz = flight.slot.multiply()
        except ArenaFullError as full:
            logger.info("one block for the product needs more than %d bytes: several", full.needed)
            return False
        self.alone = True
        if self.reduction is None:
            self.result = Result(self.a.nrows, self.b.ncols, nnz, self.kinds, self.device.allocate)
            self._fill(flight, self.a.nrows, nnz)
        else:
            self._reduce(flight)
        self._land_all()
        return True

    def _run_in_blocks(self) -> None:
        """Take the rows through the device, several blocks at once."""
        self.products = self._count()
        try:
            self._settle()
            self.device.note(x for m in self._sent for x in (m.indices, m.data))
            ratio = 0.0 if self.resident else 1.0
            size, ahead = self.slots[0].size, self.device.ahead
            self.cutter = Cutter(self.products, self.a.indptr, self.kinds, size, ahead, b_ratio=ratio)
            self.stager = self._stager(self.a, self.cutter, self.start)
            if self.stager.is_brief:
                self.cutter.growth = BRIEF_GROWTH
            if self.learnt.c_ratio:
                self._recall()
                if self.stager.is_brief:
                    self.cutter.cut_large()
            elif not self._is_learnt_on_the_way:
                self._learn_from_sample()
            self._loop()
        finally:
            self.products.cancel()

    def _count(self) -> Products | Expected:
        """Have the products of rows counted where the entries of A do not tell how many there are."""
        expected = Expected(self.a, self.b)
        if self._is_learnt_on_the_way or expected.is_even:
            return expected
        return Products(self.a, self.b, max(1, int(COUNT_SHARE * cores())))

    @property
    def _nothing_is_sent(self) -> bool:
        """Whether blocks are rows of the B that is on the device."""
        return self.resident and self.within is not None

    @property
    def _sent(self) -> list[CSR]:
        """The operands of which blocks bring rows."""
        return [] if self._nothing_is_sent else [self.a] if self.resident else [self.a, self.b]

    @property
    def _is_learnt_on_the_way(self) -> bool:
        """Whether blocks are cut one by one by what those before came to, and C is not so large as to be estimated."""
        a, b = self.a, self.b
        whole = self.start == 0 and self.capacity is None
        return self._nothing_is_sent and whole and a.nnz * b.nnz <= LEARNT_PRODUCTS * b.nrows

    def _close(self) -> list[Exception]:
        """Wait for all that is under way, whatever fails; return the errors."""
        if self.stager is not None:
            self.stager.close()
        errors = []
        for wait_for in [slot.wait for slot in self.slots] + [job.result for jobs in self.finishing for job in jobs]:
            try:
                wait_for()
            except Exception as error:
                errors.append(error)
        return errors

    def _settle(self) -> None:
        """Take the device's memory: for slots, and for B if it stays there."""
        self._take_slots(min(self.pairs, PAIRS_UNSENT) if self._nothing_is_sent else self.pairs)
        if self.resident and self.device.keep(self.b, self.kinds):
            return
        if self.resident:  # but another program has the room
            self.resident = False
            self._take_slots(self.pairs)
        self._send_b_in_parts()

    def _send_b_in_parts(self) -> None:
        """Let blocks bring their rows of B, which will be copied as they are."""
        self.resident = False
        self.device.keep(None, self.kinds)
        indices, data = self.b.indices, self.b.data
        indices, data = indices.astype(self.kinds.index, copy=False), data.astype(self.kinds.b, copy=False)
        self.b = CSR(self.b.indptr, indices, data, self.b.shape)

    def _take_slots(self, pairs: int) -> None:
        """Take the slots of so many pairs; the only one of a single pair has all the room there is."""
        shares = device_shares(self.b_bytes if self.resident else 0, self.memory_limit, pairs)
        self.slots = self.device.slots(pairs, shares.slot, shares.kept)
        self.turns = itertools.cycle(self.slots)

    def _stager(self, a: CSR, cutter: Cutter, first: int = 0) -> Stager:
        within = self.within if a is self.a else None  # and not a sample of it
        return Stager(a, self.b, self.kinds, self.resident, cutter, self.device, first, within)

    def _learn_from_sample(self) -> None:
        """Multiply a sample of the rows, so that the first blocks, and C, get about the room that they need."""
        rows = _sample(self.a, self.start, SAMPLE_ENTRIES[self.resident])
        sample = _rows_of(self.a, rows)
        cutter = replace(self.cutter, products=Products(sample, self.b, 1, rows), indptr=sample.indptr)
        self.per_entry = cutter.products.between(0, sample.nrows) / max(sample.nnz, 1)
        stop = cutter.stop(0, cutter.room / 2)
        if not cutter.products.between(0, stop):
            return
        staged = self._stager(sample, cutter).stage(0, stop)
        self.slots[0].upload(staged)
        try:
            self._learn(staged, self.slots[0])
        except ArenaFullError:
            self.cutter.c_ratio = self.kept = 1 / FIRST_SHARE  # little is known: C grows as blocks come back
        self.slots[0].wait()
        self.sampled = self.kept
        if not self.resident:
            self._learn_share_of_b()

    def _learn_share_of_b(self) -> None:
        """Count the rows of B that a first block asks for: those of the sample share fewer than neighbours do."""
        cutter, first = self.cutter, self.start
        cutter.b_ratio = 0.0
        stop = cutter.stop(first, min(FIRST_BYTES, cutter.room / FIRST_SHARE))
        if products := cutter.products.between(first, stop):
            cutter.b_ratio = self.stager.entries_of_b(first, stop) / products
        cutter.b_ratio = cutter.b_ratio or 1.0

    def _learn(self, staged: Staged, slot: Any, meanwhile: Callable[[], None] | None = None) -> int:
        """Multiply a block that was sent, take what it came to, and return the entries that are kept."""
        nnz: int = slot.multiply(meanwhile)
        self.cutter.learn(staged, slot.held)
        if staged.products:
            self.kept = nnz / (staged.products * self._share(staged.start, staged.stop))
            self.learnt.kept, self.learnt.c_ratio = self.kept, self.cutter.c_ratio
            self.learnt.b_ratio = self.cutter.b_ratio or self.learnt.b_ratio
        return nnz

    def _share(self, start: int, stop: int) -> float:
        """Return how much of rows is made where only a triangle is, if columns are spread evenly."""
        if self.spec.diagonal is None:
            return 1.0
        return max(1 - (self.spec.diagonal + (start + stop) / 2) / self.b.ncols, 0.5 / self.b.ncols)

    def _recall(self) -> None:
        """Expect of the first blocks what others of the product came to."""
        self.kept, self.cutter.c_ratio = self.learnt.kept, self.learnt.c_ratio
        self.cutter.b_ratio = 0.0 if self.resident else self.learnt.b_ratio or 1.0

    @functools.cached_property
    def total(self) -> int:
        """Products in all, or those expected; waits until they are counted."""
        return self.products.between(self.start, self.a.nrows)

    @functools.cached_property
    def most(self) -> int:
        """Entries of C that there may be."""
        top_n, inside = self.spec.top_n, self.spec.inside
        total = self.products.most(self.start)
        total = total if top_n is None else min(total, top_n * (self.a.nrows - self.start))
        total = total if inside is None else min(total, inside.nnz)
        return total if self.capacity is None else min(self.capacity, total)

    @functools.cached_property
    def result(self) -> Result:
        """C, with the room that it should need."""
        kept = self.sampled or self.kept  # the first rows are not like all, as those at the edge of a grid
        kept *= self._share(self.start, self.a.nrows)
        expected = int(MARGIN * kept * self._expect_products()) + (1 << 20)
        capacity = expected if self.capacity is None else min(self.capacity, expected)
        if not isinstance(self.products, Expected) and self.products.look()[0] == self.a.nrows:
            capacity = min(capacity, self.products.most(self.start))
        return Result(self.a.nrows - self.start, self.b.ncols, capacity, self.kinds, self.device.allocate)

    def _expect_products(self) -> int:
        """Return about how many products there are, without waiting until all are counted."""
        row, known = self.products.look()
        row = max(row, self.start)
        entries, left = (int(self.a.indptr[i] - self.a.indptr[j]) for i, j in ((row, 0), (-1, row)))
        return known - self.products.between(0, self.start) + int(left * max(known / max(entries, 1), self.per_entry))

    def _loop(self) -> None:
        """Keep one block on its way to the device, one computed, and others on their way back."""
        more = True
        while more:
            self._send_ahead()
            if not self.waiting:
                break
            flight = self.waiting.popleft()
            try:
                more = self._compute(flight)
            except _RowTooLongError as error:
                later = [(other.staged.start, other.staged.stop) for other in self.waiting]
                self.backlog.extendleft(reversed([(error.staged.start, flight.staged.stop), *later]))
                self.waiting.clear()
                self.backlog.extend(self._widen(error))
        self._land_all()

    def _send_ahead(self) -> None:
        """Send the next blocks, up to those that are to wait on the device."""
        ahead = 1 if self._nothing_is_sent else AHEAD
        while len(self.waiting) < min(ahead, max(1, len(self.slots) - 1)):
            if not self.stager.is_ready:
                self._depart()
            staged = self.stager.stage(*self.backlog.popleft()) if self.backlog else self.stager.take()
            if staged is None:
                break
            self.waiting.append(self._send(next(self.turns), staged))

    def _meanwhile(self) -> None:
        """Do what else there is to do while the device multiplies."""
        self._depart()
        prepared = self.stager.is_ready or self.stager.is_brief  # else the device might wait for what is not
        if prepared and len(self.slots) > 1:  # and not multiplied in the only one
            self._send_ahead()

    def _send(self, slot: Any, staged: Staged) -> InFlightBlock:
        """Send a block to a slot, once what was there has come back."""
        self._land(slot)
        slot.upload(staged)
        return InFlightBlock(slot, staged)

    def _widen(self, error: _RowTooLongError) -> Iterable[tuple[int, int]]:
        """Go on with one slot that has all the room, then without B, for the sake of a long row.

        Returned are the blocks to prepare again.
        """
        row = self.first_row + error.staged.start
        if len(self.slots) == 1 and not self.resident:
            products = Products(self.a.rows(error.staged.start, error.staged.stop), self.b, 1).between(0, 1)
            raise MemoryBoundError(
                f"row {row:,} of A expands to {products:,} products and needs more than "
                f"{format_bytes(error.needed)} on the GPU, but memory_limit={format_bytes(self.memory_limit)} leaves "
                f"{format_bytes(self.slots[0].size)} for a block: raise memory_limit, or cut the inner dimension with "
                f"a grid"
            )
        self._land_all()
        for slot in self.slots:
            slot.wait()
        again: list[tuple[int, int]] = []
        if len(self.slots) > 1:
            logger.info("row %d needs more than a slot: one block at a time from here on", row)
        else:
            logger.info("row %d needs the room of B: blocks bring their rows of B from here on", row)
            again = [(staged.start, staged.stop) for staged in self.stager.recall()]
            self._send_b_in_parts()
            self.cutter.b_ratio = 1.0
            self.stager = self._stager(self.a, self.cutter, self.stager.at)
        self._take_slots(1)
        self.cutter = self.stager.cutter = replace(self.cutter, room=self.slots[0].size)
        return again

    def _wait(self) -> None:
        for slot in self.slots:
            slot.wait()

    def _land_all(self) -> None:
        while self.flying:
            self._land(self.flying[0].slot)

    def _land(self, slot: Any) -> None:
        """Wait for a slot, and for those that were sent before it."""
        while any(flight.slot is slot for flight in self.flying):
            flight = self.flying.popleft()
            if flight is self.leaving:
                self._depart()
            for stage in flight.slot.wait():
                self.report(stage)
            self.report(Stage(flight.staged.start, "prepare", flight.staged.begin, flight.staged.seconds,
                              flight.staged.nbytes))  # fmt: skip
            if flight.filled:
                jobs = [functools.partial(self.result.shift, *flight.filled), *flight.slot.take_work()]
                submit = now if self.alone else pool(cores(), "finish").submit
                self.finishing.append([submit(job) for job in jobs])
                self._finish(PAIRS)  # else C would come back faster than it is unpacked
            if flight.reduced and self.reduction != "column_sums":
                self.parts.append(flight.slot.take_part())

    def _finish(self, most: int) -> None:
        """Wait until no more than so many blocks that came back are worked on by the host."""
        while len(self.finishing) > most:
            wait(self.finishing[0])
            for job in self.finishing.popleft():
                job.result()

    def _compute(self, flight: InFlightBlock) -> bool:
        """Multiply a block that was sent and send for its C; return whether there is room for more."""
        needed = 0
        try:
            nnz = self._learn(flight.staged, flight.slot, self._meanwhile)
        except ArenaFullError as full:
            needed = full.needed
        if needed:  # not in the handler: the error's frames hold memory of the slot
            return self._split(flight, needed)
        if self.reduction is None:
            return self._fetch(flight, nnz)
        self._reduce(flight)
        return True

    def _reduce(self, flight: InFlightBlock) -> None:
        """Send for what the reduction makes of a block's C."""
        flight.slot.reduce(self.first_row)
        flight.reduced = True
        self.flying.append(flight)

    def _split(self, flight: InFlightBlock, needed: int) -> bool:
        """Multiply the halves of a block whose C has no room in its slot."""
        start, stop = flight.staged.start, flight.staged.stop
        if stop - start == 1:
            raise _RowTooLongError(flight.staged, needed)
        logger.info("rows %d to %d need more than %d bytes: split", start, stop - 1, flight.slot.size)
        middle = self.cutter.products.middle(start, stop)
        halves = (start, middle), (middle, stop)
        return all(self._compute(self._send(flight.slot, self.stager.stage(*half))) for half in halves)

    def _fetch(self, flight: InFlightBlock, nnz: int) -> bool:
        """Send for C of a block, or for the rows that there is room for."""
        result, rows = self.result, flight.staged.stop - flight.staged.start
        if result.nnz + nnz > result.capacity:
            self._land_all()
            self._finish(0)
            if result.nnz + nnz > self.most:
                return self._fetch_some(flight, rows)
            done = self.products.between(self.start, flight.staged.stop)
            shares = self._share(self.start, self.a.nrows) / self._share(self.start, flight.staged.stop)
            expected = (result.nnz + nnz) * (self.total / max(done, 1)) * shares
            result.grow(min(int(MARGIN * expected) + 1, self.most))
        self._fill(flight, rows, nnz)
        return True

    def _fill(self, flight: InFlightBlock, rows: int, nnz: int) -> None:
        """Send for the first `rows` rows of a block; if it is being packed, once the next one is computed."""
        base, first = self.result.nnz, self.result.rows
        flight.filled = first, rows, base
        flight.target = rows, nnz, *self.result.place(rows, nnz)
        self._depart()
        self.flying.append(flight)
        self.leaving = flight
        if not flight.slot.is_packing:
            self._depart()

    def _depart(self) -> None:
        """Send for the C of the block that was computed last, unless that is done."""
        flight, self.leaving = self.leaving, None
        if flight is not None:
            flight.slot.download(*flight.target)

    def _fetch_some(self, flight: InFlightBlock, rows: int) -> bool:
        """Fetch the rows of a block for which there is room: the product ends there."""
        result = self.result
        ends = np.empty(rows, self.kinds.pointer)
        flight.slot.download(rows, 0, ends, result.indices[:0], result.data[:0])
        for stage in flight.slot.wait():
            if stage.name != "download":  # that of the entries is to come
                self.report(stage)
        fitting = int(np.searchsorted(ends, self.most - result.nnz, side="right"))
        if fitting == 0 and result.rows == 0:
            fitting = 1
        if fitting:
            nnz = int(ends[fitting - 1])
            result.grow(max(result.nnz + nnz, result.capacity))
            self._fill(flight, fitting, nnz)
        return False


class _RowTooLongError(Exception):
    """A single row does not fit its slot."""

    def __init__(self, staged: Staged, needed: int) -> None:
        super().__init__(staged, needed)
        self.staged, self.needed = staged, needed


def _sample(a: CSR, start: int, entries: int) -> Int64Array:
    """Return evenly spaced rows from `start` on, of about so many entries at most."""
    rows = np.unique(np.linspace(start, a.nrows - 1, min(SAMPLE_ROWS, a.nrows - start)).astype(np.int64))
    lengths = a.indptr[rows + 1] - a.indptr[rows]
    bad = (lengths < 0) | (a.indptr[rows + 1] > a.nnz)
    if bad.any():
        raise bad_row(rows[np.argmax(bad)], a.ncols)
    step = max(1, ceil_div(int(lengths.sum()), entries))
    return rows[step // 2 :: step] if step < len(rows) else rows[:1]


def _rows_of(a: CSR, rows: Int64Array) -> CSR:
    """Return some rows of a matrix."""
    lengths = a.indptr[rows + 1] - a.indptr[rows]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    at = np.repeat(a.indptr[rows] - indptr[:-1], lengths) + np.arange(indptr[-1])
    return CSR(indptr, a.indices[at], a.data[at], (len(rows), a.ncols))


def _without_unread(a: CSR, b: CSR, reads: str, dtype: np.dtype[Any]) -> tuple[CSR, CSR]:
    """Return the operands with zeros for values that are not looked at, which need not fit the dtype of C."""
    values = [m.data if name in reads else np.zeros(m.nnz, dtype) for name, m in (("a", a), ("b", b))]
    if a.data is b.data and not reads:
        values[1] = values[0]
    return CSR(a.indptr, a.indices, values[0], a.shape), CSR(b.indptr, b.indices, values[1], b.shape)


def _same(a: Int64Array, b: Int64Array) -> bool:
    """Return whether offsets are the same."""
    return a is b or np.array_equal(a, b)


def ignore(stage: Stage) -> None:
    """Take no notice of what a stage took."""


def multiply(
    a: CSR, b: CSR, device: Any, *, pairs: int = PAIRS, report: Report = ignore, spec: ProductSpec = PLAIN
) -> CSR:
    """Return ``a @ b``, or what the options make of it; arrays of NumPy in and out.

    Parameters
    ----------
    a, b : CSR
        On the host. Rows of A need not be sorted and may hold duplicates; those of B are canonical. Values may be dense
        blocks that fit (`dtypes.block_dtype`); rows, columns and entries are then of blocks.
    device : gpu_device.Gpu
        With its memory limit, which holds whatever the sizes of A, B and C.
    pairs : int
        Blocks on the GPU at once.
    report : callable, optional
        Called with a `Stage` for each stage of each block.
    spec : ProductSpec
        What they leave out of C does not come back from the GPU.

    Returns
    -------
    CSR
        Canonical, with the structural pattern, ``index_dtype(b.ncols)`` and ``result_dtype``; in page-locked memory,
        which is used again when the arrays are gone.

    Raises
    ------
    MatrixError
        If shapes, dtypes or columns do not fit, or B is not canonical.
    InputError
        If the GPU has no kernels for the options.
    MemoryBoundError
        If one row alone does not fit in the limit; names the bytes.
    """
    return multiply_rows(a, b, 0, None, device, pairs=pairs, report=report, spec=spec)


def reduce(
    a: CSR, b: CSR, what: Reduction, device: Any, *, pairs: int = PAIRS, report: Report = ignore,
    spec: ProductSpec = PLAIN, first_row: int = 0, within: SubmatrixOffset | None = None, learnt: Learnt | None = None,
) -> Part:  # fmt: skip
    """Return what a reduction makes of ``a @ b``, or of what the options make of that; C stays on the GPU.

    Parameters
    ----------
    what : Reduction
    first_row : int
        The number of A's first row among all rows.
    within, learnt
        As for `multiply_rows`.

    Other arguments, and errors, as for `multiply`.
    """
    check_product_shapes(a.shape, b.shape)
    limit = device.memory_limit
    rows = pairs, 0, None, report, first_row, spec
    return Run(a, b, device, limit, *rows, what, within, learnt or Learnt()).reduce()


def multiply_rows(
    a: CSR, b: CSR, start: int, capacity: int | None, device: Any, *, pairs: int = PAIRS, report: Report = ignore,
    first_row: int = 0, spec: ProductSpec = PLAIN, within: SubmatrixOffset | None = None, learnt: Learnt | None = None,
) -> CSR:  # fmt: skip
    """Return as many whole rows of ``a @ b``, from `start` on, as fit in `capacity` entries; None: all.

    A first row longer than that is returned whole, alone. The message that a row does not fit calls row 0 of A
    `first_row`. `within` says where all of A lies in B, if it does: it is not sent then. `learnt` goes from call to
    call for rows of one product. Arguments else as for `multiply`.

    Raises
    ------
    InputError
        If `start` is not in the range, `capacity` is negative, or `pairs` is not at least 1.
    """
    if not 0 <= start <= a.nrows or (capacity or 0) < 0 or pairs < 1:
        raise InputError(f"start={start:,} must lie in [0, {a.nrows:,}], capacity={capacity} and pairs={pairs} above 0")
    check_product_shapes(a.shape, b.shape)
    limit = device.memory_limit
    rows = pairs, start, capacity, report, first_row, spec
    return Run(a, b, device, limit, *rows, within=within, learnt=learnt or Learnt()).multiply()
