"""Device memory that ESC needs beyond its operands and its result. Runs without a GPU.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

from spdist.kernels.cuda.constants import ALLOCATION, ROW_CLASSES, SCAN_ROWS
from spdist.kernels.rounding import ceil_div, round_up

ESC_BUCKET = 3 << 10
"""Products that a bucket of a long row should hold."""
ESC_LIMIT = 2 << 30
"""Bytes of workspace at most, unless the caller sets a limit."""
ESC_SLICE = 1 << 25
"""Products of long rows that are expanded at once, if memory allows."""
FACT_WORDS = 8
"""64-bit words for the facts of a product (`EscFact`), with room to spare."""
ESC_STATE = FACT_WORDS + 2 * ROW_CLASSES
"""64-bit words of the counters: facts, then the rows of each class, then the rows of each class listed so far."""


class EscSizes(NamedTuple):
    """Sizes of a product from which its workspace follows."""

    # shape of C
    nrows: int
    ncols: int
    # products of C and of its longest row
    products: int
    max_row_products: int
    # bytes of a value and of a column index of C
    value_itemsize: int
    index_itemsize: int
    # rows of more products than a tile, the entries of A in them, and their products
    long_rows: int = 0
    long_entries: int = 0
    long_products: int = 0


class EscWorkspace(NamedTuple):
    """Device memory allocated beyond operands and result."""

    setup: dict[str, int]  # bytes of each array that is allocated before the expansion size is known
    arrays: dict[str, int]  # bytes of each array that is allocated once it is known
    slice_tiles: int  # tiles of long rows that are expanded at once
    pool_entries: int  # entries of C that the pool holds until nnz(C) is known; further entries are computed twice
    needed: int  # the smallest sufficient limit, in bytes

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.setup.values()) + sum(self.arrays.values())


def esc_setup(nrows: int) -> dict[str, int]:
    """Return the bytes of each array that counts the products and the entries of `nrows` rows of C."""
    words = ESC_STATE + ceil_div(nrows, SCAN_ROWS) + 1
    sizes = {"state": 8 * words, "lengths": 4 * nrows, "list": 4 * nrows, "places": 8 * nrows, "offsets": 8 * nrows + 8}
    return {name: round_up(size, ALLOCATION) for name, size in sizes.items()}


def esc_workspace(sizes: EscSizes, tile: int, limit: int | None = None) -> EscWorkspace:
    """Return the device memory that ESC takes beyond its operands and its result.

    Operands whose dtypes differ are copied as well: add `cast_bytes` for each. Every size grows with every field of
    `sizes`, so upper bounds of the sizes give an upper bound of the memory.
    `tile`: products that a thread block sorts in shared memory. `limit`: bytes, by default `ESC_LIMIT`; exceeded if it
    is below `needed`.
    """
    setup, arrays = esc_setup(sizes.nrows), _long_row_arrays(sizes, tile)
    entry = sizes.value_itemsize + sizes.index_itemsize
    tiles = sizes.long_products // tile + sizes.long_rows
    least = ceil_div(sizes.max_row_products, tile) if sizes.long_rows else 0
    fixed = sum(setup.values()) + sum(arrays.values()) + 4 * ALLOCATION
    room = (ESC_LIMIT if limit is None else limit) - fixed
    slice_tiles = min(tiles, max(least, min(ESC_SLICE, max(room, 0) // (2 * entry)) // tile))
    pool = min(sizes.products, sizes.nrows * sizes.ncols, max((room - slice_tiles * tile * entry) // entry, 0))
    counts = {"tile": slice_tiles * tile, "pool": pool} if sizes.long_rows else {"pool": pool}
    for name, count in counts.items():
        arrays[f"{name}_indices"] = round_up(count * sizes.index_itemsize, ALLOCATION)
        arrays[f"{name}_data"] = round_up(count * sizes.value_itemsize, ALLOCATION)
    return EscWorkspace(setup, arrays, slice_tiles, pool, fixed + least * tile * entry)


def _long_row_arrays(sizes: EscSizes, tile: int) -> dict[str, int]:
    """Return the bytes of each array that describes long rows and their buckets; none if there are no long rows."""
    rows = sizes.long_rows
    if not rows:
        return {}
    buckets = sizes.long_products // ESC_BUCKET + rows
    arrays = {"described": 3 * 8 * (rows + 1), "table": 5 * 8 * (rows + 1)}
    arrays |= {"ends": 4 * sizes.long_entries, "missing": 8 * rows, "splitters": sizes.index_itemsize * buckets}
    arrays |= {"bucket_lengths": 4 * buckets, "bucket_places": 8 * buckets, "bucket_starts": 8 * buckets}
    return {name: round_up(size, ALLOCATION) for name, size in arrays.items()}
