"""Convert stored matrices of numbers to blocks and back; choose the block size with the fewest bytes.

A block stores all of its numbers, zeros included. Blocks save bytes if one column index for each block instead of one
for each entry outweighs the zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from spdist.errors import InputError
from spdist.matrices.bsr import BSR, entries, from_rows
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, block_dtype, blocksize, index_dtype, number_dtype
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix
from spdist.storage.writer import MatrixWriter

BlockSize = tuple[int, int]
"""Rows and columns of a block."""

LONGEST_SIDE = 16
"""Most rows, and most columns, of the blocks that `natural_size` tries."""

SAMPLES = 16
"""Ranges of rows from which `costs` estimates."""

SAMPLE_ENTRIES = 1 << 12
"""Entries of one such range."""

ENTRIES = 1 << 20
"""Entries that are cut into blocks at a time; more if one block row has more."""


@dataclass(frozen=True)
class Cost:
    """The bytes that a matrix takes in blocks of one size."""

    size: BlockSize  # (r, s)
    fill: float  # numbers stored for each entry; 1 if blocks are full
    bytes_per_entry: float  # bytes for each entry of the matrix if it is stored in blocks
    without: float  # bytes for each entry if it is stored without blocks

    @property
    def pays(self) -> bool:
        """Whether blocks take fewer bytes."""
        return self.bytes_per_entry < self.without


def cut_rows(m: CSR, size: BlockSize) -> BSR:
    """Return a canonical matrix of numbers in blocks.

    `m`: its rows and columns are multiples of the block's.
    Block rows are sorted, and each block has at least one entry of `m`.

    Examples
    --------
    >>> m = CSR(np.array([0, 1, 2]), np.array([2, 1]), np.array([5, 6]), (2, 4))
    >>> cut_rows(m, (2, 2)).data.tolist()
    [[[0, 0], [0, 6]], [[5, 0], [0, 0]]]
    """
    (r, s), (nrows, ncols) = size, (m.nrows // size[0], m.ncols // size[1])
    rows = np.repeat(np.arange(m.nrows), np.diff(m.indptr))
    keys, block = np.unique(rows // r * ncols + m.indices // s, return_inverse=True)
    data = np.zeros((len(keys), r, s), m.dtype)
    data[block, rows % r, m.indices % s] = m.data
    indptr = np.searchsorted(keys, np.arange(nrows + 1) * ncols)
    return BSR(indptr.astype(np.int64), (keys % max(ncols, 1)).astype(index_dtype(ncols)), data, m.shape)


def costs(matrix: StoredMatrix, sizes: list[BlockSize] | None = None) -> list[Cost]:
    """Estimate the bytes that blocks of some sizes would take, from ranges of rows all over the matrix.

    `matrix`: of numbers.
    `sizes`: by default all sizes that divide the matrix, up to 16 x 16, except 1 x 1.
    Sizes are left out if no sampled entry lies in a whole block.
    """
    if sizes is None:
        sides = [[n for n in range(1, LONGEST_SIDE + 1) if length % n == 0] for length in matrix.shape]
        sizes = [(r, s) for r in sides[0] for s in sides[1] if r * s > 1]
    value, index = matrix.dtype.itemsize, index_dtype(matrix.ncols).itemsize
    samples = list(_samples(matrix))
    found = []
    for r, s in sizes:
        numbers = blocks = 0
        for start, stop, rows, columns in samples:
            inside = (rows >= -(-start // r) * r) & (rows < stop // r * r)
            numbers += int(inside.sum())
            blocks += len(np.unique(rows[inside] // r * (matrix.ncols // s + 1) + columns[inside] // s))
        if numbers:
            fill = blocks * r * s / numbers
            found.append(Cost((r, s), fill, fill * value + index * blocks / numbers, value + index))
    return found


def _samples(matrix: StoredMatrix) -> Iterator[tuple[int, int, Int64Array, Int64Array]]:
    """Yield ranges of rows, of at least one block row each, and the rows and columns of their entries."""
    for start in sorted({int(at) for at in np.linspace(0, max(matrix.nrows - 2 * LONGEST_SIDE, 0), SAMPLES)}):
        most = min(start + SAMPLE_ENTRIES, matrix.nrows)
        offsets = matrix.read_indptr(start, most)
        stop = start + int(np.searchsorted(offsets, offsets[0] + SAMPLE_ENTRIES))
        part = matrix.rows_indices(start, min(max(stop, start + 2 * LONGEST_SIDE), most))
        rows = start + np.repeat(np.arange(part.nrows), np.diff(part.indptr))
        yield start, start + part.nrows, rows, part.indices.astype(np.int64)


def natural_size(matrix: StoredMatrix, name: str) -> BlockSize:
    """Return the block size in which a matrix takes fewest bytes.

    Raises `InputError` if the matrix takes more bytes in blocks of any size than without; states the bytes of the best
    size.
    """
    found = costs(matrix)
    if not found:
        raise InputError(f"{name}: it has no entries, or no blocks of up to {LONGEST_SIDE} rows and columns divide it")
    best = min(found, key=lambda cost: cost.bytes_per_entry)
    _check(best, name)
    return best.size


def _check(cost: Cost, name: str) -> None:
    """Refuse blocks that take more bytes than they save."""
    if not cost.pays:
        raise InputError(
            f"{name}: blocks of {cost.size[0]} x {cost.size[1]} would hold {cost.fill:.2f} numbers for each entry and "
            f"take {cost.bytes_per_entry:.1f} bytes for it instead of {cost.without:.1f}: leave --block-size out"
        )


def store_blocks(matrix: StoredMatrix, url: str, size: BlockSize, facts: dict[str, Any], name: str) -> None:
    """Write a stored matrix of numbers as blocks.

    `url`: target; must not exist.
    Raises `InputError` if blocks of this size do not divide the matrix, or would take more bytes than none; states the
    bytes.
    """
    r, s = size
    if matrix.nrows % r or matrix.ncols % s:
        raise InputError(
            f"{name}: {matrix.nrows:,} x {matrix.ncols:,} cannot be cut into blocks of {r} x {s}: choose sizes that "
            f"divide it"
        )
    writer = MatrixWriter(url, matrix.ncols // s, block_dtype(matrix.dtype, size), facts, matrix.names)
    for start, stop in _ranges(matrix, r):
        writer.append(cut_rows(matrix.rows(start, stop), size).rows())
    if matrix.nnz:
        index, value = index_dtype(matrix.ncols).itemsize, matrix.dtype.itemsize
        each = writer.nnz / matrix.nnz
        _check(Cost(size, each * r * s, each * (r * s * value + index), value + index), name)
    writer.close()


def _ranges(matrix: StoredMatrix, r: int) -> Iterator[tuple[int, int]]:
    """Cut rows into ranges of whole block rows, of about `ENTRIES` entries."""
    done = 0
    for _, stop, _ in matrix.row_blocks(ENTRIES):
        end = stop // r * r
        if end > done:
            yield done, end
            done = end


# -- from blocks to numbers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Numbers:
    """An array of a block matrix, read like the `ChunkedArray` of a matrix of numbers."""

    blocks: StoredMatrix
    name: str
    length: int
    chunk: int
    dtype: np.dtype[Any]

    @cached_property
    def _starts(self) -> Int64Array:
        """Number of entries before each block row."""
        r, s = self.blocks.blocksize or (1, 1)
        return self.blocks.read_indptr(0, self.blocks.nrows) * (r * s)

    def read(self, first: int, last: int) -> ValueArray:
        """Return elements ``[first:last)``; reads all of the block rows that hold them."""
        if first >= last:
            return np.empty(0, self.dtype)
        if self.name == "indptr":
            return self._offsets(first, last)
        low = int(np.searchsorted(self._starts, first, side="right")) - 1
        high = int(np.searchsorted(self._starts, last, side="left"))
        part = self.blocks.rows(low, high) if self.name == "data" else self._pattern(low, high)
        found = entries(from_rows(part))
        begin = int(self._starts[low])
        return (found.data if self.name == "data" else found.indices)[first - begin : last - begin]

    def _pattern(self, low: int, high: int) -> CSR:
        part = self.blocks.rows_indices(low, high)
        values = np.zeros(part.nnz, block_dtype(np.dtype(np.bool_), self.blocks.blocksize or (1, 1)))
        return CSR(part.indptr, part.indices, values, part.shape)

    def _offsets(self, first: int, last: int) -> Int64Array:
        r, s = self.blocks.blocksize or (1, 1)
        low, high = first // r, min((last - 1) // r + 1, self.blocks.nrows)
        offsets = self.blocks.read_indptr(low, high)
        rows = np.arange(first, last)
        block, inner = rows // r - low, rows % r
        following = offsets[np.minimum(block + 1, len(offsets) - 1)]
        return cast(Int64Array, (offsets[block] * r + (following - offsets[block]) * inner) * s)


def as_numbers(matrix: StoredMatrix) -> StoredMatrix:
    """Return a view of a stored block matrix as a matrix of numbers, zeros inside blocks included.

    `matrix`: returned unchanged if it stores numbers.
    The view keeps the offsets of block rows in memory, 8 bytes each, and reads whole block rows.
    """
    size = blocksize(matrix.dtype)
    if size is None:
        return matrix
    (r, s), shape = size, matrix.full_shape
    length, chunk = matrix.nnz * r * s, matrix.indices.chunk * r * s
    arrays = (
        _Numbers(matrix, "indptr", shape[0] + 1, matrix.indptr.chunk * r, np.dtype(np.int64)),
        _Numbers(matrix, "indices", length, chunk, index_dtype(shape[1])),
        _Numbers(matrix, "data", length, chunk, number_dtype(matrix.dtype)),
    )
    return StoredMatrix(
        matrix.url, shape, *cast("tuple[ChunkedArray, ChunkedArray, ChunkedArray]", arrays), matrix.facts
    )
