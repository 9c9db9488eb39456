"""Multiply on the GPU under a mask: C has entries only where the mask holds one, or only where it holds none.

Inside a mask sums lie where the mask's entries are, and what has no product is left out afterwards; other products are
looked up, and not added. Outside of one the product is made, and what is inside is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.csr import CSR
from spdist.kernels import gpu
from spdist.kernels.module import c_type, module, value_type
from spdist.kernels.semirings import Semiring
from spdist.kernels.workspace import ceil_div

ROWS = 8
"""Rows of a thread block, as in groups.cuh."""


def sources(value: str, index: str, pointer: str) -> dict[str, tuple[str, ...]]:
    """Return the name expressions of each .cu file, for C types such as ``"double"``, ``"int"``, ``"int"``."""
    return {"mask_rows.cu": tuple(_names(value, index, pointer).values())}


def _names(value: str, index: str, pointer: str) -> dict[str, str]:
    """Return the name expressions of the kernels by our names for them."""
    types = f"{value},{index},{pointer}"
    return {
        "inside": f"masked_rows<{types},false>",
        "inside ordered": f"masked_rows<{types},true>",
        "outside": f"outside_rows<{index},{pointer}>",
        "count": f"count_hits<{pointer}>",
        "keep": f"keep_hits<{types}>",
    }


def multiply(
    a: CSR, b: CSR, mask: CSR, *, complement: bool, semiring: Semiring, deterministic: bool = False
) -> tuple[CSR, int]:
    """Return ``a @ b`` under a mask, and the entries that were made on the way.

    Parameters
    ----------
    a, b, semiring, deterministic
        As for `gpu.multiply`.
    mask : CSR
        On the GPU, canonical, with the rows of A and the columns of B, and the index dtypes of A; values do not count.
    complement : bool
        Whether C has entries only where the mask holds none.
    """
    import cupy

    x = None if complement else gpu.checked(a, b, semiring)
    if x is None:
        c = gpu.multiply(a, b, deterministic=deterministic, semiring=semiring)
        if not complement or 0 in (c.nnz, mask.nnz):
            return c, c.nnz
    else:
        c = CSR(mask.indptr, mask.indices, cupy.empty(mask.nnz, x.a.dtype), mask.shape)
        if not mask.nnz:
            return c, 0
    defines = semiring.defines(c.dtype)
    names = _names(value_type(c.dtype), c_type(c.indices.dtype), c_type(c.indptr.dtype))
    kernels = module("mask_rows.cu", tuple(names.values()), defines)
    grid, block = ceil_div(c.nrows, ROWS), 32 * ROWS
    hits = cupy.empty(c.nnz, np.uint8)
    if x is None:
        kernels(names["outside"], grid, block, (c.nrows, c.indptr, c.indices, mask.indptr, mask.indices, hits))
    else:
        ordered = deterministic or not semiring.has_atomics(c.dtype)
        args = c.nrows, *x.arrays, mask.indptr, mask.indices, c.data, hits
        kernels(names["inside ordered" if ordered else "inside"], grid, block, args)
    lengths = cupy.empty(c.nrows, np.uint32)
    kernels(names["count"], grid, block, (c.nrows, c.indptr, hits, lengths))
    indptr, nnz = gpu.offsets(lengths, c.indptr.dtype)
    indices, data = cupy.empty(nnz, c.indices.dtype), cupy.empty(nnz, c.dtype)
    kernels(names["keep"], grid, block, (c.nrows, c.indptr, c.indices, c.data, hits, indptr, indices, data))
    return CSR(indptr, indices, data, c.shape), c.nnz + nnz


def on_device(mask: CSR, index: np.dtype[Any], pointer: np.dtype[Any]) -> CSR:
    """Copy the structure of a mask of the host to the GPU."""
    import cupy

    indptr = cupy.asarray(mask.indptr.astype(pointer, copy=False))
    indices = cupy.asarray(mask.indices.astype(index, copy=False))
    return CSR(indptr, indices, indices, mask.shape)
