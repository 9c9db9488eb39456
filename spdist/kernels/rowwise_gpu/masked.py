"""Multiply on the GPU under a mask: C has entries only where the mask holds one, or only where it holds none.

Inside a mask sums lie where the mask's entries are, and what has no product is left out afterwards; other products are
looked at, and not added. Outside of one the product is made, and what is inside is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from spdist.kernels.cuda.module import Module, c_type, module, value_type
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu import row_classes
from spdist.kernels.rowwise_gpu.row_classes import Operands
from spdist.kernels.semirings import Semiring
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX

ROWS = 8
"""Rows of a thread block, as in groups.cuh."""
SEARCH_GAIN = 16
"""A row of B so many times as long as the row of the mask is searched for its columns; a shorter one is read."""
ROW_PRODUCTS, ROW_MASK = 1 << 11, 1 << 10
"""Products, and entries of the mask, of the rows that a warp takes: up to these."""
TASK_PRODUCTS = 1 << 15
"""Products of a longer row that a thread block takes at a time, about."""
ROWS_AT_ONCE = 1 << 15
"""Rows from which on warps take more than one at a time."""
MOST_BLOCKS = 2112
"""Thread blocks of a launch whose thread blocks take what is left."""


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return the name expressions of each .cu file, for C types such as ``"double"``, ``"int"``, ``"int"``."""
    return {"rowwise_gpu/mask_rows.cu": tuple(_names(value, index, pointer).values())}


def _names(value: str, index: str, pointer: str) -> dict[str, str]:
    """Return the name expressions of the kernels by our names for them."""
    types = f"{value},{index},{pointer}"
    return {
        "prepare": f"prepare_rows<{value},{pointer}>",
        "inside": f"masked_rows<{types},false>",
        "inside ordered": f"masked_rows<{types},true>",
        "outside": f"outside_rows<{index},{pointer}>",
        "count": f"count_hits<{pointer}>",
        "keep": f"keep_hits<{types}>",
    }


def multiply(
    a: CSR, b: CSR, mask: CSR, *, complement: bool, semiring: Semiring, deterministic: bool = False,
    sound_b: bool = False,
) -> tuple[CSR, int]:  # fmt: skip
    """Return ``a @ b`` under a mask, and the entries that were made on the way.

    Parameters
    ----------
    a, b, semiring, deterministic, sound_b
        As for `gpu.multiply`.
    mask : CSR
        Of the host or on the GPU, canonical, with the rows of A and the columns of B; values do not count.
    complement : bool
        Whether C has entries only where the mask holds none.
    """
    import cupy

    if mask.nnz > INT32_MAX and a.indptr.dtype == np.int32:
        a = replace(a, indptr=a.indptr.astype(np.int64))
    x = None if complement else rowwise_gpu.checked(a, b, semiring, sound_b=sound_b)
    if x is None:
        c = rowwise_gpu.multiply(a, b, deterministic=deterministic, semiring=semiring, sound_b=sound_b)
        if not complement or 0 in (c.nnz, mask.nnz):
            return c, c.nnz
        mask = on_device(mask, c.indices.dtype, c.indptr.dtype)
    else:
        mask = on_device(mask, x.a.indices.dtype, x.a.indptr.dtype)
        c = CSR(mask.indptr, mask.indices, cupy.empty(mask.nnz, x.a.dtype), mask.shape)
        if not mask.nnz:
            return c, 0
    names = _names(value_type(c.dtype), c_type(c.indices.dtype), c_type(c.indptr.dtype))
    kernels = module("rowwise_gpu/mask_rows.cu", tuple(names.values()), semiring.defines(c.dtype))
    grid, block = ceil_div(c.nrows, ROWS), 32 * ROWS
    hits = cupy.empty(c.nnz, np.uint8)
    if x is None:
        kernels(names["outside"], grid, block, (c.nrows, c.indptr, c.indices, mask.indptr, mask.indices, hits))
    else:
        _add_products(x, c, hits, kernels, names, deterministic or not semiring.has_atomics(c.dtype))
    lengths = cupy.empty(c.nrows, np.uint32)
    kernels(names["count"], grid, block, (c.nrows, c.indptr, hits, lengths))
    indptr, nnz = rowwise_gpu.offsets(lengths, c.indptr.dtype)
    indices, data = cupy.empty(nnz, c.indices.dtype), cupy.empty(nnz, c.dtype)
    kernels(names["keep"], grid, block, (c.nrows, c.indptr, c.indices, c.data, hits, indptr, indices, data))
    return CSR(indptr, indices, data, c.shape), c.nnz + nnz


def _add_products(x: Operands, c: CSR, hits: Any, kernels: Module, names: dict[str, str], ordered: bool) -> None:
    """Queue the sums of the products that the mask, whose structure C has, leaves; and which entries have any."""
    import cupy

    # The host need not know how many tasks there are, only how many there can be.
    cost = x.facts[row_classes.PRODUCTS] + row_classes.SHARED_FACTOR * x.a.nnz
    tasks = cupy.empty((c.nrows if ordered else c.nrows + cost // TASK_PRODUCTS, 2), np.uint32)
    counters = cupy.zeros(3, np.uint64)
    shares = SEARCH_GAIN, ROW_PRODUCTS, ROW_MASK, 2**62 if ordered else TASK_PRODUCTS
    grid = min(ceil_div(max(c.nrows, c.nnz), 256), MOST_BLOCKS)
    args = c.nrows, *shares, x.a.indptr, c.indptr, x.lengths, c.data, hits, counters, tasks
    kernels(names["prepare"], grid, 256, args)
    rows = min(max(c.nrows // ROWS_AT_ONCE, 1), 32)
    args = c.nrows, *shares, rows, x.lengths, *x.arrays, c.indptr, c.indices, c.data, hits, counters, tasks
    kernels(names["inside ordered" if ordered else "inside"], min(len(tasks), MOST_BLOCKS), 32 * ROWS, args)


def on_device(mask: CSR, index: np.dtype[Any], pointer: np.dtype[Any]) -> CSR:
    """Return the structure of a mask, of the host or the GPU, on the GPU, in the dtypes of columns and offsets."""
    import cupy

    indptr = cupy.asarray(mask.indptr.astype(pointer, copy=False))
    indices = cupy.asarray(mask.indices.astype(index, copy=False))
    return CSR(indptr, indices, indices, mask.shape)
