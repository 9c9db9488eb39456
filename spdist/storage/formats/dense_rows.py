"""Dense arrays in files: their nonzeros, read rectangle by rectangle in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, index_dtype
from spdist.storage.atomic_replace import ignore_progress
from spdist.storage.external_sort import Entries
from spdist.storage.formats.compressed_rows import ENTRIES
from spdist.storage.formats.source import Import

WHOLE_ROWS = 4 * ENTRIES
"""Elements of the largest rectangle of whole rows; stored chunks that make a larger one are sorted into rows."""

Read = Callable[[slice, slice], ValueArray]
"""Returns the elements in some rows and columns, as an array of two dimensions."""


def check_dense(job: Import, path: str, sparse: str = "") -> None:
    """Refuse a dense array unless the caller asked for its nonzeros; `sparse` lists what else the file holds."""
    if not job.options.dense:
        others = f"; sparse in this file: {sparse}" if sparse else ""
        raise MatrixError(f"{path} is a dense array: pass --dense (dense=True) to import its nonzeros{others}")


def import_dense(
    job: Import,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    read: Read,
    chunk: tuple[int, int] = (1, 1),
    by_columns: bool = False,
) -> None:
    """Write the elements of a dense array that are not zero; NaN is not zero.

    The caller has checked the shape, the dtype, and that one stored chunk fits into memory.

    `dtype`: of the values; one that spdist stores.
    `read`: gets two slices with ends inside the shape. Each is asked for once, about a million elements at a time.
    `chunk`: rows and columns that are stored together, and decoded even if few of their elements are read.
    `by_columns`: whether a column, not a row, lies in one piece (Fortran's order).
    """
    nrows, ncols = shape
    height, width = _rectangle(shape, chunk, by_columns and 0 not in shape)
    job.reading.left_out.append("zeros of a dense array")
    if width < ncols:
        job.sort(_batches(shape, (height, width), read), shape, dtype, nrows * ncols)
        return

    def blocks() -> Iterator[CSR]:
        for top in range(0, nrows, height):
            rows = slice(top, min(top + height, nrows))
            yield _nonzeros(read(rows, slice(0, ncols)), (rows.stop - top, ncols))
            job.report_written(rows.stop, nrows)

    replace(job, progress=ignore_progress).write(blocks(), ncols, dtype, nrows * ncols)
    job.report_written(1, 1)


def _rectangle(shape: tuple[int, int], chunk: tuple[int, int], by_columns: bool) -> tuple[int, int]:
    """Return how many rows and columns to read at a time: whole stored chunks, and whole rows if they fit."""
    if by_columns:
        width, height = _rectangle((shape[1], shape[0]), (chunk[1], chunk[0]), False)
        return height, width
    height, width = (min(each, max(length, 1)) for each, length in zip(chunk, shape, strict=True))
    elements = height * shape[1]
    if elements <= WHOLE_ROWS:
        return height * max(ENTRIES // max(elements, height), 1), shape[1]
    return height, width * max(ENTRIES // (height * width), 1)


def _nonzeros(block: ValueArray, shape: tuple[int, int]) -> CSR:
    """Return the nonzeros of whole rows."""
    flat = block.reshape(-1)
    positions = np.flatnonzero(flat)
    rows, columns = np.divmod(positions, max(shape[1], 1))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
    return CSR(indptr, columns.astype(index_dtype(shape[1])), flat[positions], shape)


def _batches(shape: tuple[int, int], rectangle: tuple[int, int], read: Read) -> Iterator[Entries]:
    """Yield the nonzeros of all rectangles."""
    height, width = rectangle
    for top in range(0, shape[0], height):
        for left in range(0, shape[1], width):
            columns = slice(left, min(left + width, shape[1]))
            block = read(slice(top, min(top + height, shape[0])), columns).reshape(-1)
            for start in range(0, len(block), ENTRIES):
                part = block[start : start + ENTRIES]
                positions = np.flatnonzero(part)
                row, column = np.divmod(positions + start, columns.stop - left)
                yield Entries(row + top, column + left, part[positions])
