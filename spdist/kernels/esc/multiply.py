"""Multiply two blocks whose arrays are on the GPU by expansion, sorting and compression (ESC).

L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015: all products are computed, sorted by
row and column, and those of one entry of C added. `esc.cu` says how the stages run; this module cuts the expansion into
slices that fit the memory, and launches them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.cuda.constants import SCAN_ROWS
from spdist.kernels.cuda.module import Module, c_type, module
from spdist.kernels.esc.workspace import ESC_BUCKET, ESC_STATE, EscWorkspace, esc_setup, esc_workspace
from spdist.kernels.rounding import ceil_div
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, Int64Array, result_dtype

i64, u64, u32 = np.int64, np.uint64, np.uint32


class Kind(NamedTuple):
    """Rows of up to ``group * items`` products: `group` lanes a row, `items` products a lane."""

    group: int
    items: int

    @property
    def most(self) -> int:
        """Products of the longest row."""
        return self.group * self.items

    @property
    def rows(self) -> int:
        """Rows that a thread block takes."""
        return max(128 // self.group, 1) if self.group <= 32 else 1

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return max(self.group, 128) if self.group <= 32 else self.group

    def key(self, ncols: int) -> str:
        """Return the type of a sort key: a column of `ncols` above the product's number."""
        return "u32" if max(ncols - 1, 1).bit_length() + (self.most - 1).bit_length() <= 32 else "u64"

    def shared(self, value: int, pointer: int, key: int) -> int:
        """Return a thread block's shared memory in bytes, for items of these sizes; `Slots` in `esc.cu`."""
        entries = self.group * (4 + pointer + value)
        return self.rows * (self.most * (value + key) + max(2 * self.most, entries))


KINDS = tuple(
    Kind(group, items)
    for group, items in (
        (4, 4), (4, 8), (8, 8), (16, 8), (32, 6), (32, 8), (32, 12), (32, 16),
        (64, 16), (128, 12), (128, 16), (256, 12), (256, 16), (512, 16),
    )
)  # fmt: skip
SAMPLES = 8192
FEW_ROWS = 2048
"""Rows for which a launch of their own is not worth while: they join the next class, among those of a warp."""
CLASSES = 16
PRODUCTS, BAD_A, BAD_B, LONGEST, NNZ_C, POOL_TAKEN = range(6)
"""Where the device notes what it finds: the first four as `count_products` numbers them."""
CLASS_ROWS = 8
CLASS_TAKEN = CLASS_ROWS + CLASSES
ROWS = ("list_rows", "offsets<long long>")
"""What this method uses of `rows.cu`."""
GROUPS = (2, 4, 8, 32)
"""Lanes that count the products of a row, by the mean length of A's rows."""
MOST_BLOCKS = 2112
"""Thread blocks that count products: as many as an H100 holds twice over."""
SHARED_RESERVED = 2048
"""Bytes of shared memory left to the system and to what the kernels declare themselves."""


def suited_kinds(shared: int, value: int, pointer: int, key: int = 8) -> tuple[Kind, ...]:
    """Return the classes whose rows fit in `shared` bytes.

    The last is also the shape of a tile of a long row, the one before that of a bucket.
    """
    return tuple(kind for kind in KINDS if kind.shared(value, pointer, key) <= shared)


def slices(tiles_before: Int64Array, most: int) -> list[tuple[int, int]]:
    """Cut long rows into slices of whole rows with at most `most` tiles, but for rows that are longer.

    Parameters
    ----------
    tiles_before : (rows + 1,) int64
        Tiles before each row, and in all.
    most : int

    Returns
    -------
    list of (first, last)
        Rows ``[first:last)`` of each slice.

    Examples
    --------
    >>> slices(np.array([0, 2, 4, 9, 10]), 4)
    [(0, 2), (2, 3), (3, 4)]
    """
    out, first, rows = [], 0, len(tiles_before) - 1
    while first < rows:
        last = int(np.searchsorted(tiles_before, tiles_before[first] + most, side="right")) - 1
        last = min(max(last, first + 1), rows)
        out.append((first, last))
        first = last
    return out


def long_table(described: Int64Array, tile: int) -> Int64Array:
    """Return the table of long rows that `esc.cu` describes.

    Parameters
    ----------
    described : (3, rows + 1) int64
        Row of C, entries of A, products of each; the last column is not used.
    tile : int
        Products of a tile.

    Returns
    -------
    (5, rows + 1) int64
        By rising row: the row, and the entries, products, tiles and buckets before it.
    """
    rows, entries, products = described[:, :-1][:, np.argsort(described[0, :-1])]
    counts = (entries, products, -(-products // tile), -(-products // ESC_BUCKET))
    table = np.zeros((5, len(rows) + 1), np.int64)
    table[0, :-1] = rows
    table[1:, 1:] = np.cumsum(counts, axis=1)
    return table


def group_rows(counts: list[int], kinds: tuple[Kind, ...]) -> list[tuple[Kind, int, int]]:
    """Share the listed rows out to classes: (class, first place in the list, rows), none of them empty.

    `counts` holds the rows of each class, rows with no products first. Small classes of a warp join the next.
    """
    out, start = [], counts[0]
    first = start
    for number, kind in enumerate(kinds):
        start += counts[number + 1]
        joins = any(counts[j + 1] for j in range(number + 1, len(kinds)) if kinds[j].group <= 32)
        if start > first and not (start - first < FEW_ROWS and joins):
            out.append((kind, first, start - first))
            first = start
    return out


def row_name(value: str, index: str, pointer: str, key: str, kind: Kind) -> str:
    """Return the name of the kernel for rows of a class."""
    return f"esc_rows<{value},{index},{pointer},{key},{kind.group},{kind.items}>"


class LongNames(NamedTuple):
    """Names of the kernels for long rows."""

    describe: str
    products: str
    sort: str
    split: str
    merge: str
    sums: str
    copy: str


def long_names(value: str, index: str, pointer: str, keys: tuple[str, str], tile: Kind, bucket: Kind) -> LongNames:
    """Return the names of the kernels for long rows, in tiles and buckets of these shapes, with keys of these types."""
    unsigned = "u32" if index == "int" else "u64"
    return LongNames(
        f"describe_rows<{pointer}>",
        f"sum_products<{index},{pointer}>",
        f"sort_tiles<{value},{index},{pointer},{keys[0]},{tile.group},{tile.items}>",
        f"split_columns<{index},{unsigned},{tile.most}>",
        f"merge_buckets<{value},{index},{pointer},{keys[1]},{bucket.group},{bucket.items},{tile.most}>",
        "sum_buckets",
        f"copy_buckets<{value},{index}>",
    )


def setup_names(index: str, pointer: str) -> tuple[str, ...]:
    """Return the names of the kernels that count products."""
    return tuple(f"count_products<{index},{pointer},{group}>" for group in GROUPS)


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return every kernel of this method for the types, by file: what may be compiled on first use.

    Examples
    --------
    >>> sorted(sources("double", "int", "int"))
    ['esc.cu', 'rows.cu']
    """
    names = [f"copy_rows<{value},{index}>", *setup_names(index, pointer)]
    for key in ("u32", "u64"):
        names += [row_name(value, index, pointer, key, kind) for kind in KINDS]
        names += long_names(value, index, pointer, (key, key), KINDS[-1], KINDS[-2])
    names += long_names(value, index, pointer, ("u64", "u64"), KINDS[-2], KINDS[-3])  # less shared memory
    return {"esc/esc.cu": tuple(dict.fromkeys(names)), "rowwise_gpu/rows.cu": ROWS}


@functools.cache
def _limits(device: int, kinds: tuple[Kind, ...]) -> Any:
    """Return the greatest number of products of each class, on the device; the first holds the empty rows."""
    import cupy

    most = [0, *(kind.most for kind in kinds)]
    return cupy.asarray(np.array([*most, *[2**64 - 1] * (CLASSES - len(most))], np.uint64))


@functools.cache
def _shared_memory(device: int) -> int:
    """Return the bytes of shared memory that a thread block may use."""
    import cupy

    most = cupy.cuda.runtime.deviceGetAttribute(97, device)  # cudaDevAttrMaxSharedMemoryPerBlockOptin
    return int(most) - SHARED_RESERVED


def _same(arrays: tuple[Any, Any], dtype: Any) -> list[Any]:
    return [array.astype(dtype, copy=False) for array in arrays]


class _Arena:
    """One allocation, handed out by name."""

    def __init__(self, sizes: dict[str, int]) -> None:
        import cupy

        self.sizes, self.memory = sizes, cupy.empty(sum(sizes.values()), np.uint8)
        self.starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))

    def __call__(self, name: str, count: int, dtype: Any) -> Any:
        start, size = self.starts[name], count * np.dtype(dtype).itemsize
        assert size <= self.sizes[name]
        return self.memory[start : start + size].view(dtype)


class _Esc:
    """One product, from its operands to C."""

    def __init__(self, a: CSR, b: CSR, limit: int | None) -> None:
        import cupy

        self.cupy, self.a, self.b = cupy, a, b
        self.dtype = result_dtype(a.dtype, b.dtype)
        self.index = np.promote_types(a.indices.dtype, b.indices.dtype)
        pointer = self.pointer = np.promote_types(a.indptr.dtype, b.indptr.dtype)
        pairs = ((a.indptr, b.indptr, pointer), (a.indices, b.indices, self.index), (a.data, b.data, self.dtype))
        copied = sum(len(m) * t.itemsize for x, y, t in pairs for m in (x, y) if m.dtype != t)
        self.limit = None if limit is None else limit - copied
        self.copied = copied
        cast = [_same((x, y), t) for x, y, t in pairs]
        self.operands = tuple(pair[side] for side in (0, 1) for pair in cast)
        self.pattern = self.operands[0:2] + self.operands[3:5]
        self.types = c_type(self.dtype), c_type(self.index), c_type(pointer)
        self.sizes = self.dtype.itemsize, pointer.itemsize
        self.device = cupy.cuda.runtime.getDevice()
        self.kinds = suited_kinds(_shared_memory(self.device), *self.sizes)
        self.bucket, self.tile = self.kinds[-2:]
        self.rows: Module = module("rowwise_gpu/rows.cu", ROWS)

    def run(self) -> CSR:
        facts = self.setup()
        counts = [int(n) for n in facts[CLASS_ROWS:CLASS_TAKEN]]
        work = group_rows(counts, self.kinds)
        table = self.describe(sum(counts[: len(self.kinds) + 1]), counts[len(self.kinds) + 1])
        self.allocate(facts, table)
        self.sum_products()
        for number in range(len(self.slices)):
            self.slice(number, None)
        for part in reversed(work):
            self.multiply_rows(part, None)
        self.rows(
            "offsets<long long>", ceil_div(self.a.nrows, SCAN_ROWS), 256,
            (i64(self.a.nrows), self.lengths, self.at(ESC_STATE), self.offsets, self.at(NNZ_C)),
        )  # fmt: skip
        facts = self.state[:ESC_STATE].get()
        nnz = int(facts[NNZ_C])
        indptr = self.offsets.astype(self.pointer if nnz <= INT32_MAX else np.int64)
        data = self.cupy.empty(nnz, self.dtype)
        c = CSR(indptr, self.cupy.empty(nnz, self.index), data, (self.a.nrows, self.b.ncols))
        self.copy(c)
        if int(facts[POOL_TAKEN]) > self.workspace.pool_entries:
            self.repeat(work, c)
        return c

    def at(self, slot: int) -> int:
        return int(self.state.data.ptr) + 8 * slot

    def setup(self) -> Any:
        """Count the products of each row, and list the rows by class."""
        a, b, nrows = self.a, self.b, self.a.nrows
        setup = esc_setup(nrows)
        arena = _Arena(setup)
        words = setup["state"] // 8
        self.state, self.lengths = arena("state", words, np.uint64), arena("lengths", nrows, np.uint32)
        self.list, self.places = arena("list", nrows, np.uint32), arena("places", nrows, np.int64)
        self.offsets = arena("offsets", nrows + 1, np.int64)
        self.state.data.memset_async(0, 8 * words)
        mean = a.nnz / nrows
        group = 2 if mean < 3 else 4 if mean < 10 else 8 if mean < 64 else 32
        sizes = i64(nrows), i64(a.nnz), i64(b.nrows), i64(b.nnz), i64(b.ncols)
        limits = _limits(self.device, self.kinds)
        names = setup_names(*self.types[1:])
        module("esc/esc.cu", names)(
            names[GROUPS.index(group)], min(ceil_div(nrows, 256 // group), MOST_BLOCKS), 256,
            (*sizes, *self.pattern, limits, self.lengths, self.at(0), self.at(CLASS_ROWS)),
        )  # fmt: skip
        self.rows(
            "list_rows", ceil_div(nrows, 256), 256,
            (i64(nrows), self.lengths, limits, self.at(CLASS_ROWS), self.at(CLASS_TAKEN), self.list),
        )  # fmt: skip
        facts = self.state[:ESC_STATE].get()
        if facts[BAD_A] or facts[BAD_B]:
            what = "A's offsets or columns, or B's offsets," if facts[BAD_A] else "B's columns"
            raise MatrixError(f"{what} are out of range: rebuild the matrix or correct its shape")
        return facts

    def describe(self, start: int, count: int) -> Any:
        """Return the table of the rows longer than a tile, `count` of them from `start` on in the list."""
        if count == 0:
            return np.zeros((5, 1), np.int64)
        keys = self.tile.key(self.b.ncols), self.bucket.key(self.b.ncols)
        self.long_names = long_names(*self.types, keys, self.tile, self.bucket)
        self.long: Module = module("esc/esc.cu", tuple(self.long_names))
        described = self.cupy.empty((3, count + 1), np.int64)
        self.long(
            self.long_names.describe, ceil_div(count, 256), 256,
            (u32(count), self.list[start:], self.operands[0], self.lengths, described, self.places),
        )  # fmt: skip
        return long_table(described.get(), self.tile.most)

    def allocate(self, facts: Any, table: Int64Array) -> None:
        """Take the memory of the expansion, or say how much would be needed."""
        count, longest = table.shape[1] - 1, int(facts[LONGEST])
        work = self.workspace = esc_workspace(
            self.a.nrows, self.b.ncols, int(facts[PRODUCTS]), longest, self.dtype.itemsize, self.index.itemsize,
            long_rows=count, long_entries=int(table[1, -1]), long_products=int(table[2, -1]), tile=self.tile.most,
            limit=self.limit,
        )  # fmt: skip
        most_tiles = ceil_div(longest, self.tile.most) if count else 0
        self.check(work, longest, most_tiles)
        arena = _Arena({name: size for name, size in work.arrays.items() if name != "described"})
        self.pool = (
            u64(work.pool_entries), arena("pool_indices", work.pool_entries, self.index),
            arena("pool_data", work.pool_entries, self.dtype),
        )  # fmt: skip
        self.host, self.slices = table, slices(table[3], work.slice_tiles)
        if count == 0:
            return
        buckets, products = int(table[4, -1]), work.slice_tiles * self.tile.most
        self.table, self.ends = arena("table", table.size, np.int64), arena("ends", int(table[1, -1]), np.uint32)
        self.table.set(table.reshape(-1))
        self.tiles = arena("tile_indices", products, self.index), arena("tile_data", products, self.dtype)
        self.splitters = arena("splitters", buckets, self.index)
        self.bucket_lengths = arena("bucket_lengths", buckets, np.uint32)
        self.bucket_places = arena("bucket_places", buckets, np.int64)
        self.bucket_starts = arena("bucket_starts", buckets, np.int64)
        self.missing = arena("missing", len(self.slices), np.uint64)
        self.missing.data.memset_async(0, self.missing.nbytes)

    def check(self, work: EscWorkspace, longest: int, most_tiles: int) -> None:
        if self.limit is not None and work.total > self.limit:
            raise MemoryBoundError(
                f"esc needs {work.needed + self.copied:,} bytes on the GPU for C of {self.a.nrows:,} rows, the longest "
                f"of {longest:,} products, but workspace_limit is {self.limit + self.copied:,} bytes: raise it, or "
                f"split A by rows or B by columns"
            )
        room = _shared_memory(self.device) - self.bucket.shared(*self.sizes, 8)
        if most_tiles > room // 6:
            raise MemoryBoundError(
                f"the longest row of C has {longest:,} products; esc merges at most {room // 6 * self.tile.most:,} on "
                f"this GPU: split B by columns, or choose another method"
            )

    def sum_products(self) -> None:
        """Sum the products of each entry of the long rows and of those before it."""
        count = self.host.shape[1] - 1
        if count:
            a_indptr, a_indices, b_indptr, _ = self.pattern
            self.long(
                self.long_names.products, count, 256, (i64(count), self.table, a_indptr, a_indices, b_indptr, self.ends)
            )

    def slice(self, number: int, c: CSR | None) -> None:
        """Expand, sort and compress a slice of the long rows, into the pool, or into C where it is given."""
        names, (first, last) = self.long_names, self.slices[number]
        rows = i64(self.host.shape[1] - 1), i64(first), i64(last)
        tiles, buckets = (int(self.host[column, last] - self.host[column, first]) for column in (3, 4))
        self.long(
            names.sort, tiles, self.tile.threads, (*rows, self.table, self.ends, *self.operands, *self.tiles),
            self.tile.shared(*self.sizes, self.key_bytes(self.tile)),
        )  # fmt: skip
        self.long(
            names.split, last - first, 512, (*rows[:2], self.table, self.tiles[0], self.splitters),
            SAMPLES * self.index.itemsize,
        )  # fmt: skip
        most_tiles = int(np.diff(self.host[3, first : last + 1]).max())
        out = (0, 0, 0, 0) if c is None else (self.bucket_starts, self.offsets, c.indices, c.data)
        self.long(
            names.merge, buckets, self.bucket.threads,
            (*rows, self.table, i64(self.b.ncols), i64(most_tiles), self.splitters, *self.tiles, self.bucket_lengths,
             self.bucket_places, self.at(POOL_TAKEN), *self.pool, *out),
            self.bucket.shared(*self.sizes, self.key_bytes(self.bucket)) + 6 * most_tiles,
        )  # fmt: skip
        if c is None:
            self.long(
                names.sums, last - first, 256,
                (*rows[:2], self.table, self.bucket_lengths, self.bucket_places, self.bucket_starts, self.lengths,
                 int(self.missing.data.ptr) + 8 * number),
            )  # fmt: skip

    def key_bytes(self, kind: Kind) -> int:
        return 4 if kind.key(self.b.ncols) == "u32" else 8

    def multiply_rows(self, part: tuple[Kind, int, int], c: CSR | None) -> None:
        """Expand, sort and compress the rows of a class, into the pool; or into C those that are not in the pool."""
        kind, first, count = part
        out = (0, 0, 0) if c is None else (self.offsets, c.indices, c.data)
        name = row_name(*self.types, kind.key(self.b.ncols), kind)
        module("esc/esc.cu", (name,))(  # compiled by itself: most products meet a few classes only
            name, ceil_div(count, kind.rows), kind.threads,
            (u32(count), self.list[first:], *self.operands, self.lengths, self.places, self.at(POOL_TAKEN), *self.pool,
             *out),
            kind.shared(*self.sizes, self.key_bytes(kind)),
        )  # fmt: skip

    def copy(self, c: CSR) -> None:
        """Copy what is in the pool to C."""
        if self.workspace.pool_entries == 0:
            return
        name = f"copy_rows<{self.types[0]},{self.types[1]}>"
        module("esc/esc.cu", (name,))(
            name, ceil_div(c.nnz, 2048), 256,
            (i64(c.nrows), i64(c.nnz), self.offsets, self.places, *self.pool[1:], c.indices, c.data),
        )  # fmt: skip
        if self.slices:
            self.long(
                self.long_names.copy, int(self.host[4, -1]), 128,
                (i64(self.host.shape[1] - 1), self.table, self.bucket_lengths, self.bucket_places, self.bucket_starts,
                 self.offsets, *self.pool[1:], c.indices, c.data),
            )  # fmt: skip

    def repeat(self, work: list[tuple[Kind, int, int]], c: CSR) -> None:
        """Compute again what the pool could not hold, into its place in C."""
        missing = self.missing.get() if self.slices else ()
        for number, is_missing in enumerate(missing):
            if is_missing:
                self.slice(number, c)
        for part in reversed(work):
            self.multiply_rows(part, c)


def multiply(a: CSR, b: CSR, *, workspace_limit: int | None = None) -> CSR:
    """Return ``a @ b`` by expansion, sorting and compression; arrays of cupy in and out.

    Parameters
    ----------
    a, b : CSR
        Values float32, float64, complex64 or complex128; indices and indptr int32 or int64. Rows may be unsorted and
        hold duplicates.
    workspace_limit : int, optional
        Bytes of device memory to take beyond operands and result; `ESC_LIMIT` if not given, or what the longest row
        needs if that is more. With less memory more is computed twice.

    Returns
    -------
    CSR
        Canonical: columns rise strictly in each row, entries that are or cancel to zero are kept. The products of an
        entry are added in the order of A's entries: the same bits on every run, whatever the limit. Indices and indptr
        have the operands' dtypes, indptr int64 where nnz needs it.

    Raises
    ------
    MemoryBoundError
        If the limit is too small, or a row of C has more products than the GPU merges; says how much is needed.
    MatrixError
        If the shapes do not match, an index is out of range, or the dtype is not multiplied on the GPU.

    References
    ----------
    .. [1] L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015.
    """
    check_product_shapes(a.shape, b.shape)
    c_type(result_dtype(a.dtype, b.dtype))
    if a.nrows == 0 or b.ncols == 0 or a.nnz == 0 or b.nnz == 0:
        return _empty(a, b)
    return _Esc(a, b, workspace_limit).run()


def _empty(a: CSR, b: CSR) -> CSR:
    import cupy

    pointer = np.promote_types(a.indptr.dtype, b.indptr.dtype)
    index, dtype = np.promote_types(a.indices.dtype, b.indices.dtype), result_dtype(a.dtype, b.dtype)
    return CSR(cupy.zeros(a.nrows + 1, pointer), cupy.empty(0, index), cupy.empty(0, dtype), (a.nrows, b.ncols))
