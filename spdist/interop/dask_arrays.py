"""Dask arrays of SciPy's CSR blocks: lazily from a stored matrix, and stored block by block."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import check_count
from spdist.matrices.csr import from_scipy
from spdist.matrices.dtypes import check_dtype
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter

if TYPE_CHECKING:
    from dask.array import Array

BLOCK_BYTES = 64 << 20
"""Mean bytes of a block in memory, unless the caller gives a number of rows."""


def is_dask_array(x: object) -> bool:
    """Whether `x` is a Dask array; Dask's arrays are not imported for it."""
    module = sys.modules.get("dask.array")
    return module is not None and isinstance(x, module.Array)


def from_hdf5(x: Any) -> Any:
    """Return what a backed AnnData keeps in HDF5 as a Dask array that reads it lazily; anything else as it is.

    `x`: for instance ``anndata.read_h5ad(..., backed="r").X``.
    The file stays open as long as AnnData holds it.
    """
    group = getattr(x, "group", None)
    if type(group).__module__.split(".")[0] != "h5py":
        return x
    from anndata.experimental import read_elem_lazy

    return read_elem_lazy(group)


def to_dask(matrix: str | Path | StoredMatrix, rows: int | None = None) -> Array:
    """Return a stored matrix as a Dask array; each block is a range of rows as a `csr_array` of SciPy.

    Parameters
    ----------
    matrix : path, URL or StoredMatrix
        Not of dense blocks.
    rows : int, optional
        Rows of a block; by default as many as take 64 MiB on average.

    Returns
    -------
    dask.array.Array
        Nothing is read before it is computed; each block reads its own rows.

    Raises
    ------
    InputError
        If the matrix is stored in dense blocks, or `rows` is no number above 0.
    MatrixError
        If it is not a matrix.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.eye_array(10), overwrite=True)
    >>> lazy = spdist.to_dask(a, rows=4)
    >>> lazy.chunks, lazy[3:6].compute().nnz
    (((4, 4, 2), (10,)), 3)
    """
    import dask.array as da
    import scipy.sparse

    check_count("rows", rows, "blocks of 64 MiB")
    m = matrix if isinstance(matrix, StoredMatrix) else open_matrix(matrix)
    if m.blocksize is not None:
        raise InputError(f"{m.url} is stored in dense blocks, which Dask arrays of CSR cannot hold")
    step = rows or max(1, min(m.nrows, BLOCK_BYTES * m.nrows // max(m.nbytes, 1)))
    heights = tuple(min(step, m.nrows - start) for start in range(0, m.nrows, step)) or (0,)
    found: Array = da.map_blocks(
        _read_rows,
        m,
        step,
        chunks=(heights, (m.ncols,)),
        dtype=m.dtype,
        meta=scipy.sparse.csr_array((0, 0), dtype=m.dtype),
        name=f"spdist-{m.fingerprint()[:16]}-{step}",
    )
    return found


def _read_rows(matrix: StoredMatrix, step: int, block_id: tuple[int, int]) -> Any:
    """Return block `block_id` of a matrix."""
    import scipy.sparse

    start = block_id[0] * step
    return scipy.sparse.csr_array(matrix.rows(start, start + step).to_scipy())


def from_dask(x: Array, url: str | Path, *, overwrite: bool = False, steal: bool = False) -> StoredMatrix:
    """Store a Dask array of two dimensions, a few blocks of rows at a time.

    Parameters
    ----------
    x : dask.array.Array
        Its blocks are sparse matrices of SciPy, `sparse` or CuPy, or dense; cut by rows, or by rows and columns. The
        numbers of rows may be unknown. Rows are sorted and duplicates summed. Zeros in dense blocks are left out.
    url : str or Path
        A path or fsspec URL.
    overwrite : bool
        Replace an existing matrix, once the new one is whole.
    steal : bool
        As in `multiply`.

    Returns
    -------
    StoredMatrix

    Raises
    ------
    InputError
        If `x` is no Dask array of two dimensions, or something is at `url` already and `overwrite` is false.
    MatrixError
        If a block is not a matrix, or of another width.

    Notes
    -----
    As many blocks of rows as this process may use CPUs are computed at a time, by the scheduler that Dask is set to,
    and written in order: they must fit in memory together.

    Examples
    --------
    >>> import dask.array as da, spdist
    >>> spdist.from_dask(da.eye(10, chunks=4), "memory://E.zarr", overwrite=True).nnz
    10
    """
    if not is_dask_array(x) or x.ndim != 2:
        raise InputError(
            f"a Dask array of two dimensions is expected, not {type(x).__name__} of {getattr(x, 'ndim', 0)}"
        )
    if any(math.isnan(width) for width in x.chunks[1]):
        raise InputError("the columns of the Dask array are of unknown number: x.compute_chunk_sizes() finds it")
    dtype = check_dtype(np.dtype(x.dtype).newbyteorder("="))
    shape = None if math.isnan(x.shape[0]) else (int(x.shape[0]), int(x.shape[1]))
    with staged_matrix(url, overwrite=overwrite, steal=steal, shape=shape) as stage:
        writer = MatrixWriter(stage.url, x.shape[1], dtype, {"provenance": {"command": "from_dask"}})
        for found in _computed(x):
            writer.append(from_scipy(_side_by_side(found, x.chunks[1], dtype)))
        writer.close()
    return open_matrix(url)


def _computed(x: Array) -> Iterator[list[Any]]:
    """Yield the blocks of each row of blocks, computed some rows at a time."""
    from dask.base import compute

    blocks, at_once = x.to_delayed(), max(1, count_cpus())
    for start in range(0, len(blocks), at_once):
        found: tuple[list[Any], ...] = compute(*(list(row) for row in blocks[start : start + at_once]))
        yield from found


def _side_by_side(blocks: list[Any], widths: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return one row of blocks as a CSR matrix of SciPy's."""
    import scipy.sparse

    made = [_csr(block).astype(dtype, copy=False) for block in blocks]
    for block, width in zip(made, widths, strict=True):
        if block.shape[1] != width:
            raise MatrixError(f"a block of the Dask array has {block.shape[1]:,} columns; its chunks say {width:,}")
    return made[0] if len(made) == 1 else scipy.sparse.hstack(made, format="csr")


def _csr(block: Any) -> Any:
    """Return a block as a CSR matrix of SciPy's."""
    import scipy.sparse

    if hasattr(block, "to_scipy_sparse"):  # of the package sparse
        block = block.to_scipy_sparse()
    elif hasattr(block, "get"):  # CuPy's
        block = block.get()
    if scipy.sparse.issparse(block):
        found: Any = block
        return found.tocsr()
    if isinstance(block, np.ndarray) and block.ndim == 2:
        return scipy.sparse.csr_array(block.astype(block.dtype.newbyteorder("="), copy=False))
    raise MatrixError(f"a block of the Dask array is a {type(block).__name__}, no matrix")
