"""Small deterministic matrices for benchmarks: the same bits on every machine with the same NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from spdist.matrices.csr import CSR, from_scipy


def poisson(points: int, side: int, seed: int = 0) -> CSR:
    """Return the 7- or 27-point stencil on a `side` x `side` x `side` grid, with random values."""
    if points not in (7, 27):
        raise ValueError(f"points={points} must be 7 or 27")
    rows, columns = _grid_neighbours((side, side, side), 1 if points == 7 else 3)
    return _filled(rows, columns, (side**3, side**3), seed)


def fem_blocks(side: int, block: int = 3, seed: int = 0) -> CSR:
    """Return a 9-point grid of `side` x `side` nodes with `block` unknowns a node, as finite elements give."""
    rows, columns = _grid_neighbours((side, side), 2)
    inner = np.arange(block * block)
    rows = (rows[:, None] * block + inner // block).ravel()
    columns = (columns[:, None] * block + inner % block).ravel()
    return _filled(rows, columns, (side * side * block, side * side * block), seed)


def rmat(scale: int, edge_factor: int, seed: int = 0) -> CSR:
    """Return an R-MAT graph of ``2**scale`` vertices (a, b, c, d = 0.57, 0.19, 0.19, 0.05), duplicates summed."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(edge_factor << scale, np.int64)
    columns = rows.copy()
    for _ in range(scale):
        quadrant = np.searchsorted([0.57, 0.76, 0.95], rng.random(len(rows)), side="right")
        rows, columns = 2 * rows + (quadrant >> 1), 2 * columns + (quadrant & 1)
    return _filled(rows, columns, (1 << scale, 1 << scale), seed)


def erdos_renyi(nrows: int, per_row: int, seed: int = 0) -> CSR:
    """Return a square matrix with `per_row` random columns a row, duplicates summed."""
    columns = np.random.default_rng(seed).integers(0, nrows, nrows * per_row)
    return _filled(np.repeat(np.arange(nrows), per_row), columns, (nrows, nrows), seed)


def _grid_neighbours(shape: tuple[int, ...], reach: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return pairs of grid points that differ by at most 1 in each of at most `reach` directions."""
    grid = np.arange(np.prod(shape)).reshape(shape)
    rows, columns = [], []
    for step in itertools.product((-1, 0, 1), repeat=len(shape)):
        if np.count_nonzero(step) <= reach:
            here = tuple(slice(max(-d, 0), n - max(d, 0)) for d, n in zip(step, shape, strict=True))
            there = tuple(slice(max(d, 0), n + min(d, 0)) for d, n in zip(step, shape, strict=True))
            rows.append(grid[here].ravel())
            columns.append(grid[there].ravel())
    return np.concatenate(rows), np.concatenate(columns)


def _filled(rows: Any, columns: Any, shape: tuple[int, int], seed: int) -> CSR:
    """Return the canonical matrix with a random value in (0, 1] at each place."""
    values = 1.0 - np.random.default_rng(seed + 1).random(len(rows))
    return from_scipy(sp.csr_matrix((values, (rows, columns)), shape=shape))
