"""Products of several matrices, in the order of fewest products.

``A1 @ A2 @ ... @ An`` is the same in any order, and takes very different time. What each order takes is estimated
before anything is multiplied: random numbers at the columns of the last matrix travel to the rows of the first, each
row taking the least of those it reaches; the mean of the least tells how many columns a row of the product has [1]_.
So lengths of rows and columns of every part of the chain are known for the price of reading it a few times, and the
usual recurrence finds the best order [2]_. It takes 64 bytes a row of the longest matrix.

References
----------
.. [1] E. Cohen, "Structure prediction and computation of sparse matrix products", Journal of Combinatorial
   Optimization 2, 1998.
.. [2] T. Cormen, C. Leiserson, R. Rivest, C. Stein, "Introduction to Algorithms", section 15.2: matrix chains.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from spdist import api
from spdist.engines import Engine
from spdist.errors import InputError
from spdist.inmemory.spgemm import like, spgemm
from spdist.kernels.cpu import multiply as cpu
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype, result_dtype
from spdist.storage import locations
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.units import parse_bytes

logger = logging.getLogger("spdist")

SAMPLES = 8
"""Random numbers a row (`kernels.reach`): one estimate is off by 40 %, the sum over many rows by far less."""
IN_MEMORY_SHARE = 0.5
"""Share of the memory limit that a chain may take to be multiplied in memory."""

Lengths = npt.NDArray[np.float64]
Order = int | tuple["Order", "Order"]
"""Number of a matrix, or the two parts that are multiplied last."""


@dataclass(frozen=True)
class Chain:
    """In which order a chain is multiplied, and what that takes.

    Attributes
    ----------
    order : nested tuples of int
        ``((0, 1), 2)`` is ``(A0 @ A1) @ A2``.
    products : int
        Estimated products of all steps.
    nnz : dict
        Estimated entries of products, by their first and last matrix.
    """

    order: Order
    products: int
    nnz: dict[tuple[int, int], int]


def multi_matmul(
    matrices: Sequence[Any],
    out: str | Path | None = None,
    *,
    engine: Engine = "auto",
    memory_limit: int | str | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Any:
    """Multiply several matrices in the order of fewest estimated products.

    Parameters
    ----------
    matrices : sequence of scipy.sparse matrices or arrays; or of paths, URLs or StoredMatrix
        Two at least, all of one sort.
    out : str or Path, optional
        Where to store the product; required for stored matrices.
    engine, memory_limit, workers, scheduler, resume, overwrite
        As in `multiply`.

    Returns
    -------
    scipy.sparse matrix or array, or StoredMatrix

    Notes
    -----
    Stored matrices that fit in half of one worker's memory limit, with all products between, are multiplied in memory,
    and only the result is stored. Else each product between is stored beside `out`, and removed in the end; after an
    interruption it stays for `resume`.

    Examples
    --------
    The coarse matrix of a multigrid method:

    >>> import scipy.sparse as sp
    >>> a = sp.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(4, 4), format="csr")
    >>> p = sp.csr_array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> multi_matmul([p.T, a, p]).toarray()
    array([[ 2., -1.],
           [-1.,  2.]])
    """
    if len(matrices) < 2:
        raise InputError(f"a chain of {len(matrices)} matrices: pass two at least")
    kinds = {bool(sp.issparse(m)) for m in matrices}
    if len(kinds) > 1:
        raise InputError("some matrices are in memory and others stored: store all with spdist.save, or open all")
    if kinds == {True}:
        canonical = [from_scipy(m) for m in matrices]
        chain = plan_chain(canonical, sizes=False)
        if all(m.format == "csr" for m in matrices):  # what lies between is canonical: nobody looks at it again
            multiply = functools.partial(cpu.multiply, threads=os.cpu_count() or 1)
            c = like(matrices[0], _multiply_in_memory(chain.order, canonical, multiply))
        else:
            c = _multiply_in_memory(chain.order, matrices)
        return c if out is None else api.save(out, c, overwrite=overwrite)
    if out is None:
        raise InputError("the product of stored matrices is stored too: say where, with out='C.zarr'")
    stored = [m if isinstance(m, StoredMatrix) else open_matrix(m) for m in matrices]
    chain = plan_chain(stored)
    logger.info("order %s, about %s products", chain.order, f"{chain.products:,}")
    where = {"engine": engine, "memory_limit": memory_limit, "workers": workers, "scheduler": scheduler}
    if len(stored) > 2 and _bytes(stored, chain) <= IN_MEMORY_SHARE * parse_bytes(
        memory_limit or api.DEFAULT_MEMORY_LIMIT
    ):
        api.claim(locations.normalise(out), overwrite=overwrite or resume)  # refuses before anything is computed
        held = [m.rows(0, m.nrows).to_scipy() for m in stored]
        return api.save(out, _multiply_in_memory(chain.order, held), overwrite=overwrite or resume)
    return _multiply_stored(chain.order, stored, locations.normalise(out), where, resume=resume, overwrite=overwrite)


def _multiply_in_memory(order: Order, matrices: Sequence[Any], multiply: Callable[[Any, Any], Any] = spgemm) -> Any:
    if isinstance(order, int):
        return matrices[order]
    left, right = (_multiply_in_memory(part, matrices, multiply) for part in order)
    return multiply(left, right)


def _multiply_stored(
    order: Order, matrices: Sequence[StoredMatrix], out: str, where: dict[str, Any], *, resume: bool, overwrite: bool
) -> StoredMatrix:
    """Multiply from storage to storage; the products between lie beside `out`."""
    between: list[str] = []

    def make(part: Order, place: str) -> StoredMatrix:
        if isinstance(part, int):
            return matrices[part]
        left, right = (make(one, f"{out}.spdist-{_first(one)}-{_last(one)}") for one in part)
        again: dict[str, Any] = {"resume": resume, "overwrite": overwrite} if place == out else {"resume": True}
        api.multiply(left, right, place, **where, **again)
        if place != out:
            between.append(place)
        return open_matrix(place)

    made = make(order, out)
    for place in between:
        locations.remove(place)
    return made


def _first(order: Order) -> int:
    return order if isinstance(order, int) else _first(order[0])


def _last(order: Order) -> int:
    return order if isinstance(order, int) else _last(order[1])


def _bytes(matrices: Sequence[StoredMatrix], chain: Chain) -> int:
    """Return the bytes of all operands and of all products, as estimated."""
    total = sum(m.nbytes for m in matrices)
    for first, last in _parts(chain.order):
        dtype = matrices[first].dtype
        for m in matrices[first + 1 : last + 1]:
            dtype = result_dtype(dtype, m.dtype)
        entry = index_dtype(matrices[last].ncols).itemsize + dtype.itemsize
        total += chain.nnz[first, last] * entry + 8 * matrices[first].nrows
    return total


def _parts(order: Order) -> Iterator[tuple[int, int]]:
    """Yield first and last matrix of each product of an order."""
    if not isinstance(order, int):
        yield from _parts(order[0])
        yield from _parts(order[1])
        yield _first(order), _last(order)


# -- the order ---------------------------------------------------------------------------------------------------------


def plan_chain(matrices: Sequence[CSR | StoredMatrix], *, sizes: bool = True) -> Chain:
    """Find the order of fewest products.

    Parameters
    ----------
    matrices : sequence of CSR or StoredMatrix
    sizes : bool
        Whether to estimate the entries of all products too; costs two more passes of three matrices.

    Raises
    ------
    InputError
        If neighbours do not fit.
    """
    for number, (a, b) in enumerate(itertools.pairwise(matrices)):
        check_product_shapes(a.shape, b.shape, (f"matrix {number}", f"matrix {number + 1}"))
    n = len(matrices)
    rows, columns = _part_lengths(matrices, sizes=sizes)
    best: dict[tuple[int, int], tuple[float, Order]] = {(i, i): (0.0, i) for i in range(n)}
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            best[i, j] = min(
                (
                    (
                        best[i, k][0] + best[k + 1, j][0] + float((columns[i, k] * rows[k + 1, j]).sum()),
                        (best[i, k][1], best[k + 1, j][1]),
                    )
                    for k in range(i, j)
                ),
                key=lambda one: one[0],
            )
    products, order = best[0, n - 1]
    return Chain(order, int(products), {part: int(lengths.sum()) for part, lengths in rows.items()})


Parts = dict[tuple[int, int], Lengths]


def _part_lengths(matrices: Sequence[CSR | StoredMatrix], *, sizes: bool) -> tuple[Parts, Parts]:
    """Return lengths of rows and of columns of parts of the chain: exact of one matrix, estimated of more.

    Of rows of parts that begin later than the chain does, or of all for their sizes; of columns of parts that end
    before it does: others are no operands.
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

    # Of stored matrices one after the other: half the memory, and each is read at full speed.
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
    """Return how many random numbers each row saw, from the least of them: their sum has mean SAMPLES / n."""
    total = np.einsum("ij->i", least)  # infinite where none was seen; no BLAS, whose threads would go on waiting
    lengths: Lengths = (SAMPLES - 1) / total.astype(np.float64)
    return lengths


def _reach(m: CSR | StoredMatrix, least: npt.NDArray[np.float32], *, to_rows: bool) -> npt.NDArray[np.float32]:
    """Send the least numbers through a matrix, from columns to rows or from rows to columns."""
    from spdist.kernels.cpu import row_size_estimate

    out = np.full((m.nrows if to_rows else m.ncols, SAMPLES), np.inf, np.float32)
    step = row_size_estimate.least_of_rows if to_rows else row_size_estimate.least_of_columns
    for start, block in _blocks(m):
        step(block.indptr, block.indices, start, least, out)
    return out


def _blocks(m: CSR | StoredMatrix) -> Iterator[tuple[int, CSR]]:
    """Yield rows and the number of the first: patterns alone of a stored matrix."""
    if isinstance(m, StoredMatrix):
        for start, stop, _ in m.row_blocks(m.indices.chunk):
            yield start, m.rows_indices(start, stop)
        return
    yield 0, m
