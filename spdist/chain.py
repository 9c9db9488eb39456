"""Products of several matrices, in the order of fewest products.

``A1 @ A2 @ ... @ An`` is the same in any order, and takes very different time. What each order takes is estimated
before anything is multiplied: random numbers at the columns of the last matrix travel to the rows of the first, each
row taking the least of those it reaches; the mean of the least tells how many columns a row of the product has [1]_.
So lengths of rows and columns of every part of the chain are known for the price of reading it a few times, and the
usual recurrence finds the best order [2]_. It takes 256 bytes a row of the longest matrix.

References
----------
.. [1] E. Cohen, "Structure prediction and computation of sparse matrix products", Journal of Combinatorial
   Optimization 2, 1998.
.. [2] T. Cormen, C. Leiserson, R. Rivest, C. Stein, "Introduction to Algorithms", section 15.2: matrix chains.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from spdist import api, storage
from spdist.csr import CSR, from_scipy, index_dtype, result_dtype
from spdist.errors import InputError
from spdist.inmemory import spgemm
from spdist.storage import StoredMatrix, open_matrix
from spdist.text import parse_bytes

logger = logging.getLogger("spdist")

SAMPLES = 16
"""Random numbers a row: an estimate of one row is off by a quarter, the sum over many rows by far less."""
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
        Estimated entries of each product, by its first and last matrix.
    """

    order: Order
    products: int
    nnz: dict[tuple[int, int], int]


def multi_matmul(
    matrices: Sequence[Any],
    out: str | Path | None = None,
    *,
    engine: api.Engine = "auto",
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
        chain = plan_chain([from_scipy(m) for m in matrices])
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
        api.claim(storage.normalise(out), overwrite=overwrite or resume)  # refuses before anything is computed
        held = [m.rows(0, m.nrows).to_scipy() for m in stored]
        return api.save(out, _multiply_in_memory(chain.order, held), overwrite=overwrite or resume)
    return _multiply_stored(chain.order, stored, storage.normalise(out), where, resume=resume, overwrite=overwrite)


def _multiply_in_memory(order: Order, matrices: Sequence[Any]) -> Any:
    if isinstance(order, int):
        return matrices[order]
    return spgemm(*(_multiply_in_memory(part, matrices) for part in order))


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
        storage.remove(place)
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


def plan_chain(matrices: Sequence[CSR | StoredMatrix]) -> Chain:
    """Find the order of fewest products.

    Raises
    ------
    InputError
        If neighbours do not fit.
    """
    for number, (a, b) in enumerate(itertools.pairwise(matrices)):
        if a.ncols != b.nrows:
            raise InputError(
                f"shapes do not fit: matrix {number} is {a.nrows:,} x {a.ncols:,}, the next {b.nrows:,} x {b.ncols:,}"
            )
    n = len(matrices)
    rows = _row_lengths(matrices)
    columns = _column_lengths(matrices)
    best: dict[tuple[int, int], tuple[float, Order]] = {(i, i): (0.0, i) for i in range(n)}
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            best[i, j] = min(
                (
                    (
                        best[i, k][0] + best[k + 1, j][0] + float(columns[i, k] @ rows[k + 1, j]),
                        (best[i, k][1], best[k + 1, j][1]),
                    )
                    for k in range(i, j)
                ),
                key=lambda one: one[0],
            )
    products, order = best[0, n - 1]
    return Chain(order, int(products), {part: int(lengths.sum()) for part, lengths in rows.items()})


def _row_lengths(matrices: Sequence[CSR | StoredMatrix]) -> dict[tuple[int, int], Lengths]:
    """Return the lengths of rows of every part of the chain: exact of one matrix, estimated of more."""
    found: dict[tuple[int, int], Lengths] = {}
    for j in range(len(matrices)):
        least = _draw(matrices[j].ncols, j)
        for i in range(j, -1, -1):
            least, lengths = _reach(matrices[i], least, _least_of_rows)
            found[i, j] = lengths[0] if i == j else _estimate(least)
    return found


def _column_lengths(matrices: Sequence[CSR | StoredMatrix]) -> dict[tuple[int, int], Lengths]:
    """Return the lengths of columns of every part of the chain."""
    found: dict[tuple[int, int], Lengths] = {}
    for i in range(len(matrices)):
        least = _draw(matrices[i].nrows, len(matrices) + i)
        for j in range(i, len(matrices)):
            least, lengths = _reach(matrices[j], least, _least_of_columns)
            found[i, j] = lengths[1] if i == j else _estimate(least)
    return found


def _draw(n: int, seed: int) -> Lengths:
    return np.random.default_rng(seed).exponential(size=(n, SAMPLES))


def _estimate(least: Lengths) -> Lengths:
    """Return how many random numbers each row saw, from the least of them: their sum has mean n / SAMPLES."""
    total = least.sum(axis=1)
    return np.where(np.isfinite(total), (SAMPLES - 1) / np.where(np.isfinite(total), total, 1.0), 0.0)


def _reach(
    m: CSR | StoredMatrix, least: Lengths, step: Callable[[CSR, int, Lengths, Lengths], None]
) -> tuple[Lengths, tuple[Lengths, Lengths]]:
    """Send the least numbers through a matrix; return them, and the lengths of its rows and columns."""
    to_rows = step is _least_of_rows
    out = np.full((m.nrows if to_rows else m.ncols, SAMPLES), np.inf)
    rows, columns = np.zeros(m.nrows), np.zeros(m.ncols)
    for start, block in _blocks(m):
        step(block, start, least, out)
        rows[start : start + block.nrows] = np.diff(block.indptr)
        columns += np.bincount(block.indices, minlength=m.ncols)
    return out, (rows, columns)


def _least_of_rows(block: CSR, start: int, least: Lengths, out: Lengths) -> None:
    filled = np.flatnonzero(np.diff(block.indptr))
    if len(filled):
        out[start + filled] = np.minimum.reduceat(least[block.indices], block.indptr[filled], axis=0)


def _least_of_columns(block: CSR, start: int, least: Lengths, out: Lengths) -> None:
    order = np.argsort(block.indices, kind="stable")
    columns = block.indices[order]
    if len(columns):
        rows = np.repeat(np.arange(start, start + block.nrows), np.diff(block.indptr))[order]
        starts = np.flatnonzero(np.append(True, columns[1:] != columns[:-1]))
        found = np.minimum.reduceat(least[rows], starts, axis=0)
        out[columns[starts]] = np.minimum(out[columns[starts]], found)


def _blocks(m: CSR | StoredMatrix) -> Iterator[tuple[int, CSR]]:
    """Yield rows and the number of the first: patterns alone of a stored matrix."""
    if isinstance(m, StoredMatrix):
        for start, stop, _ in m.row_blocks(m.indices.chunk):
            yield start, m.rows_indices(start, stop)
        return
    step = max(1, m.nrows * (1 << 17) // max(m.nnz, 1))
    for start in range(0, m.nrows, step):
        yield start, m.rows(start, min(start + step, m.nrows))
