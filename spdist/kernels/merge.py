"""Sum of two partial products: rows merged by two pointers; the pattern is the union, the order of k is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import numpy as np

from spdist.csr import CSR, IndexArray, Int64Array, ValueArray


def _merge_rows(
    p_indptr: Int64Array,
    p_indices: IndexArray,
    p_data: ValueArray,
    q_indptr: Int64Array,
    q_indices: IndexArray,
    q_data: ValueArray,
    indptr: Int64Array,
    indices: IndexArray,
    data: ValueArray,
) -> None:
    at = 0
    for row in range(len(indptr) - 1):
        i, i_end = p_indptr[row], p_indptr[row + 1]
        j, j_end = q_indptr[row], q_indptr[row + 1]
        while i < i_end or j < j_end:
            if j == j_end or (i < i_end and p_indices[i] < q_indices[j]):
                indices[at], data[at] = p_indices[i], p_data[i]
                i += 1
            elif i == i_end or q_indices[j] < p_indices[i]:
                indices[at], data[at] = q_indices[j], q_data[j]
                j += 1
            else:
                indices[at], data[at] = p_indices[i], p_data[i] + q_data[j]
                i += 1
                j += 1
            at += 1
        indptr[row + 1] = at


@functools.cache
def _compiled() -> Callable[..., None]:
    from numba import njit

    return cast(Callable[..., None], njit(nogil=True, cache=True)(_merge_rows))


def merge(p: CSR, q: CSR) -> CSR:
    """Add two canonical matrices of the same columns; where one has fewer rows, only those both have.

    Entries that cancel stay, as zeros. bool adds as OR.
    """
    nrows = min(p.nrows, q.nrows)
    p, q = p.rows(0, nrows), q.rows(0, nrows)
    indptr = np.zeros(nrows + 1, np.int64)
    indices = np.empty(p.nnz + q.nnz, p.indices.dtype)
    data = np.empty(p.nnz + q.nnz, p.dtype)
    _compiled()(p.indptr, p.indices, p.data, q.indptr, q.indices, q.data, indptr, indices, data)
    nnz = int(indptr[-1])
    indices.resize(nnz, refcheck=False)  # gives the pages behind the end back, without a copy
    data.resize(nnz, refcheck=False)
    return CSR(indptr, indices, data, (nrows, p.ncols))
