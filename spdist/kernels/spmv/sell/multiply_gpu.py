"""Products of a matrix in SELL-C-sigma with vectors on the GPU: the launches of `multiply.cu`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from spdist.kernels.cuda.constants import SELL_WARPS
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.kernels.spmv.sell.format import Sell
from spdist.matrices.dtypes import DeviceArray

FILE = "spmv/sell/multiply.cu"
COLUMNS = (8, 4, 2, 1)
"""Columns of x that one launch may multiply."""
CACHED_SHARE = 0.5
"""Share of the L2 cache that may hold a whole matrix from product to product."""
KEPT_SHARE = 1 / 6
"""Share of the L2 cache that holds the end of a larger matrix for the next product, which begins with it."""
NULL = np.intp(0)


def multiply_name(value: str, vector: str, block: int, columns: int, alone: bool) -> str:
    """Return the name expression of a product's kernel for C types of stored values and of x.

    `block`: side of the dense blocks; 1 for none. `columns`: columns of x that a launch multiplies. `alone`: whether x
    has no other columns.
    """
    return f"sell_multiply<{value}, {vector}, {block}, {columns}, {str(alone).lower()}>"


def multiply(a: Sell, x: Any, out: Any = None) -> Any:
    """Return ``a @ x`` on the GPU, for x of shape (ncols,) or (ncols, k) in C order, of the dtype of the sums."""
    import cupy

    y = cupy.empty((a.shape[0], *x.shape[1:]), x.dtype) if out is None else out
    stride = x.shape[1] if x.ndim == 2 else 1
    item, first = x.dtype.itemsize, 0
    while first < stride:
        columns = next(k for k in COLUMNS if k <= stride - first)
        launch = _launches(cupy.cuda.runtime.getDevice(), a.dtype.char, x.dtype.char, a.block, columns, stride == 1)
        launch(a, x.data.ptr + first * item, y.data.ptr + first * item, stride)
        first += columns
    return y


@functools.cache
def _launches(device: int, value: str, vector: str, block: int, columns: int, alone: bool) -> Any:
    """Return the function that launches a product with `columns` columns of x."""
    import cupy

    types = c_type(np.dtype(value)), c_type(np.dtype(vector))
    name, long_name = multiply_name(*types, block, columns, alone), f"sell_long_rows<{types[1]}, {columns}>"
    kernels = module(FILE, (name, long_name))
    itemsize = np.dtype(vector).itemsize
    cache = cupy.cuda.Device(device).attributes["L2CacheSize"]

    def launch(a: Sell, x: int, y: int, stride: int) -> None:
        npieces, nlong = len(a.pieces) - 1, len(a.long_rows)
        grid = npieces + ceil_div(len(a.chunks), SELL_WARPS)
        if not grid:
            return
        share = 1.0 if a.nbytes <= CACHED_SHARE * cache else KEPT_SHARE * cache / a.nbytes
        parted = npieces > nlong
        partial = cupy.cuda.alloc(npieces * columns * itemsize).ptr if parted else 0
        kernels(name, grid, 256, (
            npieces, nlong, int(share * len(a.chunks)), a.next_direction(), len(a.chunks), np.int64(stride),
            a.chunks, a.values, a.wide, a.narrow, _or_null(a.rows), a.pieces, a.long_rows, a.long_indices, a.long_data,
            x, y, partial,
        ), early=True)  # fmt: skip
        if parted:
            kernels(long_name, ceil_div(nlong, 256), 256, (
                np.int32(nlong), np.int64(stride), a.row_pieces, a.long_rows, partial, y
            ), early=True)  # fmt: skip

    return launch


def gather(x: DeviceArray, order: DeviceArray) -> Any:
    """Return ``x[order]``, for x of shape (n,) or (n, k) in C order."""
    import cupy

    out = cupy.empty((len(order), *x.shape[1:]), x.dtype)
    name = f"sell_gather<{c_type(x.dtype)}>"
    if out.size:
        stride = x.shape[1] if x.ndim == 2 else 1
        module(FILE, (name,))(name, ceil_div(out.size, 256), 256, (
            np.int64(out.size), np.int64(stride), order, x, out
        ), early=True)  # fmt: skip
    return out


def _or_null(array: DeviceArray | None) -> Any:
    return NULL if array is None else array
