"""Read matrices in PETSc's binary format: big-endian numbers, the lengths of rows, all columns, then all values.

The file says neither how wide its integers are nor what its values are: both depend on how PETSc was built. The first
number, a constant, shows the width of integers; the size of the file shows the width of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.foundation.units import counted
from spdist.matrices.dtypes import ValueArray
from spdist.storage.external_sort import Entries
from spdist.storage.formats.compressed_rows import ENTRIES, Arrays, import_compressed
from spdist.storage.formats.source import Import, foreign

MATRIX = 1211216
"""The number that a matrix begins with."""

FOLLOWING = {1211214: "vector", MATRIX: "matrix", 1211218: "index set", 1211219: "bag"}
"""Numbers that objects of PETSc begin with."""

VALUES = (np.dtype(">f8"), np.dtype(">c16"), np.dtype(">f4"))
"""Values of PETSc's builds, the usual one first."""

READ_BYTES = 1 << 20
"""Bytes that are read from the file in one call."""


def import_petsc(job: Import) -> None:
    """Import a matrix in PETSc's binary format.

    Raises `InputError` if it is dense, and `job.options.dense` is not set.
    Raises `MatrixError` if it is no such file, or of a wrong size.
    """
    head = _Section(job, "header", 0, 2, np.dtype(">i4")).read(2).tolist()
    index = np.dtype(">i8" if head == [0, MATRIX] else ">i4")
    if MATRIX not in (head[0], head[1] if head[0] == 0 else None):
        raise MatrixError(f"{job.path}: not a matrix in PETSc's binary format; it must begin with the number {MATRIX}")
    _, nrows, ncols, nnz = _Section(job, "header", 0, 4, index).read(4).tolist()
    shape = job.shape((nrows, ncols))
    start = 4 * index.itemsize
    if nnz == -1:
        _import_dense(job, shape, start, index)
        return
    if nnz < 0:
        raise MatrixError(f"{job.path}: {nnz:,} entries; get the file again")
    columns_at = start + nrows * index.itemsize
    values_at = columns_at + nnz * index.itemsize
    dtype = _value_dtype(job, values_at, nnz, index)
    lengths = _Section(job, "row lengths", start, nrows, index)
    arrays = Arrays(
        _Offsets(lengths, nnz, job.path),
        _Section(job, "columns", columns_at, nnz, index),
        _Section(job, "values", values_at, nnz, dtype),
        job.path,
    )
    import_compressed(job, shape, arrays)


def _import_dense(job: Import, shape: tuple[int, int], start: int, index: np.dtype[Any]) -> None:
    """Import the nonzeros of a dense matrix, whose values are stored by rows."""
    if not job.options.dense:
        raise InputError(
            f"{job.path}: a dense matrix of {shape[0]:,} x {shape[1]:,}; pass --dense to keep its nonzeros"
        )
    count = shape[0] * shape[1]
    dtype = _value_dtype(job, start, count, index)
    values = _Section(job, "values", start, count, dtype)

    def batches() -> Iterator[Entries]:
        for first in range(0, count, ENTRIES):
            found = values.read(min(ENTRIES, count - first))
            nonzero = np.flatnonzero(found)
            at = first + nonzero
            yield Entries(at // shape[1], at % shape[1], found[nonzero])

    job.reading.found.append("dense, nonzeros kept")
    job.sort(batches(), shape, values.dtype, count)


def _value_dtype(job: Import, start: int, count: int, index: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of `count` values from byte `start` on, after which the file ends or another object follows."""
    size = job.source.size
    ends = {dtype: start + count * dtype.itemsize for dtype in VALUES}
    following = {dtype: _object_at(job, ends[dtype], index) for dtype in VALUES}
    followed = [dtype for dtype in VALUES if following[dtype]]
    exact = [dtype for dtype in VALUES if ends[dtype] == size]
    if not followed and not exact:
        raise MatrixError(
            f"{job.path}: {size:,} bytes, where {counted(count, 'value')} of PETSc's binary format need "
            f"{ends[VALUES[0]]:,}; it is damaged or truncated: get the file again"
        )
    dtype = (followed or exact)[0]
    bits = 8 * index.itemsize
    job.reading.found.append(f"indices of {bits} bits, values {dtype.newbyteorder('=').name}")
    if followed:
        job.reading.left_out.append(f"the {following[dtype]} after the matrix")
    return dtype


def _object_at(job: Import, at: int, index: np.dtype[Any]) -> str:
    """Return what begins at a position in the file; empty if it is no object of PETSc."""
    if at + 2 * index.itemsize > job.source.size:
        return ""
    return FOLLOWING.get(int(_Section(job, "header", at, 1, index).read(1)[0]), "")


class _Section:
    """An array in the file, read in order."""

    def __init__(self, job: Import, name: str, start: int, count: int, stored: np.dtype[Any]) -> None:
        self.file: BinaryIO = job.source.file
        self.path, self.name, self.at, self.stored = job.path, name, start, stored
        self.shape: tuple[int, ...] = (count,)
        self.dtype = stored.newbyteorder("=")

    def read(self, count: int) -> ValueArray:
        """Return the next `count` elements."""
        wanted, parts = count * self.stored.itemsize, []
        with foreign(self.path, self.name):
            self.file.seek(self.at)
            while wanted and (part := self.file.read(min(READ_BYTES, wanted))):
                parts.append(part)
                wanted -= len(part)
                self.at += len(part)
        if wanted:
            raise MatrixError(f"{self.path}: the file ends within its {self.name}; get the file again")
        return np.frombuffer(b"".join(parts), self.stored).astype(self.dtype)


class _Offsets:
    """Offsets of rows, made of the lengths of rows."""

    def __init__(self, lengths: _Section, nnz: int, path: str) -> None:
        self.lengths, self.nnz, self.path, self.row = lengths, nnz, path, -1
        self.shape: tuple[int, ...] = (lengths.shape[0] + 1,)
        self.dtype, self.last = np.dtype(np.int64), 0

    def read(self, count: int) -> ValueArray:
        """Return the next `count` offsets; the first offset in the file is 0."""
        steps = np.zeros(count, np.int64)
        first = int(self.row < 0)
        steps[first:] = self.lengths.read(count - first)
        wrong = (steps < 0) | (steps > self.nnz)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise MatrixError(
                f"{self.path}: row {self.row + at:,} of {int(steps[at]):,} entries in a matrix of {self.nnz:,}; get "
                f"the file again"
            )
        offsets = self.last + np.cumsum(steps)
        self.row, self.last = self.row + count, int(offsets[-1])
        return offsets
