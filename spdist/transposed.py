"""The transpose of a stored matrix, written in bounded memory; and copies of it that last as long as a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spdist import storage
from spdist.coo import Entries, RowSorter
from spdist.csr import CSR, check_canonical
from spdist.staging import ignore_progress, staged_matrix
from spdist.storage import MatrixWriter, StoredMatrix, open_matrix


def transpose(
    a: str | Path | StoredMatrix,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = ignore_progress,
) -> StoredMatrix:
    """Store the transpose of a stored matrix.

    Parameters
    ----------
    a : path, URL or StoredMatrix
    out : str or Path
        Where it goes. Entries are sorted in temporary files beside it, of the size of A, and in about 250 MB of memory.
    overwrite : bool
        Replace what is there, once the new matrix is whole.
    progress : callable, optional
        Called with entries read and entries in all.

    Returns
    -------
    StoredMatrix
        Canonical; its bytes depend on A's values alone.

    Raises
    ------
    InputError
        If something is at `out` already, without `overwrite`.
    """
    matrix = a if isinstance(a, StoredMatrix) else open_matrix(a)
    with staged_matrix(out, overwrite=overwrite) as stage:
        sorter = RowSorter(stage.scratch, (matrix.ncols, matrix.nrows), matrix.dtype, expected=matrix.nnz)
        done = 0
        for start, rows in _blocks(matrix):
            numbers = np.repeat(np.arange(start, start + rows.nrows), np.diff(rows.indptr))
            sorter.add(Entries(rows.indices, numbers, rows.data))
            done += rows.nnz
            progress(done, matrix.nnz)
        writer = MatrixWriter(stage.url, matrix.nrows, matrix.dtype, {"provenance": {"command": "transpose"}})
        for block in sorter.blocks():
            writer.append(block)
        writer.close()
    return open_matrix(out)


def _blocks(m: StoredMatrix) -> Iterator[tuple[int, CSR]]:
    for start, stop, _ in m.row_blocks(8 * m.indices.chunk):
        rows = m.rows(start, stop)
        check_canonical(rows, m.url, start)
        yield start, rows


@contextmanager
def transposed_copy(m: StoredMatrix, place: str) -> Iterator[StoredMatrix]:
    """Give a transpose at `place`, and remove it in the end, whatever happens."""
    if storage.exists(place):  # of a run that was killed
        storage.remove(place)
    try:
        yield transpose(m, place)
    finally:
        if storage.exists(place):
            storage.remove(place)
