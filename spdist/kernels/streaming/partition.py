"""Cut A into blocks of rows: products are counted or estimated; earlier blocks predict the sizes of later blocks.

Blocks are cut one by one while the products of later rows are still counted.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from concurrent.futures import wait
from dataclasses import dataclass, field

import numpy as np

from spdist.errors import MatrixError
from spdist.foundation import threads
from spdist.foundation.cpus import count_cpus
from spdist.kernels.streaming.layout import DeviceDtypes, StagedBlock, lay_out
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, IndexArray, Int64Array
from spdist.matrices.pattern import is_worth_compiled

# -- ratios of earlier blocks ------------------------------------------------------------------------------------------


class BlockHistory:
    """Ratios measured on earlier blocks of one multiplication.

    One history serves all calls for rows of the same C, so that only the first call multiplies a sample.
    `held_ratio`: entries of C that the device had to hold, per product. 1.0 if unknown: no compression. `kept_ratio`:
    entries of C that were kept, per product; with a triangle, estimated for whole rows. `b_ratio`: entries of B that
    were uploaded, per product; 0.0 if unknown.
    """

    def __init__(self) -> None:
        self.held_ratio, self.kept_ratio, self.b_ratio = 1.0, 1.0, 0.0
        self.is_known = False
        self._is_exact = False  # whether `held_ratio` was measured on the last block of this call

    def begin(self) -> None:
        """Begin a call; keep ratios if a block with entries was recorded."""
        self._is_exact = False
        if not self.is_known:
            self.held_ratio, self.kept_ratio, self.b_ratio = 1.0, 1.0, 0.0

    def record(self, block: StagedBlock, held: int, kept: float) -> None:
        """Record a multiplied block, and its entries of C that were held and kept; ignore one without products."""
        if not block.products:
            return
        self.held_ratio, self.kept_ratio = held / block.products, kept / block.products
        if block.b is not None:
            self.b_ratio = block.b.nnz / block.products
        self.is_known = held > 0
        self._is_exact = True

    def assume(self, ratio: float) -> None:
        """Assume a ratio of entries of C to products, if the sample could not be multiplied."""
        self.held_ratio = self.kept_ratio = ratio

    def record_b(self, ratio: float) -> None:
        """Record the entries of B per product that a block needs; 0.0 makes the ratio unknown again."""
        self.b_ratio = ratio

    def distrust(self) -> None:
        """Stop predicting exact numbers of entries until the next block is recorded: the last one was too low."""
        self._is_exact = False

    def entries_of_c(self, products: int) -> float:
        """Predict the entries of C that the device must hold for a block."""
        return products * self.held_ratio

    def entries_of_b(self, products: int) -> float:
        """Predict the entries of B that a block uploads if B is not resident."""
        return (self.b_ratio or 1.0) * products

    def exact_entries(self, products: int) -> int:
        """Predict a block's entries of C from the previous block; 0 if there is no reliable ratio."""
        return int(self.held_ratio * products) if self._is_exact else 0


# -- products of rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountTuning:
    """When and how the products of rows are counted."""

    threads_per_core: float = 0.5  # threads that count
    # products are not counted if no sampled row of B is more than this many times as long as B's mean row
    even: float = 4
    sampled_rows: int = 2048  # rows of B in that sample
    first_entries: int = 1 << 16  # entries of A in the first task of a thread; later tasks double
    task_entries: int = 1 << 20  # entries of A in the largest task
    # up to this many entries of A, the calling thread counts all products: waking threads would take longer
    caller_entries: int = 1 << 18


COUNT_TUNING = CountTuning()
PART = 1 << 16
"""Rows that are looked at at once."""


class CountedProducts:
    """Products of A's rows, counted by threads from the first row on while callers read the counts.

    `rows`: numbers of the rows of A in error messages; by default their positions. `before`: (nrows + 1,): products of
    the rows before each row; valid up to the last row for which `wait_for` was called.
    """

    def __init__(self, a: CSR, b: CSR, tuning: CountTuning = COUNT_TUNING, rows: Int64Array | None = None) -> None:
        self.before = np.zeros(a.nrows + 1, np.int64)
        self._ncols, self._row_numbers, left = a.ncols, rows, (a.indptr, a.indices)
        # The first tasks are small: the first block waits for them.
        doubling = tuning.first_entries * 2.0 ** np.arange(64 + a.nnz // tuning.task_entries)
        ends = np.cumsum(np.minimum(doubling, tuning.task_entries))
        cuts = np.searchsorted(a.indptr, ends[ends < a.nnz].astype(np.int64))
        starts = np.unique(np.concatenate([[0], cuts, [a.nrows]]))
        number = max(1, int(tuning.threads_per_core * count_cpus()))
        count = _count_compiled if is_worth_compiled(a.nnz) else _count
        submit = threads.thread_pool(number, "count").submit if a.nnz > tuning.caller_entries else threads.run_now
        self._tasks = collections.deque(
            (start, stop, submit(count, left, b.indptr, start, stop, self.before))
            for start, stop in itertools.pairwise(starts.tolist())
        )
        self._counted_rows = 0

    def wait_for(self, row: int) -> None:
        """Wait until the products of the rows before `row` are counted.

        Raises `MatrixError` if offsets or columns of A are out of range.
        """
        while self._counted_rows < row:
            self._finish_task()

    def so_far(self) -> tuple[int, int]:
        """Return the number of rows counted so far, and their products."""
        while self._tasks and self._tasks[0][2].done():
            self._finish_task()
        return self._counted_rows, int(self.before[self._counted_rows])

    def _finish_task(self) -> None:
        """Wait for the next task and add its counts."""
        start, stop, future = self._tasks.popleft()
        total, bad = future.result()
        if total < 0:
            raise bad_row_error(bad if self._row_numbers is None else int(self._row_numbers[bad]), self._ncols)
        self.before[start + 1 : stop + 1] += self.before[start]
        self._counted_rows = stop

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been counted."""
        return self.so_far()[0] == len(self.before) - 1

    def between(self, start: int, stop: int) -> int:
        """Return the products of rows [start, stop); wait until they are counted."""
        self.wait_for(stop)
        return int(self.before[stop] - self.before[start])

    def middle(self, start: int, stop: int) -> int:
        """Return the row that halves the products of two or more rows [start, stop)."""
        return _middle(self.before, start, stop)

    def upper_bound(self, start: int) -> int:
        """Return the products of the rows from `start` on; wait until they are counted."""
        return self.between(start, len(self.before) - 1)

    def cancel(self) -> None:
        """Cancel tasks, and wait for running tasks, which write to `before`."""
        for _, _, future in self._tasks:
            future.cancel()
        wait(future for _, _, future in self._tasks)


class ExpectedProducts:
    """Products of A's rows, estimated from their entries: a substitute for `CountedProducts`.

    `planned`: products of all rows, if they are known; otherwise B's rows are expected to have their mean length.
    """

    is_complete = False  # nothing is counted

    def __init__(self, a: CSR, b: CSR, planned: int = 0) -> None:
        self._indptr, self._b_indptr = a.indptr, b.indptr
        self._mean = planned / max(a.nnz, 1) or b.nnz / max(b.nrows, 1)

    def is_even(self, tuning: CountTuning) -> bool:
        """Return whether sampled rows of B are so alike that the entries of A predict the number of products."""
        rows = np.linspace(0, len(self._b_indptr) - 2, tuning.sampled_rows).astype(np.int64)
        lengths = self._b_indptr[rows + 1] - self._b_indptr[rows]
        return bool(lengths.max() <= tuning.even * self._mean)

    def so_far(self) -> tuple[int, int]:
        """Return the number of rows, and their expected products."""
        nrows = len(self._indptr) - 1
        return nrows, self.between(0, nrows)

    def between(self, start: int, stop: int) -> int:
        """Return the expected products of rows [start, stop)."""
        return int(float(self._indptr[stop] - self._indptr[start]) * self._mean)

    def middle(self, start: int, stop: int) -> int:
        """Return the row that halves the entries of two or more rows [start, stop)."""
        return _middle(self._indptr, start, stop)

    def upper_bound(self, start: int) -> int:
        """Return the most products that the rows from `start` on can have."""
        return int(self._indptr[-1] - self._indptr[start]) * _longest_row(self._b_indptr)

    def cancel(self) -> None:
        """Do nothing: no thread is running."""


def _count(
    a: tuple[IndexArray, IndexArray], b_indptr: Int64Array, start: int, stop: int, ends: Int64Array
) -> tuple[int, int]:
    """Count the products of rows [start, stop) of A, given by offsets and columns, summed up in ``ends[row + 1]``.

    Returns the sum of the products, and 0; or -1 and a row whose offsets or columns are out of range.
    """
    offsets = a[0][start : stop + 1].astype(np.int64)
    wrong = (np.diff(offsets) < 0) | (offsets[1:] > len(a[1]))
    if wrong.any():
        return -1, start + int(np.argmax(wrong))
    columns, sums = a[1][offsets[0] : offsets[-1]], np.zeros(offsets[-1] - offsets[0] + 1, np.int64)
    wrong = (columns < 0) | (columns >= len(b_indptr) - 1)
    if not wrong.any():
        lengths = b_indptr[columns + 1] - b_indptr[columns]
        wrong = lengths < 0
    if wrong.any():
        return -1, start + int(np.searchsorted(offsets, offsets[0] + np.argmax(wrong), side="right")) - 1
    np.cumsum(lengths, out=sums[1:])
    ends[start + 1 : stop + 1] = sums[offsets[1:] - offsets[0]]
    return int(sums[-1]), 0


def _count_compiled(
    a: tuple[IndexArray, IndexArray], b_indptr: Int64Array, start: int, stop: int, ends: Int64Array
) -> tuple[int, int]:
    """Count as `_count`."""
    from spdist.kernels.hyspmm.prepare import count_products  # loads Numba

    total, _, bad = count_products(a, b_indptr, start, stop, 0, 0, ends)
    return total, bad


def _longest_row(indptr: Int64Array) -> int:
    """Return the entries of the longest row; 0 if there are no rows. Parts stay in the caches."""
    parts = (indptr[first : first + PART + 1] for first in range(0, len(indptr) - 1, PART))
    return max((int(np.diff(part).max()) for part in parts), default=0)


def _middle(before: Int64Array, start: int, stop: int) -> int:
    """Return the row that halves the sums `before` over rows [start, stop), or their number if the sums are equal."""
    first, last = int(before[start]), int(before[stop])
    if first == last:
        return (start + stop) // 2
    half = int(np.searchsorted(before[start : stop + 1], (first + last) // 2))
    return start + min(max(half, 1), stop - start - 1)


def bad_row_error(row: int, ncols: int) -> MatrixError:
    """Return the error to raise if offsets or columns of a row of A, which has `ncols` columns, are out of range."""
    return MatrixError(f"row {int(row):,} of A: offsets or columns out of range; A has {ncols:,} columns")


def bad_b_error() -> MatrixError:
    """Return the error to raise if offsets of B fall or exceed its number of entries."""
    return MatrixError("offsets of B are out of range: rebuild it, for instance with scipy.sparse.csr_array(B)")


# -- sizes of blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockTuning:
    """Sizes of blocks."""

    # target of a block's device bytes if B is resident. Without a resident B blocks fill their slots, because larger
    # blocks repeat fewer rows of B.
    resident_bytes: int = 320 << 20
    # the first block is this many times smaller than the largest: the device does not wait long for it
    first_share: int = 12
    first_bytes: int = 48 << 20  # least bytes of the first block: for a smaller block, launches take longer than copies
    last_bytes: int = 64 << 20  # least bytes of the last blocks; each is at most half of the remaining bytes
    growth: float = 7 / 6  # each block is this many times as large as the block before it
    unprepared_growth: float = 2.0  # growth if there is nothing to prepare on the host
    margin: float = 1.25  # factor on predicted entries
    row_bytes: int = 64  # device bytes that the kernels take for a row of C, its offsets included
    scratch_bytes: int = 24 << 20  # device bytes that the kernels take whatever the rows
    # device bytes that the kernels take for an entry of C that is a dense block, besides the entry
    dense_block_bytes: int = 24
    # blocks that the device's `staging_bytes` must hold: one being prepared, one waiting, two being uploaded
    staged_blocks: int = 4
    resolution: int = 32  # the end of a block is found to within 1 / this share of its rows


BLOCK_TUNING = BlockTuning()


@dataclass
class BlockCutter:
    """Cuts rows into blocks that should fit a slot, as the history predicts."""

    products: CountedProducts | ExpectedProducts
    indptr: Int64Array  # (nrows + 1,) int64: offsets of A
    dtypes: DeviceDtypes
    room: int  # bytes of a slot
    staging_bytes: int  # bytes of the host's memory for staged blocks
    history: BlockHistory
    b_resident: bool  # whether blocks are uploaded without rows of B
    growth: float  # each block is this many times as large as the block before it
    tuning: BlockTuning = BLOCK_TUNING
    _next_bytes: float = field(init=False)
    _last_bytes: float = field(init=False)
    _recent_rows: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self._next_bytes, self._last_bytes = min(self._most_bytes, self.first_bytes), self.tuning.last_bytes

    @property
    def first_bytes(self) -> float:
        """Device bytes of the first block."""
        return max(self.tuning.first_bytes, self._most_bytes / self.tuning.first_share)

    @property
    def _most_bytes(self) -> float:
        room = self.room - min(self.tuning.scratch_bytes, self.room // 4)
        return min(room, self.tuning.margin * self.tuning.resident_bytes) if self.b_resident else room

    def cut_large(self) -> None:
        """Do not shrink the first and the last blocks: launches cost more while other threads are busy."""
        self._next_bytes, self._last_bytes = self._most_bytes, self._most_bytes / 2

    def device_bytes(self, start: int, stop: int) -> float:
        """Predict the device bytes of a block."""
        entries = self.tuning.margin * self.history.entries_of_c(self.products.between(start, stop))
        entry = self.dtypes.entry + (self.tuning.dense_block_bytes if self.dtypes.blocked else 0)
        return self.upload_bytes(start, stop) + entries * entry + (stop - start) * self.tuning.row_bytes

    def upload_bytes(self, start: int, stop: int) -> float:
        """Predict the bytes that are uploaded for a block."""
        entries, pointer = int(self.indptr[stop] - self.indptr[start]), self.dtypes.pointer.itemsize
        of_a = entries * (self.dtypes.a_entry + pointer) + (stop - start + 1) * pointer
        if self.b_resident:
            return of_a
        entries_of_b = self.history.entries_of_b(self.products.between(start, stop))
        return self.tuning.margin * entries_of_b * (self.dtypes.b_entry + 1.0) + of_a

    def _fits(self, start: int, stop: int, room: float) -> bool:
        staged = self.tuning.staged_blocks * self.upload_bytes(start, stop)
        return self.device_bytes(start, stop) <= room and staged <= self.staging_bytes

    def is_ready(self, start: int) -> bool:
        """Return whether the block at `start` can be cut without waiting for products to be counted."""
        return self.products.so_far()[0] >= min(start + 4 * self._recent_rows, len(self.indptr) - 1)

    def next_stop(self, start: int) -> int:
        """Return the end of the block that begins at row `start`.

        A block has at least one row. If it has more, 31 bits count its products and its entries of A.
        """
        nrows = len(self.indptr) - 1
        if self.products.so_far()[0] == nrows and (left := self.device_bytes(start, nrows)) > 2 * self._last_bytes:
            self._next_bytes = min(self._next_bytes, left / 2)  # nothing overlaps with the last block's download
        stop = self.last_fitting(start, self._next_bytes)
        if self.indptr[stop] - self.indptr[start] > INT32_MAX:
            stop = int(np.searchsorted(self.indptr, int(self.indptr[start]) + INT32_MAX, side="right")) - 1
        self._next_bytes = min(self.growth * self._next_bytes, self._most_bytes)
        while stop > start + 1 and self.products.between(start, stop) > INT32_MAX:
            stop = self.products.middle(start, stop)
        return max(start + 1, stop)

    def last_fitting(self, start: int, room: float) -> int:
        """Return an end of the block with at most about `room` bytes; `start` if one row takes more."""
        left = len(self.indptr) - 1 - start
        step = min(self._recent_rows, left)
        while step > 1 and not self._fits(start, start + step, room):
            step //= 2
        while step < left and self._fits(start, start + min(2 * step, left), room):
            step = min(2 * step, left)
        # To find the very last row would take more predictions, of some microseconds each.
        rows = range(start + step, start + min(2 * step, left) + 1, max(1, step // self.tuning.resolution))
        fitting = bisect.bisect_left(rows, True, key=lambda stop: not self._fits(start, stop, room))
        self._recent_rows = max(1, rows[fitting - 1] - start) if fitting else 1
        return rows[fitting - 1] if fitting else start


def single_block_bytes(a: CSR, b: CSR, dtypes: DeviceDtypes, entries: int, tuning: BlockTuning = BLOCK_TUNING) -> int:
    """Bound the device bytes of a multiplication that is one block, which uploads all of A and B.

    `entries`: most entries of C.
    """
    of_a = lay_out((a.nrows, b.nrows), a.nnz, dtypes.a, dtypes)
    uploaded = lay_out(b.shape, b.nnz, dtypes.b, dtypes, of_a.end).end
    return uploaded + entries * dtypes.entry + a.nrows * tuning.row_bytes + tuning.scratch_bytes
