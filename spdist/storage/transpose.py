"""Transposes of stored matrices, and symmetric matrices from their upper triangles, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array
from spdist.storage.atomic_replace import Stage, ignore_progress, staged_matrix
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.foreign import versions
from spdist.storage.matrix import StoredMatrix, open_matrix, refuse_blocks
from spdist.storage.names.names import NO_NAMES, AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at


@versions.watched()
def transpose(
    a: str | Path | StoredMatrix,
    out: str | Path,
    *,
    overwrite: bool = False,
    steal: bool = False,
    names: bool = True,
    progress: Callable[[int, int], None] = ignore_progress,
    facts: dict[str, Any] | None = None,
) -> StoredMatrix:
    """Store the transpose of a stored matrix.

    Parameters
    ----------
    a : path, URL or StoredMatrix
    out : str or Path
        A path or an fsspec URL. Entries are sorted in temporary files next to it, of the size of A, and in about 250 MB
        of memory.
    overwrite : bool
        Replace the matrix that is there, once the new one is complete.
    steal : bool
        Take over from a run on another host that writes `out` and had no heartbeat for a minute.
    names : bool
        Whether the result gets the names of A's columns and rows.
    progress : callable, optional
        Called with entries read and entries in all.
    facts : dict, optional
        Kept under the attribute ``spdist``; by default the command that made the matrix.

    Returns
    -------
    StoredMatrix
        Canonical; its bytes depend on A's values alone.

    Raises
    ------
    InputError
        If `out` exists and `overwrite` is false, or A is stored in blocks.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> a = spdist.save("memory://A.zarr", sp.csr_array([[1, 2, 0], [0, 3, 0]]), overwrite=True)
    >>> transpose(a, "memory://At.zarr", overwrite=True).shape
    (3, 2)
    """
    matrix = a if isinstance(a, StoredMatrix) else open_matrix(a)
    versions.note(matrix)
    refuse_blocks("transposes", matrix)

    def transposed(rows: CSR, numbers: Int64Array) -> Iterator[Entries]:
        yield Entries(rows.indices, numbers, rows.data)

    shape = matrix.ncols, matrix.nrows
    result = _TransposeTarget(shape, matrix.nnz, facts or _origin("transpose"), matrix.names.T if names else NO_NAMES)
    with staged_matrix(out, overwrite=overwrite, steal=steal, shape=shape) as stage:
        _write(matrix, stage, transposed, result, progress)
    return open_matrix(out)


@versions.watched()
def symmetrize(
    c: str | Path | StoredMatrix,
    out: str | Path,
    *,
    conjugate: bool = False,
    overwrite: bool = False,
    steal: bool = False,
    names: bool = True,
    progress: Callable[[int, int], None] = ignore_progress,
) -> StoredMatrix:
    """Store a symmetric matrix, given its upper triangle, as ``multiply(..., triangle="upper")`` stores it.

    Parameters
    ----------
    c : path, URL or StoredMatrix
        Square, without entries below the diagonal.
    out : str or Path
        A path or an fsspec URL. Entries are sorted as by `transpose`, in temporary files of twice the size of C.
    conjugate : bool
        Whether to mirror complex values as their conjugates, for a Hermitian matrix.
    overwrite, steal, names, progress
        As for `transpose`.

    Returns
    -------
    StoredMatrix
        Canonical.

    Raises
    ------
    InputError
        If `out` exists and `overwrite` is false, or C is stored in blocks.
    MatrixError
        If C is not square, or has an entry below the diagonal.

    Examples
    --------
    >>> import scipy.sparse as sp, spdist
    >>> upper = spdist.save("memory://upper.zarr", sp.csr_array([[1, 2], [0, 3]]), overwrite=True)
    >>> symmetrize(upper, "memory://whole.zarr", overwrite=True).nnz
    4
    """
    matrix = c if isinstance(c, StoredMatrix) else open_matrix(c)
    versions.note(matrix)
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

    result = _TransposeTarget(matrix.shape, 2 * matrix.nnz, _origin("symmetrize"), matrix.names if names else NO_NAMES)
    with staged_matrix(out, overwrite=overwrite, steal=steal, shape=matrix.shape) as stage:
        _write(matrix, stage, both, result, progress)
    return open_matrix(out)


def _origin(command: str) -> dict[str, Any]:
    return {"provenance": {"command": command}}


@dataclass(frozen=True)
class _TransposeTarget:
    """The matrix to write: its shape, its estimated number of entries, its provenance, and its names."""

    shape: tuple[int, int]
    expected: int
    facts: dict[str, Any]
    names: AxisNames


def _write(
    m: StoredMatrix,
    stage: Stage,
    entries: Callable[[CSR, Int64Array], Iterator[Entries]],
    result: _TransposeTarget,
    progress: Callable[[int, int], None],
) -> None:
    """Sort and write the entries that a function returns for rows of `m` and the row number of each entry."""
    sorter = RowSorter(stage.scratch, result.shape, m.dtype, expected=result.expected)
    done = 0
    for start, rows in _blocks(m):
        numbers = np.repeat(np.arange(start, start + rows.nrows), np.diff(rows.indptr))
        for some in entries(rows, numbers):
            sorter.add(some)
        done += rows.nnz
        progress(done, m.nnz)
    names = names_for(stage.target, result.names)
    writer = MatrixWriter(stage.url, result.shape[1], m.dtype, result.facts, names)
    for block in sorter.blocks():
        writer.append(block)
    writer.close()


def _blocks(m: StoredMatrix) -> Iterator[tuple[int, CSR]]:
    for start, stop, _ in m.row_blocks(8 * m.indices.chunk):
        rows = m.rows(start, stop)
        check_canonical(rows, m.url, start)
        yield start, rows


@contextmanager
def transposed_copy(m: StoredMatrix, url: str) -> Iterator[StoredMatrix]:
    """Store the transpose of `m` at `url` for the duration of a ``with`` block.

    `url`: A path or an fsspec URL; anything there, left by a process that was killed, is deleted first.
    Yields the transpose, without names; deleted when the block is left.
    """
    at(url).discard()
    try:
        yield transpose(m, url, names=False)
    finally:
        if at(url).exists():
            at(url).remove()
