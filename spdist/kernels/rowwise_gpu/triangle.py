"""The part of a product on and above a diagonal: operands whose product is this part alone."""

from __future__ import annotations

import numpy as np

from spdist.kernels.cuda.constants import GROUP_ROWS
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu.analysis import EnteredRows, analysed
from spdist.kernels.semirings import PLUS_TIMES, Semiring
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype


def enter(a: CSR, b: CSR, diagonal: int, semiring: Semiring = PLUS_TIMES, *, sound_b: bool = False) -> tuple[CSR, CSR]:
    """Return operands whose product is the part of ``a @ b`` on and above a diagonal; no other products are made.

    `diagonal`: its column in the first row of ``a @ b``; it is one more in each row after that. Other arguments and
    errors as for `multiply.multiply`.
    B's entries are shared; 8 bytes or more for each entry of A are new. Columns are of 64 bits if A has 2^30 entries or
    more.
    """
    import cupy

    columns = a.indices.astype(np.promote_types(a.indices.dtype, index_dtype(2 * a.nnz)), copy=False)
    x = analysed(CSR(a.indptr, columns, a.data, a.shape), b, semiring, b_is_sound=sound_b)
    if x is None:
        return a, b
    rows, offsets = cupy.empty(a.nnz, x.a.indices.dtype), cupy.zeros(2 * a.nnz + 1, x.a.indptr.dtype)
    args = a.nrows, diagonal, *x.pattern, rows, offsets
    x.kernels.launch("rowwise_gpu/rows.cu", "enter", ceil_div(a.nrows, GROUP_ROWS), 32 * GROUP_ROWS, args)
    entered = EnteredRows(offsets, x.b.indices, x.b.data, (2 * a.nnz, b.ncols))
    return CSR(x.a.indptr, rows, x.a.data, (a.nrows, 2 * a.nnz)), entered
