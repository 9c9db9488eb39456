"""Rows of a product by the Numba kernels of `rowwise` and `fused`: how a product becomes their arguments.

Importing this module imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.kernels.cpu import fused, rowwise
from spdist.kernels.cpu import workspace as cpu_sizes
from spdist.kernels.cpu.arrays import (
    AllowedMask,
    Batch,
    CsrArrays,
    EpilogueArguments,
    ForbiddenMask,
    RowRanges,
    RowsOut,
    Selection,
    SortBuffers,
    Window,
    Workspace,
)
from spdist.kernels.cpu.numba_compile import callable_part, for_ring, unsaved
from spdist.kernels.cpu.prepare import FillRows, PreparedProduct, RowBuffers, mark_loaded
from spdist.kernels.cpu.product_counts import row_products
from spdist.kernels.product_spec import NORMS, ProductSpec, longest_row
from spdist.matrices.csr import CSR

CACHE_BYTES = 1 << 20
"""Bytes of B from which kernels prefetch its rows."""


def new_filler(product: PreparedProduct) -> FillRows:
    """Return a thread's function that makes rows by Numba, with a workspace of its own.

    Parameters
    ----------
    product : PreparedProduct
    """
    fill = _fused_filler(product) if product.spec.fused else _plain_filler(product)
    if product.spec.plain:
        mark_loaded(product)
    return fill


def _plain_filler(product: PreparedProduct) -> FillRows:
    """Return the function that makes whole rows."""
    kernel = for_ring(rowwise.multiply_rows, product.ring)
    a, b, work = _operands(product)
    prefetches, wide, diagonal = product.b.nbytes > CACHE_BYTES, _wide(product), product.spec.diagonal

    def fill(start: int, stop: int, out: RowBuffers) -> tuple[int, int]:
        c = _rows_out(out, product.kernel_dtype)
        rows, needed = kernel(a, b, start, stop, work, c, prefetches, product.ring, wide, diagonal)
        return int(rows), int(needed)

    return fill


def _fused_filler(product: PreparedProduct) -> FillRows:
    """Return the function that makes rows under a mask and cuts them."""
    a, b, work = _operands(product)
    prefetches, wide, diagonal = product.b.nbytes > CACHE_BYTES, _wide(product), product.spec.diagonal
    spec, dtype = product.spec, product.kernel_dtype
    kernel = for_ring(fused.fused_rows, product.ring)
    if spec.epilogue is not None and spec.epilogue.apply is not None:
        kernel = unsaved(fused.fused_rows)
    entries, zero = _row_buffer_entries(product), work.window.totals[:1]
    above = spec.selects and bool(spec.least(product.dtype).astype(dtype) > zero[0]) and spec.epilogue is None
    selection = _selection(spec, product.dtype, dtype, min(entries, product.longest), skips_below=above)
    epilogue = _epilogue_arguments(spec, dtype)
    allowed, forbidden = _mask_arguments(product, zero)
    row = np.empty(entries + 1, product.index_dtype), np.empty(entries + 1, dtype), np.empty(1, np.int64)
    row_buffer = RowsOut(*row, np.uint64(entries))

    def fill(start: int, stop: int, out: RowBuffers) -> tuple[int, int]:
        c = _rows_out(out, dtype)
        masks_and_cuts = allowed, forbidden, epilogue, selection
        rest = work, row_buffer, c, prefetches, product.ring, wide, diagonal
        rows, needed = kernel(a, b, *masks_and_cuts, start, stop, *rest)
        return int(rows), int(needed)

    return fill


def slice_stop(product: PreparedProduct, start: int, stop: int) -> tuple[int, int]:
    """Return the end of a slice of about `SLICE_PRODUCTS` products, one row at least, and its products.

    Parameters
    ----------
    product : PreparedProduct
    start, stop : int
        Rows of C; the slice begins at `start` and ends at `stop` at the latest.

    Returns
    -------
    stop, products : int
    """
    a, b = product.a, product.b
    last, products = rowwise.slice_stop(a.indptr, a.indices, b.indptr, start, stop, cpu_sizes.SLICE_PRODUCTS)
    return int(last), int(products)


def count_products(product: PreparedProduct) -> int:
    """Count all products, which bounds nnz(C) from above."""
    a, b = product.a, product.b
    return int(rowwise.slice_stop(a.indptr, a.indices, b.indptr, 0, a.nrows, 1 << 62)[1])


def cut_rows_in_place(c: CSR, spec: ProductSpec) -> None:
    """Apply epilogue, threshold and top-n to the rows of a sum of products; entries that are kept move to the front.

    Parameters
    ----------
    c : CSR
        Canonical, with one entry at least; ``c.indptr[-1]`` says afterwards how many entries are kept.
    spec : ProductSpec
    """
    dtype = np.dtype(f"u{c.dtype.itemsize}") if c.dtype.kind == "b" else c.dtype
    longest = longest_row(c)
    selection = _selection(spec, c.dtype, dtype, min(longest, spec.top_n or longest), skips_below=False)
    row = np.empty(longest, c.indices.dtype), np.empty(longest, dtype), np.empty(0, np.int64)
    compiles_function = spec.epilogue is not None and spec.epilogue.apply is not None
    kernel = unsaved(fused.cut_rows) if compiles_function else fused.cut_rows
    arrays = CsrArrays(c.indptr, c.indices, c.data.view(dtype))
    kernel(arrays, _epilogue_arguments(spec, dtype), selection, RowsOut(*row, np.uint64(longest)))


def _rows_out(out: RowBuffers, dtype: np.dtype[Any]) -> RowsOut:
    return RowsOut(out.indices, out.data.view(dtype), out.ends, np.uint64(out.capacity))


def _wide(product: PreparedProduct) -> bool | None:
    """Return True if C is wider than the window, else None: the compiled code then leaves the wide methods out."""
    return True if product.b.ncols > cpu_sizes.WINDOW else None


def _operands(product: PreparedProduct) -> tuple[CsrArrays, RowRanges, Workspace]:
    """Return A, B and a thread's workspace as the kernels take them."""
    dtype = product.kernel_dtype
    zero = dtype.type(0) if product.ring is None else product.ring.zero_of(dtype)
    work = new_workspace(product.b.ncols, dtype, zero)
    a, b = _csr_arrays(product.a, dtype), _csr_arrays(product.b, dtype)
    starts = b.indptr[:-1] if product.spec.diagonal is None else b.indptr[:-1].copy()  # kernels move these starts
    return a, RowRanges(starts, b.indices, b.data, b.indptr[1:]), work


def _selection(
    spec: ProductSpec, dtype: np.dtype[Any], kernel_dtype: np.dtype[Any], top: int, *, skips_below: bool
) -> Selection | None:
    """Return how kernels cut rows to `top` entries; None if they keep whole rows."""
    if not spec.selects:
        return None
    return Selection(spec.least(dtype).astype(kernel_dtype), top, np.empty(top + 1, kernel_dtype), skips_below)


def _epilogue_arguments(spec: ProductSpec, dtype: np.dtype[Any]) -> EpilogueArguments | None:
    epilogue = spec.epilogue
    if epilogue is None:
        return None
    rows, columns = (None if one is None else np.array(one, dtype) for one in (epilogue.rows, epilogue.columns))
    function = None if epilogue.apply is None else callable_part(epilogue.apply)
    norm = 0 if epilogue.normalize is None else NORMS.index(epilogue.normalize) + 1
    return EpilogueArguments(rows, columns, function, norm, epilogue.drop_zeros)


def _mask_arguments(
    product: PreparedProduct, zero: npt.NDArray[Any]
) -> tuple[AllowedMask | None, ForbiddenMask | None]:
    """Return the mask that rows are confined to, or kept out of, with one thread's hash table; `zero` is (1,)."""
    mask = product.spec.mask
    if mask is None:
        return None, None
    arrays = _writable(mask.indptr), _writable(mask.indices.astype(product.index_dtype, copy=False))
    longest = longest_row(mask)
    keys, places = np.empty((2, cpu_sizes.table_slots(longest)), product.index_dtype)
    if product.spec.complement:
        return None, ForbiddenMask(*arrays, keys, places, np.empty(1, np.uint64))
    totals, hits = np.repeat(zero, longest + 1), np.zeros(longest + 1, np.uint8)
    return AllowedMask(*arrays, keys, places, totals, hits), None


def _row_buffer_entries(product: PreparedProduct) -> int:
    """Bound the entries of a row before it is cut."""
    if product.spec.inside is not None:
        return longest_row(product.spec.inside)
    products = row_products(product.a, np.diff(product.b.indptr))
    return min(product.b.ncols, int(products.max(initial=0)))


def new_workspace(ncols: int, dtype: np.dtype[Any], zero: Any = 0) -> Workspace:
    """Return the buffers of one thread, of `workspace.cpu_workspace` bytes.

    Parameters
    ----------
    ncols : int
        Columns of C.
    dtype : dtype
        Dtype that kernels compute in.
    zero : number
        The semiring's zero.
    """
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
    indptr = _writable(m.indptr.astype(np.int64, copy=False))
    return CsrArrays(indptr, _writable(m.indices), _writable(m.data).view(dtype))


class _WritableAlias:
    """The memory of a read-only array, for a second array that Numba takes for a writable one."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or one of the same memory, contiguous and not marked read-only.

    Numba compiles once more for read-only arrays. No kernel writes to its operands.
    """
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else np.asarray(_WritableAlias(array))
