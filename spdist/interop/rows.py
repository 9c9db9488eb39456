"""Rows of a stored matrix as SciPy's, and its products with vectors; only selected rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy  # loads scipy.sparse when it is first used

from spdist.errors import InputError, MatrixError
from spdist.foundation.memory import available_memory
from spdist.foundation.units import format_bytes
from spdist.matrices.dtypes import Int64Array, number_dtype
from spdist.storage.matrix import StoredMatrix

PART_ENTRIES = 1 << 22
"""Entries that are read at a time."""
PART_ROWS = 1 << 16
"""Rows that are read at a time, if they are not neighbours."""


def to_scipy(matrix: StoredMatrix) -> Any:
    """Return a stored matrix in memory; `StoredMatrix.to_scipy` describes it.

    Raises `MatrixError` if there is not enough free memory.
    """
    free = available_memory()
    if matrix.nbytes > free:
        raise MatrixError(
            f"{matrix.url} takes {format_bytes(matrix.nbytes)} in memory, and {format_bytes(free)} are free: read some "
            f"rows, as in a[0:1000], or take to_dask()"
        )
    return _as_array(matrix, 0, matrix.nrows)


def select(matrix: StoredMatrix, key: Any) -> Any:
    """Return some rows and columns in memory; `StoredMatrix.__getitem__` describes it.

    Raises `InputError` if it is stored in dense blocks.
    Raises `IndexError` if a row is out of range.
    """
    if matrix.blocksize is not None:
        raise InputError(f"{matrix.url} is stored in dense blocks, which cannot be cut: read it with to_scipy()")
    rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
    if isinstance(rows, tuple):
        raise IndexError(f"a matrix has rows and columns, not {len(rows)} dimensions")
    if isinstance(columns, int | np.integer):  # one column, for which parts keep two axes
        last = range(matrix.ncols)[int(columns)]
        return select(matrix, (rows, slice(last, last + 1)))[..., 0]
    if isinstance(rows, int | np.integer):
        first = range(matrix.nrows)[int(rows)]
        return _rows_between(matrix, first, first + 1, columns)[0]
    if not isinstance(rows, slice) and not isinstance(columns, slice):
        raise IndexError("rows and columns are both arrays: write a[rows][:, columns]")
    if isinstance(rows, slice):
        wanted = range(matrix.nrows)[rows]
        if abs(wanted.step) == 1:
            low, high = (min(wanted), max(wanted) + 1) if wanted else (0, 0)
            return _rows_between(matrix, low, high, columns)[:: wanted.step]
        return _rows_at(matrix, np.array(wanted, np.int64), columns)
    return _rows_at(matrix, _positions(rows, matrix.nrows), columns)


def _positions(rows: Any, nrows: int) -> Int64Array:
    """Return the rows that an array of numbers or of truth values means."""
    asked = np.asarray(rows)
    if asked.dtype == bool:
        if asked.shape != (nrows,):
            raise IndexError(f"a row mask of shape {asked.shape} for {nrows:,} rows")
        return np.flatnonzero(asked).astype(np.int64)
    if asked.ndim != 1 or (len(asked) and asked.dtype.kind not in "iu"):
        raise IndexError(
            f"rows are a number, a slice, or an array of numbers, not {asked.ndim}-dimensional {asked.dtype}"
        )
    found = asked.astype(np.int64)
    if len(found) and not -nrows <= int(found.min()) <= int(found.max()) < nrows:
        raise IndexError(f"rows {int(found.min()):,} to {int(found.max()):,} of {nrows:,}")
    return np.where(found < 0, found + nrows, found)


def _rows_between(matrix: StoredMatrix, start: int, stop: int, columns: Any) -> Any:
    """Return neighbouring rows, read in parts so that columns that are not selected are not kept."""
    if isinstance(columns, slice) and columns == slice(None):
        return _as_array(matrix, start, stop)
    parts = [_as_array(matrix, *part)[:, columns] for part in _parts(matrix, start, stop)]
    return _stacked(parts, matrix, columns)


def _rows_at(matrix: StoredMatrix, rows: Int64Array, columns: Any) -> Any:
    """Return rows in any order, some more than once."""
    unique, back = np.unique(rows, return_inverse=True)
    batches = [unique[i : i + PART_ROWS] for i in range(0, len(unique), PART_ROWS)]
    parts = [scipy.sparse.csr_array(matrix.take(batch).to_scipy())[:, columns] for batch in batches]
    return _stacked(parts, matrix, columns)[back]


def _stacked(parts: list[Any], matrix: StoredMatrix, columns: Any) -> Any:
    if parts:
        return scipy.sparse.csr_array(scipy.sparse.vstack(parts, format="csr"))
    return scipy.sparse.csr_array((0, matrix.ncols), dtype=matrix.dtype)[:, columns]


def _parts(matrix: StoredMatrix, start: int, stop: int) -> Iterator[tuple[int, int]]:
    yield from ((first, last) for first, last, _ in matrix.row_blocks(PART_ENTRIES, start, stop))


def _as_array(matrix: StoredMatrix, start: int, stop: int) -> Any:
    """Return rows as SciPy's array; of a matrix of dense blocks, block rows."""
    found = matrix.rows(start, stop).to_scipy()
    return found if matrix.blocksize is not None else scipy.sparse.csr_array(found)


def multiply(matrix: StoredMatrix, x: Any) -> Any:
    """Return ``matrix @ x`` for a dense vector or matrix; `StoredMatrix.__matmul__` describes it.

    `x`: (ncols,) or (ncols, k).
    Returns (nrows,) or (nrows, k) array.
    Raises `InputError` if `x` is a sparse matrix.
    Raises `MatrixError` if the shapes do not fit.
    """
    vector, out = _dense(x, matrix, axis=1)
    for rows, part in _row_parts(matrix):
        out[rows] = part @ vector
    return out


def multiply_transposed(matrix: StoredMatrix, x: Any) -> Any:
    """Return ``matrix.T @ x`` for a dense vector or matrix; the matrix is read once, by rows.

    `x`: (nrows,) or (nrows, k).
    Returns (ncols,) or (ncols, k) array.
    Raises `InputError` if `x` is a sparse matrix.
    Raises `MatrixError` if the shapes do not fit.
    """
    vector, out = _dense(x, matrix, axis=0)
    for rows, part in _row_parts(matrix):
        out += part.T @ vector[rows]
    return out


def _row_parts(matrix: StoredMatrix) -> Iterator[tuple[slice, Any]]:
    """Yield parts of a matrix, each with its range of rows; a block row counts as its single rows."""
    height = (matrix.blocksize or (1, 1))[0]
    for start, stop in _parts(matrix, 0, matrix.nrows):
        yield slice(start * height, stop * height), _as_array(matrix, start, stop)


def _dense(x: Any, matrix: StoredMatrix, axis: int) -> tuple[Any, Any]:
    """Return a dense operand that fits this axis, as NumPy's, and zeros for the product."""
    length = matrix.full_shape[axis]
    if scipy.sparse.issparse(x) or isinstance(x, StoredMatrix):
        raise InputError("the product of stored and sparse matrices is stored too: spdist.matmul(a, b, out='C.zarr'), "
                         "after spdist.save('B.zarr', b) of one in memory")  # fmt: skip
    vector = np.asarray(x)
    if vector.ndim not in (1, 2) or vector.shape[0] != length:
        raise MatrixError(f"{matrix.url} or its transpose has {length:,} columns, x has shape {vector.shape}")
    dtype = np.result_type(number_dtype(matrix.dtype), vector.dtype)
    return vector, np.zeros((matrix.full_shape[1 - axis], *vector.shape[1:]), dtype)
