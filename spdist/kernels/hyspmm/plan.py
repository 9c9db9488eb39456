"""Plan a product by hySpMM: check it, count its products, choose how B is sent, cut its rows. Needs no GPU."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.foundation.cpus import count_cpus
from spdist.kernels.cuda import constants
from spdist.kernels.hyspmm import workspace
from spdist.kernels.hyspmm.workspace import BlockCost, BlockLayout, ItemBytes
from spdist.kernels.rounding import ceil_div
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, Int64Array, check_dtype, index_dtype, result_dtype

Variant = Literal["duplicated", "distinct"]
"""How rows of B are sent: one for each entry of A, or each once."""
VariantOrAuto = Literal["auto", "duplicated", "distinct"]

logger = logging.getLogger("spdist")


@dataclass(frozen=True)
class HyspmmTuning:
    """Sizes and shares by which a product is cut into blocks, measured on an H100 host."""

    memory_share: float = 0.9  # share of the memory limit that blocks may take (equation 3 of the thesis)
    # for each variant, the most blocks of a product, unless they would not fit in memory
    duplicated_blocks: int = 32
    distinct_blocks: int = 16
    # the number of blocks is the square root of (entries of A divided by this): to prepare a block then takes as long
    # as to launch all blocks
    block_entries: int = 25_000
    block_bytes: int = 96 << 20  # device bytes of a duplicated block at most, so that the first is ready soon
    ramp: int = 12  # the first block is this many times smaller than the others
    few_blocks: int = 4  # if a product has at most this many blocks, all have one size, as threads prepare them at once
    # entries of A for each thread that counts products; to wake a thread takes as long as to count some 100,000
    parallel_entries: int = 1 << 18
    ring_bytes: int = 576 << 20  # page-locked bytes for prepared blocks, unless one block needs more
    scratch_bytes: int = 1 << 30  # host bytes that all threads together may take to find the distinct rows of B
    small_result: int = 16 << 20  # bytes of C up to which room for all products is reserved rather than for an estimate
    margin: float = 1.25  # factor on the estimate of nnz(C) from the first blocks


TUNING = HyspmmTuning()
SAMPLE = 1 << 14
"""Entries of A in each of the three samples by which a variant is chosen."""


@functools.cache
def threads_of(count: int) -> ThreadPoolExecutor:
    """Return a pool of `count` threads; later calls return the same pool."""
    return ThreadPoolExecutor(count, "spdist-prepare")


class CountedProducts(NamedTuple):
    """Products of all rows before a row, counted in parts: ``ends[row] + bases[part]``, with ``starts[part] < row``."""

    ends: Int64Array
    starts: Int64Array
    bases: Int64Array

    def total(self) -> int:
        """Return the products of all rows."""
        return int(self.bases[-1])

    def products(self) -> Int64Array:
        """Return the products of each row."""
        lengths = np.diff(self.starts)
        before = np.repeat(self.bases[:-1], lengths)
        return np.diff(np.concatenate([[0], self.ends[1:] + before]))


@dataclass(frozen=True, eq=False)
class HyspmmPlan:
    """A checked product, its cost, and how its rows are cut into blocks."""

    # on the host, with values of C's dtype
    a: CSR
    b: CSR
    counted: CountedProducts
    variant: Variant
    types: ItemBytes
    pointer: np.dtype[Any]  # of offsets inside a block: int32 if they fit
    cost: BlockCost
    pairs: int  # pairs of blocks on the device at once
    budget: int  # device bytes of a pair of blocks
    threads: int  # threads that prepare blocks
    tuning: HyspmmTuning = TUNING

    @functools.cached_property
    def cuts(self) -> Int64Array:
        """Rows at which blocks start, and the number of rows; (blocks + 1,)."""
        from spdist.kernels.hyspmm.prepare import cut

        tuning = self.tuning
        most = INT32_MAX if self.pointer.itemsize == 4 else np.iinfo(np.int64).max
        budget = self.budget - self.cost.fixed
        few = self.cost.bytes(self.a.nrows, self.a.nnz, self.total) <= tuning.few_blocks * budget
        cuts = np.empty(self.a.nrows + 1, np.int64)
        first = budget if few else budget // tuning.ramp
        count = int(cut(tuple(self.counted), self.a.indptr, budget, first, most, self.cost[:3], cuts))
        return cuts[: count + 1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.a.dtype

    @property
    def total(self) -> int:
        """Products of all rows."""
        return self.counted.total()

    def ring_bytes(self) -> int:
        """Return the page-locked bytes for prepared blocks: room for the largest, and for more if that is little."""
        rows, entries = np.diff(self.cuts), np.diff(self.a.indptr[self.cuts])
        products = self.products_before(self.cuts)
        b_rows, b_entries = entries, np.diff(products)
        if self.variant == "distinct":
            b_rows, b_entries = np.minimum(entries, self.b.nrows), np.minimum(b_entries, self.b.nnz)
        row, entry, pair = 2 * self.types.pointer_bytes, self.types.value_bytes + 4, sum(self.types[:2])
        sent = rows * row + entries * entry + b_rows * self.types.pointer_bytes + b_entries * pair
        fixed = len(BlockLayout._fields) * (constants.ALIGNMENT + 8)
        largest = int(sent.max(initial=0)) + fixed
        return constants.aligned(max(largest, min(self.tuning.ring_bytes, int(sent.sum()) + fixed * len(sent))))

    def products_before(self, rows: Int64Array) -> Int64Array:
        """Return the products before each of some rows."""
        part = np.maximum(np.searchsorted(self.counted.starts, rows) - 1, 0)
        return np.where(rows > 0, self.counted.ends[rows] + self.counted.bases[part], 0)

    def scratch(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return one thread's memory to find distinct rows of B, of `workspace.host_bytes`."""
        words = self.b.nrows // 64 + 1
        return np.zeros(words, np.uint64), np.empty(words, np.uint32)


def plan_product(
    a: CSR,
    b: CSR,
    *,
    variant: VariantOrAuto = "auto",
    memory_limit: int,
    pairs: int = 2,
    threads: int | None = None,
    tuning: HyspmmTuning = TUNING,
) -> HyspmmPlan:
    """Check a product, count its products, choose the variant, and size its blocks; needs no GPU. As for `multiply`.

    Fewer `pairs` are planned, and this is logged, if the longest row leaves no room for them.
    Raises `InputError` too if an option is not one of its values.
    """
    a, b = _checked(a, b)
    if variant not in get_args(VariantOrAuto):
        raise InputError(f"variant={variant!r} is not one of auto, duplicated, distinct")
    threads = count_cpus() if threads is None else threads
    if pairs < 1 or threads < 1 or memory_limit < 1:
        raise InputError(f"pairs={pairs}, threads={threads} and memory_limit={memory_limit:,} must be at least 1")
    threads = max(1, min(threads, tuning.scratch_bytes // workspace.host_bytes(b.nrows, 1)))
    sizes = ItemBytes(a.dtype.itemsize, b.indices.itemsize, 4)
    counted, widest = _count(a, b, threads, workspace.block_cost(sizes), tuning.parallel_entries)
    entries, products = _row_sizes(a, b, widest)
    pointer = np.dtype(np.int32 if max(entries, products) <= INT32_MAX else np.int64)
    types = sizes._replace(pointer_bytes=pointer.itemsize)
    cost = workspace.block_cost(types)
    needed = cost.bytes(1, entries, products)
    pairs = _fitting_pairs(pairs, tuning.memory_share, memory_limit, needed, widest, products)
    chosen = choose(a, b)[0] if variant == "auto" else variant
    most_blocks = tuning.duplicated_blocks if chosen == "duplicated" else tuning.distinct_blocks
    blocks = min(max(math.isqrt(a.nnz // tuning.block_entries), 1), most_blocks)
    wanted = ceil_div(cost.bytes(a.nrows, a.nnz, counted.total()), blocks) + cost.fixed
    if chosen == "duplicated":
        wanted = min(wanted, tuning.block_bytes)
    budget = min(int(tuning.memory_share * memory_limit) // pairs, max(wanted, needed))
    return HyspmmPlan(a, b, counted, chosen, types, pointer, cost, pairs, budget, threads, tuning)


def _checked(a: CSR, b: CSR) -> tuple[CSR, CSR]:
    """Return the operands with values and indices in the dtypes of the result."""
    check_product_shapes(a.shape, b.shape)
    dtype = check_dtype(result_dtype(check_dtype(a.dtype), check_dtype(b.dtype)))
    if dtype.kind not in "fc":
        raise MatrixError(f"dtype {dtype} is not multiplied on the GPU: convert it to float32, float64 or complex")
    for name, m in (("A", a), ("B", b)):
        if len(m.indptr) != m.nrows + 1 or m.indptr[0] != 0 or not m.indptr[-1] == len(m.indices) == len(m.data):
            raise MatrixError(
                f"{name}: indptr must hold {m.nrows + 1:,} offsets, from 0 to the entries: {len(m.indices):,} "
                f"indices, {len(m.data):,} values"
            )
    return _cast(a, dtype, a.indices.dtype), _cast(b, dtype, index_dtype(b.ncols))


def _cast(m: CSR, dtype: np.dtype[Any], index: np.dtype[Any]) -> CSR:
    indptr, indices = np.ascontiguousarray(m.indptr, np.int64), np.ascontiguousarray(m.indices, index)
    return CSR(indptr, indices, np.ascontiguousarray(m.data, dtype), m.shape)


def _count(a: CSR, b: CSR, threads: int, cost: BlockCost, parallel_entries: int) -> tuple[CountedProducts, int]:
    """Count the products of the rows by threads; return them, and the row that takes the most device bytes."""
    from spdist.kernels.hyspmm.prepare import count_products

    ends = np.empty(a.nrows + 1, np.int64)
    ends[0] = 0
    left = a.indptr, a.indices

    def count(start: int, stop: int) -> Any:
        return count_products(left, b.indptr, start, stop, cost.entry, cost.product, ends)

    parts = min(threads, a.nnz // parallel_entries + 1)
    cuts = np.searchsorted(a.indptr, np.linspace(0, a.nnz, parts + 1)[1:-1].astype(np.int64)).tolist()
    starts = [0, *cuts, a.nrows]
    found = [threads_of(threads).submit(count, *rows) for rows in itertools.pairwise(starts[:-1])]
    results = [count(*starts[-2:])]
    results = [*(future.result() for future in found), *results]
    for total, _, row in results:
        if total < 0:
            raise MatrixError(f"row {int(row):,} of A: offsets or columns out of range; A has {a.ncols:,} columns")
    bases = np.cumsum([0, *(int(r[0]) for r in results)])
    return CountedProducts(ends, np.array(starts), bases), int(max(results, key=lambda r: int(r[1]))[2])


def _row_sizes(a: CSR, b: CSR, row: int) -> tuple[int, int]:
    """Return the entries of a row of A and the products that it expands to."""
    k = a.indices[a.indptr[row] : a.indptr[row + 1]] if a.nrows else a.indices[:0]
    return len(k), int((b.indptr[k + 1] - b.indptr[k]).sum())


def _fitting_pairs(pairs: int, share: float, limit: int, needed: int, row: int, products: int) -> int:
    """Return how many pairs of blocks, `pairs` at most, fit if each must hold `needed` bytes (equation 5)."""
    room = int(share * limit)
    fits = room // max(needed, 1)
    if fits == 0:
        raise MemoryBoundError(
            f"row {row:,} expands to {products:,} products and needs {needed:,} bytes on the GPU, but "
            f"memory_limit={limit:,} bytes leaves {room:,} for a block. One row is the smallest block: "
            f"raise memory_limit to at least {int(needed / share) + 1:,} bytes, or split B by columns"
        )
    if fits < pairs:
        logger.info("hyspmm: %d of %d pairs of blocks, for row %d needs %d bytes", fits, pairs, row, needed)
    return min(pairs, fits)


def choose(a: CSR, b: CSR) -> tuple[Variant, int, int]:
    """Choose the variant that sends fewer bytes, by three samples of A's entries; return it and both variants' bytes.

    An entry of B takes a column and a value, a row an offset of 4 bytes; the distinct variant adds a row number of 4
    bytes for each entry of A.
    """
    from spdist.kernels.hyspmm.rows_of_b import mark_rows, number_rows

    bits, places = np.zeros(b.nrows // 64 + 1, np.uint64), np.empty(b.nrows // 64 + 1, np.uint32)
    size = b.indices.itemsize + b.dtype.itemsize
    duplicated = distinct = 0
    for begin in sorted({0, max(a.nnz // 2, 0), max(a.nnz - SAMPLE, 0)}):
        k = a.indices[begin : begin + SAMPLE]
        duplicated += int((b.indptr[k + 1] - b.indptr[k]).sum()) * size + 4 * len(k)
        low, high = mark_rows(a.indices, begin, begin + len(k), b.nrows, bits)
        rows, entries = number_rows(bits, places, low, high, b.indptr)
        distinct += int(entries) * size + 4 * int(rows) + 4 * len(k)
        bits[low:high] = 0
    variant: Variant = "distinct" if distinct < duplicated else "duplicated"
    logger.info("hyspmm: %s, for B as %d bytes duplicated or %d distinct (sampled)", variant, duplicated, distinct)
    return variant, duplicated, distinct
