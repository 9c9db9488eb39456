"""The nearest of dense rows, exact: BLAS scores all pairs in float32, and float64 decides among the best of each row.

Rows are moved to the mean and divided by their largest value first. A score that was dropped lies behind the last one
that was kept by more than both can be wrong, or the row is searched again in float64; so the neighbours are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads
from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array

Rows = npt.NDArray[np.float32] | npt.NDArray[np.float64]
DenseMetric = Literal["euclidean", "cosine", "inner_product"]

QUERIES, CORPUS = 256, 4096
"""Rows whose scores are made at a time: they stay in the caches."""
SPARE = 16
"""Candidates besides the neighbours asked for."""
STEP = 64
"""Scores that are compared at once; `CORPUS` is a multiple."""


DenseSearch = Callable[[Rows, Rows, int, DenseMetric], tuple[Int64Array, npt.NDArray[np.float64]]]
"""Finds the nearest rows, as `nearest` does."""


def nearest(queries: Rows, corpus: Rows, count: int, metric: DenseMetric) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """Return the nearest rows of a corpus for each query, and how far they are.

    BLAS should run in one thread: there is a thread for each CPU.

    `queries, corpus`: (m, d) and (n, d), finite.
    `count`: at most n.
    Returns `columns`, (m, count), from the nearest on, equally near ones in their order; and `distances`, (m, count):
    Euclidean ones, 1 minus the cosine, or the inner product with its sign changed.
    """
    if metric == "cosine":
        queries, corpus = unit_rows(queries), unit_rows(corpus)
    kept = min(count + SPARE, len(corpus))
    euclidean = metric == "euclidean"
    left, right, scale, slack = scoring(queries, corpus, euclidean=euclidean)
    columns, distances = np.empty((len(queries), count), np.int64), np.empty((len(queries), count))
    doubtful = np.zeros(len(queries), np.bool_)
    starts = iter(range(0, len(queries), QUERIES))

    def search(_: int) -> None:
        scores = np.empty(QUERIES * CORPUS, np.float32)
        for start in starts:
            mine = slice(start, min(start + QUERIES, len(queries)))
            best = Candidates.empty(mine.stop - start, kept)
            for first in range(0, len(corpus), CORPUS):
                last = min(first + CORPUS, len(corpus))
                made = scores[: (mine.stop - start) * (last - first)].reshape(-1, last - first)
                np.matmul(left[mine], right[first:last].T, out=made)
                keep_best(made, first, best)
            allowed = (best.bound + slack[mine]) * scale**2
            decide(queries[mine], corpus, euclidean, allowed, best, columns[mine], distances[mine],
                   doubtful[mine])  # fmt: skip

    run_in_threads(max(1, min(count_cpus(), -(-len(queries) // QUERIES))), search)
    search_again(queries, corpus, np.flatnonzero(doubtful), columns, distances, euclidean=euclidean)
    return columns, np.maximum(distances + 1, 0) if metric == "cosine" else distances


def search_again(
    queries: Rows, corpus: Rows, doubtful: Any, columns: Int64Array, distances: npt.NDArray[np.float64], *,
    euclidean: bool,
) -> None:  # fmt: skip
    """Find the nearest rows of doubtful queries from all distances in float64."""
    for row in doubtful:
        found = _all_distances(queries[row], corpus, euclidean=euclidean)
        columns[row] = np.argsort(found, kind="stable")[: columns.shape[1]]
        distances[row] = found[columns[row]]


class Candidates(NamedTuple):
    """The best of the corpus for some queries, in float32: up to twice as many as are kept."""

    scores: npt.NDArray[np.float32]  # (queries, 2 * kept)
    columns: Int64Array  # (queries, 2 * kept)
    counts: Int64Array  # (queries,): how many there are
    exact: npt.NDArray[np.float64]  # (queries, 2 * kept): room for distances
    bound: npt.NDArray[np.float32]  # (queries,): all that were dropped are at least this; infinite if none was

    @staticmethod
    def empty(queries: int, kept: int) -> Candidates:
        """Return no candidates."""
        shape = queries, 2 * kept
        counts, bound = np.zeros(queries, np.int64), np.full(queries, np.inf, np.float32)
        return Candidates(np.empty(shape, np.float32), np.empty(shape, np.int64), counts, np.empty(shape), bound)


@part
def select(scores: npt.NDArray[np.float32], columns: Int64Array, kept: int) -> Any:
    """Move the `kept` least scores to the front, with their columns; return the least of the others."""
    low, high = 0, len(scores) - 1
    while low < high:  # Hoare's selection
        pivot, left, right = scores[(low + high) // 2], low, high
        while left <= right:
            while scores[left] < pivot:
                left += 1
            while scores[right] > pivot:
                right -= 1
            if left <= right:
                scores[left], scores[right] = scores[right], scores[left]
                columns[left], columns[right] = columns[right], columns[left]
                left, right = left + 1, right - 1
        if kept <= right:
            high = right
        elif kept >= left:
            low = left
        else:
            break
    return scores[kept]


@compiled
def keep_best(scores: npt.NDArray[np.float32], first: int, best: Candidates) -> None:
    """Add the scores of queries, (queries, n), for rows of the corpus from `first` on; the least are the best."""
    kept = best.scores.shape[1] // 2
    for i in range(scores.shape[0]):
        mine, bound, count = scores[i], best.bound[i], best.counts[i]
        for start in range(0, len(mine), STEP):
            stop, hits = min(start + STEP, len(mine)), 0
            for j in range(start, stop):
                hits += mine[j] < bound
            if hits == 0:
                continue
            for j in range(start, stop):
                if mine[j] < bound:
                    best.scores[i, count], best.columns[i, count] = mine[j], first + j
                    count += 1
                    if count == 2 * kept:
                        bound, count = select(best.scores[i], best.columns[i], kept), kept
        best.bound[i], best.counts[i] = bound, count


@part
def distance(x: Any, y: Any, euclidean: bool) -> np.float64:
    """Return half the squared distance of two rows, or their inner product with its sign changed."""
    total = np.float64(0)
    for at in range(len(x)):
        if euclidean:
            change = np.float64(x[at]) - np.float64(y[at])
            total += change * change
        else:
            total -= np.float64(x[at]) * np.float64(y[at])
    return total / 2 if euclidean else total


@compiled
def decide(
    queries: Any, corpus: Any, euclidean: bool, allowed: npt.NDArray[np.float64], best: Candidates,
    columns: Int64Array, distances: npt.NDArray[np.float64], doubtful: npt.NDArray[np.bool_],
) -> None:  # fmt: skip
    """Order the candidates of queries by their distances in float64, and keep the nearest.

    `allowed`: (queries,): a query whose last distance, as `distance` returns it, is not below is doubtful.
    """
    for i in range(len(queries)):
        found, made, count = best.columns[i], best.exact[i], best.counts[i]
        for at in range(count):  # sorted by insertion: of equal distances the first column is the nearest
            column = found[at]
            mine, place = distance(queries[i], corpus[column], euclidean), at
            while place and (made[place - 1] > mine or (made[place - 1] == mine and found[place - 1] > column)):
                made[place], found[place] = made[place - 1], found[place - 1]
                place -= 1
            made[place], found[place] = mine, column
        for at in range(columns.shape[1]):
            columns[i, at] = found[at]
            distances[i, at] = np.sqrt(2 * made[at]) if euclidean else made[at]
        doubtful[i] = not made[columns.shape[1] - 1] < allowed[i]


def _all_distances(query: Any, corpus: Rows, *, euclidean: bool) -> npt.NDArray[np.float64]:
    """Return the distances of a query to all rows, in float64."""
    if not euclidean:
        return np.asarray(-np.einsum("ij,j->i", corpus, query, dtype=np.float64))
    change = np.subtract(corpus, query, dtype=np.float64)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", change, change)))


def unit_rows(rows: Rows) -> Rows:
    """Return rows of length 1, or of zeros."""
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    return rows / np.where(lengths == 0, 1, lengths)[:, None]


class Scoring(NamedTuple):
    """Two float32 matrices whose product ranks the corpus for each query.

    A score is half the squared distance without what depends on the query alone, or the inner product with its sign
    changed; both of rows that were divided by `scale`.
    """

    left: npt.NDArray[np.float32]
    right: npt.NDArray[np.float32]
    scale: float
    slack: npt.NDArray[np.float64]
    """(queries,): what the query adds to a score, less a bound of the errors of its scores."""


def scoring(queries: Rows, corpus: Rows, *, euclidean: bool) -> Scoring:
    """Move rows to the mean of the corpus, and scale them, so that float32 tells them apart."""
    d = queries.shape[1]
    center = corpus.mean(axis=0, dtype=np.float64) if euclidean else np.zeros(d)
    moved = [np.subtract(rows, center, dtype=np.float64) for rows in (queries, corpus)]
    scale = max(float(np.abs(rows).max(initial=0.0)) for rows in moved) or 1.0
    for rows in moved:
        rows /= scale
    left, right = moved
    squares = [np.einsum("ij,ij->i", rows, rows) for rows in (left, right)]
    most = float(squares[1].max(initial=0.0))
    doubt = 2 * (d + 4) * float(np.finfo(np.float32).eps) * (np.sqrt(squares[0] * most) + most)
    half = squares[1] / 2 if euclidean else np.zeros(len(right))
    shift = squares[0] / 2 if euclidean else np.zeros(len(left))
    sides = [-left, np.ones((len(left), 1))], [right, half[:, None]]
    left32, right32 = (np.concatenate(side, axis=1, dtype=np.float32, casting="same_kind") for side in sides)
    return Scoring(left32, right32, scale, shift - doubt)
