"""A square matrix cut by rows among workers: each worker's rows, and its halo, the elements of x on other workers.

Each worker finds its halo (`needed`), the driver plans which elements each worker sends to which (`exchanges`), and
each worker orders its rows so that rows without halo come first (`share`).
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
class ExchangePlan:
    """The columns whose elements of x a part sends and receives."""

    halo: Integers  # (nhalo,) int: columns that the part needs of other parts, ordered by owner
    receives: dict[int, tuple[int, int]]  # by owning part: first place in the halo, and the place after the last
    requests: dict[int, Integers]  # by needing part: the columns of this part that it needs


@dataclass(frozen=True, eq=False)
class Share:
    """The rows of one part, ready to be multiplied.

    Its x holds its own ``len(rows)`` elements, then the halo.
    """

    rank: int
    rows: Integers  # (n,) int: row of the matrix at each place; rows without halo come first
    inner: CSR  # the rows without halo; n columns
    outer: CSR  # the other rows; n own columns, then the columns of the halo
    sends: dict[int, Integers]  # by needing part: places of the elements of x to send
    # by owning part: first place of its elements in x, and the place after the last
    receives: dict[int, tuple[int, int]]


def even_rows(indptr: Integers, parts: int) -> Integers:
    """Assign consecutive rows to parts, with about equal numbers of entries.

    `indptr`: (nrows + 1,) int.
    Returns (nrows,) int: part of each row, ascending.

    Examples
    --------
    >>> even_rows(np.array([0, 1, 2, 3, 4]), 2)
    array([0, 0, 1, 1])
    """
    ends = np.searchsorted(indptr[1:], indptr[-1] * np.arange(1, parts) / parts)
    return np.searchsorted(ends, np.arange(len(indptr) - 1))


def needed(rows: Rows) -> Integers:
    """Return the columns of other parts in which these rows have entries, ascending."""
    low, high = _span(rows)
    is_needed = np.zeros(high - low, bool)
    is_needed[rows.matrix.indices - low] = True
    is_needed[rows.numbers - low] = False
    return np.flatnonzero(is_needed) + low


def _span(rows: Rows) -> tuple[int, int]:
    """Return the range of the rows' columns and numbers; for neighbouring rows it is far shorter than the matrix."""
    arrays = [array for array in (rows.numbers, rows.matrix.indices) if len(array)]
    if not arrays:
        return 0, 0
    return min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays) + 1


def exchanges(needs: list[Integers], part: Integers) -> list[ExchangePlan]:
    """Plan what each part sends and receives.

    `needs`: by part: the result of `needed` there.
    `part`: (nrows,) int: part of each row.
    """
    parts = len(needs)
    halos = [columns[np.argsort(part[columns], kind="stable")] for columns in needs]
    ends = [np.searchsorted(part[halo], np.arange(parts + 1)) for halo in halos]
    return [
        ExchangePlan(
            halos[p],
            {q: (int(ends[p][q]), int(ends[p][q + 1])) for q in range(parts) if ends[p][q + 1] > ends[p][q]},
            {q: halos[q][ends[q][p] : ends[q][p + 1]] for q in range(parts) if ends[q][p + 1] > ends[q][p]},
        )
        for p in range(parts)
    ]


def share(rank: int, rows: Rows, exchange: ExchangePlan) -> Share:
    """Reorder a part's rows so that those without halo come first, and number their columns by places in the part's x.

    `rank`: number of the part.
    `rows`: the part's rows, with the columns of the whole matrix.
    `exchange`: the part's entry in the result of `exchanges`.
    """
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
    """Return the first columns of a SciPy matrix, which has no entries in others, as a `CSR`."""
    return from_scipy(type(m)((m.data, m.indices, m.indptr), shape=(m.shape[0], count)))
