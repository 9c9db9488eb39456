"""Inflation of stochastic rows on the GPU: values raised to a power, rows scaled to sum 1 again."""

from __future__ import annotations

import numpy as np

from spdist.kernels.cuda.constants import GROUP_ROWS
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return every kernel of the file for a choice of types: what may be compiled on first use.

    `value, index, pointer`: C types of values, columns and offsets, such as ``"double"``, ``"int"``, ``"int"``.
    Returns name expressions by file.

    Examples
    --------
    >>> sources("float", "int", "int")
    {'rowwise_gpu/finished/inflate.cu': ('inflate_rows<float,int>',)}
    """
    names = () if value.startswith("Complex") else (f"inflate_rows<{value},{pointer}>",)
    return {"rowwise_gpu/finished/inflate.cu": names}


def inflate(rows: CSR, power: float) -> float:
    """Raise the values of each row to a power and scale the row to sum 1, in place.

    `rows`: on the GPU, of float32 or float64. Not negative; rows need not sum to 1 before. Rows without a positive
    value stay.
    Returns the largest ``(max - sum of squares) * entries`` of a row as it was; 0 if there are no rows.
    """
    import cupy

    if not rows.nrows:
        return 0.0
    file, (name,) = next(iter(sources(c_type(rows.dtype), "", c_type(rows.indptr.dtype)).items()))
    chaos = cupy.empty(rows.nrows, np.float64)
    args = rows.nrows, rows.indptr, rows.data, np.float64(power), chaos
    module(file, (name,))(name, ceil_div(rows.nrows, GROUP_ROWS), 32 * GROUP_ROWS, args)
    return float(chaos.max())
