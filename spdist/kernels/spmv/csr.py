"""CSR-scalar and CSR-vector: products with vectors on the GPU, without another storage format.

1. Choose how many lanes share a row, about one for each four entries of a mean row (`row_width`).
2. Each lane adds up every so-many-th entry of its row; CSR-scalar has one lane a row, CSR-vector a warp.
3. The lanes of a row add up their sums by shuffles, and the first one writes y.

Beyond the paper, groups narrower than a warp (2 to 16 lanes) serve short rows.

References
----------
.. [1] F. Villa, "Efficient Sparse Matrix-Vector Multiplication on CUDA", Politecnico di Milano.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from spdist.errors import InputError
from spdist.kernels.cuda.module import C_TYPES, c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray

FILE = "spmv/csr.cu"
WIDTHS = (1, 2, 4, 8, 16, 32)

Width = Literal[1, 2, 4, 8, 16, 32]


def kernel_name(value: str, vector: str, index: str, pointer: str, width: int) -> str:
    """Return the name expression of a product's kernel; x may be more precise than stored values."""
    return f"spmv_csr<{value}, {vector}, {index}, {pointer}, {width}>"


def row_width(nrows: int, nnz: int) -> int:
    """Return how many lanes share a row: one for about four entries, at most 32."""
    mean = nnz / max(nrows, 1)
    return max((width for width in WIDTHS if 2.5 * width <= mean), default=1)


def multiply(a: CSR, x: DeviceArray, out: DeviceArray | None = None, *, width: int | None = None) -> Any:
    """Return ``a @ x`` on the GPU by CSR-scalar (`width` 1) or CSR-vector; by default the mean length of rows chooses.

    Entries come in any order, duplicates count twice. x is (ncols,) or (ncols, k) in C order, of the dtype of `a` or
    the wider dtype of its kind.
    """
    import cupy

    lanes = row_width(a.nrows, a.nnz) if width is None else width
    if lanes not in WIDTHS:
        raise InputError(f"{lanes} lanes a row: choose one of {', '.join(map(str, WIDTHS))}")
    y = cupy.empty((a.nrows, *x.shape[1:]), x.dtype) if out is None else out
    columns = x.shape[1] if x.ndim == 2 else 1
    if a.nrows and columns:
        index, pointer = (C_TYPES[np.dtype(array.dtype)] for array in (a.indices, a.indptr))
        name = kernel_name(c_type(np.dtype(a.dtype)), c_type(x.dtype), index, pointer, lanes)
        module(FILE, (name,))(name, (ceil_div(a.nrows, 256 // lanes), columns), 256, (
            np.int64(a.nrows), np.int64(columns), a.indptr, a.indices, a.data, x, y
        ), early=True)  # fmt: skip
    return y
