"""The hySpMM memory bound: bytes of a block over all stages; pure functions of integers.

Equation 1 of the thesis bounds nnz(C), loosely. It does not bound the list of products before compression, which may be
longer than C has places. Polok's count of the products is exact. A planner needs both: products for methods that store
them, nnz(C) for methods that do not.

References
----------
.. [1] X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia
   State University, 2015, section 3.3.2, equations 1 to 5.
.. [2] L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, equation 1.
"""

from __future__ import annotations

import math

import numpy as np

from spdist.matrices.dtypes import Int64Array

USABLE = 0.9
"""Share of the memory limit that is planned for (equation 3); the rest is for allocations that no plan counts."""


def upper_bound_nnz(nrows: int, ncols: int, empty_rows: int, empty_columns: int) -> int:
    """Bound nnz(C) by the places of C, less those that an empty row of A or column of B leaves empty [1]_.

    This is hySpMM's equation 1.

    `nrows, ncols`: shape of C; the thesis has both equal to n.
    `empty_rows`: rows of A without entries, pA.
    `empty_columns`: columns of B without entries, pB.
    Returns entries of C.

    References
    ----------
    .. [1] X. Wu, thesis, Georgia State University, 2015, equation 1.

    Examples
    --------
    >>> upper_bound_nnz(10, 10, 2, 0)
    98
    """
    return nrows * ncols - max(empty_rows, empty_columns, empty_rows * empty_columns)


def upper_bound_ratio(nrows: int, ncols: int, empty_rows: int, empty_columns: int) -> float:
    """Return the share of C's places that `upper_bound_nnz` leaves (hySpMM equation 2).

    `nrows, ncols`: shape of C.
    `empty_rows, empty_columns`: rows of A and columns of B without entries.
    Returns in [0, 1]; 0.0 if C has no places.

    Examples
    --------
    >>> upper_bound_ratio(10, 10, 2, 0)
    0.98
    """
    places = nrows * ncols
    return upper_bound_nnz(nrows, ncols, empty_rows, empty_columns) / places if places else 0.0


def fits(a_bytes: int, b_bytes: int, c_bytes: int, memory_limit: int, blocks_in_flight: int = 1) -> bool:
    """Return whether blocks of A, B and C with its intermediate fit the limit at once (hySpMM equations 3 and 5).

    `a_bytes, b_bytes, c_bytes`: bytes of one block of each matrix.
    `memory_limit`: bytes.
    `blocks_in_flight`: blocks that a worker has at once, np.

    Examples
    --------
    >>> fits(100, 200, 150, 1000, 2), fits(100, 200, 151, 1000, 2)
    (True, False)
    """
    return (a_bytes + b_bytes + c_bytes) * blocks_in_flight <= USABLE * memory_limit


def even_blocks(a_nnz: int, b_nnz: int, c_block_nnz: int, memory_entries: int, blocks_in_flight: int = 1) -> int:
    """Return the least number nb of even blocks that the bound allows (hySpMM equations 4 and 5).

    `a_nnz, b_nnz`: entries of A and of B, spread evenly over the blocks.
    `c_block_nnz`: bound on the entries of one block's C and intermediate.
    `memory_entries`: entries that the memory holds, nM.
    `blocks_in_flight`: blocks that a worker has at once, np.
    Returns at least 1; 0 if no number of blocks is enough.

    Examples
    --------
    >>> even_blocks(600, 400, 100, 1000, 2)
    3
    """
    room = math.floor(USABLE * memory_entries / blocks_in_flight) - c_block_nnz
    return max(1, -(-(a_nnz + b_nnz) // room)) if room > 0 else 0


def expansion_size(a_column_nnz: Int64Array, b_row_nnz: Int64Array) -> int:
    """Count the products of ``A @ B`` exactly, by equation 1 of Polok et al. [2]_.

    `a_column_nnz`: (inner,) integers: entries of each column of A.
    `b_row_nnz`: (inner,) integers: entries of each row of B.
    Returns products before compression.

    References
    ----------
    .. [2] L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, equation 1.

    Examples
    --------
    >>> expansion_size(np.array([2, 0, 1]), np.array([3, 5, 1]))
    7
    """
    return int(np.dot(np.asarray(a_column_nnz, np.int64), np.asarray(b_row_nnz, np.int64)))


def block_budget(memory_limit: int, reserved: int, blocks_in_flight: int) -> int:
    """Return the bytes that each block in flight may take (hySpMM equation 5).

    `memory_limit`: bytes.
    `reserved`: bytes that a worker holds throughout.
    Returns bytes; negative if `reserved` alone passes the usable share of the limit.

    Examples
    --------
    >>> block_budget(1000, 100, 2)
    400
    """
    return (math.floor(USABLE * memory_limit) - reserved) // blocks_in_flight


def limit_for(block_bytes: int, reserved: int, blocks_in_flight: int) -> int:
    """Return a memory limit under which blocks of `block_bytes` fit: the inverse of `block_budget`.

    `block_bytes`: bytes of one block.
    `reserved`: bytes that a worker holds throughout.
    Returns bytes: the least such limit, or up to 2 bytes more.

    Examples
    --------
    >>> limit_for(400, 100, 2)
    1001
    """
    return math.ceil((block_bytes * blocks_in_flight + reserved) / USABLE) + 1
