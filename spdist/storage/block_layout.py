"""Stored matrices of numbers to blocks and back: what size of blocks suits, what it costs, and how to get there.

A block holds every number inside of it, zeros too. Whether that pays is a matter of bytes: one column index for a block
instead of one for each entry, against the zeros that fill it up.
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
LONGEST_SIDE = 16
"""Of the blocks that `natural_size` looks for."""
SAMPLES = 16
SAMPLE_ENTRIES = 1 << 12
ENTRIES = 1 << 20
"""Entries that are cut into blocks at a time; more where r rows have more."""


@dataclass(frozen=True)
class Cost:
    """What a matrix takes in blocks of one size.

    Attributes
    ----------
    size : (r, s)
    fill : float
        Numbers stored for each entry, 1 where blocks are full.
    bytes_per_entry, without : float
        Bytes for each entry of the matrix, in blocks and not.
    """

    size: BlockSize
    fill: float
    bytes_per_entry: float
    without: float

    @property
    def pays(self) -> bool:
        """Whether blocks take fewer bytes."""
        return self.bytes_per_entry < self.without


def cut_rows(m: CSR, size: BlockSize) -> BSR:
    """Return a canonical matrix of numbers in blocks; its shape is one of whole blocks."""
    (r, s), (nrows, ncols) = size, (m.nrows // size[0], m.ncols // size[1])
    rows = np.repeat(np.arange(m.nrows), np.diff(m.indptr))
    keys, block = np.unique(rows // r * ncols + m.indices // s, return_inverse=True)
    data = np.zeros((len(keys), r, s), m.dtype)
    data[block, rows % r, m.indices % s] = m.data
    indptr = np.searchsorted(keys, np.arange(nrows + 1) * ncols)
    return BSR(indptr.astype(np.int64), (keys % max(ncols, 1)).astype(index_dtype(ncols)), data, m.shape)


def costs(matrix: StoredMatrix, sizes: list[BlockSize] | None = None) -> list[Cost]:
    """Return what blocks of some sizes would cost, from ranges of rows all over the matrix.

    Parameters
    ----------
    matrix : StoredMatrix
        Of numbers.
    sizes : list of (r, s), optional
        By default all that divide the matrix, up to 16 x 16, but for 1 x 1.
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
    """Yield ranges of rows, each of a block row at least, and the rows and columns of their entries."""
    for start in sorted({int(at) for at in np.linspace(0, max(matrix.nrows - 2 * LONGEST_SIDE, 0), SAMPLES)}):
        most = min(start + SAMPLE_ENTRIES, matrix.nrows)
        offsets = matrix.read_indptr(start, most)
        stop = start + int(np.searchsorted(offsets, offsets[0] + SAMPLE_ENTRIES))
        part = matrix.rows_indices(start, min(max(stop, start + 2 * LONGEST_SIDE), most))
        rows = start + np.repeat(np.arange(part.nrows), np.diff(part.indptr))
        yield start, start + part.nrows, rows, part.indices.astype(np.int64)


def natural_size(matrix: StoredMatrix, name: str) -> BlockSize:
    """Return the size of blocks in which a matrix, which people know by `name`, takes fewest bytes.

    Raises
    ------
    InputError
        If it takes more in any than without; says what the best would cost.
    """
    found = costs(matrix)
    if not found:
        raise InputError(f"{name}: it has no entries, or no blocks of up to {LONGEST_SIDE} rows and columns divide it")
    best = min(found, key=lambda cost: cost.bytes_per_entry)
    _check(best, name)
    return best.size


def _check(cost: Cost, name: str) -> None:
    """Refuse blocks that do not pay."""
    if not cost.pays:
        raise InputError(
            f"{name}: blocks of {cost.size[0]} x {cost.size[1]} would hold {cost.fill:.2f} numbers for each entry and "
            f"take {cost.bytes_per_entry:.1f} bytes for it instead of {cost.without:.1f}: leave --block-size out"
        )


def store_blocks(matrix: StoredMatrix, url: str, size: BlockSize, facts: dict[str, Any], name: str) -> None:
    """Write a stored matrix of numbers, which people know by `name`, again in blocks, to `url`.

    Raises
    ------
    InputError
        If blocks of this size do not divide it, or would take more bytes than it does without; says how many.
    """
    r, s = size
    if matrix.nrows % r or matrix.ncols % s:
        raise InputError(
            f"{name}: {matrix.nrows:,} x {matrix.ncols:,} cannot be cut into blocks of {r} x {s}: choose sizes that "
            f"divide it"
        )
    writer = MatrixWriter(url, matrix.ncols // s, block_dtype(matrix.dtype, size), facts)
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


# -- back --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Numbers:
    """An array of a block matrix as if it were one of numbers; it is read like a `ChunkedArray`."""

    blocks: StoredMatrix
    name: str
    length: int
    chunk: int
    dtype: np.dtype[Any]

    @cached_property
    def _starts(self) -> Int64Array:
        """Where each block row starts, in numbers."""
        r, s = self.blocks.blocksize or (1, 1)
        return self.blocks.read_indptr(0, self.blocks.nrows) * (r * s)

    def read(self, first: int, last: int) -> ValueArray:
        """Return elements ``[first:last)``; reads the block rows that hold them whole."""
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
    """Return a stored block matrix as one of numbers, for what looks at single entries; any other as it is.

    It holds the offsets of block rows, 8 bytes each, and reads whole block rows.
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
