"""A square matrix cut by rows among workers: what each multiplies, and its halo: what it needs of the others' x."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.csr import CSR, from_scipy

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Share:
    """The rows of one part.

    Its x is its own ``len(rows)`` elements, and behind them the halo, ordered by owner and by place there.

    Attributes
    ----------
    rank : int
    rows : (n,) int64
        Row of the matrix at each place; those that need no halo come first.
    inner : CSR
        The rows that need no halo; n columns.
    outer : CSR
        The others; columns of the halo behind the n own ones.
    sends : dict
        For each part that needs some of this one's x: the places of these.
    receives : dict
        For each part that owns some of the halo: first and last place in x.
    """

    rank: int
    rows: Integers
    inner: CSR
    outer: CSR
    sends: dict[int, Integers]
    receives: dict[int, tuple[int, int]]


def even_rows(a: CSR, parts: int) -> Integers:
    """Return the part of each row: neighbouring rows together, about as many entries in each part."""
    ends = np.searchsorted(a.indptr[1:], a.nnz * np.arange(1, parts) / parts)
    return np.searchsorted(ends, np.arange(a.nrows))


def cut(a: CSR, part: Integers, parts: int) -> Iterator[Share]:
    """Yield the share of each part.

    Parameters
    ----------
    a : CSR
        Square, on the host.
    part : (nrows,) int
        Part of each row, below `parts`; a part may be empty.
    """
    n, m = a.nrows, a.to_scipy()
    owner = np.repeat(part, np.diff(a.indptr))
    foreign = part[a.indices] != owner
    before = np.append(0, np.cumsum(foreign))
    reaches = before[a.indptr[1:]] > before[a.indptr[:-1]]
    order = np.argsort(2 * part + reaches, kind="stable")
    starts = np.append(0, np.cumsum(np.bincount(part, minlength=parts)))
    place = np.empty(n, np.int64)
    place[order] = np.arange(n) - starts[part[order]]
    needer, column = np.divmod(np.unique(owner[foreign] * np.int64(n) + a.indices[foreign]), n)
    by = np.lexsort((place[column], part[column], needer))
    needer, column = needer[by], column[by]
    for rank in range(parts):
        rows, halo = order[starts[rank] : starts[rank + 1]], column[needer == rank]
        first_outer = len(rows) - int(reaches[rows].sum())
        local = place.copy()
        local[halo] = len(rows) + np.arange(len(halo))
        ends = len(rows) + np.searchsorted(part[halo], np.arange(parts + 1))
        theirs = {q: place[column[(needer == q) & (part[column] == rank)]] for q in range(parts)}
        yield Share(
            rank, rows, _renumbered(m[rows[:first_outer]], local, len(rows)),
            _renumbered(m[rows[first_outer:]], local, len(rows) + len(halo)),
            {q: places for q, places in theirs.items() if len(places)},
            {q: (int(ends[q]), int(ends[q + 1])) for q in range(parts) if ends[q + 1] > ends[q]},
        )  # fmt: skip


def _renumbered(rows: Any, local: Integers, ncols: int) -> CSR:
    """Return rows of a matrix of SciPy's with new numbers for its columns."""
    return from_scipy(type(rows)((rows.data, local[rows.indices], rows.indptr), shape=(rows.shape[0], ncols)))
