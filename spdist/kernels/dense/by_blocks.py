"""The nearest of dense rows that are read block by block, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MemoryBoundError
from spdist.foundation.units import format_bytes
from spdist.kernels.dense.nearest import CORPUS, QUERIES, DenseMetric, DenseSearch, Rows
from spdist.matrices.dtypes import Int64Array

NUMBER_BYTES = 32
"""Bytes that the search takes for each number of a row, at most: copies in float64 and float32."""
NEIGHBOUR_BYTES = 48
"""Bytes that it takes for each neighbour: columns and distances found before, in this block, and merged."""
THREAD_BYTES = 8 * QUERIES * CORPUS
"""Bytes of scores and candidates of a thread, about."""


class RowBlocks(NamedTuple):
    """Dense rows, in memory or not."""

    shape: tuple[int, int]
    read: Callable[[int, int], Rows]
    """Returns rows ``[start, stop)`` as a C-ordered array of float32 or float64."""


class Found(NamedTuple):
    """The nearest of some queries."""

    start: int  # number of the first query
    columns: Int64Array  # (queries, count), from the nearest on
    distances: npt.NDArray[np.float64]  # (queries, count); see `nearest`


def block_rows(ncols: int, count: int, besides: int, room: int) -> int:
    """Return how many queries, and how many rows of the corpus, `room` bytes hold at a time.

    `besides`: bytes that do not depend on how many.
    Raises `MemoryBoundError` if they hold fewer than the rows whose scores are made at a time.
    """
    each = NUMBER_BYTES * ncols + NEIGHBOUR_BYTES * count
    rows = (room - besides) // (2 * each)
    if rows < QUERIES:
        least = 2 * QUERIES * each + besides
        raise MemoryBoundError(
            f"memory_limit={format_bytes(room)} is less than the {format_bytes(least)} of the smallest blocks of rows "
            f"with {ncols:,} columns: allow more, or fewer threads"
        )
    return rows


def nearest_by_blocks(
    queries: RowBlocks, corpus: RowBlocks, count: int, metric: DenseMetric, rows: int, search: DenseSearch
) -> Iterator[Found]:
    """Yield the nearest rows of the corpus for blocks of queries, in order; the same as `search` finds.

    `count`: at most the rows of the corpus.
    `rows`: of each block of the queries and of the corpus.
    """
    total = corpus.shape[0]
    whole = corpus.read(0, total) if total <= rows else None
    for start in range(0, queries.shape[0], rows):
        mine = queries.read(start, min(start + rows, queries.shape[0]))
        columns: Any = np.empty((len(mine), 0), np.int64)
        distances: Any = np.empty((len(mine), 0))
        for first in range(0, total, rows):
            others = corpus.read(first, min(first + rows, total)) if whole is None else whole
            more = search(mine, others, min(count, len(others)), metric)
            columns = np.concatenate([columns, more[0] + first], axis=1)
            distances = np.concatenate([distances, more[1]], axis=1)
            if first:  # of equally near rows the first is kept
                order = np.argsort(distances, axis=1, kind="stable")[:, :count]
                columns = np.take_along_axis(columns, order, axis=1)
                distances = np.take_along_axis(distances, order, axis=1)
        yield Found(start, columns, distances)
