"""Block matrices in memory: those that fit are multiplied by blocks, others are expanded to entries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.inmemory import cupy_operands, through_gpu
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.product_spec import PLAIN
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.matrices.bsr import BSR, entries, from_rows, from_scipy, is_scipy_bsr
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import is_on_gpu, module_of
from spdist.matrices.vbr import VBR
from spdist.options import InMemoryOptions

log = logging.getLogger("spdist")

Multiply = Callable[[BSR, BSR, InMemoryOptions], BSR]


def _on_cpu(a: BSR, b: BSR, options: InMemoryOptions) -> BSR:
    return bsr_cpu.multiply(a, b, threads=options.thread_count)


def _through_gpu(a: BSR, b: BSR, options: InMemoryOptions) -> BSR:
    rows = a.rows()
    other = rows if b is a else b.rows()
    return from_rows(through_gpu.multiply(rows, other, PLAIN, replace(options, deterministic=True)))


def _on_gpu(a: BSR, b: BSR, options: InMemoryOptions) -> BSR:
    return bsr_gpu.multiply(a, b, tf32=options.method == "tf32")


METHODS: dict[str, Multiply] = {"auto": _on_cpu, "numba": _on_cpu, "cuda": _through_gpu}
"""Methods for blocks on the host."""

GPU_METHODS: dict[str, Multiply] = {"auto": _on_gpu, "tf32": _on_gpu}
"""Methods for blocks on the GPU."""


def is_blocked(matrix: object) -> bool:
    """Whether a matrix is kept in blocks: SciPy's `bsr_array` and `bsr_matrix`, and `BSR`."""
    return isinstance(matrix, BSR) or is_scipy_bsr(matrix)


def fit(a: object, b: object) -> bool:
    """Whether two matrices can be multiplied by blocks: both are kept in blocks that fit, and in the same memory.

    Examples
    --------
    >>> wide, tall = sp.bsr_array(np.ones((2, 4)), blocksize=(2, 4)), sp.bsr_array(np.ones((4, 2)), blocksize=(4, 1))
    >>> fit(wide, tall), fit(tall, tall)
    (True, False)
    """
    if not (is_blocked(a) and is_blocked(b)) or _is_on_gpu(a) != _is_on_gpu(b):
        return False
    return _blocksize(a)[1] == _blocksize(b)[0]


def multiply(a: Any, b: Any, options: InMemoryOptions) -> Any:
    """Multiply two matrices that `fit`; see `spdist.spgemm`.

    Parameters
    ----------
    a, b : bsr_array, bsr_matrix or BSR
    options : InMemoryOptions

    Returns
    -------
    bsr_array, bsr_matrix or BSR
        Of the kind of `a`.

    Raises
    ------
    InputError
        If the method is not for blocks.
    MatrixError
        If the shapes do not fit, or an operand is not a matrix that spdist multiplies.
    """
    methods = GPU_METHODS if _is_on_gpu(a) else METHODS
    if options.method not in methods:
        raise InputError(
            f"method={options.method!r} is not for block matrices: choose one of {', '.join(methods)}, or multiply "
            f"their entries (tocsr)"
        )
    left = _canonical(a, "A")
    right = left if b is a else _canonical(b, "B")
    c = methods[options.method](left, right, options)
    if isinstance(a, BSR):
        return c
    out: Any = c.to_scipy() if isinstance(a, sp.sparray) else sp.bsr_matrix(c.to_scipy())
    out.has_sorted_indices = out.has_canonical_format = True
    return out


def multiply_vbr(a: VBR, b: VBR, threads: int | None = None) -> VBR:
    """Multiply two matrices of blocks of many sizes entry by entry, in the memory that holds them.

    `a, b`: both of NumPy's arrays or both of CuPy's; the column parts of A are the row parts of B.
    `threads`: CPU threads; by default one a core.
    Returns with the row parts of A and the column parts of B, and a block wherever blocks of A and B meet.
    Raises `MatrixError` if A and B lie in different memories, the parts differ, or the GPU does not multiply such
    values.
    """
    if is_on_gpu(a.data) != is_on_gpu(b.data):
        raise MatrixError("one operand is on the GPU and the other is not: bring both to one side")
    fit = len(a.column_bounds) == len(b.row_bounds) and bool((a.column_bounds == b.row_bounds).all())
    if not fit:
        raise MatrixError(
            f"the columns of A, {a.shape[1]:,} in {len(a.column_bounds) - 1:,} parts, are not cut as the rows of B, "
            f"{b.shape[0]:,} in {len(b.row_bounds) - 1:,}: give both the same bounds"
        )
    ones = [module_of(m.data).ones(m.blocks, np.float32) for m in (a, b)]
    pattern = _multiply_rows(a.pattern(ones[0]), b.pattern(ones[1]), threads)
    values = _multiply_rows(a.entries(), b.entries(), threads).data
    c = VBR(a.row_bounds, b.column_bounds, pattern.indptr.astype(np.int64), pattern.indices, values)
    return replace(c, data=values[c.entry_layout().positions])  # from the order of CSR entries to the order of blocks


def _multiply_rows(a: CSR, b: CSR, threads: int | None) -> CSR:
    if is_on_gpu(a.data):
        return rowwise_gpu.multiply(a, b)
    return cpu.multiply(a, b, engine="numba", threads=threads or count_cpus())


def _canonical(matrix: BSR | sp.bsr_array | sp.bsr_matrix, name: str) -> BSR:
    """Return a block matrix as a `BSR`, canonical if it is on the host; kernels check one on the GPU."""
    if not isinstance(matrix, BSR):
        return from_scipy(matrix)
    if not is_on_gpu(matrix.data):
        check_canonical(matrix.pattern(matrix.indices), name)
    return matrix


def expand(matrix: Any, name: str, reason: str) -> Any:
    """Return a block matrix as its entries in CSR, and log the reason; return any other matrix unchanged.

    `name`: name of the matrix in the log.
    `reason`: why it is not multiplied by blocks.
    Returns by rows, on the host or the GPU as `matrix`.
    """
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


def _is_on_gpu(matrix: object) -> bool:
    return cupy_operands.is_cupyx(matrix) or (isinstance(matrix, BSR) and is_on_gpu(matrix.data))
