"""hySpMM: C = A @ B with its operands and its result on the host, through the GPU by blocks of rows.

The CPU prepares a block: the rows of A, and the rows of B that they ask for. The GPU multiplies, sorts each row's
columns with the sort for its length, and adds equal columns (`hyspmm.cu`). Several blocks are under way at once:
threads prepare blocks ahead, and each pair of blocks on the device has a stream, so that one is copied there while
another is computed and the C of a third comes back.

duplicated
    The row of B of each entry of A, in the order of the entries, as the thesis has it: what is sent is as large as the
    products, and the GPU reads it from end to end.
distinct
    Each row of B that the block asks for, once; the GPU repeats it by number.

References
----------
X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels.cuda import constants
from spdist.kernels.cuda.module import Module, c_type, module
from spdist.kernels.cuda.pinned import Bytes, array_at, pageable, pinned
from spdist.kernels.hyspmm import workspace as hyspmm_sizes
from spdist.kernels.hyspmm.workspace import Block, BlockCost, Layout, Types
from spdist.kernels.rounding import ceil_div
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR, empty
from spdist.matrices.dtypes import INT32_MAX, Int64Array, check_dtype, index_dtype, result_dtype

Variant = Literal["duplicated", "distinct"]
VariantOrAuto = Literal["auto", "duplicated", "distinct"]

logger = logging.getLogger("spdist")

SHARE = 0.9
"""Of the memory limit, what blocks may take (equation 3)."""
BLOCKS = {"duplicated": 32, "distinct": 16}
"""The most blocks that a product is cut into where memory does not ask for more."""
BLOCK_ENTRIES = 25_000
"""Squares of blocks grow with these entries of A: to prepare a block then takes as long as to launch them all."""
BLOCK_BYTES = 96 << 20
"""The most device memory of a duplicated block: the first must come soon, and a thread prepares each."""
RAMP = 12
"""The first block is so many times smaller, so that the GPU has something to do soon."""
FEW_BLOCKS = 4
"""So many are all as large: threads prepare them at once."""
SAMPLE = 1 << 14
"""Entries of A in each of the three places that the choice of a variant looks at."""
PARALLEL_ENTRIES = 1 << 18
"""Entries of A per thread that counts products: to wake a thread takes as long as to count some 100,000."""
RING_BYTES = 576 << 20
"""Page-locked memory for prepared blocks, unless one alone needs more."""
TRIES = 1 << 14
"""Looks at whether a block is ready before the threads are asked whether they failed."""
SCRATCH_BYTES = 1 << 30
"""Host memory that threads may take together to find the distinct rows of B."""
SMALL_RESULT = 16 << 20
"""Bytes of C up to which its bound is reserved rather than an estimate."""
MARGIN = 1.25
"""By how much the estimate of nnz(C) from the first block is raised."""
GRID = 1 << 13
"""The most thread blocks of a launch; those of the sorts take row after row."""
LIST_GRID = 528
"""The most of a launch for a list that may be empty, whose length only the GPU knows."""


class Registers(NamedTuple):
    """Rows of up to ``group * items`` products: `group` lanes a row, `items` a lane, `warps` a thread block."""

    group: int
    items: int
    warps: int


REGISTERS = (
    Registers(4, 4, 4), Registers(4, 8, 4), Registers(8, 8, 4), Registers(16, 8, 4), Registers(32, 8, 4),
    Registers(32, 12, 4), Registers(32, 16, 2), Registers(32, 32, 1),
)  # fmt: skip
NARROW, WIDE, GLOBAL = 8, 9, 10
SHARED_COLUMNS = {NARROW: 1 << 13, WIDE: 1 << 15}
SHARED_WARPS = 4
GATHER_LANES = (4, 32)
LENGTH_GROUPS = len(REGISTERS) + 1
"""Groups of row lengths that the CPU tells apart; the GPU splits the last two by their columns."""


class Names:
    """Name expressions of the kernels for one choice of types, in C's words (``double``, ``long long``)."""

    def __init__(self, value: str, index: str, pointer: str, key: str) -> None:
        vip, ip = f"{value},{index},{pointer}", f"{index},{pointer}"
        self.check, self.group, self.offsets = f"check_rows<{ip}>", f"group_rows<{ip}>", f"offsets<{pointer}>"
        self.registers = [f"sort_registers<{vip},{key},{k.group},{k.items},{k.warps}>" for k in REGISTERS]
        self.shared = {g: f"sort_shared<{vip},{columns},{SHARED_WARPS}>" for g, columns in SHARED_COLUMNS.items()}
        self.long = f"sort_global<{vip}>"
        self.gather = {lanes: f"gather_rows<{vip},{lanes}>" for lanes in GATHER_LANES}

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """The expressions by file."""
        names = (self.check, self.group, *self.registers, *self.shared.values(), self.long, *self.gather.values())
        return {"hyspmm/hyspmm.cu": names, "rowwise_gpu/rows.cu": (self.offsets,)}


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return what is compiled for a choice of types: name expressions by file.

    Parameters
    ----------
    value, index, pointer : str
        The kernels' names of the types of values, columns and offsets.

    Examples
    --------
    >>> sources("double", "int", "int")["rowwise_gpu/rows.cu"]
    ('offsets<int>',)
    """
    keys = ("u32", "u64") if index == "int" else ("u64",)
    found = [Names(value, index, pointer, key).sources for key in keys]
    return {file: tuple(dict.fromkeys(name for s in found for name in s[file])) for file in found[0]}


class _Kernels(Names):
    """The compiled kernels."""

    def __init__(self, value: str, index: str, pointer: str, key: str) -> None:
        super().__init__(value, index, pointer, key)
        self.own: Module = module("hyspmm/hyspmm.cu", self.sources["hyspmm/hyspmm.cu"])
        self.rows: Module = module("rowwise_gpu/rows.cu", self.sources["rowwise_gpu/rows.cu"])


@functools.cache
def _kernels(device: int, value: str, index: str, pointer: str, key: str) -> _Kernels:
    return _Kernels(value, index, pointer, key)


def _bits(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values as numbers that are only copied, so that few kinds are compiled."""
    return np.ascontiguousarray(data if data.itemsize > 8 else data.view(f"u{data.itemsize}"))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "spdist-prepare")


@functools.cache
def _table() -> npt.NDArray[np.uint8]:
    """Return the group of each number of products up to the last that registers hold; 0 has the group after all."""
    from spdist.kernels.hyspmm.prepare import TABLE

    limits = [kind.group * kind.items for kind in REGISTERS]
    table = np.searchsorted(limits, np.arange(TABLE)).astype(np.uint8)
    table[0] = LENGTH_GROUPS
    return table


class Counted(NamedTuple):
    """Products of the rows before each, counted in parts: ``ends[row] + bases[part]``, for ``starts[part] < row``."""

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


@dataclass
class Prepared:
    """A block as the CPU leaves it: `sent` is what goes to the GPU, `lengths` counts its rows by their group.

    `end` is where its bytes end in the ring, counted from the start.
    """

    start: int
    stop: int
    block: Block
    layout: Layout
    sent: Bytes
    lengths: Int64Array
    end: int


@dataclass
class Task:
    """A checked product, its cost and how it is cut.

    Attributes
    ----------
    a, b : CSR
        On the host, values of the result's dtype.
    counted : Counted
    variant : "duplicated" or "distinct"
    types : Types
    pointer : dtype
        Of offsets inside a block: int32 where they fit.
    cost : BlockCost
    pairs : int
        Pairs of blocks on the device.
    budget : int
        Device bytes of one.
    threads : int
    cuts : (blocks + 1,) int64
        The rows where blocks start, and the last row.
    """

    a: CSR
    b: CSR
    counted: Counted
    variant: Variant
    types: Types
    pointer: np.dtype[Any]
    cost: BlockCost
    pairs: int
    budget: int
    threads: int

    def __post_init__(self) -> None:
        from spdist.kernels.hyspmm.prepare import cut

        most = INT32_MAX if self.pointer.itemsize == 4 else np.iinfo(np.int64).max
        budget = self.budget - self.cost.fixed
        few = self.cost.bytes(self.a.nrows, self.a.nnz, self.total) <= FEW_BLOCKS * budget
        cuts = np.empty(self.a.nrows + 1, np.int64)
        first = budget if few else budget // RAMP
        count = int(cut(self.counted, self.a.indptr, budget, first, most, self.cost[:3], cuts))
        self.cuts = cuts[: count + 1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.a.dtype

    @property
    def total(self) -> int:
        """Products of all rows."""
        return self.counted.total()

    def ring_bytes(self) -> int:
        """Return the page-locked bytes that prepared blocks take: for the largest, and for others beside it."""
        rows, entries = np.diff(self.cuts), np.diff(self.a.indptr[self.cuts])
        products = self._products_at(self.cuts)
        b_rows, b_entries = entries, np.diff(products)
        if self.variant == "distinct":
            b_rows, b_entries = np.minimum(entries, self.b.nrows), np.minimum(b_entries, self.b.nnz)
        row, entry, pair = 2 * self.types.pointer_bytes, self.types.value_bytes + 4, sum(self.types[:2])
        sent = rows * row + entries * entry + b_rows * self.types.pointer_bytes + b_entries * pair
        fixed = len(Layout._fields) * (constants.ALIGNMENT + 8)
        largest = int(sent.max(initial=0)) + fixed
        return constants.aligned(max(largest, min(RING_BYTES, int(sent.sum()) + fixed * len(sent))))

    def _products_at(self, rows: Int64Array) -> Int64Array:
        """Return the products before each of some rows."""
        part = np.maximum(np.searchsorted(self.counted.starts, rows) - 1, 0)
        return np.where(rows > 0, self.counted.ends[rows] + self.counted.bases[part], 0)

    def scratch(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what one thread needs to find distinct rows of B; `hyspmm_sizes.host_bytes` says how much that is."""
        words = self.b.nrows // 64 + 1
        return np.zeros(words, np.uint64), np.empty(words, np.uint32)


def plan(
    a: CSR,
    b: CSR,
    *,
    variant: VariantOrAuto = "auto",
    memory_limit: int,
    pairs: int = 2,
    threads: int | None = None,
) -> Task:
    """Check a product, count its products, choose the variant and say how it is cut; needs no GPU.

    Parameters
    ----------
    a, b : CSR
        On the host. Rows of A need not be sorted and may hold duplicates; those of B are canonical.
    variant : {"auto", "duplicated", "distinct"}
        "auto" takes the one that sends fewer bytes, and logs it.
    memory_limit : int
        Bytes of device memory.
    pairs : int
        Pairs of blocks on the device at once; fewer where the longest row leaves no room for them, which is logged.
    threads : int, optional
        Threads that prepare blocks; all cores by default.

    Returns
    -------
    Task

    Raises
    ------
    MatrixError
        If shapes, dtypes or columns of A do not fit.
    MemoryBoundError
        If the longest row alone does not fit in the limit; names the bytes.
    """
    a, b = _checked(a, b)
    if variant not in get_args(VariantOrAuto):
        raise InputError(f"variant={variant!r} is not one of auto, duplicated, distinct")
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if pairs < 1 or threads < 1 or memory_limit < 1:
        raise InputError(f"pairs={pairs}, threads={threads} and memory_limit={memory_limit:,} must be at least 1")
    threads = max(1, min(threads, SCRATCH_BYTES // hyspmm_sizes.host_bytes(b.nrows, 1)))
    sizes = Types(a.dtype.itemsize, b.indices.itemsize, 4)
    counted, widest = _count(a, b, threads, hyspmm_sizes.block_cost(sizes))
    entries, products = _row_sizes(a, b, widest)
    pointer = np.dtype(np.int32 if max(entries, products) <= INT32_MAX else np.int64)
    types = sizes._replace(pointer_bytes=pointer.itemsize)
    cost = hyspmm_sizes.block_cost(types)
    needed = cost.bytes(1, entries, products)
    pairs = _fitting_pairs(pairs, memory_limit, needed, widest, products)
    chosen = choose(a, b)[0] if variant == "auto" else variant
    blocks = min(max(math.isqrt(a.nnz // BLOCK_ENTRIES), 1), BLOCKS[chosen])
    wanted = ceil_div(cost.bytes(a.nrows, a.nnz, counted.total()), blocks) + cost.fixed
    if chosen == "duplicated":
        wanted = min(wanted, BLOCK_BYTES)
    budget = min(int(SHARE * memory_limit) // pairs, max(wanted, needed))
    return Task(a, b, counted, chosen, types, pointer, cost, pairs, budget, threads)


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


def _count(a: CSR, b: CSR, threads: int, cost: BlockCost) -> tuple[Counted, int]:
    """Return the products of the rows, and the row that takes the most bytes."""
    from spdist.kernels.hyspmm.prepare import count_products

    ends = np.empty(a.nrows + 1, np.int64)
    ends[0] = 0
    left = a.indptr, a.indices

    def count(start: int, stop: int) -> Any:
        return count_products(left, b.indptr, start, stop, cost.entry, cost.product, ends)

    parts = min(threads, a.nnz // PARALLEL_ENTRIES + 1)
    cuts = np.searchsorted(a.indptr, np.linspace(0, a.nnz, parts + 1)[1:-1].astype(np.int64)).tolist()
    starts = [0, *cuts, a.nrows]
    found = [_threads(threads).submit(count, *rows) for rows in itertools.pairwise(starts[:-1])]
    results = [count(*starts[-2:])]
    results = [*(future.result() for future in found), *results]
    for total, _, row in results:
        if total < 0:
            raise MatrixError(f"row {int(row):,} of A: offsets or columns out of range; A has {a.ncols:,} columns")
    bases = np.cumsum([0, *(int(r[0]) for r in results)])
    return Counted(ends, np.array(starts), bases), int(max(results, key=lambda r: int(r[1]))[2])


def _row_sizes(a: CSR, b: CSR, row: int) -> tuple[int, int]:
    """Return the entries of a row of A and the products that it expands to."""
    k = a.indices[a.indptr[row] : a.indptr[row + 1]] if a.nrows else a.indices[:0]
    return len(k), int((b.indptr[k + 1] - b.indptr[k]).sum())


def _fitting_pairs(pairs: int, limit: int, needed: int, row: int, products: int) -> int:
    """Return how many pairs of blocks fit if each must hold `needed` bytes (equation 5)."""
    fits = int(SHARE * limit) // max(needed, 1)
    if fits == 0:
        raise MemoryBoundError(
            f"row {row:,} expands to {products:,} products and needs {needed:,} bytes on the GPU, but "
            f"memory_limit={limit:,} bytes leaves {int(SHARE * limit):,} for a block. One row is the smallest block: "
            f"raise memory_limit to at least {int(needed / SHARE) + 1:,} bytes, or split B by columns"
        )
    if fits < pairs:
        logger.info("hyspmm: %d of %d pairs of blocks, for row %d needs %d bytes", fits, pairs, row, needed)
    return min(pairs, fits)


def choose(a: CSR, b: CSR) -> tuple[Variant, int, int]:
    """Return the variant that sends fewer bytes, by three places of A, and the bytes of B that each sends for these.

    Parameters
    ----------
    a, b : CSR

    Returns
    -------
    variant : "duplicated" or "distinct"
    duplicated, distinct : int
        Bytes: an entry of B takes a column and a value, a row an offset of 4 bytes; distinct adds a number of 4 bytes
        for each entry of A.
    """
    from spdist.kernels.hyspmm.prepare import mark_rows, number_rows

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


class Preparation:
    """Blocks prepared by threads, and taken and released in order.

    Parameters
    ----------
    task : Task
    allocate : callable
        Takes bytes, returns at least as many: page-locked where they go to a GPU.
    """

    def __init__(self, task: Task, allocate: Callable[[int], Bytes] = pageable) -> None:
        from spdist.kernels.hyspmm import prepare

        self.task, self.code = task, prepare
        blocks = len(task.cuts) - 1
        self.state, self.ready = np.zeros(prepare.STATE, np.int64), np.zeros(blocks, np.int64)
        self.said = np.zeros((blocks, prepare.LENGTHS + LENGTH_GROUPS + 1), np.int64)
        self.room = task.ring_bytes()
        self.ring = allocate(self.room)[: self.room]
        self.futures: list[Future[None]] = []
        if blocks > 1:
            pool = _threads(task.threads)
            count = min(max(task.threads - 1, 1), blocks)  # a core for the caller
            self.futures = [pool.submit(self._work) for _ in range(count)]
        elif blocks:
            self._work()

    def _work(self) -> None:
        task = self.task
        a, b = (task.a.indptr, task.a.indices, _bits(task.a.data)), (task.b.indptr, task.b.indices, _bits(task.b.data))
        values = self.ring.view(b[2].dtype)
        ring = values, self.ring.view(b[1].dtype), self.ring.view(task.pointer), self.ring.view(np.uint32)
        shared = _table(), self.state, self.ready, self.said, ring, self.room
        sizes = task.types[0], task.types[1], task.types[2]
        distinct = task.variant == "distinct"
        self.code.prepare_blocks(a, b, tuple(task.counted), task.cuts, distinct, sizes, *shared, *task.scratch())

    def is_ready(self, number: int) -> bool:
        """Whether taking block `number` would not wait."""
        return bool(self.ready[number])

    def take(self, number: int) -> Prepared:
        """Return block `number`; wait until it is ready."""
        while not self.code.wait_ready(self.ready, number, TRIES):
            for future in self.futures:
                if future.done():
                    future.result()
        task, said = self.task, self.said[number]
        start, stop = int(task.cuts[number]), int(task.cuts[number + 1])
        products = int(np.diff(task._products_at(task.cuts[number : number + 2]))[0])
        place, b_rows, b_entries = (int(n) for n in said[: self.code.LENGTHS])
        entries = int(task.a.indptr[stop] - task.a.indptr[start])
        block = Block(stop - start, entries, products, b_rows, b_entries, task.variant == "distinct")
        layout = hyspmm_sizes.block_layout(block, task.types)
        at = place % self.room
        sent, lengths = self.ring[at : at + layout.sent], said[self.code.LENGTHS : -1]
        return Prepared(start, stop, block, layout, sent, lengths, place + layout.sent)

    def release(self, prepared: Prepared) -> None:
        """Let the memory of a block, and of those before it, be used again."""
        self.code.free_place(self.state, prepared.end)

    def close(self) -> None:
        """Stop the threads and wait for them."""
        self.code.close(self.state)
        for future in self.futures:
            future.result()


class _Slot(NamedTuple):
    """Room for one pair of blocks on the device, its stream, and where it reports."""

    memory: Any
    stream: Any
    event: Any
    status: Int64Array


class _Result:
    """C on the host, in page-locked memory that grows when the estimate of its entries was too low."""

    def __init__(self, task: Task, slots: list[_Slot]) -> None:
        from spdist.kernels.hyspmm import prepare

        self.code = prepare
        self.task, self.slots = task, slots  # no cycle of references: what is pinned must be free at once
        self.index, self.dtype = task.b.indices.dtype, task.dtype
        self.indptr = array_at(pinned(8 * (task.a.nrows + 1)), 0, task.a.nrows + 1, np.int64)
        self.indptr[0] = 0
        self.local = array_at(pinned(task.pointer.itemsize * task.a.nrows), 0, task.a.nrows, task.pointer)
        self.bound = min(task.total, task.a.nrows * task.b.ncols)
        self.capacity = self.nnz = self.products = 0
        self.indices: npt.NDArray[Any] = np.empty(0, self.index)
        self.data: npt.NDArray[Any] = np.empty(0, self.dtype)
        if self.bound * (self.index.itemsize + self.dtype.itemsize) <= SMALL_RESULT:
            self._grow(self.bound)

    def _grow(self, capacity: int) -> None:
        indices = array_at(pinned(capacity * self.index.itemsize), 0, capacity, self.index)
        data = array_at(pinned(capacity * self.dtype.itemsize), 0, capacity, self.dtype)
        if self.nnz:
            for slot in self.slots:
                slot.stream.synchronize()
            indices[: self.nnz] = self.indices[: self.nnz]
            data[: self.nnz] = self.data[: self.nnz]
        self.capacity, self.indices, self.data = capacity, indices, data

    def add(self, entries: int, products: int) -> int:
        """Return the place of a block of `entries`, made of `products`."""
        place = self.nnz
        self.products += products
        if place + entries > self.capacity:
            expected = (place + entries) * self.task.total // max(self.products, 1)
            self._grow(min(max(int(MARGIN * expected), place + entries), self.bound))
        self.nnz += entries
        return place

    def shift(self, start: int, stop: int, place: int) -> None:
        """Turn the offsets of rows [start, stop) inside their block into those of C."""
        self.code.shift(self.local, start, stop, place, self.indptr)

    def matrix(self) -> CSR:
        """Return C."""
        shape = self.task.a.nrows, self.task.b.ncols
        return CSR(self.indptr, self.indices[: self.nnz], self.data[: self.nnz], shape)


def launch_block(kernels: Any, prepared: Prepared, base: int, ncols: int) -> None:
    """Launch the GPU stages of a block on the current stream: multiply, sort and compress its rows, and gather C.

    Parameters
    ----------
    kernels : _Kernels
    prepared : Prepared
    base : int
        Address of `layout.end` bytes on the device, of which the first `layout.sent` are in place and those from
        `layout.counts` on zero.
    ncols : int
        Columns of B.
    """
    block, lengths = prepared.block, [int(n) for n in prepared.lengths]
    at = Layout(*(base + offset for offset in prepared.layout))
    a_rows = at.a_rows if block.distinct else 0
    rows, u32 = np.int64(block.rows), 4
    if block.b_rows:
        kernels.own(kernels.check, ceil_div(block.b_rows, 32), 256,
                    (np.int64(block.b_rows), np.int64(ncols), at.b_starts, at.b_columns, at.status))  # fmt: skip
    where = rows, at.row_entries, at.row_products, a_rows, at.b_starts, at.b_columns
    kernels.own(kernels.group, ceil_div(block.rows, 256), 256, (*where, at.counts, at.lists, at.lengths))

    def sort(name: str, group: int, grid: int, warps: int, *targets: int) -> None:
        lists = at.counts + u32 * group, at.lists + u32 * group * block.rows
        operands = at.row_entries, at.row_products, a_rows, at.a_values, at.b_starts, at.b_columns, at.b_values
        kernels.own(name, grid, 32 * warps, (*lists, *operands, *targets, at.lengths))

    if lengths[-1]:
        grid = min(lengths[-1], LIST_GRID)
        sort(kernels.long, GLOBAL, grid, 8, at.columns, at.values, at.c_columns, at.c_values)
    if lengths[-1] + lengths[-2]:
        for group, name in reversed(kernels.shared.items()):
            grid = ceil_div(lengths[-1] + lengths[-2], SHARED_WARPS)
            grid = min(grid, GRID if group == NARROW else 2 * LIST_GRID)
            sort(name, group, grid, SHARED_WARPS, at.columns, at.values, at.c_values)
    for group, kind in reversed(list(enumerate(REGISTERS))):
        if lengths[group]:
            grid = ceil_div(lengths[group] * kind.group, 32 * kind.warps)
            grid = min(grid, GRID if group < len(REGISTERS) - 1 else 2 * LIST_GRID)
            sort(kernels.registers[group], group, grid, kind.warps, at.columns, at.values)
    scan = rows, at.lengths, at.scan, at.c_indptr, at.status
    kernels.rows(kernels.offsets, ceil_div(block.rows, constants.SCAN_ROWS), 256, scan)
    lanes = GATHER_LANES[block.products > 64 * block.rows]
    kernels.own(
        kernels.gather[lanes], ceil_div(block.rows, 256 // lanes), 256,
        (rows, at.row_products, at.c_indptr, at.columns, at.values, at.c_columns, at.c_values),
    )  # fmt: skip


@functools.cache
def _stream(device: int, number: int) -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


class _Pipeline:
    """Blocks through the device: copy, compute, copy back, `task.pairs` of them at once."""

    def __init__(self, task: Task) -> None:
        import cupy

        self.cuda, self.task = cupy.cuda, task
        device = cupy.cuda.runtime.getDevice()
        key = "u32" if task.b.ncols <= 1 << 22 else "u64"
        self.kernels = _kernels(device, *map(c_type, (task.dtype, task.b.indices.dtype, task.pointer)), key)
        status = array_at(pinned(16 * task.pairs), 0, hyspmm_sizes.STATUS * task.pairs, np.int64)
        self.slots = [
            _Slot(
                cupy.cuda.alloc(task.budget),
                _stream(device, i),
                cupy.cuda.Event(disable_timing=True),
                status[2 * i : 2 * i + 2],
            )
            for i in range(task.pairs)
        ]
        cupy.cuda.get_current_stream().synchronize()  # what used this memory before is done
        self.result = _Result(task, self.slots)
        self.flying: collections.deque[tuple[_Slot, Prepared]] = collections.deque()
        self.copied: collections.deque[tuple[int, int, int]] = collections.deque()

    def synchronize(self) -> None:
        """Wait for all streams."""
        for slot in self.slots:
            slot.stream.synchronize()

    def run(self) -> CSR:
        """Return C."""
        task = self.task
        blocks = Preparation(task, pinned)
        count = len(task.cuts) - 1
        number = 0
        try:
            while number < count or self.flying:
                waits = number < count and len(self.flying) < task.pairs
                if self.flying and not (waits and blocks.is_ready(number)):
                    blocks.release(self.finish())
                elif waits:
                    self.start(self.slots[number % task.pairs], blocks.take(number))
                    number += 1
        finally:
            self.synchronize()
            blocks.close()
        while self.copied:
            self.result.shift(*self.copied.popleft())
        logger.info("hyspmm: %d blocks, %s, %d pairs of %d bytes", count, task.variant, task.pairs, task.budget)
        return self.result.matrix()

    def start(self, slot: _Slot, prepared: Prepared) -> None:
        """Send a block and launch its kernels."""
        runtime, stream, layout = self.cuda.runtime, slot.stream, prepared.layout
        base = int(slot.memory.ptr)
        runtime.memcpyAsync(base, prepared.sent.ctypes.data, layout.sent, runtime.memcpyHostToDevice, stream.ptr)
        runtime.memsetAsync(base + layout.counts, 0, layout.end - layout.counts, stream.ptr)
        with stream:
            launch_block(self.kernels, prepared, base, self.task.b.ncols)
        self.fetch(slot, layout.status, slot.status)
        slot.event.record(stream)
        self.fetch(
            slot, layout.c_indptr + self.task.pointer.itemsize, self.result.local[prepared.start : prepared.stop]
        )
        self.flying.append((slot, prepared))

    def fetch(self, slot: _Slot, offset: int, target: npt.NDArray[Any]) -> None:
        """Copy from the slot's memory to the host."""
        runtime = self.cuda.runtime
        source = int(slot.memory.ptr) + offset
        runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, runtime.memcpyDeviceToHost, slot.stream.ptr)

    def finish(self) -> Prepared:
        """Wait for the oldest block's number of entries, send for its C, and return it."""
        slot, prepared = self.flying.popleft()
        slot.event.synchronize()
        entries, not_canonical = slot.status.tolist()
        if not_canonical:
            raise MatrixError(
                f"B: a row that rows {prepared.start:,} to {prepared.stop - 1:,} of A ask for is not sorted, holds a "
                f"duplicate, or has a column outside [0, {self.task.b.ncols:,}): pass B in canonical form"
            )
        result, layout = self.result, prepared.layout
        place = result.add(entries, prepared.block.products)
        if entries:
            self.fetch(slot, layout.c_columns, result.indices[place : place + entries])
            self.fetch(slot, layout.c_values, result.data[place : place + entries])
        if len(self.copied) >= self.task.pairs:  # the block before on this stream has come back whole
            result.shift(*self.copied.popleft())
        self.copied.append((prepared.start, prepared.stop, place))
        return prepared


def multiply(
    a: CSR,
    b: CSR,
    *,
    variant: VariantOrAuto = "auto",
    memory_limit: int | None = None,
    pairs: int = 2,
    threads: int | None = None,
) -> CSR:
    """Return ``a @ b``; arrays of NumPy in and out, through the GPU by blocks of rows.

    Parameters
    ----------
    a, b : CSR
        On the host, float32, float64 or complex, int32 or int64 indices. Rows of A need not be sorted and may hold
        duplicates; those of B are canonical.
    variant : {"auto", "duplicated", "distinct"}
        How rows of B are sent; "auto" takes the fewer bytes. The result has the same bits with each.
    memory_limit : int, optional
        Bytes of device memory; what is free, by default.
    pairs : int
        Pairs of blocks on the device at once.
    threads : int, optional
        Threads that prepare blocks; all cores by default.

    Returns
    -------
    CSR
        Canonical, with the structural pattern, ``index_dtype(b.ncols)`` and ``result_dtype``; in page-locked memory,
        which is used again when the arrays are gone.

    Raises
    ------
    MatrixError
        If shapes, dtypes or columns do not fit, or B is not canonical.
    MemoryBoundError
        If the longest row alone does not fit in the limit; names the bytes.
    """
    import cupy

    if memory_limit is None:
        memory_limit = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    task = plan(a, b, variant=variant, memory_limit=memory_limit, pairs=pairs, threads=threads)
    if task.total == 0:
        return empty((a.nrows, b.ncols), task.dtype)
    return _Pipeline(task).run()


def multiply_block(prepared: Prepared, task: Task) -> CSR:
    """Multiply, sort and compress one prepared block; arrays of CuPy out, offsets from 0.

    Parameters
    ----------
    prepared : Prepared
        Of `task`.
    task : Task

    Returns
    -------
    CSR
        Rows ``[prepared.start:prepared.stop)`` of C, on the device.
    """
    import cupy

    pipeline = _Pipeline(task)
    slot = pipeline.slots[0]
    pipeline.start(slot, prepared)
    slot.stream.synchronize()
    nnz, layout, block = int(slot.status[0]), prepared.layout, prepared.block

    def array(offset: int, count: int, dtype: Any) -> Any:
        return cupy.ndarray((count,), dtype, slot.memory + offset).copy()

    indptr = array(layout.c_indptr, block.rows + 1, task.pointer)
    indices, data = array(layout.c_columns, nnz, task.b.indices.dtype), array(layout.c_values, nnz, task.dtype)
    return CSR(indptr, indices, data, (block.rows, task.b.ncols))
