"""CSR: the one in-memory form of a sparse matrix that every other module takes and gives.

A `CSR` is canonical when each row's column indices rise strictly (sorted, no duplicates) and lie in
``[0, ncols)``. Entries that are zero are kept: the pattern of a product is structural, the same for every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from spdist.errors import MatrixError

IndexArray = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]

SUPPORTED_KINDS = "biufc"
INT32_MAX = np.iinfo(np.int32).max


def index_dtype(ncols: int) -> np.dtype[Any]:
    """Return the dtype of column indices below `ncols`: int32 where they fit, else int64."""
    return np.dtype(np.int32 if ncols <= INT32_MAX else np.int64)


def block_dtype(dtype: np.dtype[Any], size: tuple[int, int]) -> np.dtype[Any]:
    """Return the dtype of a matrix's values where each is a dense block of r x s: a `CSR` of them is a block matrix."""
    return np.dtype([("block", dtype, size)])


def blocksize(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that values of a dtype are; None where they are numbers."""
    return (dtype["block"].shape[0], dtype["block"].shape[1]) if dtype.names == ("block",) else None


def from_blocks(data: npt.NDArray[Any]) -> ValueArray:
    """Return an array of blocks, (n, r, s), as (n,) values of `block_dtype`; a view where it has no gaps."""
    size = (data.shape[1], data.shape[2])
    flat = np.ascontiguousarray(data).reshape(-1, size[0] * size[1])
    return flat.view(block_dtype(data.dtype, size)).reshape(-1)


def number_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the numbers that values of a dtype are or, where they are blocks, hold."""
    return dtype if blocksize(dtype) is None else dtype["block"].base


def result_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a product: NumPy's ``result_type``; bool times bool stays bool (OR of ANDs).

    Raises
    ------
    MatrixError
        If one holds blocks and the other does not, or their blocks do not fit.
    """
    left, right = blocksize(a), blocksize(b)
    if left is None and right is None:
        return np.result_type(a, b)
    if left is None or right is None or left[1] != right[0]:
        sizes = ["numbers" if size is None else f"blocks of {size[0]} x {size[1]}" for size in (left, right)]
        raise MatrixError(
            f"A holds {sizes[0]}, B {sizes[1]}: both need blocks, of r x s and of s x t; import one of them again with "
            f"another --block-size, or without"
        )
    return block_dtype(np.result_type(number_dtype(a), number_dtype(b)), (left[0], right[1]))


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return `dtype` if spdist multiplies it: bool, integers, float32/64, complex64/128, and blocks of these.

    Raises
    ------
    MatrixError
        For any other dtype, float16 and long double among them.
    """
    number = number_dtype(dtype)
    ok = number.kind in "biu" or number in map(np.dtype, ("f4", "f8", "c8", "c16"))
    if not ok:
        raise MatrixError(
            f"values of dtype {dtype} cannot be multiplied: convert them to bool, an integer, float32, float64, "
            f"complex64 or complex128"
        )
    return dtype


def is_on_gpu(array: Any) -> bool:
    """Whether an array is CuPy's."""
    return type(array).__module__.partition(".")[0] == "cupy"


def module_of(array: Any) -> Any:
    """Return CuPy for its arrays, else NumPy."""
    if is_on_gpu(array):
        import cupy

        return cupy
    return np


@dataclass(frozen=True, slots=True)
class CSR:
    """A sparse matrix, or a block of rows of one, in compressed sparse row form.

    Attributes
    ----------
    indptr : (nrows + 1,) int64
        Row i holds entries ``indptr[i]:indptr[i + 1]``; starts at 0.
    indices : (nnz,) int32 or int64
        Columns.
    data : (nnz,) bool, integer, float or complex, or blocks of these
        Values. Blocks have `block_dtype`; rows and columns are then block rows and block columns.
    shape : (nrows, ncols)
    """

    indptr: Int64Array
    indices: IndexArray
    data: ValueArray
    shape: tuple[int, int]

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
        """Number of stored entries, zeros included."""
        return len(self.indices)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.indptr.nbytes + self.indices.nbytes + self.data.nbytes

    def rows(self, start: int, stop: int) -> CSR:
        """Return rows ``[start:stop)``; indices and data are views."""
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        indptr = self.indptr[start : stop + 1] - first
        return CSR(indptr, self.indices[first:last], self.data[first:last], (stop - start, self.ncols))

    def to_scipy(self) -> Any:
        """Return SciPy's `csr_matrix` on the same arrays, with no check and no copy of indices or data.

        Where values are blocks, a `bsr_array`.
        """
        size = blocksize(self.dtype)
        if size is None:
            out: Any = sp.csr_matrix(self.shape, dtype=self.dtype)
        else:
            shape = self.nrows * size[0], self.ncols * size[1]
            out = sp.bsr_array(shape, blocksize=size, dtype=number_dtype(self.dtype))
        dtype = np.int64 if self.nnz > INT32_MAX else self.indices.dtype
        out.indptr = self.indptr.astype(dtype, copy=False)
        out.indices = self.indices.astype(dtype, copy=False)
        out.data = self.data if size is None else self.data["block"]
        return out


def empty(shape: tuple[int, int], dtype: npt.DTypeLike) -> CSR:
    """Return a matrix with no entries."""
    indices = np.empty(0, index_dtype(shape[1]))
    return CSR(np.zeros(shape[0] + 1, np.int64), indices, np.empty(0, dtype), shape)


def from_scipy(matrix: Any) -> CSR:
    """Convert any SciPy sparse matrix or array to a canonical `CSR`; canonical input is not copied.

    Parameters
    ----------
    matrix : sparse matrix or array
        Two-dimensional, any format. Duplicates are summed and rows sorted in a copy; the input is not changed.

    Raises
    ------
    MatrixError
        If it is not a two-dimensional sparse matrix, has a dtype spdist does not multiply, or an index out of range.
    """
    kind, sparse = type(matrix).__name__, bool(sp.issparse(matrix))
    if not sparse or matrix.ndim != 2:
        raise MatrixError(f"expected a two-dimensional scipy.sparse matrix or array, got {kind}")
    check_dtype(matrix.dtype)
    m = matrix.tocsr()
    shape = (int(m.shape[0]), int(m.shape[1]))
    out = CSR(m.indptr.astype(np.int64, copy=False), m.indices.astype(index_dtype(shape[1]), copy=False), m.data, shape)
    check_structure(out)
    if is_canonical(out):
        return out
    m = m.copy() if m is matrix else m
    m.sum_duplicates()
    return CSR(
        m.indptr.astype(np.int64, copy=False), m.indices.astype(index_dtype(shape[1]), copy=False), m.data, shape
    )


def check_structure(m: CSR, name: str = "the matrix", first_row: int = 0) -> None:
    """Check that the arrays fit together and every column is in range; messages count rows from `first_row`.

    Raises
    ------
    MatrixError
        Naming `name`, the row and the value.
    """
    if m.indptr.shape != (m.nrows + 1,) or m.indptr[0] != 0:
        raise MatrixError(f"{name}: indptr must hold {m.nrows + 1:,} offsets that start at 0")
    if int(m.indptr[-1]) != len(m.indices) or len(m.indices) != len(m.data):
        raise MatrixError(
            f"{name}: indptr ends at {int(m.indptr[-1]):,}, but there are {len(m.indices):,} indices and "
            f"{len(m.data):,} values"
        )
    steps = np.diff(m.indptr)
    if len(steps) and steps.min() < 0:
        row = int(np.argmax(steps < 0))
        raise MatrixError(f"{name}: indptr falls after row {first_row + row:,}; offsets must not decrease")
    if m.nnz and (int(m.indices.min()) < 0 or int(m.indices.max()) >= m.ncols):
        at = int(np.argmax((m.indices < 0) | (m.indices >= m.ncols)))
        row = int(np.searchsorted(m.indptr, at, side="right")) - 1
        raise MatrixError(
            f"{name}: column {int(m.indices[at]):,} in row {first_row + row:,} is outside [0, {m.ncols:,}); "
            f"rebuild the matrix or correct its shape"
        )


def is_canonical(m: CSR) -> bool:
    """Whether every row's columns rise strictly: sorted and free of duplicates."""
    return bool(CSR(m.indptr, m.indices, m.indices, m.shape).to_scipy().has_canonical_format)


def check_canonical(m: CSR, name: str = "the matrix", first_row: int = 0) -> None:
    """Check structure and canonical form; rows in messages are counted from `first_row`.

    Raises
    ------
    MatrixError
        Naming the first row that is not sorted or holds a duplicate.
    """
    check_structure(m, name, first_row)
    if is_canonical(m):
        return
    falls = np.diff(m.indices) <= 0
    starts = m.indptr[1:-1]
    falls[starts[(starts > 0) & (starts < m.nnz)] - 1] = False
    at = int(np.argmax(falls))
    row = int(np.searchsorted(m.indptr, at, side="right")) - 1
    what = "holds a duplicate" if m.indices[at] == m.indices[at + 1] else "is not sorted"
    raise MatrixError(
        f"{name}: row {first_row + row:,} {what} at column {int(m.indices[at + 1]):,}; rewrite the matrix in canonical "
        f"form, for instance with spdist.save(path, matrix) after sum_duplicates()"
    )
