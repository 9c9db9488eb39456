"""Rows of a plain product by SciPy's compiled loops, slice by slice, with the structural pattern."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse import _sparsetools

from spdist.kernels.cpu.prepare import FillRows, PreparedProduct, RowBuffers
from spdist.kernels.cpu.product_counts import row_products
from spdist.kernels.cpu.workspace import SLICE_PRODUCTS
from spdist.matrices.dtypes import INT32_MAX, IndexArray, Int64Array, ValueArray


class _Arrays(NamedTuple):
    """A CSR matrix with offsets and indices of one dtype, as SciPy's loops take it."""

    indptr: IndexArray
    indices: IndexArray
    data: ValueArray


def new_filler(product: PreparedProduct) -> FillRows:
    """Return a thread's function that makes rows by SciPy.

    Parameters
    ----------
    product : PreparedProduct
        Plain.
    """
    a, b = product.a, product.b
    int64 = max(a.nnz, b.nnz, b.ncols) > INT32_MAX
    dtype = np.dtype(np.int64 if int64 else np.int32)
    right = _Arrays(b.indptr.astype(dtype, copy=False), b.indices.astype(dtype, copy=False), b.data)

    def fill(start: int, stop: int, out: RowBuffers) -> tuple[int, int]:
        done, at = 0, 0
        while start + done < stop:
            last, _ = slice_stop(product, start + done, stop)
            rows = a.rows(start + done, last)
            left = _Arrays(rows.indptr.astype(dtype, copy=False), rows.indices.astype(dtype, copy=False), rows.data)
            c = _structural_product((last - start - done, b.ncols), left, right)
            fits = int(np.searchsorted(c.indptr, out.capacity - at, side="right")) - 1
            nnz = int(c.indptr[fits])
            out.indices[at : at + nnz] = c.indices[:nnz]
            out.data[at : at + nnz] = c.data[:nnz]
            out.ends[done : done + fits] = c.indptr[1 : fits + 1]
            out.ends[done : done + fits] += at
            if fits < last - start - done:
                return done + fits, at + int(c.indptr[fits + 1])
            done, at = done + fits, at + nnz
        return done, at

    return fill


def slice_stop(product: PreparedProduct, start: int, stop: int) -> tuple[int, int]:
    """Return the end of a slice of about `SLICE_PRODUCTS` products, one row at least, and its products.

    Parameters
    ----------
    product : PreparedProduct
    start, stop : int
        Rows of C; the slice begins at `start` and ends at `stop` at the latest.

    Returns
    -------
    stop, products : int
    """
    a, b = product.a, product.b
    begin = int(a.indptr[start])
    last = int(np.searchsorted(a.indptr, begin + SLICE_PRODUCTS, side="right")) - 1
    last = min(max(last, start + 1), stop)
    running = np.cumsum(row_products(a.rows(start, last), np.diff(b.indptr)))
    rows = max(1, int(np.searchsorted(running, SLICE_PRODUCTS, side="right")))
    return start + rows, int(running[rows - 1])


def _structural_product(shape: tuple[int, int], a: _Arrays, b: _Arrays) -> _Arrays:
    """Return the sorted structural product of two matrices whose indices have one dtype.

    SciPy's loop leaves out entries that come out as zero, but counts them first. If some are missing, the full pattern
    comes from a second product, of ones, which has no zeros.
    """
    count = int(_sparsetools.csr_matmat_maxnnz(*shape, a.indptr, a.indices, b.indptr, b.indices))
    c = _sorted_product(shape, count, a, b)
    nnz = int(c.indptr[-1])
    if nnz == count:
        return c
    ones = (m._replace(data=np.ones(len(m.indices), np.bool_)) for m in (a, b))
    pattern = _sorted_product(shape, count, *ones)
    full = np.zeros(count, c.data.dtype)
    found = _positions(shape, c.indptr, c.indices[:nnz])
    full[np.searchsorted(_positions(shape, pattern.indptr, pattern.indices), found)] = c.data[:nnz]
    return pattern._replace(data=full)


def _sorted_product(shape: tuple[int, int], count: int, a: _Arrays, b: _Arrays) -> _Arrays:
    """Run SciPy's compiled product into arrays of `count` entries, and sort its rows."""
    dtype = np.result_type(a.indptr, np.int64 if count > INT32_MAX else np.int32)
    left, right = ([x.astype(dtype, copy=False) for x in m[:2]] for m in (a, b))
    c = _Arrays(np.empty(shape[0] + 1, dtype), np.empty(count, dtype), np.empty(count, a.data.dtype))
    _sparsetools.csr_matmat(*shape, left[0], left[1], a.data, right[0], right[1], b.data, *c)
    _sparsetools.csr_sort_indices(shape[0], *c)
    return c


def _positions(shape: tuple[int, int], indptr: IndexArray, indices: IndexArray) -> Int64Array:
    """Return each entry's row-major position in the whole matrix."""
    positions = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(indptr))
    positions *= shape[1]
    positions += indices
    return positions
