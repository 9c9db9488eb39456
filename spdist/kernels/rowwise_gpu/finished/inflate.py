"""Inflation of stochastic rows on the GPU: values raised to a power, rows scaled to sum 1 again."""

from __future__ import annotations

import numpy as np

from spdist.kernels.cuda.constants import GROUP_ROWS
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR

FILE = "rowwise_gpu/finished/inflate.cu"


def kernel_name(value: str, pointer: str) -> str:
    """Return the name expression of the kernel for C types of values and offsets."""
    return f"inflate_rows<{value},{pointer}>"


def inflate(rows: CSR, power: float) -> float:
    """Raise the values of each row to a power and scale the row to sum 1, in place; rows without a positive value stay.

    Values are not negative. Returns the largest ``(max - sum of squares) * entries`` of a row as it was; 0 if there are
    no rows.
    """
    import cupy

    if not rows.nrows:
        return 0.0
    name = kernel_name(c_type(rows.dtype), c_type(rows.indptr.dtype))
    chaos = cupy.empty(rows.nrows, np.float64)
    args = rows.nrows, rows.indptr, rows.data, np.float64(power), chaos
    module(FILE, (name,))(name, ceil_div(rows.nrows, GROUP_ROWS), 32 * GROUP_ROWS, args)
    return float(chaos.max())
