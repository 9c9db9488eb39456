"""Bytes of C packed for the way to the host.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from spdist.kernels.rounding import ceil_div

PACKED_UNIT = 9, 12
"""Powers of 2: the fewest and the most rows and entries, together, of a unit of a packed matrix."""
PACKED_UNITS = 12
"""Power of 2: so many units keep the GPU busy."""
PACKED_HEAD = 6208
"""Bytes before the directory: three numbers, the dictionary and its hash table."""
PACKED_PLACES = 32
"""Bytes of the directory for each unit."""
PACKED_PADDING = 8
"""Bytes after the last that may be read."""


def packed_unit(nrows: int, nnz: int) -> int:
    """Return how many rows and entries, together, a unit of a packed matrix has, before its ends move to those of rows.

    Examples
    --------
    >>> packed_unit(1_000, 100_000), packed_unit(500_000, 128_000_000)
    (512, 4096)
    """
    low, high = PACKED_UNIT
    return 1 << max(low, min(high, (nrows + nnz).bit_length() - 1 - PACKED_UNITS))


def packed_units(nrows: int, nnz: int) -> int:
    """Return the units of a packed matrix; threads share them."""
    return max(1, ceil_div(nrows + nnz, packed_unit(nrows, nnz)))


def packed_start(nrows: int, nnz: int) -> int:
    """Return where the bytes of the units start."""
    return PACKED_HEAD + (packed_units(nrows, nnz) + 1) * PACKED_PLACES


def packed_bound(shape: tuple[int, int], nnz: int, index_itemsize: int, value_itemsize: int = 0) -> int:
    """Bound the bytes of a packed matrix.

    Groups of columns take as many bits as their largest difference. The differences of a row add up to no more than the
    number of columns, and the sum of their bits is largest where all are equal.

    Parameters
    ----------
    shape : (nrows, ncols)
    nnz : int
    index_itemsize : int
    value_itemsize : int
        0 where only columns are packed. Values get a quarter of their size; those that need more are not packed.

    Returns
    -------
    int
        Bytes. Columns always fit.

    Examples
    --------
    >>> packed_bound((500_000, 500_000), 128_000_000, 4) / 128_000_000 < 2.6
    True
    """
    pieces = shape[0] + packed_units(shape[0], nnz)
    groups = nnz // 32 + pieces
    heads = pieces * (3 + index_itemsize) + groups
    gap = shape[0] * shape[1] // groups + 2
    bits = ((gap**16).bit_length() + 16) // 16 + 1  # of the mean: log2(gap) to a sixteenth, and less than 1 more
    columns = min(nnz * index_itemsize, 4 * groups * bits)
    values = nnz * value_itemsize // 4 + 2 * pieces if value_itemsize else 0
    return packed_start(shape[0], nnz) + heads + columns + values + PACKED_PADDING
