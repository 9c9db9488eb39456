"""Sum of two partial products: rows merged by two pointers; the pattern is the union, the order of k is kept."""

from __future__ import annotations

import numpy as np

from spdist.kernels.cpu.arrays import CsrArrays
from spdist.kernels.cpu.numba_compile import compiled, fold, for_ring
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.semirings import Semiring
from spdist.matrices.csr import CSR


@compiled
def merge_rows(p: CsrArrays, q: CsrArrays, c: CsrArrays, ring: Semiring | None) -> None:
    """Merge the rows of p and q, canonical and as many as `c` has, into c; ``c.indptr[0]`` is 0.

    `ring`: adds values with equal columns; None for plus.
    """
    at = np.uintp(0)
    i, j = np.uintp(p.indptr[0]), np.uintp(q.indptr[0])
    for row in range(len(c.indptr) - 1):
        i_end, j_end = np.uintp(p.indptr[row + 1]), np.uintp(q.indptr[row + 1])
        while i < i_end or j < j_end:
            if j == j_end or (i < i_end and p.indices[i] < q.indices[j]):
                c.indices[at], c.data[at] = p.indices[i], p.data[i]
                i += np.uintp(1)
            elif i == i_end or q.indices[j] < p.indices[i]:
                c.indices[at], c.data[at] = q.indices[j], q.data[j]
                j += np.uintp(1)
            else:
                c.indices[at], c.data[at] = p.indices[i], fold(p.data[i], q.data[j], ring)
                i += np.uintp(1)
                j += np.uintp(1)
            at += np.uintp(1)
        c.indptr[row + 1] = at


def merge(p: CSR, q: CSR, spec: ProductSpec = PLAIN) -> CSR:
    """Add two canonical partial products of the same columns; bools add by OR, and zeros that cancel stay.

    The sum has only the rows that both have.
    """
    nrows = min(p.nrows, q.nrows)
    p, q = p.rows(0, nrows), q.rows(0, nrows)
    ring = spec.ring(p.dtype)
    bits = p.dtype.kind == "b" and (ring is None or ring.named)
    dtype = np.dtype(np.uint8) if bits else p.dtype
    indptr = np.zeros(nrows + 1, np.int64)
    indices = np.empty(p.nnz + q.nnz, p.indices.dtype)
    data = np.empty(p.nnz + q.nnz, p.dtype)
    left, right = (CsrArrays(m.indptr, m.indices, m.data.view(dtype)) for m in (p, q))
    for_ring(merge_rows, ring)(left, right, CsrArrays(indptr, indices, data.view(dtype)), ring)
    nnz = int(indptr[-1])
    indices.resize(nnz, refcheck=False)  # gives the pages behind the end back, without a copy
    data.resize(nnz, refcheck=False)
    return CSR(indptr, indices, data, (nrows, p.ncols))
