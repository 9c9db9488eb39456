"""Stochastic rows (CPU, Numba): their sums, and inflation, values raised to a power and rows scaled to sum 1 again."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads
from spdist.kernels.cpu.numba_compile import compiled
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray

THREAD_ENTRIES = 1 << 18
"""Entries of a thread: fewer are done before another has started."""


def inflate(rows: CSR, power: float) -> float:
    """Raise the values of each row to a power and scale the row to sum 1, in place; rows without a positive value stay.

    Returns the largest ``(max - sum of squares) * entries`` of a row as it was; 0 if there are no rows.
    """
    bounds = thread_bounds(rows)
    found = np.zeros(len(bounds) - 1)

    def work(i: int) -> None:
        found[i] = inflate_rows(rows.indptr, rows.data, bounds[i], bounds[i + 1], float(power))

    run_in_threads(len(found), work)
    return float(found.max())


def sums_of_rows(rows: CSR) -> ValueArray:
    """Return the sum of each row of a real matrix, (nrows,) float64."""
    bounds, sums = thread_bounds(rows), np.empty(rows.nrows)
    run_in_threads(len(bounds) - 1, lambda i: sum_rows(rows.indptr, rows.data, bounds[i], bounds[i + 1], sums))
    return sums


def thread_bounds(rows: CSR) -> list[int]:
    """Return the bounds of row ranges with about equal numbers of entries, one range for each thread."""
    threads = max(1, min(count_cpus(), rows.nnz // THREAD_ENTRIES))
    ends = np.searchsorted(rows.indptr, np.linspace(0, rows.nnz, threads + 1)[1:-1])
    return [0, *ends.tolist(), rows.nrows]


@compiled
def inflate_rows(indptr: Int64Array, data: ValueArray, start: int, stop: int, power: float) -> Any:
    """Inflate rows ``[start, stop)`` in place; return the largest ``(max - sum of squares) * entries`` of a row."""
    most = 0.0
    for row in range(start, stop):
        first, last = indptr[row], indptr[row + 1]
        largest, squares = 0.0, 0.0
        for t in range(first, last):
            value = float(data[t])
            largest = max(largest, value)
            squares += value * value
        if largest == 0.0:
            continue
        most = max(most, (largest - squares) * (last - first))
        total, scale = 0.0, 1.0 / largest  # else a high power would leave nothing of a row of small values
        for t in range(first, last):
            value = float(data[t]) * scale
            value = value * value if power == 2.0 else value**power
            total += value
            data[t] = value
        scale = 1.0 / total
        for t in range(first, last):
            data[t] = data[t] * scale
    return most


@compiled
def sum_rows(indptr: Int64Array, data: ValueArray, start: int, stop: int, sums: ValueArray) -> None:
    """Write the sums of rows ``[start, stop)`` to `sums`, (nrows,) float64."""
    for row in range(start, stop):
        total = 0.0
        for t in range(indptr[row], indptr[row + 1]):
            total += data[t]
        sums[row] = total
