"""Count values by bins on the CPU, compiled by Numba: NumPy would sort the values, which takes longer than the product.

The range of the edges is cut into cells of equal width, and each cell knows the edges inside it. If bins have similar
widths, a value is compared with one or two edges; for any other bins, with no more than a binary search needs.
"""

from __future__ import annotations

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled
from spdist.matrices.dtypes import Int64Array, ValueArray

CELLS = 4
"""Cells for each bin."""


def histogram(values: ValueArray, edges: ValueArray) -> Int64Array:
    """Count the values x with ``edges[bin] <= x < edges[bin + 1]`` for each bin; the last bin includes its upper edge.

    Values are real and compared as float64; edges are finite and rising. NaN and values outside all bins are not
    counted.
    """
    counts = np.zeros(len(edges) - 1, np.int64)
    cells, half = CELLS * len(counts), edges / 2  # differences of halves are finite
    width = (half[-1] - half[0]) / cells
    scale = 1 / width if width > 1 / np.finfo(np.float64).max else 0.0
    cell_of = np.minimum((half - half[0]) * scale, cells - 1).astype(np.int64)
    count_by_bins(values, edges, np.searchsorted(cell_of, np.arange(cells + 1)), scale, counts)
    return counts


@compiled
def count_by_bins(values: ValueArray, edges: ValueArray, starts: Int64Array, scale: float, counts: Int64Array) -> None:
    """Add the number of values in each bin to its count.

    `starts`: (cells + 1,): first edge of each cell; the cell of x is ``(x / 2 - edges[0] / 2) * scale``, monotonic in
    x.
    """
    bins, cells = np.uintp(len(counts)), np.uintp(len(starts) - 1)
    first, last = edges[0], edges[bins]
    for t in range(np.uintp(len(values))):
        x = np.float64(values[t])
        if not first <= x <= last:
            continue
        cell = min(np.uintp((x / 2 - first / 2) * scale), cells - np.uintp(1))
        low, high = np.uintp(starts[cell]), np.uintp(starts[cell + np.uintp(1)])
        while low < high:  # `low` becomes the number of edges up to x
            middle = (low + high) >> np.uintp(1)
            if edges[middle] <= x:
                low = middle + np.uintp(1)
            else:
                high = middle
        counts[min(low, bins) - np.uintp(1)] += 1
