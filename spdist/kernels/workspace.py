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
TABLE_SLOTS = 4
"""Slots of a hash table for each column of a mask's row, at least: most searches end at the first."""
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


def block_workspace(ncols: int, entries: int) -> int:
    """Bound the bytes that a multiply of block matrices on the CPU, by one thread, takes beyond operands and result.

    Parameters
    ----------
    ncols : int
        Block columns of C.
    entries : int
        Blocks of A, of B and of C together: their patterns are multiplied as matrices of bools.
    """
    return _numba_bytes(ncols, 1) + 8 * ncols + entries


def table_slots(mask_row: int) -> int:
    """Return the slots of the hash table for a mask whose longest row has so many columns: a power of two."""
    return max(16, 1 << (TABLE_SLOTS * mask_row - 1).bit_length()) if mask_row else 16


def fused_workspace(
    row_entries: int, mask_row: int, top_n: int, value_itemsize: int, index_itemsize: int, threads: int = 1
) -> int:
    """Bound the bytes that a mask, a threshold or top-n take beyond `cpu_workspace` with numba.

    Parameters
    ----------
    row_entries : int
        Entries of the longest row before it is cut: at most its products, columns of C, and `mask_row` under a mask.
    mask_row : int
        Entries of the longest row of the mask; 0 without one.
    top_n : int
        Entries kept of a row; 0 for all.
    value_itemsize, index_itemsize : int
        Bytes of a value and of a column index of C.
    threads : int

    Returns
    -------
    int
        Bytes; of rows and tables only what is written takes memory.

    Examples
    --------
    >>> fused_workspace(10**6, 0, 10, 8, 4) < 13 * 10**6
    True
    """
    row = (row_entries + 1) * (value_itemsize + index_itemsize) + 8
    table = table_slots(mask_row) * 2 * index_itemsize + (mask_row + 1) * (value_itemsize + 1)
    return threads * (row + table + (min(top_n, row_entries) + 1) * value_itemsize)


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


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


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
    width = _round_up(ceil_div(ncols + 63, parts), 64)
    return width if width <= columns else 0


def rank_count_window(width: int) -> int:
    """Return the columns that `rank_count` marks at once, in ``window // 8`` bytes of shared memory."""
    return min(_round_up(width, 256), 1 << 20)


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
    window = min(_round_up(width, 256), 1 << 19)
    masks = window // 8 + window // 16 + 16
    if not ordered:
        return window, 0, masks
    room = min(32 << 10, SHARED_BYTES - masks) // value_itemsize
    capacity = max(min(most_products, width, room), 64)
    return window, capacity, masks + _round_up(capacity * value_itemsize, 4)  # atomics of bytes take whole words


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
    capacity = _round_up(min(most_entries, room), unit)
    values = _round_up(value_itemsize * (32 + capacity) * rows, 16)
    most = min(_round_up(most_entries, unit), rows * capacity)
    return capacity, most, values + _round_up(8 * words + 4 * most, 16)


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


ESC_BUCKET = 3 << 10
"""Products that `esc` aims at in a bucket of a long row."""
ESC_LIMIT = 2 << 30
"""Bytes that `esc` takes at most unless told."""
ESC_SLICE = 1 << 25
"""Products of long rows that `esc` expands at once, where memory allows."""
ESC_STATE = 8 + 2 * 16
"""Counters of `esc`: facts, then rows and places taken per class."""
SCAN_ROWS = 2048
"""Rows that a thread block of the kernel `offsets` adds up."""
ALLOCATION = 512
"""Every device allocation is a multiple of so many bytes."""


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
    return {name: _round_up(size, ALLOCATION) for name, size in sizes.items()}


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
    arrays = {name: _round_up(size, ALLOCATION) for name, size in sizes.items()} if long_rows else {}

    entry = value_itemsize + index_itemsize
    least = ceil_div(max_row_products, tile) if long_rows else 0
    fixed = sum(setup.values()) + sum(arrays.values()) + 4 * ALLOCATION
    room = (ESC_LIMIT if limit is None else limit) - fixed
    slice_tiles = min(tiles, max(least, min(ESC_SLICE, max(room, 0) // (2 * entry)) // tile))
    pool = min(products, nrows * ncols, max((room - slice_tiles * tile * entry) // entry, 0))
    counts = {"tile": slice_tiles * tile, "pool": pool} if long_rows else {"pool": pool}
    for name, count in counts.items():
        arrays[f"{name}_indices"] = _round_up(count * index_itemsize, ALLOCATION)
        arrays[f"{name}_data"] = _round_up(count * value_itemsize, ALLOCATION)
    return EscWorkspace(setup, arrays, slice_tiles, pool, fixed + least * tile * entry)


PAIRS = 4
"""Blocks on the GPU at once, np of hySpMM's equation 5: one is sent, one is computed, the C of two comes back."""
RESIDENT_SHARE, ROOM_BYTES = 0.7, 2 << 30
"""Of the memory limit, what B may take to stay on the GPU; and it may take more if so much is left for blocks."""
SLOT_BYTES = 768 << 20
"""The most a slot takes unless a single row needs more: larger blocks gain nothing, and the first and last wait."""


class DeviceShares(NamedTuple):
    """How the memory limit of a GPU is shared out.

    Attributes
    ----------
    kept : int
        Bytes for a B that stays; 0 if its rows come block by block.
    pairs : int
        Slots for block pairs.
    slot : int
        Bytes of each.
    """

    kept: int
    pairs: int
    slot: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.kept + self.pairs * self.slot


def device_shares(b_bytes: int, memory_limit: int, pairs: int = PAIRS) -> DeviceShares:
    """Share out the memory limit of a GPU: what both the plan and the GPU itself go by.

    Parameters
    ----------
    b_bytes : int
        Of the whole of B on the GPU; 0 if it is not to stay there.
    memory_limit : int
    pairs : int
        A single one gets all the room.

    Examples
    --------
    >>> device_shares(1 << 30, 8 << 30).total
    4294967296
    >>> device_shares(7 << 30, 8 << 30).kept
    0
    """
    stays = b_bytes <= RESIDENT_SHARE * memory_limit or b_bytes + ROOM_BYTES <= memory_limit
    kept = b_bytes if stays else 0
    room = memory_limit - kept
    return DeviceShares(kept, pairs, room if pairs == 1 else min(room // pairs, SLOT_BYTES))


PAIR_BYTES = 4
"""Bytes, for each entry of a B of dense blocks that stays on the GPU, by which pairs of blocks are counted."""
ALIGNMENT = 256
"""Bytes to whose multiples the arrays of a block on the GPU are placed."""
SORT_GROUPS = 11
"""Groups of row lengths of `hyspmm.cu`."""
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


PACKED_UNIT = 9, 12
"""Powers of 2: the fewest and the most rows and entries, together, of a unit of a packed matrix."""
PACKED_UNITS = 12
"""Power of 2: so many units keep the GPU busy."""
PACKED_HEAD = 6208
"""Bytes before the directory: three numbers, the dictionary and its hash table."""
PACKED_PLACES = 32
"""Bytes of the directory for each unit."""
PACKED_PADDING = 8
"""Bytes after the last that may be read."""


def packed_unit(nrows: int, nnz: int) -> int:
    """Return how many rows and entries, together, a unit of a packed matrix has, before its ends move to those of rows.

    Examples
    --------
    >>> packed_unit(1_000, 100_000), packed_unit(500_000, 128_000_000)
    (512, 4096)
    """
    low, high = PACKED_UNIT
    return 1 << max(low, min(high, (nrows + nnz).bit_length() - 1 - PACKED_UNITS))


def packed_units(nrows: int, nnz: int) -> int:
    """Return the units of a packed matrix; threads share them."""
    return max(1, ceil_div(nrows + nnz, packed_unit(nrows, nnz)))


def packed_start(nrows: int, nnz: int) -> int:
    """Return where the bytes of the units start."""
    return PACKED_HEAD + (packed_units(nrows, nnz) + 1) * PACKED_PLACES


def packed_bound(shape: tuple[int, int], nnz: int, index_itemsize: int, value_itemsize: int = 0) -> int:
    """Bound the bytes of a packed matrix.

    Groups of columns take as many bits as their largest difference. The differences of a row add up to no more than the
    number of columns, and the sum of their bits is largest where all are equal.

    Parameters
    ----------
    shape : (nrows, ncols)
    nnz : int
    index_itemsize : int
    value_itemsize : int
        0 where only columns are packed. Values get a quarter of their size; those that need more are not packed.

    Returns
    -------
    int
        Bytes. Columns always fit.

    Examples
    --------
    >>> packed_bound((500_000, 500_000), 128_000_000, 4) / 128_000_000 < 2.6
    True
    """
    pieces = shape[0] + packed_units(shape[0], nnz)
    groups = nnz // 32 + pieces
    heads = pieces * (3 + index_itemsize) + groups
    gap = shape[0] * shape[1] // groups + 2
    bits = ((gap**16).bit_length() + 16) // 16 + 1  # of the mean: log2(gap) to a sixteenth, and less than 1 more
    columns = min(nnz * index_itemsize, 4 * groups * bits)
    values = nnz * value_itemsize // 4 + 2 * pieces if value_itemsize else 0
    return packed_start(shape[0], nnz) + heads + columns + values + PACKED_PADDING
