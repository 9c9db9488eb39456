"""Layout of a block's arrays in device memory for hySpMM, and the memory that a block needs. Runs without a GPU.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

from spdist.kernels.cuda.constants import ALIGNMENT, SCAN_ROWS, BlockStatus, SortGroup, aligned


class ItemBytes(NamedTuple):
    """Bytes of a value, of a column index and of an offset."""

    value_bytes: int
    index_bytes: int
    pointer_bytes: int


class BlockSizes(NamedTuple):
    """Sizes of a prepared pair of blocks of hySpMM."""

    # rows and entries of the block of A, and the products they expand to
    rows: int
    entries: int
    products: int
    # rows and entries of the block of B as it is sent. Duplicated: `entries` and `products`; distinct: at most these.
    b_rows: int
    b_entries: int
    distinct: bool  # whether each row of B is sent once


class BlockLayout(NamedTuple):
    """Offsets of a block's arrays, in bytes from its start; the CPU prepares and sends the first `sent` bytes."""

    # prepared: values of the block of A; values, columns and row offsets of the block of B
    a_values: int
    b_values: int
    b_columns: int
    b_starts: int
    # prepared: first entry and first product of each row of C; for each entry of A the row of the block of B
    row_entries: int
    row_products: int
    a_rows: int
    sent: int  # end of the prepared arrays
    # products, sorted and compressed row by row: they overwrite the block of B if B is duplicated
    columns: int
    values: int
    # scratch for the sort, then the block of C; its row offsets
    c_columns: int
    c_values: int
    c_indptr: int
    # entries of each row of C; rows of each group, and how many; state of the scan; `BlockStatus`
    lengths: int
    lists: int
    counts: int
    scan: int
    status: int
    end: int  # bytes in all


def sent_offsets(block: BlockSizes, types: ItemBytes) -> tuple[int, int, int, int, int, int, int, int]:
    """Place the arrays that are sent: the fields of `BlockLayout` up to ``sent``. Also compiled."""
    value, index, pointer = types
    b_values = (block.entries * value + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    b_columns = b_values + (block.b_entries * value + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    b_starts = b_columns + (block.b_entries * index + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    row_entries = b_starts + ((block.b_rows + 1) * pointer + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    row_products = row_entries + ((block.rows + 1) * pointer + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    a_rows = row_products + ((block.rows + 1) * pointer + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    sent = a_rows + (block.distinct * block.entries * 4 + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return 0, b_values, b_columns, b_starts, row_entries, row_products, a_rows, sent


def block_layout(block: BlockSizes, types: ItemBytes) -> BlockLayout:
    """Place the arrays of a block of hySpMM one after the other.

    The first ``sent`` bytes are transferred, and the block takes ``end`` bytes of device memory. The bytes from
    ``counts`` to ``end`` must be zero when the block starts.
    """
    places = list(sent_offsets(block, types))
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
    add(block.rows * len(SortGroup), 4)
    add(len(SortGroup), 4)
    add(-(-block.rows // SCAN_ROWS) + 1, 8)
    add(len(BlockStatus), 8)
    return BlockLayout._make([*places, at])


class BlockCost(NamedTuple):
    """Upper bounds on the device bytes of a block: per row, per entry of A, per product, and for any block."""

    row: int
    entry: int
    product: int
    fixed: int

    def bytes(self, rows: int, entries: int, products: int) -> int:
        """Return the bound for a block of A of these rows and entries, which expand to these products."""
        return self.fixed + rows * self.row + entries * self.entry + products * self.product


def block_cost(types: ItemBytes) -> BlockCost:
    """Bound the device memory of a block of hySpMM before its distinct rows of B are known.

    ``block_layout(block, types).end`` is never more, for either variant.
    X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
    University, 2015, equations 3 and 5: the block of A, the block of B, and an upper bound of the triples and C.
    """
    pair = types.value_bytes + types.index_bytes
    row = 3 * types.pointer_bytes + 4 + 4 * len(SortGroup) + 1
    return BlockCost(
        row, types.value_bytes + types.pointer_bytes + 4, 3 * pair, len(BlockLayout._fields) * (ALIGNMENT + 8)
    )


def host_bytes(b_rows: int, threads: int) -> int:
    """Return the host bytes with which threads find distinct rows of B."""
    words = b_rows // 64 + 1
    return threads * words * (8 + 4)
