"""Rows of a product by the Numba kernels of `rowwise` and `fused`: how a product becomes their arguments.

Importing this module imports Numba.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdist.foundation.threads import run_in_threads
from spdist.kernels.cpu import fused, slices
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.kernels.cpu.arrays import (
    AllowedMask,
    Batch,
    CsrArrays,
    EpilogueArguments,
    ForbiddenMask,
    ProductArguments,
    RowCuts,
    RowRanges,
    RowsOut,
    Selection,
    SortBuffers,
    Window,
    Workspace,
    writable,
)
from spdist.kernels.cpu.numba_compile import callable_part, entry_point, for_ring, unsaved
from spdist.kernels.cpu.prepare import PreparedProduct, RowBuffers, mark_loaded
from spdist.kernels.cpu.product_counts import estimate_products
from spdist.kernels.cpu.rowwise import largest
from spdist.kernels.product_spec import NORMS, ProductSpec, longest_row
from spdist.kernels.semirings import Semiring
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray

CACHE_BYTES = 1 << 20
"""Bytes of B from which kernels prefetch its rows."""
SLICE_SAMPLE = 1 << 12
"""Entries of A that say how long slices should be."""
LEAST_THRESHOLD = 1e-30
"""Threshold from which products may be left out: roundings are in proportion to the values there."""
PRODUCTS_OF_PEAKS = 8
"""Products for each entry of B from which its largest values are worth finding."""
UNBOUNDED = 1 << 62
"""Products of a slice that is not cut."""


BuffersKey: TypeAlias = tuple[np.dtype[Any], np.dtype[Any], int, Semiring | None]
"""Dtypes of indices and values, columns of the accumulator, and the semiring, whose zero the accumulator holds."""


class IdleBuffers:
    """Buffers of threads that have made their rows, for the next product of the same kind.

    To map and to clear them takes longer than the rows of a small product. Only buffers of one kind are kept: no more
    than products of this process had at a time, and about 10 MiB a thread.
    """

    def __init__(self) -> None:
        self._kept: dict[BuffersKey, deque[slices.SliceBuffers]] = {}

    def take(self, key: BuffersKey) -> slices.SliceBuffers | None:
        """Return buffers of a kind, or None; buffers of other kinds are freed."""
        kept = self._kept.get(key)
        if kept is None:
            self._kept = {key: deque()}
            return None
        try:
            return kept.pop()
        except IndexError:
            return None

    def give(self, key: BuffersKey, buffers: slices.SliceBuffers) -> None:
        """Keep buffers, unless another kind is in use by now; their accumulator holds zeros, and no slice waits."""
        kept = self._kept.get(key)
        if kept is not None:
            kept.append(buffers)


_idle_buffers = IdleBuffers()


class NumbaRows:
    """Rows ``[start, stop)`` of a product, made by threads in slices; one thread makes one slice, in place in C.

    `bound`: products of all rows, which bound their entries from above.
    """

    def __init__(self, product: PreparedProduct, start: int, stop: int, threads: int) -> None:
        self.product, self.threads = product, threads
        most = UNBOUNDED if threads == 1 else cpu_sizes.slice_products(_estimate(product, start, stop), threads)
        cuts, self._longest = _cut_rows(product, start, stop, most, threads)
        self._mask_row = 0 if product.spec.mask is None else longest_row(product.spec.mask)
        rows, products = np.append(cuts[0], stop), cuts[1].copy()
        self.bound = int(products.sum())
        self._queue = slices.new_queue(rows, products, product.longest)
        self._peaks = _peaks(product, self.bound)
        if product.spec.plain:
            mark_loaded(product)

    def make(self, out: RowBuffers) -> tuple[int, int]:
        """Make the rows; return how many fit, and the entries of these rows and of the first that did not fit."""
        queue = self._queue._replace(counts=np.full(len(self._queue.products), -1, np.int64))
        spec = self.product.spec
        c, kernel = _rows_out(out, self.product.kernel_dtype), for_ring(slices.multiply_slices, self.product.ring)
        if spec.epilogue is not None and spec.epilogue.apply is not None:
            kernel = unsaved(slices.multiply_slices)

        unsorted, first = None if spec.sorts else True, self._thread_arguments()
        if self.threads > 1:  # the types are the same in all threads, which would look them up one after the other
            kernel = entry_point(kernel, *first[:2], queue, first[2], c, spec.diagonal, unsorted)

        def work(thread: int) -> None:
            arguments, cuts, buffers = self._thread_arguments() if thread else first
            while kernel(arguments, cuts, queue, buffers, c, spec.diagonal, unsorted):
                pass
            if not queue.counters[slices.FULL]:
                self._give_back(buffers)

        try:
            run_in_threads(self.threads, work)
        except BaseException:
            queue.counters[slices.FULL] = 1  # the other threads stop
            raise
        if queue.counters[slices.FULL]:
            return int(queue.counters[slices.ROWS]), int(queue.counters[slices.NEEDED])
        return int(queue.rows[-1] - queue.rows[0]), int(queue.offsets[-1])

    def _thread_arguments(self) -> tuple[ProductArguments, RowCuts | None, slices.SliceBuffers]:
        """Return the product, the cuts and the buffers of one thread as the kernel takes them."""
        product, dtype = self.product, self.product.kernel_dtype
        buffers = _idle_buffers.take(self._buffers_key) if self.threads > 1 else None
        buffers = self._new_buffers() if buffers is None else buffers
        entries = self._row_entries() if product.spec.fused else 0
        buffers = buffers._replace(row=_new_rows(entries, product.index_dtype, dtype))
        cuts = self._cuts(buffers.work.window.totals[:1], entries) if product.spec.fused else None
        return _arguments(product), cuts, buffers

    @property
    def _buffers_key(self) -> BuffersKey:
        product = self.product
        return product.index_dtype, product.kernel_dtype, cpu_sizes.window_columns(product.b.ncols), product.ring

    def _new_buffers(self) -> slices.SliceBuffers:
        """Return what one thread needs beside the room for a row."""
        product, dtype = self.product, self.product.kernel_dtype
        zero = dtype.type(0) if product.ring is None else product.ring.zero_of(dtype)
        work = new_workspace(product.b.ncols, dtype, zero)
        entry = product.index_dtype.itemsize + dtype.itemsize
        size = cpu_sizes.SCRATCH_BYTES // entry if self.threads > 1 else 0
        row, scratch = (_new_rows(n, product.index_dtype, dtype) for n in (0, size))
        waiting = np.empty((2, slices.MOST_WAITING), np.int64)
        return slices.SliceBuffers(work, row, scratch, waiting, np.zeros(3, np.int64))

    def _give_back(self, buffers: slices.SliceBuffers) -> None:
        """Keep a thread's buffers for the next product, without the room for a row, which may be long."""
        if self.threads > 1:
            row = _new_rows(0, self.product.index_dtype, self.product.kernel_dtype)
            _idle_buffers.give(self._buffers_key, buffers._replace(row=row))

    def _cuts(self, zero: npt.NDArray[Any], entries: int) -> RowCuts:
        """Return the mask, the epilogue and the selection of a thread; `zero` is (1,)."""
        product, spec, dtype = self.product, self.product.spec, self.product.kernel_dtype
        selection = _selection(spec, product.dtype, min(entries, product.longest), zero, self._peaks)
        return RowCuts(
            *_mask_arguments(product, self._mask_row, zero), _epilogue_arguments(spec, dtype), selection, spec.diagonal
        )

    def _row_entries(self) -> int:
        """Bound the entries of a row before it is cut."""
        return min(self.product.b.ncols, self._longest) if self.product.spec.inside is None else self._mask_row


def _estimate(product: PreparedProduct, start: int, stop: int) -> int:
    """Estimate the products of some rows by their entries."""
    a = product.a
    return estimate_products(a, product.b, SLICE_SAMPLE) * int(a.indptr[stop] - a.indptr[start]) // max(a.nnz, 1)


def _cut_rows(product: PreparedProduct, start: int, stop: int, most: int, threads: int) -> tuple[Int64Array, int]:
    """Cut rows ``[start, stop)`` into slices; return (2, slices) first rows and products, and the longest row's."""
    a, b = product.a, product.b
    goals = np.linspace(a.indptr[start], a.indptr[stop], threads + 1)[1:-1]
    ends = [start, *np.searchsorted(a.indptr[start : stop + 1], goals).tolist(), stop]
    ends = sorted(end if i in (0, threads) else start + end for i, end in enumerate(ends))
    found: list[tuple[Int64Array, int]] = [(np.empty((2, 0), np.int64), 0)] * threads

    def cut(thread: int) -> None:
        first, last = ends[thread], ends[thread + 1]
        cuts = np.empty((2, 1 if most == UNBOUNDED else max(last - first, 1)), np.int64)
        n, longest = slices.cut_slices(a.indptr, a.indices, b.indptr, first, last, most, cuts)
        found[thread] = cuts[:, :n], int(longest)

    run_in_threads(threads, cut)
    return np.concatenate([cuts for cuts, _ in found], axis=1), max(longest for _, longest in found)


def cut_rows_in_place(c: CSR, spec: ProductSpec) -> None:
    """Apply epilogue, threshold and top-n to the rows of a canonical sum of products, which has an entry.

    Entries that are kept move to the front; ``c.indptr[-1]`` says how many they are.
    """
    dtype = np.dtype(f"u{c.dtype.itemsize}") if c.dtype.kind == "b" else c.dtype
    longest = longest_row(c)
    selection = _selection(spec, c.dtype, min(longest, spec.top_n or longest), np.zeros(1, dtype))
    row = np.empty(longest, c.indices.dtype), np.empty(longest, dtype), np.empty(0, np.int64)
    compiles_function = spec.epilogue is not None and spec.epilogue.apply is not None
    kernel = unsaved(fused.cut_rows) if compiles_function else fused.cut_rows
    arrays = CsrArrays(c.indptr, c.indices, c.data.view(dtype))
    kernel(arrays, _epilogue_arguments(spec, dtype), selection, RowsOut(*row, np.uint64(longest)))


def _rows_out(out: RowBuffers, dtype: np.dtype[Any]) -> RowsOut:
    return RowsOut(out.indices, out.data.view(dtype), out.ends, np.uint64(out.capacity))


def _new_rows(entries: int, index_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> RowsOut:
    """Return room for some entries, and one to spare."""
    indices, data = np.empty(entries + 1, index_dtype), np.empty(entries + 1, dtype)
    return RowsOut(indices, data, np.empty(1, np.int64), np.uint64(entries))


def _arguments(product: PreparedProduct) -> ProductArguments:
    """Return a product as the kernels take it, for one thread."""
    dtype = product.kernel_dtype
    a, b = _csr_arrays(product.a, dtype), _csr_arrays(product.b, dtype)
    starts = b.indptr[:-1] if product.spec.diagonal is None else b.indptr[:-1].copy()  # kernels move these starts
    rows, wide = (
        RowRanges(starts, b.indices, b.data, b.indptr[1:]),
        True if product.b.ncols > cpu_sizes.WINDOW else None,
    )
    prefetches = product.b.nbytes > CACHE_BYTES
    return ProductArguments(a, rows, product.ring, wide, prefetches)


def _selection(
    spec: ProductSpec, dtype: np.dtype[Any], top: int, zero: ValueArray, peaks: ValueArray | None = None
) -> Selection | None:
    """Return how kernels cut rows to `top` entries; None if they keep whole rows.

    `zero`: (1,): the semiring's, in the dtype of the kernels.
    """
    if not spec.selects:
        return None
    least, of_floats = spec.least(dtype).astype(zero.dtype), zero.dtype.kind == "f"
    skips_below = bool(least > zero[0])
    bar = zero[0]
    if skips_below:
        bar = np.nextafter(least, bar) if of_floats else least - zero.dtype.type(1)
    has_bar = spec.epilogue is None and bool(bar < (np.inf if of_floats else np.iinfo(zero.dtype).max))
    heap, places = np.empty(top + 1, zero.dtype), np.empty(largest.MOST_PLACES, np.uint64)
    costs, epsilon = np.empty(largest.MOST_ORDERED), float(np.finfo(zero.dtype).eps) if of_floats else 0.0
    return Selection(least, top, heap, bar, has_bar, skips_below, places, costs, peaks, epsilon)


def _peaks(product: PreparedProduct, products: int) -> ValueArray | None:
    """Return the largest magnitude of each row of B if rows are cut to a threshold and it takes little time to find."""
    spec, b, dtype = product.spec, product.b, product.kernel_dtype
    plain = spec.epilogue is None and spec.mask is None and product.ring is None and dtype.kind == "f"
    if not (plain and spec.selects and spec.least(product.dtype) >= LEAST_THRESHOLD):
        return None
    if b.nrows > cpu_sizes.PEAK_ROWS or products < PRODUCTS_OF_PEAKS * b.nnz:
        return None
    peaks: ValueArray = np.empty(b.nrows, dtype)
    arrays = _csr_arrays(b, dtype)
    largest.find_peaks(arrays.indptr, arrays.data, peaks)
    return peaks


def _epilogue_arguments(spec: ProductSpec, dtype: np.dtype[Any]) -> EpilogueArguments | None:
    epilogue = spec.epilogue
    if epilogue is None:
        return None
    rows, columns = (None if one is None else np.array(one, dtype) for one in (epilogue.rows, epilogue.columns))
    function = None if epilogue.apply is None else callable_part(epilogue.apply)
    norm = 0 if epilogue.normalize is None else NORMS.index(epilogue.normalize) + 1
    return EpilogueArguments(rows, columns, function, norm, epilogue.drop_zeros)


def _mask_arguments(
    product: PreparedProduct, longest: int, zero: npt.NDArray[Any]
) -> tuple[AllowedMask | None, ForbiddenMask | None]:
    """Return the mask that rows are confined to, or kept out of, with one thread's hash table.

    `longest`: entries of the mask's longest row. `zero`: (1,).
    """
    mask = product.spec.mask
    if mask is None:
        return None, None
    arrays = writable(mask.indptr), writable(mask.indices.astype(product.index_dtype, copy=False))
    keys, places = np.empty((2, cpu_sizes.table_slots(longest)), product.index_dtype)
    if product.spec.complement:
        return None, ForbiddenMask(*arrays, keys, places, np.empty(1, np.uint64))
    totals, hits = np.repeat(zero, longest + 1), np.zeros(longest + 1, np.uint8)
    return AllowedMask(*arrays, keys, places, totals, hits), None


def new_workspace(ncols: int, dtype: np.dtype[Any], zero: Any = 0) -> Workspace:
    """Return the buffers of one thread, `workspace.cpu_workspace` bytes; `zero` is the semiring's."""
    columns, products = cpu_sizes.window_columns(ncols), cpu_sizes.sort_products(ncols)
    padded = columns + cpu_sizes.PADDING
    totals = np.full(padded, zero, dtype) if zero else np.zeros(padded, dtype)  # zeros take no memory until written
    window = Window(totals, np.zeros(padded, np.uint8), np.zeros(columns // 64 + 2 * 64, np.uint8))
    bins = np.empty(cpu_sizes.RADIX_BINS, np.int32)
    sorting = SortBuffers(np.empty((2, products), np.uint64), np.empty(products, dtype), bins)
    slots, rows = cpu_sizes.BATCH_SLOTS + 2 * cpu_sizes.RANK_PRODUCTS, cpu_sizes.BATCH_ROWS + 1
    keys, ordered, values = np.empty(slots, np.int32), np.empty(slots, np.uint64), np.empty(slots, dtype)
    return Workspace(window, sorting, Batch(keys, ordered, values, *np.empty((3, rows), np.uint64)))


def _csr_arrays(m: CSR, dtype: np.dtype[Any]) -> CsrArrays:
    """Return a matrix's arrays as the kernels take them."""
    indptr = writable(m.indptr.astype(np.int64, copy=False))
    return CsrArrays(indptr, writable(m.indices), writable(m.data).view(dtype))
