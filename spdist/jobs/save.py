"""Store a matrix that is in memory; append rows to a stored one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.jobs.operands import are_in_memory, canonical_rows, open_operand
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import blocksize
from spdist.storage import groups
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.lock import hold_target
from spdist.storage.matrix import StoredMatrix, open_matrix, refuse_blocks
from spdist.storage.names.names import AxisNames, Names, given_names
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import normalise

PART_ENTRIES = 1 << 22
"""Entries of appended rows that are read at a time."""


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


def append(
    target: str | Path, rows: object, *, row_names: Iterable[str] | None = None, steal: bool = False
) -> StoredMatrix:
    """Append rows to a stored matrix; `spdist.append` describes it.

    Parameters
    ----------
    target : str or Path
    rows : scipy.sparse matrix or array; path, URL or StoredMatrix
    row_names : iterable of str, optional
    steal : bool

    Returns
    -------
    StoredMatrix

    Raises
    ------
    InputError
        If `target` is no matrix of spdist's, or is in blocks; or one has names of rows and the other has none.
    MatrixError
        If shapes or dtypes do not fit.
    """
    url = normalise(target)
    with hold_target(url, steal=steal):
        old = open_matrix(url)
        more = canonical_rows(rows) if are_in_memory(rows, rows, None) else open_operand(rows)
        refuse_blocks("appended rows", old, more)
        own = groups.read_facts(url)
        if not own or blocksize(more.dtype) is not None:
            what = (
                f"{old.url} is not written by spdist: import it" if not own else "the new rows are in blocks: pass CSR"
            )
            raise InputError(f"{what} first")
        names = _grown_names(old, more, row_names)
        if more.shape[1] != old.shape[1]:
            raise MatrixError(f"{old.url} has {old.shape[1]:,} columns, and the new rows {more.shape[1]:,}")
        if np.result_type(more.dtype, old.dtype) != old.dtype:
            raise MatrixError(
                f"{old.url} holds {old.dtype}, and the new rows {more.dtype}, which it cannot hold: convert them"
            )
        before = {"rows": old.nrows, "fingerprint": old.fingerprint()}
        facts = {"provenance": own.get("provenance", {}), "appended": [*own.get("appended", []), before]}
        with staged_matrix(url, overwrite=True, steal=steal, shape=(old.nrows + more.shape[0], old.ncols)) as stage:
            writer = MatrixWriter.continuing(old, stage.url, facts, names)
            for part in _parts(more):
                writer.append(CSR(part.indptr, part.indices, part.data.astype(old.dtype, copy=False), part.shape))
            writer.close()
        return open_matrix(url)


def _parts(rows: CSR | StoredMatrix) -> Iterator[CSR]:
    """Yield rows in parts."""
    if isinstance(rows, CSR):
        yield rows
        return
    for start, stop, _ in rows.row_blocks(PART_ENTRIES):
        yield rows.rows(start, stop)


def _grown_names(old: StoredMatrix, more: CSR | StoredMatrix, row_names: Iterable[str] | None) -> AxisNames:
    """Return the names of a matrix with more rows."""
    added = given_names(row_names, "row_names", more.shape[0])
    if isinstance(more, StoredMatrix):
        added = added or more.names.rows
        theirs, ours = more.column_names, old.column_names
        if theirs is not None and ours is not None and (theirs != ours).any():
            column = int((theirs != ours).argmax())
            raise InputError(
                f"column {column:,} is {ours[column]!r} in {old.url}, and {theirs[column]!r} in {more.url}: give "
                f"both one order"
            )
    if added is not None:
        added.to_array()  # as many as rows
    first = old.names.rows
    if (first is None) != (added is None) and old.nrows and more.shape[0]:
        if added is None:
            raise InputError(f"{old.url} has names of rows, and the new rows have none: pass row_names")
        raise InputError(f"the new rows have names, and rows of {old.url} have none: append them without names")
    if first is None or added is None:
        return AxisNames(first or added, old.names.columns)

    def pieces() -> Iterator[bytes]:
        yield from first.pieces()
        yield from added.pieces()

    return AxisNames(Names("row_names", first.count + added.count, pieces), old.names.columns)
