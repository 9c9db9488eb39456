"""Bytes that a multiply on the CPU needs beyond its operands and its result; pure functions of integers.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

SCIPY, NUMBA = "scipy", "numba"
"""Names of the two engines of the CPU."""
WINDOW = 1 << 18
"""Most columns of the numba engine's dense accumulator."""
PEAK_ROWS = 1 << 20
"""Rows of B up to which their largest values are kept to leave products out."""
SELECTION_BYTES = 36 << 10
"""Bytes of a thread for the places and the order of a row's parts."""
SORT_PRODUCTS = 1 << 15
"""Products that the numba engine sorts at once."""
RADIX_BINS = 1 << 11
"""Bins of a pass of the radix sort."""
RANK_PRODUCTS = 128
"""Products of the longest row that is sorted in a batch of small rows."""
BATCH_ROWS = 128
"""Most rows of a batch of small rows."""
BATCH_SLOTS = 1 << 11
"""Products of a batch of small rows, before its last row is added."""
SLICE_PRODUCTS = 1 << 17
"""Most products of the slices of rows that threads of the numba engine take in turn."""
SLICES_PER_THREAD = 16
"""Slices that each thread should have, if they are not too small: the threads end at about the same time."""
LEAST_SLICE_PRODUCTS = 1 << 13
"""Products of slices below which they are not cut for more threads."""
SCIPY_SLICE_PRODUCTS = 1 << 17
"""Products of the slices of rows that threads of the scipy engine take in turn."""
SCRATCH_BYTES = 8 << 20
"""Bytes of the entries of C that a thread can make before it knows their place: some slices, so that no thread waits
for one that makes a longer slice."""
SCIPY_SCRATCH_ENTRIES = 1 << 18
"""The same for the scipy engine, in entries."""
TABLE_SLOTS = 4
"""Least slots of a hash table for each column of a mask's row: most searches end at the first slot."""
PADDING = 64
"""Elements behind the accumulator, so that its marks can be read 64 at a time."""
OBJECTS = 1 << 16
"""Bytes for Python's and NumPy's objects around the arrays, per thread."""
SMALL_PRODUCTS = 1 << 24
"""Products up to which SciPy is done before Numba's kernels would be loaded, or compiled for new dtypes."""
SCIPY_SHARE = 8
"""SciPy may multiply small products if its workspace is at most this part of the memory limit."""


def window_columns(ncols: int) -> int:
    """Return the columns of the numba engine's accumulator for a C of `ncols` columns."""
    return min(max(ncols, 1), WINDOW)


def sort_products(ncols: int) -> int:
    """Return the products that the numba engine's sort buffers hold; narrow matrices need none."""
    return SORT_PRODUCTS if ncols > WINDOW else 0


def cpu_workspace(
    engine: str, ncols: int, max_row_products: int, value_itemsize: int, index_itemsize: int, threads: int = 1
) -> int:
    """Bound the bytes that a multiply on the CPU takes beyond its operands and the buffers of its result.

    With numba a few MiB a thread, whatever `ncols` is; with scipy it grows with `ncols`. Values and indices that are
    converted are copied as well: add `cast_bytes` for each.
    `max_row_products`: products of the longest row; bounds what one slice of rows takes with scipy.
    """
    if engine == SCIPY:
        return threads * _scipy_bytes(ncols, max_row_products, value_itemsize, index_itemsize)
    return threads * (_numba_bytes(ncols, value_itemsize) + (SCRATCH_BYTES if threads > 1 else 0))


def auto_workspace(
    products: int, limit: int, ncols: int, max_row_products: int, value_itemsize: int, index_itemsize: int, threads: int
) -> int:
    """Return the workspace in bytes that engine "auto" may use: enough for SciPy only if it may multiply.

    `products` are estimated, `limit` is the memory limit in bytes; the others are as for `cpu_workspace`.
    """
    sizes = ncols, max_row_products, value_itemsize, index_itemsize, threads
    scipy, numba = cpu_workspace(SCIPY, *sizes), cpu_workspace(NUMBA, *sizes)
    return max(scipy, numba) if products <= SMALL_PRODUCTS and scipy <= limit // SCIPY_SHARE else numba


def block_workspace(ncols: int, entries: int) -> int:
    """Bound the bytes that a multiply of block matrices on the CPU, by one thread, takes beyond operands and result.

    `entries`: blocks of A, of B and of C together: their patterns are multiplied as matrices of bools.
    """
    return _numba_bytes(ncols, 1) + 8 * ncols + entries


def table_slots(mask_row: int) -> int:
    """Return the slots of the hash table for a mask whose longest row has `mask_row` columns: a power of two."""
    return max(16, 1 << (TABLE_SLOTS * mask_row - 1).bit_length()) if mask_row else 16


def fused_workspace(
    row_entries: int, mask_row: int, top_n: int, value_itemsize: int, index_itemsize: int, threads: int = 1,
    nrows_b: int = 0,
) -> int:  # fmt: skip
    """Bound the bytes that a mask, a threshold or top-n take beyond `cpu_workspace` with numba.

    Of rows and tables only what is written takes memory. `row_entries`: entries of the longest row before it is cut: at
    most its products, columns of C, and `mask_row` under a mask. `mask_row`: entries of the longest row of the mask; 0
    without one. `top_n`: 0 for all. `nrows_b`: rows of B, if values below a threshold are left out.
    """
    peaks = value_itemsize * min(nrows_b, PEAK_ROWS)
    row = (row_entries + 1) * (value_itemsize + index_itemsize) + 8
    table = table_slots(mask_row) * 2 * index_itemsize + (mask_row + 1) * (value_itemsize + 1)
    return peaks + threads * (row + table + (min(top_n, row_entries) + 1) * value_itemsize + SELECTION_BYTES)


def slice_products(products: int, threads: int) -> int:
    """Return the most products of a slice of rows that threads take in turn, from estimated products of all rows."""
    return min(max(products // (threads * SLICES_PER_THREAD), LEAST_SLICE_PRODUCTS), SLICE_PRODUCTS)


def cast_bytes(nnz: int, itemsize: int, wanted_itemsize: int) -> int:
    """Return the bytes of a copy of an operand's values or indices; 0 if the items have the wanted size."""
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
    products = max(max_row_products, SCIPY_SLICE_PRODUCTS)
    entry = 2 * (value_itemsize + index_itemsize) + 4 * 8
    return dense + products * entry + OBJECTS
