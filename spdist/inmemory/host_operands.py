"""SciPy matrices in, SciPy matrices out: products and reductions on the CPU, or through the GPU by row blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.inmemory import through_gpu
from spdist.kernels.cpu.reduce import reduce_product
from spdist.kernels.engine import find_engine
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import Reduction, check_values, diagonal_pattern, is_linear
from spdist.matrices.checks import check_product_shapes, check_structure
from spdist.matrices.csr import CSR, arrays_of, from_scipy
from spdist.matrices.dtypes import index_dtype
from spdist.options import InMemoryOptions


@dataclass(frozen=True)
class Method:
    """Implementation of a method."""

    multiply: Callable[[CSR, CSR, ProductSpec, InMemoryOptions], CSR]  # multiplies two canonical `CSR`
    takes_options: bool = True  # whether it supports semirings, masks, triangles, epilogues, threshold and top-n
    # whether it finds bad offsets and columns of A itself, and takes rows of A that are not canonical
    checks_a: bool = False


def _on_cpu(a: CSR, b: CSR, spec: ProductSpec, options: InMemoryOptions) -> CSR:
    from spdist.kernels.cpu import multiply as cpu

    return cpu.multiply(a, b, engine=options.method, threads=options.thread_count, spec=spec)


METHODS = {
    "auto": Method(_on_cpu),
    "scipy": Method(_on_cpu, takes_options=False),
    "numba": Method(_on_cpu),
    "cuda": Method(through_gpu.multiply, checks_a=True),
    "hyspmm": Method(through_gpu.multiply_hyspmm, takes_options=False),
}
"""Methods for matrices of SciPy's."""


def multiply(a: Any, b: Any, spec: ProductSpec, options: InMemoryOptions) -> Any:
    """Multiply two matrices of SciPy's; see `spdist.spgemm`.

    Parameters
    ----------
    a, b : scipy.sparse matrix or array
    spec : ProductSpec
    options : InMemoryOptions

    Returns
    -------
    scipy.sparse matrix or array
        As `a`; by columns if both operands are.

    Raises
    ------
    InputError
        If there is no such method, or it does not support the options.
    MatrixError
        If the shapes do not fit.
    """
    method = METHODS.get(options.method)
    if method is not None and not (spec.plain or method.takes_options):
        able = ", ".join(name for name, one in METHODS.items() if one.takes_options)
        raise InputError(
            f"method={options.method!r} makes whole products by plus and times: for semirings, masks, triangles, "
            f"epilogues, threshold and top_n choose one of {able}"
        )
    by_columns = getattr(a, "format", "") == getattr(b, "format", "") == "csc"
    swapped = by_columns and spec.plain  # with options the rows of C matter, and the order of the factors
    unchecked = method is not None and method.checks_a and spec.plain
    left, right = _converted(a, b, options.thread_count, swapped=swapped, unchecked=unchecked)
    if method is None:
        raise InputError(
            f"method {options.method!r} is not one of {', '.join(METHODS)}, the methods for matrices of SciPy's"
        )
    check_product_shapes(a.shape, b.shape)
    spec.check_square((left.nrows, right.ncols))
    try:
        out = scipy_like(a, method.multiply(left, right, spec, options), is_sorted=spec.sorts)
    except MatrixError:
        check_structure(left, threads=options.thread_count)  # its error names the row and the column
        raise
    if swapped:
        return out.T
    return out.tocsc() if by_columns else out


def _converted(a: Any, b: Any, threads: int, *, swapped: bool, unchecked: bool = False) -> tuple[CSR, CSR]:
    """Return A and B, or the transposes of B and A; if they are one object, convert and check it once.

    The first may be unchecked, if its offsets end where its entries do, and its columns need no other dtype.
    """
    left, right = (b.T, a.T) if swapped else (a, b)
    if b is a:
        both = from_scipy(left, threads)
        return both, both
    first = arrays_of(left, threads)
    ends = len(first.indptr) == first.nrows + 1, first.indptr[0] == 0, first.indptr[-1] == first.nnz == len(first.data)
    if not (unchecked and all(ends) and first.indices.dtype == index_dtype(first.ncols)):
        first = from_scipy(left, threads)
    return first, from_scipy(right, threads)


def reduce(a: Any, b: Any, what: Reduction, spec: ProductSpec, options: InMemoryOptions) -> Any:
    """Return a reduction of a product of SciPy's matrices; see `spdist.reduce`.

    Parameters
    ----------
    a, b : scipy.sparse matrix or array
    what : Reduction
    spec : ProductSpec
    options : InMemoryOptions
        With method "cuda", C is computed on the GPU and not copied to the host.

    Returns
    -------
    number or (nrows,), (ncols,) or (bins,) array
        As `spdist.reduce`.

    Raises
    ------
    MatrixError
        If the shapes do not fit.
    InputError
        If an option does not fit, or the GPU has no kernel for it.
    """
    left, right = _converted(a, b, options.thread_count, swapped=False)
    check_product_shapes(a.shape, b.shape)
    spec.check_square((left.nrows, right.ncols))
    dtype = spec.semiring.result_dtype(left.dtype, right.dtype)
    check_values(what, dtype)
    if find_engine(options.method).uses_gpu and not is_linear(what, spec, dtype):
        if what == "trace" and not spec.fused:
            spec = replace(spec, mask=diagonal_pattern(0, left.nrows, right.ncols))
        return through_gpu.reduce(left, right, what, spec, options)
    return reduce_product(what, left, right, threads=options.thread_count, spec=spec)


def scipy_like(a: object, c: CSR, *, is_sorted: bool = True) -> Any:
    """Return a `CSR` as SciPy's sparse array if `a` is one, else as SciPy's matrix; no arrays are copied.

    `c`: canonical, but for the order of rows.
    `is_sorted`: whether rows are known to be sorted; if not, SciPy looks when it has to know.
    """
    m: Any = c.to_scipy()
    if isinstance(a, sp.sparray):
        out = sp.csr_array(m.shape, dtype=m.dtype)
        out.indptr, out.indices, out.data = m.indptr, m.indices, m.data
        m = out
    if is_sorted:
        m.has_canonical_format = True
    return m
