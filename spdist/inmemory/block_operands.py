"""Products of block matrices in memory: which are made by blocks, and which by their entries."""

from __future__ import annotations

import logging
import os
from typing import Any

import scipy.sparse as sp

from spdist.errors import InputError
from spdist.inmemory import cupy_operands
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.matrices.bsr import BSR, entries, from_rows, from_scipy, is_scipy_bsr
from spdist.matrices.csr import check_canonical, is_on_gpu

METHODS = ("auto", "numba", "cuda")
"""Those that multiply blocks."""
GPU_METHODS = ("auto", "tf32")
"""Those for blocks that lie on the GPU."""

log = logging.getLogger("spdist")


def is_blocked(matrix: Any) -> bool:
    """Whether a matrix is kept in blocks: SciPy's `bsr_array` and `bsr_matrix`, and `BSR`."""
    return isinstance(matrix, BSR) or is_scipy_bsr(matrix)


def fit(a: Any, b: Any) -> bool:
    """Whether two matrices can be multiplied by blocks: both are kept so, in one memory, and the blocks' sizes fit."""
    if not (is_blocked(a) and is_blocked(b)) or _is_on_gpu(a) != _is_on_gpu(b):
        return False
    return _blocksize(a)[1] == _blocksize(b)[0]


def spgemm(a: Any, b: Any, method: str, threads: int | None, memory_limit: int | None = None) -> Any:
    """Multiply two matrices that `fit`; the product is of the kind of `a`. See `spdist.spgemm`.

    Raises
    ------
    InputError
        If the method is not for blocks.
    MatrixError
        If the shapes do not fit, or an operand is not a matrix spdist multiplies.
    """
    methods = GPU_METHODS if _is_on_gpu(a) else METHODS
    if method not in methods:
        raise InputError(
            f"method={method!r} is not for block matrices: choose one of {', '.join(methods)}, or multiply their "
            f"entries (tocsr)"
        )
    left = _canonical(a, "A")
    right = left if b is a else _canonical(b, "B")
    if _is_on_gpu(left):
        return bsr_gpu.multiply(left, right, tf32=method == "tf32")
    if method == "cuda":
        rows = left.rows()
        other = rows if right is left else right.rows()
        c = from_rows(cupy_operands.through_gpu(rows, other, method, threads, memory_limit, True))
    else:
        c = bsr_cpu.multiply(left, right, threads=threads or os.cpu_count() or 1)
    if isinstance(a, BSR):
        return c
    out: Any = c.to_scipy() if isinstance(a, sp.sparray) else sp.bsr_matrix(c.to_scipy())
    out.has_sorted_indices = out.has_canonical_format = True
    return out


def _canonical(matrix: Any, name: str) -> BSR:
    """Return a block matrix as a `BSR`; one of the host is canonical then, one on the GPU is checked there."""
    if not isinstance(matrix, BSR):
        return from_scipy(matrix)
    if not is_on_gpu(matrix.data):
        check_canonical(matrix.pattern(matrix.indices), name)
    return matrix


def expand(matrix: Any, name: str, reason: str) -> Any:
    """Return a matrix in CSR if it is kept in blocks, and say so; any other as it is."""
    if not is_blocked(matrix):
        return matrix
    r, s = _blocksize(matrix)
    log.info("%s: its blocks of %d x %d are multiplied entry by entry, as %s", name, r, s, reason)
    if not isinstance(matrix, BSR):
        return matrix.tocsr()
    if _is_on_gpu(matrix):
        return cupy_operands.to_cupyx_any(entries(matrix))
    return sp.csr_array(matrix.to_scipy())


def _blocksize(matrix: Any) -> tuple[int, int]:
    return (int(matrix.blocksize[0]), int(matrix.blocksize[1]))


def _is_on_gpu(matrix: Any) -> bool:
    return cupy_operands.is_cupyx(matrix) or (isinstance(matrix, BSR) and is_on_gpu(matrix.data))
