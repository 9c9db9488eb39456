"""The transpose of a stored matrix, or the whole of a symmetric one, in bounded memory; and copies for one product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array
from spdist.storage import locations
from spdist.storage.atomic_replace import ignore_progress, staged_matrix
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.matrix import StoredMatrix, open_matrix, refuse_blocks
from spdist.storage.writer import MatrixWriter


def transpose(
    a: str | Path | StoredMatrix,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = ignore_progress,
    facts: dict[str, Any] | None = None,
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
    facts : dict, optional
        What its record says; by default, where it comes from.

    Returns
    -------
    StoredMatrix
        Canonical; its bytes depend on A's values alone.

    Raises
    ------
    InputError
        If something is at `out` already, without `overwrite`, or A is stored in blocks.
    """
    matrix = a if isinstance(a, StoredMatrix) else open_matrix(a)
    refuse_blocks("transposes", matrix)

    def turned(rows: CSR, numbers: Int64Array) -> Iterator[Entries]:
        yield Entries(rows.indices, numbers, rows.data)

    return _write(matrix, out, (matrix.ncols, matrix.nrows), turned, overwrite, progress, facts or _origin("transpose"))


def symmetrize(
    c: str | Path | StoredMatrix,
    out: str | Path,
    *,
    conjugate: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = ignore_progress,
) -> StoredMatrix:
    """Store the whole of a symmetric matrix from its upper triangle, which ``multiply(..., triangle="upper")`` stores.

    Parameters
    ----------
    c : path, URL or StoredMatrix
        Square, without entries below the diagonal.
    out : str or Path
        Where the whole goes. Entries are sorted as by `transpose`, in temporary files of twice the size of C.
    conjugate : bool
        Whether complex values are mirrored as their conjugates: for a Hermitian matrix.
    overwrite, progress
        As for `transpose`.

    Returns
    -------
    StoredMatrix
        Canonical.

    Raises
    ------
    InputError
        As `transpose`.
    MatrixError
        If C is not square, or has an entry below the diagonal.
    """
    matrix = c if isinstance(c, StoredMatrix) else open_matrix(c)
    refuse_blocks("triangles", matrix)
    if matrix.nrows != matrix.ncols:
        raise MatrixError(f"{matrix.url} is {matrix.nrows:,} x {matrix.ncols:,}: what is symmetric is square")

    def both(rows: CSR, numbers: Int64Array) -> Iterator[Entries]:
        if (below := np.flatnonzero(rows.indices < numbers)).size:
            raise MatrixError(
                f"{matrix.url}, row {numbers[below[0]]:,}, column {rows.indices[below[0]]:,}: an entry below the "
                f"diagonal of what should be an upper triangle"
            )
        yield Entries(numbers, rows.indices, rows.data)
        above = rows.indices > numbers
        values = rows.data[above].conj() if conjugate else rows.data[above]
        yield Entries(rows.indices[above], numbers[above], values)

    return _write(matrix, out, matrix.shape, both, overwrite, progress, _origin("symmetrize"), 2 * matrix.nnz)


def _origin(command: str) -> dict[str, Any]:
    return {"provenance": {"command": command}}


def _write(
    m: StoredMatrix,
    out: str | Path,
    shape: tuple[int, int],
    entries: Callable[[CSR, Int64Array], Iterator[Entries]],
    overwrite: bool,
    progress: Callable[[int, int], None],
    facts: dict[str, Any],
    expected: int | None = None,
) -> StoredMatrix:
    """Store what a function makes of rows of `m` and the row of each of their entries: entries in any order.

    About as many are `expected`; by default as `m` has.
    """
    with staged_matrix(out, overwrite=overwrite) as stage:
        sorter = RowSorter(stage.scratch, shape, m.dtype, expected=m.nnz if expected is None else expected)
        done = 0
        for start, rows in _blocks(m):
            numbers = np.repeat(np.arange(start, start + rows.nrows), np.diff(rows.indptr))
            for some in entries(rows, numbers):
                sorter.add(some)
            done += rows.nnz
            progress(done, m.nnz)
        writer = MatrixWriter(stage.url, shape[1], m.dtype, facts)
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
    if locations.exists(place):  # of a run that was killed
        locations.remove(place)
    try:
        yield transpose(m, place)
    finally:
        if locations.exists(place):
            locations.remove(place)
