"""BSR: a sparse matrix whose entries are dense blocks of one size, r x s.

A `BSR` is canonical if the block columns of each block row rise strictly. Blocks of zeros are kept, as zeros are in a
`CSR`. Its arrays are NumPy's or, on the GPU, CuPy's; CuPy has no such matrix of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.checks import check_structure, is_canonical
from spdist.matrices.csr import CSR, in_native_order, is_scipy
from spdist.matrices.dtypes import (
    IndexArray,
    Int64Array,
    ValueArray,
    blocksize,
    check_dtype,
    from_blocks,
    index_dtype,
    module_of,
)

if TYPE_CHECKING:
    import scipy.sparse


@dataclass(frozen=True, slots=True)
class BSR:
    """A sparse matrix of dense blocks, or a range of its block rows.

    Attributes
    ----------
    indptr : (nrows / r + 1,) int64, on the GPU also int32
        Block row i holds blocks ``indptr[i]:indptr[i + 1]``; starts at 0.
    indices : (blocks,) int32 or int64
        Block columns.
    data : (blocks, r, s) bool, integer, float or complex
        Values, each block by rows, without gaps.
    shape : (nrows, ncols)
        In rows and columns, not in blocks.

    Examples
    --------
    >>> import numpy as np, spdist
    >>> indptr, indices, data = np.array([0, 1, 2]), np.array([0, 1], np.int32), np.ones((2, 2, 3))
    >>> spdist.BSR(indptr, indices, data, (4, 6)).to_scipy().nnz
    12
    """

    indptr: Int64Array
    indices: IndexArray
    data: ValueArray
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.data.ndim != 3 or len(self.data) != len(self.indices):
            raise MatrixError(
                f"a block matrix of {len(self.indices):,} blocks needs values of shape (blocks, r, s), not "
                f"{self.data.shape}"
            )
        r, s = self.blocksize
        if 0 in (r, s) or self.shape[0] % r or self.shape[1] % s or len(self.indptr) != self.shape[0] // r + 1:
            raise MatrixError(
                f"{len(self.indptr):,} offsets of blocks of {r} x {s} do not fit a matrix of {self.shape[0]:,} x "
                f"{self.shape[1]:,}: it needs whole blocks, and an offset more than block rows"
            )

    @property
    def blocksize(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return int(self.data.shape[1]), int(self.data.shape[2])

    @property
    def blocks(self) -> int:
        """Number of stored blocks."""
        return len(self.indices)

    @property
    def nnz(self) -> int:
        """Number of stored entries, zeros included."""
        return int(self.data.size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return int(self.indptr.nbytes + self.indices.nbytes + self.data.nbytes)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Number of block rows and of block columns."""
        return self.shape[0] // self.blocksize[0], self.shape[1] // self.blocksize[1]

    def rows(self) -> CSR:
        """Return the matrix as a `CSR` whose values are blocks, on the same arrays, which must be NumPy's."""
        return CSR(self.indptr, self.indices, from_blocks(self.data), self.block_shape)

    def pattern(self, values: ValueArray) -> CSR:
        """Return a matrix of block rows and block columns that has one of `values`, (blocks,), for each block."""
        return CSR(self.indptr, self.indices, values, self.block_shape)

    def to_scipy(self) -> Any:
        """Return SciPy's `bsr_array` on the same arrays, without checks; only offsets are copied."""
        return self.rows().to_scipy()


def check_fit(a: BSR, b: BSR) -> None:
    """Raise `MatrixError` with the sizes if the shapes or blocks of ``a @ b`` do not fit."""
    if a.shape[1] == b.shape[0] and a.blocksize[1] == b.blocksize[0]:
        return
    left, right = (f"{m.shape[0]:,} x {m.shape[1]:,} in blocks of {m.blocksize[0]} x {m.blocksize[1]}" for m in (a, b))
    raise MatrixError(
        f"shapes do not fit: A is {left}, B {right}; A needs as many columns as B has rows, and its blocks as many as "
        f"B's blocks have rows"
    )


def from_rows(m: CSR) -> BSR:
    """Return a `CSR` whose values are blocks as a `BSR`, on the same arrays."""
    size = blocksize(m.dtype)
    assert size is not None
    return BSR(m.indptr, m.indices, m.data["block"], (m.nrows * size[0], m.ncols * size[1]))


def entries(m: BSR) -> CSR:
    """Return the matrix in CSR, zeros inside blocks included, in the memory that holds it.

    Examples
    --------
    >>> m = BSR(np.array([0, 1]), np.array([1]), np.array([[[1, 2], [0, 4]]]), (2, 4))
    >>> entries(m).indices, entries(m).data
    (array([2, 3, 2, 3], dtype=int32), array([1, 2, 0, 4]))
    """
    xp = module_of(m.data)
    r, s = m.blocksize
    blocks = xp.diff(m.indptr)
    indptr = xp.zeros(m.shape[0] + 1, np.int64)
    indptr[1:] = xp.cumsum(xp.repeat(blocks * s, r))
    numbers = xp.arange(m.blocks)
    rows = xp.searchsorted(m.indptr, numbers, side="right") - 1
    # Entry (i, j) of a block is in row i of its block row, after the entries of the blocks to its left.
    starts = m.indptr[rows] * (r * s) + (numbers - m.indptr[rows]) * s
    positions = starts[:, None, None] + (xp.arange(r) * s)[:, None] * blocks[rows][:, None, None] + xp.arange(s)
    indices, data = xp.empty(m.nnz, index_dtype(m.shape[1])), xp.empty(m.nnz, m.dtype)
    indices[positions] = m.indices[:, None, None] * s + xp.arange(s, dtype=indices.dtype)
    data[positions] = m.data
    return CSR(indptr, indices, data, m.shape)


def from_scipy(matrix: scipy.sparse.bsr_array | scipy.sparse.bsr_matrix) -> BSR:
    """Convert SciPy's `bsr_array` or `bsr_matrix` to a canonical `BSR`; canonical input is not copied.

    `matrix`: duplicates are summed and block rows sorted in a copy; the input is not changed.
    Raises `MatrixError` if it is no block matrix, has a dtype spdist does not multiply, or a block column out of range.
    """
    if not is_scipy_bsr(matrix):
        raise MatrixError(f"expected a scipy.sparse block matrix, got {type(matrix).__name__}")
    matrix = in_native_order(matrix)
    check_dtype(matrix.dtype)
    check_structure(_arrays(matrix).pattern(np.empty(len(matrix.indices), np.bool_)))
    if is_canonical(_arrays(matrix).pattern(np.empty(len(matrix.indices), np.bool_))):
        return _arrays(matrix)
    copied = matrix.copy()
    copied.sum_duplicates()
    return _arrays(copied)


def is_scipy_bsr(matrix: Any) -> TypeGuard[scipy.sparse.bsr_array | scipy.sparse.bsr_matrix]:
    """Whether a matrix is SciPy's `bsr_array` or `bsr_matrix`."""
    return is_scipy(matrix) and matrix.format == "bsr"


def _arrays(m: scipy.sparse.bsr_array | scipy.sparse.bsr_matrix) -> BSR:
    """Return a `BSR` on the arrays of SciPy's block matrix, without the unused elements at their ends."""
    shape, blocks = (int(m.shape[0]), int(m.shape[1])), int(m.indptr[-1])
    indices = m.indices[:blocks].astype(index_dtype(shape[1] // m.blocksize[1]), copy=False)
    return BSR(m.indptr.astype(np.int64, copy=False), indices, np.ascontiguousarray(m.data[:blocks]), shape)
