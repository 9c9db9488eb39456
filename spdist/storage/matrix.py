"""Matrices in Zarr: the only file that imports zarr.

A matrix is one Zarr v3 group in AnnData's ``csr_matrix`` encoding: one-dimensional arrays `indptr`, `indices`, `data`
and the attributes ``encoding-type``, ``encoding-version`` and ``shape``. Facts of ours (state, provenance) lie under
the one attribute ``spdist``. A block matrix is a group of SciPy's BSR arrays in an encoding of ours, ``bsr_matrix``:
`data` has three dimensions, ``block-size`` is an attribute, ``shape`` counts rows and columns. In memory its values are
blocks (`dtypes.block_dtype`), and rows, columns and entries are block rows, block columns and blocks. Three rules keep
wrong bytes out of a product:

* Every Zarr chunk ends in Zarr's own crc32c codec, and is always read **whole**: a pipeline that decodes part of a
  chunk does not check it. `ChunkedArray` therefore sees an array as if its length were a multiple of the chunk length.
* A missing chunk reads as zeros in Zarr, so `fingerprint` looks for every chunk before work starts and `read` again.
* The arrays' metadata and the encoding attributes are written last: an unfinished matrix is no matrix to any reader.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, blocksize, check_dtype, index_dtype, number_dtype
from spdist.storage import groups, locations
from spdist.storage.chunked_array import ChunkedArray, from_zarr
from spdist.storage.groups import ARRAYS

READ_CHUNKS = 2
"""Zarr chunks that one read of scattered rows decodes at a time."""

Allocate = Callable[[int, np.dtype[Any]], ValueArray]
"""Takes a number of elements and their dtype, returns an array."""

Held = tuple[int, CSR]
"""Rows in memory, and the place of their first entry in the stored matrix."""


@dataclass(frozen=True)
class StoredMatrix:
    """A finished matrix in Zarr; opens its arrays where it is used, so it travels to workers as a few hundred bytes.

    Of a block matrix, shape, rows, columns and entries are in blocks; `full_shape` is not.
    """

    url: str
    shape: tuple[int, int]
    indptr: ChunkedArray
    indices: ChunkedArray
    data: ChunkedArray
    facts: dict[str, Any] = field(compare=False)

    def __repr__(self) -> str:
        size = f"{self.full_shape[0]:,} x {self.full_shape[1]:,}, {number_dtype(self.dtype)}"
        of = self.blocksize
        stored = f"{self.nnz:,} entries" if of is None else f"{self.nnz:,} blocks of {of[0]} x {of[1]}"
        return f"<StoredMatrix {size}: {stored} at {self.url}>"

    @property
    def nrows(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def ncols(self) -> int:
        """Number of columns."""
        return self.shape[1]

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return self.indices.length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def blocksize(self) -> tuple[int, int] | None:
        """Rows and columns of its blocks; None where entries are numbers."""
        return blocksize(self.dtype)

    @property
    def full_shape(self) -> tuple[int, int]:
        """Rows and columns, also of a block matrix."""
        r, s = self.blocksize or (1, 1)
        return self.nrows * r, self.ncols * s

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one entry in memory: its column and its value."""
        return index_dtype(self.ncols).itemsize + self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in memory."""
        return self.nnz * self.entry_nbytes + 8 * (self.nrows + 1)

    @property
    def ours(self) -> bool:
        """Whether spdist wrote it, canonical; what others wrote is checked before it is multiplied."""
        return bool(self.facts.get("canonical"))

    def read_indptr(self, start: int, stop: int) -> Int64Array:
        """Return the offsets of rows `start` to `stop`, both included: ``stop - start + 1`` of them."""
        return self.indptr.read(start, stop + 1).astype(np.int64, copy=False)

    def read_indices(self, first: int, last: int) -> ValueArray:
        """Return the columns of entries ``[first:last)``."""
        found = self.indices.read(first, last)
        dtype = index_dtype(self.ncols)
        if found.dtype != dtype and len(found) and (int(found.min()) < 0 or int(found.max()) >= self.ncols):
            raise MatrixError(
                f"{self.url}: entries {first:,} to {last:,} hold columns {int(found.min()):,} to {int(found.max()):,}, "
                f"outside [0, {self.ncols:,})"
            )
        return found.astype(dtype, copy=False)

    def rows(self, start: int, stop: int, allocate: Allocate | None = None) -> CSR:
        """Read rows ``[start:stop)``, or as many of them as there are; to memory that is allocated so, if it is given.

        Raises
        ------
        InputError
            If `start` is negative, or above `stop`.
        """
        start, stop = self._range(start, stop)
        offsets = self.read_indptr(start, stop)
        first, last = int(offsets[0]), int(offsets[-1])
        if allocate is None:
            values = self.data.read(first, last)
            return CSR(offsets - first, self.read_indices(first, last), values, (stop - start, self.ncols))
        return CSR(offsets - first, *self.entries(first, last, (), allocate), (stop - start, self.ncols))

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range of rows, cut to those that there are."""
        if not 0 <= start <= stop:
            raise InputError(f"{self.url}: rows {start:,} to {stop:,} are no range of its {self.nrows:,} rows")
        return min(start, self.nrows), min(stop, self.nrows)

    def rows_indices(self, start: int, stop: int) -> CSR:
        """Read the pattern of rows ``[start:stop)``; `data` of the result is its `indices`."""
        start, stop = self._range(start, stop)
        offsets = self.read_indptr(start, stop)
        indices = self.read_indices(int(offsets[0]), int(offsets[-1]))
        return CSR(offsets - offsets[0], indices, indices, (stop - start, self.ncols))

    def entries(
        self, first: int, last: int, held: Sequence[Held] = (), allocate: Allocate = np.empty
    ) -> tuple[ValueArray, ValueArray]:
        """Return columns and values of entries ``[first:last)``; those that are held are copied, the rest is read."""
        indices, data = allocate(last - first, index_dtype(self.ncols)), allocate(last - first, self.dtype)
        at = first
        for place, rows in sorted(held, key=lambda one: one[0]):
            low, high = max(at, place), min(last, place + rows.nnz)
            if low < high:
                self.read_entries(indices, data, first, at, low)
                indices[low - first : high - first] = rows.indices[low - place : high - place]
                data[low - first : high - first] = rows.data[low - place : high - place]
                at = high
        self.read_entries(indices, data, first, at, last)
        return indices, data

    def read_entries(self, indices: ValueArray, data: ValueArray, origin: int, first: int, last: int) -> None:
        """Read entries ``[first:last)`` to where they belong, `origin` being the entry that comes first."""
        part = slice(first - origin, last - origin)
        self.data.read_into(data[part], first)
        if indices.dtype == self.indices.dtype:
            self.indices.read_into(indices[part], first)
            return
        step = 2 * READ_CHUNKS * self.indices.chunk
        while first < last:
            stop = min(last, first - first % step + step)
            indices[first - origin : stop - origin] = self.read_indices(first, stop)
            first = stop

    def take(self, rows: Int64Array, *, values: bool = True) -> CSR:
        """Read the given rows, reading only the Zarr chunks that hold them.

        Parameters
        ----------
        rows : (n,) int64
            Rising, no duplicates.
        values : bool
            Without, `data` of the result is its `indices`, and no values are read.

        Returns
        -------
        CSR
            Of shape ``(n, ncols)``.
        """
        starts, stops = self.offsets_of(rows)
        indptr = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
        indices = np.empty(int(indptr[-1]), index_dtype(self.ncols))
        data = np.empty(len(indices), self.dtype) if values else indices
        for i, j in _runs(starts // (READ_CHUNKS * self.indices.chunk)):
            first, last = int(starts[i]), int(stops[j - 1])
            part = slice(int(indptr[i]), int(indptr[j]))
            pairs = ((self.indices, indices), (self.data, data))[: 1 + values]
            if part.stop - part.start == last - first:
                for array, out in pairs:
                    out[part] = array.read(first, last)
                continue
            shift = np.repeat(starts[i:j] - first - indptr[i:j] + indptr[i], stops[i:j] - starts[i:j])
            shift += np.arange(len(shift))  # places of the wanted entries in what is read
            for array, out in pairs:
                np.take(array.read(first, last).astype(out.dtype, copy=False), shift, out=out[part], mode="clip")
        return CSR(indptr, indices, data, (len(rows), self.ncols))

    def offsets_of(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where each of some rising rows starts and stops; each Zarr chunk that holds them is read once."""
        starts, stops = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for i, j in _runs(rows // (READ_CHUNKS * self.indptr.chunk)):
            low = int(rows[i])
            offsets = self.read_indptr(low, int(rows[j - 1]) + 1)
            starts[i:j], stops[i:j] = offsets[rows[i:j] - low], offsets[rows[i:j] - low + 1]
        return starts, stops

    def row_blocks(
        self, entries: int, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, int, Int64Array]]:
        """Cut rows ``[first:last)``, all by default, into blocks of about `entries` entries, streaming.

        Of no fewer than a Zarr chunk has, which would be decoded again for each.

        Yields
        ------
        start, stop, offsets
            Rows ``[start:stop)`` and their ``stop - start + 1`` offsets.
        """
        last, entries = self.nrows if last is None else last, max(entries, self.indices.chunk)
        for at in range(first, last, self.indptr.chunk):
            end = min(at + self.indptr.chunk, last)
            offsets = self.read_indptr(at, end)
            start = at
            while start < end:
                limit = offsets[start - at] + entries
                stop = at + int(np.searchsorted(offsets, limit, side="right")) - 1
                stop = min(max(stop, start + 1), end)
                yield start, stop, offsets[start - at : stop - at + 1]
                start = stop

    def check(self) -> None:
        """Check structure and canonical form of the whole matrix, streaming.

        Raises
        ------
        MatrixError
            Naming the row.
        """
        end = 0
        for start, stop, offsets in self.row_blocks(4 * self.indices.chunk):
            first, last = int(offsets[0]), int(offsets[-1])
            if first != end or np.any(np.diff(offsets) < 0) or last > self.nnz:
                raise MatrixError(f"{self.url}: indptr does not rise from 0 to {self.nnz:,} in rows {start:,}-{stop:,}")
            end = last
            indices = self.read_indices(first, last)
            block = CSR(offsets - first, indices, indices, (stop - start, self.ncols))
            check_canonical(block, self.url, start)
        if end != self.nnz:
            raise MatrixError(f"{self.url}: indptr ends at {end:,}, but there are {self.nnz:,} entries")

    def fingerprint(self) -> str:
        """Return a digest of the content; also finds every Zarr chunk that is missing.

        Made of the chunks' stored checksums, so it costs one small read a chunk; a matrix without checksums is read
        whole.
        """
        kind = self.dtype.str if blocksize(self.dtype) is None else str(self.dtype)
        digest = hashlib.blake2b(repr((self.shape, kind)).encode(), digest_size=16)
        for array in (self.indptr, self.indices, self.data):
            for checksum in array.checksums():
                digest.update(checksum)
        return digest.hexdigest()


def _runs(keys: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield the ranges over which `keys` stays the same."""
    cuts = np.flatnonzero(np.diff(keys)) + 1
    yield from itertools.pairwise([0, *cuts.tolist(), len(keys)] if len(keys) else [])


def refuse_blocks(what: str, *matrices: Any) -> None:
    """Refuse matrices that are stored in blocks where entries are asked for.

    Raises
    ------
    InputError
        Names the first, and its blocks.
    """
    for m in matrices:
        if isinstance(m, StoredMatrix) and m.blocksize is not None:
            rows, columns = m.blocksize
            raise InputError(
                f"{what} are for matrices of entries, but {m.url} is stored in blocks of {rows}x{columns}: store it by "
                f"entries, as `spdist export` and `spdist import` without --block-size do"
            )


def open_matrix(url: str | Path) -> StoredMatrix:
    """Open the matrix at `url`, a path or an fsspec URL.

    Raises
    ------
    MatrixError
        If there is nothing, it is not a CSR matrix in AnnData's encoding, or it is unfinished.
    """
    url = locations.normalise(url)
    attributes, members = groups.read(url)
    facts = attributes.get("spdist", {})
    if facts.get("state") == "unfinished":
        raise MatrixError(f"{url}: an unfinished product; finish it with `spdist multiply A B {url} --resume`")
    kind = attributes.get("encoding-type")
    if kind == "csc_matrix":
        raise MatrixError(f"{url}: stored by columns (csc_matrix); store it by rows, as csr_matrix")
    needed = {"csr_matrix": {"shape"}, "bsr_matrix": {"shape", "block-size"}}.get(str(kind))
    if needed is None or needed - set(attributes) or any(name not in members for name in ARRAYS):
        raise MatrixError(
            f"{url}: not a sparse matrix: expected a Zarr group with encoding-type csr_matrix, got {kind}"
        )
    shape = (int(attributes["shape"][0]), int(attributes["shape"][1]))
    indptr, indices = (from_zarr(url, name, members[name]) for name in ARRAYS[:2])
    size = tuple(map(int, attributes["block-size"])) if kind == "bsr_matrix" else ()
    data = from_zarr(url, "data", members["data"], size)
    if size:
        shape = shape[0] // size[0], shape[1] // size[1]
    check_dtype(data.dtype)
    if indptr.length != shape[0] + 1 or indices.length != data.length or indices.dtype.kind not in "iu":
        raise MatrixError(
            f"{url}: shape {shape} does not fit arrays of {indptr.length:,} offsets, {indices.length:,} "
            f"{indices.dtype} indices and {data.length:,} values"
        )
    return StoredMatrix(url, shape, indptr, indices, data, facts)
