"""Multiply two matrices whose arrays are on the GPU by expansion, sorting and compression (ESC).

L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015. The paper's steps:

1. Count the products of each segment, and so the size of the expansion.
2. Expansion: every thread computes the same number of products; it finds its first product by interpolation search in
   the prefix sums of product counts.
3. Sorting: sort the products of each segment by index, by merging.
4. Compression: a segmented reduction adds the products of one index; entries are packed.

This code departs from the paper in four ways:

- Segments are rows of C, not columns.
- One kernel does steps 2 to 4 for a row whose products fit in shared memory (`short_rows.cu`). A row of more products
  is sorted in tiles, which are merged by ranges of columns, the buckets (`long_rows.cu`).
- The expansion is cut into slices that fit a memory limit. Compressed entries are stored in a pool. Entries for which
  it has no room are only counted, and computed a second time once C is allocated.
- Products are added in the order of A's entries, so every run and every limit gives equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spdist.errors import MemoryBoundError
from spdist.kernels.cuda.constants import EscFact, LongRowField
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.esc.long_rows import TILE_BYTES, EntryPool, LongRows, describe
from spdist.kernels.esc.product import Arena, CountedRows, EscProduct, count_rows, product_of
from spdist.kernels.esc.row_classes import EscClass, RowShare, share_rows
from spdist.kernels.esc.workspace import EscSizes, EscWorkspace, esc_workspace
from spdist.kernels.rounding import ceil_div
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, result_dtype

FILE = "esc/short_rows.cu"
COPIED_ENTRIES = 2048
"""Entries of C that one thread block copies from the pool."""


def multiply(a: CSR, b: CSR, *, workspace_limit: int | None = None) -> CSR:
    """Return ``a @ b`` by expansion, sorting and compression; arrays of CuPy in and out.

    Operands may be unsorted and hold duplicates; C is canonical, zeros kept. The products of an entry are added in the
    order of A's entries, so every run and every limit gives equal bits.
    `workspace_limit`: bytes of device memory to take beyond operands and result; by default `ESC_LIMIT`, or more if the
    longest row needs more. With less memory, more entries are computed twice.
    Raises `MemoryBoundError` with the bytes needed if the limit is too small, or a row of C has more products than the
    GPU merges; `MatrixError` if the operands do not fit or are damaged.
    """
    check_product_shapes(a.shape, b.shape)
    c_type(result_dtype(a.dtype, b.dtype))
    if a.nrows == 0 or b.ncols == 0 or a.nnz == 0 or b.nnz == 0:
        return _empty(a, b)
    x = product_of(a, b)
    counted = count_rows(x)
    shares = share_rows(counted.class_rows, x.classes)
    work, pool, long_rows = _allocate(x, counted, workspace_limit)
    if long_rows is not None:
        long_rows.sum_products()
        for number in range(len(long_rows.slices)):
            long_rows.make_slice(number)
    for share in reversed(shares):
        _multiply_rows(x, counted, pool, share)
    counted.turn_lengths_into_offsets()
    facts = counted.read()
    c = _result(x, counted, int(facts[EscFact.NNZ_C]))
    _copy_pool(x, counted, pool, long_rows, c)
    if int(facts[EscFact.POOL_TAKEN]) > work.pool_entries:  # the pool was full: compute the rest into C
        if long_rows is not None:
            long_rows.repeat_missing(c)
        for share in reversed(shares):
            _multiply_rows(x, counted, pool, share, c)
    return c


def row_kernel(types: tuple[str, str, str], key: str, row_class: EscClass) -> str:
    """Return the name expression of the kernel for rows of a class, with sort keys of a C type."""
    return f"esc_rows<{','.join(types)},{key},{row_class.group},{row_class.items}>"


def copy_kernel(value: str, index: str) -> str:
    """Return the name expression of the kernel that copies rows from the pool to C."""
    return f"copy_rows<{value},{index}>"


class Allocated(NamedTuple):
    """The workspace of a product, its pool, and its long rows if it has any."""

    work: EscWorkspace
    pool: EntryPool
    long_rows: LongRows | None


def _allocate(x: EscProduct, counted: CountedRows, limit: int | None) -> Allocated:
    """Allocate the memory of the expansion, or say how much would be needed."""
    rows, first = counted.class_rows, len(x.classes) + 1
    table = describe(x, counted, sum(rows[:first]), rows[first])
    sizes = EscSizes(
        *x.shape, counted.products, counted.longest, x.a.dtype.itemsize, x.a.indices.itemsize,
        long_rows=rows[first], long_entries=int(table[LongRowField.ENTRIES, -1]),
        long_products=int(table[LongRowField.PRODUCTS, -1]),
    )  # fmt: skip
    work = esc_workspace(sizes, x.tile.max_products, None if limit is None else limit - x.copied)
    _check_memory(x, sizes, work, limit)
    arena = Arena({name: size for name, size in work.arrays.items() if name != "described"})
    entries = work.pool_entries
    pool = EntryPool(entries, arena("pool_indices", entries, x.a.indices.dtype), arena("pool_data", entries, x.a.dtype))
    return Allocated(work, pool, LongRows(x, counted, table, work, arena, pool) if sizes.long_rows else None)


def _check_memory(x: EscProduct, sizes: EscSizes, work: EscWorkspace, limit: int | None) -> None:
    """Refuse a workspace above the limit, and rows with more tiles than a thread block merges."""
    longest = sizes.max_row_products
    if limit is not None and work.total > limit - x.copied:
        raise MemoryBoundError(
            f"esc needs {work.needed + x.copied:,} bytes on the GPU for C of {sizes.nrows:,} rows, the longest "
            f"of {longest:,} products, but workspace_limit is {limit:,} bytes: raise it, or "
            f"split A by rows or B by columns"
        )
    tile = x.tile.max_products
    room = x.shared - x.bucket.shared_bytes(x.a.dtype.itemsize, x.a.indptr.dtype.itemsize, 8)
    if sizes.long_rows and ceil_div(longest, tile) > room // TILE_BYTES:
        raise MemoryBoundError(
            f"the longest row of C has {longest:,} products; esc merges at most {room // TILE_BYTES * tile:,} on "
            f"this GPU: split B by columns, or choose another method"
        )


def _multiply_rows(x: EscProduct, counted: CountedRows, pool: EntryPool, share: RowShare, c: CSR | None = None) -> None:
    """Queue short rows of a class: into the pool; or into C those rows that are not in the pool."""
    row_class, first, rows = share
    out = (0, 0, 0) if c is None else (counted.offsets, c.indices, c.data)
    name = row_kernel(x.types, row_class.key_type(x.b.ncols), row_class)
    module(FILE, (name,))(  # compiled by itself: most products have rows of a few classes only
        name, ceil_div(rows, row_class.rows_per_block), row_class.threads,
        (np.uint32(rows), counted.listed[first:], *x.arrays, counted.lengths, counted.places,
         counted.at(EscFact.POOL_TAKEN), *pool.arguments, *out),
        x.shared_bytes(row_class),
    )  # fmt: skip


def _result(x: EscProduct, counted: CountedRows, nnz: int) -> CSR:
    """Return C with its offsets, and room for its entries."""
    import cupy

    indptr = counted.offsets.astype(x.a.indptr.dtype if nnz <= INT32_MAX else np.int64)
    data = cupy.empty(nnz, x.a.dtype)
    return CSR(indptr, cupy.empty(nnz, x.a.indices.dtype), data, x.shape)


def _copy_pool(x: EscProduct, counted: CountedRows, pool: EntryPool, long_rows: LongRows | None, c: CSR) -> None:
    """Queue the copy of the entries in the pool to C."""
    if pool.capacity == 0:
        return
    name = copy_kernel(*x.types[:2])
    module(FILE, (name,))(
        name, ceil_div(c.nnz, COPIED_ENTRIES), 256,
        (np.int64(c.nrows), np.int64(c.nnz), counted.offsets, counted.places, pool.indices, pool.data, c.indices,
         c.data),
    )  # fmt: skip
    if long_rows is not None:
        long_rows.copy(c)


def _empty(a: CSR, b: CSR) -> CSR:
    """Return a matrix with no entries, on the device."""
    import cupy

    pointer = np.promote_types(a.indptr.dtype, b.indptr.dtype)
    index, dtype = np.promote_types(a.indices.dtype, b.indices.dtype), result_dtype(a.dtype, b.dtype)
    return CSR(cupy.zeros(a.nrows + 1, pointer), cupy.empty(0, index), cupy.empty(0, dtype), (a.nrows, b.ncols))
