"""The matrices of a check, read and checked a bounded number of entries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.checks import check_canonical, is_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, index_dtype
from spdist.storage.matrix import StoredMatrix
from spdist.verification.result import WrongProductError


@dataclass(frozen=True)
class Limits:
    """Limits on what a check holds in memory at a time."""

    # entries of A and C, or of B, that one thread holds; by default 24 MiB of float64 with its columns
    entries: int = 1 << 21
    offsets: int = 1 << 18  # offsets read at a time
    # products that one thread expands at a time to recompute float and integer rows; by default about 35 MB
    products: int = 1 << 18
    # products of bools that one thread recomputes at a time, which SciPy multiplies unexpanded; about 30 MB. At most
    # 2^20, so that sums of `recompute_rows` distinguish True from False.
    bool_products: int = 1 << 20
    named_products: int = 1 << 24  # A wrong row of at most this many products is recomputed to name the wrong entry


@dataclass(frozen=True)
class Operand:
    """A matrix, its name in messages, and the exception to raise if it is not canonical."""

    matrix: StoredMatrix
    name: str
    error: type[Exception]


@dataclass(frozen=True)
class RowRange:
    """Rows ``[start:stop)`` and their offsets in each of some matrices."""

    start: int
    stop: int
    offsets: tuple[Int64Array, ...]

    @property
    def nrows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def entries(self) -> int:
        """Number of entries in all of the matrices."""
        return sum(int(offsets[-1] - offsets[0]) for offsets in self.offsets)


@dataclass(frozen=True)
class Operands:
    """The three matrices, the method of the check, and the offsets of B's rows once B has been read."""

    a: Operand
    b: Operand
    c: Operand
    method: str  # ``freivalds``, ``modular`` or ``recompute``, as in `Verification`
    limits: Limits
    b_offsets: Int64Array = field(repr=False)  # (nrows(B) + 1,) int64: filled by `note_offsets`

    @property
    def ncols(self) -> int:
        """Columns of C."""
        return self.c.matrix.ncols

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of C."""
        return self.c.matrix.dtype

    @cached_property
    def work(self) -> np.dtype[Any]:
        """Dtype of the checking arithmetic."""
        wide = {"b": np.bool_, "u": np.uint64, "i": np.uint64, "f": np.float64, "c": np.complex128}
        return np.dtype(wide[self.dtype.kind])

    @cached_property
    def b_held(self) -> CSR | None:
        """B in memory if it has few entries, for recomputing rows of C; else None."""
        b = self.b.matrix
        if b.nnz > self.limits.entries:
            return None
        return _read(self.b, self.b_offsets, 0, b.nnz, 0, self.work)

    def read(self, operand: Operand, block: RowRange, number: int) -> Iterator[CSR]:
        """Read rows of one operand."""
        return read_rows(operand, block.offsets[number], block.start, self.work, self.limits.entries)

    def note_offsets(self, block: RowRange) -> None:
        """Keep the offsets of some rows of B."""
        self.b_offsets[block.start : block.stop + 1] = block.offsets[0]

    def lengths_in_b(self, a: CSR) -> Int64Array:
        """Return for each entry of A the entries of the row of B that it multiplies."""
        out: Int64Array = self.b_offsets[a.indices + 1] - self.b_offsets[a.indices]
        return out


def operands_of(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, method: str, limits: Limits) -> Operands:
    """Return the operands of a check of ``C = A @ B``.

    The offsets of B are zero until they are noted.
    """
    left, right = Operand(a, "A", MatrixError), Operand(b, "B", MatrixError)
    return Operands(left, right, Operand(c, "C", WrongProductError), method, limits, np.zeros(b.nrows + 1, np.int64))


def row_ranges(operands: tuple[Operand, ...], limits: Limits) -> Iterator[RowRange]:
    """Cut the rows that `operands` share into ranges of `limits.entries` entries together, or of one longer row.

    Offsets are checked here: nothing else may use them before they are known to rise from 0 to nnz.

    Yields ranges in the order of rows, without gaps.
    Raises `MatrixError` if offsets of A or B fall or do not lead from 0 to nnz.
    Raises `WrongProductError` if offsets of C fall or do not lead from 0 to nnz.
    """
    nrows = operands[0].matrix.nrows
    for at in range(0, nrows, limits.offsets):
        end = min(at + limits.offsets, nrows)
        offsets = [operand.matrix.read_indptr(at, end) for operand in operands]
        for operand, own in zip(operands, offsets, strict=True):
            _check_offsets(operand, own, at)
        entries = sum(own - own[0] for own in offsets)
        start = 0
        while start < end - at:
            stop = int(np.searchsorted(entries, entries[start] + limits.entries, side="right")) - 1
            stop = max(stop, start + 1)
            yield RowRange(at + start, at + stop, tuple(own[start : stop + 1] for own in offsets))
            start = stop
    if nrows == 0:
        for operand in operands:
            _check_offsets(operand, operand.matrix.read_indptr(0, 0), 0)


def _check_offsets(operand: Operand, offsets: Int64Array, start: int) -> None:
    """Check the offsets from row `start` on; the first offset is the last of the previous range."""
    matrix, last = operand.matrix, start + len(offsets) - 1
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        row = int(np.argmax(falls))
        what = f"falls from {int(offsets[row]):,} to {int(offsets[row + 1]):,} at row {start + row:,}"
    elif start == 0 and offsets[0] != 0:
        what = f"starts at {int(offsets[0]):,}, not 0"
    elif offsets[0] < 0 or offsets[-1] > matrix.nnz or (last == matrix.nrows and offsets[-1] != matrix.nnz):
        what = f"reaches {int(offsets[-1]):,} at row {last:,} of {matrix.nrows:,}, but there are {matrix.nnz:,} entries"
    else:
        return
    raise operand.error(f"{operand.name} ({matrix.url}): indptr {what}")


def read_rows(operand: Operand, offsets: Int64Array, start: int, work: np.dtype[Any], most: int) -> Iterator[CSR]:
    """Read and check some rows: in one piece, or one row of more than `most` entries in several.

    `offsets`: (rows + 1,) int64: of the rows in the matrix.
    `most`: entries that one piece has at the most, unless it has several rows.
    Yields canonical rows, with values of dtype `work`.
    Raises `MatrixError` if columns of A or B are out of range or do not rise strictly.
    Raises `WrongProductError` if columns of C are out of range or do not rise strictly.
    """
    first, last = int(offsets[0]), int(offsets[-1])
    if len(offsets) != 2 or last - first <= most:
        yield _read(operand, offsets - first, first, last, start, work)
        return
    before = -1
    for at in range(first, last, most):
        end = min(at + most, last)
        piece = _read(operand, np.array([0, end - at]), at, end, start, work)
        if piece.indices[0] <= before:
            raise operand.error(
                f"{operand.name} ({operand.matrix.url}): row {start:,} is not sorted or holds a duplicate at column "
                f"{int(piece.indices[0]):,}"
            )
        before = int(piece.indices[-1])
        yield piece


def _read(operand: Operand, indptr: Int64Array, first: int, last: int, start: int, work: np.dtype[Any]) -> CSR:
    """Read entries ``[first:last)`` of the rows from `start` on, and check their columns."""
    matrix = operand.matrix
    raw = matrix.indices.read(first, last)  # checked before it is cast: a wide index must not wrap into range
    if len(raw) and (int(raw.min()) < 0 or int(raw.max()) >= matrix.ncols):
        at = int(np.argmax((raw < 0) | (raw >= matrix.ncols)))
        row = start + int(np.searchsorted(indptr, at, side="right")) - 1
        raise operand.error(
            f"{operand.name} ({matrix.url}): column {int(raw[at]):,} in row {row:,} is outside [0, {matrix.ncols:,})"
        )
    indices = raw.astype(index_dtype(matrix.ncols), copy=False)
    values = matrix.data.read(first, last).astype(work, copy=False)
    out = CSR(indptr, indices, values, (len(indptr) - 1, matrix.ncols))
    if not is_canonical(out):
        try:
            check_canonical(out, f"{operand.name} ({matrix.url})", start)
        except MatrixError as error:
            raise operand.error(str(error)) from None
    return out
