"""VBR: a sparse matrix of dense blocks of many sizes, in memory and stored; products of such matrices.

Rows and columns are cut into parts, and a block joins a part of each: unknowns of a mesh whose kinds of nodes differ,
poses and points of an adjustment. A product has the row parts of A and the column parts of B.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.matrices.csr import CSR, IndexArray, Int64Array, ValueArray, index_dtype, is_on_gpu, module_of
from spdist.matrices.csr import from_scipy as csr_from_scipy

ENCODING = "vbr_matrix"


@dataclass(frozen=True, slots=True)
class VBR:
    """A sparse matrix of dense blocks of many sizes; arrays are NumPy's, or CuPy's.

    Attributes
    ----------
    row_bounds : (block rows + 1,) int64
        Block row i has rows ``row_bounds[i]:row_bounds[i + 1]``; from 0 to nrows.
    column_bounds : (block columns + 1,) int64
        The same of columns.
    indptr : (block rows + 1,) int64
        Block row i holds blocks ``indptr[i]:indptr[i + 1]``.
    indices : (blocks,) int32 or int64
        Block columns, rising in each block row.
    data : (nnz,) bool, integer, float or complex
        Values, block after block, each by rows.

    Raises
    ------
    MatrixError
        If bounds do not rise from 0, or the arrays do not fit together.
    """

    row_bounds: Int64Array
    column_bounds: Int64Array
    indptr: Int64Array
    indices: IndexArray
    data: ValueArray

    def __post_init__(self) -> None:
        for name, bounds in (("row", self.row_bounds), ("column", self.column_bounds)):
            if not len(bounds) or int(bounds[0]) or bool((bounds[1:] <= bounds[:-1]).any()):
                raise MatrixError(f"{name} bounds of blocks must rise from 0: no part is empty")
        if len(self.indptr) != len(self.row_bounds) or int(self.indptr[-1]) != len(self.indices):
            raise MatrixError(
                f"{len(self.indptr):,} offsets, {len(self.indices):,} blocks do not fit {len(self.row_bounds) - 1:,} "
                f"block rows: these need an offset more than there are, and the last counts the blocks"
            )
        if int(self.starts()[-1]) != len(self.data):
            raise MatrixError(f"the blocks have {int(self.starts()[-1]):,} values, but there are {len(self.data):,}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return int(self.row_bounds[-1]), int(self.column_bounds[-1])

    @property
    def blocks(self) -> int:
        """Number of stored blocks."""
        return len(self.indices)

    @property
    def nnz(self) -> int:
        """Number of stored entries, zeros inside of blocks included."""
        return len(self.data)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(getattr(self, field.name).nbytes) for field in fields(self))

    def starts(self) -> Int64Array:
        """Return where the values of each block start, and where the last ends."""
        heights = module_of(self.data).diff(self.row_bounds)[_owners(self.indptr, self.blocks)]
        starts: Int64Array = _sums(heights * self._widths())
        return starts

    def pattern(self, values: Any) -> CSR:
        """Return the matrix with a number of `values`, (blocks,), in the place of each block."""
        return CSR(self.indptr, self.indices, values, (len(self.row_bounds) - 1, len(self.column_bounds) - 1))

    def entries(self) -> CSR:
        """Return the matrix in CSR, zeros inside of blocks included, in the memory where it is.

        Examples
        --------
        >>> bounds = np.array([0, 1, 3])
        >>> m = VBR(bounds, bounds, np.array([0, 1, 2]), np.array([1, 0], np.int32), np.array([5, 6, 7, 8]))
        >>> m.entries().to_scipy().toarray()
        array([[0, 5, 6],
               [7, 0, 0],
               [8, 0, 0]])
        """
        xp = module_of(self.data)
        place, columns, indptr = self._places()
        indices, data = xp.empty(self.nnz, index_dtype(self.shape[1])), xp.empty(self.nnz, self.dtype)
        indices[place], data[place] = columns, self.data
        return CSR(indptr, indices, data, self.shape)

    def save(self, url: str | Path, *, overwrite: bool = False) -> None:
        """Store the matrix in Zarr, for `open_vbr`; `url` is a path or an fsspec URL."""
        from spdist.storage import (
            atomic_replace,  # products need no Zarr
            groups,
        )

        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: array.get() if is_on_gpu(array) else array for name, array in arrays.items()}
        with atomic_replace.staged_matrix(url, overwrite=overwrite) as stage:
            facts = {"encoding-type": ENCODING, "encoding-version": "0.1.0", "shape": list(self.shape)}
            groups.write_arrays(stage.url, arrays, facts)

    def _widths(self) -> Any:
        """Return the columns of each block."""
        return module_of(self.data).diff(self.column_bounds)[self.indices]

    def _places(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return where each value stands among the entries in CSR, its column, and where rows begin there."""
        xp = module_of(self.data)
        starts, before, widths = self.starts(), _sums(self._widths()), self._widths()
        number = xp.arange(self.nnz)
        block = _owners(starts, self.nnz)
        block_row = _owners(self.indptr, self.blocks)[block]
        i, j = xp.divmod(number - starts[block], widths[block])
        first, last = self.indptr[block_row], self.indptr[block_row + 1]
        length = before[last] - before[first]  # of each row of the block row
        place = starts[first] + i * length + (before[block] - before[first]) + j
        rows = _owners(self.row_bounds, self.shape[0])
        lengths = (before[self.indptr[1:]] - before[self.indptr[:-1]])[rows]
        return place, self.column_bounds[self.indices[block]] + j, _sums(lengths)


def _sums(counts: Any) -> Any:
    """Return the sums of the counts before each, and of all."""
    xp = module_of(counts)
    out = xp.zeros(len(counts) + 1, np.int64)
    out[1:] = xp.cumsum(counts)
    return out


def _owners(offsets: Any, count: int) -> Any:
    """Return the part that each of `count` numbers is in, by where the parts begin."""
    xp = module_of(offsets)
    return xp.searchsorted(offsets, xp.arange(count), side="right") - 1


def from_scipy(matrix: Any, row_bounds: Any = None, column_bounds: Any = None) -> VBR:
    """Bring a matrix of SciPy's into blocks of many sizes.

    Parameters
    ----------
    matrix : sparse matrix or array
    row_bounds, column_bounds : (parts + 1,) int, optional
        Where parts begin, and the end; by default runs of rows, and of columns, of the same pattern, so that blocks
        are full.

    Returns
    -------
    VBR
        With a block wherever there is an entry, filled up with zeros.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from_scipy(sp.block_diag([np.ones((2, 2)), np.ones((3, 1))])).row_bounds
    array([0, 2, 5])
    """
    m = csr_from_scipy(matrix)
    rows = runs(m) if row_bounds is None else np.asarray(row_bounds, np.int64)
    columns = runs(csr_from_scipy(m.to_scipy().T)) if column_bounds is None else np.asarray(column_bounds, np.int64)
    if (int(rows[-1]), int(columns[-1])) != m.shape:
        raise MatrixError(f"bounds end at {rows[-1]:,} and {columns[-1]:,}, the matrix is {m.nrows:,} x {m.ncols:,}")
    row = _owners(m.indptr, m.nnz)
    part = np.searchsorted(rows, row, side="right") - 1
    column_part = np.searchsorted(columns, m.indices, side="right") - 1
    keys, block = np.unique(part * (len(columns) - 1) + column_part, return_inverse=True)
    indptr = np.searchsorted(keys, np.arange(len(rows)) * (len(columns) - 1))
    indices = (keys % max(1, len(columns) - 1)).astype(index_dtype(len(columns) - 1))
    size = int((np.diff(rows)[_owners(indptr, len(keys))] * np.diff(columns)[indices]).sum())
    made = VBR(rows, columns, indptr, indices, np.zeros(size, m.dtype))
    width = np.diff(columns)[column_part]
    made.data[made.starts()[block] + (row - rows[part]) * width + m.indices - columns[column_part]] = m.data
    return made


def runs(m: CSR) -> Int64Array:
    """Return where runs of rows of the same pattern begin, and the end.

    Parameters
    ----------
    m : CSR
        Canonical, of NumPy's arrays.
    """
    lengths = np.diff(m.indptr)
    alike = np.append(False, lengths[1:] == lengths[:-1])[: m.nrows]
    row = _owners(m.indptr, m.nnz)
    at = np.flatnonzero(alike[row])
    alike[row[at[m.indices[at] != m.indices[at - lengths[row[at]]]]]] = False
    return np.append(np.flatnonzero(~alike), m.nrows)


def open_vbr(url: str | Path, *, on_gpu: bool = False) -> VBR:
    """Open a matrix that `VBR.save` stored, whole; `on_gpu` brings it to the current CUDA device.

    Raises
    ------
    MatrixError
        If there is no such matrix.
    CorruptError
        If a Zarr chunk is missing, truncated or altered.
    """
    from spdist.storage import groups

    arrays, attributes = groups.read_arrays(url)
    if attributes.get("encoding-type") != ENCODING:
        raise MatrixError(f"{url}: not in blocks of many sizes, but {attributes.get('encoding-type')}")
    if on_gpu:
        import cupy

        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
    return VBR(**arrays)


def multiply(a: VBR, b: VBR, threads: int | None = None) -> VBR:
    """Return ``a @ b``, with a block wherever blocks of A and B meet; made entry by entry, where the matrices are.

    Raises
    ------
    MatrixError
        If they are not in one memory, the column parts of A are not the row parts of B, or the GPU does not multiply
        such values.
    """
    if is_on_gpu(a.data) != is_on_gpu(b.data):
        raise MatrixError("one operand is on the GPU and the other is not: bring both to one side")
    fit = len(a.column_bounds) == len(b.row_bounds) and bool((a.column_bounds == b.row_bounds).all())
    if not fit:
        raise MatrixError(
            f"the columns of A, {a.shape[1]:,} in {len(a.column_bounds) - 1:,} parts, are not cut as the rows of B, "
            f"{b.shape[0]:,} in {len(b.row_bounds) - 1:,}: give both the same bounds"
        )
    xp = module_of(a.data)

    def product(left: CSR, right: CSR) -> CSR:
        if is_on_gpu(left.data):
            return rowwise_gpu.multiply(left, right)
        return cpu.multiply(left, right, engine="numba", threads=threads or os.cpu_count() or 1)

    pattern = product(*(m.pattern(xp.ones(m.blocks, np.float32)) for m in (a, b)))
    values = product(a.entries(), b.entries()).data
    c = VBR(a.row_bounds, b.column_bounds, pattern.indptr.astype(np.int64), pattern.indices, values)
    return replace(c, data=values[c._places()[0]])  # these were in the order of the entries
