"""Store a matrix that is in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spdist.jobs.operands import canonical_rows
from spdist.matrices.dtypes import blocksize
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.names import AxisNames, given_names
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter


def save(
    url: str | Path,
    matrix: object,
    *,
    row_names: Iterable[str] | None = None,
    column_names: Iterable[str] | None = None,
    overwrite: bool = False,
    steal: bool = False,
) -> StoredMatrix:
    """Store a matrix in memory as a matrix in Zarr; `spdist.save` describes it.

    Parameters
    ----------
    url : str or Path
        A path or fsspec URL.
    matrix : scipy.sparse matrix or array, BSR or CSR
    row_names, column_names : iterable of str, optional
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
        If `matrix` is not a matrix that spdist stores, or has more or fewer rows or columns than names.
    """
    m = canonical_rows(matrix)
    r, s = blocksize(m.dtype) or (1, 1)
    rows, columns = (
        given_names(row_names, "row_names", m.nrows * r),
        given_names(column_names, "column_names", m.ncols * s),
    )
    names = AxisNames(rows, columns)
    names.check()
    facts = {"provenance": {"command": "save"}}
    with staged_matrix(url, overwrite=overwrite, steal=steal, shape=(m.nrows * r, m.ncols * s)) as stage:
        writer = MatrixWriter(stage.url, m.ncols, m.dtype, facts, names_for(stage.target, names))
        writer.append(m)
        writer.close()
    return open_matrix(url)
