"""The order of fewest products in a chain of matrices, from estimated sizes of partial products.

``A1 @ A2 @ ... @ An`` has one value in any order, but orders differ widely in time. Sizes are estimated before anything
is multiplied [1]_: each column of the last matrix draws random numbers, which pass through the matrices to the rows of
the first one; each row keeps the least of those that reach it. The mean of the least tells how many columns a row of
the product has. So a few passes over the matrices give the lengths of rows and columns of every part of the chain, and
the usual recurrence finds the best order [2]_. Workspace: 64 bytes for each row of the longest matrix.

References
----------
.. [1] E. Cohen, "Structure prediction and computation of sparse matrix products", Journal of Combinatorial
   Optimization 2, 1998.
.. [2] T. Cormen, C. Leiserson, R. Rivest, C. Stein, "Introduction to Algorithms", section 15.2: matrix chains.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.storage.matrix import StoredMatrix

SAMPLES = 8
"""Random numbers for each row: one estimate is off by 40 %, the sum over many rows by far less."""

Lengths = npt.NDArray[np.float64]
Parts = dict[tuple[int, int], Lengths]
"""Lengths by the first and last matrix of a part of the chain."""
Order = int | tuple["Order", "Order"]
"""Number of a matrix, or the two factors that are multiplied last."""


@dataclass(frozen=True)
class Chain:
    """An order in which to multiply a chain, and its cost."""

    order: Order  # ``((0, 1), 2)`` is ``(A0 @ A1) @ A2``
    products: int  # estimated products of all steps
    nnz: dict[tuple[int, int], int]  # estimated entries of partial products, by their first and last matrix


def first_of(order: Order) -> int:
    """Return the number of the first matrix.

    Examples
    --------
    >>> first_of(((1, 2), 3)), last_of(((1, 2), 3))
    (1, 3)
    """
    return order if isinstance(order, int) else first_of(order[0])


def last_of(order: Order) -> int:
    """Return the number of the last matrix."""
    return order if isinstance(order, int) else last_of(order[1])


def parts_of(order: Order) -> Iterator[tuple[int, int]]:
    """Yield the first and last matrix of each product, in the order in which they are made.

    Examples
    --------
    >>> list(parts_of(((0, 1), 2)))
    [(0, 1), (0, 2)]
    """
    if not isinstance(order, int):
        yield from parts_of(order[0])
        yield from parts_of(order[1])
        yield first_of(order), last_of(order)


def plan_chain(matrices: Sequence[CSR | StoredMatrix], *, sizes: bool = True) -> Chain:
    """Find the order of fewest estimated products.

    `sizes`: whether to estimate the entries of all partial products too. For a chain of three matrices this takes two
    more passes over them.
    Raises `InputError` if neighbours do not fit.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from spdist.matrices.csr import from_scipy
    >>> tall, wide = sp.csr_array(np.ones((50, 2))), sp.csr_array(np.ones((2, 50)))
    >>> plan_chain([from_scipy(m) for m in (tall, wide, tall)]).order
    (0, (1, 2))
    """
    for number, (a, b) in enumerate(itertools.pairwise(matrices)):
        check_product_shapes(a.shape, b.shape, (f"matrix {number}", f"matrix {number + 1}"))
    rows, columns = _part_lengths(matrices, sizes=sizes)
    products, order = _best_order(len(matrices), rows, columns)
    return Chain(order, int(products), {part: int(lengths.sum()) for part, lengths in rows.items()})


def _best_order(n: int, rows: Parts, columns: Parts) -> tuple[float, Order]:
    """Return the fewest products of a chain of `n` matrices, and the order that takes them."""
    best: dict[tuple[int, int], tuple[float, Order]] = {(i, i): (0.0, i) for i in range(n)}

    def cut(i: int, k: int, j: int) -> tuple[float, Order]:
        """Return the products and the order of matrices i to j if k is the last one of the left factor."""
        left, right = best[i, k], best[k + 1, j]
        return left[0] + right[0] + float((columns[i, k] * rows[k + 1, j]).sum()), (left[1], right[1])

    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            best[i, j] = min((cut(i, k, j) for k in range(i, j)), key=lambda one: one[0])
    return best[0, n - 1]


def _part_lengths(matrices: Sequence[CSR | StoredMatrix], *, sizes: bool) -> tuple[Parts, Parts]:
    """Return the lengths of rows and of columns of parts of the chain: exact for one matrix, estimated for more.

    A part that begins the chain is never a right factor, so its rows are estimated only if `sizes` is true. A part that
    ends the chain is never a left factor, so its columns are not estimated.
    """
    n = len(matrices)
    rows: Parts = {}
    columns: Parts = {}
    for i, m in enumerate(matrices):
        rows[i, i], columns[i, i] = _lengths(m)

    def of_rows() -> None:
        first = 0 if sizes else 1
        for j in range(n - 1, first, -1):
            least = _draw(matrices[j].ncols, j)
            for i in range(j, first - 1, -1):
                least = _reach(matrices[i], least, to_rows=True)
                if i < j:
                    rows[i, j] = _estimate(least)

    def of_columns() -> None:
        for i in range(n - 2):
            least = _draw(matrices[i].nrows, n + i)
            for j in range(i, n - 1):
                least = _reach(matrices[j], least, to_rows=False)
                if j > i:
                    columns[i, j] = _estimate(least)

    # Stored matrices are read one after the other: that takes half the memory, and each is read at full speed.
    with ThreadPoolExecutor(2 if all(isinstance(m, CSR) for m in matrices) else 1) as pool:
        for job in [pool.submit(of_rows), pool.submit(of_columns)]:
            job.result()
    return rows, columns


def _lengths(m: CSR | StoredMatrix) -> tuple[Lengths, Lengths]:
    """Return the lengths of the rows and columns of a matrix."""
    rows, columns = np.zeros(m.nrows), np.zeros(m.ncols)
    for start, block in _blocks(m):
        rows[start : start + block.nrows] = np.diff(block.indptr)
        columns += np.bincount(block.indices, minlength=m.ncols)
    return rows, columns


def _draw(n: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_exponential((n, SAMPLES), np.float32)


def _estimate(least: npt.NDArray[np.float32]) -> Lengths:
    """Return how many random numbers reached each row: the least of n numbers is 1 / n on average."""
    total = np.einsum("ij->i", least)  # infinite if none arrived; no BLAS, whose threads would keep spinning
    lengths: Lengths = (SAMPLES - 1) / total.astype(np.float64)
    return lengths


def _reach(m: CSR | StoredMatrix, least: npt.NDArray[np.float32], *, to_rows: bool) -> npt.NDArray[np.float32]:
    """Pass the least numbers through a matrix, from columns to rows or from rows to columns."""
    from spdist.kernels.cpu import row_size_estimate

    out = np.full((m.nrows if to_rows else m.ncols, SAMPLES), np.inf, np.float32)
    step = row_size_estimate.least_of_rows if to_rows else row_size_estimate.least_of_columns
    for start, block in _blocks(m):
        step(block.indptr, block.indices, start, least, out)
    return out


def _blocks(m: CSR | StoredMatrix) -> Iterator[tuple[int, CSR]]:
    """Yield the number of the first row, and a block of rows; rows of a stored matrix come without values."""
    if isinstance(m, StoredMatrix):
        for start, stop, _ in m.row_blocks(m.indices.chunk):
            yield start, m.rows_indices(start, stop)
        return
    yield 0, m
