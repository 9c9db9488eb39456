"""SELL chunks as compiled code of the CPU reads them: the layout of `sell.cuh`, and all entries as a list."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, inlined, tight
from spdist.kernels.cuda import constants
from spdist.kernels.spmv.sell.format import BLOCK_NARROW, BLOCK_WIDE, DIAGONAL, WIDE, Chunk, SellArrays
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

PADDING, NARROW_PADDING = constants.SELL_PADDING, constants.SELL_NARROW_PADDING
BASES = constants.SELL_BASES


class ColumnArrays(NamedTuple):
    """Columns of the chunks of one form."""

    columns: IndexArray  # `Sell.wide` or `Sell.narrow`: columns, or their offsets from the bases
    bases: IndexArray  # base of each slot; empty if there are no offsets
    padding: int  # index of an unused slot


@inlined
def read_chunk(chunks: Int64Array, at: int) -> Any:
    """Return one row of `Sell.chunks` as a `Chunk`."""
    code = chunks[at, 3] >> 32
    return Chunk(
        chunks[at, 0], chunks[at, 1], chunks[at, 2] & 0xFFFFFFFF, chunks[at, 2] >> 32,
        code & 15, code >> 4 & 15, code >> 8 & 255, code >> 16,
    )  # fmt: skip


@inlined
def block_rows(lanes: int, block: int) -> Any:
    """Return how many block rows `lanes` consecutive rows meet at most."""
    return lanes // block if lanes % block == 0 else lanes // block + 2


@inlined
def row_at(position: int, rows: IndexArray) -> Any:
    """Return the row at a position; `rows` is empty if positions are rows."""
    return np.int64(rows[position]) if len(rows) else position


@inlined
def round_up(a: int, b: int) -> Any:
    """Return the least multiple of `b`, above 0, that is at least `a`; a compiled twin of `rounding.round_up`."""
    return (a + b - 1) // b * b


@inlined
def base_room(width: int) -> Any:
    """Return the 16-bit numbers before the offsets of a chunk: its slots' bases, padded."""
    return 2 * round_up(width, BASES)


@tight
def entry_of(a: SellArrays, chunk: Chunk, lane: int, slot: int) -> Any:
    """Return the first column of a lane's slot; -1 if the slot is padding."""
    to, first, kind, lanes, block = chunk.index, chunk.first, chunk.kind, a.lanes, a.block
    if kind == DIAGONAL:
        has = np.uint32(a.wide[to + 2 * slot + 1]) >> np.uint32(lane) & np.uint32(1)
        return first + lane + a.wide[to + 2 * slot] if has else np.int64(-1)
    blocked = kind in (BLOCK_WIDE, BLOCK_NARROW)
    place = slot * block_rows(lanes, block) + (first % block + lane) // block if blocked else slot * lanes + lane
    unit = block if blocked else 1
    if kind in (WIDE, BLOCK_WIDE):
        column = np.int64(a.wide[to + place])
        return column * unit if column >= 0 else column
    offset = np.int64(a.narrow[to + base_room(chunk.width) + place])
    return np.int64(-1) if offset == NARROW_PADDING else (a.bases[to // 2 + slot] + offset) * unit


@compiled
def list_entries(a: SellArrays, out_rows: IndexArray, out_columns: IndexArray, out_values: ValueArray) -> Any:
    """Write all entries of all chunks as triples; return how many there are."""
    found = 0
    for at in range(len(a.chunks)):
        chunk = read_chunk(a.chunks, at)
        unit = a.block if chunk.kind in (BLOCK_WIDE, BLOCK_NARROW) else 1
        for lane in range(chunk.count << chunk.log_threads):
            for slot in range(chunk.width):
                column = entry_of(a, chunk, lane, slot)
                for e in range(unit if column >= 0 else 0):
                    out_rows[found] = row_at(chunk.first + (lane >> chunk.log_threads), a.rows)
                    out_columns[found] = column + e
                    out_values[found] = a.values[chunk.values + (slot * unit + e) * a.lanes + lane]
                    found += 1
    return found
