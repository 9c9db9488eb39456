"""Write matrices to Zarr: by chunks from any process, or row block by row block from one."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, blocksize, check_dtype, index_dtype
from spdist.storage import groups
from spdist.storage.checksums import Checksums, WrittenChunks
from spdist.storage.chunked_array import CHUNK_LENGTH, ChunkedArray, compresses, new_array
from spdist.storage.foreign import versions
from spdist.storage.groups import ARRAYS
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.names import ARRAYS as NAME_ARRAYS
from spdist.storage.names.names import NO_NAMES, PIECE_BYTES, AxisNames
from spdist.stores.registry import normalise


def chunk_of(dtype: np.dtype[Any]) -> int:
    """Return the elements of a Zarr chunk unless a memory limit requires fewer.

    These are `CHUNK_LENGTH` numbers, or a power of two of blocks that hold about as many.

    Examples
    --------
    >>> from spdist.matrices.dtypes import block_dtype
    >>> chunk_of(np.dtype("f8")), chunk_of(block_dtype(np.dtype("f8"), (3, 3)))
    (131072, 8192)
    """
    r, s = blocksize(dtype) or (1, 1)
    return max(CHUNK_LENGTH >> (r * s - 1).bit_length(), 1)


def offsets_chunk(chunk: int) -> int:
    """Return the elements of a Zarr chunk of row offsets, of a matrix whose Zarr chunks of entries have `chunk`.

    Row offsets of Zarr chunks that blocks share pass through the driver: shorter ones are shared by fewer rows.
    """
    return min(chunk, CHUNK_LENGTH)


@dataclass(frozen=True)
class Layout:
    """The layout of a matrix that is being written, fixed first so that any process can write any Zarr chunk."""

    url: str = field(repr=False)
    ncols: int
    dtype: np.dtype[Any]  # of the values
    chunk: int = CHUNK_LENGTH  # elements of a Zarr chunk of `indices` and `data`
    compressed: bool = False  # whether values are compressed; offsets and columns always are

    def array(self, name: str) -> ChunkedArray:
        """Return array `name` of the matrix, open for writing by chunks."""
        dtype = {"indptr": np.dtype(np.int64), "indices": index_dtype(self.ncols), "data": self.dtype}[name]
        chunk = offsets_chunk(self.chunk) if name == "indptr" else self.chunk
        return _new_array(self.url, name, dtype, chunk, self.compressed or name != "data")

    def write(self, name: str, k: int, values: ValueArray) -> list[WrittenChunks]:
        """Write Zarr chunks `k`, `k` + 1, ... of an array; return their checksums, read from storage."""
        if not len(values):
            return []
        array = self.array(name)
        array.write_chunks(k, values)
        return [WrittenChunks(name, k, array.stored_checksums(k, k - (-len(values) // array.chunk)))]

    def write_entries(self, k: int, indices: ValueArray, values: ValueArray) -> list[WrittenChunks]:
        """Write Zarr chunks `k`, `k` + 1, ... of `indices` and `data`, as `write` does."""
        return [*self.write("indices", k, indices), *self.write("data", k, values)]


@functools.lru_cache(maxsize=64)
def _new_array(url: str, name: str, dtype: np.dtype[Any], chunk: int, compressed: bool) -> ChunkedArray:
    return new_array(url, name, dtype, chunk, compressed=compressed)


def finish_matrix(
    layout: Layout,
    nrows: int,
    nnz: int,
    facts: dict[str, Any],
    checksums: Checksums | None = None,
    names: AxisNames = NO_NAMES,
) -> StoredMatrix:
    """Finish a matrix whose Zarr chunks are written: write names and metadata of its arrays first, its encoding last.

    `checksums`: of the Zarr chunks; by default they are read from storage.
    """
    lengths = zip(ARRAYS, (nrows + 1, nnz, nnz), strict=True)
    size = blocksize(layout.dtype)
    r, s = size or (1, 1)
    attributes = {
        "encoding-type": "csr_matrix" if size is None else "bsr_matrix",
        "encoding-version": "0.1.0",
        "shape": [nrows * r, layout.ncols * s],
        **({} if size is None else {"block-size": [r, s]}),
        "spdist": {**facts, "state": "complete", "canonical": True},
    }
    arrays = [(layout.array(name), length) for name, length in lengths]
    arrays += write_names(layout.url, names)
    groups.finish_group(layout.url, arrays, attributes, None if checksums is None else vars(checksums))
    return open_matrix(layout.url)


def write_names(url: str, names: AxisNames) -> Iterator[tuple[ChunkedArray, int]]:
    """Write the names that there are; yield their arrays, and the bytes that each holds."""
    for name, axis in zip(NAME_ARRAYS, names, strict=True):
        if axis is not None:
            buffer = ChunkBuffer(new_array(url, name, np.dtype(np.uint8), PIECE_BYTES, compressed=True))
            for piece in axis.text():
                buffer.append(np.frombuffer(piece, np.uint8))
            buffer.close()
            yield buffer.array, buffer.position


class ChunkBuffer:
    """Collects elements of one array and writes each full Zarr chunk; between calls it holds less than one.

    `start`: position of the first element; a multiple of the Zarr chunk length.
    """

    def __init__(self, array: ChunkedArray, start: int = 0) -> None:
        self.array, self.position, self.parts, self._count = array, start, [np.empty(0, array.dtype)], 0

    def append(self, values: ValueArray) -> None:
        """Add `values` and write the Zarr chunks that are full."""
        self.parts.append(np.asarray(values, self.array.dtype))
        self._count += len(values)
        if self._count >= self.array.chunk:
            self._flush(final=False)

    def close(self) -> None:
        """Write the remaining elements as the last Zarr chunk."""
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        values = np.concatenate(self.parts)
        count = len(values) if final else len(values) - len(values) % self.array.chunk
        if count:
            self.array.write_chunks(self.position // self.array.chunk, values[:count])
        self.position += count
        self.parts, self._count = [values[count:].copy()], len(values) - count


class MatrixWriter:
    """Writes a matrix row block by row block in bounded memory; before `close` no reader takes it for a matrix.

    `url`: A path or fsspec URL; must not exist.
    `ncols`: columns; the number of rows is known at the end.
    """

    def __init__(
        self, url: str | Path, ncols: int, dtype: np.dtype[Any], facts: dict[str, Any], names: AxisNames = NO_NAMES
    ) -> None:
        dtype = check_dtype(np.dtype(dtype))
        self.layout = Layout(normalise(url), int(ncols), dtype, chunk_of(dtype))
        self.facts, self.names, self.nrows, self.nnz = facts, names, 0, 0
        self._offsets: ChunkBuffer | None = None
        self._entries: tuple[ChunkBuffer, ChunkBuffer] | None = None

    @classmethod
    def continuing(
        cls, old: StoredMatrix, url: str | Path, facts: dict[str, Any], names: AxisNames = NO_NAMES
    ) -> MatrixWriter:
        """Return a writer that has written the rows of a matrix; its full Zarr chunks are taken as they are.

        `old`: canonical, not in blocks; a form that spdist does not write is read and written.
        """
        writer = cls(url, old.ncols, old.dtype, facts, names)
        arrays = old.indptr, old.indices, old.data
        layouts = (replace(writer.layout, chunk=old.data.chunk, compressed=flag) for flag in (False, True))
        layout = next((one for one in layouts if all(_has_form(array, one) for array in arrays)), None)
        if layout is None or not old.nnz:
            for start, stop, _ in old.row_blocks(1 << 22):
                writer.append(old.rows(start, stop))
            return writer
        writer.layout = layout
        groups.begin(layout.url, facts)
        writer._offsets, *entries = (_continued(array, layout) for array in arrays)
        writer._entries = entries[0], entries[1]
        writer.nrows, writer.nnz = old.nrows, old.nnz
        return writer

    def append(self, block: CSR) -> None:
        """Write the next rows, which must be canonical."""
        self._begin()
        assert self._offsets is not None
        if self._entries is None and block.nnz:  # the first entries decide whether values are compressed
            self.layout = replace(self.layout, compressed=compresses(block.data))
            self._entries = ChunkBuffer(self.layout.array("indices")), ChunkBuffer(self.layout.array("data"))
        if self._entries is not None:
            self._entries[0].append(block.indices)
            self._entries[1].append(block.data)
        self._offsets.append(self.nnz + block.indptr[1:])
        self.nrows += block.nrows
        self.nnz += block.nnz

    def close(self) -> StoredMatrix:
        """Finish the matrix and return it, unless a matrix that the call reads was rewritten meanwhile."""
        self._begin()
        assert self._offsets is not None
        for buffer in (self._offsets, *(self._entries or ())):
            buffer.close()
        versions.check()
        return finish_matrix(self.layout, self.nrows, self.nnz, self.facts, names=self.names)

    def _begin(self) -> None:
        if self._offsets is None:
            groups.begin(self.layout.url, self.facts)
            self._offsets = ChunkBuffer(self.layout.array("indptr"))
            self._offsets.append(np.zeros(1, np.int64))


def _has_form(array: object, layout: Layout) -> bool:
    """Whether an array's Zarr chunks are as a layout writes them; not where several arrays make one."""
    if not isinstance(array, ChunkedArray):
        return False
    documents = [json.loads(one.metadata) | {"shape": None} for one in (array, layout.array(array.name))]
    return bool(documents[0] == documents[1])


def _continued(array: ChunkedArray, layout: Layout) -> ChunkBuffer:
    """Return a buffer of a new array that has the elements of an array; files of full Zarr chunks are shared."""
    new, full = layout.array(array.name), array.length // array.chunk
    for k in range(full):
        new.location.take(new.key(k), array.location)
    buffer = ChunkBuffer(new, full * array.chunk)
    buffer.append(array.read(full * array.chunk, array.length))
    return buffer
