"""Sum of two partial products: rows merged by two pointers; the pattern is the union, the order of k is kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, fold, for_ring
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.matrices.csr import CSR


@compiled
def merge_rows(p: Any, q: Any, c: Any, ring: Any) -> None:
    """Merge the rows of p and q, each (indptr, indices, data) with as many rows as c, into c."""
    at = np.uintp(0)
    i, j = np.uintp(p[0][0]), np.uintp(q[0][0])
    for row in range(len(c[0]) - 1):
        i_end, j_end = np.uintp(p[0][row + 1]), np.uintp(q[0][row + 1])
        while i < i_end or j < j_end:
            if j == j_end or (i < i_end and p[1][i] < q[1][j]):
                c[1][at], c[2][at] = p[1][i], p[2][i]
                i += np.uintp(1)
            elif i == i_end or q[1][j] < p[1][i]:
                c[1][at], c[2][at] = q[1][j], q[2][j]
                j += np.uintp(1)
            else:
                c[1][at], c[2][at] = p[1][i], fold(p[2][i], q[2][j], ring)
                i += np.uintp(1)
                j += np.uintp(1)
            at += np.uintp(1)
        c[0][row + 1] = at


def merge(p: CSR, q: CSR, spec: ProductSpec = PLAIN) -> CSR:
    """Add two canonical matrices of the same columns; where one has fewer rows, only those both have.

    Entries that cancel stay, as zeros. bool adds as OR, and others as the semiring of the options says.
    """
    nrows = min(p.nrows, q.nrows)
    p, q = p.rows(0, nrows), q.rows(0, nrows)
    ring = spec.ring(p.dtype)
    bits = p.dtype.kind == "b" and (ring is None or ring.named)
    kind = np.dtype(np.uint8) if bits else p.dtype
    indptr = np.zeros(nrows + 1, np.int64)
    indices = np.empty(p.nnz + q.nnz, p.indices.dtype)
    data = np.empty(p.nnz + q.nnz, p.dtype)
    left, right = ((m.indptr, m.indices, m.data.view(kind)) for m in (p, q))
    for_ring(merge_rows, ring)(left, right, (indptr, indices, data.view(kind)), ring)
    nnz = int(indptr[-1])
    indices.resize(nnz, refcheck=False)  # gives the pages behind the end back, without a copy
    data.resize(nnz, refcheck=False)
    return CSR(indptr, indices, data, (nrows, p.ncols))
