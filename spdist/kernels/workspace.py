"""How many bytes a multiply needs beyond its operands and its result; pure functions of integers.

The planner and the kernels use the same sizes, so they cannot disagree.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Engine = Literal["scipy", "numba"]

WINDOW = 1 << 18
"""Columns of the dense accumulator of the numba engine."""
SORT_PRODUCTS = 1 << 15
"""Products that the numba engine sorts at once."""
RADIX_BINS = 1 << 11
RANK_PRODUCTS = 128
"""Products of the longest row that is sorted in a batch of small rows."""
BATCH_ROWS = 128
BATCH_SLOTS = 1 << 11
"""Products of a batch of small rows, before its last row is added."""
SLICE_PRODUCTS = 1 << 17
"""Products of the slices of rows that threads take in turn."""
SCRATCH_ENTRIES = 1 << 18
"""Entries of C that a thread can make before it knows their place."""
PADDING = 64
"""Elements after the accumulator, so that its marks can be read 64 at a time."""
OBJECTS = 1 << 16
"""Bytes for Python's and NumPy's objects around the arrays, per thread."""


def window_columns(ncols: int) -> int:
    """Return the columns of the numba engine's accumulator for a C of `ncols` columns."""
    return min(max(ncols, 1), WINDOW)


def sort_products(ncols: int) -> int:
    """Return the products that the numba engine's sort buffers hold; narrow matrices need none."""
    return SORT_PRODUCTS if ncols > WINDOW else 0


def cpu_workspace(
    engine: Engine,
    ncols: int,
    max_row_products: int,
    value_itemsize: int,
    index_itemsize: int,
    threads: int = 1,
) -> int:
    """Bound the bytes that a multiply on the CPU takes beyond its operands and the buffers of its result.

    Values whose dtype is not the result's, and indices whose dtype is not `index_dtype` of their matrix, are copied as
    well: add `cast_bytes` for each.

    Parameters
    ----------
    engine : "scipy" or "numba"
    ncols : int
        Columns of C.
    max_row_products : int
        Products of the longest row; bounds what one slice of rows takes with scipy.
    value_itemsize, index_itemsize : int
        Bytes of a value and of a column index of C.
    threads : int

    Returns
    -------
    int
        Bytes. With numba a few MiB a thread, whatever `ncols` is; with scipy it grows with `ncols`.

    Examples
    --------
    >>> cpu_workspace("numba", 10**9, 10**6, 8, 4) < 5 * 2**20
    True
    >>> cpu_workspace("scipy", 10**9, 10**6, 8, 4) > 10**10
    True
    """
    if engine == "scipy":
        return threads * _scipy_bytes(ncols, max_row_products, value_itemsize, index_itemsize)
    scratch = SCRATCH_ENTRIES * (value_itemsize + index_itemsize) if threads > 1 else 0
    return threads * (_numba_bytes(ncols, value_itemsize) + scratch)


def cast_bytes(nnz: int, itemsize: int, wanted_itemsize: int) -> int:
    """Return the bytes of a copy of an operand's values, or indices, in the wanted dtype; 0 if they have that size."""
    return 0 if itemsize == wanted_itemsize else nnz * wanted_itemsize


def _numba_bytes(ncols: int, value_itemsize: int) -> int:
    columns = window_columns(ncols)
    window = (columns + PADDING) * (value_itemsize + 1) + columns // 64 + 2 * PADDING
    sorting = sort_products(ncols) * (2 * 8 + value_itemsize) + 4 * RADIX_BINS
    slots = BATCH_SLOTS + 2 * RANK_PRODUCTS
    batch = slots * (4 + 8 + value_itemsize) + 3 * 8 * (BATCH_ROWS + 1)
    return window + sorting + batch + OBJECTS


def _scipy_bytes(ncols: int, max_row_products: int, value_itemsize: int, index_itemsize: int) -> int:
    dense = ncols * (2 * index_itemsize + value_itemsize)
    products = max(max_row_products, SLICE_PRODUCTS)
    entry = 2 * (value_itemsize + index_itemsize) + 4 * 8
    return dense + products * entry + OBJECTS


LONG_PRODUCTS = 1 << 18
"""Products above which a row is shared among thread blocks, unless the order of its sums matters."""
LONG_BYTES = 128 << 20
"""Bytes for masks and ranks of such rows; where they need more, they are multiplied in parts like shorter ones."""
NODE_COLUMNS = 1 << 16
"""Columns that a node may span."""
PART_COLUMNS = 1 << 16
"""Columns that a part of a row should not span more of, where there may be more parts."""
MOST_PARTS = 16
TASK_BYTES = 64 << 20
"""Bytes for the tasks of one class, whatever its rows."""
SHARED_BYTES = 160 << 10
"""Shared memory that a thread block may have on every GPU from sm_80 on, less a margin for static arrays."""


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def long_fits(rows: int, ncols: int) -> bool:
    """Return whether masks and ranks of so many long rows of C fit in `LONG_BYTES`."""
    return rows * ceil_div(ncols, 64) * 12 <= LONG_BYTES


def rank_parts(parts: int, ncols: int, rows: int) -> int:
    """Return into how many parts each row of a class is cut: at least `parts`, unless the tasks would take too much."""
    wanted = max(parts, min(MOST_PARTS, ceil_div(ncols, PART_COLUMNS)))
    return max(1, min(wanted, TASK_BYTES // (24 * max(rows, 1))))


def rank_count_window(width: int) -> int:
    """Return the columns that `rank_count` marks at once, in ``window // 8`` bytes of shared memory."""
    return min(_round_up(width, 256), 1 << 20)


def rank_fill_shared(width: int, most_products: int, value_itemsize: int) -> tuple[int, int, int]:
    """Return columns marked at once, values held at once and bytes of shared memory of `rank_fill`.

    Parameters
    ----------
    width : int
        Columns of the widest task.
    most_products : int
        Of any row.
    value_itemsize : int
    """
    window = min(_round_up(width, 256), 1 << 19)
    masks = window // 8 + window // 16 + 16
    room = min(32 << 10, SHARED_BYTES - masks) // value_itemsize
    capacity = max(min(most_products, width, room), 64)
    return window, capacity, masks + capacity * value_itemsize


def node_count_shared(words: int) -> int:
    """Return the bytes of shared memory that a warp of `node_count` needs for `words` words of 32 columns."""
    return 4 * words


def node_fill_shared(words: int, rows: int, most_entries: int, value_itemsize: int) -> tuple[int, int]:
    """Return the entries of a row that a warp of `node_fill` holds at once, and its bytes of shared memory.

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
    capacity = _round_up(min(most_entries, room), 4)  # what follows the values stays aligned
    values = _round_up(value_itemsize * (32 + capacity) * rows, 16)
    return capacity, values + _round_up(8 * words + 4 * capacity, 16)


def rowwise_workspace(nrows_a: int, nrows_b: int, ncols: int, class_rows: list[int], nodes: bool, facts: int) -> int:
    """Bound the device bytes that the row-by-row product on the GPU takes beyond A, B and C.

    Parameters
    ----------
    nrows_a, nrows_b, ncols : int
        Rows of A and B, columns of C.
    class_rows : list of int
        Rows of each class, without the empty rows; the last ones are those of more than 1,024 products.
    nodes : bool
        Whether nodes are looked for.
    facts : int
        Numbers in the block of facts.
    """
    scan = 8 * (facts + ceil_div(nrows_a, 2048) + 1)
    lists = 8 * nrows_a
    tasks = sum(min(24 * (MOST_PARTS * 2) * n, max(TASK_BYTES, 24 * n)) for n in class_rows)
    found = (20 * sum(class_rows) + nrows_a + nrows_b) if nodes else 0
    long = min(LONG_BYTES, class_rows[-1] * ceil_div(ncols, 64) * 12) if class_rows else 0
    return scan + lists + tasks + found + long + (1 << 16)


ALIGNMENT = 256
"""Bytes to whose multiples the arrays of a block on the GPU are placed."""
SORT_GROUPS = 11
"""Groups of row lengths of `hyspmm.cu`."""
SCAN_ROWS = 2048
"""Rows of one tile of the scan in `rows.cu`."""
STATUS = 2
"""64-bit words that a block reports: entries of its C, and whether its rows of B are not canonical."""


class Types(NamedTuple):
    """Bytes of a value, of a column index and of an offset."""

    value_bytes: int
    index_bytes: int
    pointer_bytes: int


class Block(NamedTuple):
    """Sizes of a prepared pair of blocks of hySpMM.

    Attributes
    ----------
    rows, entries, products : int
        Of the block of A: rows, entries, and products they expand to.
    b_rows, b_entries : int
        Of the block of B as it is sent. Duplicated: `entries` and `products`; distinct: at most so many.
    distinct : bool
        Whether each row of B is sent once.
    """

    rows: int
    entries: int
    products: int
    b_rows: int
    b_entries: int
    distinct: bool


class Layout(NamedTuple):
    """Where the arrays of a block lie, in bytes from its start; the first `sent` bytes are what the CPU prepares.

    The fields before `sent` are the prepared arrays: the values of A and of the block of B, the columns of that, where
    its rows start, where entries and products of each row of C start, and which row of the block of B an entry takes.
    `columns` and `values` hold products, sorted and compressed row by row: those of B where it is duplicated, arrays
    of their own otherwise. `c_columns` and `c_values` are scratch for the sort, then the block of C.
    """

    a_values: int
    b_values: int
    b_columns: int
    b_starts: int
    row_entries: int
    row_products: int
    a_rows: int
    sent: int
    columns: int
    values: int
    c_columns: int
    c_values: int
    c_indptr: int
    lengths: int
    lists: int
    counts: int
    scan: int
    status: int
    end: int


def aligned(size: int) -> int:
    """Return `size` rounded up to `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def sent_offsets(
    rows: int, entries: int, b_rows: int, b_entries: int, distinct: int, value: int, index: int, pointer: int
) -> tuple[int, int, int, int, int, int, int, int]:
    """Place the arrays that are sent: the fields of `Layout` up to ``sent``. Also compiled.

    Parameters
    ----------
    rows, entries, b_rows, b_entries, distinct : int
        Fields of `Block`.
    value, index, pointer : int
        Fields of `Types`.
    """
    b_values = (entries * value + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    b_columns = b_values + (b_entries * value + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    b_starts = b_columns + (b_entries * index + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    row_entries = b_starts + ((b_rows + 1) * pointer + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    row_products = row_entries + ((rows + 1) * pointer + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    a_rows = row_products + ((rows + 1) * pointer + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    sent = a_rows + (distinct * entries * 4 + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return 0, b_values, b_columns, b_starts, row_entries, row_products, a_rows, sent


def block_layout(block: Block, types: Types) -> Layout:
    """Place the arrays of a block of hySpMM one after the other.

    Parameters
    ----------
    block : Block
    types : Types

    Returns
    -------
    Layout
        ``sent`` bytes are transferred and ``end`` bytes of device memory taken. Between ``counts`` and ``end`` the
        device memory must be zero when the block starts.
    """
    sizes = block.rows, block.entries, block.b_rows, block.b_entries, int(block.distinct)
    places = list(sent_offsets(*sizes, *types))
    at = places[-1]

    def add(count: int, itemsize: int) -> None:
        nonlocal at
        places.append(at)
        at += aligned(count * itemsize)

    if block.distinct:
        add(block.products, types.index_bytes)
        add(block.products, types.value_bytes)
    else:
        places += [places[2], places[1]]
    add(block.products, types.index_bytes)
    add(block.products, types.value_bytes)
    add(block.rows + 1, types.pointer_bytes)
    add(block.rows, 4)
    add(block.rows * SORT_GROUPS, 4)
    add(SORT_GROUPS, 4)
    add(-(-block.rows // SCAN_ROWS) + 1, 8)
    add(STATUS, 8)
    return Layout._make([*places, at])


class BlockCost(NamedTuple):
    """Bytes of device memory that a block takes at most: per row, entry and product, and at all."""

    row: int
    entry: int
    product: int
    fixed: int

    def bytes(self, rows: int, entries: int, products: int) -> int:
        """Return the bound for a block."""
        return self.fixed + rows * self.row + entries * self.entry + products * self.product


def block_cost(types: Types) -> BlockCost:
    """Bound the device memory of a block of hySpMM before its distinct rows of B are known.

    Parameters
    ----------
    types : Types

    Returns
    -------
    BlockCost
        ``block_layout(block, types).end`` is never more, for either variant.

    References
    ----------
    X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
    University, 2015, equations 3 and 5: the block of A, the block of B, and an upper bound of the triples and C.

    Examples
    --------
    >>> types = Types(8, 4, 4)
    >>> block = Block(rows=10, entries=30, products=90, b_rows=7, b_entries=21, distinct=True)
    >>> block_layout(block, types).end <= block_cost(types).bytes(10, 30, 90)
    True
    """
    pair = types.value_bytes + types.index_bytes
    row = 3 * types.pointer_bytes + 4 + 4 * SORT_GROUPS + 1
    return BlockCost(row, types.value_bytes + types.pointer_bytes + 4, 3 * pair, len(Layout._fields) * (ALIGNMENT + 8))


def host_bytes(b_rows: int, threads: int) -> int:
    """Return the bytes that `threads` threads take on the host to find the distinct rows of a B of `b_rows` rows."""
    words = b_rows // 64 + 1
    return threads * words * (8 + 4)
