"""SELL-C-sigma: one storage format for products with vectors on the CPU and on the GPU.

C rows form a SELL chunk, stored column by column and padded to its longest row. Rows are sorted by length within
windows of sigma rows, so that rows of similar length share a SELL chunk; T lanes may share a row. In this folder, a
chunk is a SELL chunk.

The algorithm, with the module of each step:

1. Choose sigma by a model of the bytes moved, and sort the rows (`layout`).
2. Cut the rows into chunks, find each chunk's width, and choose how it keeps its columns (`build_cpu`, `build_gpu`).
3. Place the chunks' arrays one after the other, and fill them.
4. Multiply chunk by chunk, a lane a row (`multiply_cpu`, `multiply_gpu`).

Beyond the papers, each chunk keeps its columns in the form that takes fewest bytes (`sell.cuh` lists the forms), dense
blocks share one column, and rows far longer than others stay in CSR. Arrays may be NumPy's or CuPy's, with one layout.

References
----------
.. [1] M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems", poster.
.. [2] M. Kreutzer, G. Hager, G. Wellein, H. Fehske, A. Bishop, "A unified sparse matrix data format for efficient
   general sparse matrix-vector multiplication on modern processors with wide SIMD units", SIAM J. Sci. Comput. 36(5),
   2014.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cuda.constants import SELL_LONG, SELL_WINDOW, ChunkKind
from spdist.matrices.dtypes import DeviceArray, Int64Array, is_on_gpu

WIDE, NARROW, DIAGONAL, BLOCK_WIDE, BLOCK_NARROW = map(int, ChunkKind)
KINDS = ("wide", "narrow", "diagonal", "block_wide", "block_narrow")
"""Names of the forms of a chunk's columns, by `ChunkKind`."""
LANES = 32
"""Lanes of a chunk on the GPU: a warp."""
BLOCKS = (2, 3, 4, 6)
"""Sides of the dense blocks that chunks can hold."""
WINDOW = SELL_WINDOW
"""Rows of the narrow window that sigma "auto" tries: y is still written to a few memory pages."""
BLOCKED_SHARE = 0.9
"""Share of sampled rows in dense blocks from which every row is tested for blocks."""
SAMPLES = 4096
"""Rows that are sampled for dense blocks."""
FEW_LISTS = 1 / 8
"""Share of the chunks up to which chunks of diagonals do not share their lists."""
GPU_LONG, CPU_LONG = SELL_LONG, 512
"""Entries above which a row stays in CSR, and is shared among thread blocks or among threads."""


class Chunk(NamedTuple):
    """One row of `Sell.chunks`, unpacked."""

    values: Any  # place of its first slot in `Sell.values`
    index: Any  # place of its first slot in `Sell.wide` or `Sell.narrow`
    first: Any  # position of its first row
    width: Any  # slots
    kind: Any  # A `ChunkKind`
    log_threads: Any  # logarithm, to base 2, of the lanes that share a row
    count: Any  # rows
    full: Any  # slots that no row leaves empty, up to `SELL_MOST_FULL`


class SellArrays(NamedTuple):
    """A `Sell` on the host without its long rows, as compiled code takes it."""

    lanes: int
    block: int
    chunks: Any
    values: Any
    wide: Any
    narrow: Any
    bases: Any  # (n,) int32: a view of `narrow`, in which the bases of slots lie
    rows: Any  # (npositions,) int32: row at each position; empty if positions are rows


def new_chunks(first: Int64Array, counts: Int64Array, log_threads: int) -> Int64Array:
    """Return chunks whose first positions, rows and lanes of a row are set; the rest is zero.

    Returns (nchunks, 4) int64: the 32 bytes of the `Chunk` in `sell.cuh`: place of values, place of indices, ``first |
    width << 32``, and in the upper half of the last word the code ``kind | log_threads << 4 | count << 8 | full <<
    16``.
    """
    chunks = np.zeros((len(first), 4), np.int64)
    chunks[:, 2] = first
    chunks[:, 3] = (counts << 8 | log_threads << 4) << 32
    return chunks


def value_places(chunks: DeviceArray) -> DeviceArray:
    """Return the place of each chunk's first slot in the values."""
    return chunks[:, 0]


def index_places(chunks: DeviceArray) -> DeviceArray:
    """Return the place of each chunk's first slot in its indices."""
    return chunks[:, 1]


def chunk_kinds(chunks: DeviceArray) -> DeviceArray:
    """Return the form in which each chunk keeps its columns, a `ChunkKind`."""
    return chunks[:, 3] >> 32 & 15


def row_lane_logs(chunks: DeviceArray) -> DeviceArray:
    """Return the logarithm, to base 2, of the lanes that share a row of each chunk."""
    return chunks[:, 3] >> 36 & 15


@dataclass(frozen=True, eq=False)
class Sell:
    """A sparse matrix in SELL-C-sigma."""

    shape: tuple[int, int]  # (nrows, ncols)
    nnz: int
    lanes: int  # lanes of a chunk: C times T; 32 if the GPU is to multiply
    block: int  # rows and columns of dense blocks; 1 without dense blocks
    sigma: int  # rows of the windows in which rows were sorted by length; 1 if they were not
    # (nchunks, 4) int64: as `new_chunks` returns them, the chunks of the longest rows first. Chunks with equal lists of
    # diagonals share one list, at one place of `wide`.
    chunks: DeviceArray
    values: DeviceArray  # (slots * lanes,) value dtype
    wide: DeviceArray
    narrow: DeviceArray
    rows: DeviceArray | None  # (positions,) int32 or None: row at each position; None if positions are rows
    # the rows that stay in CSR: their numbers (int32), offsets (int64), columns (int32), values
    long_rows: DeviceArray
    long_indptr: DeviceArray
    long_indices: DeviceArray
    long_data: DeviceArray
    pieces: DeviceArray  # (npieces + 1,) int64: where each piece of a long row starts in ``long_data``
    row_pieces: DeviceArray  # (nlong + 1,) int32: first piece of each long row

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored values."""
        return np.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of the matrix."""
        rows = 0 if self.rows is None else self.rows.nbytes
        long = self.long_indices.nbytes + self.long_data.nbytes + self.long_rows.nbytes
        return int(self.chunks.nbytes + self.values.nbytes + self.wide.nbytes + self.narrow.nbytes + rows + long)

    @property
    def beta(self) -> float:
        """Chunk occupancy: entries over places for them; 1 is no padding."""
        places = len(self.values) + len(self.long_data)
        return self.nnz / places if places else 1.0

    @functools.cached_property
    def _direction(self) -> list[int]:
        return [1]

    def next_direction(self) -> int:
        """Return 0 (forwards) and 1 (backwards) alternately.

        A product on the GPU then begins with the chunks that the previous product left in the cache.
        """
        self._direction[0] ^= 1
        return self._direction[0]

    @functools.cached_property
    def shares_rows(self) -> bool:
        """Whether several lanes share a row anywhere."""
        return bool(row_lane_logs(self.chunks).any())

    @functools.cached_property
    def arrays(self) -> SellArrays:
        """The arrays as a NamedTuple for compiled code of the host."""
        rows = np.empty(0, np.int32) if self.rows is None else self.rows
        bases = self.narrow.view(np.int32)
        return SellArrays(self.lanes, self.block, self.chunks, self.values, self.wide, self.narrow, bases, rows)

    def kind_counts(self) -> dict[str, int]:
        """Return how many chunks keep their columns in each form that occurs, by its name."""
        counts = np.bincount(host(chunk_kinds(self.chunks)).astype(np.int64), minlength=len(KINDS))
        return {name: int(count) for name, count in zip(KINDS, counts, strict=True) if count}


def to_host(a: Sell) -> Sell:
    """Return the matrix with NumPy's arrays."""
    arrays = {field.name: getattr(a, field.name) for field in fields(a)}
    moved: dict[str, Any] = {name: host(array) for name, array in arrays.items() if hasattr(array, "dtype")}
    return replace(a, **moved)


def host(array: DeviceArray) -> DeviceArray:
    """Return an array of NumPy or CuPy as NumPy's."""
    on_host: DeviceArray = array.get() if is_on_gpu(array) else array  # type: ignore[attr-defined]
    return on_host
