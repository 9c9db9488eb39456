"""Checks of matrices, each written once: structure, canonical form, and shapes that must fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from spdist.cpus import count_cpus
from spdist.errors import MatrixError
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

Shape = tuple[int, int]
Found = TypeVar("Found")
LEAST_PART, MOST_PART = 1 << 16, 1 << 19
"""Elements that are looked at together: enough that threads seldom wait for each other's Python, and few enough that
they stay in the caches for some passes of NumPy."""
THREAD_PART = 1 << 20
"""Elements for which another thread is worth its start."""


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


def check_product_shapes(a: Shape, b: Shape, names: tuple[str, str] = ("A", "B")) -> None:
    """Check that the operands of a product fit: A is n x k and B is k x m.

    Parameters
    ----------
    a, b : (nrows, ncols)
    names : pair of str
        What the message calls the operands.

    Raises
    ------
    MatrixError
        If A does not have as many columns as B has rows; states both shapes.

    Examples
    --------
    >>> check_product_shapes((2, 3), (4, 5))
    Traceback (most recent call last):
    spdist.errors.MatrixError: shapes do not fit: A is 2 x 3 and B is 4 x 5; A must have as many columns as B has rows
    """
    if a[1] != b[0]:
        raise MatrixError(
            f"shapes do not fit: {names[0]} is {a[0]:,} x {a[1]:,} and {names[1]} is {b[0]:,} x {b[1]:,}; {names[0]} "
            f"must have as many columns as {names[1]} has rows"
        )


def check_mask_shape(mask: Shape, c: Shape) -> None:
    """Check that a mask has the shape of the product that it selects from.

    Parameters
    ----------
    mask, c : (nrows, ncols)

    Raises
    ------
    MatrixError
        If the shapes differ; names both.

    Examples
    --------
    >>> check_mask_shape((2, 3), (2, 4))
    Traceback (most recent call last):
    spdist.errors.MatrixError: the mask is 2 x 3, but C is 2 x 4
    """
    if tuple(mask) != tuple(c):
        raise MatrixError(f"the mask is {mask[0]:,} x {mask[1]:,}, but C is {c[0]:,} x {c[1]:,}")


def check_structure(m: RowArrays, name: str = "the matrix", first_row: int = 0) -> PatternFacts:
    """Check that the arrays fit together and that every column is in range.

    Parameters
    ----------
    m : CSR
        A matrix, or a row block of one.
    name : str
        What messages call the matrix.
    first_row : int
        Number of the first row in messages.

    Returns
    -------
    PatternFacts

    Raises
    ------
    MatrixError
        Names the matrix, the row and the value.

    Examples
    --------
    >>> from spdist.matrices.csr import CSR
    >>> _ = check_structure(CSR(np.array([0, 1]), np.array([7]), np.ones(1), (1, 4)), "A")
    Traceback (most recent call last):
    spdist.errors.MatrixError: A: column 7 in row 0 is outside [0, 4); rebuild the matrix or correct its shape
    """
    nrows, ncols = m.shape
    if m.indptr.shape != (nrows + 1,) or m.indptr[0] != 0:
        raise MatrixError(f"{name}: indptr must hold {nrows + 1:,} offsets that start at 0")
    if int(m.indptr[-1]) != len(m.indices) or len(m.indices) != len(m.data):
        raise MatrixError(
            f"{name}: indptr ends at {int(m.indptr[-1]):,}, but there are {len(m.indices):,} indices and "
            f"{len(m.data):,} values"
        )
    facts = pattern_facts(m)
    if not facts.offsets_rise:
        row = int(np.argmax(np.diff(m.indptr) < 0))
        raise MatrixError(f"{name}: indptr falls after row {first_row + row:,}; offsets must not decrease")
    if facts.low < 0 or facts.high >= ncols:
        at = int(np.argmax((m.indices < 0) | (m.indices >= ncols)))
        row = int(np.searchsorted(m.indptr, at, side="right")) - 1
        raise MatrixError(
            f"{name}: column {int(m.indices[at]):,} in row {first_row + row:,} is outside [0, {ncols:,}); "
            f"rebuild the matrix or correct its shape"
        )
    return facts


def is_canonical(m: RowArrays) -> bool:
    """Whether the columns of every row rise strictly: sorted and free of duplicates.

    Examples
    --------
    >>> from spdist.matrices.csr import CSR
    >>> is_canonical(CSR(np.array([0, 2]), np.array([3, 1]), np.ones(2), (1, 4)))
    False
    """
    return pattern_facts(m).is_canonical


class PatternFacts(NamedTuple):
    """What one pass over offsets and columns finds.

    Attributes
    ----------
    offsets_rise : bool
        Whether offsets begin at 0, do not fall, and end at the number of columns.
    low, high : int
        The least and the greatest column; 0 and -1 without entries.
    is_canonical : bool
        Whether offsets rise, and columns rise strictly in each row.
    """

    offsets_rise: bool
    low: int
    high: int
    is_canonical: bool


def pattern_facts(m: RowArrays) -> PatternFacts:
    """Look once at offsets and columns, in threads and without a copy if there are many.

    In canonical rows, columns fail to rise only where a row begins.

    Parameters
    ----------
    m : CSR

    Returns
    -------
    PatternFacts

    Examples
    --------
    >>> from spdist.matrices.csr import CSR
    >>> pattern_facts(CSR(np.array([0, 2, 3]), np.array([1, 3, 0]), np.ones(3), (2, 4)))
    PatternFacts(offsets_rise=True, low=0, high=3, is_canonical=True)
    """
    indptr, indices = m.indptr, m.indices
    nnz = len(indices)
    is_whole = len(indptr) > 0 and int(indptr[0]) == 0 and int(indptr[-1]) == nnz
    if not is_whole or not all(_in_parts(functools.partial(_offsets_rise, indptr), len(indptr))):
        low, high = (int(indices.min()), int(indices.max())) if nnz else (0, -1)
        return PatternFacts(False, low, high, False)
    if not nnz:
        return PatternFacts(True, 0, -1, True)
    lows, highs, rises = zip(*_in_parts(functools.partial(_columns, indptr, indices), nnz), strict=True)
    return PatternFacts(True, min(lows), max(highs), all(rises))


def _in_parts(work: Callable[[int, int], Found], length: int) -> list[Found]:
    """Call a function for each part of a range, in threads if the range is long."""
    threads = max(1, min(count_cpus(), length // THREAD_PART))
    part = min(max(-(-length // threads), LEAST_PART), MOST_PART) if threads > 1 else LEAST_PART
    bounds = list(itertools.pairwise([*range(0, length, part), length]))
    if threads == 1:
        return [work(first, last) for first, last in bounds]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda ends: work(*ends), bounds))


def _offsets_rise(indptr: Int64Array, first: int, last: int) -> bool:
    part = indptr[max(first - 1, 0) : last]
    return bool(np.all(part[1:] >= part[:-1]))


def _columns(indptr: Int64Array, indices: IndexArray, first: int, last: int) -> tuple[int, int, bool]:
    """Return the least and the greatest of some columns, and whether they rise in each row; offsets rise."""
    part, begin = indices[first:last], max(first, 1)
    falls = indices[begin:last] <= indices[begin - 1 : last - 1]
    rows = np.searchsorted(indptr, np.array((begin, last), indptr.dtype))
    falls[indptr[rows[0] : rows[1]] - begin] = False
    return int(part.min()), int(part.max()), not falls.any()


def check_canonical(m: RowArrays, name: str = "the matrix", first_row: int = 0) -> None:
    """Check structure and canonical form.

    Parameters
    ----------
    m, name, first_row
        As for `check_structure`.

    Raises
    ------
    MatrixError
        Names the first row that is not sorted or holds a duplicate.
    """
    if check_structure(m, name, first_row).is_canonical:
        return
    falls = np.diff(m.indices) <= 0
    starts = m.indptr[1:-1]
    falls[starts[(starts > 0) & (starts < len(m.indices))] - 1] = False
    at = int(np.argmax(falls))
    row = int(np.searchsorted(m.indptr, at, side="right")) - 1
    what = "holds a duplicate" if m.indices[at] == m.indices[at + 1] else "is not sorted"
    raise MatrixError(
        f"{name}: row {first_row + row:,} {what} at column {int(m.indices[at + 1]):,}; rewrite the matrix in canonical "
        f"form, for instance with spdist.save(path, matrix) after sum_duplicates()"
    )
