"""Many products with one structure: `symbolic` finds the structure, `numeric` computes values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.inmemory import cupy_operands
from spdist.inmemory.host_operands import scipy_like
from spdist.inmemory.spgemm import spgemm
from spdist.kernels.rowwise_gpu.multiply import Pattern
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import IndexArray, Int64Array


@dataclass(frozen=True)
class HostPattern:
    """The structure of ``C = A @ B`` in the host's memory."""

    indptr: Int64Array  # (nrows + 1,) int64
    indices: IndexArray  # (nnz,) int32 or int64
    shape: tuple[int, int]  # (nrows, ncols)

    @property
    def nnz(self) -> int:
        """Entries of C."""
        return len(self.indices)


def symbolic(a: Any, b: Any, *, deterministic: bool = False) -> Pattern | HostPattern:
    """Find the structure of ``a @ b``.

    Parameters
    ----------
    a, b : sparse matrix or array
        As for `spgemm`; on the GPU, rows of B are sorted and free of duplicates.
    deterministic : bool
        As for `spgemm`; applies to every `numeric` with this pattern.

    Returns
    -------
    Pattern or HostPattern
        With `indptr`, `indices`, `nnz` and `shape`. On the GPU the pattern also holds the kernels' analysis
        of each row, so that `numeric` is quicker than `spgemm`; on the CPU both take equal time.

    Raises
    ------
    MatrixError
        If the shapes do not fit, one operand is on the GPU and the other is not, or one is not a matrix that spdist
        multiplies.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = sp.eye_array(3, format="csr")
    >>> symbolic(a, a).indices
    array([0, 1, 2], dtype=int32)
    """
    if cupy_operands.are_on_gpu(a, b):
        return cupy_operands.symbolic(a, b, deterministic)
    from spdist.kernels.cpu import multiply as cpu

    left, right = from_scipy(a), from_scipy(b)
    c = cpu.multiply(_with_ones(left), _with_ones(right), threads=count_cpus())
    return HostPattern(c.indptr, c.indices, c.shape)


def numeric(pattern: Pattern | HostPattern, a: Any, b: Any) -> Any:
    """Multiply operands with the structure that was passed to `symbolic`.

    Parameters
    ----------
    pattern : Pattern or HostPattern
        The structure that `symbolic` returned.
    a, b : sparse matrix or array
        With the structure and dtypes that were passed to `symbolic`.

    Returns
    -------
    sparse matrix or array
        The product; it shares `indptr` and `indices` with the pattern.

    Raises
    ------
    MatrixError
        If an operand has another shape, nnz or dtype.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> a = sp.eye_array(3, format="csr")
    >>> numeric(symbolic(a, a), 2 * a, a).data
    array([2., 2., 2.])
    """
    if isinstance(pattern, Pattern):
        return cupy_operands.numeric(pattern, a, b)
    c = from_scipy(spgemm(a, b))
    same = c.shape == pattern.shape and c.nnz == pattern.nnz and np.array_equal(c.indices, pattern.indices)
    if not same or not np.array_equal(c.indptr, pattern.indptr):
        raise MatrixError(
            f"the product is {c.nrows:,} x {c.ncols:,} with {c.nnz:,} entries, not the pattern's "
            f"{pattern.shape[0]:,} x {pattern.shape[1]:,} with {pattern.nnz:,}, or in other places: call symbolic again"
        )
    return scipy_like(a, CSR(pattern.indptr, pattern.indices, c.data, pattern.shape))


def _with_ones(m: CSR) -> CSR:
    """Return the matrix with True for every value."""
    return CSR(m.indptr, m.indices, np.ones(m.nnz, np.bool_), m.shape)
