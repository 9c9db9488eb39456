"""CuPy matrices in, CuPy matrices out: the products of `spdist.spgemm` whose operands are on the GPU.

Nothing here imports CuPy before a matrix of CuPy's is at hand.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import Reduction, final_value
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu.analysis import NotCanonicalError, check_canonical
from spdist.kernels.rowwise_gpu.multiply import Pattern
from spdist.matrices.csr import CSR

Method = Literal["auto", "rowwise", "esc"]
METHODS: tuple[str, ...] = get_args(Method)

log = logging.getLogger("spdist")


def is_cupyx(matrix: Any) -> bool:
    """Whether a matrix is one of `cupyx.scipy.sparse`."""
    return type(matrix).__module__.partition(".")[0] == "cupyx"


def from_cupyx(matrix: Any) -> CSR:
    """Return the arrays of a `cupyx.scipy.sparse` matrix as a `CSR`; one that is in CSR already is not copied.

    Raises
    ------
    MatrixError
        If it is no two-dimensional matrix of CuPy's.
    """
    if not is_cupyx(matrix) or getattr(matrix, "ndim", 0) != 2:
        raise MatrixError(f"expected a cupyx.scipy.sparse matrix, got {type(matrix).__name__}: both operands must be")
    m = matrix if matrix.format == "csr" else matrix.tocsr()
    return CSR(m.indptr, m.indices, m.data, m.shape)


def to_cupyx(m: CSR) -> Any:
    """Return a `cupyx.scipy.sparse.csr_matrix` on the arrays of a canonical `CSR`."""
    data = m.data
    if data.dtype.kind in "iu":
        log.info("CuPy has no sparse matrices of %s: C is float64", data.dtype)
        data = data.astype(np.float64)
    out = copy.copy(_empty_cupyx(m.shape, data.dtype))
    out.data, out.indptr = data, m.indptr
    out.indices = m.indices.astype(m.indptr.dtype, copy=False)
    return out


@functools.lru_cache(maxsize=64)
def _empty_cupyx(shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    """Return a matrix for `to_cupyx` to copy: CuPy's constructor, given arrays, looks at them and waits for the GPU."""
    import cupyx.scipy.sparse as csp

    out = csp.csr_matrix(shape, dtype=dtype)
    out.indptr = out.indices  # hold no memory
    out.has_sorted_indices = out.has_canonical_format = True
    return out


def to_cupyx_any(m: CSR) -> Any:
    """Return a `cupyx.scipy.sparse.csr_matrix` on the arrays of a `CSR` that need not be canonical."""
    import cupyx.scipy.sparse as csp

    return csp.csr_matrix((m.data, m.indices, m.indptr), shape=m.shape, copy=False)


def spgemm(a: Any, b: Any, method: str, deterministic: bool, spec: ProductSpec = PLAIN) -> Any:
    """Multiply two matrices of CuPy's; see `spdist.spgemm`."""
    if method not in METHODS:
        raise InputError(f"method={method!r} is not for matrices on the GPU: choose one of {', '.join(METHODS)}")
    by_columns = getattr(a, "format", "") == getattr(b, "format", "") == "csc"
    if not spec.plain:
        c = to_cupyx(_answer(a, b, method, deterministic, spec))
        return c.tocsc() if by_columns else c
    left, right = (b.T, a.T) if by_columns else (a, b)
    operand = from_cupyx(left)
    other = operand if right is left else from_cupyx(right)
    c = to_cupyx(_multiply(operand, other, _method(method, deterministic), right))
    return c.T if by_columns else c


def _answer(a: Any, b: Any, method: str, deterministic: bool, spec: ProductSpec) -> CSR:
    """Return what the options make of the product."""
    from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue

    if method == "esc":
        raise InputError(
            "method='esc' makes whole products by plus and times: for semirings, triangles, epilogues, threshold and "
            "top_n choose method='auto'"
        )
    left = from_cupyx(a)
    right = left if b is a else from_cupyx(b)
    shape, dtype = (left.nrows, right.ncols), spec.semiring.result_dtype(left.dtype, right.dtype)
    spec.check_square(shape)
    spec.check(shape, dtype)
    spec.check_device()
    mask = spec.mask
    is_b = mask is not None and mask.indices is right.indices and mask.indptr is right.indptr  # and checked as B
    if mask is not None and not is_b and type(mask.indices) is not np.ndarray:
        spec = replace(spec, mask=_canonical(mask))
    work = BlockEpilogue(spec, None, shape, dtype)
    work.send()

    def make(x: CSR, y: CSR) -> CSR:
        if is_b:
            work.spec = replace(spec, mask=y)
        made: CSR = work.make(x, y, 0, deterministic)[0]
        return made

    return _multiply(left, right, make, b)


def _canonical(mask: CSR) -> CSR:
    """Return a mask on the GPU whose rows are sorted and free of duplicates: a copy where it is not."""
    import cupy

    try:
        check_canonical(mask, "the mask")
    except NotCanonicalError:
        ones = cupy.ones(mask.nnz, np.float32)
        copied = to_cupyx_any(CSR(mask.indptr, mask.indices, ones, mask.shape)).copy()
        copied.has_sorted_indices = copied.has_canonical_format = False
        copied.sum_duplicates()
        return from_cupyx(copied)
    return mask


def _method(name: str, deterministic: bool) -> Callable[[CSR, CSR], CSR]:
    """Return the function of a method, and say what "auto" takes."""
    if name == "esc":
        from spdist.kernels.esc import multiply as esc

        return lambda a, b: esc.multiply(a, b)
    if name == "auto":
        log.debug("auto: rowwise")
    return lambda a, b: rowwise_gpu.multiply(a, b, deterministic=deterministic)


def _multiply(a: CSR, b: CSR, method: Callable[[CSR, CSR], CSR], original: Any) -> CSR:
    """Multiply; rows of B that are not canonical are sorted, and their duplicates summed, in a copy."""
    try:
        return method(a, b)
    except NotCanonicalError:
        log.info("B has rows that are not sorted or hold duplicates: multiplying a canonical copy")
        canonical = original.tocsr().copy()
        canonical.has_sorted_indices = canonical.has_canonical_format = False
        canonical.sum_duplicates()
        return method(a, from_cupyx(canonical))


def through_gpu(
    a: CSR, b: CSR, method: str, threads: int | None, memory_limit: int | None, deterministic: bool,
    spec: ProductSpec = PLAIN,
) -> CSR:  # fmt: skip
    """Multiply matrices of the host block by block on the GPU.

    Raises
    ------
    InputError
        If there is no GPU, or no CuPy to reach it.
    """
    _check_gpu(method)
    if method == "cuda":
        from spdist.kernels.streaming import pipeline

        return pipeline.multiply(a, b, _gpu(memory_limit, deterministic), spec=spec)
    from spdist.kernels.hyspmm import multiply as hyspmm

    return hyspmm.multiply(a, b, threads=threads)


def reduce_through_gpu(a: CSR, b: CSR, what: Reduction, memory_limit: int | None, spec: ProductSpec) -> Any:
    """Return a reduction of the product of matrices of the host, of which C stays on the GPU.

    Raises
    ------
    InputError
        If there is no GPU, or no CuPy to reach it.
    """
    _check_gpu("cuda")
    from spdist.kernels.streaming import pipeline

    return final_value(what, pipeline.reduce(a, b, what, _gpu(memory_limit), spec=spec), b.ncols)


def _gpu(memory_limit: int | None, deterministic: bool = False) -> Any:
    """Return the GPU; memory that is free again stays in CuPy's pool, for the next product."""
    import cupy

    from spdist.kernels.streaming.gpu_device import Gpu

    return Gpu(memory_limit, deterministic=deterministic, malloc=cupy.get_default_memory_pool().malloc)


def _check_gpu(method: str) -> None:
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except Exception as error:  # no CuPy, no driver, no device: each has an error of its own
        raise InputError(
            f"method={method!r} needs a CUDA device and CuPy ({error}): install 'spdist[cu13]' on a machine with a "
            f"GPU, or choose method='auto'"
        ) from None


def symbolic(a: Any, b: Any, deterministic: bool) -> Pattern:
    """Return the structure of ``a @ b``; see `spdist.symbolic`."""
    return rowwise_gpu.symbolic(from_cupyx(a), from_cupyx(b), deterministic=deterministic)


def numeric(pattern: Pattern, a: Any, b: Any) -> Any:
    """Fill a structure with the values of ``a @ b``; see `spdist.numeric`."""
    return to_cupyx(rowwise_gpu.numeric(pattern, from_cupyx(a), from_cupyx(b)))
