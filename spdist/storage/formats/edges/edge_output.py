"""Write a matrix as a list of edges: two vertices and a value a line, tabs between, as `import_edges` reads it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import counted
from spdist.matrices.csr import CSR
from spdist.storage.matrix import StoredMatrix

logger = logging.getLogger("spdist")

LINES = 1 << 16
"""Edges that are written at a time."""

UNREADABLE = re.compile("^$|^[#%\ufeff]|^[ \v\f]|[ \v\f]$|[\t\r\n\0]")
"""Names that no reader gives back: empty, like a comment or a byte order mark, with outer blanks, tabs or line ends."""


def write_edges(file: BinaryIO, matrix: StoredMatrix, blocks: Iterable[tuple[int, CSR]], *, quotes: bool) -> None:
    """Write the entries of a square matrix; vertices have the names of its rows, or are numbers from 0 on.

    Numbers are written so that they read back exactly.

    `blocks`: first row and rows of its row blocks, in order.
    `quotes`: whether readers take a quote at the begin of a name for a quoted name, as in .tsv.
    Raises `MatrixError` if rows and columns are not the same vertices, a name cannot be read back, or values are
    complex.
    """
    names = vertex_names(matrix, quotes=quotes)
    seen = np.zeros(matrix.nrows, np.bool_)
    for start, block in blocks:
        rows = np.repeat(np.arange(start, start + block.nrows), np.diff(block.indptr))
        seen[rows] = seen[block.indices] = True
        values = block.data.astype(np.uint8) if block.dtype.kind == "b" else block.data
        for at in range(0, block.nnz, LINES):
            part = slice(at, at + LINES)
            edges = zip(rows[part].tolist(), block.indices[part].tolist(), values[part].tolist(), strict=True)
            if names is None:
                text = "".join(f"{i}\t{j}\t{x!r}\n" for i, j, x in edges)
            else:
                text = "".join(f"{names[i]}\t{names[j]}\t{x!r}\n" for i, j, x in edges)
            file.write(text.encode("utf-8", "surrogateescape"))
    if lost := _count_lost(seen, has_names=names is not None):
        what = counted(lost, "vertex") if names is not None else f"the last {counted(lost, 'vertex')}"
        logger.warning(
            "%s: left out %s without an edge, which a list of edges cannot hold; .mtx keeps the shape",
            matrix.url, what, extra={"notice": True},
        )  # fmt: skip


def vertex_names(matrix: StoredMatrix, *, quotes: bool) -> list[str] | None:
    """Return the names of the vertices of a matrix, None if they are numbers; refuse what is no list of edges."""
    if matrix.dtype.kind == "c":
        raise MatrixError(f"{matrix.url} holds {matrix.dtype}: a list of edges has real values; export it as .mtx")
    if matrix.nrows != matrix.ncols:
        raise MatrixError(
            f"{matrix.url} is {matrix.nrows:,} x {matrix.ncols:,}: rows and columns of a list of edges are the same "
            f"vertices; export it as .mtx"
        )
    rows, columns = (None if each is None else each.to_array().tolist() for each in matrix.names)
    if rows != columns:
        raise MatrixError(
            f"{matrix.url}: names of rows and of columns differ, and those of a list of edges are the same; export it "
            f"as .mtx"
        )
    for name in rows or ():
        if UNREADABLE.search(name) or (quotes and name.startswith('"')):
            raise MatrixError(
                f"{matrix.url}: the name {one_line(repr(name), 40)} cannot be written to a list of edges; change it, "
                f"or export as .mtx"
            )
    if rows is not None and len(set(rows)) < len(rows):
        raise MatrixError(f"{matrix.url}: several rows have one name, as one vertex would; export it as .mtx")
    return rows


def _count_lost(seen: np.ndarray, *, has_names: bool) -> int:
    """Return the number of vertices that no reader can find: those without edges, of numbers only the last ones."""
    return int((~seen).sum()) if has_names else len(seen) - int(np.flatnonzero(seen).max(initial=-1)) - 1
