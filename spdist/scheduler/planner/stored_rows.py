"""Row lengths of stored matrices, read in bounded memory, and checks of the data read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import Diagonal

Lengths = npt.NDArray[Any]
"""Entries of each row: uint32, or int64 if a row has 2^32 entries or more."""

READ_ROWS = 1 << 17
"""Row lengths that are summed at once."""


def row_lengths(matrix: StoredMatrix) -> Lengths:
    """Count the entries of each row.

    `matrix`: its offsets are read a few Zarr chunks at a time.
    Returns (nrows,) uint32 or int64: int64 only if a row has 2^32 entries or more.
    Raises `MatrixError` if the offsets do not rise from 0 to the number of entries.
    """
    lengths = np.empty(matrix.nrows, np.uint32)
    for start, offsets in _offsets(matrix):
        found = np.diff(offsets)
        if found.max() > np.iinfo(lengths.dtype).max:
            lengths = lengths.astype(np.int64)
        lengths[start : start + len(found)] = found
    return lengths


def mask_lengths(mask: StoredMatrix | Diagonal | None) -> Lengths:
    """Return the entries of each row of a mask; (0,) without one.

    Examples
    --------
    >>> len(mask_lengths(None))
    0
    """
    if mask is None:
        return np.empty(0, np.uint32)
    return mask.lengths() if isinstance(mask, Diagonal) else row_lengths(mask)


def even_rows(matrix: StoredMatrix, parts: int, lengths: Lengths | None = None) -> list[int]:
    """Cut the rows of a matrix into parts of about equally many entries.

    `parts`: there are fewer parts if rows are longer than a part.
    `lengths`: (nrows,) integers, optional: the row lengths, if they are known. Otherwise offsets are read.
    Returns rows at which parts begin, from 0, and the number of rows.
    Raises `MatrixError` if offsets are read and do not rise from 0 to the number of entries.
    """
    first, wanted = np.zeros(parts, np.int64), np.arange(parts) * matrix.nnz // parts
    for start, offsets in _offsets(matrix) if lengths is None else _summed(lengths):
        inside = (offsets[0] < wanted) & (wanted <= offsets[-1])
        first[inside] = start + np.searchsorted(offsets, wanted[inside])
    return [int(row) for row in np.unique(np.append(first, matrix.nrows))]


def _summed(lengths: Lengths) -> Iterator[tuple[int, Int64Array]]:
    """Yield offsets by ranges of rows, with the first row, from row lengths."""
    end = 0
    for start in range(0, len(lengths), READ_ROWS):
        offsets = np.cumsum(np.append(end, lengths[start : start + READ_ROWS]), dtype=np.int64)
        end = int(offsets[-1])
        yield start, offsets


def _offsets(matrix: StoredMatrix) -> Iterator[tuple[int, Int64Array]]:
    """Yield offsets by ranges of rows, with the first row; refuse offsets that do not rise to the number of entries."""
    step, end = 4 * matrix.indptr.chunk, 0
    for start in range(0, matrix.nrows, step):
        offsets = matrix.read_indptr(start, min(start + step, matrix.nrows))
        if offsets[0] != end or np.any(offsets[1:] < offsets[:-1]):
            raise _bad_offsets(matrix)
        end = int(offsets[-1])
        yield start, offsets
    if end != matrix.nnz:
        raise _bad_offsets(matrix)


def check_end_offsets(matrix: StoredMatrix) -> None:
    """Refuse a matrix whose first offset is not 0 or whose last offset is not the number of entries.

    A scan that reads no more than its rows would not notice the entries that such offsets leave out.
    """
    ends = [int(matrix.read_indptr(row, row)[0]) for row in (0, matrix.nrows)]
    if ends != [0, matrix.nnz]:
        raise _bad_offsets(matrix)


def _bad_offsets(matrix: StoredMatrix) -> MatrixError:
    return MatrixError(
        f"{matrix.url}: indptr does not rise from 0 to the {matrix.nnz:,} entries there are: restore it from a copy or "
        f"write the matrix again"
    )


def check_rows(a: StoredMatrix, rows: CSR, start: int, *, canonical: bool) -> None:
    """Refuse rows whose offsets or columns are out of range.

    `a`: the matrix that the error names.
    `start`: number of the first row.
    `canonical`: refuse rows that are not sorted, too.
    """
    falls = len(rows.indices) != rows.indptr[-1] or np.any(rows.indptr[1:] < rows.indptr[:-1])
    if canonical or falls or (rows.nnz and (rows.indices.min() < 0 or rows.indices.max() >= a.ncols)):
        check_canonical(rows, a.url, start)
