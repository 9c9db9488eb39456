"""Store a matrix that is in memory."""

from __future__ import annotations

from pathlib import Path

from spdist.jobs.operands import canonical_rows
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter


def save(url: str | Path, matrix: object, *, overwrite: bool = False, steal: bool = False) -> StoredMatrix:
    """Store a matrix in memory as a matrix in Zarr; `spdist.save` describes it.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    matrix : scipy.sparse matrix or array, BSR or CSR
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
        If something is at `url` already and `overwrite` is false, or it is not a matrix.
    MatrixError
        If `matrix` is not a matrix that spdist stores.
    """
    m = canonical_rows(matrix)
    with staged_matrix(url, overwrite=overwrite, steal=steal) as stage:
        writer = MatrixWriter(stage.url, m.ncols, m.dtype, {"provenance": {"command": "save"}})
        writer.append(m)
        writer.close()
    return open_matrix(url)
