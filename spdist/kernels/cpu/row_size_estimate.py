"""Estimate row sizes of a product by Cohen's method: propagate minima of random numbers through a matrix (CPU, Numba).

Each row or column takes the minimum of the random numbers of its entries. The minimum of exponential random numbers
estimates how many there were.

References
----------
.. [1] E. Cohen, "Structure prediction and computation of sparse matrix products", Journal of Combinatorial Optimization
   2, 1998.
"""

from __future__ import annotations

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled
from spdist.matrices.dtypes import IndexArray, ValueArray

SAMPLES = 8
"""Random numbers for each row or column, stored side by side: a register of 8 floats."""


@compiled
def least_of_rows(indptr: IndexArray, indices: IndexArray, start: int, least: ValueArray, out: ValueArray) -> None:
    """Lower the numbers of each row to the minima of the numbers of its columns.

    `start`: number of the first of these rows in `out`, (nrows, SAMPLES). `least`: (ncols, SAMPLES).
    """
    for row in range(len(indptr) - 1):
        at = np.uintp(start + row)
        for p in range(np.uintp(indptr[row]), np.uintp(indptr[row + 1])):
            k = np.uintp(indices[p])
            for s in range(SAMPLES):
                out[at, s] = min(out[at, s], least[k, s])


@compiled
def least_of_columns(indptr: IndexArray, indices: IndexArray, start: int, least: ValueArray, out: ValueArray) -> None:
    """Lower the numbers of each column to the minima of the numbers of its rows.

    `start`: number of the first of these rows in `least`, (nrows, SAMPLES). `out`: (ncols, SAMPLES).
    """
    for row in range(len(indptr) - 1):
        at = np.uintp(start + row)
        for p in range(np.uintp(indptr[row]), np.uintp(indptr[row + 1])):
            k = np.uintp(indices[p])
            for s in range(SAMPLES):
                out[k, s] = min(out[k, s], least[at, s])
