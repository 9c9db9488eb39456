"""Bytes that the row-by-row product needs on a GPU beyond its operands and its result.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from spdist.kernels.rounding import ceil_div, round_up

LONG_PRODUCTS = 1 << 18
"""Products above which a row is shared among thread blocks, unless the order of its sums matters."""
LONG_BYTES = 128 << 20
"""Bytes for masks and ranks of such rows; where they need more, they are multiplied in parts like shorter ones."""
NODE_COLUMNS = 1 << 16
"""Columns that a node may span."""
PART_COLUMNS = 1 << 16
"""Columns that a part of a row should not span more of, where there may be more parts."""
OPEN_COLUMNS = 1 << 17
"""The same where thread blocks do not hold the values of their parts."""
OPEN_TASKS = 1 << 10
"""Parts of rows that a class should have at least, if those that hold values would be as many."""
MOST_PARTS = 32
FEW_TASKS = 256
"""Parts of rows that a class should have at least."""
RANKED = 6
"""Classes, the last ones, whose rows may be ranked or form nodes: those of more than 512 products."""
SMALL_BYTES = 32 << 20
"""Bytes of products up to which the host does not wait for nnz(C): C is cut from buffers that hold all products."""
SMALL_ROWS = 1 << 18
"""Rows up to which such a product is made by one kernel if one class has all of them."""
SAMPLE_ROWS = 1 << 12
"""Rows that are counted to tell the size of C, at least, where the others are not."""
SAMPLE_MARGIN = 32
"""C gets room for what the sample tells and one part in so many."""
EXPECTED_MARGIN = 16
"""The same where other rows of the product tell."""
SPARE = 8
"""C is copied if it leaves more than one part in so many of its room unused."""
LEAST_ROWS = 4
"""Rows of each thread block that makes rows at once, at least; of small products one."""
SCRATCH_BYTES = 1 << 16
"""For facts, and for rounding up of allocations."""
TASK_BYTES = 64 << 20
"""Bytes for the tasks of one class, whatever its rows."""
SHARED_BYTES = 160 << 10
"""Shared memory that a thread block may have on every GPU from sm_80 on, less a margin for static arrays."""


def long_fits(rows: int, ncols: int) -> bool:
    """Return whether masks and ranks of so many long rows of C fit in `LONG_BYTES`."""
    return rows * ceil_div(ncols, 64) * 12 <= LONG_BYTES


def open_parts(held_parts: int, parts: int, rows: int, value_itemsize: int) -> int:
    """Return into how many parts each row of a class is cut whose values are added up in C, at least.

    Every part looks at all entries of A: few large ones take less time, as long as what all thread blocks add to at a
    time stays in the L2 cache. So the smaller the values the larger the parts. Few rows are cut like those whose parts
    hold their values.

    Examples
    --------
    >>> [open_parts(16, 16, 10_000, size) for size in (4, 8, 16)], open_parts(16, 16, 100, 4)
    ([4, 8, 16], 10)
    """
    return max(parts * value_itemsize // 16, min(held_parts, OPEN_TASKS // max(rows, 1)), 1)


def rank_parts(parts: int, ncols: int, rows: int, columns: int = PART_COLUMNS) -> int:
    """Return into how many parts each row of a class is cut: at least `parts`, unless the tasks would take too much.

    Few rows are cut into more, so that all of the device has something to do; wide ones into parts of `columns`.
    """
    wanted = max(parts, min(MOST_PARTS, ceil_div(ncols, columns)), min(FEW_TASKS // max(rows, 1), MOST_PARTS))
    return max(1, min(wanted, TASK_BYTES // (24 * max(rows, 1))))


def rank_width(ncols: int, parts: int, columns: int = PART_COLUMNS) -> int:
    """Bound the columns of a part of a row; 0 where the bound is more than `columns`, too wide to be used untested.

    Examples
    --------
    >>> rank_width(100_000, 2), rank_width(10**9, 16)
    (50048, 0)
    """
    width = round_up(ceil_div(ncols + 63, parts), 64)
    return width if width <= columns else 0


def rank_count_window(width: int) -> int:
    """Return the columns that `rank_count` marks at once, in ``window // 8`` bytes of shared memory."""
    return min(round_up(width, 256), 1 << 20)


def rank_fill_shared(width: int, most_products: int, value_itemsize: int, ordered: bool) -> tuple[int, int, int]:
    """Return columns marked at once, values held at once and bytes of shared memory of `rank_fill`.

    Parameters
    ----------
    width : int
        Columns of the widest task.
    most_products : int
        Of any row.
    value_itemsize : int
    ordered : bool
        Whether values are held there and added in the order of A's entries; else none are.
    """
    window = min(round_up(width, 256), 1 << 19)
    masks = window // 8 + window // 16 + 16
    if not ordered:
        return window, 0, masks
    room = min(32 << 10, SHARED_BYTES - masks) // value_itemsize
    capacity = max(min(most_products, width, room), 64)
    return window, capacity, masks + round_up(capacity * value_itemsize, 4)  # atomics of bytes take whole words


def node_count_shared(words: int) -> int:
    """Return the bytes of shared memory that a warp of `node_count` needs for `words` words of 32 columns."""
    return 4 * words


def node_fill_shared(words: int, rows: int, most_entries: int, value_itemsize: int) -> tuple[int, int, int]:
    """Return the entries of each of `rows` rows, and of a single row, that a warp of `node_fill` holds; its bytes.

    Parameters
    ----------
    words : int
        Words of 32 columns of the widest node.
    rows : int
        Rows of the largest node.
    most_entries : int
        Of any row of C.
    value_itemsize : int
    """
    room = max(64, (24 << 10) // (value_itemsize * rows))
    unit = max(4, 8 // value_itemsize)  # what follows the values stays aligned
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

    Operands whose dtypes differ are copied as well: add `cast_bytes` for each.

    Parameters
    ----------
    nrows_a, nrows_b, ncols : int
        Rows of A and B, columns of C.
    products : int
    class_rows : list of int
        Rows of each class, the empty rows first.
    value_itemsize, index_itemsize : int
        Bytes of a value and of a column index of C.

    Returns
    -------
    int
        Bytes, with those that a C cut from its buffers leaves unused, unless the rows sampled to tell its size mislead:
        then up to the bytes of all products while it is made.

    Examples
    --------
    >>> rowwise_workspace(10**6, 10**6, 10**6, 10**8, [0, 10**6, *[0] * 14], 8, 4) < 192 * 2**20
    True
    """
    scan = SCRATCH_BYTES + 8 * (nrows_a if nrows_a <= SMALL_ROWS else ceil_div(nrows_a, LEAST_ROWS))
    lists = 16 * nrows_a
    tasks = sum(min(24 * MOST_PARTS * n, max(TASK_BYTES, 24 * n)) for n in class_rows[-RANKED:])
    nodes = 20 * sum(class_rows[-RANKED - 1 :]) + nrows_a + nrows_b
    long = min(LONG_BYTES, class_rows[-1] * ceil_div(ncols, 64) * 12)
    buffers = products * (value_itemsize + index_itemsize)
    spare = buffers if buffers <= SMALL_BYTES else buffers // SPARE
    return scan + lists + tasks + nodes + long + spare
