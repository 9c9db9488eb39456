"""A square matrix cut by rows among workers: what each multiplies, and its halo: what it needs of the others' x.

Workers find what they need (`needed`), the driver tells everyone who sends what to whom (`exchanges`), and workers
bring their rows into an order in which those that need nothing come first (`share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a matrix: their numbers, ascending, and a CSR of them with all columns."""

    numbers: Integers
    matrix: CSR


@dataclass(frozen=True, eq=False)
class Exchange:
    """What a part sends and receives, in columns of the matrix.

    Attributes
    ----------
    halo : (nhalo,) int
        Columns it needs, by owner.
    receives : dict
        For each part that owns some of them: first and last place in the halo.
    requests : dict
        For each part that needs some of its columns: these.
    """

    halo: Integers
    receives: dict[int, tuple[int, int]]
    requests: dict[int, Integers]


@dataclass(frozen=True, eq=False)
class Share:
    """The rows of one part, ready to be multiplied.

    Its x is its own ``len(rows)`` elements, and behind them the halo.

    Attributes
    ----------
    rank : int
    rows : (n,) int
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


def even_rows(indptr: Integers, parts: int) -> Integers:
    """Return the part of each row: neighbouring rows together, about as many entries in each part."""
    ends = np.searchsorted(indptr[1:], indptr[-1] * np.arange(1, parts) / parts)
    return np.searchsorted(ends, np.arange(len(indptr) - 1))


def needed(rows: Rows) -> Integers:
    """Return the columns of other parts that these rows ask for, ascending."""
    low, high = _span(rows)
    asked = np.zeros(high - low, bool)
    asked[rows.matrix.indices - low] = True
    asked[rows.numbers - low] = False
    return np.flatnonzero(asked) + low


def _span(rows: Rows) -> tuple[int, int]:
    """Return the range of columns that rows have, and of their numbers: of neighbours far fewer than all."""
    arrays = [array for array in (rows.numbers, rows.matrix.indices) if len(array)]
    if not arrays:
        return 0, 0
    return min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays) + 1


def exchanges(needs: list[Integers], part: Integers) -> list[Exchange]:
    """Return what each part sends and receives.

    Parameters
    ----------
    needs : list
        For each part, what `needed` returned there.
    part : (nrows,) int
        Part of each row.
    """
    parts = len(needs)
    halos = [columns[np.argsort(part[columns], kind="stable")] for columns in needs]
    ends = [np.searchsorted(part[halo], np.arange(parts + 1)) for halo in halos]
    return [
        Exchange(
            halos[p],
            {q: (int(ends[p][q]), int(ends[p][q + 1])) for q in range(parts) if ends[p][q + 1] > ends[p][q]},
            {q: halos[q][ends[q][p] : ends[q][p + 1]] for q in range(parts) if ends[q][p + 1] > ends[q][p]},
        )
        for p in range(parts)
    ]


def share(rank: int, rows: Rows, exchange: Exchange) -> Share:
    """Return the share of a part: rows in their order there, columns numbered by their places in its x."""
    numbers, m, count = rows.numbers, rows.matrix, len(rows.numbers)
    whole = m.to_scipy()
    low, high = _span(rows)
    columns = m.indices - low
    of_others = np.ones(high - low, bool)
    of_others[numbers - low] = False
    reaches = type(whole)((np.ones(m.nnz, bool), columns, m.indptr), shape=(count, high - low)) @ of_others
    order = np.argsort(reaches, kind="stable")
    place = np.empty(high - low, index_dtype(count + len(exchange.halo)))  # in x, of the columns that rows have
    place[numbers[order] - low] = np.arange(count)
    place[exchange.halo - low] = count + np.arange(len(exchange.halo))
    shape = count, count + len(exchange.halo)
    moved = type(whole)((m.data, place[columns], m.indptr), shape=shape)[order]
    first = count - int(reaches.sum())
    return Share(
        rank, numbers[order], _columns(moved[:first], count), from_scipy(moved[first:]),
        {q: place[asked - low].astype(np.int64) for q, asked in exchange.requests.items()},
        {q: (count + start, count + end) for q, (start, end) in exchange.receives.items()},
    )  # fmt: skip


def _columns(m: Any, count: int) -> CSR:
    """Return a matrix of SciPy's, of which only the first columns have entries, as a `CSR` of these."""
    return from_scipy(type(m)((m.data, m.indices, m.indptr), shape=(m.shape[0], count)))
