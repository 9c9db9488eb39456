"""SELL-C-sigma: one storage format for products with vectors on the CPU and on the GPU.

C rows, of similar length where rows were sorted within windows of sigma, make a SELL chunk, stored column by column
and padded to its longest row; T lanes may share a row. Each chunk keeps its column indices in the form that takes
fewest bytes, as `sell.cu` describes. Arrays may be NumPy's or CuPy's; both are built alike.

References
----------
M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems", poster.
M. Kreutzer, G. Hager, G. Wellein, H. Fehske, A. Bishop, "A unified sparse matrix data format for efficient general
sparse matrix-vector multiplication on modern processors with wide SIMD units", SIAM J. Sci. Comput. 36(5), 2014.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from spdist.kernels.cuda.constants import SELL_LONG, SELL_WINDOW, ChunkKind
from spdist.kernels.rounding import ceil_div
from spdist.matrices.dtypes import INT32_MAX, IndexArray, ValueArray
from spdist.matrices.dtypes import is_on_gpu as is_on_gpu
from spdist.matrices.dtypes import module_of as module_of

WIDE, NARROW, DIAGONAL, BLOCK_WIDE, BLOCK_NARROW = map(int, ChunkKind)
KINDS = ("wide", "narrow", "diagonal", "block_wide", "block_narrow")
"""How a chunk keeps its columns; by the number in its code."""
LANES = 32
BLOCKS = (2, 3, 4, 6)
WINDOW = SELL_WINDOW
"""Rows of the windows that "auto" sorts within: y is still written to a few Zarr pages' worth of memory."""
BLOCKED_SHARE = 0.9
"""Share of sampled rows in dense blocks from which blocks are looked for everywhere."""
SAMPLES = 4096
FEW_LISTS = 1 / 8
"""Share of the chunks up to which those that keep diagonals have a list each."""
GPU_LONG, CPU_LONG = SELL_LONG, 512
"""Entries above which a row stays in CSR, and is shared among thread blocks or threads."""
PIECE = 2048
"""Entries that a piece of such a row has at least."""
PIECES = 256
"""Pieces that a matrix would be cut into: a row shorter than that takes no longer than the rest."""
WARPS_WANTED = 2048
"""Chunks that occupy a GPU; where there are fewer, more lanes take a row."""


@dataclass(frozen=True, eq=False)
class Sell:
    """A sparse matrix in SELL-C-sigma.

    Attributes
    ----------
    shape : (nrows, ncols)
    nnz : int
    lanes : int
        Lanes of a chunk: C times T. 32 where the GPU is to multiply.
    block : int
        Rows and columns of dense blocks; 1 where there are none.
    sigma : int
        Rows of the windows in which rows were sorted by length; 1 where they were not.
    chunks : (nchunks, 4) int64
        Places of values and of indices, ``first | width << 32`` and ``code << 32``; the longest rows' come first.
        Chunks of equal lists of diagonals share one, at the same place of `wide`.
    values : (slots * lanes,) value dtype
    wide : int32
    narrow : uint16
    rows : (positions,) int32 or None
        Row at each position; None where positions are rows.
    long_rows, long_indptr, long_indices, long_data
        The rows that stay in CSR: their numbers (int32), offsets (int64), columns (int32), values.
    pieces : (npieces + 1,) int64
        Where each piece of a long row starts in ``long_data``.
    row_pieces : (nlong + 1,) int32
        First piece of each long row.
    """

    shape: tuple[int, int]
    nnz: int
    lanes: int
    block: int
    sigma: int
    chunks: Any
    values: ValueArray
    wide: IndexArray
    narrow: IndexArray
    rows: IndexArray | None
    long_rows: IndexArray
    long_indptr: IndexArray
    long_indices: IndexArray
    long_data: ValueArray
    pieces: IndexArray
    row_pieces: IndexArray

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored values."""
        return np.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads, x aside."""
        rows = 0 if self.rows is None else self.rows.nbytes
        long = self.long_indices.nbytes + self.long_data.nbytes + self.long_rows.nbytes
        return int(self.chunks.nbytes + self.values.nbytes + self.wide.nbytes + self.narrow.nbytes + rows + long)

    @property
    def beta(self) -> float:
        """Chunk occupancy: entries over places for them; 1 is no padding."""
        places = len(self.values) + len(self.long_data)
        return self.nnz / places if places else 1.0

    @functools.cached_property
    def _ways(self) -> list[int]:
        return [1]

    def way(self) -> int:
        """Return 0 and 1 by turns: a product on the GPU begins with the chunks that the last one left in the cache."""
        self._ways[0] ^= 1
        return self._ways[0]

    @functools.cached_property
    def shares_rows(self) -> bool:
        """Whether several lanes share a row anywhere."""
        return bool((self.chunks[:, 3] >> 36 & 15).any())

    def kinds(self) -> dict[str, int]:
        """Return how many chunks keep their columns in which form."""
        counts = np.bincount(host(self.chunks[:, 3] >> 32 & 15).astype(np.int64), minlength=len(KINDS))
        return {name: int(count) for name, count in zip(KINDS, counts, strict=True) if count}


# -- the model ---------------------------------------------------------------------------------------------------------


def chunk_occupancy(lengths: Any, height: int, sigma: int = 1) -> float:
    """Return the beta that chunks of `height` rows have if rows are sorted by length in windows of `sigma`.

    Parameters
    ----------
    lengths : (nrows,) int
        Entries of each row.
    height : int
        C, rows of a chunk.
    sigma : int
        Rows of a window; 1 leaves rows where they are.

    Returns
    -------
    float
        In (0, 1]; 1 is no padding.

    References
    ----------
    .. [1] M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems".

    Examples
    --------
    >>> chunk_occupancy(np.array([4, 1, 4, 1]), 2), chunk_occupancy(np.array([4, 1, 4, 1]), 2, sigma=4)
    (0.625, 1.0)
    """
    order = None if sigma <= 1 else sort_by_length(lengths, sigma)
    slots = _slots(lengths if order is None else lengths[order], height)
    return float(lengths.sum()) / (height * slots) if slots else 1.0


def code_balance(beta: float, alpha: float, row_nnz: float, *, value_bytes: int = 8, index_bytes: float = 4.0) -> float:
    """Return the bytes that a product moves per floating-point operation.

    Parameters
    ----------
    beta : float
        Chunk occupancy.
    alpha : float
        Loads of x from memory per entry: ``1 / row_nnz`` where x is perfectly cached, 1 where nothing is.
    row_nnz : float
        Mean entries of a row.
    value_bytes, index_bytes
        Bytes of a value; of an index, per entry.

    Returns
    -------
    float
        Bytes per operation, y read and written. Memory bandwidth over it bounds the speed.

    References
    ----------
    .. [1] M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems".

    Examples
    --------
    >>> code_balance(1.0, 1 / 8, 8.0)
    7.5
    """
    return ((value_bytes + index_bytes) / beta + value_bytes * alpha + 2 * value_bytes / row_nnz) / 2


def _slots(lengths: Any, height: int) -> int:
    """Return the sum of the widths of chunks of `height` rows."""
    whole = len(lengths) // height * height
    total = int(lengths[:whole].reshape(-1, height).max(axis=1).sum()) if whole else 0
    return total + (int(lengths[whole:].max()) if whole < len(lengths) else 0)


def sort_by_length(lengths: Any, sigma: int) -> Any:
    """Return the order that puts long rows first in each window of `sigma` rows, equal ones as they were."""
    xp = module_of(lengths)
    most = int(lengths.max()) if len(lengths) else 0
    key = most - lengths.astype(np.int64)
    if sigma < len(lengths):
        key += xp.arange(len(lengths)) // sigma * (most + 1)
    small = (ceil_div(len(lengths), sigma)) * (most + 1) < INT32_MAX
    return xp.argsort(key.astype(np.int32) if small else key, kind="stable")


class Placed(NamedTuple):
    """Which rows go to which chunks."""

    chunks: Any
    """As `Sell` has them: first positions, lanes of a row and rows are set."""
    rows: Any
    """Row at each position; None where positions are rows."""
    sigma: int


def choose_window(slots: Callable[[int], int], entries: int, nrows: int, height: int, entry: int, row: int) -> int:
    """Return the window in which to sort rows for fewest bytes; a wider one must save enough beyond the narrower.

    Parameters
    ----------
    slots : callable
        Gives the sum of the widths of all chunks where rows are sorted in windows of so many.
    entries, nrows, height : int
        Of all rows; rows of a chunk.
    entry, row : int
        Bytes of an entry and its index; of a row's number.
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
    lengths: Any, sigma: int | Literal["auto"], height: int, block: int, entry_bytes: int
) -> tuple[int, Any]:
    """Return sigma, chosen where it is "auto", and the order of the rows; groups of `block` rows stay together.

    Parameters
    ----------
    lengths : (nrows,) int
    height : int
        Rows of a chunk.
    entry_bytes : int
        Bytes of a value and its index.

    Returns
    -------
    sigma : int
    order : (nrows,) int64 or None
        None where rows are as they were.
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
    """Return the places for hashes of lists, a power of two: so many that few lists meet another in theirs."""
    return 1 << (8 * nchunks).bit_length()


def cut_long_rows(counts: IndexArray, nnz: int) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return offsets of the rows that stay in CSR, where their pieces start, and the first piece of each row.

    Parameters
    ----------
    counts : (nlong,) int64
        Entries of each, on the host.
    nnz : int
        Entries of the matrix.
    """
    indptr, size = np.append(0, np.cumsum(counts)), max(PIECE, nnz // PIECES)
    row_pieces = np.append(0, np.cumsum(-(-counts // size)))
    row = np.repeat(np.arange(len(counts)), np.diff(row_pieces))
    starts = indptr[row] + (np.arange(row_pieces[-1]) - row_pieces[row]) * size
    return indptr, np.append(starts, indptr[-1]), row_pieces.astype(np.int32)


def no_long_rows(xp: Any, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the arrays of no rows that stay in CSR."""
    empty, zero = xp.empty(0, np.int32), xp.zeros(1, np.int64)
    return empty, zero, empty, xp.empty(0, dtype), zero, zero.view(np.int32)[:1]


# -- between host and GPU ----------------------------------------------------------------------------------------------


def to_host(a: Sell) -> Sell:
    """Return the matrix with NumPy's arrays."""
    return _moved(a, host)


def to_gpu(a: Sell) -> Sell:
    """Return the matrix with CuPy's arrays, on the current device."""
    import cupy

    return _moved(a, cupy.asarray)


ARRAYS = (
    "chunks", "values", "wide", "narrow", "rows", "long_rows", "long_indptr", "long_indices", "long_data", "pieces",
    "row_pieces",
)  # fmt: skip


def _moved(a: Sell, move: Any) -> Sell:
    arrays = {name: getattr(a, name) for name in ARRAYS}
    moved: dict[str, Any] = {name: None if array is None else move(array) for name, array in arrays.items()}
    return replace(a, **moved)


def host(array: Any) -> Any:
    """Return an array of the host's."""
    return array.get() if is_on_gpu(array) else array
