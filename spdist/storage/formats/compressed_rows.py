"""Matrices whose file stores them as arrays that are read once, in order: by rows, by columns, or as coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.checks import check_structure, is_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype
from spdist.storage.external_sort import Entries, canonical, sort_entries
from spdist.storage.formats.source import Import

ENTRIES = 1 << 20
"""Entries of a file read at a time."""


class Stream(Protocol):
    """An array that is read in order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements, in the order in which they are stored."""
        ...


class Arrays:
    """The three arrays of a matrix in compressed form."""

    def __init__(self, indptr: Stream, indices: Stream, data: Stream, path: str) -> None:
        self.indptr, self.indices, self.data, self.path = indptr, indices, data, path

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return self.indices.shape[0]

    def check(self, shape: tuple[int, int]) -> None:
        """Check that the arrays have the lengths that a matrix of this shape needs."""
        shapes = self.indptr.shape, self.indices.shape, self.data.shape
        if shapes[0] != (shape[0] + 1,) or len(shapes[1]) != 1 or shapes[2][:1] != shapes[1]:
            raise MatrixError(
                f"{self.path}: shape {shape} does not fit arrays of {_lengths(shapes[0])} offsets, "
                f"{_lengths(shapes[1])} indices and {_lengths(shapes[2])} values"
            )

    def pieces(self, shape: tuple[int, int]) -> Iterator[tuple[int, CSR]]:
        """Yield the first row and the entries of each row block; a row of many entries comes in several pieces."""
        self.check(shape)
        width = int(np.prod(self.data.shape[1:]))
        for at, offsets in self._offsets(shape[0]):
            for start, local in _cut(offsets, max(ENTRIES // width, 1)):
                count = int(local[-1])
                columns, values = self.indices.read(count), self.data.read(count * width)
                block = CSR(local, columns, columns, (len(local) - 1, shape[1]))
                check_structure(block, self.path, at + start)
                columns = columns.astype(index_dtype(shape[1]), copy=False)
                yield at + start, CSR(local, columns, values, block.shape)

    def _offsets(self, nrows: int) -> Iterator[tuple[int, Int64Array]]:
        """Yield the first of some rows, and their offsets, which rise from 0 to the number of entries."""
        last = self.indptr.read(1).astype(np.int64)
        if last[0] != 0:
            raise MatrixError(f"{self.path}: indptr starts at {last[0]:,}, not at 0")
        for start in range(0, nrows, ENTRIES):
            offsets = np.concatenate([last, self.indptr.read(min(ENTRIES, nrows - start)).astype(np.int64)])
            outside = offsets.min() < 0 or offsets.max() > self.nnz  # differences of such offsets could overflow
            if outside or np.any(np.diff(offsets) < 0):
                raise MatrixError(f"{self.path}: indptr does not rise from 0 to {self.nnz:,} after row {start:,}")
            last = offsets[-1:]
            yield start, offsets
        if last[0] != self.nnz:
            raise MatrixError(f"{self.path}: indptr ends at {last[0]:,}, but there are {self.nnz:,} entries")


def _lengths(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{each:,}" for each in shape) or "no list of"


def _cut(offsets: Int64Array, entries: int) -> Iterator[tuple[int, Int64Array]]:
    """Cut rows into blocks of at most `entries` entries: yield the first row, and offsets that start at 0.

    A row of more entries is cut itself: it comes alone, several times.
    """
    start, end = 0, len(offsets) - 1
    while start < end:
        stop = int(np.searchsorted(offsets, offsets[start] + entries, side="right")) - 1
        if stop > start:
            yield start, offsets[start : stop + 1] - offsets[start]
            start = stop
            continue
        length = int(offsets[start + 1] - offsets[start])
        for done in range(0, length, entries):
            yield start, np.array([0, min(entries, length - done)], np.int64)
        start += 1


def _whole_rows(pieces: Iterator[tuple[int, CSR]]) -> Iterator[CSR]:
    """Join the pieces of long rows; combine duplicates on the way, so that many in one position take little memory."""
    for _, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        parts: list[CSR] = []
        held, limit = 0, 4 * ENTRIES
        for _, piece in group:
            parts.append(piece)
            held += piece.nnz
            if held > limit:
                parts = [_joined(parts)]
                held = parts[0].nnz
                limit = max(limit, 2 * held)
        row = parts[0] if len(parts) == 1 else _joined(parts)
        yield row if is_canonical(row) else canonical(row)


def _joined(parts: list[CSR]) -> CSR:
    """Return one canonical row made of pieces of it."""
    columns = np.concatenate([part.indices for part in parts])
    values = np.concatenate([part.data for part in parts])
    entries = sort_entries(Entries(np.zeros(len(columns), np.int64), columns, values), parts[0].ncols)
    return CSR(np.array([0, len(entries.columns)]), entries.columns, entries.values, parts[0].shape)


def import_compressed(job: Import, shape: tuple[int, int], arrays: Arrays, *, by_columns: bool = False) -> None:
    """Write a matrix that its file stores by rows or by columns; columns are sorted into rows."""
    if not by_columns:
        job.write(_whole_rows(arrays.pieces(shape)), shape[1], arrays.data.dtype, arrays.nnz)
        return

    def batches() -> Iterator[Entries]:
        for first, block in arrays.pieces((shape[1], shape[0])):
            columns = np.repeat(np.arange(first, first + block.nrows), np.diff(block.indptr))
            yield Entries(block.indices, columns, block.data)

    job.sort(batches(), shape, arrays.data.dtype, arrays.nnz)


def import_coordinates(
    job: Import, shape: tuple[int, int], rows: Stream, columns: Stream, data: Stream, path: str
) -> None:
    """Sort the entries of a matrix that its file stores as coordinates, and write it."""
    job.sort(_coordinate_batches(rows, columns, data, shape, path), shape, data.dtype, data.shape[0])


def _coordinate_batches(
    rows: Stream, columns: Stream, data: Stream, shape: tuple[int, int], path: str
) -> Iterator[Entries]:
    """Yield entries; refuse one outside the shape."""
    nnz = data.shape[0]
    if rows.shape != (nnz,) or columns.shape != (nnz,):
        raise MatrixError(f"{path}: {rows.shape} rows, {columns.shape} columns and {nnz:,} values do not fit together")
    for start in range(0, nnz, ENTRIES):
        count = min(ENTRIES, nnz - start)
        batch = Entries(rows.read(count), columns.read(count), data.read(count))
        for positions, limit, what in ((batch.rows, shape[0], "row"), (batch.columns, shape[1], "column")):
            if int(positions.min()) < 0 or int(positions.max()) >= limit:
                at = int(np.argmax((positions < 0) | (positions >= limit)))
                raise MatrixError(
                    f"{path}: {what} {int(positions[at]):,} of entry {start + at:,} is outside [0, {limit:,})"
                )
        yield batch
