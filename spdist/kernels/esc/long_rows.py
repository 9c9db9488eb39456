"""Rows of C with more products than a tile in ESC: sorted tiles, merged by ranges of columns, slice by slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cuda.constants import SPLITTER_SAMPLES, EscFact, LongRowField
from spdist.kernels.cuda.module import Module, module
from spdist.kernels.esc.product import Arena, CountedRows, EscProduct
from spdist.kernels.esc.row_classes import EscClass
from spdist.kernels.esc.workspace import ESC_BUCKET, EscWorkspace
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array

FILE = "esc/long_rows.cu"
TILE_BYTES = 6
"""Bytes of shared memory that `merge_buckets` needs for each tile of a row: the end and the start of its piece."""


class LongRowKernels(NamedTuple):
    """Name expressions of the kernels for long rows."""

    describe: str
    products: str
    sort: str
    split: str
    merge: str
    sums: str
    copy: str


def long_row_kernels(
    types: tuple[str, str, str], keys: tuple[str, str], tile: EscClass, bucket: EscClass
) -> LongRowKernels:
    """Return the name expressions of the kernels for long rows.

    `keys`: C types of the sort keys of tiles and of buckets. `tile, bucket`: their shapes.
    """
    value, index, pointer = types
    unsigned = "u32" if index == "int" else "u64"
    return LongRowKernels(
        f"describe_rows<{pointer}>",
        f"sum_products<{index},{pointer}>",
        f"sort_tiles<{value},{index},{pointer},{keys[0]},{tile.group},{tile.items}>",
        f"split_columns<{index},{unsigned},{tile.max_products}>",
        f"merge_buckets<{value},{index},{pointer},{keys[1]},{bucket.group},{bucket.items},{tile.max_products}>",
        "sum_buckets",
        f"copy_buckets<{value},{index}>",
    )


def slices(tiles_before: Int64Array, most: int) -> list[tuple[int, int]]:
    """Cut long rows into slices ``[first:last)`` of at most `most` tiles; a longer row makes a slice of its own.

    `tiles_before`: (rows + 1,): tiles before each row, and in all.
    """
    out, first, rows = [], 0, len(tiles_before) - 1
    while first < rows:
        last = int(np.searchsorted(tiles_before, tiles_before[first] + most, side="right")) - 1
        last = min(max(last, first + 1), rows)
        out.append((first, last))
        first = last
    return out


def long_table(described: Int64Array, tile: int) -> Int64Array:
    """Return the table of long rows that `long_rows.cu` describes; `tile` is the number of products of a tile.

    `described`: (3, rows + 1): row of C, entries of A, products of each; the last column is not used.
    Returns (len(LongRowField), rows + 1): by rising row: the row, and the entries, products, tiles and buckets before
    it.
    """
    rows, entries, products = described[:, :-1][:, np.argsort(described[0, :-1])]
    table = np.zeros((len(LongRowField), len(rows) + 1), np.int64)
    table[LongRowField.ROW, :-1] = rows
    for field, count in (
        (LongRowField.ENTRIES, entries),
        (LongRowField.PRODUCTS, products),
        (LongRowField.TILES, -(-products // tile)),
        (LongRowField.BUCKETS, -(-products // ESC_BUCKET)),
    ):
        table[field, 1:] = np.cumsum(count)
    return table


def describe(x: EscProduct, counted: CountedRows, first: int, rows: int) -> Int64Array:
    """Return the table of a product's long rows as `long_table` does; waits for the device if there are any.

    Sets ``counted.places`` to -1 for each long row. `first`: where the long rows begin in ``counted.listed``.
    """
    if rows == 0:
        return np.zeros((len(LongRowField), 1), np.int64)
    import cupy

    kernels = _kernels_of(x)
    described = cupy.empty((3, rows + 1), np.int64)
    module(FILE, tuple(kernels))(
        kernels.describe, ceil_div(rows, 256), 256,
        (np.uint32(rows), counted.listed[first:], x.a.indptr, counted.lengths, described, counted.places),
    )  # fmt: skip
    return long_table(described.get(), x.tile.max_products)


def _kernels_of(x: EscProduct) -> LongRowKernels:
    keys = x.tile.key_type(x.b.ncols), x.bucket.key_type(x.b.ncols)
    return long_row_kernels(x.types, keys, x.tile, x.bucket)


class EntryPool(NamedTuple):
    """Device memory for compressed entries of C until the size of C is known."""

    capacity: int
    indices: Any
    data: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of kernels that write to the pool."""
        return np.uint64(self.capacity), self.indices, self.data


class Buckets(NamedTuple):
    """Device arrays of the buckets: entries, place in the pool, and start in the row of C of each."""

    lengths: Any
    places: Any
    starts: Any


class LongRows:
    """The long rows of one product, one at least: launches their kernels, slice by slice.

    `table`: from `describe`. `arena`: has ``work.arrays``.
    """

    def __init__(
        self, x: EscProduct, counted: CountedRows, table: Int64Array, work: EscWorkspace, arena: Arena, pool: EntryPool
    ) -> None:
        self.x, self.counted, self.pool = x, counted, pool
        self.kernels = _kernels_of(x)
        self.module: Module = module(FILE, tuple(self.kernels))
        self.host_table, self.rows = table, np.int64(table.shape[1] - 1)
        self.slices = slices(table[LongRowField.TILES], work.slice_tiles)
        buckets, products = int(table[LongRowField.BUCKETS, -1]), work.slice_tiles * x.tile.max_products
        self.table = arena("table", table.size, np.int64)
        self.table.set(table.reshape(-1))
        self.ends = arena("ends", int(table[LongRowField.ENTRIES, -1]), np.uint32)
        index = x.a.indices.dtype
        self.tiles = arena("tile_indices", products, index), arena("tile_data", products, x.a.dtype)
        self.splitters = arena("splitters", buckets, index)
        self.buckets = Buckets(
            arena("bucket_lengths", buckets, np.uint32), arena("bucket_places", buckets, np.int64),
            arena("bucket_starts", buckets, np.int64),
        )  # fmt: skip
        self.missing = arena("missing", len(self.slices), np.uint64)
        self.missing.data.memset_async(0, self.missing.nbytes)

    def sum_products(self) -> None:
        """Queue the sums of the products through each entry of A in its row."""
        arguments = self.rows, self.table, self.x.a.indptr, self.x.a.indices, self.x.b.indptr, self.ends
        self.module(self.kernels.products, int(self.rows), 256, arguments)

    def make_slice(self, number: int, c: CSR | None = None) -> None:
        """Queue a slice: expand and sort its tiles, then merge them into C, or without it into the pool."""
        first, last = self.slices[number]
        cut = self.host_table[:, last] - self.host_table[:, first]
        rows = self.rows, np.int64(first), np.int64(last)
        self._sort(rows, int(cut[LongRowField.TILES]))
        self._merge(rows, int(cut[LongRowField.BUCKETS]), c)
        if c is None:
            arguments = *rows[:2], self.table, *self.buckets, self.counted.lengths
            missing = int(self.missing.data.ptr) + 8 * number
            self.module(self.kernels.sums, last - first, 256, (*arguments, missing))

    def _sort(self, rows: tuple[Any, Any, Any], tiles: int) -> None:
        """Queue the sorted tiles of a slice, and the columns at which their buckets begin."""
        x = self.x
        arguments = *rows, self.table, self.ends, *x.arrays, *self.tiles
        self.module(self.kernels.sort, tiles, x.tile.threads, arguments, x.shared_bytes(x.tile))
        arguments = *rows[:2], self.table, self.tiles[0], self.splitters
        shared = SPLITTER_SAMPLES * x.a.indices.itemsize
        self.module(self.kernels.split, int(rows[2] - rows[1]), 512, arguments, shared)

    def _merge(self, rows: tuple[Any, Any, Any], buckets: int, c: CSR | None) -> None:
        """Queue the merge of a slice's tiles into buckets."""
        x, counted, (first, last) = self.x, self.counted, map(int, rows[1:])
        most_tiles = int(np.diff(self.host_table[LongRowField.TILES, first : last + 1]).max())
        out = (0, 0, 0, 0) if c is None else (self.buckets.starts, counted.offsets, c.indices, c.data)
        arguments = *rows, self.table, np.int64(x.b.ncols), np.int64(most_tiles), self.splitters, *self.tiles
        pool = *self.buckets[:2], counted.at(EscFact.POOL_TAKEN), *self.pool.arguments
        shared = x.shared_bytes(x.bucket) + TILE_BYTES * most_tiles
        self.module(self.kernels.merge, buckets, x.bucket.threads, (*arguments, *pool, *out), shared)

    def copy(self, c: CSR) -> None:
        """Queue the copy of the buckets in the pool to C."""
        arguments = self.rows, self.table, *self.buckets, self.counted.offsets, self.pool.indices, self.pool.data
        buckets = int(self.host_table[LongRowField.BUCKETS, -1])
        self.module(self.kernels.copy, buckets, 128, (*arguments, c.indices, c.data))

    def repeat_missing(self, c: CSR) -> None:
        """Compute the slices whose buckets did not all fit in the pool a second time, into C; waits for the device."""
        for number, is_missing in enumerate(self.missing.get()):
            if is_missing:
                self.make_slice(number, c)
