"""SELL-C-sigma on the GPU: the launches of `sell.cu`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from spdist.csr import CSR
from spdist.errors import MatrixError
from spdist.kernels.module import C_TYPES, c_type, module
from spdist.kernels.sell_format import BLOCKED_SHARE, BLOCKS, GPU_LONG, LANES, SAMPLES, Sell
from spdist.kernels.workspace import ceil_div

FILE = "sell.cu"
COLUMNS = (8, 4, 2, 1)
"""Columns of x that one launch may multiply."""
VECTORS = {"float": ("float", "double"), "Complex<float>": ("Complex<float>", "Complex<double>")}
"""Dtypes of x and y for stored values that may be narrower than these."""
WARPS = 8
CACHED_SHARE = 0.5
"""Of the L2 cache, what may hold a matrix from product to product."""
KEPT_SHARE = 1 / 6
"""Of the L2 cache, what holds the end of a larger one for the next product, which begins with it."""
NULL = np.intp(0)


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return the name expressions of each .cu file, for C types such as ``"double"``, ``"int"``, ``"int"``."""
    vectors = VECTORS.get(value, (value,))
    names = [f"sell_probe<{index}, {pointer}>", *(f"sell_gather<{vector}>" for vector in vectors)]
    names += [f"sell_analyse<{index}, {pointer}, {b}>" for b in (1, *BLOCKS)]
    names += [f"sell_fill<{value}, {value}, {index}, {pointer}, {b}>" for b in (1, *BLOCKS)]
    columns = [(k, False) for k in COLUMNS] + [(1, True)]
    names += [multiply_name(value, vector, b, *k) for vector in vectors for b in (1, *BLOCKS) for k in columns]
    names += [f"sell_long_rows<{vector}, {k}>" for vector in vectors for k in COLUMNS]
    return {FILE: tuple(names)}


def multiply_name(value: str, vector: str, block: int, columns: int, alone: bool) -> str:
    """Return the name expression of a product's kernel; `alone` where x has no other columns."""
    return f"sell_multiply<{value}, {vector}, {block}, {columns}, {str(alone).lower()}>"


class Builder:
    """The steps of `sell.build` for a matrix on the GPU."""

    long, spread = GPU_LONG, True

    def __init__(self, a: CSR, lanes: int) -> None:
        import cupy

        if lanes != LANES:
            raise MatrixError(f"a chunk has {LANES} lanes on the GPU, not {lanes}")
        self.xp, self.a = cupy, a
        self.types = f"{C_TYPES[np.dtype(a.indices.dtype)]}, {C_TYPES[np.dtype(a.indptr.dtype)]}"

    def lengths(self) -> Any:
        """Return the entries of each row."""
        return self.a.indptr[1:] - self.a.indptr[:-1]

    def find_block(self) -> int:
        """Return the side of the dense blocks that most sampled rows are made of; 1 if there are none."""
        stride = max(1, self.a.nrows // SAMPLES)
        samples = ceil_div(self.a.nrows, stride)
        if not samples or not self.a.nnz:
            return 1
        found = self.xp.zeros(len(BLOCKS), np.int32)
        self._launch(f"sell_probe<{self.types}>", ceil_div(samples, 256), (
            np.int64(samples), np.int64(stride), np.int64(self.a.nrows), self.a.indptr, self.a.indices, found,
        ))  # fmt: skip
        return max((b for b, n in zip(BLOCKS, found.tolist(), strict=True) if n >= BLOCKED_SHARE * samples), default=1)

    def analyse(self, chunks: Any, rows: Any, block: int, dtype: np.dtype[Any], allowed: int) -> Any:
        """Set width, base and kind of each chunk; return the sizes of its arrays, and the hash of its diagonals."""
        sizes = self.xp.empty((4, len(chunks)), np.int64)
        if len(chunks):
            self._launch(f"sell_analyse<{self.types}, {block}>", ceil_div(len(chunks), WARPS), (
                np.int64(len(chunks)), np.int64(self.a.nrows), np.int32(dtype.itemsize), np.int32(allowed),
                self.a.indptr, self.a.indices, _or_null(rows), chunks, sizes,
            ))  # fmt: skip
        return sizes

    def fill(
        self, chunks: Any, rows: Any, block: int, dtype: np.dtype[Any], sizes: Any, owners: Any
    ) -> tuple[Any, ...] | None:
        """Place each chunk's arrays behind those of the chunks before; return values and indices of all chunks.

        None if a chunk's diagonals are not those of its owner.
        """
        ends = self.xp.empty((3, len(chunks)), np.int64)
        differ = None if owners is None else self.xp.zeros(1, np.int32)
        for k in range(3):
            self.xp.cumsum(sizes[k], out=ends[k])
        totals = ends[:, -1].get().tolist() if len(chunks) else (0, 0, 0)
        filled = (
            self.xp.empty(totals[0], dtype),
            self.xp.zeros(totals[1], np.int32),
            self.xp.zeros(totals[2], np.uint16),
        )
        if len(chunks):
            name = f"sell_fill<{c_type(self.a.dtype)}, {c_type(dtype)}, {self.types}, {block}>"
            for shared in (0,) if differ is None else (0, 1):
                self._launch(name, ceil_div(len(chunks), WARPS), (
                    np.int64(len(chunks)), self.a.indptr, self.a.indices, self.a.data, _or_null(rows), sizes, ends,
                    owners, shared, chunks, *filled, differ,
                ))  # fmt: skip
        self.xp.cuda.get_current_stream().synchronize()  # products launched early do not wait for what they multiply
        return None if differ is not None and differ.get()[0] else filled

    def _launch(self, name: str, grid: int, arguments: tuple[Any, ...]) -> None:
        module(FILE, (name,))(name, grid, 256, arguments)


def _or_null(array: Any) -> Any:
    return NULL if array is None else array


def multiply(a: Sell, x: Any, out: Any = None) -> Any:
    """Return ``a @ x``; see `sell.multiply`."""
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
    """Return the function that launches a product with so many columns of x."""
    import cupy

    types = c_type(np.dtype(value)), c_type(np.dtype(vector))
    name, long_name = multiply_name(*types, block, columns, alone), f"sell_long_rows<{types[1]}, {columns}>"
    kernels = module(FILE, (name, long_name))
    itemsize = np.dtype(vector).itemsize
    cache = cupy.cuda.Device(device).attributes["L2CacheSize"]

    def launch(a: Sell, x: int, y: int, stride: int) -> None:
        npieces, nlong = len(a.pieces) - 1, len(a.long_rows)
        grid = npieces + ceil_div(len(a.chunks), WARPS)
        if not grid:
            return
        share = 1.0 if a.nbytes <= CACHED_SHARE * cache else KEPT_SHARE * cache / a.nbytes
        parted = npieces > nlong
        partial = cupy.cuda.alloc(npieces * columns * itemsize).ptr if parted else 0
        kernels(name, grid, 256, (
            npieces, nlong, int(share * len(a.chunks)), a.way(), len(a.chunks), np.int64(stride), a.chunks, a.values,
            a.wide, a.narrow, _or_null(a.rows), a.pieces, a.long_rows, a.long_indices, a.long_data, x, y, partial,
        ), early=True)  # fmt: skip
        if parted:
            kernels(long_name, ceil_div(nlong, 256), 256, (
                np.int32(nlong), np.int64(stride), a.row_pieces, a.long_rows, partial, y
            ), early=True)  # fmt: skip

    return launch


def gather(x: Any, order: Any) -> Any:
    """Return the rows of x in a new order."""
    import cupy

    out = cupy.empty((len(order), *x.shape[1:]), x.dtype)
    name = f"sell_gather<{c_type(x.dtype)}>"
    if out.size:
        stride = x.shape[1] if x.ndim == 2 else 1
        module(FILE, (name,))(name, ceil_div(out.size, 256), 256, (
            np.int64(out.size), np.int64(stride), order, x, out
        ), early=True)  # fmt: skip
    return out
