"""Multiply two blocks on the CPU: C = A @ B, with SciPy or with the Numba kernels of `rowwise`.

Both engines give the same bits: the pattern is structural (entries that cancel, and stored zeros, are kept), rows are
sorted unless the specification leaves their order open, and the products of an entry are added to a zero in the order
of k. Semirings, masks, thresholds and top-n (`product_spec.ProductSpec`) need Numba. Kernels cut rows as they make
them, so that no more of C is in memory than is kept.

Importing this module imports neither Numba nor scipy.sparse; the first product that uses one does.
"""

from __future__ import annotations

import numpy as np

from spdist.errors import InputError
from spdist.kernels.cpu.prepare import PreparedProduct, RowBuffers, RowsOfProduct, prepare
from spdist.kernels.cpu.product_counts import estimate_products
from spdist.kernels.cpu.workspace import SCIPY
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.matrices.csr import CSR, empty

PARALLEL_PRODUCTS = 1 << 19
"""Products for each thread after the first: with fewer, another thread costs more than it gains."""
SIZE_SAMPLE = 1 << 12
"""Entries of A that say how many threads a product is worth."""


def multiply(
    a: CSR,
    b: CSR,
    *,
    engine: str = "auto",
    threads: int = 1,
    workspace_limit: int | None = None,
    spec: ProductSpec = PLAIN,
) -> CSR:
    """Return ``a @ b`` of canonical operands, or the product that a specification asks for; engines give equal bits.

    C has the structural pattern; its rows are sorted unless the specification leaves their order open.
    `workspace_limit`: bytes that "auto" may use beyond operands and result; it takes what `prepare.choose` returns.
    Raises `MatrixError` if shapes or dtypes do not fit; `InputError` if "scipy" has to make a product that is not
    plain, or Numba does not compile a function of the specification.
    """
    product = prepare(a, b, engine, threads, workspace_limit, spec)
    if product.engine == SCIPY and workspace_limit is None and _thread_count(product, None, a.nrows) == 1:
        from spdist.kernels.cpu import scipy_engine

        return scipy_engine.whole_product(product)
    return _make_rows(product, None, 0)


def multiply_rows(
    a: CSR,
    b: CSR,
    start: int,
    capacity: int,
    *,
    engine: str = "auto",
    threads: int = 1,
    workspace_limit: int | None = None,
    spec: ProductSpec = PLAIN,
) -> CSR:
    """Return as many whole rows of ``a @ b``, from `start` on, as fit in `capacity` entries; one at least.

    A mask has a row for each row of `a`. Entries that are cut from a row need no capacity. Buffers for `capacity`
    entries are reserved, but only what is written takes memory, and the rest is given back.
    Raises `InputError` if `start` is not in the range or `capacity` is negative.
    """
    if not 0 <= start <= a.nrows or capacity < 0:
        raise InputError(f"start={start:,} must lie in [0, {a.nrows:,}] and capacity={capacity:,} must not be negative")
    return _make_rows(prepare(a, b, engine, threads, workspace_limit, spec), capacity, start)


def cut(c: CSR, spec: ProductSpec) -> CSR:
    """Apply epilogue, threshold and top-n to the rows of a canonical sum of products; its arrays are overwritten."""
    if not spec.finishes or not c.nnz:
        return c
    from spdist.kernels.cpu import numba_engine

    numba_engine.cut_rows_in_place(c, spec)
    nnz = int(c.indptr[-1])
    return CSR(c.indptr, c.indices[:nnz].copy(), c.data[:nnz].copy(), c.shape)


def _make_rows(product: PreparedProduct, capacity: int | None, start: int) -> CSR:
    """Make rows from `start` on until `capacity` is full, one row at least; None makes all rows."""
    nrows, ncols = product.a.nrows, product.b.ncols
    if start == nrows:
        return empty((0, ncols), product.dtype)
    rows, needed, c = _fill_buffers(product, capacity, start, nrows)
    if rows == 0:
        rows, needed, c = _fill_buffers(product, needed, start, start + 1)
    # Shrinking in place gives the untouched pages back and copies nothing; no view of the buffers is left by now.
    nnz = int(c.indptr[rows])
    c.indptr.resize(rows + 1, refcheck=False)
    c.indices.resize(nnz, refcheck=False)
    c.data.resize(nnz, refcheck=False)
    return CSR(c.indptr, c.indices, c.data, (rows, ncols))


def _fill_buffers(product: PreparedProduct, capacity: int | None, start: int, stop: int) -> tuple[int, int, CSR]:
    """Return how many rows fit, the entries of these rows and of the first that did not fit, and the buffers."""
    threads = _thread_count(product, capacity, stop - start)
    rows_of_c = _rows_of(product, start, stop, threads)
    # Memory that is never written to is never taken.
    entries = min(rows_of_c.bound, (stop - start) * product.longest)
    limits = capacity, None if product.spec.inside is None else product.spec.inside.nnz
    entries = min([entries, *(limit for limit in limits if limit is not None)])
    indptr = np.empty(stop - start + 1, np.int64)
    indptr[0] = 0
    indices, data = np.empty(entries + 1, product.index_dtype), np.empty(entries + 1, product.dtype)
    rows, needed = rows_of_c.make(RowBuffers(indices, data, indptr[1:], entries))
    return rows, needed, CSR(indptr, indices, data, (stop - start, product.b.ncols))


def _thread_count(product: PreparedProduct, capacity: int | None, rows: int) -> int:
    """Return how many threads rows of a product are worth."""
    size = capacity
    if size is None or product.spec.fused:
        size = estimate_products(product.a, product.b, SIZE_SAMPLE)
    return min(product.threads, size // PARALLEL_PRODUCTS + 1, rows)


def _rows_of(product: PreparedProduct, start: int, stop: int, threads: int) -> RowsOfProduct:
    """Return rows of a product, ready to be made; "numba" is imported by this."""
    if product.engine == SCIPY:
        from spdist.kernels.cpu import scipy_engine

        return scipy_engine.ScipyRows(product, start, stop, threads)
    from spdist.kernels.cpu import numba_engine

    return numba_engine.NumbaRows(product, start, stop, threads)
