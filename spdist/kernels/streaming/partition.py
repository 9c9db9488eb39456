"""Blocks of rows for a device that need not hold the operands: how A is cut, and how the CPU prepares a block.

Blocks are cut while the products of later rows are still counted, by what the blocks before came to. Prepared are the
rows of A and, unless B stays on the device, the rows of B that they ask for: all from the first to the last where they
lie side by side, else each once. Everything here is arrays of the host; `outofcore` has the pipeline.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.kernels.cuda.constants import aligned
from spdist.kernels.cuda.pinned import Bytes, array_at
from spdist.kernels.streaming.workspace import PAIR_BYTES
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import (
    INT32_MAX,
    Int64Array,
    block_dtype,
    blocksize,
    index_dtype,
    number_dtype,
    result_dtype,
)

BLOCK_BYTES = 320 << 20
"""Bytes of a block that are aimed at where the slot has room for more and B is resident; else larger blocks repeat less
of B."""
FIRST_SHARE, GROWTH, BRIEF_GROWTH = 12, 7 / 6, 2.0
"""The first block is so many times smaller, each one after it so many times as large as the one before: all threads
begin at once, and the device waits for what takes one thread long; and so many times where nothing needs preparing."""
FIRST_BYTES = 48 << 20
"""But not smaller than this: for less, the launches would take longer than the copies."""
LAST_BYTES = 64 << 20
"""Nor are the last blocks, each of which is at most half of what is left."""
MARGIN = 1.25
"""By how much what is expected of a block is raised."""
ROW_BYTES = 64
"""Device bytes that the kernels take for a row of C, its offsets included."""
SCRATCH_BYTES = 24 << 20
"""And those they take whatever the rows."""
BLOCK_SCRATCH = 24
"""And those for an entry of C that is a dense block."""
WINDOW_SHARE = 1.3
"""Rows of B are sent from the first to the last if these are at most so many times those asked for."""
AHEAD_BYTES = 4 << 30
"""Page-locked memory for blocks that are prepared ahead, and on their way, where the device has no limit for it."""
LEAST_AHEAD = 4
"""Blocks that this must hold: one is prepared, one waits, two are on their way."""
MOST_CUT = 2
"""Blocks that are cut before the next one is handed out, if that is prepared."""
FINE = 32
"""Parts of its rows to which a block's end is found."""
NICE = 10
"""Priority of the threads that prepare blocks, as `nice` has it."""
STAGE_SHARE, COUNT_SHARE = 1.0, 0.5
"""Threads a core: those that prepare blocks, and those that count products."""
EVEN, SAMPLE_OF_B = 4, 2048
"""Products of A's rows are not counted if none of so many rows of B is more than so many times as long as the mean."""
FIRST_ENTRIES, PARALLEL_ENTRIES = 1 << 16, 1 << 20
"""Entries of A whose products a thread counts at a time: the first, and the most."""
ALONE_ENTRIES = 1 << 18
"""Entries of A up to which the caller counts them all: to wake threads would take longer."""


# -- blocks ------------------------------------------------------------------------------------------------------------


Send = tuple[npt.NDArray[Any], int]


class Host(Protocol):
    """What a device knows of the host's memory."""

    def allocate(self, size: int, /) -> Bytes:
        """Return host memory from which the device copies."""

    def note(self, arrays: Iterable[Any], /) -> None:
        """Take note of a product that reads arrays: the next one may find them locked."""

    def is_locked(self, array: Any, /) -> bool:
        """Whether the device copies from an array as it is."""


class Part(NamedTuple):
    """A matrix inside a block's memory: its shape, entries, their dtype, and the byte where each array begins."""

    nrows: int
    ncols: int
    nnz: int
    value: np.dtype[Any]
    data: int
    indices: int
    indptr: int
    end: int


@dataclass(frozen=True)
class DeviceDtypes:
    """Dtypes on the device: of C's values, columns and offsets, and of the values of A and B.

    These are all one dtype, unless values are dense blocks (`block_dtype`): then A and B have blocks of their own.
    """

    value: np.dtype[Any]
    index: np.dtype[Any]
    pointer: np.dtype[Any]
    a: np.dtype[Any]
    b: np.dtype[Any]

    @property
    def blocked(self) -> bool:
        """Whether values are dense blocks."""
        return blocksize(self.value) is not None

    @property
    def entry(self) -> int:
        """Bytes of an entry of C."""
        return self.value.itemsize + self.index.itemsize

    @property
    def a_entry(self) -> int:
        """Bytes of an entry of A."""
        return self.a.itemsize + self.index.itemsize

    @property
    def b_entry(self) -> int:
        """Bytes of an entry of B."""
        return self.b.itemsize + self.index.itemsize


def kinds_of(a: CSR, b: CSR, value: np.dtype[Any] | None = None) -> DeviceDtypes:
    """Return the dtypes of a product on the device; `value` of its values, by default of plus and times."""
    value = result_dtype(a.dtype, b.dtype) if value is None else value
    wide = max(b.nrows, b.ncols) > INT32_MAX
    index = np.dtype(np.int64) if wide else index_dtype(b.ncols)
    # 31 bits count the entries of a block's A, but for a single row: the cutter sees to it.
    longest = int(np.max(np.diff(a.indptr))) if a.nnz > INT32_MAX else 0
    pointer = np.dtype(np.int64 if max(b.nnz, longest, b.ncols if wide else 0) > INT32_MAX else np.int32)
    sizes = (blocksize(m.dtype) for m in (a, b))
    number = number_dtype(value)
    return DeviceDtypes(
        value, index, pointer, *(number if size is None else block_dtype(number, size) for size in sizes)
    )


def lay_out(nrows: int, ncols: int, nnz: int, value: np.dtype[Any], kinds: DeviceDtypes, at: int = 0) -> Part:
    """Place the arrays of a matrix from byte `at` on."""
    indices = at + aligned(nnz * value.itemsize)
    indptr = indices + aligned(nnz * kinds.index.itemsize)
    return Part(nrows, ncols, nnz, value, at, indices, indptr, indptr + aligned((nrows + 1) * kinds.pointer.itemsize))


def lay_out_whole(b: CSR, kinds: DeviceDtypes) -> tuple[Part, int]:
    """Return where the arrays of a B that stays on the device lie, and the bytes of all; the last count its pairs."""
    part = lay_out(b.nrows, b.ncols, b.nnz, kinds.b, kinds)
    return part, part.end + (aligned(PAIR_BYTES * b.nnz) if kinds.blocked else 0)


@dataclass
class Staged:
    """A block as the CPU prepared it.

    Attributes
    ----------
    start, stop, products : int
        Its rows, and the products they expand to.
    sends : list of (array, int)
        Page-locked arrays, and the bytes of the block's device memory from which on each goes.
    a, b : Part
        Where A and B come to lie there; no B where it is resident.
    begin, seconds : float
        When its preparation began, in seconds since 1970, and how long it took.
    low : int
        What is to be taken off A's columns, where these are not sent apart from B's.
    inside : int, optional
        Where A lies in the B that is resident, the row of B at which it begins: nothing is sent.
    """

    start: int
    stop: int
    products: int
    sends: list[Send]
    a: Part
    b: Part | None
    begin: float
    seconds: float = 0.0
    low: int = 0
    inside: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are sent, and gaps."""
        return (self.b or self.a).end


# -- how rows are cut --------------------------------------------------------------------------------------------------


@functools.cache
def pool(count: int, task: str = "stage") -> ThreadPoolExecutor:
    """Return threads; tasks have their own, for the first block must not wait until all is counted.

    They leave a core to whoever needs one: the thread that keeps the device busy must not wait for its turn.
    """
    return ThreadPoolExecutor(count, f"spdist-{task}", _stand_back)


def _stand_back() -> None:
    with contextlib.suppress(OSError):  # of a process that stands back further already, and may not come forward
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Products:
    """The products of the rows before each row, counted by threads from the first row on while others look at them.

    Parameters
    ----------
    a, b : CSR
    threads : int
    rows : (nrows,) int64, optional
        What messages call the rows of A, if not by their places.

    Attributes
    ----------
    before : (nrows + 1,) int64
        Valid up to the last row that `through` was called for.
    """

    def __init__(self, a: CSR, b: CSR, threads: int, rows: Int64Array | None = None) -> None:
        from spdist.kernels.hyspmm.prepare import count_products

        self.before = np.zeros(a.nrows + 1, np.int64)
        self.ncols, self.names, left = a.ncols, rows, (a.indptr, a.indices)
        # The first parts are small: the first block waits for them.
        sizes = np.minimum(FIRST_ENTRIES * 2.0 ** np.arange(64 + a.nnz // PARALLEL_ENTRIES), PARALLEL_ENTRIES)
        ends = np.cumsum(sizes)
        cuts = np.searchsorted(a.indptr, ends[ends < a.nnz].astype(np.int64))
        starts = np.unique(np.concatenate([[0], cuts, [a.nrows]]))
        submit = pool(threads, "count").submit if a.nnz > ALONE_ENTRIES else now
        self.coming = collections.deque(
            (start, stop, submit(count_products, left, b.indptr, start, stop, 0, 0, self.before))
            for start, stop in itertools.pairwise(starts.tolist())
        )
        self.rows = 0

    def through(self, row: int) -> None:
        """Wait until the products of the rows before `row` are known.

        Raises
        ------
        MatrixError
            If offsets or columns of A are out of range.
        """
        while self.rows < row:
            self._add()

    def look(self) -> tuple[int, int]:
        """Return up to which row products are known by now, and how many there are."""
        while self.coming and self.coming[0][2].done():
            self._add()
        return self.rows, int(self.before[self.rows])

    def _add(self) -> None:
        """Wait for the next rows to be counted."""
        start, stop, future = self.coming.popleft()
        total, _, bad = future.result()
        if total < 0:
            raise bad_row(bad if self.names is None else self.names[bad], self.ncols)
        self.before[start + 1 : stop + 1] += self.before[start]
        self.rows = stop

    def between(self, start: int, stop: int) -> int:
        """Return the products of rows [start, stop)."""
        self.through(stop)
        return int(self.before[stop] - self.before[start])

    def middle(self, start: int, stop: int) -> int:
        """Return the row that halves the products of rows [start, stop); one between them."""
        return _middle(self.before, start, stop)

    def most(self, start: int) -> int:
        """Return how many products the rows from `start` on have; waits until they are counted."""
        return self.between(start, len(self.before) - 1)

    def cancel(self) -> None:
        """Wait for the threads, whose arrays are about to go."""
        for _, _, future in self.coming:
            future.cancel()
        wait(future for _, _, future in self.coming)


class Expected:
    """The products of rows as B's mean row makes one expect them, in the place of `Products`: nothing is counted.

    Parameters
    ----------
    a, b : CSR
    """

    def __init__(self, a: CSR, b: CSR) -> None:
        self.indptr, self.b_indptr, self.mean = a.indptr, b.indptr, b.nnz / max(b.nrows, 1)

    @property
    def is_even(self) -> bool:
        """Whether rows of B, by a sample, are so much alike that the entries of A tell how many products there are."""
        rows = np.linspace(0, len(self.b_indptr) - 2, SAMPLE_OF_B).astype(np.int64)
        lengths = self.b_indptr[rows + 1] - self.b_indptr[rows]
        return bool(lengths.max() <= EVEN * self.mean)

    def look(self) -> tuple[int, int]:
        """Return the number of all rows, and how many products are expected of them."""
        nrows = len(self.indptr) - 1
        return nrows, self.between(0, nrows)

    def between(self, start: int, stop: int) -> int:
        """Return the products expected of rows [start, stop)."""
        return int(float(self.indptr[stop] - self.indptr[start]) * self.mean)

    def middle(self, start: int, stop: int) -> int:
        """Return the row that halves the entries of rows [start, stop); one between them."""
        return _middle(self.indptr, start, stop)

    def most(self, start: int) -> int:
        """Return how many products the rows from `start` on have at most."""
        from spdist.kernels.hyspmm.prepare import longest_row

        return int(self.indptr[-1] - self.indptr[start]) * int(longest_row(self.b_indptr))

    def cancel(self) -> None:
        """Do nothing: no thread is at work."""


def _middle(before: Int64Array, start: int, stop: int) -> int:
    """Return the row that halves what rows [start, stop) have, by the sums `before`; or their number, of nothing."""
    first, last = int(before[start]), int(before[stop])
    if first == last:
        return (start + stop) // 2
    half = int(np.searchsorted(before[start : stop + 1], (first + last) // 2))
    return start + min(max(half, 1), stop - start - 1)


def bad_row(row: Any, ncols: int) -> MatrixError:
    """Return the error of a row of A whose offsets or columns are out of range."""
    return MatrixError(f"row {int(row):,} of A: offsets or columns out of range; A has {ncols:,} columns")


def bad_b() -> MatrixError:
    """Return the error of a B whose offsets fall, or pass its entries."""
    return MatrixError("offsets of B are out of range: rebuild it, for instance with scipy.sparse.csr_array(B)")


def now(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function at once, as an executor's `submit` does later."""
    future: Future[Any] = Future()
    future.set_result(function(*args))
    return future


@dataclass
class Cutter:
    """Cuts rows into blocks that should fit a slot, by what the blocks before came to.

    Attributes
    ----------
    products : Products or Expected
    indptr : (nrows + 1,) int64
        Of A.
    kinds : Kinds
    room : int
        Bytes of a slot.
    ahead : int
        Bytes of the host's memory for blocks that are sent.
    c_ratio, b_ratio : float
        Entries of C, and entries of B that are sent, for each product.
    growth : float
        How many times as large as a block the next one is.
    last : float
        Bytes of the last blocks.
    """

    products: Products | Expected
    indptr: Int64Array
    kinds: DeviceDtypes
    room: int
    ahead: int = AHEAD_BYTES
    c_ratio: float = 1.0
    b_ratio: float = 0.0
    growth: float = GROWTH
    last: float = field(init=False)
    _next: float = field(init=False)
    _rows: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self._next, self.last = min(self._most, max(FIRST_BYTES, self._most / FIRST_SHARE)), LAST_BYTES

    def cut_large(self) -> None:
        """Cut no small blocks, neither first nor last: where other threads are as busy, launches cost more."""
        self._next, self.last = self._most, self._most / 2

    @property
    def _most(self) -> float:
        room = self.room - min(SCRATCH_BYTES, self.room // 4)
        return room if self.b_ratio else min(room, MARGIN * BLOCK_BYTES)

    def cost(self, start: int, stop: int) -> float:
        """Return the device bytes expected of a block."""
        entries = MARGIN * self.products.between(start, stop) * self.c_ratio
        nbytes = self.kinds.entry + (BLOCK_SCRATCH if self.kinds.blocked else 0)
        return self.sent(start, stop) + entries * nbytes + (stop - start) * ROW_BYTES

    def sent(self, start: int, stop: int) -> float:
        """Return the bytes that are expected to be sent of a block."""
        entries, pointer = int(self.indptr[stop] - self.indptr[start]), self.kinds.pointer.itemsize
        for_b = MARGIN * self.b_ratio * self.products.between(start, stop) * (self.kinds.b_entry + 1.0)
        return for_b + entries * (self.kinds.a_entry + pointer) + (stop - start + 1) * pointer

    def _fits(self, start: int, stop: int, room: float) -> bool:
        return self.cost(start, stop) <= room and LEAST_AHEAD * self.sent(start, stop) <= self.ahead

    def is_ready(self, start: int) -> bool:
        """Whether the block from `start` on can be cut without waiting for products to be counted."""
        return self.products.look()[0] >= min(start + 4 * self._rows, len(self.indptr) - 1)

    def next(self, start: int) -> int:
        """Return where the block from `start` on ends: one row at least, products and entries that 31 bits count."""
        nrows = len(self.indptr) - 1
        if self.products.look()[0] == nrows and (left := self.cost(start, nrows)) > 2 * self.last:
            self._next = min(self._next, left / 2)  # nothing else goes on while the last block comes back
        stop = self.stop(start, self._next)
        if self.indptr[stop] - self.indptr[start] > INT32_MAX:
            stop = int(np.searchsorted(self.indptr, int(self.indptr[start]) + INT32_MAX, side="right")) - 1
        self._next = min(self.growth * self._next, self._most)
        while stop > start + 1 and self.products.between(start, stop) > INT32_MAX:
            stop = self.products.middle(start, stop)
        return max(start + 1, stop)

    def stop(self, start: int, room: float) -> int:
        """Return about the last row up to which a block costs at most `room`; `start` if one row costs more."""
        left = len(self.indptr) - 1 - start
        step = min(self._rows, left)
        while step > 1 and not self._fits(start, start + step, room):
            step //= 2
        while step < left and self._fits(start, start + min(2 * step, left), room):
            step = min(2 * step, left)
        # To find the very last would take more looks, of some microseconds each.
        rows = range(start + step, start + min(2 * step, left) + 1, max(1, step // FINE))
        fitting = bisect.bisect_left(rows, True, key=lambda stop: not self._fits(start, stop, room))
        self._rows = max(1, rows[fitting - 1] - start) if fitting else 1
        return rows[fitting - 1] if fitting else start

    def learn(self, staged: Staged, nnz: int) -> None:
        """Take what a block came to."""
        if staged.products:
            self.c_ratio = nnz / staged.products
            self.b_ratio = staged.b.nnz / staged.products if staged.b else 0.0


# -- preparation -------------------------------------------------------------------------------------------------------


class SubmatrixOffset(NamedTuple):
    """Where A lies in B, entry by entry: the row of B that is A's first, and by how much B's columns are higher."""

    row: int = 0
    low: int = 0


def share_entries(a: CSR, b: CSR) -> bool:
    """Whether two matrices are of the same columns and values, in memory."""
    return a.indices is b.indices and a.data is b.data


class Copier:
    """Makes blocks of rows of A and of B ready to be sent: copied to page-locked memory, unless they are there already.

    Parameters
    ----------
    a, b : CSR
        On the host.
    kinds : Kinds
    device : Device
        Allocates page-locked memory, and knows what is.
    within : Within, optional
        Where A lies in B: its entries need not be sent apart.
    """

    def __init__(
        self, a: CSR, b: CSR, kinds: DeviceDtypes, device: Host, within: SubmatrixOffset | None = None
    ) -> None:
        self.a, self.b, self.kinds, self.allocate, self.within = a, b, kinds, device.allocate, within
        self.a_lies, self.b_lies = (
            (m.data.dtype, m.indices.dtype) == (kind, kinds.index) and all(map(device.is_locked, (m.data, m.indices)))
            for m, kind in ((a, kinds.a), (b, kinds.b))
        )

    def cost(self, products: int) -> int:
        """Return the device bytes that the product takes at most as one block, with so many entries of C."""
        a, b, kinds = self.a, self.b, self.kinds
        of_a = lay_out(a.nrows, b.nrows, a.nnz, kinds.a, kinds)
        sent = lay_out(b.nrows, b.ncols, b.nnz, kinds.b, kinds, of_a.end).end
        return sent + products * kinds.entry + a.nrows * ROW_BYTES + SCRATCH_BYTES

    @property
    def is_sound(self) -> bool:
        """Whether the offsets of A and B end where their entries do; the device looks at the rest."""
        return all(m.indptr[0] == 0 and m.indptr[-1] == len(m.indices) == len(m.data) for m in (self.a, self.b))

    def whole(self) -> Staged:
        """Prepare all of A and B as one block, its products not counted."""
        begin, clock = time.time(), time.perf_counter()
        found = self._with_window(0, self.a.nrows, 0, self.b.nrows, 0, begin)
        found.seconds = time.perf_counter() - clock
        return found

    def _with_window(self, start: int, stop: int, low: int, high: int, products: int, begin: float) -> Staged:
        """Prepare rows of A with rows [low, high) of B; where A is B, its entries are not sent again."""
        a, b, kinds = self.a, self.b, self.kinds
        first, last, of_low = int(a.indptr[start]), int(a.indptr[stop]), int(b.indptr[low])
        entries = int(b.indptr[high]) - of_low
        if not 0 <= of_low <= of_low + entries <= b.nnz:
            raise bad_b()
        within = self.within if self._is_inside(start, stop, of_low, of_low + entries) else None
        of_a = lay_out(stop - start, high - low, last - first if within is None else 0, kinds.a, kinds)
        of_b = lay_out(high - low, b.ncols, entries, kinds.b, kinds, of_a.end)
        sends = self._rows_of_b(low, high, of_b)
        if within is None:
            sends += self._rows_of_a(start, stop, low, of_a)
            return Staged(start, stop, products, sends, of_a, of_b, begin, low=low if self.a_lies else 0)
        if (within.row + start, within.row + stop) == (low, high):
            of_a = of_a._replace(indptr=of_b.indptr)  # B's are A's too
        else:
            sends += self._offsets(a, start, stop, of_a)
        ahead = int(b.indptr[within.row + start]) - of_low
        data, indices = (at + ahead * kind.itemsize
                         for at, kind in ((of_b.data, kinds.b), (of_b.indices, kinds.index)))  # fmt: skip
        of_a = of_a._replace(nnz=last - first, data=data, indices=indices)
        return Staged(start, stop, products, sends, of_a, of_b, begin, low=low + within.low)

    def _is_inside(self, start: int, stop: int, first: int, last: int) -> bool:
        """Whether rows [start, stop) of A are among entries [first, last) of B."""
        if self.within is None:
            return False
        rows, b_indptr = self.within.row, self.b.indptr
        return bool(first <= b_indptr[rows + start] and b_indptr[rows + stop] <= last)

    def _rows_of_a(self, start: int, stop: int, low: int, part: Part) -> list[Send]:
        """Prepare rows of A; columns that are copied count from row `low` of B."""
        if self.a_lies:  # the device looks at its columns, but not at those of blocks
            if self.kinds.blocked:
                self._check_columns(int(self.a.indptr[start]), int(self.a.indptr[stop]))
            return self._lying(self.a, start, stop, part)
        memory = self.allocate(part.end - part.data)
        self._copy_rows(self.a, start, stop, memory, part)
        self._copy_columns(int(self.a.indptr[start]), int(self.a.indptr[stop]), low, memory, part)
        return [(memory, part.data)]

    def _rows_of_b(self, start: int, stop: int, part: Part) -> list[Send]:
        """Prepare rows of B."""
        if self.b_lies:
            return self._lying(self.b, start, stop, part)
        memory, first = self.allocate(part.end - part.data), int(self.b.indptr[start])
        self._copy_rows(self.b, start, stop, memory, part)
        self._array(memory, part, part.indices, part.nnz, self.kinds.index)[:] = self.b.indices[first:][: part.nnz]
        return [(memory, part.data)]

    def _lying(self, m: CSR, start: int, stop: int, part: Part) -> list[Send]:
        """Have rows of a matrix sent from where they are."""
        entries = slice(int(m.indptr[start]), int(m.indptr[stop]))
        there = [(m.data[entries], part.data), (m.indices[entries], part.indices)]
        return there + self._offsets(m, start, stop, part)

    def _offsets(self, m: CSR, start: int, stop: int, part: Part) -> list[Send]:
        """Prepare where rows of a matrix begin, alone."""
        memory = self.allocate(part.end - part.indptr)
        self._copy_offsets(m, start, stop, array_at(memory, 0, stop - start + 1, self.kinds.pointer))
        return [(memory, part.indptr)]

    @staticmethod
    def _array(memory: Bytes, part: Part, at: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array of a matrix in memory that begins with its values."""
        return array_at(memory, at - part.data, count, dtype)

    def _copy_rows(self, m: CSR, start: int, stop: int, memory: Bytes, part: Part) -> None:
        """Copy values and offsets of rows of a matrix."""
        first, last = int(m.indptr[start]), int(m.indptr[stop])
        self._array(memory, part, part.data, last - first, part.value)[:] = m.data[first:last]
        offsets = self._array(memory, part, part.indptr, stop - start + 1, self.kinds.pointer)
        self._copy_offsets(m, start, stop, offsets)

    @staticmethod
    def _copy_offsets(m: CSR, start: int, stop: int, offsets: npt.NDArray[Any]) -> None:
        """Copy where rows of a matrix begin, counted from the first of them."""
        from spdist.kernels.hyspmm.prepare import copy_offsets

        copy_offsets(m.indptr, start, offsets[: stop - start + 1])

    def _copy_columns(self, first: int, last: int, low: int, memory: Bytes, part: Part) -> None:
        """Copy the columns of entries of A, counted from row `low` of B."""
        from spdist.kernels.hyspmm.prepare import copy_columns

        source = self.a.indices[first:last]
        if not len(source):
            return
        columns = self._array(memory, part, part.indices, last - first, self.kinds.index)
        self._check_range(first, source, *copy_columns(source, source.dtype.type(low), columns))

    def _check_columns(self, first: int, last: int) -> None:
        """Raise the error of the first entry of A whose column is out of range."""
        source = self.a.indices[first:last]
        if len(source):
            self._check_range(first, source, source.min(), source.max())

    def _check_range(self, first: int, source: npt.NDArray[Any], least: int, greatest: int) -> None:
        if least < 0 or greatest >= self.b.nrows:
            raise self._bad_entry(first + int(np.argmax((source < 0) | (source >= self.b.nrows))))

    def _bad_entry(self, at: int) -> MatrixError:
        """Return the error of an entry of A whose column is out of range."""
        return bad_row(int(np.searchsorted(self.a.indptr, at, side="right")) - 1, self.a.ncols)

    def _check_offsets(self, start: int, stop: int) -> None:
        """Raise the error of the first of the rows whose offsets are out of range."""
        from spdist.kernels.hyspmm.prepare import first_bad_row

        bad = first_bad_row(self.a.indptr, start, stop, self.a.nnz)
        if bad >= 0:
            raise bad_row(bad, self.a.ncols)


class Stager(Copier):
    """Prepares blocks, ahead and in several threads; `take` hands them out in order.

    Parameters
    ----------
    a, b, kinds, device, within
        As for `Copier`.
    resident : bool
        Whether B is on the device, so that blocks come without.
    cutter : Cutter
    first : int
        The row to begin with.
    """

    def __init__(
        self, a: CSR, b: CSR, kinds: DeviceDtypes, resident: bool, cutter: Cutter, device: Host, first: int = 0,
        within: SubmatrixOffset | None = None,
    ) -> None:  # fmt: skip
        super().__init__(a, b, kinds, device, within)
        self.resident, self.cutter, self.at = resident, cutter, first
        self.threads = max(1, int(STAGE_SHARE * cores()))
        self.ahead: collections.deque[Future[Staged]] = collections.deque()
        self.local = threading.local()
        self.recent = 0

    @property
    def is_brief(self) -> bool:
        """Whether B is resident, and A too or sent as it lies: there is little to prepare, and no thread is woken."""
        return self.resident and (self.within is not None or (self.a_lies and not self.kinds.blocked))

    @property
    def is_ready(self) -> bool:
        """Whether `take` need not wait for the next block."""
        return bool(self.ahead) and self.ahead[0].done()

    def take(self) -> Staged | None:
        """Return the next block; None after the last."""
        wanted = 1 if self.is_brief else max(2, min(self.threads + 1, self.cutter.ahead // max(self.recent, 1) - 2))
        # While the first of them is prepared one may as well wait for what the next needs; else the device waits.
        new = 0
        while (
            self.at < self.a.nrows
            and len(self.ahead) < wanted
            and (not self.is_ready or (new < MOST_CUT and self.cutter.is_ready(self.at)))
        ):
            stop = self.cutter.next(self.at)
            only = not self.ahead and stop == self.a.nrows
            submit = now if only or self.is_brief else pool(self.threads).submit
            self.ahead.append(submit(self.stage, self.at, stop))
            self.at, new = stop, new + 1
        if not self.ahead:
            return None
        staged = self.ahead.popleft().result()
        self.recent = staged.nbytes
        return staged

    def recall(self) -> list[Staged]:
        """Return the blocks that were prepared ahead: they will not be taken."""
        staged = [future.result() for future in self.ahead]
        self.ahead.clear()
        return staged

    def close(self) -> None:
        """Drop what nobody will take."""
        for future in self.ahead:
            future.cancel()
        for future in self.ahead:
            if not future.cancelled():
                future.exception()
        self.ahead.clear()

    def stage(self, start: int, stop: int) -> Staged:
        """Prepare rows [start, stop)."""
        begin, clock = time.time(), time.perf_counter()
        products = self.cutter.products.between(start, stop)
        if self.within is None or not self.resident:
            self._check_offsets(start, stop)
        if not self.resident:
            found = self._with_b(start, stop, products, begin)
        elif self.within is not None:
            part, (row, low) = Part(stop - start, self.b.nrows, 0, self.kinds.a, 0, 0, 0, 0), self.within
            found = Staged(start, stop, products, [], part, None, begin, low=low, inside=row + start)
        else:
            first, last = int(self.a.indptr[start]), int(self.a.indptr[stop])
            part = lay_out(stop - start, self.b.nrows, last - first, self.kinds.a, self.kinds)
            found = Staged(start, stop, products, self._rows_of_a(start, stop, 0, part), part, None, begin)
        found.seconds = time.perf_counter() - clock
        return found

    def _with_b(self, start: int, stop: int, products: int, begin: float) -> Staged:
        """Prepare rows of A with the rows of B that they ask for."""
        a, b, kinds = self.a, self.b, self.kinds
        first, last = int(a.indptr[start]), int(a.indptr[stop])
        bits, places = self._scratch()
        words, rows, entries = self._mark(start, stop)
        low, high = min(64 * words[0], b.nrows), min(64 * words[1], b.nrows)
        window = int(b.indptr[high] - b.indptr[low]) * kinds.b_entry + (high - low) * kinds.pointer.itemsize
        if window <= WINDOW_SHARE * (entries * kinds.b_entry + rows * kinds.pointer.itemsize):
            bits[words[0] : words[1]] = 0
            return self._with_window(start, stop, low, high, products, begin)
        of_a = lay_out(stop - start, rows, last - first, kinds.a, kinds)
        of_b = lay_out(rows, b.ncols, entries, kinds.b, kinds, of_a.end)
        memory = self.allocate(of_b.end)
        self._copy_rows(a, start, stop, memory, of_a)
        self._copy_distinct(first, last, (bits, places), words, memory, of_a, of_b)
        return Staged(start, stop, products, [(memory, 0)], of_a, of_b, begin)

    def _mark(self, start: int, stop: int) -> tuple[tuple[int, int], int, int]:
        """Mark the rows of B that rows of A ask for; return the range of words, the rows, and their entries."""
        from spdist.kernels.hyspmm.prepare import mark_rows, number_rows

        a, b = self.a, self.b
        bits, places = self._scratch()
        words = mark_rows(a.indices, int(a.indptr[start]), int(a.indptr[stop]), b.nrows, bits)
        if words[0] < 0:
            raise self._bad_entry(words[1])
        rows, entries = number_rows(bits, places, words[0], words[1], b.indptr)
        if entries < 0 or b.indptr[-1] > b.nnz:
            raise bad_b()
        return words, rows, entries

    def entries_of_b(self, start: int, stop: int) -> int:
        """Return how many entries the rows of B have that rows of A ask for."""
        self._check_offsets(start, stop)
        words, _, entries = self._mark(start, stop)
        self._scratch()[0][words[0] : words[1]] = 0
        return entries

    def _scratch(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return a bit for each row of B, zero, and the number of the first of each word; of this thread alone."""
        if not hasattr(self.local, "bits"):
            words = self.b.nrows // 64 + 1
            self.local.bits, self.local.places = np.zeros(words, np.uint64), np.empty(words, np.uint32)
        return self.local.bits, self.local.places

    def _copy_distinct(
        self, first: int, last: int, scratch: Any, words: Any, memory: Bytes, of_a: Part, of_b: Part
    ) -> None:
        """Renumber the columns of entries of A, and copy the rows of B that were marked."""
        from spdist.kernels.hyspmm.prepare import send_distinct

        kinds, b = self.kinds, self.b
        numbers = array_at(memory, of_a.indices, of_a.nnz, kinds.index)
        starts = array_at(memory, of_b.indptr, of_b.nrows + 1, kinds.pointer)
        columns = array_at(memory, of_b.indices, of_b.nnz, kinds.index)
        number = number_dtype(of_b.value)  # of blocks, one after the other
        width = of_b.value.itemsize // number.itemsize
        values = array_at(memory, of_b.data, of_b.nnz * width, number)
        rows = b.indptr, b.indices, b.data.view(number)
        bits, places = scratch
        send_distinct(
            self.a.indices, first, last, rows, bits, places, words[0], words[1], numbers, 0, starts, 0, columns, 0,
            values, 0, width,
        )  # fmt: skip
