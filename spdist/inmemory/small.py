"""Small plain products of SciPy's matrices: its compiled loops, with as little around them as can be.

All other products, and all errors, are left to `spgemm`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse import _sparsetools

from spdist.kernels.cpu.prepare import kernels_are_loaded
from spdist.kernels.cpu.scipy_engine import Arrays, sort_rows, structural_product
from spdist.matrices.csr import is_scipy
from spdist.matrices.dtypes import FRACTIONS, result_dtype

FEW = 1 << 14
"""Products that SciPy adds up sooner than Numba's kernels are called."""
MANY = 1 << 17
"""Products up to which SciPy makes all of them, if Numba's kernels are not loaded; and entries of an operand."""
BLOCK_PRODUCTS = 1 << 20
"""Products of numbers within blocks up to which SciPy is quicker than kernels of several steps."""
DTYPES = {np.dtype(code) for code in "?bBhHiIlLqQ"} | set(FRACTIONS)
"""Dtypes of values, in this machine's byte order."""
_INDEX, _UNSIGNED = np.dtype(np.int32), np.dtype(np.uint32)


def multiply(a: Any, b: Any) -> Any:
    """Return ``a @ b`` as `spgemm` does; None if that is no small product of two matrices without duplicates."""
    if not (is_scipy(a) and is_scipy(b)):
        return None
    if "bsr" in (a.format, b.format):
        return _multiply_blocks(a, b) if a.format == b.format else None
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0] or a.nnz > MANY or b.nnz > MANY:
        return None
    if a.dtype not in DTYPES or b.dtype not in DTYPES:
        return None
    by_columns = a.format == b.format == "csc"
    m = b.T if by_columns else a.tocsr()
    n = m if b is a else a.T if by_columns else b.tocsr()
    left = _canonical(m)
    right = left if n is m else _canonical(n)
    if left is None or right is None:
        return None
    c = _multiply(left, right, (m.shape[0], n.shape[1]))
    if c is None:
        return None
    kind: Any = sp.csr_array if isinstance(a, sp.sparray) else sp.csr_matrix
    out = kind((m.shape[0], n.shape[1]), dtype=c.data.dtype)
    out.indptr, out.indices, out.data = c
    out.has_canonical_format = True
    return out.T if by_columns else out


def _multiply(a: Arrays, b: Arrays, shape: tuple[int, int]) -> Arrays | None:
    """Return the product of two canonical matrices, if it is small."""
    products = _count_products(a, b)
    if products > MANY or shape[1] > max(4 * products, FEW):  # it would clear more columns than it multiplies
        return None
    dtype = a.data.dtype
    if dtype != b.data.dtype:
        dtype = result_dtype(dtype, b.data.dtype)
        a, b = (m._replace(data=m.data.astype(dtype, copy=False)) for m in (a, b))
    if products > FEW and kernels_are_loaded(dtype, len(b.indptr) - 1, shape[1]):
        return None
    return structural_product(shape, a, b, sort=True, twice=True)


def _multiply_blocks(a: Any, b: Any) -> Any:
    """Return the product of two block matrices, if it is small and their blocks fit."""
    (r, s), (below, t) = a.blocksize, b.blocksize
    if below != s or r == s == t == 1 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.dtype not in DTYPES:
        return None
    left, right = (Arrays(m.indptr, m.indices, m.data) for m in (a, b))
    rows, inner, columns = a.shape[0] // r, a.shape[1] // s, b.shape[1] // t
    for m, shape in ((left, (rows, inner)), (right, (inner, columns))):
        if len(m.indices) > MANY or not _fits(m, shape) or not m.data.flags.c_contiguous:
            return None
        if not _sparsetools.csr_has_canonical_format(shape[0], m.indptr, m.indices):
            return None
    products = _count_products(left, right)
    if products * r * s * t > BLOCK_PRODUCTS or columns > max(4 * products, FEW):
        return None
    count = _sparsetools.csr_matmat_maxnnz(rows, columns, left.indptr, left.indices, right.indptr, right.indices)
    indptr, indices, data = np.empty(rows + 1, _INDEX), np.empty(count, _INDEX), np.empty((count, r, t), a.dtype)
    told = *left[:2], left.data.ravel(), *right[:2], right.data.ravel(), indptr, indices, data.ravel()
    _sparsetools.bsr_matmat(count, rows, columns, r, t, s, *told)
    order = np.arange(count, dtype=_INDEX)
    _sparsetools.csr_sort_indices(rows, indptr, indices, order)
    kind: Any = sp.bsr_array if isinstance(a, sp.sparray) else sp.bsr_matrix
    out = kind((data.take(order, axis=0), indices, indptr), shape=(a.shape[0], b.shape[1]), copy=False)
    out.has_sorted_indices = out.has_canonical_format = True
    return out


def _count_products(a: Arrays, b: Arrays) -> int:
    return int(np.add.reduce((b.indptr[1:] - b.indptr[:-1])[a.indices], dtype=np.int64))


def _canonical(m: Any) -> Arrays | None:
    """Return the arrays of a matrix in CSR, with the columns of each row in order.

    None if arrays do not fit together, indices are not int32, or a column is out of range, or twice in a row.
    """
    found = Arrays(m.indptr, m.indices, m.data)
    if not _fits(found, m.shape):
        return None
    if not _sparsetools.csr_has_canonical_format(m.shape[0], found.indptr, found.indices):
        if (np.diff(found.indptr) < 0).any():
            return None
        found = sort_rows(m.shape, found, Arrays(*(array.copy() for array in found)))
        if not _sparsetools.csr_has_canonical_format(m.shape[0], found.indptr, found.indices):
            return None
    return found


def _fits(m: Arrays, shape: tuple[int, int]) -> bool:
    """Whether the arrays have one length and int32 indices, and offsets and columns are in range."""
    indptr, indices, data = m
    count = len(indices)
    if not indptr.dtype == indices.dtype == _INDEX or not (indptr.flags.c_contiguous and indices.flags.c_contiguous):
        return False
    if len(indptr) != shape[0] + 1 or len(data) != count or indptr[0] != 0 or indptr[-1] != count:
        return False
    if np.maximum.reduce(indptr.view(_UNSIGNED)) > count:  # no offset is negative either
        return False
    return not count or bool(np.maximum.reduce(indices.view(_UNSIGNED)) < shape[1])
