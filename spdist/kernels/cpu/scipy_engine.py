"""Rows of a plain product by SciPy's compiled loops, slice by slice, with the structural pattern."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.sparse import _sparsetools

from spdist.kernels.cpu.prepare import PreparedProduct, RowBuffers
from spdist.kernels.cpu.product_counts import row_products
from spdist.kernels.cpu.workspace import SCIPY_SCRATCH_ENTRIES, SCIPY_SLICE_PRODUCTS
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, IndexArray, Int64Array, ValueArray


class Arrays(NamedTuple):
    """A CSR matrix with offsets and indices of one dtype, as SciPy's loops take it."""

    indptr: IndexArray
    indices: IndexArray
    data: ValueArray


MOST_COMPARED = 4096
"""Entries that are sorted by comparing them sooner than by transposing them twice."""

FillRows = Callable[[int, int, RowBuffers], tuple[int, int]]
"""Makes rows ``[start, stop)`` of C in buffers.

Returns how many rows fit, and the entries of these rows and of the first row that did not fit.
"""


class ScipyRows:
    """Rows ``[start, stop)`` of a plain product, made by SciPy; `bound` counts their products."""

    def __init__(self, product: PreparedProduct, start: int, stop: int, threads: int) -> None:
        self.product, self.start, self.stop, self.threads = product, start, stop, threads
        rows = product.a.rows(start, stop)
        self.bound = int(row_products(rows, np.diff(product.b.indptr)).sum())

    def make(self, out: RowBuffers) -> tuple[int, int]:
        """Make the rows; return how many fit, and the entries of these rows and of the first that did not fit."""
        fill = _filler(self.product)
        if self.threads == 1:
            return fill(self.start, self.stop, out)
        return RowSlices(self.product, fill, out, self.start, self.stop).run(self.threads)


def whole_product(product: PreparedProduct) -> CSR:
    """Make all rows in the caller's thread; their entries are counted before, so that nothing is copied."""
    a, b = product.a, product.b
    dtype = np.dtype(np.int64 if max(a.nnz, b.nnz, b.ncols) > INT32_MAX else np.int32)
    left, right = (Arrays(m.indptr.astype(dtype), m.indices.astype(dtype, copy=False), m.data) for m in (a, b))
    c = structural_product((a.nrows, b.ncols), left, right, sort=product.spec.sort, twice=True)
    indices = c.indices.astype(product.index_dtype, copy=False)
    return CSR(c.indptr.astype(np.int64, copy=False), indices, c.data, (a.nrows, b.ncols))


def _filler(product: PreparedProduct) -> FillRows:
    """Return a function that makes rows by SciPy."""
    a, b = product.a, product.b
    int64 = max(a.nnz, b.nnz, b.ncols) > INT32_MAX
    dtype = np.dtype(np.int64 if int64 else np.int32)
    right = Arrays(b.indptr.astype(dtype, copy=False), b.indices.astype(dtype, copy=False), b.data)

    def fill(start: int, stop: int, out: RowBuffers) -> tuple[int, int]:
        done, at = 0, 0
        while start + done < stop:
            last, _ = slice_stop(product, start + done, stop)
            rows = a.rows(start + done, last)
            left = Arrays(rows.indptr.astype(dtype, copy=False), rows.indices.astype(dtype, copy=False), rows.data)
            c = structural_product((last - start - done, b.ncols), left, right, sort=product.spec.sort)
            fits = int(np.searchsorted(c.indptr, out.capacity - at, side="right")) - 1
            nnz = int(c.indptr[fits])
            out.indices[at : at + nnz] = c.indices[:nnz]
            out.data[at : at + nnz] = c.data[:nnz]
            out.ends[done : done + fits] = c.indptr[1 : fits + 1]
            out.ends[done : done + fits] += at
            if fits < last - start - done:
                return done + fits, at + int(c.indptr[fits + 1])
            done, at = done + fits, at + nnz
        return done, at

    return fill


def slice_stop(product: PreparedProduct, start: int, stop: int) -> tuple[int, int]:
    """Return the end of a slice of about `SCIPY_SLICE_PRODUCTS` products, one row at least, and its products."""
    a, b = product.a, product.b
    begin = int(a.indptr[start])
    last = int(np.searchsorted(a.indptr, begin + SCIPY_SLICE_PRODUCTS, side="right")) - 1
    last = min(max(last, start + 1), stop)
    running = np.cumsum(row_products(a.rows(start, last), np.diff(b.indptr)))
    rows = max(1, int(np.searchsorted(running, SCIPY_SLICE_PRODUCTS, side="right")))
    return start + rows, int(running[rows - 1])


@dataclass(slots=True)
class RowSlices:
    """Rows ``[start, stop)`` of a product, made by several threads in slices that are taken, and placed in C, in order.

    A thread whose slice comes next makes it in place. Another thread makes its slice in scratch memory small enough for
    the cache, waits for the slices before it, which are about as far, and copies its slice to its place.
    """

    product: PreparedProduct
    fill: FillRows  # makes rows; any thread may call it
    out: RowBuffers  # for all rows
    start: int
    stop: int
    taken: int = 0  # slices that threads have taken
    placed: int = 0  # slices whose place in C is known
    row: int = 0  # first row that no thread has taken
    offset: int = 0  # entries of the placed slices
    needed: int = 0  # entries of the rows that fit, and of the first row that did not
    rows: int = 0  # rows that fit
    over: bool = False  # whether C is full or a thread failed
    error: BaseException | None = None  # the first that a thread raised
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
            size = min(SCIPY_SCRATCH_ENTRIES, self.out.capacity)
            scratch = np.empty(size + 1, self.out.indices.dtype), np.empty(size + 1, self.out.data.dtype)
            while (taken := self._take()) is not None:
                self._make(*taken, *scratch)
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
            self.row, products = slice_stop(self.product, first, self.stop)
            self.taken += 1
            return number, first, self.row, products

    def _make(self, number: int, first: int, last: int, products: int, indices: IndexArray, data: ValueArray) -> None:
        ends = self.out.ends[first - self.start : last - self.start]
        bound = min(products, (last - first) * self.product.longest)
        size = len(indices) - 1
        if bound > size and not self._wait(number):
            return
        if self.placed == number:
            offset = self.offset
            rest = RowBuffers(self.out.indices[offset:], self.out.data[offset:], ends, self.out.capacity - offset)
            rows, needed = self.fill(first, last, rest)
            self._place(first, rows, last, needed)
            ends[:rows] += offset
            return
        self.fill(first, last, RowBuffers(indices, data, ends, size))
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


def structural_product(shape: tuple[int, int], a: Arrays, b: Arrays, *, sort: bool, twice: bool = False) -> Arrays:
    """Return the structural product of two matrices whose indices have one dtype; sort its rows if they must be.

    SciPy's loop leaves out entries that come out as zero, but counts them first. If some are missing, the full pattern
    comes from a second product, of ones, which has no zeros.
    `twice`: whether there is memory for the product twice, with which it is sorted sooner.
    """
    count = int(_sparsetools.csr_matmat_maxnnz(*shape, a.indptr, a.indices, b.indptr, b.indices))
    c = _product(shape, count, a, b)
    nnz = int(c.indptr[-1])
    if nnz == count:
        return _sorted(shape, c, twice) if sort else c
    _sparsetools.csr_sort_indices(shape[0], *c)
    ones = (m._replace(data=np.ones(len(m.indices), np.bool_)) for m in (a, b))
    pattern = _product(shape, count, *ones)
    _sparsetools.csr_sort_indices(shape[0], *pattern)
    full = np.zeros(count, c.data.dtype)
    found = _positions(shape, c.indptr, c.indices[:nnz])
    full[np.searchsorted(_positions(shape, pattern.indptr, pattern.indices), found)] = c.data[:nnz]
    return pattern._replace(data=full)


def _sorted(shape: tuple[int, int], c: Arrays, twice: bool) -> Arrays:
    """Sort rows without duplicates: by two transpositions, which compare nothing, or in place."""
    if not twice or len(c.indices) < MOST_COMPARED or shape[1] > 2 * len(c.indices):
        _sparsetools.csr_sort_indices(shape[0], *c)
        return c
    return sort_rows(shape, c, c)


def sort_rows(shape: tuple[int, int], m: Arrays, out: Arrays) -> Arrays:
    """Sort the rows of a matrix by two transpositions; entries of one column keep their order. `out` may be `m`."""
    indptr = np.empty(shape[1] + 1, m.indptr.dtype)
    columns = Arrays(indptr, np.empty_like(m.indices), np.empty_like(m.data))
    _sparsetools.csr_tocsc(shape[0], shape[1], *m, *columns)
    _sparsetools.csr_tocsc(shape[1], shape[0], *columns, *out)
    return out


def _product(shape: tuple[int, int], count: int, a: Arrays, b: Arrays) -> Arrays:
    """Run SciPy's compiled product into arrays of `count` entries."""
    dtype = np.result_type(a.indptr, np.int64 if count > INT32_MAX else np.int32)
    left, right = ([x.astype(dtype, copy=False) for x in m[:2]] for m in (a, b))
    c = Arrays(np.empty(shape[0] + 1, dtype), np.empty(count, dtype), np.empty(count, a.data.dtype))
    _sparsetools.csr_matmat(*shape, left[0], left[1], a.data, right[0], right[1], b.data, *c)
    return c


def _positions(shape: tuple[int, int], indptr: IndexArray, indices: IndexArray) -> Int64Array:
    """Return each entry's row-major position in the whole matrix."""
    positions = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(indptr))
    positions *= shape[1]
    positions += indices
    return positions
