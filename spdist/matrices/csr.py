"""CSR (compressed sparse row): the in-memory form of a sparse matrix that all other modules take and return.

A `CSR` is canonical if the column indices of each row rise strictly (sorted, no duplicates) and lie in ``[0, ncols)``.
Entries that are zero are kept: the pattern of a product is structural and the same for every engine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.foundation.other_objects import refuse_other_objects
from spdist.matrices.checks import check_structure
from spdist.matrices.dtypes import (
    INT32_MAX,
    IndexArray,
    Int64Array,
    ValueArray,
    blocksize,
    check_dtype,
    converted,
    index_dtype,
    number_dtype,
)


@dataclass(frozen=True, slots=True)
class CSR:
    """A sparse matrix, or a row block of one, in compressed sparse row form."""

    indptr: Int64Array  # (nrows + 1,) int64: row i holds entries ``indptr[i]:indptr[i + 1]``; starts at 0
    indices: IndexArray  # (nnz,) int32 or int64: columns
    # (nnz,) bool, integer, float or complex, or blocks of these: values. Blocks have `block_dtype`; rows and columns
    # are then block rows and block columns.
    data: ValueArray
    shape: tuple[int, int]  # (nrows, ncols)

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

        If values are blocks, return a `bsr_array`.
        """
        import scipy.sparse

        size = blocksize(self.dtype)
        if size is None:
            out: Any = scipy.sparse.csr_matrix(self.shape, dtype=self.dtype)
        else:
            shape = self.nrows * size[0], self.ncols * size[1]
            out = scipy.sparse.bsr_array(shape, blocksize=size, dtype=number_dtype(self.dtype))
        dtype = np.dtype(np.int64) if self.nnz > INT32_MAX else self.indices.dtype
        out.indptr, out.indices = converted(self.indptr, dtype), converted(self.indices, dtype)
        out.data = self.data if size is None else self.data["block"]
        return out


def empty(shape: tuple[int, int], dtype: npt.DTypeLike) -> CSR:
    """Return a matrix without entries.

    `shape`: (nrows, ncols).
    `dtype`: of the values.
    Returns its columns have the `index_dtype` of ``ncols``.

    Examples
    --------
    >>> empty((2, 3), "f8").indptr
    array([0, 0, 0])
    """
    indices = np.empty(0, index_dtype(shape[1]))
    return CSR(np.zeros(shape[0] + 1, np.int64), indices, np.empty(0, dtype), shape)


def is_scipy(matrix: Any) -> bool:
    """Whether something is a sparse matrix or array of SciPy, which is not loaded for it: then nothing is one.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> is_scipy(sp.eye_array(2)), is_scipy("A.zarr")
    (True, False)
    """
    module = sys.modules.get("scipy.sparse")
    return module is not None and bool(module.issparse(matrix))


def from_scipy(matrix: Any, threads: int | None = None) -> CSR:
    """Convert any SciPy sparse matrix or array to a canonical `CSR`; canonical input is not copied.

    `matrix`: two-dimensional, any format. Duplicates are summed and rows sorted in a copy; the input is not changed.
    `threads`: most threads that check a large matrix; by default one a CPU.
    Raises `MatrixError` if it is not a two-dimensional sparse matrix, has a dtype spdist does not multiply, or an index
    out of range.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from_scipy(sp.coo_array(([1, 2], ([0, 0], [1, 1])), shape=(1, 2))).data
    array([3])
    """
    out = arrays_of(matrix, threads)
    if not check_structure(out, threads=threads).is_canonical:
        m = matrix.tocsr()
        m = m.copy() if m is matrix else m
        m.sum_duplicates()
        out = arrays_of(m, threads)
    return replace(out, indices=converted(out.indices, index_dtype(out.ncols), threads))


def in_native_order(matrix: Any) -> Any:
    """Return a SciPy matrix whose values have this machine's byte order: itself, or a copy."""
    return matrix if matrix.dtype.isnative else matrix.astype(matrix.dtype.newbyteorder("="))


def arrays_of(matrix: Any, threads: int | None = None) -> CSR:
    """Return a SciPy sparse matrix or array as a `CSR` without a look at its entries.

    `matrix, threads`: as for `from_scipy`.
    Returns columns may be out of range, have the other index dtype, not rise, or be there twice.
    Raises `MatrixError` if it is not a two-dimensional sparse matrix, or has a dtype spdist does not multiply.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> arrays_of(sp.csr_array(([1, 2], [1, 1], [0, 2]), shape=(1, 2))).indices.tolist()
    [1, 1]
    """
    refuse_other_objects(matrix)
    if not is_scipy(matrix) or matrix.ndim != 2:
        kind = type(matrix).__name__
        remedy = "; spdist.open(path).to_scipy() reads a stored one" if isinstance(matrix, str | Path) else ""
        remedy = "; x.to_memory() reads it" if hasattr(matrix, "to_memory") else remedy  # AnnData's sparse dataset
        raise MatrixError(f"expected a two-dimensional scipy.sparse matrix or array, got {kind}{remedy}")
    matrix = in_native_order(matrix)
    check_dtype(matrix.dtype)
    m = matrix.tocsr()
    return CSR(converted(m.indptr, np.dtype(np.int64), threads), m.indices, m.data, (int(m.shape[0]), int(m.shape[1])))
