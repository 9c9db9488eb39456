"""Multiply two matrices of dense blocks on the CPU: C's pattern as a product of bools, then its blocks by Numba.

Products are added to a zero in the order of k, so a block has the bits that a product entry by entry gives.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu.finished.merge import merge as merge_values
from spdist.kernels.cpu.product_counts import row_products
from spdist.matrices.bsr import BSR, check_fit, from_rows
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, result_dtype

SLICES = 16
"""Slices of block rows for each thread, so that a slice of many products does not delay one thread."""
PARALLEL_VALUES = 1 << 19
"""Products of scalar values below which a second thread costs more than it gains."""


def multiply(a: BSR, b: BSR, *, threads: int = 1) -> BSR:
    """Multiply two canonical matrices of dense blocks, r x s times s x t, on the CPU; small products use one thread.

    C has a block wherever blocks of A and B meet. Raises `MatrixError` if shapes, block sizes or dtypes do not fit.
    """
    check_fit(a, b)
    return _fill(a, b, cpu.multiply(_ones(a), _ones(b), engine="numba", threads=threads), threads)


def multiply_rows(a: CSR, b: CSR, start: int, capacity: int) -> CSR:
    """Return as many whole block rows of ``a @ b``, from `start` on, as fit in `capacity` blocks; one at least."""
    left, right = from_rows(a), from_rows(b)
    check_fit(left, right)
    c = cpu.multiply_rows(_ones(left), _ones(right), start, capacity, engine="numba")
    return _fill(from_rows(a.rows(start, start + c.nrows)), right, c, 1).rows()


def merge(p: CSR, q: CSR) -> CSR:
    """Add two canonical matrices of blocks of one size; block rows that only one of them has are left out."""
    step = len(p.data) + 1
    numbers = [np.arange(1, len(m.data) + 1, dtype=np.int64) for m in (p, q)]
    left, right = (
        CSR(m.indptr, m.indices, n, m.shape) for m, n in zip((p, q), (numbers[0], step * numbers[1]), strict=True)
    )
    c = merge_values(left, right)  # each entry holds the numbers of the blocks to add
    data = np.zeros(c.nnz, p.dtype)
    for m, number in ((p, c.data % step), (q, c.data // step)):
        data["block"][number > 0] += m.data["block"][number[number > 0] - 1]
    return CSR(c.indptr, c.indices, data, c.shape)


def _fill(a: BSR, b: BSR, c: CSR, threads: int) -> BSR:
    """Return C with its values, given its pattern."""
    dtype = result_dtype(a.dtype, b.dtype)
    sizes = a.blocksize[0], *b.blocksize
    values = np.empty((c.nnz, sizes[0], sizes[2]), dtype)
    work = _row_work(a, b)
    enough = int(work.sum()) * sizes[0] * sizes[1] * sizes[2] >= PARALLEL_VALUES
    _fill_slices(a, b, c, values, _cuts(work, SLICES * threads) if threads > 1 and enough else [0, len(work)], threads)
    return BSR(c.indptr, c.indices, values, (a.shape[0], b.shape[1]))


def _ones(m: BSR) -> CSR:
    return m.pattern(np.ones(m.blocks, np.bool_))


def _row_work(a: BSR, b: BSR) -> Int64Array:
    """Return the products of blocks in each block row of C."""
    return row_products(_ones(a), np.diff(b.indptr))


def _cuts(work: Int64Array, slices: int) -> list[int]:
    """Return the rows at which to cut block rows into slices with about equal numbers of products."""
    ends = np.cumsum(work)
    inner = np.searchsorted(ends, np.linspace(0, ends[-1] if len(ends) else 0, slices + 1)[1:-1])
    return sorted({0, *inner.tolist(), len(work)})


def _fill_slices(a: BSR, b: BSR, c: CSR, values: ValueArray, cuts: list[int], threads: int) -> None:
    """Write the values of C, slice by slice."""
    from spdist.kernels.bsr import numba_kernels as bsr_kernels

    sizes = tuple((0,) * size for size in (a.blocksize[0], *b.blocksize))
    left, right = (
        (m.indptr, m.indices, np.ascontiguousarray(m.data, values.dtype).reshape(-1)) for m in (a, b)
    )  # the kernel is compiled for one dtype
    target = c.indptr, c.indices, values.reshape(-1)

    def fill(slice_number: int) -> None:
        places = np.empty(c.ncols, np.int64)
        bsr_kernels.multiply_rows(left, right, cuts[slice_number], cuts[slice_number + 1], places, target, sizes)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, range(len(cuts) - 1)))
