"""Prepare blocks on the host: rows of A, and the rows of B that they refer to, in page-locked memory.

Unless B is resident, a block includes its rows of B: all rows from the first to the last if few of these are not
needed, else each needed row once. Everything here is arrays of the host.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.foundation import threads
from spdist.foundation.cpus import count_cpus
from spdist.kernels.cpu.arrays import CsrArrays
from spdist.kernels.cuda.pinned import Bytes, array_at
from spdist.kernels.streaming.layout import DeviceDtypes, HostCopy, MatrixLayout, StagedBlock, lay_out
from spdist.kernels.streaming.multiplication import Multiplication
from spdist.kernels.streaming.partition import BlockCutter, bad_b_error, bad_row_error
from spdist.kernels.streaming.protocols import HostMemory
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import number_dtype


@dataclass(frozen=True)
class StagingTuning:
    """How blocks are prepared."""

    # all rows of B from the first needed to the last are uploaded if they take at most this many times the bytes of the
    # needed rows
    window_share: float = 1.3
    threads_per_core: float = 1.0  # threads that prepare blocks
    cut_at_once: int = 2  # blocks that are cut before the next prepared block is handed out


STAGING_TUNING = StagingTuning()


class MatrixCopier:
    """Prepares rows of one operand for upload: copies them to page-locked memory, unless they are there already.

    `in_place`: whether columns and values are uploaded from where they are.
    """

    def __init__(self, matrix: CSR, value: np.dtype[Any], dtypes: DeviceDtypes, host: HostMemory) -> None:
        self.matrix, self.dtypes, self.allocate = matrix, dtypes, host.allocate
        fits = (matrix.data.dtype, matrix.indices.dtype) == (value, dtypes.index)
        self.in_place = fits and all(map(host.is_locked, (matrix.data, matrix.indices)))

    def entries(self, start: int, stop: int) -> tuple[int, int]:
        """Return the offsets at which the entries of rows [start, stop) begin and end."""
        return int(self.matrix.indptr[start]), int(self.matrix.indptr[stop])

    def upload_in_place(self, start: int, stop: int, layout: MatrixLayout) -> list[HostCopy]:
        """Return copies that upload rows [start, stop) from the matrix itself; only offsets are computed."""
        first, last = self.entries(start, stop)
        data, indices = self.matrix.data[first:last], self.matrix.indices[first:last]
        return [HostCopy(data, layout.data), HostCopy(indices, layout.indices), self.offsets(start, stop, layout)]

    def offsets(self, start: int, stop: int, layout: MatrixLayout) -> HostCopy:
        """Return the copy that uploads the offsets of rows [start, stop) alone."""
        memory = self.allocate(layout.end - layout.indptr)
        self._copy_offsets(start, array_at(memory, 0, stop - start + 1, self.dtypes.pointer))
        return HostCopy(memory, layout.indptr)

    def copy_values_and_offsets(self, start: int, stop: int, memory: Bytes, layout: MatrixLayout) -> None:
        """Copy values and offsets of rows [start, stop) to host memory, which begins at the values of `layout`."""
        first, last = self.entries(start, stop)
        array_at(memory, 0, last - first, layout.value)[:] = self.matrix.data[first:last]
        self._copy_offsets(start, array_at(memory, layout.indptr - layout.data, stop - start + 1, self.dtypes.pointer))

    def columns_in(self, memory: Bytes, layout: MatrixLayout) -> npt.NDArray[Any]:
        """Return the columns of a matrix in host memory, which begins at the values of `layout`."""
        return array_at(memory, layout.indices - layout.data, layout.nnz, self.dtypes.index)

    def _copy_offsets(self, start: int, offsets: npt.NDArray[Any]) -> None:
        """Copy the offsets of rows from `start` on, less the first of them."""
        indptr = self.matrix.indptr[start : start + len(offsets)]
        np.subtract(indptr, indptr[:1], out=offsets, casting="unsafe")


class _Window(NamedTuple):
    """Rows [low, high) of B."""

    low: int
    high: int


class WindowPreparer:
    """Prepares rows of A with a range of rows of B.

    If A is a view of B, entries of A inside the range are not uploaded a second time.
    """

    def __init__(self, work: Multiplication, host: HostMemory) -> None:
        self.a, self.b, self.dtypes, self.offset = work.a, work.b, work.dtypes, work.rows.offset
        self.allocate = host.allocate
        self.a_copier = MatrixCopier(work.a, work.dtypes.a, work.dtypes, host)
        self.b_copier = MatrixCopier(work.b, work.dtypes.b, work.dtypes, host)

    @property
    def has_sound_ends(self) -> bool:
        """Whether the offsets of A and B begin and end with their entries; the device checks the rest."""
        return all(m.indptr[0] == 0 and m.indptr[-1] == len(m.indices) == len(m.data) for m in (self.a, self.b))

    def prepare_all(self) -> StagedBlock:
        """Prepare all of A and B as one block whose products are not counted."""
        return timed(lambda begin: self.with_window((0, self.a.nrows), _Window(0, self.b.nrows), 0, begin))

    def with_window(self, rows: tuple[int, int], window: tuple[int, int], products: int, begin: float) -> StagedBlock:
        """Prepare rows of A with a range of rows of B; if A is a view of B, upload no entry twice.

        `begin`: seconds since 1970 at which the preparation began.
        """
        b, dtypes, (start, stop), (low, high) = self.b, self.dtypes, rows, window
        b_first, b_last = int(b.indptr[low]), int(b.indptr[high])
        if not 0 <= b_first <= b_last <= b.nnz:
            raise bad_b_error()
        if self._is_inside(start, stop, b_first, b_last):
            return self._inside_window(rows, window, products, begin)
        first, last = self.a_copier.entries(start, stop)
        a_layout = lay_out((stop - start, high - low), last - first, dtypes.a, dtypes)
        b_layout = lay_out((high - low, b.ncols), b_last - b_first, dtypes.b, dtypes, a_layout.end)
        copies = self._rows_of_b(low, high, b_layout) + self.rows_of_a(start, stop, low, a_layout)
        column_offset = low if self.a_copier.in_place else 0
        return StagedBlock(start, stop, products, copies, a_layout, b_layout, begin, column_offset=column_offset)

    def _inside_window(
        self, rows: tuple[int, int], window: tuple[int, int], products: int, begin: float
    ) -> StagedBlock:
        """Prepare rows of A that are a view of the window of B."""
        assert self.offset is not None
        b, dtypes, offset, (start, stop), (low, high) = self.b, self.dtypes, self.offset, rows, window
        b_first, b_last = int(b.indptr[low]), int(b.indptr[high])
        first, last = self.a_copier.entries(start, stop)
        a_layout = lay_out((stop - start, high - low), 0, dtypes.a, dtypes)
        b_layout = lay_out((high - low, b.ncols), b_last - b_first, dtypes.b, dtypes, a_layout.end)
        copies = self._rows_of_b(low, high, b_layout)
        if (offset.row + start, offset.row + stop) == (low, high):
            a_layout = a_layout._replace(indptr=b_layout.indptr)  # B's offsets are A's too
        else:
            copies.append(self.a_copier.offsets(start, stop, a_layout))
        skipped = int(b.indptr[offset.row + start]) - b_first
        a_layout = a_layout._replace(
            nnz=last - first,
            data=b_layout.data + skipped * dtypes.b.itemsize,
            indices=b_layout.indices + skipped * dtypes.index.itemsize,
        )
        column_offset = low + offset.column
        return StagedBlock(start, stop, products, copies, a_layout, b_layout, begin, column_offset=column_offset)

    def _is_inside(self, start: int, stop: int, first: int, last: int) -> bool:
        """Return whether rows [start, stop) of A are among entries [first, last) of B."""
        if self.offset is None:
            return False
        row, b_indptr = self.offset.row, self.b.indptr
        return bool(first <= b_indptr[row + start] and b_indptr[row + stop] <= last)

    def rows_of_a(self, start: int, stop: int, low: int, layout: MatrixLayout) -> list[HostCopy]:
        """Prepare rows of A.

        `low`: row of B from which copied columns count; columns that are uploaded in place are not changed.
        """
        copier, (first, last) = self.a_copier, self.a_copier.entries(start, stop)
        if copier.in_place:  # the device checks columns of numbers, but not of dense blocks
            if self.dtypes.blocked:
                self._check_columns(first, last)
            return copier.upload_in_place(start, stop, layout)
        memory = self.allocate(layout.end - layout.data)
        copier.copy_values_and_offsets(start, stop, memory, layout)
        self._copy_columns(first, last, low, copier.columns_in(memory, layout))
        return [HostCopy(memory, layout.data)]

    def _rows_of_b(self, start: int, stop: int, layout: MatrixLayout) -> list[HostCopy]:
        """Prepare rows of B."""
        copier = self.b_copier
        if copier.in_place:
            return copier.upload_in_place(start, stop, layout)
        memory, (first, last) = self.allocate(layout.end - layout.data), copier.entries(start, stop)
        copier.copy_values_and_offsets(start, stop, memory, layout)
        copier.columns_in(memory, layout)[:] = self.b.indices[first:last]
        return [HostCopy(memory, layout.data)]

    def _copy_columns(self, first: int, last: int, low: int, columns: npt.NDArray[Any]) -> None:
        """Copy the columns of entries of A, counted from row `low` of B."""
        self._check_columns(first, last)
        np.subtract(self.a.indices[first:last], low, out=columns, casting="unsafe")

    def _check_columns(self, first: int, last: int) -> None:
        """Check the columns of entries of A; the error names the first that is out of range."""
        source = self.a.indices[first:last]
        if len(source):
            self._check_range(first, source, source.min(), source.max())

    def _check_range(self, first: int, source: npt.NDArray[Any], least: int, greatest: int) -> None:
        if least < 0 or greatest >= self.b.nrows:
            raise self.bad_entry_error(first + int(np.argmax((source < 0) | (source >= self.b.nrows))))

    def bad_entry_error(self, entry: int) -> MatrixError:
        """Return the error to raise if the column of an entry of A is out of range."""
        return bad_row_error(int(np.searchsorted(self.a.indptr, entry, side="right")) - 1, self.a.ncols)

    def check_offsets(self, start: int, stop: int) -> None:
        """Raise `MatrixError` with the first of A's rows [start, stop) whose offsets are out of range."""
        ends = self.a.indptr[start : stop + 1]
        bad = (ends[1:] < ends[:-1]) | (ends[1:] > self.a.nnz)
        if bad.any():
            raise bad_row_error(start + int(np.argmax(bad)), self.a.ncols)


def timed(prepare: Callable[[float], StagedBlock]) -> StagedBlock:
    """Call `prepare` with the time, in seconds since 1970; return its block with the seconds that it took."""
    begin, clock = time.time(), time.perf_counter()
    block = prepare(begin)
    return replace(block, seconds=time.perf_counter() - clock)


class _Marks(NamedTuple):
    """Marks of the rows of B that rows of A refer to, a bit for each row of B."""

    bits: npt.NDArray[Any]  # marks; zero outside of words [first_word, last_word)
    places: npt.NDArray[Any]  # number of the first marked row of each word
    first_word: int
    last_word: int
    # number of marked rows, and their entries
    rows: int
    entries: int

    def clear(self) -> None:
        """Clear all marks."""
        self.bits[self.first_word : self.last_word] = 0


class BlockPreparer(WindowPreparer):
    """Prepares any block of rows, from any thread; if B is on the device, blocks include no rows of B."""

    def __init__(
        self, work: Multiplication, host: HostMemory, b_resident: bool, tuning: StagingTuning = STAGING_TUNING
    ) -> None:
        super().__init__(work, host)
        self.b_resident, self.tuning = b_resident, tuning
        self._thread = threading.local()

    @property
    def is_brief(self) -> bool:
        """Whether blocks need hardly any preparation: B is resident, and A is resident too or uploaded in place."""
        return self.b_resident and (self.offset is not None or (self.a_copier.in_place and not self.dtypes.blocked))

    def prepare(self, start: int, stop: int, products: int) -> StagedBlock:
        """Prepare rows [start, stop), which expand to `products` products."""
        return timed(lambda begin: self._prepare(start, stop, products, begin))

    def _prepare(self, start: int, stop: int, products: int, begin: float) -> StagedBlock:
        if self.offset is None or not self.b_resident:
            self.check_offsets(start, stop)
        if not self.b_resident:
            return self._with_b(start, stop, products, begin)
        if self.offset is not None:
            nothing, (row, column) = MatrixLayout(stop - start, self.b.nrows, 0, self.dtypes.a, 0, 0, 0, 0), self.offset
            return StagedBlock(
                start, stop, products, [], nothing, None, begin, column_offset=column, row_in_b=row + start
            )
        first, last = self.a_copier.entries(start, stop)
        layout = lay_out((stop - start, self.b.nrows), last - first, self.dtypes.a, self.dtypes)
        return StagedBlock(start, stop, products, self.rows_of_a(start, stop, 0, layout), layout, None, begin)

    def _with_b(self, start: int, stop: int, products: int, begin: float) -> StagedBlock:
        """Prepare rows of A with the rows of B that they refer to."""
        b, dtypes = self.b, self.dtypes
        first, last = self.a_copier.entries(start, stop)
        marks = self._mark(start, stop)
        window = _Window(min(64 * marks.first_word, b.nrows), min(64 * marks.last_word, b.nrows))
        entry, pointer = dtypes.b_entry, dtypes.pointer.itemsize
        window_bytes = int(b.indptr[window.high] - b.indptr[window.low]) * entry + (window.high - window.low) * pointer
        if window_bytes <= self.tuning.window_share * (marks.entries * entry + marks.rows * pointer):
            marks.clear()
            return self.with_window((start, stop), window, products, begin)
        a_layout = lay_out((stop - start, marks.rows), last - first, dtypes.a, dtypes)
        b_layout = lay_out((marks.rows, b.ncols), marks.entries, dtypes.b, dtypes, a_layout.end)
        memory = self.allocate(b_layout.end)
        self.a_copier.copy_values_and_offsets(start, stop, memory, a_layout)
        self._copy_marked(first, last, marks, memory, (a_layout, b_layout))
        return StagedBlock(start, stop, products, [HostCopy(memory, 0)], a_layout, b_layout, begin)

    def _mark(self, start: int, stop: int) -> _Marks:
        """Mark the rows of B that rows of A refer to."""
        from spdist.kernels.hyspmm.rows_of_b import mark_rows, number_rows

        a, b = self.a, self.b
        bits, places = self._scratch()
        first_word, last_word = mark_rows(a.indices, int(a.indptr[start]), int(a.indptr[stop]), b.nrows, bits)
        if first_word < 0:
            raise self.bad_entry_error(last_word)
        rows, entries = number_rows(bits, places, first_word, last_word, b.indptr)
        if entries < 0 or b.indptr[-1] > b.nnz:
            raise bad_b_error()
        return _Marks(bits, places, first_word, last_word, rows, entries)

    def entries_of_b(self, start: int, stop: int) -> int:
        """Return the number of entries in the rows of B that rows of A refer to."""
        self.check_offsets(start, stop)
        marks = self._mark(start, stop)
        marks.clear()
        return marks.entries

    def _scratch(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return this thread's marks, all zero, and a number for each word of them."""
        if not hasattr(self._thread, "bits"):
            words = self.b.nrows // 64 + 1
            self._thread.bits, self._thread.places = np.zeros(words, np.uint64), np.empty(words, np.uint32)
        return self._thread.bits, self._thread.places

    def _copy_marked(
        self, first: int, last: int, marks: _Marks, memory: Bytes, layouts: tuple[MatrixLayout, MatrixLayout]
    ) -> None:
        """Renumber the columns of entries [first, last) of A, copy the marked rows of B, and clear the marks."""
        from spdist.kernels.hyspmm.rows_of_b import MarkedRows, RowCopies, send_distinct

        (a_layout, b_layout), dtypes, b = layouts, self.dtypes, self.b
        renumbered = array_at(memory, a_layout.indices, a_layout.nnz, dtypes.index)
        offsets = array_at(memory, b_layout.indptr, b_layout.nrows + 1, dtypes.pointer)
        columns = array_at(memory, b_layout.indices, b_layout.nnz, dtypes.index)
        number = number_dtype(b_layout.value)  # of dense blocks, one after the other
        width = b_layout.value.itemsize // number.itemsize
        values = array_at(memory, b_layout.data, b_layout.nnz * width, number)
        arrays = CsrArrays(b.indptr, b.indices, b.data.view(number))
        marked = MarkedRows(marks.bits, marks.places, int(marks.first_word), int(marks.last_word))
        send_distinct(
            self.a.indices[first:last], arrays, marked, renumbered, RowCopies(offsets, columns, values, width)
        )


class BlockStager:
    """Cuts blocks from row `first` on, and prepares them ahead of the device in threads; hands them out in order."""

    def __init__(self, preparer: BlockPreparer, cutter: BlockCutter, first: int) -> None:
        self.preparer, self.cutter, self.next_row = preparer, cutter, first
        self._thread_count = max(1, int(preparer.tuning.threads_per_core * count_cpus()))
        self._queue: collections.deque[Future[StagedBlock]] = collections.deque()
        self._recent_bytes = 0

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return the next block without waiting."""
        return bool(self._queue) and self._queue[0].done()

    def use_cutter(self, cutter: BlockCutter) -> None:
        """Use another cutter for later blocks."""
        self.cutter = cutter

    def take(self) -> StagedBlock | None:
        """Return the next block; None after the last."""
        self._fill_queue()
        if not self._queue:
            return None
        block = self._queue.popleft().result()
        self._recent_bytes = block.nbytes
        return block

    def _fill_queue(self) -> None:
        """Cut blocks, and start to prepare them."""
        brief, nrows = self.preparer.is_brief, self.preparer.a.nrows
        held = self.cutter.staging_bytes // max(self._recent_bytes, 1) - 2
        wanted = 1 if brief else max(2, min(self._thread_count + 1, held))
        new = 0
        while self.next_row < nrows and len(self._queue) < wanted and self._may_cut(new):
            start, stop = self.next_row, self.cutter.next_stop(self.next_row)
            is_only = not self._queue and stop == nrows
            submit = threads.run_now if is_only or brief else threads.thread_pool(self._thread_count, "stage").submit
            self._queue.append(submit(self.preparer.prepare, start, stop, self.cutter.products.between(start, stop)))
            self.next_row, new = stop, new + 1

    def _may_cut(self, new: int) -> bool:
        """Return whether to cut one more block after `new` blocks.

        While the first block in the queue is being prepared, waiting for counts costs nothing; once it is ready, the
        device would wait too.
        """
        if not self.is_ready:
            return True
        return new < self.preparer.tuning.cut_at_once and self.cutter.is_ready(self.next_row)

    def prepare(self, start: int, stop: int) -> StagedBlock:
        """Prepare rows [start, stop) in the calling thread."""
        return self.preparer.prepare(start, stop, self.cutter.products.between(start, stop))

    def recall(self) -> list[StagedBlock]:
        """Return the blocks that were prepared ahead; `take` will not return them."""
        blocks = [future.result() for future in self._queue]
        self._queue.clear()
        return blocks

    def close(self) -> None:
        """Drop all blocks; wait for threads that are preparing one."""
        for future in self._queue:
            future.cancel()
        for future in self._queue:
            if not future.cancelled():
                future.exception()
        self._queue.clear()
