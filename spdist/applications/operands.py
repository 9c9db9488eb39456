"""Matrices of applications, in memory or stored: checks before work starts, copies on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError, one_line
from spdist.jobs.operands import are_in_memory, open_operand
from spdist.jobs.target import remove_useless_remains
from spdist.matrices.csr import CSR, from_scipy
from spdist.options import ApplicationKeywords
from spdist.storage.foreign.checked import checked
from spdist.storage.matrix import StoredMatrix, refuse_blocks
from spdist.storage.names.names import NO_NAMES
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at, normalise

PART_ENTRIES = 1 << 20
"""Entries of a stored matrix read at a time."""

WEIGHTS = "finite weights of 0 and more"
"""Values that graphs may have, for messages."""


def opened(matrix: Any, what: str) -> Any:
    """Return a matrix in memory as SciPy's `csr_array`, a stored matrix opened and checked.

    `what`: the result that needs it, for messages.
    Raises `InputError` if it is not a matrix, or stored in dense blocks.
    """
    if are_in_memory(matrix, matrix, None):
        return from_scipy(sp.csr_array(matrix)).to_scipy()
    stored = checked(open_operand(matrix))
    refuse_blocks(what, stored)
    return stored


def parts(m: Any) -> Iterator[tuple[int, CSR]]:
    """Yield the first row and the rows of parts of a matrix, in order."""
    if not isinstance(m, StoredMatrix):
        yield 0, from_scipy(m)
        return
    for start, stop, _ in m.row_blocks(PART_ENTRIES):
        yield start, m.rows(start, stop)


def check_same_place(first: Any, second: Any) -> None:
    """Raise if one of two opened matrices is stored and one in memory."""
    if isinstance(first, StoredMatrix) != isinstance(second, StoredMatrix):
        raise InputError(
            "the two matrices are not both stored, nor both in memory: spdist.save('A.zarr', m) stores a matrix"
        )


def name_of(m: Any) -> str:
    """Return the name of a matrix in messages."""
    return m.url if isinstance(m, StoredMatrix) else "the matrix"


def check_square(m: Any) -> None:
    """Raise if a matrix is not square, or is empty."""
    nrows, ncols = m.shape
    if not nrows and not ncols:
        raise MatrixError(f"{name_of(m)} is empty (0 x 0); a graph has at least one vertex: name another")
    if nrows != ncols:
        raise MatrixError(
            f"{name_of(m)} is {nrows:,} x {ncols:,}; a square matrix is needed, with a row and a column for each "
            f"vertex: name another"
        )


def check_values(m: Any, fit: Callable[[Any], Any], needed: str) -> None:
    """Raise if a value of a matrix does not fit; rows are read in parts.

    `fit`: takes an array of values; returns a bool for each.
    `needed`: the values that fit, in words.
    Raises `MatrixError` if a value does not fit, or values are complex.
    """
    if m.dtype.kind == "c":
        raise MatrixError(f"{name_of(m)} holds {m.dtype}; {needed} are needed: convert it")
    for start, rows in parts(m):
        if not (fits := fit(rows.data)).all():
            entry = int(fits.argmin())
            row = start + int(np.searchsorted(rows.indptr, entry, side="right")) - 1
            places = _shown(m, row, "row"), _shown(m, int(rows.indices[entry]), "column")
            raise MatrixError(
                f"{name_of(m)} holds {rows.data[entry]} in {', '.join(places)}; {needed} are needed: correct it"
            )


def _shown(m: Any, number: int, axis: Literal["row", "column"]) -> str:
    """Return a row or column of a matrix for messages: its number, and its name if it has one."""
    names = getattr(m, f"{axis}_names") if isinstance(m, StoredMatrix) else None
    return f"{axis} {number:,}" if names is None else f"{axis} {number:,} ({one_line(repr(names[number]), 40)})"


def place_of_result(out: str | Path | None, m: Any, what: str) -> str:
    """Return the normalised path of a result; empty if it stays in memory.

    `m`: the operand.
    `what`: the result, as the message names it.
    Raises `InputError` if the result of a stored matrix has no path.
    """
    if out is not None:
        return normalise(out)
    if isinstance(m, StoredMatrix):
        raise InputError(f"the {what} of a stored matrix are stored too: say where, with out='C.zarr'")
    return ""


class Mode(TypedDict):
    """Treatment of an existing matrix by `spdist.save`."""

    overwrite: bool
    steal: bool


def mode_of(keywords: ApplicationKeywords) -> Mode:
    """Return the keywords of `spdist.save` that say how to treat an existing matrix."""
    return {"overwrite": keywords.get("overwrite", False), "steal": keywords.get("steal", False)}


def copy_of(
    m: StoredMatrix, place: str, change: Callable[[int, CSR], CSR], dtype: np.dtype[Any], names: bool,
    last: CSR | None = None, facts: dict[str, str] | None = None,
) -> StoredMatrix:  # fmt: skip
    """Store a copy of a matrix with its rows changed, in parts.

    `place`: path of the copy; must be free.
    `change`: takes the number of the first row, and rows; returns the changed rows, canonical, of `dtype`.
    `names`: whether the copy has the names of the matrix.
    `last`: a row to add, which has no name: the copy then has names of columns only.
    `facts`: stored with the copy.
    """
    carried = names_for(place, m.names) if names else NO_NAMES
    writer = MatrixWriter(
        place, m.ncols, dtype, dict(facts or {}), carried if last is None else carried._replace(rows=None)
    )
    for start, rows in parts(m):
        writer.append(change(start, rows))
    if last is not None:
        writer.append(last)
    return writer.close()


@contextmanager
def scratch(target: str, *names: str) -> Iterator[list[str]]:
    """Yield paths beside a result for intermediate matrices, and remove these at the end.

    `target`: normalised and locked. Remains of dead runs are removed, except an unfinished result.
    Yields a path for each name.
    """
    remove_useless_remains(target)
    places = [f"{target}.spdist-{name}" for name in names]
    try:
        yield places
    finally:
        for place in places:
            at(place).discard()
