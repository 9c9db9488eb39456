"""Read NumPy's files as streams: sparse matrices of SciPy and of pydata/sparse in .npz, and dense arrays in .npy.

A .npz file is a zip archive of .npy arrays. No array is read whole but `format`, `shape` and `offsets`, which have
bounds. Python objects are never unpickled.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import format_bytes
from spdist.matrices.dtypes import IndexArray, ValueArray
from spdist.storage.external_sort import Entries
from spdist.storage.formats.compressed_rows import ENTRIES, Arrays, import_compressed, import_coordinates
from spdist.storage.formats.dense_rows import check_dense, import_dense
from spdist.storage.formats.source import Import, check_numbers, foreign

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
"""Shape of an array, whether it is stored in Fortran's order, and its dtype."""

READ_BYTES = 1 << 20
"""Bytes that are read from the archive in one call."""

MOST_BYTES = 2 * READ_BYTES
"""Bytes from which on a read of `zipfile` is refused."""

HEADER_BYTES = 10_000
"""Bytes of the longest header of an array; NumPy refuses longer ones too, but reads them first."""

MOST_DIAGONALS = 1 << 22
"""Diagonals of a DIA matrix at most, whose offsets are read at once."""

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Ways to compress that NumPy uses; others have decoders that take gigabytes."""


def import_npz(job: Import) -> None:
    """Import a file of ``scipy.sparse.save_npz``, or of the function of this name in pydata/sparse.

    Raises `MatrixError` if it is another file, or damaged; names the array.
    """
    with foreign(job.path):
        archive = zipfile.ZipFile(cast(Any, _ShortReads(job.source.file, job.path)))
    with archive:
        members = _Members(archive, job)
        if members.has("coords") or members.has("compressed_axes"):
            _import_pydata(job, members)
            return
        members.check_sparse()
        kind = members.stream("format").text()
        shape = job.shape(members.stream("shape").numbers(16).tolist())
        data = members.stream("data", "biufc")
        if kind in ("csr", "csc"):
            data.check_dimensions(1)
            arrays = Arrays(members.vector("indptr"), members.vector("indices"), data, job.path)
            import_compressed(job, shape, arrays, by_columns=kind == "csc")
        elif kind == "bsr":
            _import_blocks(job, shape, Arrays(members.vector("indptr"), members.vector("indices"), data, job.path))
        elif kind == "dia":
            _import_diagonals(job, shape, members.stream("offsets").numbers(MOST_DIAGONALS), data)
        elif kind == "coo":
            data.check_dimensions(1)
            import_coordinates(job, shape, members.vector("row"), members.vector("col"), data, job.path)
        else:
            raise MatrixError(f"{job.path}: sparse format '{one_line(kind, 40)}' is not read; convert it with .tocsr()")


class _ShortReads:
    """A file that refuses long reads: `zipfile` reads the directory of an archive in one call, whatever its length."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes."""
        found = self._file.read(min(count, MOST_BYTES) if count >= 0 else MOST_BYTES)
        if len(found) == MOST_BYTES:
            raise MatrixError(f"{self._path}: its list of arrays is too long; expected a file of scipy.sparse.save_npz")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Members:
    """The arrays in an archive."""

    def __init__(self, archive: zipfile.ZipFile, job: Import) -> None:
        self.archive, self.job, self.claimed = archive, job, 0
        names = archive.namelist()
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise MatrixError(f"{job.path}: array '{one_line(twice, 40)}' is there twice; save the matrix again")

    def has(self, name: str) -> bool:
        """Whether there is an array."""
        return f"{name}.npy" in self.archive.namelist()

    def check_sparse(self) -> None:
        """Refuse an archive of arrays that are no sparse matrix."""
        if not self.has("format") and not (self.has("data") and self.has("shape")):
            names = one_line(", ".join(name.removesuffix(".npy") for name in self.archive.namelist()[:9]), 80)
            raise MatrixError(
                f"{self.job.path}: arrays of numpy.savez ({names}) and no sparse matrix; save one with "
                f"scipy.sparse.save_npz, or a dense array with numpy.save, and import the .npy file with --dense"
            )

    def stream(self, name: str, kinds: str = "iu") -> NpyStream:
        """Open an array; refuse an archive whose arrays take many times its bytes."""
        path = self.job.path
        if not self.has(name):
            raise MatrixError(f"{path}: no array '{name}'; expected a file of scipy.sparse.save_npz")
        info = self.archive.getinfo(f"{name}.npy")
        if info.flag_bits & 1:
            raise MatrixError(f"{path}: array '{name}' is encrypted; save the matrix again without a password")
        if info.compress_type not in METHODS:
            raise MatrixError(
                f"{path}: array '{name}' is compressed by method {info.compress_type}, which is not read; save the "
                f"matrix again with scipy.sparse.save_npz"
            )
        with foreign(path, f"array '{name}'"):
            file = cast(BinaryIO, self.archive.open(info))
            header = _read_header(file)
        found = NpyStream(file, header, (name, path), kinds)
        self.claimed += found.nbytes
        self.job.source.check_inflated(self.claimed, "save it with compressed=False")
        return found

    def vector(self, name: str) -> NpyStream:
        """Open a one-dimensional array of offsets or indices."""
        found = self.stream(name)
        found.check_dimensions(1)
        return found


class NpyStream:
    """An array in a .npz file, read in order.

    `header`: (shape, order, dtype).
    `kinds`: kinds of dtypes that it may have; `text` checks the dtype of `format` itself.
    """

    def __init__(self, file: BinaryIO, header: Header, names: tuple[str, str], kinds: str) -> None:
        self.file, (self.name, self.path) = file, names
        self.shape, self.fortran, self.stored = header
        self.size = math.prod(self.shape)
        if min(self.shape, default=0) < 0 or self.size >= 1 << 62:
            shown = one_line(self.shape, 60)
            raise MatrixError(f"{self.path}: array '{self.name}' cannot have shape {shown}; save the matrix again")
        self.dtype = self.stored if self.name == "format" else check_numbers(self.stored, self.path, self.name, kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, as its header says."""
        return self.size * self.stored.itemsize

    def check_dimensions(self, count: int) -> None:
        """Refuse an array of more or fewer dimensions."""
        if len(self.shape) != count:
            raise MatrixError(
                f"{self.path}: array '{self.name}' has shape {one_line(self.shape, 60)}; it must have {count} dimension"
            )

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        raw = np.empty(count * self.stored.itemsize, np.uint8)
        done = 0
        while done < len(raw):
            with foreign(self.path, f"array '{self.name}'"):
                part = self.file.read(min(READ_BYTES, len(raw) - done))
            if not part:
                raise MatrixError(f"{self.path}: array '{self.name}' is truncated; get the file again")
            raw[done : done + len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
        return raw.view(self.stored).astype(self.dtype, copy=False)

    def numbers(self, most: int) -> IndexArray:
        """Return all elements of a short array."""
        self.check_dimensions(1)
        if self.size > most:
            raise MatrixError(f"{self.path}: array '{self.name}' has {self.size:,} elements; at most {most:,} are read")
        return self.read(self.size)

    def text(self) -> str:
        """Return the one word that an array of text holds."""
        if self.size != 1 or self.stored.kind not in "SU" or not 0 < self.stored.itemsize <= 256:
            what = f"{one_line(self.stored, 60)} of shape {one_line(self.shape, 60)}"
            raise MatrixError(f"{self.path}: array '{self.name}' holds {what}; it must hold a word such as 'csr'")
        with foreign(self.path, f"array '{self.name}'"):
            word = self.read(1).tolist()[0]
        return word.decode("ascii", "replace") if isinstance(word, bytes) else str(word)


def _read_header(file: BinaryIO) -> Header:
    """Return shape, order and dtype of an array, from a header of bounded length; call it inside `foreign`."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} of its header")
    raw = file.read(2 if version == (1, 0) else 4)
    length = int.from_bytes(raw, "little")
    if length > HEADER_BYTES:
        raise ValueError(f"a header of {format_bytes(length)}")
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    found: Header = parse(io.BytesIO(raw + file.read(length)))
    return found


def _import_blocks(job: Import, shape: tuple[int, int], arrays: Arrays) -> None:
    data = cast(NpyStream, arrays.data)
    if len(data.shape) != 3 or (data.fortran and data.shape[0] > 1) or 0 in data.shape[1:]:
        raise MatrixError(f"{job.path}: blocks of shape {data.shape} in this order are not read; save .tocsr()")
    height, width = data.shape[1:]
    if shape[0] % height or shape[1] % width:
        raise MatrixError(f"{job.path}: blocks of {height} x {width} do not tile shape {shape}")
    if height * width > ENTRIES:
        raise MatrixError(f"{job.path}: blocks of {height:,} x {width:,} are too large; save .tocsr()")

    def batches() -> Iterator[Entries]:
        for first, block in arrays.pieces((shape[0] // height, shape[1] // width)):
            block_rows = np.repeat(np.arange(first, first + block.nrows), np.diff(block.indptr))
            rows = block_rows[:, None, None] * height + np.arange(height)[:, None]
            columns = block.indices.astype(np.int64)[:, None, None] * width + np.arange(width)
            rows, columns = np.broadcast_arrays(rows, columns)
            yield Entries(rows.ravel(), columns.ravel(), block.data)

    job.sort(batches(), shape, data.dtype, data.size)


def _import_diagonals(job: Import, shape: tuple[int, int], offsets: IndexArray, data: NpyStream) -> None:
    if data.shape[:1] != offsets.shape or len(data.shape) != 2:
        raise MatrixError(f"{job.path}: {len(offsets):,} diagonals do not fit data of shape {data.shape}")
    ndiagonals, length = data.shape
    if len(offsets) and not -(1 << 62) < int(offsets.min()) <= int(offsets.max()) < 1 << 62:
        raise MatrixError(f"{job.path}: diagonal {int(offsets.max()):,} is far outside shape {shape}")
    offsets = offsets.astype(np.int64)

    def batches() -> Iterator[Entries]:
        for start in range(0, data.size, ENTRIES):
            values = data.read(min(ENTRIES, data.size - start))
            at = np.arange(start, start + len(values), dtype=np.int64)
            diagonal, column = (at % ndiagonals, at // ndiagonals) if data.fortran else (at // length, at % length)
            row = column - offsets[diagonal]
            inside = (row >= 0) & (row < shape[0]) & (column < shape[1]) & (values != 0)
            yield Entries(row[inside], column[inside], values[inside])

    job.sort(batches(), shape, data.dtype, data.size)


# -- pydata/sparse -----------------------------------------------------------------------------------------------------


def _import_pydata(job: Import, members: _Members) -> None:
    """Import a COO or GCXS array of pydata/sparse that has two dimensions."""
    job.reading.format = "a file of sparse.save_npz"
    shape, data = job.shape(members.stream("shape").numbers(16).tolist()), members.stream("data", "biufc")
    data.check_dimensions(1)
    fill = members.stream("fill_value", "biufc")
    if fill.size != 1 or fill.read(1)[0] != 0:
        raise MatrixError(f"{job.path}: what is not stored has another value than 0; save a matrix with fill_value=0")
    if members.has("coords"):
        job.reading.found.append("COO")
        rows, columns = (_Coordinates(members.stream("coords"), axis, job.path) for axis in (0, 1))
        import_coordinates(job, shape, rows, columns, data, job.path)
        return
    axes = members.stream("compressed_axes").numbers(2).tolist()
    if axes not in ([0], [1]):
        raise MatrixError(f"{job.path}: compressed_axes of {axes}; one axis, 0 or 1, is read: convert it with .tocsr()")
    job.reading.found.append(f"GCXS by {'columns' if axes[0] else 'rows'}")
    arrays = Arrays(members.vector("indptr"), members.vector("indices"), data, job.path)
    import_compressed(job, shape, arrays, by_columns=axes == [1])


class _Coordinates:
    """The rows or the columns in an array `coords` of shape (2, entries), read in order."""

    def __init__(self, stream: NpyStream, axis: int, path: str) -> None:
        if len(stream.shape) != 2 or stream.shape[0] != 2:
            raise MatrixError(f"{path}: array 'coords' has shape {one_line(stream.shape, 60)}; it must be (2, entries)")
        self.stream, self.axis, self.dtype = stream, axis, stream.dtype
        self.shape: tuple[int, ...] = stream.shape[1:]
        for start in range(0, 0 if stream.fortran else axis * self.shape[0], ENTRIES):
            stream.read(min(ENTRIES, self.shape[0] - start))

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        return self.stream.read(2 * count)[self.axis :: 2] if self.stream.fortran else self.stream.read(count)


# -- dense arrays ------------------------------------------------------------------------------------------------------


def import_npy(job: Import) -> None:
    """Import the nonzeros of a dense array of ``numpy.save``.

    Raises `InputError` if `dense` was not asked for.
    Raises `MatrixError` if it has not two dimensions, does not hold numbers, or is truncated.
    """
    file = job.source.file
    with foreign(job.path):
        header = _read_header(file)
        begin = file.tell()
    array = NpyStream(file, header, ("values", job.path), "biufc")
    shape = job.shape(array.shape)
    check_dense(job, job.path)
    if array.nbytes > job.source.size - begin:
        size, there = format_bytes(array.nbytes), format_bytes(job.source.size - begin)
        raise MatrixError(f"{job.path}: states {size} of values and holds {there}: truncated; get the file again")

    def read(rows: slice, columns: slice) -> ValueArray:
        """Return whole rows or a part of one; in Fortran's order, whole columns or a part of one."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        first = columns.start * shape[0] + rows.start if array.fortran else rows.start * shape[1] + columns.start
        with foreign(job.path):
            file.seek(begin + first * array.stored.itemsize)
        found = array.read(height * width)
        return found.reshape(width, height).T if array.fortran else found.reshape(height, width)

    job.reading.found.append(f"{array.dtype.name} in {'Fortran' if array.fortran else 'C'} order")
    import_dense(job, shape, array.dtype, read, by_columns=array.fortran)
