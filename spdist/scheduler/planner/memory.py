"""The hySpMM memory bound: bytes of a block over all stages; pure functions of integers.

X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015, section 3.3.2, equations 1 to 5 [1]_; L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication
on GPU", HPC 2015, equation 1 [2]_.

The thesis' equation 1 bounds nnz(C), loosely; it does not bound the list of products before compression, which may be
longer than the matrix has places. Polok's count of the products is exact. A planner needs both: products for methods
that store them, nnz(C) for those that do not.
"""

from __future__ import annotations

import math

import numpy as np

from spdist.matrices.dtypes import Int64Array

USABLE = 0.9
"""Share of the memory limit that blocks may take (equation 3); the rest is for what nobody counts."""


def upper_bound_nnz(nrows: int, ncols: int, empty_rows: int, empty_columns: int) -> int:
    """Bound nnz(C) by its places, less those an empty row of A or column of B leaves empty (hySpMM equation 1).

    Parameters
    ----------
    nrows, ncols : int
        Shape of C; the thesis has both equal to n.
    empty_rows : int
        Rows of A without entries, pA.
    empty_columns : int
        Columns of B without entries, pB.

    Examples
    --------
    >>> upper_bound_nnz(10, 10, 2, 0)
    98
    """
    return nrows * ncols - max(empty_rows, empty_columns, empty_rows * empty_columns)


def upper_bound_ratio(nrows: int, ncols: int, empty_rows: int, empty_columns: int) -> float:
    """Return the share of C's places that `upper_bound_nnz` leaves (hySpMM equation 2)."""
    places = nrows * ncols
    return upper_bound_nnz(nrows, ncols, empty_rows, empty_columns) / places if places else 0.0


def fits(a_bytes: int, b_bytes: int, c_bytes: int, memory_limit: int, pairs: int = 1) -> bool:
    """Whether `pairs` blocks of A, B and C with its intermediate fit the limit at once (hySpMM equations 3 and 5)."""
    return (a_bytes + b_bytes + c_bytes) * pairs <= USABLE * memory_limit


def even_blocks(a_nnz: int, b_nnz: int, c_block_nnz: int, memory_entries: int, pairs: int = 1) -> int:
    """Return the least number nb of even blocks that the bound allows (hySpMM equations 4 and 5).

    Parameters
    ----------
    a_nnz, b_nnz : int
        Entries of A and of B, spread evenly over the blocks.
    c_block_nnz : int
        Bound on the entries of one block's C and intermediate.
    memory_entries : int
        Entries that the memory holds, nM.
    pairs : int
        Block pairs in flight, np.

    Returns
    -------
    int
        At least 1; 0 where no number of blocks is enough.

    Examples
    --------
    >>> even_blocks(600, 400, 100, 1000, 2)
    3
    """
    room = math.floor(USABLE * memory_entries / pairs) - c_block_nnz
    return max(1, -(-(a_nnz + b_nnz) // room)) if room > 0 else 0


def expansion_size(a_column_nnz: Int64Array, b_row_nnz: Int64Array) -> int:
    """Count the products of A @ B exactly: entries of each column of A times entries of that row of B (Polok eq. 1).

    Examples
    --------
    >>> expansion_size(np.array([2, 0, 1]), np.array([3, 5, 1]))
    7
    """
    return int(np.dot(np.asarray(a_column_nnz, np.int64), np.asarray(b_row_nnz, np.int64)))


def pair_budget(memory_limit: int, fixed: int, pairs: int) -> int:
    """Return the bytes one block pair may take beside what a worker holds throughout (hySpMM equation 5)."""
    return (math.floor(USABLE * memory_limit) - fixed) // pairs


def limit_for(pair_bytes: int, fixed: int, pairs: int) -> int:
    """Return the least memory limit under which a block pair of `pair_bytes` fits: the inverse of `pair_budget`."""
    return math.ceil((pair_bytes * pairs + fixed) / USABLE) + 1
