"""The kernels of epilogue.cu in NumPy, with the same arguments; memory of the host takes the GPU's place."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from spdist.kernels.cuda.constants import ALL_TIES

NAMES = {
    name: name
    for name in ("finish", "cut", "keep", "sum", "frobenius", "row_sums", "column_sums", "trace", "histogram")
}  # fmt: skip


def launch(name: str, grid: int, block: int, args: tuple[Any, ...]) -> None:
    KERNELS[name](*args)


def keeps(x: Any, least: Any, selects: int, drops: int) -> Any:
    with np.errstate(invalid="ignore"):
        return ~(bool(drops) & (x == 0)) & (not selects or x >= least)


def finish(nrows: int, indptr: Any, indices: Any, data: Any, rows: Any, columns: Any, norm: int) -> None:
    factors = None
    if rows:
        size = nrows * data.dtype.itemsize
        factors = np.frombuffer((ctypes.c_char * size).from_address(rows), data.dtype)
    for row in range(nrows):
        own = slice(indptr[row], indptr[row + 1])
        x = np.array(data[own])
        x = x if factors is None else x * factors[row]
        x = x if columns is None else x * columns[indices[own]]
        x = x * x + 1 if columns is not None else x  # what the one test with columns applies
        size = [0, abs(x).sum(), np.sqrt((abs(x) ** 2).sum()), abs(x).max(initial=0)][norm]
        data[own] = x / size if size > 0 else x


def cut(nrows, indptr, data, least, selects, drops, top, cuts, ties, lengths) -> None:
    """Leave in `cuts` the bits of the smallest value that is kept, not the key."""
    for row in range(nrows):
        x = np.asarray(data[indptr[row] : indptr[row + 1]])
        x = np.sort(x[keeps(x, least, selects, drops)])[::-1]
        lengths[row], ties[row] = min(len(x), top), ALL_TIES
        if len(x) > top:
            ties[row] = (x[:top] == x[top - 1]).sum()
            CUTS[cuts.data.ptr, row] = x[top - 1]


CUTS: dict[tuple[int, int], Any] = {}


def keep(nrows, indptr, indices, data, least, selects, drops, cuts, ties, kept, kept_indices, kept_data) -> None:
    for row in range(nrows):
        own = slice(indptr[row], indptr[row + 1])
        x = np.asarray(data[own])
        stays = keeps(x, least, selects, drops)
        if ties[row] != ALL_TIES:
            smallest = CUTS[cuts.data.ptr, row]
            equal = np.flatnonzero(stays & (x == smallest))[: ties[row]]
            stays &= x > smallest
            stays[equal] = True
        out = slice(kept[row], kept[row + 1])
        kept_indices[out], kept_data[out] = indices[own][stays], x[stays]


def sum_all(nnz: int, data: Any, parts: Any) -> None:
    parts[:] = [np.asarray(data[first :: len(parts)]).astype(parts.dtype).sum() for first in range(len(parts))]


def frobenius(nnz: int, data: Any, parts: Any) -> None:
    parts[:] = [(abs(np.asarray(data[first :: len(parts)]).astype(float)) ** 2).sum() for first in range(len(parts))]


def row_sums(nrows: int, indptr: Any, data: Any, sums: Any) -> None:
    sums[:] = [np.asarray(data[indptr[row] : indptr[row + 1]]).astype(sums.dtype).sum() for row in range(nrows)]


def column_sums(nnz: int, indices: Any, data: Any, sums: Any) -> None:
    np.add.at(np.asarray(sums), np.asarray(indices), np.asarray(data).astype(sums.dtype))


def trace(nrows: int, first: int, indptr: Any, indices: Any, data: Any, parts: Any) -> None:
    rows = np.repeat(np.arange(nrows), np.diff(np.asarray(indptr)))
    parts[:] = 0
    parts[0] = np.asarray(data)[np.asarray(indices) == rows + first].astype(parts.dtype).sum()


def histogram(nnz: int, data: Any, bins: int, edges: Any, counts: Any) -> None:
    values = np.asarray(data).astype(np.float64)
    found = np.searchsorted(np.asarray(edges)[:-1], values, side="right") - 1
    inside = (found >= 0) & (values <= edges[bins])
    np.add.at(np.asarray(counts), found[inside], 1)


KERNELS = {
    "finish": finish, "cut": cut, "keep": keep, "sum": sum_all, "frobenius": frobenius, "row_sums": row_sums,
    "column_sums": column_sums, "trace": trace, "histogram": histogram,
}  # fmt: skip
