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
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from spdist.csr import INT32_MAX, IndexArray, ValueArray
from spdist.csr import is_on_gpu as is_on_gpu
from spdist.csr import module_of as module_of
from spdist.kernels.workspace import ceil_div

WIDE, NARROW, DIAGONAL, BLOCK_WIDE, BLOCK_NARROW = range(5)
KINDS = ("wide", "narrow", "diagonal", "block_wide", "block_narrow")
"""How a chunk keeps its columns; by the number in its code."""
LANES = 32
BLOCKS = (2, 3, 4, 6)
WINDOW = 1024
"""Rows of the windows that "auto" sorts within: y is still written to a few Zarr pages' worth of memory."""
BLOCKED_SHARE = 0.9
"""Share of sampled rows in dense blocks from which blocks are looked for everywhere."""
SAMPLES = 4096
GPU_LONG, CPU_LONG = 2048, 512
"""Entries above which a row stays in CSR, and is shared among thread blocks or threads."""
PIECE = 2048
"""Entries that a piece of such a row has at least."""
PIECES = 256
"""Pieces that a matrix would be cut into: a row shorter than that takes no longer than the rest."""
LANE_ENTRIES = 64
"""Entries of a lane from which more lanes take a row, where rows are sorted all together; of a large matrix."""
LEAST_ENTRIES = 8
"""The same of a small one, whose product lasts as long as its longest lane."""
LARGE = 1 << 23
"""Nonzeros of a large matrix."""
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


class Rows(NamedTuple):
    """Which rows go to which chunks."""

    rows: Any
    """Row at each position; None where positions are rows."""
    first: Any
    """First position of each chunk."""
    code: Any
    """``log2(T) << 4 | rows << 8`` of each chunk."""
    sigma: int


def place_rows(
    lengths: Any,
    longest: int,
    nnz: int,
    *,
    height: int,
    lanes: int,
    sigma: int | Literal["auto"],
    block: int,
    entry_bytes: int,
    spread: bool,
) -> Rows:
    """Choose sigma where it is "auto", sort the rows, and cut them into chunks.

    Parameters
    ----------
    lengths : (nrows,) int
        Negative for the rows that are kept elsewhere.
    longest, nnz : int
        Entries of the longest row, and of all, those kept elsewhere too.
    height : int
        C; 0 lets each chunk have as many rows as suits their length.
    lanes : int
        Lanes of a chunk.
    block : int
        Rows of a group that stays together.
    entry_bytes : int
        Bytes of a value and its index.
    spread : bool
        Whether several lanes may take a row: those far longer than others have the last positions, sorted all together,
        and the first chunks.
    """
    xp, nrows = module_of(lengths), len(lengths)
    fixed = height or lanes // (_threads(nrows, block) if spread else 1)
    most = _lane_entries(nnz)
    limit = max(most, 4 * nnz // max(nrows, 1)) if spread and not height and block == 1 else INT32_MAX
    elsewhere = longest > (GPU_LONG if spread else CPU_LONG)
    kept = xp.flatnonzero((lengths >= 0) & (lengths <= limit)) if elsewhere or longest > limit else None
    rest = lengths if kept is None else lengths[kept]
    sigma, order = _choose_window(rest, sigma, max(fixed // block, 1), entry_bytes, block)
    rows = order if kept is None else kept if order is None else kept[order]
    first, code = _uniform(xp, len(rest), fixed, lanes)
    if kept is not None:
        tall_rows = xp.flatnonzero(lengths > limit)
        order = sort_by_length(lengths[tall_rows], max(len(tall_rows), 1))
        rows = xp.concatenate([rows, tall_rows[order]])
        places = _by_length(xp, lengths[tall_rows[order]], lanes // fixed, most)
        first, code = xp.concatenate([places[0] + len(rest), first]), xp.concatenate([places[1], code])
    return Rows(None if rows is None else rows.astype(np.int32), first, code, sigma)


def _choose_window(
    lengths: Any, sigma: int | Literal["auto"], height: int, entry_bytes: int, block: int
) -> tuple[int, Any]:
    """Return sigma and the order of the rows, None where it is as it was; groups of `block` rows stay together."""
    xp = module_of(lengths)
    leaders = lengths[: len(lengths) // block * block : block]
    windows = [sigma] if sigma != "auto" else [1, WINDOW, max(len(leaders), 1)]
    chosen, order = _best_window(leaders, windows, height, entry_bytes * block * block, 4 * block)
    if order is not None and block > 1:
        tail = xp.arange(len(leaders) * block, len(lengths))
        order = xp.concatenate([(order[:, None] * block + xp.arange(block)).ravel(), tail])
    return chosen, order


def _best_window(lengths: Any, windows: list[int], height: int, entry: int, row: int) -> tuple[int, Any]:
    """Return the window of fewest bytes, and its order; a wider one must save enough beyond the narrower."""
    best: tuple[int, Any] = (windows[0], sort_by_length(lengths, windows[0]) if windows[0] > 1 else None)
    if len(windows) == 1 or not len(lengths):
        return best
    nnz, nrows = int(lengths.sum()), len(lengths)
    least = height * _slots(lengths, height) * entry
    for window in windows[1:]:
        if least <= 1.02 * (nnz * entry + nrows * row):
            break
        order = sort_by_length(lengths, window)
        needed = height * _slots(lengths[order], height) * entry + nrows * row
        if needed < (0.9 if window == nrows else 0.99) * least:
            best, least = (window, order), needed
    return best


def _threads(nrows: int, block: int) -> int:
    """Return the lanes of a row that give a GPU enough chunks."""
    threads = 1
    while block == 1 and threads < 8 and nrows * threads < WARPS_WANTED * LANES:
        threads *= 2
    return threads


def _uniform(xp: Any, nrows: int, height: int, lanes: int) -> tuple[Any, Any]:
    """Return first positions and codes of chunks of `height` rows."""
    first = xp.arange(0, nrows, height, dtype=np.int64)
    rows = xp.minimum(nrows - first, height)
    return first, (rows << 8) | ((lanes // height).bit_length() - 1 << 4)


def _lane_entries(nnz: int) -> int:
    """Return the entries of a lane from which more lanes take a row: a power of 2."""
    most = LANE_ENTRIES
    while most > LEAST_ENTRIES and nnz * LANE_ENTRIES < LARGE * most:
        most //= 2
    return most


def _by_length(xp: Any, lengths: Any, least: int, most: int) -> tuple[Any, Any]:
    """Return those of rows sorted by length: at least `least` lanes a row, more for those of over `most` entries."""
    limits = most * 2 ** np.arange(4, -1, -1)  # rows of more entries take 32, 16, 8, 4, 2 lanes
    ends = [*host(xp.searchsorted(-lengths, xp.asarray(-limits), side="left")).tolist(), len(lengths)]
    firsts, codes, start = [xp.empty(0, np.int64)], [xp.empty(0, np.int64)], 0
    for threads, end in zip((32, 16, 8, 4, 2, 1), ends, strict=True):
        first, code = _uniform(xp, end - start, LANES // max(threads, least), LANES)
        firsts.append(first + start)
        codes.append(code)
        start = end
    return xp.concatenate(firsts), xp.concatenate(codes)


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
