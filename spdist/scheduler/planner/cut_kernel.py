"""The kernel that cuts the rows of A into blocks, compiled by Numba; import it only when it is needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.planner.cut_rows import BlockCosts, BlockTable, ExpectedRows, Position, RowsOfA, RowsOfB


@part
def _count_row(
    a: RowsOfA, begin: np.int64, end: np.int64, b: RowsOfB, costs: BlockCosts, number: np.uint32
) -> tuple[np.int64, np.int64, np.int64]:
    """Return the products of a row of A, and the bytes and Zarr chunks of B that its block did not need before."""
    products, nbytes, chunks = np.int64(0), np.int64(0), np.int64(0)
    lengths, stamps, chunk_stamps, rows_per_chunk = b.lengths, b.stamps, b.chunk_stamps, np.uintp(b.rows_per_chunk)
    for at in range(begin, end):
        k = np.uintp(a.columns[at])
        length = np.int64(lengths[k])
        products += length
        if stamps[k] != number:
            stamps[k] = number
            nbytes += length * costs.b_entry + costs.b_row
            chunk = k // rows_per_chunk
            if chunk_stamps[chunk] != number:
                chunk_stamps[chunk] = number
                chunks += 1
    return products, nbytes, chunks


@part
def _expect_row(
    products: np.int64 | int, row: int, expected: ExpectedRows, costs: BlockCosts
) -> tuple[np.int64, np.int64, np.int64]:
    """Return the products of a row that are made, the entries of C that are expected of them, and a bound on these."""
    nnz = products
    bound = min(np.int64(products), np.int64(costs.ncols - row if costs.upper else costs.ncols))
    if products > 0:
        ratio = expected.ratio[int(np.log2(products))]
        nnz = min(np.int64(products * ratio) + 1, products, costs.ncols)
    if len(expected.mask_lengths) > 0:
        masked = np.int64(expected.mask_lengths[row])
        left = masked if costs.inside else costs.ncols - masked
        nnz, bound = min(nnz, left), min(bound, left)
    row_range = row * expected.share.shape[1] // costs.nrows
    made, entries = products * expected.share[0, row_range], nnz * expected.share[1, row_range]
    return np.int64(np.ceil(made)), np.int64(np.ceil(entries)), max(bound, np.int64(0))


@part
def _close_block(row: int, position: Position, closed: Any) -> None:
    """Copy the current block, which ends before `row`, to `closed`, and begin the next one."""
    block = position.block[0]
    closed.start, closed.stop = block.start, row
    closed.products, closed.nnz, closed.uncut_nnz = block.products, block.nnz, block.uncut_nnz
    closed.a_bytes, closed.b_bytes, closed.b_chunks = block.a_bytes, block.b_bytes, block.b_chunks
    closed.longest = block.longest
    block.start, block.products, block.nnz, block.uncut_nnz = row, 0, 0, 0
    block.a_bytes, block.b_bytes, block.b_chunks, block.longest = 0, 0, 0, 0
    position.counts[0] += 1


@compiled
def cut(
    a: RowsOfA,
    b: RowsOfB,
    expected: ExpectedRows,
    costs: BlockCosts,
    forced: Int64Array,
    position: Position,
    out: BlockTable,
) -> int:
    """Add each row to the current block; a row that would pass a bound starts the next block.

    `b`: stamps are updated.
    `forced`: (n,) int64: rows at which blocks must start. If there are any, the bounds end no block.
    `position`: updated.
    `out`: (rows of A,) of `BLOCK_RECORD`: the closed blocks are written here.
    Returns number of blocks closed.
    """
    block, closed = position.block[0], 0
    for i in range(len(a.offsets) - 1):
        row, begin, end = a.first + i, a.offsets[i] - a.offsets[0], a.offsets[i + 1] - a.offsets[0]
        all_products, b_bytes, b_chunks = _count_row(a, begin, end, b, costs, np.uint32(position.counts[0]))
        products, uncut_nnz, bound = _expect_row(all_products, row, expected, costs)
        nnz, a_bytes = min(uncut_nnz, costs.top_n), (end - begin) * costs.a_entry + 16
        if len(expected.mask_lengths) > 0:
            a_bytes += np.int64(expected.mask_lengths[row]) * costs.mask_entry + 8
        entries = max(block.nnz + nnz, min(max(block.longest, bound), costs.top_n))
        total = block.a_bytes + a_bytes + entries * costs.c_entry + (row + 1 - block.start) * costs.c_row
        if not costs.b_resident:
            total += block.b_bytes + b_bytes
        full = row > block.start and (total > costs.budget or block.products + products > costs.max_products)
        if len(forced) > 0:
            full = position.counts[1] < len(forced) and row == forced[position.counts[1]]
            position.counts[1] += full
        if full:
            _close_block(row, position, out[closed])
            closed += 1
            _, b_bytes, b_chunks = _count_row(a, begin, end, b, costs, np.uint32(position.counts[0]))
        block.products += products
        block.nnz += nnz
        block.a_bytes += a_bytes
        block.b_bytes += b_bytes
        block.b_chunks += b_chunks
        block.uncut_nnz += uncut_nnz
        block.longest = max(block.longest, bound)
    return closed
