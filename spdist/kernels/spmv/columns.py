"""Products of a CSR with a dense matrix of many columns on the GPU: the launches of `columns.cu`.

1. Rows are cut into pieces, once for a matrix (`cut`); pieces of a small matrix are short, to give a GPU work enough.
2. The lanes of a group take consecutive columns of x, so that a row of x is read at once; slices of the group take the
   entries of a piece by turns.
3. If rows have several pieces, a second kernel adds up their sums in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.kernels.cuda.module import C_TYPES, c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray

FILE = "spmv/columns.cu"
LANE_BYTES = 16
"""Bytes of a row of x that a lane reads at once, if they divide it."""
AT_ONCE = 4
"""Entries that a lane reads at once."""
LEAST, SMALL, MOST = 16, 64, 256
"""Entries of a piece of a matrix of short rows, of a small one of longer rows, and of a large one."""
GROUPS = 1 << 14
"""Pieces that give a GPU enough to do."""
THREADS = 1 << 18
"""Lanes that a GPU runs at once, about; with fewer, slices take the entries of a piece by turns."""
LANES, SLICES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class Pieces:
    """A matrix whose rows are cut into pieces."""

    matrix: CSR
    most: int  # entries of a piece
    starts: Any  # (pieces + 1,): first entry of each; the matrix's offsets if pieces are rows
    places: Any = None  # (pieces,) int32: row of each piece, or -1 - slot; None if pieces are rows
    rows: Any = None  # (cut,) int32: rows of several pieces
    firsts: Any = None  # (cut + 1,) int32: first slot of each

    @property
    def slots(self) -> int:
        """Pieces of rows of several."""
        return 0 if self.rows is None else len(self.starts) - 1 - (self.matrix.nrows - len(self.rows))

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``."""
        return multiply(self, x, out)


def cut(a: CSR) -> Pieces:
    """Cut the rows of a matrix on the GPU into pieces, for which it waits."""
    import cupy

    most = LEAST
    while most < SMALL and most * a.nrows < 4 * a.nnz:
        most *= 2
    while most < MOST and a.nnz > most * GROUPS:
        most *= 2
    if not a.nrows:
        return Pieces(a, most, a.indptr)
    counts = (a.indptr[1:] - a.indptr[:-1] + most - 1).astype(np.int64) // most
    counts = cupy.where(counts > 1, counts, 1)
    ends = cupy.cumsum(counts)
    npieces = int(ends[-1])
    if npieces == a.nrows:
        return Pieces(a, most, a.indptr)
    row = cupy.searchsorted(ends, cupy.arange(npieces), side="right")
    number = cupy.arange(npieces) - (ends - counts)[row]
    end = cupy.full(1, a.nnz, a.indptr.dtype)
    starts = cupy.concatenate([(a.indptr[row] + number * most).astype(a.indptr.dtype), end])
    rows = cupy.flatnonzero(counts > 1)
    firsts = cupy.concatenate([cupy.zeros(1, np.int64), cupy.cumsum(counts[rows])])
    slot = cupy.zeros(a.nrows, np.int64)
    slot[rows] = firsts[:-1]
    places = cupy.where(counts[row] > 1, -1 - (slot[row] + number), row)
    return Pieces(a, most, starts, *(array.astype(np.int32) for array in (places, rows, firsts)))


def shape_of(columns: int, itemsize: int, pieces: int, nnz: int) -> tuple[int, int, int]:
    """Return the lanes, the columns of a lane, and the slices of a group that multiplies a piece.

    `itemsize`: bytes of a number of x.
    """
    count = next(c for c in (4, 2, 1) if columns % c == 0 and c * itemsize <= LANE_BYTES)
    lanes = next((width for width in LANES if width * count >= columns), LANES[-1])
    fits = [
        s for s in SLICES if s * lanes <= LANES[-1] and s * AT_ONCE * pieces <= nnz and s * lanes * pieces <= THREADS
    ]
    return lanes, count, max(fits, default=1)


def shapes(itemsize: int) -> set[tuple[int, int, int]]:
    """Return all that `shape_of` returns for more than a few columns."""
    return {shape_of(columns, itemsize, 1, nnz) for columns in range(5, 2 * LANES[-1] + 1) for nnz in (1, 8, 16, 32)}


def multiply_name(value: str, vector: str, index: str, pointer: str, shape: tuple[int, int, int]) -> str:
    """Return the name expression of a product's kernel; `shape`: as `shape_of` returns it."""
    return f"columns_multiply<{value}, {vector}, {index}, {pointer}, {', '.join(map(str, shape))}>"


def multiply(a: Pieces, x: DeviceArray, out: DeviceArray | None = None) -> Any:
    """Return ``a @ x`` on the GPU for x of shape (ncols, k) in C order, of the dtype of the sums."""
    import cupy

    m, columns = a.matrix, x.shape[1]
    y: Any = cupy.empty((m.nrows, columns), x.dtype) if out is None else out
    npieces = len(a.starts) - 1
    if not npieces or not columns:
        return y
    given: Any = x
    aligned = (given.data.ptr | y.data.ptr) % LANE_BYTES == 0
    shape = shape_of(columns, x.dtype.itemsize if aligned else LANE_BYTES, npieces, m.nnz)
    index, pointer = (C_TYPES[np.dtype(array.dtype)] for array in (m.indices, a.starts))
    name = multiply_name(c_type(np.dtype(m.dtype)), c_type(x.dtype), index, pointer, shape)
    add = f"columns_add<{c_type(x.dtype)}>"
    partial = cupy.empty(a.slots * columns, x.dtype) if a.slots else None
    grid = ceil_div(npieces, 256 // (shape[0] * shape[2])), ceil_div(columns, shape[0] * shape[1])
    kernels = module(FILE, (name, add))
    kernels(name, grid, 256, (
        npieces, columns, a.starts, a.places, m.indices, m.data, x, y, partial
    ), early=True)  # fmt: skip
    if partial is not None:
        kernels(add, (len(a.rows), ceil_div(columns, 32)), 256, (columns, a.rows, a.firsts, partial, y), early=True)
    return y
