"""CuPy matrices in, CuPy matrices out: products whose operands are on the GPU.

Nothing here imports CuPy before there is a matrix of CuPy's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.kernels.batch_gpu import multiply as batch_gpu
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.rowwise_gpu.analysis import NotCanonicalError, check_canonical
from spdist.kernels.rowwise_gpu.multiply import Pattern
from spdist.matrices.csr import CSR
from spdist.options import InMemoryOptions

log = logging.getLogger("spdist")


@dataclass(frozen=True)
class Method:
    """Implementation of a method."""

    # multiplies two `CSR` of CuPy's arrays by plus and times; its third argument is `InMemoryOptions.deterministic`
    multiply: Callable[[CSR, CSR, bool], CSR]
    # whether the method supports semirings, masks, triangles, epilogues, threshold and top-n
    takes_options: bool = True


def _rowwise(a: CSR, b: CSR, deterministic: bool) -> CSR:
    return rowwise_gpu.multiply(a, b, deterministic=deterministic)


def _esc(a: CSR, b: CSR, deterministic: bool) -> CSR:
    from spdist.kernels.esc import multiply as esc

    return esc.multiply(a, b)


METHODS = {"auto": Method(_rowwise), "rowwise": Method(_rowwise), "esc": Method(_esc, takes_options=False)}
"""Methods for matrices of CuPy's."""


def is_cupyx(matrix: object) -> bool:
    """Whether a matrix is one of `cupyx.scipy.sparse`."""
    return type(matrix).__module__.partition(".")[0] == "cupyx"


def are_on_gpu(a: object, b: object) -> bool:
    """Whether both operands are CuPy's.

    `a, b`: SciPy's or CuPy's.
    Returns false if neither is.
    Raises `MatrixError` if only one is.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> are_on_gpu(sp.eye_array(3), sp.eye_array(3))
    False
    """
    on_gpu = is_cupyx(a), is_cupyx(b)
    if on_gpu[0] != on_gpu[1]:
        names = [f"{type(m).__module__}.{type(m).__name__}" for m in (a, b)]
        raise MatrixError(f"A is a {names[0]}, B a {names[1]}: copy both to the GPU, or both to the host")
    return on_gpu[0]


def from_cupyx(matrix: Any) -> CSR:
    """Return a `CSR` of the arrays of a `cupyx.scipy.sparse` matrix; a matrix in CSR is not copied.

    Raises `MatrixError` if it is no two-dimensional matrix of CuPy's.
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
    empty = _empty_cupyx(m.shape, data.dtype)
    out = object.__new__(type(empty))
    indices = m.indices.astype(m.indptr.dtype, copy=False)
    out.__dict__.update(empty.__dict__, data=data, indptr=m.indptr, indices=indices)
    return out


@functools.lru_cache(maxsize=64)
def _empty_cupyx(shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    """Return an empty matrix for `to_cupyx` to copy: CuPy's constructor reads given arrays and waits for the GPU."""
    import cupyx.scipy.sparse as csp

    out = csp.csr_matrix(shape, dtype=dtype)
    out.indptr = out.indices  # hold no memory
    out.has_sorted_indices = out.has_canonical_format = True
    return out


def to_cupyx_any(m: CSR) -> Any:
    """Return a `cupyx.scipy.sparse.csr_matrix` on the arrays of a `CSR` that need not be canonical."""
    import cupyx.scipy.sparse as csp

    return csp.csr_matrix((m.data, m.indices, m.indptr), shape=m.shape, copy=False)


def multiply(a: Any, b: Any, spec: ProductSpec, options: InMemoryOptions) -> Any:
    """Multiply two matrices of CuPy's; see `spdist.spgemm`.

    Parameters
    ----------
    a, b : cupyx.scipy.sparse matrix
    spec : ProductSpec
        Its mask may be on the host or on the GPU.
    options : InMemoryOptions

    Returns
    -------
    cupyx.scipy.sparse matrix
        By columns if both operands are.

    Raises
    ------
    InputError
        If there is no such method, or it does not support the options.
    MatrixError
        If the shapes do not fit.
    """
    method = METHODS.get(options.method)
    if method is None:
        raise InputError(
            f"method={options.method!r} is not for matrices on the GPU: choose one of {', '.join(METHODS)}"
        )
    by_columns = getattr(a, "format", "") == getattr(b, "format", "") == "csc"
    if not spec.plain:
        if not method.takes_options:
            raise InputError(
                f"method={options.method!r} makes whole products by plus and times: for semirings, triangles, "
                f"epilogues, threshold and top_n choose method='auto'"
            )
        c = to_cupyx(_multiply_with_options(a, b, spec, options))
        return c.tocsc() if by_columns else c
    if options.method == "auto":
        log.debug("auto: rowwise")
    left, right = (b.T, a.T) if by_columns else (a, b)
    c = _product(left, right, lambda x, y: method.multiply(x, y, options.deterministic))
    return c.T if by_columns else c


def multiply_rows(a: Any, b: Any) -> Any:
    """Multiply two matrices of CuPy's in CSR by "auto" without options; None if an operand is of another kind.

    Raises as `multiply` does.
    """
    if not (is_cupyx(a) and is_cupyx(b) and a.format == b.format == "csr"):
        return None
    return _product(a, b, rowwise_gpu.multiply)


def _product(a: Any, b: Any, multiply: Callable[[CSR, CSR], CSR]) -> Any:
    """Multiply two matrices of CuPy's, the rows of B sorted first where they are not."""
    left = from_cupyx(a)
    right = left if b is a else from_cupyx(b)
    return to_cupyx(_multiply_canonical(left, right, multiply, b))


def multiply_batch(pairs: list[tuple[Any, Any]], deterministic: bool) -> list[Any]:
    """Multiply pairs of CuPy's matrices in CSR group by group; the product of a pair in no group is None."""
    given = {id(m): m for pair in pairs for m in pair}
    converted = {key: from_cupyx(m) for key, m in given.items()}
    operands = [(converted[id(a)], converted[id(b)]) for a, b in pairs]
    found: list[Any] = [None] * len(pairs)
    for numbers in batch_gpu.groups(operands):
        if len(numbers) == 1:
            continue
        try:
            made = batch_gpu.multiply([operands[number] for number in numbers], deterministic=deterministic)
        except MatrixError:  # whose operand it is, its own product says
            continue
        for number, c in zip(numbers, made or [], strict=False):
            found[number] = to_cupyx(c)
    return found


def _multiply_with_options(a: Any, b: Any, spec: ProductSpec, options: InMemoryOptions) -> CSR:
    """Return the product changed by the options."""
    from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue

    left = from_cupyx(a)
    right = left if b is a else from_cupyx(b)
    shape, dtype = (left.nrows, right.ncols), spec.semiring.result_dtype(left.dtype, right.dtype)
    spec.check_square(shape)
    spec.check(shape, dtype)
    spec.check_device()
    mask = spec.mask
    # A mask that shares B's arrays is checked as B.
    is_b = mask is not None and mask.indices is right.indices and mask.indptr is right.indptr
    if mask is not None and not is_b and type(mask.indices) is not np.ndarray:
        spec = replace(spec, mask=_canonical_mask(mask))
    work = BlockEpilogue(spec, None, shape, dtype)
    work.send()

    def make(x: CSR, y: CSR) -> CSR:
        if is_b:
            work.spec = replace(spec, mask=y)
        made: CSR = work.make(x, y, 0, options.deterministic)[0]
        return made

    return _multiply_canonical(left, right, make, b)


def _canonical_mask(mask: CSR) -> CSR:
    """Return a mask on the GPU with sorted rows without duplicates; a copy unless the mask has such rows."""
    import cupy

    try:
        check_canonical(mask, "the mask")
    except NotCanonicalError:
        ones = cupy.ones(mask.nnz, np.float32)
        return from_cupyx(_summed_copy(to_cupyx_any(CSR(mask.indptr, mask.indices, ones, mask.shape))))
    return mask


def _multiply_canonical(a: CSR, b: CSR, multiply: Callable[[CSR, CSR], CSR], original: Any) -> CSR:
    """Multiply; if rows of B are not sorted or hold duplicates, multiply a canonical copy of `original`."""
    try:
        return multiply(a, b)
    except NotCanonicalError:
        log.info("B has rows that are not sorted or hold duplicates: multiplying a canonical copy")
        return multiply(a, from_cupyx(_summed_copy(original.tocsr())))


def _summed_copy(m: Any) -> Any:
    """Return a copy of a CuPy matrix with sorted rows and duplicates summed."""
    copied = m.copy()
    copied.has_sorted_indices = copied.has_canonical_format = False
    copied.sum_duplicates()
    return copied


def symbolic(a: Any, b: Any, deterministic: bool) -> Pattern:
    """Return the structure of ``a @ b``; see `spdist.symbolic`.

    Parameters
    ----------
    a, b : cupyx.scipy.sparse matrix
    deterministic : bool
        Whether `numeric` adds products in the order of A's entries.

    Returns
    -------
    Pattern

    Raises
    ------
    MatrixError
        If the shapes do not fit.
    """
    return rowwise_gpu.symbolic(from_cupyx(a), from_cupyx(b), deterministic=deterministic)


def numeric(pattern: Pattern, a: Any, b: Any) -> Any:
    """Compute the values of ``a @ b`` for a known structure; see `spdist.numeric`.

    Parameters
    ----------
    pattern : Pattern
        The structure that `symbolic` returned.
    a, b : cupyx.scipy.sparse matrix
        With the structure and dtypes that were passed to `symbolic`.

    Returns
    -------
    cupyx.scipy.sparse.csr_matrix
        It shares `indptr` and `indices` with the pattern.

    Raises
    ------
    MatrixError
        If an operand has another shape, nnz or dtype.
    """
    return to_cupyx(rowwise_gpu.numeric(pattern, from_cupyx(a), from_cupyx(b)))
