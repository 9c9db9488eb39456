"""Scan the pattern of a matrix with compiled code, at the speed of memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.arrays import writable
from spdist.kernels.cpu.numba_compile import compiled
from spdist.matrices.dtypes import IndexArray, Int64Array
from spdist.matrices.pattern import PatternScan


@compiled
def _offsets_rise(indptr: Int64Array, first: int, last: int) -> Any:
    falls = np.int64(0)
    for at in range(np.uintp(max(first, 1)), np.uintp(last)):
        falls += indptr[at] < indptr[at - np.uintp(1)]
    return falls == 0


@compiled
def _columns(indptr: Int64Array, indices: IndexArray, first: int, last: int) -> Any:
    """Return the least and the greatest column; and whether as many fail to rise as there are rows that explain it."""
    low = high = indices[first]
    begin, end, falls = np.uintp(max(first, 1)), np.uintp(last), np.int64(0)
    for at in range(begin, end):
        column, before = indices[at], indices[at - np.uintp(1)]
        low, high = min(low, column), max(high, column)
        falls += column <= before
    row, rows = np.uintp(0), np.uintp(len(indptr))
    while row < rows:  # the first row that begins at `begin` or later
        middle = (row + rows) >> np.uintp(1)
        if np.uintp(indptr[middle]) < begin:
            row = middle + np.uintp(1)
        else:
            rows = middle
    previous = np.uintp(0)
    for later in range(row, np.uintp(len(indptr))):
        start = np.uintp(indptr[later])
        if start >= end:
            break
        if start != previous:  # of empty rows one counts
            falls -= indices[start] <= indices[start - np.uintp(1)]
        previous = start
    return np.int64(low), np.int64(high), falls == 0


def columns(indptr: Int64Array, indices: IndexArray, first: int, last: int) -> tuple[int, int, bool]:
    """As `PatternScan.columns`, compiled."""
    low, high, rise = _columns(writable(indptr), writable(indices), first, last)
    return int(low), int(high), bool(rise)


def offsets_rise(indptr: Int64Array, first: int, last: int) -> bool:
    """As `PatternScan.offsets_rise`, compiled."""
    return bool(_offsets_rise(writable(indptr), first, last))


COMPILED = PatternScan(offsets_rise, columns, 1 << 62)
"""One call scans all that a thread has to."""


def compiled_scan() -> PatternScan:
    """Return the compiled scan, for modules that load none of this until they need it."""
    return COMPILED
