"""Some rows of a stored matrix as a matrix of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from spdist.storage.checksums import digest_of
from spdist.storage.matrix import StoredMatrix
from spdist.storage.parts.arrays import Range

if TYPE_CHECKING:
    from spdist.storage.chunked_array import ChunkedArray


def part_rows(m: StoredMatrix, number: int, count: int) -> tuple[int, int]:
    """Return the range of rows that is part `number`, from 1, of `count` parts with about as many entries each."""
    return _cut(m, number - 1, count), _cut(m, number, count)


def _cut(m: StoredMatrix, k: int, count: int) -> int:
    """Return the first row behind k / count of the entries; reads a few Zarr chunks of row offsets."""
    if k in (0, count):
        return m.nrows if k else 0
    low, high, wanted = 0, m.nrows, m.nnz * k // count
    while high - low > m.indptr.chunk:
        middle = (low + high) // 2
        low, high = (middle, high) if m.read_indptr(middle, middle)[0] < wanted else (low, middle)
    return low + int(np.searchsorted(m.read_indptr(low, high), wanted))


def rows_of(m: StoredMatrix, start: int, stop: int) -> StoredMatrix:
    """Return a view of rows ``[start:stop)`` of a canonical matrix, without names; its fingerprint is of its own."""
    first, last = (int(m.read_indptr(row, row)[0]) for row in (start, stop))
    known = digest_of(f"{m.fingerprint()} rows {start}-{stop}".encode())
    arrays = (
        Range(m.indptr, start, stop - start + 1, first),
        Range(m.indices, first, last - first),
        Range(m.data, first, last - first),
    )
    return StoredMatrix(
        m.url, (stop - start, m.ncols), *cast("tuple[ChunkedArray, ChunkedArray, ChunkedArray]", arrays), {}, known
    )
