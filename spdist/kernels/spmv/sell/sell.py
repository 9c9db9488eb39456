"""Matrices in SELL-C-sigma: convert from CSR, multiply with vectors, convert back; on the host or on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.kernels.spmv.sell.format import LANES, Sell, to_host
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, DeviceArray, is_on_gpu, module_of

if TYPE_CHECKING:
    from spdist.kernels.spmv.sell.build_gpu import Survey

Index = Literal["auto", "wide", "narrow"]

ALLOWED = {"wide": 0, "narrow": 1, "auto": 3}
"""Forms of columns that a SELL chunk may have, as the kernels number them."""


def build(
    a: CSR, *, height: int = 0, lanes: int = LANES, sigma: int | Literal["auto"] = "auto",
    index: Index = "auto", block: int | Literal["auto"] = "auto", dtype: npt.DTypeLike | None = None,
    threads: int = 1, survey: Survey | None = None,
) -> Sell:  # fmt: skip
    """Convert a matrix to SELL-C-sigma, on the device that holds its arrays; duplicates count twice.

    `height`: C, rows of a SELL chunk; divides `lanes`. 0 lets spdist choose. `lanes`: C times T; must be 32 for
    products on the GPU. `sigma`: rows of the windows that are sorted by length; "auto" chooses the value that moves
    fewest bytes by the model. `index`: forms of column indices that SELL chunks may have: all, 16-bit offsets, or
    32-bit columns only. `block`: side of the dense blocks to detect; 1 for none, which "auto" means on the CPU.
    `dtype`: of the stored values. `survey`: as `survey_rows` returns it for this matrix, or with another `Sharing`.
    Raises `MatrixError` if the matrix has 2**31 rows or columns.
    """
    if max(a.shape) > INT32_MAX:
        raise MatrixError(f"SELL-C-sigma has 32-bit positions, the matrix is {a.nrows:,} x {a.ncols:,}: use CSR")
    if lanes < 1 or height < 0:
        raise InputError(f"C = {height} rows of a chunk and {lanes} lanes: both are numbers above 0")
    if height and lanes % height:
        raise InputError(f"C = {height} rows of a chunk must divide its {lanes} lanes")
    builder = _builder(a, lanes, height, threads)
    if survey is not None:
        builder.survey = survey
    stored = np.dtype(a.dtype if dtype is None else dtype)
    side = builder.find_block() if block == "auto" and index == "auto" else 1 if block == "auto" else block
    if builder.has_long_rows() or height not in (0, lanes):
        side = 1  # blocks have a lane a row
    placed = builder.place(sigma, side, stored.itemsize + 2)
    long = builder.long_rows(stored)
    filled = builder.fill(placed, side, stored, ALLOWED[index])
    parts: tuple[Any, ...] = (*filled, placed.rows, *long)
    return Sell(a.shape, a.nnz, lanes, side, placed.sigma, placed.chunks, *parts)


def survey_rows(a: CSR) -> Survey:
    """Return the lengths of the rows of a matrix on the GPU, by one launch."""
    found: Survey = _builder(a, LANES, 0, 1).survey
    return found


def long_rows(a: CSR, dtype: np.dtype[Any]) -> Sell:
    """Return only the rows that stay in CSR, without SELL chunks, for formats that multiply other rows themselves."""
    xp = module_of(a.data)
    none = (xp.empty((0, 4), np.int64), *(xp.empty(0, kind) for kind in (dtype, np.int32, np.uint16)))
    parts: tuple[Any, ...] = (*none, None, *_builder(a, LANES, LANES, 1).long_rows(dtype))
    return Sell(a.shape, a.nnz, LANES, 1, 1, *parts)


def _builder(a: CSR, lanes: int, height: int, threads: int) -> Any:
    """Return the steps of `build` for the device that holds the arrays."""
    if is_on_gpu(a.data):
        from spdist.kernels.spmv.sell.build_gpu import Builder as GpuBuilder

        return GpuBuilder(a, lanes, height)
    from spdist.kernels.spmv.sell.build_cpu import Builder

    return Builder(a, lanes, height, threads)


def multiply(a: Sell, x: DeviceArray, out: DeviceArray | None = None, *, threads: int = 1) -> Any:
    """Return ``a @ x`` on the device of `a`, for x of shape (ncols,) or (ncols, k) in C order.

    Products are summed in the dtype of x: the dtype of `a`, or the wider one of the same kind.
    """
    if is_on_gpu(a.values):
        from spdist.kernels.spmv.sell import multiply_gpu

        return multiply_gpu.multiply(a, x, out)
    from spdist.kernels.spmv.sell import multiply_cpu

    return multiply_cpu.multiply(a, x, out, threads)


def to_csr(a: Sell) -> CSR:
    """Return the matrix on the host as canonical CSR: duplicates summed, explicit zeros kept."""
    from spdist.kernels.spmv.sell import multiply_cpu

    return multiply_cpu.to_csr(to_host(a))
