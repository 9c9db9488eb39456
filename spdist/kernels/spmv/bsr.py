"""Block matrices times vectors, and times dense matrices of few columns, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.kernels.spmv.parallel import in_parallel, threads_for
from spdist.matrices.bsr import BSR
from spdist.matrices.dtypes import ValueArray

COLUMNS = 8
"""Columns of x that are multiplied at a time: a kernel is compiled for each number up to that."""


def multiply(a: BSR, x: ValueArray, out: ValueArray | None = None, *, threads: int = 1) -> Any:
    """Return ``a @ x`` on the host, for x of shape (ncols,) or (ncols, k); equal bits for any number of threads.

    x is C order, of the kind of A's values, real or complex, and at least as precise: values are widened as they are
    read.
    Raises `MatrixError` if a shape does not fit.
    """
    shape = a.shape[0], *x.shape[1:]
    if x.shape[:1] != a.shape[1:] or (out is not None and out.shape != shape):
        raise MatrixError(f"A is {a.shape[0]:,} x {a.shape[1]:,}, x has shape {x.shape}, out must have {shape}")
    y = np.empty(shape, x.dtype) if out is None else out
    if x.ndim == 1 or x.shape[1] <= COLUMNS:
        _multiply(a, x, y, threads)
        return y
    for first in range(0, x.shape[1], COLUMNS):
        some = np.ascontiguousarray(x[:, first : first + COLUMNS])
        part = np.empty((len(y), some.shape[1]), x.dtype)
        _multiply(a, some, part, threads)
        y[:, first : first + COLUMNS] = part
    return y


def _multiply(a: BSR, x: ValueArray, y: ValueArray, threads: int) -> None:
    """Write ``a @ x`` for few columns."""
    from spdist.kernels.bsr.numba_kernels import multiply_columns  # loads Numba

    columns = x.shape[1] if x.ndim == 2 else 1
    if not y.size:
        return
    sizes = tuple((0,) * size for size in (*a.blocksize, columns))
    rows = a.indptr, a.indices, np.ascontiguousarray(a.data).reshape(-1)
    flat, target = x.reshape(-1), y.reshape(-1)

    def work(start: int, stop: int) -> None:
        multiply_columns(rows, start, stop, flat, target, sizes)

    in_parallel(work, a.indptr[1:], threads_for(a.nnz, threads))
