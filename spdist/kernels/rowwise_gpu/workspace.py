"""Device and shared memory of the row-by-row product beyond its operands and its result. No GPU is needed to ask.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from spdist.kernels.rounding import ceil_div, round_up

LONG_PRODUCTS = 1 << 18
"""Products above which thread blocks share a row, unless its sums must be in order."""
LONG_BYTES = 128 << 20
"""Device bytes for masks and ranks of shared rows; if they need more, they are cut into parts like shorter rows."""
NODE_COLUMNS = 1 << 16
"""Columns that a node may span at most."""
PART_COLUMNS = 1 << 16
"""Columns above which a part of a row is cut further, when thread blocks hold the values of their part."""
OPEN_COLUMNS = 1 << 17
"""Columns above which a part of a row is cut further, when products are added in C."""
OPEN_TASKS = 1 << 10
"""Parts of rows that a class should have at least when products are added in C, up to the parts that hold values."""
MOST_PARTS = 32
"""Parts of a row at most."""
FEW_TASKS = 256
"""Parts of rows that a class should have at least, so that all of the device is busy."""
RANKED = 6
"""Number of the last classes, of rows of more than 512 products, that may be ranked or form nodes."""
SMALL_BYTES = 32 << 20
"""Bytes of products up to which a product is small: C is cut from buffers for all products, with no wait for nnz(C)."""
SMALL_ROWS = 1 << 18
"""Rows up to which a product may be small."""
SAMPLE_ROWS = 1 << 12
"""Rows that are counted at least to estimate nnz(C) before a single pass."""
SAMPLE_MARGIN = 32
"""C gets room for the sample's estimate plus the estimate divided by this."""
EXPECTED_MARGIN = 16
"""C gets room for the caller's estimate plus the estimate divided by this."""
SPARE = 8
"""C is copied to smaller arrays if its unused room is more than its room divided by this."""
LEAST_ROWS = 4
"""Least rows of a thread block of a single pass, unless the product is small."""
SCRATCH_BYTES = 1 << 16
"""Bytes for facts, and for rounding up of allocations."""
TASK_BYTES = 64 << 20
"""Device bytes for the tasks of one class at most."""
MASK_BITS = 20
"""Columns that are marked at once are at most two to this."""
VALUE_BYTES = 32 << 10
"""Bytes of shared memory for values of a part of a row."""


def long_fits(rows: int, ncols: int) -> bool:
    """Return whether masks and ranks of that number of long rows of C fit in `LONG_BYTES`."""
    return rows * ceil_div(ncols, 64) * 12 <= LONG_BYTES


def open_parts(held_parts: int, parts: int, rows: int, value_itemsize: int) -> int:
    """Return the least number of parts of each row of a class whose products are added in C.

    Every part reads all of the row's entries of A, so few large parts take less time, as long as the entries of C that
    all thread blocks add to at a time fit in the L2 cache: smaller values allow larger parts. If there are few rows,
    they are cut into as many parts as rows whose parts hold values.
    `held_parts, parts`: `RankClass.parts` and `RankClass.open_parts`. `rows`: of the class.
    """
    return max(parts * value_itemsize // 16, min(held_parts, OPEN_TASKS // max(rows, 1)), 1)


def rank_parts(parts: int, ncols: int, rows: int, columns: int = PART_COLUMNS) -> int:
    """Return the number of parts of each row of a class: at least `parts`, unless tasks would take too much memory.

    Few rows are cut into more parts, so that all of the device is busy; wide rows into parts of `columns` columns, up
    to `MOST_PARTS` parts.
    """
    wanted = max(parts, min(MOST_PARTS, ceil_div(ncols, columns)), min(FEW_TASKS // max(rows, 1), MOST_PARTS))
    return max(1, min(wanted, TASK_BYTES // (24 * max(rows, 1))))


def rank_width(ncols: int, parts: int, columns: int = PART_COLUMNS) -> int:
    """Bound the columns of a part of a row by a multiple of 64; 0 above `columns`: then the parts must be measured."""
    width = round_up(ceil_div(ncols + 63, parts), 64)
    return width if width <= columns else 0


def rank_count_window(width: int, shared_bytes: int) -> int:
    """Return the columns that `rank_count` marks at once, in ``window // 8`` bytes of shared memory.

    `width`: columns of the widest part. `shared_bytes`: shared memory that a thread block may use.
    """
    return min(round_up(width, 256), 1 << MASK_BITS, 1 << (8 * shared_bytes).bit_length() - 1)


def rank_fill_shared(
    width: int, most_products: int, value_itemsize: int, ordered: bool, shared_bytes: int
) -> tuple[int, int, int]:
    """Return how `rank_fill` uses shared memory: columns marked at once, values held at once, bytes of a thread block.

    `width`: columns of the widest part. `most_products`: products of the longest row. `ordered`: whether values are
    held in shared memory and added in the order of A's entries; if not, none are held. `shared_bytes`: that a thread
    block may use.
    """
    left = shared_bytes - VALUE_BYTES - 64 * 16  # at least 64 values of a row are held
    window = min(round_up(width, 256), 1 << MASK_BITS - 1, 1 << (16 * left // 3).bit_length() - 1)
    masks = window // 8 + window // 16 + 16
    if not ordered:
        return window, 0, masks
    room = VALUE_BYTES // value_itemsize
    capacity = max(min(most_products, width, room), 64)
    return window, capacity, masks + round_up(capacity * value_itemsize, 4)  # atomics of bytes take whole words


def node_count_shared(words: int) -> int:
    """Return the bytes of shared memory that a warp of `node_count` needs for `words` words of 32 columns."""
    return 4 * words


def node_fill_shared(
    words: int, rows: int, most_entries: int, value_itemsize: int, shared_bytes: int
) -> tuple[int, int, int]:
    """Return how a warp of `node_fill` uses shared memory.

    `words`: words of 32 columns of the widest node. `rows`: rows of the largest node. `most_entries`: entries of the
    longest row of C. `shared_bytes`: that the two warps of a thread block may use.
    Returns the entries held of each of `rows` rows, and of a row that is alone in its node; and bytes of a warp.
    """
    room = max(64, min(24 << 10, shared_bytes // 7) // (value_itemsize * rows))
    unit = max(4, 8 // value_itemsize)  # keeps the arrays after the values aligned
    capacity = round_up(min(most_entries, room), unit)
    values = round_up(value_itemsize * (32 + capacity) * rows, 16)
    most = min(round_up(most_entries, unit), rows * capacity)
    return capacity, most, values + round_up(8 * words + 4 * most, 16)


def rowwise_workspace(
    nrows_a: int,
    nrows_b: int,
    ncols: int,
    products: int,
    class_rows: list[int],
    value_itemsize: int,
    index_itemsize: int,
) -> int:
    """Bound the device bytes that the row-by-row product on the GPU takes beyond A, B and C.

    Operands whose dtypes differ are copied as well: add `cast_bytes` for each. The bound counts the unused room of a C
    cut from larger buffers. If the sampled rows mislead, a product may take up to the bytes of all products while it is
    made.
    `class_rows`: rows of each class, the empty rows first.
    """
    scan = SCRATCH_BYTES + 8 * (nrows_a if nrows_a <= SMALL_ROWS else ceil_div(nrows_a, LEAST_ROWS))
    lists = 16 * nrows_a
    tasks = sum(min(24 * MOST_PARTS * n, max(TASK_BYTES, 24 * n)) for n in class_rows[-RANKED:])
    nodes = 20 * sum(class_rows[-RANKED - 1 :]) + nrows_a + nrows_b
    long = min(LONG_BYTES, class_rows[-1] * ceil_div(ncols, 64) * 12)
    buffers = products * (value_itemsize + index_itemsize)
    spare = buffers if buffers <= SMALL_BYTES else buffers // SPARE
    if nrows_a <= SMALL_ROWS:
        spare = max(spare, SMALL_BYTES)
    return scan + lists + tasks + nodes + long + spare
