"""Assign rows to SELL chunks: the model that chooses the sorting window, the order of rows, and long rows.

References
----------
M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems", poster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from spdist.kernels.rounding import ceil_div
from spdist.kernels.spmv.sell.format import GPU_LONG, WINDOW
from spdist.matrices.dtypes import INT32_MAX, DeviceArray, IndexArray
from spdist.matrices.dtypes import is_on_gpu as is_on_gpu
from spdist.matrices.dtypes import module_of as module_of

PIECE, CPU_PIECE = 4096, 2048
"""Least entries of a piece of a long row, on the GPU and on the CPU, whose threads share pieces."""
WHOLE = 1 << 14
"""Entries up to which the GPU's long rows are not cut, if none has more: adding up their pieces is a launch more."""
PIECES = 256
"""Pieces into which a whole matrix would be cut, so that a long row takes no longer than the rest of the matrix."""


def chunk_occupancy(lengths: DeviceArray, height: int, sigma: int = 1) -> float:
    """Return beta, the share of places that hold entries, of chunks of `height` rows sorted in windows of `sigma` rows.

    M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems". 1 is no
    padding.
    """
    order = None if sigma <= 1 else sort_by_length(lengths, sigma)
    slots = _slots(lengths if order is None else lengths[order], height)
    return float(lengths.sum()) / (height * slots) if slots else 1.0


def code_balance(beta: float, alpha: float, row_nnz: float, *, value_bytes: int = 8, index_bytes: float = 4.0) -> float:
    """Return the bytes that a product moves per floating-point operation, y read and written; by the paper's model.

    Memory bandwidth over it bounds the speed. `alpha`: loads of x from memory per entry: ``1 / row_nnz`` if x is
    perfectly cached, 1 if nothing is cached.
    """
    return ((value_bytes + index_bytes) / beta + value_bytes * alpha + 2 * value_bytes / row_nnz) / 2


def _slots(lengths: DeviceArray, height: int) -> int:
    """Return the sum of the widths of chunks of `height` rows."""
    whole = len(lengths) // height * height
    total = int(lengths[:whole].reshape(-1, height).max(axis=1).sum()) if whole else 0
    return total + (int(lengths[whole:].max()) if whole < len(lengths) else 0)


def sort_by_length(lengths: DeviceArray, sigma: int) -> Any:
    """Return the order with longer rows first in each window of `sigma` rows; rows of equal length keep their order."""
    xp = module_of(lengths)
    most = int(lengths.max()) if len(lengths) else 0
    key = most - lengths.astype(np.int64)
    if sigma < len(lengths):
        key += xp.arange(len(lengths)) // sigma * (most + 1)
    small = (ceil_div(len(lengths), sigma)) * (most + 1) < INT32_MAX
    return xp.argsort(key.astype(np.int32) if small else key, kind="stable")


class Placement(NamedTuple):
    """The rows of each chunk."""

    chunks: DeviceArray  # as `format.new_chunks` returns them
    rows: DeviceArray | None  # row at each position; None if positions are rows
    sigma: int


def choose_window(slots: Callable[[int], int], entries: int, nrows: int, height: int, entry: int, row: int) -> int:
    """Return the rows of the sorting window that moves fewest bytes; a wider window must save clearly more.

    `slots`: returns the sum of the widths of all chunks if rows are sorted in windows of that many rows. `height`: rows
    of a chunk. `entry, row`: bytes of an entry and its index; of a row's number.
    """
    best, least = 1, height * slots(1) * entry
    for window in (WINDOW, nrows):
        if least <= 1.02 * (entries * entry + nrows * row):
            break
        needed = height * slots(window) * entry + nrows * row
        if needed < (0.9 if window == nrows else 0.99) * least:
            best, least = window, needed
    return best


def sort_groups(
    lengths: DeviceArray, sigma: int | Literal["auto"], height: int, block: int, entry_bytes: int
) -> tuple[int, Any]:
    """Return sigma, chosen if it is "auto", and the order of the rows; groups of `block` rows stay together.

    The order is None if rows keep theirs. `height`: rows of a chunk. `entry_bytes`: bytes of a value and its index.
    """
    xp, leaders, height = module_of(lengths), lengths[: len(lengths) // block * block : block], max(height // block, 1)

    @functools.cache
    def order_of(window: int) -> Any:
        return sort_by_length(leaders, window) if window > 1 else None

    def slots(window: int) -> int:
        order = order_of(window)
        return _slots(leaders if order is None else leaders[order], height)

    if sigma == "auto":
        entry = entry_bytes * block * block
        sigma = choose_window(slots, int(leaders.sum()), len(leaders), height, entry, 4 * block)
    order = order_of(sigma)
    if order is not None and block > 1:
        tail = xp.arange(len(leaders) * block, len(lengths))
        order = xp.concatenate([(order[:, None] * block + xp.arange(block)).ravel(), tail])
    return sigma, order


def list_places(nchunks: int) -> int:
    """Return the size of the hash table for lists of diagonals, a power of two, so large that few lists collide."""
    return 1 << (8 * nchunks).bit_length()


class Sharing(NamedTuple):
    """How many lanes of a GPU share a row."""

    most: int
    """Entries that a lane takes of a row by itself; tall rows have more, and lanes enough for as many entries each."""
    long: int
    """Entries above which a row stays in CSR, to be multiplied by a thread block."""


EVEN_ENTRIES = ((80_000, 4), (500_000, 8), (1_000_000, 16), (4_000_000, 32))
"""Of a matrix with fewer nonzeros than this: entries of a lane, so that a GPU has warps enough to hide its latency."""
SKEWED_ENTRIES = ((80_000, 4), (4_000_000, 8), (20_000_000, 16))
"""The same if some rows are far longer than others: such rows are waited for."""
MOST_ENTRIES = 64
"""Entries of a lane of larger matrices."""
SKEWED = 4
"""Times a mean row that the longest row of a skewed matrix exceeds."""
LONG_BLOCKS = 200
"""Rows that have a thread block each, at most, unless they have more entries than a warp should hold."""
LEAST_LONG = 256
"""Entries of a row that stays in CSR, at least."""


def share(counts: IndexArray, nnz: int) -> Sharing:
    """Choose how many lanes of a GPU share a row, by constants fitted to measured times: design 018.

    `counts`: (GPU_LONG + 2,): rows of each number of entries; the last: of more.
    """
    longest = len(counts) - 1 - int(np.argmax(counts[::-1] > 0))
    skewed = longest > GPU_LONG or longest * int(counts.sum()) > SKEWED * nnz
    rule = SKEWED_ENTRIES if skewed else EVEN_ENTRIES
    most = next((entries for below, entries in rule if nnz < below), MOST_ENTRIES)
    longer, long = np.cumsum(counts[::-1])[::-1], LEAST_LONG
    while long < GPU_LONG and longer[long + 1] > LONG_BLOCKS:
        long *= 2
    return Sharing(most, long)


def piece_on_gpu(counts: IndexArray) -> int:
    """Return the least entries of a piece on the GPU; `counts`: entries of each long row."""
    return WHOLE if counts.max(initial=0) <= WHOLE else PIECE


def cut_long_rows(counts: IndexArray, nnz: int, piece: int) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return the offsets of the rows that stay in CSR, the starts of their pieces, and the first piece of each row.

    `counts`: (nlong,): entries of each, on the host. `piece`: least entries of a piece.
    """
    indptr, size = np.append(0, np.cumsum(counts)), max(piece, nnz // PIECES)
    row_pieces = np.append(0, np.cumsum(-(-counts // size)))
    row = np.repeat(np.arange(len(counts)), np.diff(row_pieces))
    starts = indptr[row] + (np.arange(row_pieces[-1]) - row_pieces[row]) * size
    return indptr, np.append(starts, indptr[-1]), row_pieces.astype(np.int32)


def no_long_rows(xp: ModuleType, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the arrays of `Sell` that hold rows in CSR, for a matrix without such rows; `xp` is NumPy or CuPy."""
    empty, zero = xp.empty(0, np.int32), xp.zeros(1, np.int64)
    return empty, zero, empty, xp.empty(0, dtype), zero, zero.view(np.int32)[:1]
