"""Bytes that `esc` needs on a GPU beyond its operands and its result.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

from spdist.kernels.cuda.constants import ALLOCATION, SCAN_ROWS
from spdist.kernels.rounding import ceil_div, round_up

ESC_BUCKET = 3 << 10
"""Products that `esc` aims at in a bucket of a long row."""
ESC_LIMIT = 2 << 30
"""Bytes that `esc` takes at most unless told."""
ESC_SLICE = 1 << 25
"""Products of long rows that `esc` expands at once, where memory allows."""
ESC_STATE = 8 + 2 * 16
"""Counters of `esc`: facts, then rows and places taken per class."""


class EscWorkspace(NamedTuple):
    """What `esc` allocates beyond operands and result.

    Attributes
    ----------
    setup : dict
        Bytes of each array that is made before the expansion size is known.
    arrays : dict
        Bytes of each array that is made once it is known.
    slice_tiles : int
        Tiles of long rows that are expanded at once.
    pool_entries : int
        Entries of C that are kept until the size of C is known; the others are computed twice.
    needed : int
        The least limit that would do.
    """

    setup: dict[str, int]
    arrays: dict[str, int]
    slice_tiles: int
    pool_entries: int
    needed: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.setup.values()) + sum(self.arrays.values())


def esc_setup(nrows: int) -> dict[str, int]:
    """Return the bytes of each array that `esc` needs to count products and entries of `nrows` rows."""
    words = ESC_STATE + ceil_div(nrows, SCAN_ROWS) + 1
    sizes = {"state": 8 * words, "lengths": 4 * nrows, "list": 4 * nrows, "places": 8 * nrows, "offsets": 8 * nrows + 8}
    return {name: round_up(size, ALLOCATION) for name, size in sizes.items()}


def esc_workspace(
    nrows: int,
    ncols: int,
    products: int,
    max_row_products: int,
    value_itemsize: int,
    index_itemsize: int,
    *,
    long_rows: int,
    long_entries: int,
    long_products: int,
    tile: int,
    limit: int | None = None,
) -> EscWorkspace:
    """Return the bytes that `esc` takes beyond its operands and its result: expansion, sort and compression.

    Operands whose dtypes differ are copied as well: add `cast_bytes` for each. Every size grows with every argument but
    `tile`, so bounds in place of the counts give a bound.

    Parameters
    ----------
    nrows, ncols : int
        Shape of C.
    products, max_row_products : int
        Products of C and of its longest row.
    value_itemsize, index_itemsize : int
        Bytes of a value and of a column index of C.
    long_rows, long_entries, long_products : int
        Rows of more than `tile` products, the entries of A in them, and their products.
    tile : int
        Products that a thread block sorts.
    limit : int, optional
        Bytes to take at most, `ESC_LIMIT` if not given; exceeded where it is below `needed`.

    Returns
    -------
    EscWorkspace

    Examples
    --------
    >>> sizes = dict(long_rows=0, long_entries=0, long_products=0, tile=8192)
    >>> esc_workspace(1000, 1000, 50_000, 60, 8, 4, **sizes).pool_entries
    50000
    >>> esc_workspace(1000, 1000, 50_000, 60, 8, 4, **sizes, limit=2**18).pool_entries < 50_000
    True
    """
    setup = esc_setup(nrows)
    tiles, buckets = long_products // tile + long_rows, long_products // ESC_BUCKET + long_rows
    sizes = {"described": 3 * 8 * (long_rows + 1), "table": 5 * 8 * (long_rows + 1)}
    sizes |= {"ends": 4 * long_entries, "missing": 8 * long_rows, "splitters": index_itemsize * buckets}
    sizes |= {"bucket_lengths": 4 * buckets, "bucket_places": 8 * buckets, "bucket_starts": 8 * buckets}
    arrays = {name: round_up(size, ALLOCATION) for name, size in sizes.items()} if long_rows else {}

    entry = value_itemsize + index_itemsize
    least = ceil_div(max_row_products, tile) if long_rows else 0
    fixed = sum(setup.values()) + sum(arrays.values()) + 4 * ALLOCATION
    room = (ESC_LIMIT if limit is None else limit) - fixed
    slice_tiles = min(tiles, max(least, min(ESC_SLICE, max(room, 0) // (2 * entry)) // tile))
    pool = min(products, nrows * ncols, max((room - slice_tiles * tile * entry) // entry, 0))
    counts = {"tile": slice_tiles * tile, "pool": pool} if long_rows else {"pool": pool}
    for name, count in counts.items():
        arrays[f"{name}_indices"] = round_up(count * index_itemsize, ALLOCATION)
        arrays[f"{name}_data"] = round_up(count * value_itemsize, ALLOCATION)
    return EscWorkspace(setup, arrays, slice_tiles, pool, fixed + least * tile * entry)
