"""Rows of C shared out to threads in slices that are taken, and placed in C, in order.

A thread whose slice comes next makes it in place. Another thread makes its slice in scratch memory small enough for the
cache, waits for the slices before it, which are about as far, and copies its slice to its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spdist.kernels.cpu.prepare import FillRows, PreparedProduct, RowBuffers
from spdist.kernels.cpu.workspace import SCRATCH_ENTRIES
from spdist.matrices.dtypes import IndexArray, ValueArray

SliceStop = Callable[[PreparedProduct, int, int], tuple[int, int]]
"""Returns the end of a slice of rows from `start` on, one row at least, and its products."""


@dataclass(slots=True)
class RowSlices:
    """Rows ``[start, stop)`` of a product, made by several threads.

    Attributes
    ----------
    product : PreparedProduct
    new_filler : callable
        Returns a thread's own function that makes rows.
    slice_stop : callable
    out : RowBuffers
        For all rows.
    start, stop : int
    taken : int
        Slices that threads have taken.
    placed : int
        Slices whose place in C is known.
    row : int
        First row that no thread has taken.
    offset : int
        Entries of the placed slices.
    needed : int
        Entries of the rows that fit, and of the first row that did not.
    rows : int
        Rows that fit.
    over : bool
        Whether C is full or a thread failed.
    error : exception, optional
        The first that a thread raised.
    """

    product: PreparedProduct
    new_filler: Callable[[PreparedProduct], FillRows]
    slice_stop: SliceStop
    out: RowBuffers
    start: int
    stop: int
    taken: int = 0
    placed: int = 0
    row: int = 0
    offset: int = 0
    needed: int = 0
    rows: int = 0
    over: bool = False
    error: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, threads: int) -> tuple[int, int]:
        """Make the rows; return how many fit, and the entries of these rows and of the first that did not fit."""
        self.row = self.start
        helpers = [threading.Thread(target=self._work, daemon=True) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        self._work()
        for helper in helpers:
            helper.join()
        if self.error is not None:
            raise self.error
        return self.rows, self.needed

    def _work(self) -> None:
        try:
            fill = self.new_filler(self.product)
            size = min(SCRATCH_ENTRIES, self.out.capacity)
            scratch = np.empty(size + 1, self.out.indices.dtype), np.empty(size + 1, self.out.data.dtype)
            while (taken := self._take()) is not None:
                self._make(fill, *taken, *scratch)
        except BaseException as error:  # to the caller's thread, whatever it is
            with self.changed:
                self.error = self.error or error
                self.over = True
                self.changed.notify_all()

    def _take(self) -> tuple[int, int, int, int] | None:
        """Return the next slice: its number, its first row, the row after its last, and its products."""
        with self.changed:
            if self.over or self.row == self.stop:
                return None
            number, first = self.taken, self.row
            self.row, products = self.slice_stop(self.product, first, self.stop)
            self.taken += 1
            return number, first, self.row, products

    def _make(
        self, fill: FillRows, number: int, first: int, last: int, products: int, indices: IndexArray, data: ValueArray
    ) -> None:
        ends = self.out.ends[first - self.start : last - self.start]
        bound = min(products, (last - first) * self.product.longest)
        size = len(indices) - 1
        if bound > size and not self._wait(number):
            return
        if self.placed == number:
            offset = self.offset
            rest = RowBuffers(self.out.indices[offset:], self.out.data[offset:], ends, self.out.capacity - offset)
            rows, needed = fill(first, last, rest)
            self._place(first, rows, last, needed)
            ends[:rows] += offset
            return
        fill(first, last, RowBuffers(indices, data, ends, size))
        if not self._wait(number):
            return
        offset = self.offset
        rows = int(np.searchsorted(ends, self.out.capacity - offset, side="right"))
        nnz = int(ends[rows - 1]) if rows else 0
        self._place(first, rows, last, int(ends[min(rows, last - first - 1)]))
        self.out.indices[offset : offset + nnz] = indices[:nnz]
        self.out.data[offset : offset + nnz] = data[:nnz]
        ends[:rows] += offset

    def _wait(self, number: int) -> bool:
        """Wait until the slices before `number` are placed; return whether there is still room."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or self.placed == number)
            return not self.over

    def _place(self, first: int, rows: int, last: int, needed: int) -> None:
        """Note that the next slice has its place, and that `rows` of its rows fit."""
        with self.changed:
            self.rows = first - self.start + rows
            self.needed = self.offset + needed
            self.offset += needed
            self.placed += 1
            self.over = self.over or first + rows < last
            self.changed.notify_all()
