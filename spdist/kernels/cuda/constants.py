"""Constants that Python and the CUDA kernels share. Each is defined here once; `defines` passes it to the compiler.

A .cu file names a shared constant ``SPDIST_<NAME>`` and gives it a C type; one macro lists the members of an enum::

    enum Fact { SPDIST_ROW_FACT };
    constexpr int VERY_LONG = SPDIST_VERY_LONG;

A constant that only kernels, or only Python, use is defined where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import IntEnum

SCAN_ROWS = 2048
"""Rows whose lengths one thread block of the kernel `offsets` adds up."""
ALLOCATION = 512
"""Bytes; CuPy's pool rounds every device allocation up to a multiple of this."""
ALIGNMENT = 256
"""Bytes; the arrays of a block on the GPU start at multiples of this."""
GROUP_ROWS = 8
"""Rows that a thread block of a kernel with one warp a row takes (`groups.cuh`)."""

ROW_CLASSES = 16
"""Classes of rows, by their products, that the device counts and lists; class 0 holds the rows without products."""
VERY_LONG = 8192
"""Entries of a row of A above which several thread blocks count its products."""
SHARED_FACTOR = 256
"""Least number of products counted for each entry of A when a row of more than 1,024 entries of A gets its class."""
NARROW_COLUMNS = 1 << 22
"""Columns that a 32-bit sort key can hold beside a product's number of 10 bits."""
LONG_SHARE = 128
"""Entries of A that one thread block multiplies when thread blocks share a row of C."""
ALL_TIES = 2**32 - 1
"""Number of ties that means all: keep every entry equal to the smallest entry kept."""

TASK_PAIRS = 768
"""Pairs of dense blocks from the start of one task to the start of the next."""
ROW_THREADS = 128
"""Threads of a thread block that multiplies whole rows of dense blocks."""

SPLITTER_SAMPLES = 8192
"""Columns that are sampled and sorted to choose the bucket boundaries of one long row in ESC."""

SHARED_NARROW, SHARED_WIDE = 1 << 13, 1 << 15
"""Columns that the two kernels of hySpMM that sort in shared memory span, one bit each."""

SELL_LONG = 2048
"""Entries above which a row stays in CSR on the GPU."""
SELL_WINDOW = 1024
"""Rows that one thread block sorts by length."""
SELL_WARPS = 8
"""Warps, and so SELL chunks, of a thread block."""
SELL_BASES, SELL_DIAGONALS = 16, 4
"""A SELL chunk's slot bases, and its (diagonal, lanes) pairs, are padded to multiples of these."""
SELL_PADDING, SELL_NARROW_PADDING = -1, 0xFFFF
"""Column of a slot whose row has ended, in 32 and in 16 bits."""
SELL_NO_DIAGONAL = 0x7FFFFFFF
"""The diagonal of a row that has ended."""
SELL_MOST_FULL = 0x7FFF
"""Slots without padding that a SELL chunk's code word can count."""
EHYB_NO_PLACE = 0xFFFF
"""Place, in a part's share of x, of a slot that is padding."""
EHYB_THREADS = 1024
"""Threads of a thread block that multiplies one part."""
REORDER_UNSEEN = 0x7FFFFFFF
"""Place, or parent, of a row that the search has not reached yet."""
UPDATE_THREADS = 256
"""Threads of a thread block that updates vectors."""

PACKED_SAME, PACKED_CONTINUES = 64, 128
"""Bits of a piece's head: it has the pattern of the piece before, moved; it starts inside its row."""
PACKED_WORDS = 256
"""Words that the dictionary of values may have."""
PACKED_SAMPLE = 1024
"""Words of C that are sampled to find the dictionary."""


class RowFact(IntEnum):
    """What `analyse_rows` and the kernels after it report about a product, by its place in the facts."""

    PRODUCTS = 0
    BAD_A = 1
    BAD_B = 2
    FALLS = 3
    FALLS_AT_ROWS = 4
    MAX_ROW_A = 5
    NNZ_C = 6
    VERY_LONG_ROWS = 7
    WIDEST = 8
    COUNTED = 9
    BLOCKS_DONE = 10


class NodeFact(IntEnum):
    """What `find_nodes` and `node_count` report about the rows of one class."""

    NODES = 0
    OTHER_ROWS = 1
    WIDEST_NODE = 2
    MOST_NODE_ROWS = 3
    MOST_ENTRIES = 4


class MaskCounter(IntEnum):
    """Counters from which the thread blocks and warps of `masked_rows` take their work."""

    TASKS = 0
    NEXT_TASK = 1
    NEXT_ROW = 2


class RowNorm(IntEnum):
    """The norm that rows of C are divided by."""

    NO_NORM = 0
    L1 = 1
    L2 = 2
    GREATEST = 3


class EscFact(IntEnum):
    """What the kernels of ESC report about a product, by its place in the facts."""

    ALL_PRODUCTS = 0
    BAD_A = 1
    BAD_B = 2
    LONGEST = 3
    NNZ_C = 4
    POOL_TAKEN = 5


class LongRowField(IntEnum):
    """Rows of ESC's table of long rows: the row of C, and its entries of A, products, tiles and buckets."""

    ROW = 0
    ENTRIES = 1
    PRODUCTS = 2
    TILES = 3
    BUCKETS = 4


class SortGroup(IntEnum):
    """Groups of rows in hySpMM: ``R<n>`` sorts up to n products in registers, the rest in shared or device memory."""

    R16 = 0
    R32 = 1
    R64 = 2
    R128 = 3
    R256 = 4
    R384 = 5
    R512 = 6
    R1024 = 7
    NARROW = 8
    WIDE = 9
    GLOBAL = 10


class BlockStatus(IntEnum):
    """What a block of hySpMM reports: the entries of its C, and whether its rows of B are not canonical."""

    ENTRIES_OF_C = 0
    NOT_CANONICAL = 1


class ChunkKind(IntEnum):
    """How a SELL chunk keeps its columns."""

    WIDE = 0
    NARROW = 1
    DIAGONAL = 2
    BLOCK_WIDE = 3
    BLOCK_NARROW = 4


class ConjugateGradientSum(IntEnum):
    """Sums of conjugate gradients: (p, q), (r, z), (r, r), and (r, z) of the iteration before."""

    PQ = 0
    RZ = 1
    RR = 2
    BEFORE = 3


class PageRankSum(IntEnum):
    """Sums of PageRank: rank passed on along links, and the change of all ranks."""

    KEPT = 0
    CHANGED = 1


class PackedCount(IntEnum):
    """What packing reports: bytes of the stream taken, bytes that hold columns, words of the dictionary."""

    USED = 0
    COLUMNS = 1
    DISTINCT = 2


class EhybSlice(IntEnum):
    """Words of a slice of EHYB.

    The first three say where its first slot is in the values, in the outer columns and in the inner places. The last
    holds the position of its first row in 32 bits, then in 16 bits each its inner and its outer slots.
    """

    VALUES_AT = 0
    OUTER_AT = 1
    INNER_AT = 2
    ROWS = 3


class PackedPlace(IntEnum):
    """Where a packed unit starts: its first row mark, its first entry, its bytes of columns and of values."""

    ROW = 0
    ENTRY = 1
    COLUMNS_AT = 2
    VALUES_AT = 3


SHARED: Mapping[str, Mapping[str, int | type[IntEnum]]] = {
    "rowwise_gpu/rows.cu": {
        "ROW_FACT": RowFact,
        "ROW_CLASSES": ROW_CLASSES,
        "VERY_LONG": VERY_LONG,
        "SHARED_FACTOR": SHARED_FACTOR,
        "NARROW_COLUMNS": NARROW_COLUMNS,
        "SCAN_ROWS": SCAN_ROWS,
        "GROUP_ROWS": GROUP_ROWS,
    },
    "rowwise_gpu/sort_rows.cu": {"ROW_FACT": RowFact, "ROW_CLASSES": ROW_CLASSES},
    "rowwise_gpu/node_rows.cu": {"NODE_FACT": NodeFact},
    "rowwise_gpu/long_rows.cu": {"LONG_SHARE": LONG_SHARE},
    "rowwise_gpu/mask_rows.cu": {
        "MASK_COUNTER": MaskCounter,
        "VERY_LONG": VERY_LONG,
        "SHARED_FACTOR": SHARED_FACTOR,
        "GROUP_ROWS": GROUP_ROWS,
    },
    "rowwise_gpu/finished/inflate.cu": {"GROUP_ROWS": GROUP_ROWS},
    "rowwise_gpu/epilogue.cu": {"ROW_NORM": RowNorm, "ALL_TIES": ALL_TIES, "GROUP_ROWS": GROUP_ROWS},
    "esc/count_products.cu": {"ESC_FACT": EscFact, "ROW_CLASSES": ROW_CLASSES},
    "esc/long_rows.cu": {"LONG_ROW_FIELD": LongRowField, "SPLITTER_SAMPLES": SPLITTER_SAMPLES},
    "hyspmm/hyspmm.cu": {
        "SORT_GROUP": SortGroup,
        "BLOCK_STATUS": BlockStatus,
        "SHARED_NARROW": SHARED_NARROW,
        "SHARED_WIDE": SHARED_WIDE,
    },
    "bsr/bsr.cu": {"TASK_PAIRS": TASK_PAIRS, "ROW_THREADS": ROW_THREADS},
    "spmv/sell/build.cu": {
        "CHUNK_KIND": ChunkKind,
        "SELL_LONG": SELL_LONG,
        "SELL_WINDOW": SELL_WINDOW,
        "SELL_WARPS": SELL_WARPS,
        "SELL_BASES": SELL_BASES,
        "SELL_DIAGONALS": SELL_DIAGONALS,
        "SELL_PADDING": SELL_PADDING,
        "SELL_NARROW_PADDING": SELL_NARROW_PADDING,
        "SELL_NO_DIAGONAL": SELL_NO_DIAGONAL,
        "SELL_MOST_FULL": SELL_MOST_FULL,
    },
    "spmv/sell/multiply.cu": {
        "CHUNK_KIND": ChunkKind,
        "SELL_WARPS": SELL_WARPS,
        "SELL_BASES": SELL_BASES,
        "SELL_PADDING": SELL_PADDING,
    },
    "spmv/ehyb.cu": {"EHYB_SLICE": EhybSlice, "EHYB_NO_PLACE": EHYB_NO_PLACE, "EHYB_THREADS": EHYB_THREADS},
    "spmv/reorder.cu": {"REORDER_UNSEEN": REORDER_UNSEEN},
    "spmv/vector_updates.cu": {
        "CONJUGATE_GRADIENT_SUM": ConjugateGradientSum,
        "PAGE_RANK_SUM": PageRankSum,
        "UPDATE_THREADS": UPDATE_THREADS,
    },
    "streaming/packing.cu": {
        "PACKED_COUNT": PackedCount,
        "PACKED_PLACE": PackedPlace,
        "PACKED_SAME": PACKED_SAME,
        "PACKED_CONTINUES": PACKED_CONTINUES,
        "PACKED_WORDS": PACKED_WORDS,
        "PACKED_SAMPLE": PACKED_SAMPLE,
    },
}
"""The constants of each .cu file, and of the headers it includes: name without ``SPDIST_`` -> number or enum."""


def aligned(size: int) -> int:
    """Return `size` rounded up to `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@functools.cache
def defines(file: str) -> tuple[str, ...]:
    """Return the compiler options that define the shared constants of a .cu file, a path from the kernels' folder.

    CuPy keys its cache on disk by the options, so a changed constant compiles the file again.
    """
    return tuple(f"-DSPDIST_{name}={_in_c(value)}" for name, value in SHARED.get(file, {}).items())


def _in_c(value: int | type[IntEnum]) -> str:
    """Return a number, or the members of an enum, in C."""
    if isinstance(value, int):
        return str(value)
    return ", ".join(f"{member.name} = {member.value}" for member in value)
