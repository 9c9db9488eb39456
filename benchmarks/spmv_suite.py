"""Matrices for products with vectors, the same on every machine.

Finite differences and elements in natural and in random order, an unstructured mesh, a circuit with rows that reach
everywhere, a graph: each stands in for a kind of matrix of the SuiteSparse collection, two of them small enough to stay
in a GPU's cache. Values lie in [0.5, 1.5).
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spdist.foundation.cpus import count_cpus
from spdist.matrices.csr import CSR

Integers = npt.NDArray[np.integer]
BOX = tuple(itertools.product((-1, 0, 1), repeat=3))
CROSS = ((0, 0, 0), (0, 0, 1), (0, 0, -1), (0, 1, 0), (0, -1, 0), (1, 0, 0), (-1, 0, 0))


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def values(count: int, seed: int) -> npt.NDArray[np.float64]:
    """Return values in [0.5, 1.5) that repeat after a million."""
    return np.resize(generator(seed).random(min(count, 1 << 20)) + 0.5, count)


def finish(counts: Integers, columns: Integers, seed: int) -> CSR:
    """Return the square matrix with these columns, row after row, and values of our own."""
    indptr = np.append(0, np.cumsum(counts, dtype=np.int64))
    shape = (len(counts), len(counts))
    return CSR(indptr, columns.astype(np.int32, copy=False), values(len(columns), seed), shape)


def stencil(grid: tuple[int, int, int], steps: Iterable[tuple[int, ...]], unknowns: int = 1) -> CSR:
    """Return couplings of each grid point with its neighbours; dense blocks where there are several unknowns.

    Parameters
    ----------
    grid : (nz, ny, nx)
        The last runs fastest.
    steps : (z, y, x)
    """
    nz, ny, nx = grid
    steps = sorted(steps, key=lambda step: (step[0] * ny + step[1]) * nx + step[2])
    z, y, x = (np.arange(n, dtype=np.int32) for n in grid)
    near = np.empty((nz * ny * nx, len(steps)), bool)
    for slot, (dz, dy, dx) in enumerate(steps):
        inside = [(p + move >= 0) & (p + move < n) for p, move, n in ((z, dz, nz), (y, dy, ny), (x, dx, nx))]
        near[:, slot] = (inside[0][:, None, None] & inside[1][:, None] & inside[2]).ravel()
    distances = np.array([(dz * ny + dy) * nx + dx for dz, dy, dx in steps], np.int32)
    columns = (np.arange(len(near), dtype=np.int32)[:, None] + distances)[near]
    return in_blocks(near.sum(axis=1), columns, unknowns) if unknowns > 1 else finish(near.sum(axis=1), columns, 1)


def in_blocks(counts: Integers, columns: Integers, side: int) -> CSR:
    """Return the matrix in which each entry is a dense block."""
    wide = (columns[:, None] * np.int32(side) + np.arange(side, dtype=np.int32)).ravel()
    ends = np.cumsum(counts) * side
    lengths = np.repeat(counts * side, side)
    starts = np.repeat(ends - counts * side, side)
    places = np.arange(int(lengths.sum())) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return finish(lengths, wide[places], 2)


def reordered(m: CSR, seed: int, side: int = 1) -> CSR:
    """Return the matrix with its nodes, of `side` unknowns each, in random order; row and column i become place[i]."""
    nodes = generator(seed).permutation(m.nrows // side).astype(np.int32)
    place = (nodes[:, None] * np.int32(side) + np.arange(side, dtype=np.int32)).ravel()
    order = np.empty_like(place)
    order[place] = np.arange(len(place), dtype=np.int32)
    counts = np.diff(m.indptr)[order]
    starts = m.indptr[:-1][order]
    ends = np.cumsum(counts)
    columns = place[m.indices[np.arange(m.nnz) + np.repeat(starts - ends + counts, counts)]]
    moved = CSR(np.append(0, ends), columns, values(m.nnz, seed), m.shape).to_scipy()
    moved.sort_indices()
    return CSR(np.append(0, ends), moved.indices, moved.data, m.shape)


def from_edges(rows: Integers, columns: Integers, size: int, seed: int, *, symmetric: bool = True) -> CSR:
    """Return the graph of these edges without duplicates; a symmetric one has a diagonal too."""
    keys = [rows * size + columns]
    if symmetric:
        keys += [columns * size + rows, np.arange(size) * (size + 1)]
    places = np.sort(np.concatenate(keys))
    places = places[np.append(True, places[1:] != places[:-1])]
    found = places // size
    return finish(np.bincount(found, minlength=size), (places - found * size).astype(np.int32), seed)


def mesh(size: int, neighbours: int, seed: int) -> CSR:
    """Return what a mesher leaves: nearest neighbours of random points, numbered cell by cell of a coarse grid."""
    from scipy.spatial import cKDTree

    points = generator(seed).random((size, 3))
    side = max(1, round((size / 64) ** (1 / 3)))
    cell = (points * side).astype(np.int64)
    points = points[np.argsort((cell[:, 2] * side + cell[:, 1]) * side + cell[:, 0], kind="stable")]
    _, near = cKDTree(points).query(points, neighbours + 1, workers=-1)
    return from_edges(np.repeat(np.arange(size), neighbours), near[:, 1:].ravel(), size, seed)


def circuit(size: int, seed: int) -> CSR:
    """Return a circuit: a few entries a row, most of them near, and twelve nets of 2,000 to 24,000 pins."""
    draw, row = generator(seed), np.arange(size)
    rows = [row, row, row[: size // 3]]
    columns = [(row + draw.geometric(0.05, size)) % size, (row + draw.geometric(0.002, size)) % size]
    columns.append(draw.integers(0, size, size // 3))
    for net in range(1, 13):
        pins = draw.choice(size, 2000 * net, replace=False)
        rows.append(np.full(len(pins), draw.integers(0, size)))
        columns.append(pins)
    return from_edges(np.concatenate(rows), np.concatenate(columns), size, seed)


def rmat(scale: int, edge_factor: int, seed: int) -> CSR:
    """Return an R-MAT graph (0.57, 0.19, 0.19, 0.05), vertices in random order, duplicates merged."""
    draw, edges = generator(seed), edge_factor << scale
    rows, columns = np.zeros(edges, np.int64), np.zeros(edges, np.int64)
    for bit in range(scale):
        chance = draw.random(edges, dtype=np.float32)
        rows |= (chance > 0.76).astype(np.int64) << bit
        columns |= (((chance > 0.57) & (chance <= 0.76)) | (chance > 0.95)).astype(np.int64) << bit
    order = draw.permutation(1 << scale)
    return from_edges(order[rows], order[columns], 1 << scale, seed, symmetric=False)


def skewed(size: int, length: int, seed: int) -> CSR:
    """Return rows of `length` entries at random columns."""
    columns = generator(seed).integers(0, size, (size, length), dtype=np.int32)
    columns.sort(axis=1)
    return finish(np.full(size, length), columns.ravel(), seed)


SUITE: dict[str, Callable[[], CSR]] = {
    "s27_108": lambda: stencil((108, 108, 108), BOX),
    "s7_atmosmodl": lambda: stencil((103, 93, 156), CROSS),
    "elas3_70": lambda: stencil((70, 70, 70), BOX, 3),
    "elas3_70_noderand": lambda: reordered(stencil((70, 70, 70), BOX, 3), 4, 3),
    "tet_1m": lambda: mesh(1_000_000, 12, 11),
    "tet_1m_rand": lambda: reordered(mesh(1_000_000, 12, 11), 3),
    "circuit_2700k": lambda: circuit(2_700_000, 21),
    "rmat_20": lambda: rmat(20, 24, 31),
    "s5_2d_300": lambda: stencil((1, 300, 300), CROSS[:5]),
    "s27_40": lambda: stencil((40, 40, 40), BOX),
}
LARGE: dict[str, Callable[[], CSR]] = {
    "s27_200": lambda: stencil((200, 200, 200), BOX),
    "s7_250": lambda: stencil((250, 250, 250), CROSS),
}
"""Those that take a GPU so long that cores beside it could be worth their while."""
TINY: dict[str, Callable[[], CSR]] = {
    "s27_12": lambda: stencil((12, 12, 12), BOX),
    "elas3_10": lambda: stencil((10, 10, 10), BOX, 3),
    "elas3_10_noderand": lambda: reordered(stencil((10, 10, 10), BOX, 3), 4, 3),
    "tet_20k_rand": lambda: reordered(mesh(20_000, 12, 13), 3),
    "circuit_60k": lambda: circuit(60_000, 21),
    "rmat_12": lambda: rmat(12, 8, 31),
}
"""Sizes for a test."""


def lengths_of(rows: int, mean: float, spread: float, most: int, seed: int) -> Integers:
    """Return log-normal lengths of rows: `spread` is the deviation of their logarithms."""
    drawn = np.exp(generator(seed).normal(0, spread, rows))
    return np.clip(np.rint(drawn * mean / drawn.mean()), 1, most).astype(np.int64)


def scattered(rows: int, columns: int, lengths: Integers, seed: int, skew: float = 1.0) -> CSR:
    """Return rows of these lengths; columns are drawn with density ``skew * u ** (skew - 1)``, duplicates merged."""
    draw = generator(seed)
    place = draw.permutation(columns)
    found = place[(columns * draw.random(int(lengths.sum())) ** skew).astype(np.int64)]
    keys = np.unique(np.repeat(np.arange(rows), lengths) * columns + found)
    counts = np.bincount(keys // columns, minlength=rows)
    indptr = np.append(0, np.cumsum(counts))
    return CSR(indptr, (keys % columns).astype(np.int32), values(len(keys), seed), (rows, columns))


def ontology(size: int, wide: int, seed: int) -> CSR:
    """Return a tree's ancestors: a few entries a row, and `wide` rows that list a share of all others."""
    lengths = lengths_of(size, 12, 0.7, 200, seed)
    lengths[generator(seed + 1).choice(size, wide, replace=False)] = np.geomspace(size / 2, 300, wide).astype(np.int64)
    return scattered(size, size, lengths, seed, 2.0)


OTHER: dict[str, Callable[[], CSR]] = {
    "optimisation_507": lambda: scattered(507, 63_000, lengths_of(507, 900, 1.0, 30_000, 61), 61),
    "optimisation_t": lambda: scattered(63_000, 507, lengths_of(63_000, 7, 0.3, 30, 62), 62),
    "constraints_40": lambda: scattered(40, 300_000, lengths_of(40, 60_000, 0.5, 200_000, 63), 63),
    "ontology_50k": lambda: ontology(50_000, 12, 64),
    "proteins_20k": lambda: scattered(20_000, 20_000, lengths_of(20_000, 36, 1.2, 2_000, 65), 65, 2.0),
    "social_80k": lambda: scattered(80_000, 80_000, lengths_of(80_000, 10, 1.5, 5_000, 66), 66, 3.0),
    "power_law_1500k": lambda: scattered(1_500_000, 1_500_000, lengths_of(1_500_000, 9.5, 1.6, 50_000, 67), 67, 2.0),
    "fem4_60": lambda: stencil((60, 60, 60), CROSS, 4),
    "fem3_45_noderand": lambda: reordered(stencil((45, 45, 45), BOX, 3), 68, 3),
    "mesh_60k": lambda: mesh(60_000, 12, 69),
    "mesh_900k": lambda: mesh(900_000, 14, 70),
    "mesh_900k_rand": lambda: reordered(mesh(900_000, 14, 70), 71),
    "s27_95": lambda: stencil((95, 95, 95), BOX),
    "s9_2d_1200": lambda: stencil((1, 1200, 1200), tuple(step for step in BOX if step[0] == 0)),
    "rmat_17": lambda: rmat(17, 16, 72),
    "circuit_200k": lambda: circuit(200_000, 73),
}
"""Kinds and sizes that no constant of the choice was tuned on."""
LONG_ROWS: Callable[[], CSR] = lambda: skewed(20_000, 2_000, 51)  # noqa: E731
FEM = ("s27_108", "elas3_70", "elas3_70_noderand", "tet_1m", "tet_1m_rand")
STREAMED = ("s27_108", "s7_atmosmodl", "elas3_70", "tet_1m")
"""Those in natural order that exceed a GPU's cache."""


def path_of(name: str, folder: Path) -> Path:
    """Return where `prepare` keeps a matrix."""
    return folder / f"spmv-{name}.npz"


def _store(folder: Path, tiny: bool, name: str) -> None:
    m = (TINY if tiny else SUITE | LARGE | OTHER)[name]()
    partial = path_of(name, folder).with_suffix(".partial.npz")
    np.savez(partial, indptr=m.indptr, indices=m.indices, data=m.data, shape=m.shape)
    partial.replace(path_of(name, folder))


def prepare(names: Iterable[str], folder: Path, tiny: bool = False) -> None:
    """Make the matrices that the folder does not hold yet, each in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not path_of(name, folder).exists()]
    if tiny or len(missing) < 2:
        for name in missing:
            _store(folder, tiny, name)
        return
    with ProcessPoolExecutor(min(len(missing), count_cpus()), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(_store, folder, tiny), missing))


def load(name: str, folder: Path) -> CSR:
    """Return a matrix that `prepare` has made."""
    with np.load(path_of(name, folder)) as arrays:
        nrows, ncols = (int(size) for size in arrays["shape"])
        return CSR(arrays["indptr"], arrays["indices"], arrays["data"], (nrows, ncols))
