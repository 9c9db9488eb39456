"""Multiply on the GPU under a mask: C has entries only where the mask holds one, or only where it holds none.

Inside a mask, C is allocated with the mask's structure: each product whose column is in the mask's row is added there,
the others are dropped, and entries that got no product are removed afterwards. For the complement the whole product is
made, and the entries inside the mask are removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.constants import GROUP_ROWS, SHARED_FACTOR, MaskCounter
from spdist.kernels.cuda.module import Module, c_type, module, value_type
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import analysis
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu.analysis import AnalysedProduct
from spdist.kernels.semirings import Semiring
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX

FILE = "rowwise_gpu/mask_rows.cu"
MOST_BLOCKS = 2112
"""Thread blocks of a launch at most: 16 on each of the 132 multiprocessors of an H100."""


@dataclass(frozen=True)
class MaskTuning:
    """Thresholds, measured on an H100, by which rows are shared out to warps and thread blocks."""

    # A row of B at least this many times as long as the mask's row is searched for the mask's columns; a shorter row is
    # read from end to end
    search_gain: int = 16
    # products, and entries of the mask, of the longest row that a warp takes
    row_products: int = 1 << 11
    row_mask: int = 1 << 10
    task_products: int = 1 << 15  # products, about, of the pieces of longer rows that thread blocks take
    rows_per_turn: int = 1 << 15  # rows of C for each row that a warp takes at a time


TUNING = MaskTuning()
"""Thresholds of every masked product."""


def kernel_names(value: str, index: str, pointer: str) -> dict[str, str]:
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
    """Return ``a @ b`` under a canonical mask, on the host or on the GPU, and how many entries were allocated for it.

    Arguments and errors as for `rowwise_gpu.multiply.multiply`; values of the mask do not count. The entries, with the
    entries of C, measure the device memory that the call took.
    """
    import cupy

    if mask.nnz > INT32_MAX and a.indptr.dtype == np.int32:
        a = replace(a, indptr=a.indptr.astype(np.int64))
    x = None if complement else analysis.analysed(a, b, semiring, b_is_sound=sound_b)
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
    names = kernel_names(value_type(c.dtype), c_type(c.indices.dtype), c_type(c.indptr.dtype))
    kernels = module(FILE, tuple(names.values()), semiring.defines(c.dtype))
    grid, block = ceil_div(c.nrows, GROUP_ROWS), 32 * GROUP_ROWS
    hits = cupy.empty(c.nnz, np.uint8)
    if x is None:
        kernels(names["outside"], grid, block, (c.nrows, c.indptr, c.indices, mask.indptr, mask.indices, hits))
    else:
        _add_products(x, c, hits, kernels, names, deterministic or not semiring.has_atomics(c.dtype))
    lengths = cupy.empty(c.nrows, np.uint32)
    kernels(names["count"], grid, block, (c.nrows, c.indptr, hits, lengths))
    indptr, nnz = analysis.offsets(lengths, c.indptr.dtype)
    indices, data = cupy.empty(nnz, c.indices.dtype), cupy.empty(nnz, c.dtype)
    kernels(names["keep"], grid, block, (c.nrows, c.indptr, c.indices, c.data, hits, indptr, indices, data))
    return CSR(indptr, indices, data, c.shape), c.nnz + nnz


def _add_products(
    x: AnalysedProduct, c: CSR, hits: npt.NDArray[np.uint8], kernels: Module, names: dict[str, str], ordered: bool
) -> None:
    """Queue the sums of the products inside the mask, whose structure C has; `hits` gets which entries have any."""
    import cupy

    # The host need not know how many tasks there are, only how many there can be.
    cost = x.products + SHARED_FACTOR * x.a.nnz
    tasks = cupy.empty((c.nrows if ordered else c.nrows + cost // TUNING.task_products, 2), np.uint32)
    counters = cupy.zeros(len(MaskCounter), np.uint64)
    task_products = 2**62 if ordered else TUNING.task_products
    shares = TUNING.search_gain, TUNING.row_products, TUNING.row_mask, task_products
    grid = min(ceil_div(max(c.nrows, c.nnz), 256), MOST_BLOCKS)
    args = c.nrows, *shares, x.a.indptr, c.indptr, x.lengths, c.data, hits, counters, tasks
    kernels(names["prepare"], grid, 256, args)
    rows = min(max(c.nrows // TUNING.rows_per_turn, 1), 32)
    args = c.nrows, *shares, rows, x.lengths, *x.arrays, c.indptr, c.indices, c.data, hits, counters, tasks
    kernels(names["inside ordered" if ordered else "inside"], min(len(tasks), MOST_BLOCKS), 32 * GROUP_ROWS, args)


def on_device(mask: CSR, index: np.dtype[Any], pointer: np.dtype[Any]) -> CSR:
    """Return a mask's structure on the GPU; its values are its columns, as nothing reads them."""
    import cupy

    indptr = cupy.asarray(mask.indptr.astype(pointer, copy=False))
    indices = cupy.asarray(mask.indices.astype(index, copy=False))
    return CSR(indptr, indices, indices, mask.shape)
