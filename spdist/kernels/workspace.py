"""How many bytes a CPU multiply needs beyond its operands and its result; pure functions of integers.

The planner and the kernels use the same sizes, so they cannot disagree.
"""

from __future__ import annotations

from typing import Literal

Engine = Literal["scipy", "numba"]

WINDOW = 1 << 18
"""Columns of the dense accumulator of the numba engine."""
SORT_PRODUCTS = 1 << 15
"""Products that the numba engine sorts at once."""
RADIX_BINS = 1 << 11
RANK_PRODUCTS = 128
"""Products of the longest row that is sorted in a batch of small rows."""
BATCH_ROWS = 128
BATCH_SLOTS = 1 << 11
"""Products of a batch of small rows, before its last row is added."""
SLICE_PRODUCTS = 1 << 17
"""Products of the slices of rows that threads take in turn."""
SCRATCH_ENTRIES = 1 << 18
"""Entries of C that a thread can make before it knows their place."""
PADDING = 64
"""Elements after the accumulator, so that its marks can be read 64 at a time."""
OBJECTS = 1 << 16
"""Bytes for Python's and NumPy's objects around the arrays, per thread."""


def window_columns(ncols: int) -> int:
    """Return the columns of the numba engine's accumulator for a C of `ncols` columns."""
    return min(max(ncols, 1), WINDOW)


def sort_products(ncols: int) -> int:
    """Return the products that the numba engine's sort buffers hold; narrow matrices need none."""
    return SORT_PRODUCTS if ncols > WINDOW else 0


def cpu_workspace(
    engine: Engine,
    ncols: int,
    max_row_products: int,
    value_itemsize: int,
    index_itemsize: int,
    threads: int = 1,
) -> int:
    """Bound the bytes that a multiply on the CPU takes beyond its operands and the buffers of its result.

    Values whose dtype is not the result's, and indices whose dtype is not `index_dtype` of their matrix, are copied as
    well: add `cast_bytes` for each.

    Parameters
    ----------
    engine : "scipy" or "numba"
    ncols : int
        Columns of C.
    max_row_products : int
        Products of the longest row; bounds what one slice of rows takes with scipy.
    value_itemsize, index_itemsize : int
        Bytes of a value and of a column index of C.
    threads : int

    Returns
    -------
    int
        Bytes. With numba a few MiB a thread, whatever `ncols` is; with scipy it grows with `ncols`.

    Examples
    --------
    >>> cpu_workspace("numba", 10**9, 10**6, 8, 4) < 5 * 2**20
    True
    >>> cpu_workspace("scipy", 10**9, 10**6, 8, 4) > 10**10
    True
    """
    if engine == "scipy":
        return threads * _scipy_bytes(ncols, max_row_products, value_itemsize, index_itemsize)
    scratch = SCRATCH_ENTRIES * (value_itemsize + index_itemsize) if threads > 1 else 0
    return threads * (_numba_bytes(ncols, value_itemsize) + scratch)


def cast_bytes(nnz: int, itemsize: int, wanted_itemsize: int) -> int:
    """Return the bytes of a copy of an operand's values, or indices, in the wanted dtype; 0 if they have that size."""
    return 0 if itemsize == wanted_itemsize else nnz * wanted_itemsize


def _numba_bytes(ncols: int, value_itemsize: int) -> int:
    columns = window_columns(ncols)
    window = (columns + PADDING) * (value_itemsize + 1) + columns // 64 + 2 * PADDING
    sorting = sort_products(ncols) * (2 * 8 + value_itemsize) + 4 * RADIX_BINS
    slots = BATCH_SLOTS + 2 * RANK_PRODUCTS
    batch = slots * (4 + 8 + value_itemsize) + 3 * 8 * (BATCH_ROWS + 1)
    return window + sorting + batch + OBJECTS


def _scipy_bytes(ncols: int, max_row_products: int, value_itemsize: int, index_itemsize: int) -> int:
    dense = ncols * (2 * index_itemsize + value_itemsize)
    products = max(max_row_products, SLICE_PRODUCTS)
    entry = 2 * (value_itemsize + index_itemsize) + 4 * 8
    return dense + products * entry + OBJECTS
