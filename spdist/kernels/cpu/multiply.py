"""Multiply two blocks on the CPU: C = A @ B, with SciPy or with the Numba kernels of `rowwise`.

Both engines give the same bits: the pattern is structural (entries that cancel, and stored zeros, are kept), rows are
sorted, and the products of an entry are added to a zero in the order of k. Semirings, masks, threshold and top-n
(`product_spec.ProductSpec`) are Numba's; rows are cut in the kernel, so that no
more of C is ever in memory than is kept.

Importing this module does not import Numba; the first product that uses it does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import _sparsetools

from spdist.errors import InputError
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.kernels.cpu.workspace import Engine
from spdist.kernels.product_spec import NORMS, PLAIN, ProductSpec, longest_row
from spdist.kernels.semirings import Semiring
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR, empty
from spdist.matrices.dtypes import INT32_MAX, IndexArray, Int64Array, ValueArray, index_dtype, result_dtype

EngineOrAuto = Literal["auto", "scipy", "numba"]

SMALL_PRODUCTS = 1 << 24
"""Products up to which SciPy is done before Numba would be loaded, or compiled for new dtypes."""
SAMPLE = 1 << 16
"""Entries of A that an estimate looks at."""
PARALLEL_PRODUCTS = 1 << 19
"""Products below which a second thread costs more than it gains."""
CHEAP_BYTES = 1 << 30
"""Up to this size a bound on C may be loose: pages that are never touched cost nothing."""
CACHE_BYTES = 1 << 20
"""Size of B from which its rows are fetched ahead."""

_ready: set[tuple[Any, ...]] = set()


def multiply(
    a: CSR,
    b: CSR,
    *,
    engine: EngineOrAuto = "auto",
    threads: int = 1,
    workspace_limit: int | None = None,
    spec: ProductSpec = PLAIN,
) -> CSR:
    """Return ``a @ b``, or what the options make of it.

    Parameters
    ----------
    a, b : CSR
        Canonical; ``a.ncols == b.nrows``. Any dtypes that `check_dtype` accepts; int32 or int64 indices.
    engine : {"auto", "scipy", "numba"}
        "auto" takes what `choose` says. The result has the same bits with each.
    threads : int
        At most so many threads; small products use one.
    workspace_limit : int, optional
        Bytes that "auto" may use beyond operands and result.
    spec : ProductSpec
        Semiring, mask, triangle, threshold, top-n; all but plain ones are for "numba", which "auto" takes for them.

    Returns
    -------
    CSR
        Canonical, with the structural pattern, ``index_dtype(b.ncols)`` and ``result_dtype``, or the semiring's.

    Raises
    ------
    MatrixError
        If the shapes or dtypes do not fit.
    InputError
        If `engine` is "scipy" and the options are not plain, or Numba does not compile a function of theirs.
    """
    task = _prepare(a, b, engine, threads, workspace_limit, spec)
    return _finish(task, _bound(task), 0)


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
        Entries of C. A first row longer than that is returned whole, alone.
    engine, threads, workspace_limit, options
        As for `multiply`; a mask has a row for each of `a`. What is cut from a row takes no capacity.

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
    return _finish(_prepare(a, b, engine, threads, workspace_limit, spec), capacity, start)


def cut(c: CSR, spec: ProductSpec) -> CSR:
    """Apply epilogue, threshold and top-n to the rows of a sum of partial products.

    Parameters
    ----------
    c : CSR
        Canonical. Its arrays are used for the result.
    spec : ProductSpec
        Of which semiring and mask have done their part.
    """
    from spdist.kernels.cpu import fused

    if not spec.finishes or not c.nnz:
        return c
    dtype = np.dtype(f"u{c.dtype.itemsize}") if c.dtype.kind == "b" else c.dtype
    longest = longest_row(c)
    keep = _keep(spec, c.dtype, dtype, min(longest, spec.top_n or longest), above=False)
    row = np.empty(longest, c.indices.dtype), np.empty(longest, dtype)
    kernel = fused.cut_rows if spec.epilogue is None or spec.epilogue.apply is None else _jit().unsaved(fused.cut_rows)
    kernel((c.indptr, c.indices, c.data.view(dtype)), _finish_arguments(spec, dtype), keep, row)
    nnz = int(c.indptr[-1])
    return CSR(c.indptr, c.indices[:nnz].copy(), c.data[:nnz].copy(), c.shape)


def choose(a: CSR, b: CSR, *, threads: int = 1, workspace_limit: int | None = None) -> tuple[Engine, str]:
    """Return the engine for ``a @ b`` and why; both give the same bits, so that only time and memory differ.

    Parameters
    ----------
    a, b : CSR
    threads : int
    workspace_limit : int, optional
        Bytes allowed beyond operands and result.

    Returns
    -------
    engine : "scipy" or "numba"
    reason : str
    """
    if _specialisation(a, b) in _ready:
        return "numba", "its kernels are loaded, and quicker than SciPy for every shape measured"
    products = estimate_products(a, b)
    if products > SMALL_PRODUCTS:
        return "numba", f"about {products:,} products repay loading its kernels"
    if b.ncols > max(4 * products, SAMPLE):
        return "numba", f"SciPy would clear {b.ncols:,} columns for about {products:,} products"
    if b.nnz > INT32_MAX or a.nnz > INT32_MAX:
        return "numba", "SciPy would need a copy of the indices in int64"
    sizes = result_dtype(a.dtype, b.dtype).itemsize, index_dtype(b.ncols).itemsize
    needed = cpu_sizes.cpu_workspace("scipy", b.ncols, products, *sizes, threads)
    if workspace_limit is not None and needed > workspace_limit:
        return "numba", f"SciPy may need {needed:,} bytes of workspace, and {workspace_limit:,} are allowed"
    return "scipy", f"about {products:,} products are done before Numba's kernels would be loaded"


def row_products(a: CSR, b_row_nnz: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Count the products of each row of ``C = A @ B``.

    Parameters
    ----------
    a : CSR
    b_row_nnz : (a.ncols,) integers
        Entries in each row of B.

    Returns
    -------
    (a.nrows,) int64
        Summed over a row block it bounds that block's nnz(C) from above.

    References
    ----------
    A. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, equation 1, by rows.

    Examples
    --------
    >>> a = CSR(np.array([0, 2, 2]), np.array([0, 1], np.int32), np.ones(2), (2, 2))
    >>> row_products(a, np.array([3, 1]))
    array([4, 0])
    """
    out = np.zeros(a.nrows, np.int64)
    rows = np.flatnonzero(a.indptr[1:] > a.indptr[:-1])
    # Blocks of about SAMPLE entries keep the gathered counts in cache, and the memory small.
    cuts = np.searchsorted(a.indptr[rows], np.arange(0, a.nnz + SAMPLE, SAMPLE))
    for first, last in itertools.pairwise(cuts):
        if first < last:
            begin, end = a.indptr[rows[first]], a.indptr[rows[last - 1] + 1]
            counts = b_row_nnz[a.indices[begin:end]]
            out[rows[first:last]] = np.add.reduceat(counts, a.indptr[rows[first:last]] - begin, dtype=np.int64)
    return out


def estimate_products(a: CSR, b: CSR) -> int:
    """Estimate the products of ``a @ b`` from at most `SAMPLE` evenly spaced entries of A; exact if it has no more."""
    step = max(1, -(-a.nnz // SAMPLE))
    k = a.indices[::step]
    return int((b.indptr[k + 1] - b.indptr[k]).sum(dtype=np.int64)) * a.nnz // max(len(k), 1)


class _Target(NamedTuple):
    """Where rows go: indices and data (a spare entry after `capacity`), and the entries up to the end of each row."""

    indices: IndexArray
    data: ValueArray
    ends: Int64Array
    capacity: int


Fill = Callable[[int, int, _Target], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Task:
    """A checked product. `new_fill` gives each thread its own function that makes rows [start, stop) in a target.

    That function returns how many rows fit, and the entries of these and of the first that did not.
    """

    a: CSR
    b: CSR
    dtype: np.dtype[Any]
    threads: int
    engine: Engine
    new_fill: Callable[[_Task], Fill]
    spec: ProductSpec
    longest: int

    @property
    def index_dtype(self) -> np.dtype[Any]:
        return index_dtype(self.b.ncols)

    @property
    def ring(self) -> Semiring | None:
        """The semiring as kernels take it: bools have OR and AND for plus and times."""
        return self.spec.ring(self.dtype)

    @property
    def kernel_dtype(self) -> np.dtype[Any]:
        """The dtype that kernels compute in: the same bits, and fewer kinds to compile where signs do not matter."""
        named = self.ring is None or self.ring.named
        unsigned = (self.dtype.kind == "b" and named) or (self.dtype.kind == "i" and self.spec.plain)
        return np.dtype(f"u{self.dtype.itemsize}") if unsigned else self.dtype


def _prepare(
    a: CSR, b: CSR, engine: EngineOrAuto, threads: int, workspace_limit: int | None, spec: ProductSpec
) -> _Task:
    check_product_shapes(a.shape, b.shape)
    if engine not in ("auto", "scipy", "numba"):
        raise InputError(f"engine={engine!r} is not one of auto, scipy, numba")
    if threads < 1:
        raise InputError(f"threads={threads} must be at least 1")
    if engine == "scipy" and not spec.plain:
        raise InputError("engine 'scipy' knows no semirings, masks, triangles or cuts of rows: use 'numba' or 'auto'")
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    spec.check((a.nrows, b.ncols), dtype)
    if spec.functions:
        _jit().check_functions(spec.functions, dtype)
    chosen: Engine = "numba" if not spec.plain or engine == "numba" else "scipy"
    if spec.plain and engine == "auto":
        chosen = choose(a, b, threads=threads, workspace_limit=workspace_limit)[0]
    reads, longest = spec.semiring.reads, spec.row_entries(b.ncols)
    left, right = _cast(a, dtype, "a" in reads), _cast(b, dtype, "b" in reads)
    return _Task(left, right, dtype, threads, chosen, _FILLS[chosen], spec, longest)


def _cast(m: CSR, dtype: np.dtype[Any], read: bool) -> CSR:
    """Return the matrix with values of `dtype` and the indices that its shape asks for: few kernels to compile.

    Values that are not read need not be there: an array that nobody touches takes no memory.
    """
    indices = m.indices.astype(index_dtype(m.ncols), copy=False)
    data = m.data.astype(dtype, copy=False) if read else np.empty(m.nnz, dtype)
    return CSR(m.indptr, indices, data, m.shape)


def _bound(task: _Task) -> int:
    """Bound nnz(C), loosely if that costs little: only memory that is written to is ever taken."""
    a, b = task.a, task.b
    if a.nnz == 0 or b.nnz == 0:
        return 0
    loose = min(a.nnz * longest_row(b), a.nrows * task.longest)
    if task.spec.inside is not None:
        loose = min(loose, task.spec.inside.nnz)
    if loose * (task.dtype.itemsize + task.index_dtype.itemsize) <= CHEAP_BYTES:
        return loose
    if task.engine == "scipy":
        return min(loose, int(row_products(a, np.diff(b.indptr)).sum()))
    return min(loose, int(_rowwise().slice_stop(a.indptr, a.indices, b.indptr, 0, a.nrows, 1 << 62)[1]))


def _finish(task: _Task, capacity: int, start: int) -> CSR:
    """Make rows from `start` on until `capacity` is full, one row at least."""
    nrows, ncols = task.a.nrows, task.b.ncols
    if start == nrows:
        return empty((0, ncols), task.dtype)
    rows, needed, c = _fill_buffers(task, capacity, start, nrows)
    if rows == 0:
        rows, needed, c = _fill_buffers(task, needed, start, start + 1)
    # Shrinking in place gives the untouched pages back and copies nothing; no view of the buffers is left by now.
    nnz = int(c.indptr[rows])
    c.indptr.resize(rows + 1, refcheck=False)
    c.indices.resize(nnz, refcheck=False)
    c.data.resize(nnz, refcheck=False)
    return CSR(c.indptr, c.indices, c.data, (rows, ncols))


def _fill_buffers(task: _Task, capacity: int, start: int, stop: int) -> tuple[int, int, CSR]:
    """Return how many rows fit, the entries they and the first that did not fit need, and the buffers."""
    capacity = min(capacity, (stop - start) * task.longest)
    indptr = np.empty(stop - start + 1, np.int64)
    indptr[0] = 0
    indices, data = np.empty(capacity + 1, task.index_dtype), np.empty(capacity + 1, task.dtype)
    target = _Target(indices, data, indptr[1:], capacity)
    work = estimate_products(task.a, task.b) if task.spec.fused else capacity
    threads = min(task.threads, work // PARALLEL_PRODUCTS + 1, stop - start)
    if threads == 1:
        rows, needed = task.new_fill(task)(start, stop, target)
    else:
        rows, needed = _Slices(task, target, start, stop).run(threads)
    return rows, needed, CSR(indptr, indices, data, (stop - start, task.b.ncols))


@dataclass(slots=True)
class _Slices:
    """Rows shared out to threads, in slices taken and placed in order.

    A thread whose slice comes next makes it in place; another makes it in scratch memory small enough for the cache,
    waits for the slices before it, which are about as far, and copies it to its place.
    """

    task: _Task
    target: _Target
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
        """Make the rows; return how many fit, and the entries of these and of the first that did not."""
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
            fill = self.task.new_fill(self.task)
            size = min(cpu_sizes.SCRATCH_ENTRIES, self.target.capacity)
            scratch = np.empty(size + 1, self.target.indices.dtype), np.empty(size + 1, self.target.data.dtype)
            while (taken := self._take()) is not None:
                self._make(fill, *taken, *scratch)
        except BaseException as error:  # to the caller's thread, whatever it is
            with self.changed:
                self.error = self.error or error
                self.over = True
                self.changed.notify_all()

    def _take(self) -> tuple[int, int, int, int] | None:
        """Return the next slice: its number, its rows and its products."""
        with self.changed:
            if self.over or self.row == self.stop:
                return None
            number, first = self.taken, self.row
            self.row, products = _slice_stop(self.task, first, self.stop)
            self.taken += 1
            return number, first, self.row, products

    def _make(
        self, fill: Fill, number: int, first: int, last: int, products: int, indices: IndexArray, data: ValueArray
    ) -> None:
        ends = self.target.ends[first - self.start : last - self.start]
        bound = min(products, (last - first) * self.task.longest)
        size = len(indices) - 1
        if bound > size and not self._wait(number):
            return
        if self.placed == number:
            offset = self.offset
            place = _Target(
                self.target.indices[offset:], self.target.data[offset:], ends, self.target.capacity - offset
            )
            rows, needed = fill(first, last, place)
            self._place(first, rows, last, needed)
            ends[:rows] += offset
            return
        fill(first, last, _Target(indices, data, ends, size))
        if not self._wait(number):
            return
        offset = self.offset
        rows = int(np.searchsorted(ends, self.target.capacity - offset, side="right"))
        nnz = int(ends[rows - 1]) if rows else 0
        self._place(first, rows, last, int(ends[min(rows, last - first - 1)]))
        self.target.indices[offset : offset + nnz] = indices[:nnz]
        self.target.data[offset : offset + nnz] = data[:nnz]
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


def _slice_stop(task: _Task, start: int, stop: int) -> tuple[int, int]:
    """Return the end of a slice of about `SLICE_PRODUCTS` products, one row at least, and its products."""
    a, b = task.a, task.b
    if task.engine == "numba":
        last, products = _rowwise().slice_stop(a.indptr, a.indices, b.indptr, start, stop, cpu_sizes.SLICE_PRODUCTS)
        return int(last), int(products)
    begin = int(a.indptr[start])
    last = int(np.searchsorted(a.indptr, begin + cpu_sizes.SLICE_PRODUCTS, side="right")) - 1
    last = min(max(last, start + 1), stop)
    total = np.cumsum(row_products(a.rows(start, last), np.diff(b.indptr)))
    rows = max(1, int(np.searchsorted(total, cpu_sizes.SLICE_PRODUCTS, side="right")))
    return start + rows, int(total[rows - 1])


def _rowwise() -> Any:
    """Import Numba and its kernels."""
    from spdist.kernels.cpu import rowwise

    return rowwise


def _jit() -> Any:
    """Import Numba and how kernels are compiled."""
    from spdist.kernels.cpu import numba_compile

    return numba_compile


def _specialisation(a: CSR, b: CSR) -> tuple[Any, ...]:
    """Return what a compiled kernel depends on."""
    wide = b.ncols > cpu_sizes.WINDOW
    return result_dtype(a.dtype, b.dtype), index_dtype(a.ncols), index_dtype(b.ncols), wide


def _numba_fill(task: _Task) -> Fill:
    """Return the Numba engine's function, with a workspace of its own."""
    fill = _fused_fill(task) if task.spec.fused else _product_fill(task)
    if task.spec.plain:
        _ready.add(_specialisation(task.a, task.b))
    return fill


def _product_fill(task: _Task) -> Fill:
    """Return the function that makes whole rows."""
    kernel = _jit().for_ring(_rowwise().multiply_rows, task.ring)
    a, b, work, ahead, wide = _kernel_arguments(task)
    diagonal = task.spec.diagonal

    def fill(start: int, stop: int, target: _Target) -> tuple[int, int]:
        c = (target.indices, target.data.view(task.kernel_dtype), target.ends)
        rows, needed = kernel(a, b, start, stop, work, c, target.capacity, ahead, task.ring, wide, diagonal)
        return int(rows), int(needed)

    return fill


def _fused_fill(task: _Task) -> Fill:
    """Return the function that makes rows under a mask and cuts them."""
    from spdist.kernels.cpu import fused

    a, b, work, ahead, wide = _kernel_arguments(task)
    spec, dtype = task.spec, task.kernel_dtype
    kernel = _jit().for_ring(fused.fused_rows, task.ring)
    if spec.epilogue is not None and spec.epilogue.apply is not None:
        kernel = _jit().unsaved(fused.fused_rows)
    entries = _row_buffer_entries(task)
    above = spec.selects and bool(spec.least(task.dtype).astype(dtype) > work[0][0][0])
    keep = _keep(spec, task.dtype, dtype, min(entries, task.longest), above=above and spec.epilogue is None)
    finish = _finish_arguments(spec, dtype)
    inside, outside = _mask_arguments(task, work[0][0][:1])
    row = np.empty(entries + 1, task.index_dtype), np.empty(entries + 1, dtype), np.empty(1, np.int64)

    def fill(start: int, stop: int, target: _Target) -> tuple[int, int]:
        c = (target.indices, target.data.view(dtype), target.ends)
        rest = work, row, c, target.capacity, ahead, task.ring, wide, spec.diagonal
        rows, needed = kernel(a, b, inside, outside, finish, keep, start, stop, *rest)
        return int(rows), int(needed)

    return fill


def _keep(spec: ProductSpec, dtype: np.dtype[Any], kernel_dtype: np.dtype[Any], top: int, *, above: bool) -> Any:
    """Return what kernels need to cut rows to `top` entries."""
    if not spec.selects:
        return None
    return spec.least(dtype).astype(kernel_dtype), top, np.empty(top + 1, kernel_dtype), above


def _finish_arguments(spec: ProductSpec, dtype: np.dtype[Any]) -> Any:
    """Return the epilogue as kernels take it."""
    epilogue = spec.epilogue
    if epilogue is None:
        return None
    rows, columns = (None if one is None else np.array(one, dtype) for one in (epilogue.rows, epilogue.columns))
    function = None if epilogue.apply is None else _jit().callable_part(epilogue.apply)
    norm = 0 if epilogue.normalize is None else NORMS.index(epilogue.normalize) + 1
    return rows, columns, function, norm, epilogue.drop_zeros


def _kernel_arguments(task: _Task) -> tuple[Any, ...]:
    """Return A, B, a workspace, whether to fetch ahead, and whether C is wide, as the kernels take them."""
    dtype = task.kernel_dtype
    zero = dtype.type(0) if task.ring is None else task.ring.zero_of(dtype)
    work = new_work(task.b.ncols, dtype, zero)
    # None is a type of its own to Numba, and what hangs on it is left out of the compiled code.
    wide = True if task.b.ncols > cpu_sizes.WINDOW else None
    a, (offsets, *entries) = _kernel_arrays(task.a, dtype), _kernel_arrays(task.b, dtype)
    starts = offsets[:-1] if task.spec.diagonal is None else offsets[:-1].copy()  # which kernels move then
    return a, (starts, *entries, offsets[1:]), work, task.b.nbytes > CACHE_BYTES, wide


def _mask_arguments(task: _Task, zero: npt.NDArray[Any]) -> tuple[Any, Any]:
    """Return the mask that rows are confined to, or that they are kept out of, with one thread's hash table for it."""
    mask = task.spec.mask
    if mask is None:
        return None, None
    arrays = _plain(mask.indptr), _plain(mask.indices.astype(task.index_dtype, copy=False))
    longest = longest_row(mask)
    table = np.empty((2, cpu_sizes.table_slots(longest)), task.index_dtype)
    if task.spec.complement:
        return None, (*arrays, table[0], table[1], np.empty(1, np.uint64))
    return (*arrays, table[0], table[1], np.repeat(zero, longest + 1), np.zeros(longest + 1, np.uint8)), None


def _row_buffer_entries(task: _Task) -> int:
    """Bound the entries of a row before it is cut."""
    if task.spec.inside is not None:
        return longest_row(task.spec.inside)
    products = row_products(task.a, np.diff(task.b.indptr))
    return min(task.b.ncols, int(products.max(initial=0)))


def new_work(ncols: int, dtype: np.dtype[Any], zero: Any = 0) -> tuple[tuple[npt.NDArray[Any], ...], ...]:
    """Return the buffers of one thread's Numba kernel, of `cpu_sizes.cpu_workspace` bytes."""
    columns, products = cpu_sizes.window_columns(ncols), cpu_sizes.sort_products(ncols)
    padded = columns + cpu_sizes.PADDING
    totals = np.full(padded, zero, dtype) if zero else np.zeros(padded, dtype)  # zeros take no memory until written
    window = totals, np.zeros(padded, np.uint8), np.zeros(columns // 64 + 2 * 64, np.uint8)
    keys = np.empty((2, products), np.uint64)
    sorting = keys, np.empty(products, dtype), np.empty(cpu_sizes.RADIX_BINS, np.int32)
    slots, rows = cpu_sizes.BATCH_SLOTS + 2 * cpu_sizes.RANK_PRODUCTS, cpu_sizes.BATCH_ROWS + 1
    table = np.empty((3, rows), np.uint64)
    batch = np.empty(slots, np.int32), np.empty(slots, np.uint64), np.empty(slots, dtype), table[0], table[1], table[2]
    return window, sorting, batch


def _kernel_arrays(m: CSR, dtype: np.dtype[Any]) -> tuple[Int64Array, IndexArray, ValueArray]:
    """Return a matrix's arrays as the kernel takes them."""
    return _plain(m.indptr.astype(np.int64, copy=False)), _plain(m.indices), _plain(m.data).view(dtype)


class _Alias:
    """A read-only array's memory, for a second array that Numba takes for a writable one."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or one like it, contiguous and not marked read-only.

    Numba compiles once more for read-only arrays. No kernel writes to its operands.
    """
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else np.asarray(_Alias(array))


def _scipy_fill(task: _Task) -> Fill:
    """Return the SciPy engine's function."""
    a, b = task.a, task.b
    int64 = max(a.nnz, b.nnz, b.ncols) > INT32_MAX
    dtype = np.dtype(np.int64 if int64 else np.int32)
    right = b.indptr.astype(dtype, copy=False), b.indices.astype(dtype, copy=False), b.data

    def fill(start: int, stop: int, target: _Target) -> tuple[int, int]:
        done, at = 0, 0
        while start + done < stop:
            last, _ = _slice_stop(task, start + done, stop)
            part = a.rows(start + done, last)
            left = part.indptr.astype(dtype, copy=False), part.indices.astype(dtype, copy=False), part.data
            indptr, indices, data = _scipy_product((last - start - done, b.ncols), left, right)
            fits = int(np.searchsorted(indptr, target.capacity - at, side="right")) - 1
            nnz = int(indptr[fits])
            target.indices[at : at + nnz] = indices[:nnz]
            target.data[at : at + nnz] = data[:nnz]
            target.ends[done : done + fits] = indptr[1 : fits + 1]
            target.ends[done : done + fits] += at
            if fits < last - start - done:
                return done + fits, at + int(indptr[fits + 1])
            done, at = done + fits, at + nnz
        return done, at

    return fill


def _scipy_product(shape: tuple[int, int], a: Any, b: Any) -> tuple[IndexArray, IndexArray, ValueArray]:
    """Return the sorted structural product of the arrays of two CSR matrices with indices of one dtype.

    SciPy's loop leaves out entries that come out as zero. It counts them first, though, so that their absence shows,
    and only then the pattern is made from a product of ones, which has no zeros.
    """
    count = int(_sparsetools.csr_matmat_maxnnz(*shape, a[0], a[1], b[0], b[1]))
    indptr, indices, data = _scipy_call(shape, count, a, b)
    nnz = int(indptr[-1])
    if nnz == count:
        return indptr, indices, data
    ones = np.ones(len(a[1]), np.bool_), np.ones(len(b[1]), np.bool_)
    full_indptr, full_indices, _ = _scipy_call(shape, count, (*a[:2], ones[0]), (*b[:2], ones[1]))
    full = np.zeros(count, data.dtype)
    full[np.searchsorted(_keys(shape, full_indptr, full_indices), _keys(shape, indptr, indices[:nnz]))] = data[:nnz]
    return full_indptr, full_indices, full


def _scipy_call(shape: tuple[int, int], count: int, a: Any, b: Any) -> tuple[IndexArray, IndexArray, ValueArray]:
    """Run SciPy's compiled product into arrays of `count` entries, and sort its rows."""
    dtype = np.result_type(a[0], np.int64 if count > INT32_MAX else np.int32)
    arrays = [x.astype(dtype, copy=False) for x in (*a[:2], *b[:2])]
    indptr, indices = np.empty(shape[0] + 1, dtype), np.empty(count, dtype)
    data = np.empty(count, a[2].dtype)
    _sparsetools.csr_matmat(*shape, arrays[0], arrays[1], a[2], arrays[2], arrays[3], b[2], indptr, indices, data)
    _sparsetools.csr_sort_indices(shape[0], indptr, indices, data)
    return indptr, indices, data


def _keys(shape: tuple[int, int], indptr: IndexArray, indices: IndexArray) -> Int64Array:
    """Return the entries' places, numbered row by row over the whole matrix."""
    rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(indptr))
    rows *= shape[1]
    rows += indices
    return rows


_FILLS: dict[Engine, Callable[[_Task], Fill]] = {"scipy": _scipy_fill, "numba": _numba_fill}
