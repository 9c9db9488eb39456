"""Scan the pattern of a matrix once: the range of its columns, and whether its rows are canonical.

Compiled code (`kernels.cpu.pattern_scan`) scans large matrices at the speed of memory, if this process has loaded
kernels of the CPU or if it is sooner to load them. NumPy scans the others.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads
from spdist.matrices import late_bindings
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

Shape = tuple[int, int]
Found = TypeVar("Found")
THREAD_PART = 1 << 20
"""Elements for which another thread is worth its start."""
FEW_ENTRIES = 1 << 17
"""Entries up to which NumPy always scans a pattern: it takes less time than reading compiled code does."""
MANY_ENTRIES = 1 << 26
"""Entries from which on loading compiled code takes less time than NumPy does."""
KERNELS = "spdist.kernels.cpu.numba_compile"
"""The module that is loaded if any kernel of the CPU is."""


class RowArrays(Protocol):
    """The arrays of a matrix in compressed sparse row form, a `CSR` for instance."""

    @property
    def indptr(self) -> Int64Array:
        """Offsets, (nrows + 1,)."""

    @property
    def indices(self) -> IndexArray:
        """Columns, (nnz,)."""

    @property
    def data(self) -> ValueArray:
        """Values, (nnz,)."""

    @property
    def shape(self) -> Shape:
        """Rows and columns."""


class PatternFacts(NamedTuple):
    """What a scan of offsets and columns finds."""

    offsets_rise: bool  # whether offsets begin at 0, do not fall, and end at the number of columns
    # the least and the greatest column; 0 and -1 without entries
    low: int
    high: int
    is_canonical: bool  # whether offsets rise, and columns rise strictly in each row


class PatternScan(NamedTuple):
    """Functions that scan the elements ``[first, last)`` of offsets and of columns.

    In canonical rows, columns fail to rise only where a row begins.
    """

    # ``offsets_rise(indptr, first, last)``: whether offsets do not fall, from the one before `first` on
    offsets_rise: Callable[[Int64Array, int, int], bool]
    # ``columns(indptr, indices, first, last)``: the least and the greatest of these columns, and whether they rise
    # strictly in each row, from the column before `first` on. The offsets rise.
    columns: Callable[[Int64Array, IndexArray, int, int], tuple[int, int, bool]]
    part: int  # most elements of one call


def _offsets_rise(indptr: Int64Array, first: int, last: int) -> bool:
    part = indptr[max(first - 1, 0) : last]
    return bool(np.all(part[1:] >= part[:-1]))


def _columns(indptr: Int64Array, indices: IndexArray, first: int, last: int) -> tuple[int, int, bool]:
    part, begin = indices[first:last], max(first, 1)
    falls = indices[begin:last] <= indices[begin - 1 : last - 1]
    rows = np.searchsorted(indptr, np.array((begin, last), indptr.dtype))
    falls[indptr[rows[0] : rows[1]] - begin] = False
    return int(part.min()), int(part.max()), not falls.any()


NUMPY = PatternScan(_offsets_rise, _columns, 1 << 16)
"""Parts stay in the caches for some passes of NumPy."""


def is_worth_compiled(entries: int) -> bool:
    """Whether compiled code, loaded or still to be loaded, is done with a number of entries sooner than NumPy."""
    return entries > MANY_ENTRIES or (entries > FEW_ENTRIES and KERNELS in sys.modules)


def choose_scan(length: int) -> PatternScan:
    """Return the scan that takes the least time.

    `length`: offsets or columns, whichever are more.
    """
    if is_worth_compiled(length):
        compiled: PatternScan = late_bindings.load("compiled_scan")()
        return compiled
    return NUMPY


def pattern_facts(m: RowArrays, threads: int | None = None) -> PatternFacts:
    """Scan offsets and columns once, in threads and without a copy if there are many.

    `threads`: most threads; by default one a CPU.

    Examples
    --------
    >>> from spdist.matrices.csr import CSR
    >>> pattern_facts(CSR(np.array([0, 2, 3]), np.array([1, 3, 0]), np.ones(3), (2, 4)))
    PatternFacts(offsets_rise=True, low=0, high=3, is_canonical=True)
    """
    indptr, indices = m.indptr, m.indices
    nnz = len(indices)
    scan = choose_scan(max(nnz, len(indptr)))
    is_whole = len(indptr) > 0 and int(indptr[0]) == 0 and int(indptr[-1]) == nnz
    rise = functools.partial(scan.offsets_rise, indptr)
    if not is_whole or not all(_in_parts(rise, len(indptr), scan.part, threads)):
        low, high = (int(indices.min()), int(indices.max())) if nnz else (0, -1)
        return PatternFacts(False, low, high, False)
    if not nnz:
        return PatternFacts(True, 0, -1, True)
    found = _in_parts(functools.partial(scan.columns, indptr, indices), nnz, scan.part, threads)
    lows, highs, rises = zip(*found, strict=True)
    return PatternFacts(True, min(lows), max(highs), all(rises))


def _in_parts(work: Callable[[int, int], Found], length: int, part: int, threads: int | None) -> list[Found]:
    """Call a function for each part of a range, in threads if the range is long."""
    count = max(1, min(threads or count_cpus(), length // THREAD_PART))
    part = min(part, -(-length // count))
    bounds = list(itertools.pairwise([*range(0, length, part), length]))
    found: list[Found] = []

    def scan(thread: int) -> None:
        found.extend([work(first, last) for first, last in bounds[thread::count]])

    run_in_threads(count, scan)
    return found
