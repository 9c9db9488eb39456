"""VBR (variable block row): a sparse matrix of dense blocks of many sizes.

Rows and columns are partitioned into parts, and a block covers one row part and one column part: unknowns of a mesh
whose nodes differ in kind, poses and points of a bundle adjustment. `spdist.inmemory.block_operands` multiplies such
matrices, `spdist.storage.vbr` stores them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.matrices import late_bindings
from spdist.matrices.csr import CSR
from spdist.matrices.csr import from_scipy as csr_from_scipy
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, index_dtype, module_of

if TYPE_CHECKING:
    import scipy.sparse as sp


class EntryLayout(NamedTuple):
    """Where the values of a `VBR` lie when its entries are in CSR."""

    positions: Int64Array  # (nnz,) int64: position among the CSR entries of each value, in the order of `VBR.data`
    columns: Int64Array  # (nnz,) int64: column of each value, in the same order
    indptr: Int64Array  # (nrows + 1,) int64: offsets of the rows in CSR


@dataclass(frozen=True, slots=True)
class VBR:
    """A sparse matrix of dense blocks of many sizes; its arrays are NumPy's, or CuPy's.

    Attributes
    ----------
    row_bounds : (block rows + 1,) int64
        Block row i has rows ``row_bounds[i]:row_bounds[i + 1]``; from 0 to nrows.
    column_bounds : (block columns + 1,) int64
        Block column j has columns ``column_bounds[j]:column_bounds[j + 1]``; from 0 to ncols.
    indptr : (block rows + 1,) int64
        Block row i holds blocks ``indptr[i]:indptr[i + 1]``.
    indices : (blocks,) int32 or int64
        Block columns, rising in each block row.
    data : (nnz,) bool, integer, float or complex
        Values, block after block, each block by rows.

    Raises
    ------
    MatrixError
        If bounds do not rise from 0, or the arrays do not fit together.

    Examples
    --------
    One block of 1 x 2 and one of 2 x 1:

    >>> import numpy as np, spdist
    >>> rows, columns, indptr = np.array([0, 1, 3]), np.array([0, 2, 3]), np.array([0, 1, 2])
    >>> m = spdist.VBR(rows, columns, indptr, np.array([0, 1], np.int32), np.array([1.0, 2.0, 3.0, 4.0]))
    >>> m.shape, m.blocks
    ((3, 3), 2)
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
        """Number of stored entries, zeros inside blocks included."""
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
        """Return the position in `data` at which each block starts, and where the last one ends."""
        heights = module_of(self.data).diff(self.row_bounds)[_owners(self.indptr, self.blocks)]
        starts: Int64Array = _offsets(heights * self._widths())
        return starts

    def pattern(self, values: ValueArray) -> CSR:
        """Return a matrix of block rows and block columns that has one of `values`, (blocks,), for each block."""
        return CSR(self.indptr, self.indices, values, (len(self.row_bounds) - 1, len(self.column_bounds) - 1))

    def entries(self) -> CSR:
        """Return the matrix in CSR, zeros inside blocks included, in the memory that holds it.

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
        layout = self.entry_layout()
        indices, data = xp.empty(self.nnz, index_dtype(self.shape[1])), xp.empty(self.nnz, self.dtype)
        indices[layout.positions], data[layout.positions] = layout.columns, self.data
        return CSR(layout.indptr, indices, data, self.shape)

    def save(self, url: str | Path, *, overwrite: bool = False, steal: bool = False) -> None:
        """Store the matrix in Zarr, for `open_vbr`; `url` is a path or an fsspec URL, `steal` as in `multiply`."""
        late_bindings.load("save_vbr")(self, url, overwrite=overwrite, steal=steal)

    def entry_layout(self) -> EntryLayout:
        """Return where each value lies when the entries are in CSR."""
        xp = module_of(self.data)
        starts, widths = self.starts(), self._widths()
        before = _offsets(widths)
        number = xp.arange(self.nnz)
        block = _owners(starts, self.nnz)
        block_row = _owners(self.indptr, self.blocks)[block]
        i, j = xp.divmod(number - starts[block], widths[block])
        first, last = self.indptr[block_row], self.indptr[block_row + 1]
        length = before[last] - before[first]  # of each row of the block row
        positions = starts[first] + i * length + (before[block] - before[first]) + j
        rows = _owners(self.row_bounds, self.shape[0])
        lengths = (before[self.indptr[1:]] - before[self.indptr[:-1]])[rows]
        return EntryLayout(positions, self.column_bounds[self.indices[block]] + j, _offsets(lengths))

    def _widths(self) -> Int64Array:
        """Return the number of columns of each block."""
        widths: Int64Array = module_of(self.data).diff(self.column_bounds)[self.indices]
        return widths


def _offsets(counts: Int64Array) -> Int64Array:
    """Return the sum of the counts before each, and the sum of all at the end."""
    xp = module_of(counts)
    out: Int64Array = xp.zeros(len(counts) + 1, np.int64)
    out[1:] = xp.cumsum(counts)
    return out


def _owners(offsets: Int64Array, count: int) -> Int64Array:
    """Return for each of the numbers ``0 .. count - 1`` the range of `offsets` that contains it."""
    xp = module_of(offsets)
    owners: Int64Array = xp.searchsorted(offsets, xp.arange(count), side="right") - 1
    return owners


def from_scipy(
    matrix: sp.sparray | sp.spmatrix,
    row_bounds: npt.ArrayLike | None = None,
    column_bounds: npt.ArrayLike | None = None,
) -> VBR:
    """Convert a SciPy matrix to blocks of many sizes.

    `row_bounds, column_bounds`: (parts + 1,) int, optional: where parts begin, and the end. By default a part is a run
    of rows, or of columns, with the same pattern, so that blocks are full.
    The result has a block wherever there is an entry, filled up with zeros.
    Raises `MatrixError` if the matrix cannot be converted to CSR, or the bounds do not end at its shape.

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
    row_part = np.searchsorted(rows, row, side="right") - 1
    column_part = np.searchsorted(columns, m.indices, side="right") - 1
    keys, block = np.unique(row_part * (len(columns) - 1) + column_part, return_inverse=True)
    indptr = np.searchsorted(keys, np.arange(len(rows)) * (len(columns) - 1))
    indices = (keys % max(1, len(columns) - 1)).astype(index_dtype(len(columns) - 1))
    size = int((np.diff(rows)[_owners(indptr, len(keys))] * np.diff(columns)[indices]).sum())
    out = VBR(rows, columns, indptr, indices, np.zeros(size, m.dtype))
    width = np.diff(columns)[column_part]
    out.data[out.starts()[block] + (row - rows[row_part]) * width + m.indices - columns[column_part]] = m.data
    return out


def runs(m: CSR) -> Int64Array:
    """Return where runs of consecutive rows with the same pattern begin, and the number of rows at the end.

    `m`: canonical, of NumPy's arrays.

    Examples
    --------
    >>> runs(CSR(np.array([0, 1, 2, 3]), np.array([4, 4, 5]), np.ones(3), (3, 6)))
    array([0, 2, 3])
    """
    lengths = np.diff(m.indptr)
    same_as_before = np.append(False, lengths[1:] == lengths[:-1])[: m.nrows]
    row = _owners(m.indptr, m.nnz)
    at = np.flatnonzero(same_as_before[row])
    same_as_before[row[at[m.indices[at] != m.indices[at - lengths[row[at]]]]]] = False
    return np.append(np.flatnonzero(~same_as_before), m.nrows)
