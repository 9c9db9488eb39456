"""Multiply two blocks on the CPU: C = A @ B, with SciPy or with the Numba kernels of `rowwise`.

Both engines give the same bits: the pattern is structural (entries that cancel, and stored zeros, are kept), rows are
sorted, and the products of an entry are added to a zero in the order of k. Semirings, masks, thresholds and top-n
(`product_spec.ProductSpec`) need Numba. Kernels cut rows as they make them, so that no more of C is in memory than is
kept.

Importing this module does not import Numba; the first product that uses it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spdist.errors import InputError
from spdist.kernels.cpu import scipy_engine
from spdist.kernels.cpu.prepare import EngineOrAuto, FillRows, PreparedProduct, RowBuffers, prepare
from spdist.kernels.cpu.product_counts import estimate_products, row_products
from spdist.kernels.cpu.workspace import SCRATCH_ENTRIES, Engine
from spdist.kernels.product_spec import PLAIN, ProductSpec, longest_row
from spdist.matrices.csr import CSR, empty
from spdist.matrices.dtypes import IndexArray, ValueArray

PARALLEL_PRODUCTS = 1 << 19
"""Products for each thread after the first: with fewer, another thread costs more than it gains."""
CHEAP_BYTES = 1 << 30
"""Bytes of C up to which a loose bound on nnz(C) is good enough: pages that are never touched cost nothing."""

SliceStop = Callable[[PreparedProduct, int, int], tuple[int, int]]
"""Returns the end of a slice of rows from `start` on, one row at least, and its products."""


def multiply(
    a: CSR,
    b: CSR,
    *,
    engine: EngineOrAuto = "auto",
    threads: int = 1,
    workspace_limit: int | None = None,
    spec: ProductSpec = PLAIN,
) -> CSR:
    """Return ``a @ b``, or the product that a specification asks for.

    Parameters
    ----------
    a, b : CSR
        Canonical; ``a.ncols == b.nrows``. Any dtypes that `check_dtype` accepts; int32 or int64 indices.
    engine : {"auto", "scipy", "numba"}
        "auto" takes the engine that `prepare.choose` returns. The result has the same bits with each engine.
    threads : int
        Most threads; small products use one.
    workspace_limit : int, optional
        Bytes that "auto" may use beyond operands and result.
    spec : ProductSpec
        Semiring, mask, triangle, epilogue, threshold, top-n. Only "numba" multiplies by a specification that is not
        plain, and "auto" then takes it.

    Returns
    -------
    CSR
        Canonical, with the structural pattern, ``index_dtype(b.ncols)`` and ``result_dtype``, or the semiring's dtype.

    Raises
    ------
    MatrixError
        If the shapes or dtypes do not fit.
    InputError
        If `engine` is "scipy" and the specification is not plain, or Numba does not compile a function of it.

    Examples
    --------
    >>> a = CSR(np.array([0, 1, 2]), np.array([1, 0], np.int32), np.array([2.0, 3.0]), (2, 2))
    >>> multiply(a, a).data
    array([6., 6.])
    """
    product = prepare(a, b, engine, threads, workspace_limit, spec)
    return _make_rows(product, _bound_entries(product), 0)


def multiply_rows(
    a: CSR,
    b: CSR,
    start: int,
    capacity: int,
    *,
    engine: EngineOrAuto = "auto",
    threads: int = 1,
    workspace_limit: int | None = None,
    spec: ProductSpec = PLAIN,
) -> CSR:
    """Return as many whole rows of ``a @ b``, from `start` on, as fit in `capacity` entries.

    Parameters
    ----------
    a, b : CSR
        As for `multiply`.
    start : int
        First row, ``0 <= start <= a.nrows``.
    capacity : int
        Entries of C. If the first row alone is longer, it is returned whole.
    engine, threads, workspace_limit, spec
        As for `multiply`; a mask has a row for each row of `a`. Entries that are cut from a row need no capacity.

    Returns
    -------
    CSR
        Rows ``[start, start + result.nrows)`` of C: one at least, unless `start` is ``a.nrows``. Buffers for `capacity`
        entries are reserved, but only what is written takes memory, and the rest is given back.

    Raises
    ------
    InputError
        If `start` is not in the range or `capacity` is negative.
    """
    if not 0 <= start <= a.nrows or capacity < 0:
        raise InputError(f"start={start:,} must lie in [0, {a.nrows:,}] and capacity={capacity:,} must not be negative")
    return _make_rows(prepare(a, b, engine, threads, workspace_limit, spec), capacity, start)


def cut(c: CSR, spec: ProductSpec) -> CSR:
    """Apply epilogue, threshold and top-n to the rows of a sum of partial products.

    Parameters
    ----------
    c : CSR
        Canonical. Its arrays are overwritten.
    spec : ProductSpec
        Its semiring, mask and triangle were applied to the partial products already.

    Returns
    -------
    CSR
    """
    if not spec.finishes or not c.nnz:
        return c
    from spdist.kernels.cpu import numba_engine

    numba_engine.cut_rows_in_place(c, spec)
    nnz = int(c.indptr[-1])
    return CSR(c.indptr, c.indices[:nnz].copy(), c.data[:nnz].copy(), c.shape)


def _bound_entries(product: PreparedProduct) -> int:
    """Bound nnz(C), loosely if that costs little: only memory that is written to is ever taken."""
    a, b = product.a, product.b
    if a.nnz == 0 or b.nnz == 0:
        return 0
    loose = min(a.nnz * longest_row(b), a.nrows * product.longest)
    if product.spec.inside is not None:
        loose = min(loose, product.spec.inside.nnz)
    if loose * (product.dtype.itemsize + product.index_dtype.itemsize) <= CHEAP_BYTES:
        return loose
    if product.engine == "scipy":
        return min(loose, int(row_products(a, np.diff(b.indptr)).sum()))
    from spdist.kernels.cpu import numba_engine

    return min(loose, numba_engine.count_products(product))


def _make_rows(product: PreparedProduct, capacity: int, start: int) -> CSR:
    """Make rows from `start` on until `capacity` is full, one row at least."""
    nrows, ncols = product.a.nrows, product.b.ncols
    if start == nrows:
        return empty((0, ncols), product.dtype)
    rows, needed, c = _fill_buffers(product, capacity, start, nrows)
    if rows == 0:
        rows, needed, c = _fill_buffers(product, needed, start, start + 1)
    # Shrinking in place gives the untouched pages back and copies nothing; no view of the buffers is left by now.
    nnz = int(c.indptr[rows])
    c.indptr.resize(rows + 1, refcheck=False)
    c.indices.resize(nnz, refcheck=False)
    c.data.resize(nnz, refcheck=False)
    return CSR(c.indptr, c.indices, c.data, (rows, ncols))


def _fill_buffers(product: PreparedProduct, capacity: int, start: int, stop: int) -> tuple[int, int, CSR]:
    """Return how many rows fit, the entries of these rows and of the first that did not fit, and the buffers."""
    capacity = min(capacity, (stop - start) * product.longest)
    indptr = np.empty(stop - start + 1, np.int64)
    indptr[0] = 0
    indices, data = np.empty(capacity + 1, product.index_dtype), np.empty(capacity + 1, product.dtype)
    out = RowBuffers(indices, data, indptr[1:], capacity)
    size = estimate_products(product.a, product.b) if product.spec.fused else capacity
    threads = min(product.threads, size // PARALLEL_PRODUCTS + 1, stop - start)
    new_filler, slice_stop = _engine_functions(product.engine)
    if threads == 1:
        rows, needed = new_filler(product)(start, stop, out)
    else:
        rows, needed = RowSlices(product, new_filler, slice_stop, out, start, stop).run(threads)
    return rows, needed, CSR(indptr, indices, data, (stop - start, product.b.ncols))


def _engine_functions(engine: Engine) -> tuple[Callable[[PreparedProduct], FillRows], SliceStop]:
    """Return the functions of an engine that make rows and cut them into slices; "numba" is imported by this."""
    if engine == "scipy":
        return scipy_engine.new_filler, scipy_engine.slice_stop
    from spdist.kernels.cpu import numba_engine

    return numba_engine.new_filler, numba_engine.slice_stop


@dataclass(slots=True)
class RowSlices:
    """Rows ``[start, stop)`` of a product, made by several threads in slices that are taken, and placed in C, in order.

    A thread whose slice comes next makes it in place. Another thread makes its slice in scratch memory small enough for
    the cache, waits for the slices before it, which are about as far, and copies its slice to its place.

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
