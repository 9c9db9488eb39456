"""Matrices for the GPU products, the same bits on every machine.

Each stands in for a matrix of the SuiteSparse collection, or a kind of them, and has its size and kind of pattern.
Values are uniform in [0.5, 1.5), so that no sum cancels. The product is the square, but for ``amg_AP``: there it is
that of a 27-point operator and its prolongator.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

from spdist.foundation.cpus import count_cpus
from spdist.matrices.csr import CSR

Integers = npt.NDArray[np.int64]
Step = tuple[int, ...]
Pair = tuple[CSR, CSR]
"""A and B; the same object where the product is a square."""

CROSS = ((0, 0, 1), (0, 1, 0), (1, 0, 0))
FAR = ((0, 0, 2), (0, 2, 0), (2, 0, 0))


def box(directions: int) -> tuple[Step, ...]:
    """Return the steps to the neighbours of a grid point, diagonal ones too; one of each pair of opposite steps."""
    return tuple(step for step in itertools.product((-1, 0, 1), repeat=directions) if step > (0,) * directions)


def assemble(shape: tuple[int, int], keys: Iterable[Integers], seed: int) -> CSR:
    """Return the matrix with a random value at each place ``row * ncols + column``; places may come twice.

    Parameters
    ----------
    shape : (nrows, ncols)
    keys : arrays of int64
    seed : int
        Of the values.
    """
    places = np.sort(np.concatenate(list(keys)))
    places = places[np.append(True, places[1:] != places[:-1])]
    rows = places // shape[1]
    indptr = np.append(0, np.cumsum(np.bincount(rows, minlength=shape[0])))
    values = np.random.default_rng(seed).random(len(places)) + 0.5
    return CSR(indptr, (places - rows * shape[1]).astype(np.int32), values, shape)


def stencil(
    grid: tuple[int, ...], steps: Iterable[Step], seed: int, *, nodes: int = 0, entries: int = 0, keep: float = 1.0,
    unknowns: int = 1, diagonal: bool = True,
) -> CSR:  # fmt: skip
    """Return the couplings of each grid point with its neighbours, symmetric in pattern.

    Parameters
    ----------
    grid : tuple of int
        Points in each direction; the last runs fastest.
    steps : tuples of int
        One of each pair of opposite steps; the opposite is coupled too.
    seed : int
        Of the choice of couplings; ``seed + 1`` of the values.
    nodes : int
        Use the first so many points only; all by default.
    entries : int
        Keep each pair of couplings with the chance that gives about so many nonzeros.
    keep : float
        That chance, where `entries` is not given.
    unknowns : int
        Unknowns a point: each coupling is a dense block of so many rows and columns.
    """
    nodes = nodes or math.prod(grid)
    pairs = list(_couplings(grid, steps, nodes))
    if entries:
        possible = sum(int(np.count_nonzero(near)) for _, near in pairs)
        keep = min(1.0, (entries / unknowns / unknowns - nodes) / (2 * possible))
    rng = np.random.default_rng(seed)
    lower, upper = [], []
    for distance, near in pairs:
        kept = near & (rng.random(nodes) < keep) if keep < 1.0 else near
        lower.append(np.flatnonzero(kept))
        upper.append(lower[-1] + distance)
    own = [np.arange(nodes)] if diagonal else []
    rows, columns = np.concatenate(own + lower + upper), np.concatenate(own + upper + lower)
    inner = list(itertools.product(range(unknowns), repeat=2))
    size = nodes * unknowns
    keys = ((rows * unknowns + i) * size + columns * unknowns + j for i, j in inner)
    return assemble((size, size), keys, seed + 1)


def _couplings(grid: tuple[int, ...], steps: Iterable[Step], nodes: int) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yield, by rising distance, how far in numbering a step leads, and the points whose neighbour is in the grid."""
    strides = [math.prod(grid[k + 1 :]) for k in range(len(grid))]
    points = np.arange(nodes)
    place = np.unravel_index(points, grid)
    for distance, step in sorted((int(np.dot(step, strides)), step) for step in steps):
        near = points + distance < nodes
        for coordinate, count, move in zip(place, grid, step, strict=True):
            near &= (coordinate + move >= 0) & (coordinate + move < count)
        yield distance, near


def banded(size: int, offsets: Iterable[int], seed: int) -> CSR:
    """Return full diagonals at 0 and at ``+-offsets``."""
    keys = [np.arange(size) * (size + 1)]
    for offset in offsets:
        row = np.arange(size - offset)
        keys += [row * size + row + offset, (row + offset) * size + row]
    return assemble((size, size), keys, seed)


def cage(size: int, entries: int, seed: int) -> CSR:
    """Return random diagonals at ``+-3**k``, as the transitions of a polymer give; about `entries` nonzeros."""
    rng = np.random.default_rng(seed)
    offsets = [sign * 3**k for k in range(10) for sign in (1, -1)]
    chance = (entries / size - 1) / sum(1 - abs(offset) / size for offset in offsets)
    rows = np.arange(size)
    keys = [rows * size + rows]
    for offset in offsets:
        column = rows + offset
        chosen = (rng.random(size) < chance) & (column >= 0) & (column < size)
        keys.append(rows[chosen] * size + column[chosen])
    return assemble((size, size), keys, seed + 1)


def cube_connected_cycles(dimension: int, seed: int) -> CSR:
    """Return a hypercube whose corners are chains: vertex i of a chain is joined to its like across direction i."""
    size = dimension << dimension
    vertex = np.arange(size)
    corner, position = np.divmod(vertex, dimension)
    across = (corner ^ (1 << position)) * dimension + position
    before = vertex[position < dimension - 1]
    keys = [vertex * size + across, before * size + before + 1, (before + 1) * size + before]
    return assemble((size, size), keys, seed)


def rmat(scale: int, edge_factor: int) -> CSR:
    """Return an R-MAT graph (0.57, 0.19, 0.19, 0.05) of ``2**scale`` vertices in random order, duplicates merged."""
    size, edges = 1 << scale, edge_factor << scale
    rng = np.random.default_rng(1000 * scale + edge_factor + 1)
    rows, columns = np.zeros(edges, np.int64), np.zeros(edges, np.int64)
    a, ab, abc = np.float32(0.57), np.float32(0.57 + 0.19), np.float32(0.57 + 0.19 + 0.19)
    for _ in range(scale):
        draw = rng.random(edges, dtype=np.float32)
        down = draw >= ab
        rows, columns = 2 * rows + down, 2 * columns + (np.where(down, draw >= abc, draw >= a))
    order = rng.permutation(size)
    return assemble((size, size), [order[rows] * size + order[columns]], 8)


def erdos_renyi(size: int, per_row: int, seed: int) -> CSR:
    """Return about `per_row` random columns in each row; a few more are drawn, for those that meet."""
    rng = np.random.default_rng(seed)
    draws = int(size * per_row * (1 + per_row / (2.0 * size)))
    return assemble((size, size), [rng.integers(0, size, draws) * size + rng.integers(0, size, draws)], seed + 1)


def web(size: int, links: int, seed: int) -> CSR:
    """Return a graph of pages: log-normal numbers of links, most to the page's own host, the rest by popularity."""
    rng = np.random.default_rng(seed)
    degree = np.minimum(np.exp(rng.normal(1.2, 1.05, size)).astype(np.int64), 456)
    degree[rng.random(size) < 0.19] = 0
    degree = np.round(degree * (links * 1.42 / degree.sum())).astype(np.int64)  # 1.42: many meet, and are merged
    source = np.repeat(np.arange(size), degree)
    count = len(source)
    stays = rng.random(count) < 0.65
    host = rng.integers(2, 40, size)[source]
    near = source // host * host + (rng.random(count) ** 2 * host).astype(np.int64)
    rank = np.minimum((size ** rng.random(count)).astype(np.int64), size - 1)  # Zipf's law
    uniform = rng.random(count) < 0.75
    rank = np.where(uniform, rng.integers(0, size, count), rank)
    target = np.where(stays, np.minimum(near, size - 1), rng.permutation(size)[rank])
    keys = np.sort((source * size + target)[source != target])
    keys = keys[np.append(True, keys[1:] != keys[:-1])]
    if len(keys) > links:
        keys = np.delete(keys, rng.choice(len(keys), len(keys) - links, replace=False))
    return assemble((size, size), [keys], seed + 1)


def long_rows(size: int, rows: int, length: int, spacing: int, seed: int) -> CSR:
    """Return 8 random columns a row, and `rows` rows of up to `length`."""
    rng = np.random.default_rng(seed)
    keys = [rng.integers(0, size, 8 * size) * size + rng.integers(0, size, 8 * size)]
    keys += [(k * spacing + 17) * size + rng.integers(0, size, length) for k in range(rows)]
    return assemble((size, size), keys, seed + 1)


def neighbours(side: int) -> tuple[Integers, Integers]:
    """Return the first and the last of the points next to each, itself among them, along one direction of a grid."""
    points = np.arange(side)
    return np.maximum(points - 1, 0), np.minimum(points + 1, side - 1)


def grid(side: int, seed: int) -> CSR:
    """Return a 27-point operator on ``side**3`` points; quicker than `stencil`."""
    return boxes(*neighbours(side), side, seed + 1)


def galerkin(side: int, seed: int) -> Pair:
    """Return a 27-point operator on ``side**3`` points and its smoothed prolongator from aggregates of 3 x 3 x 3."""
    first, last = neighbours(side)
    return grid(side, seed), boxes(first // 3, last // 3, side // 3, seed + 1)


def boxes(first: Integers, last: Integers, side: int, seed: int) -> CSR:
    """Return the matrix whose row (x, y, z) has the points of a grid from first[x] to last[x], and so on, in each way.

    Parameters
    ----------
    first, last : (n,) int64
        For n**3 rows.
    side : int
        Of the grid of columns.
    seed : int
        Of the values.
    """
    spans = last - first + 1
    lengths = spans[:, None, None] * spans[:, None] * spans
    indptr = np.append(0, np.cumsum(lengths))
    indices = np.empty(indptr[-1], np.int32)
    _fill_boxes(first, last, side, indptr, indices)
    return CSR(indptr, indices, np.random.default_rng(seed).random(len(indices)) + 0.5, (len(indptr) - 1, side**3))


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _fill_boxes(first: Integers, last: Integers, side: int, indptr: Integers, indices: npt.NDArray[np.int32]) -> None:
    """Write the columns of each row of `boxes`."""
    n = len(first)
    for x in numba.prange(n):
        for y in range(n):
            for z in range(n):
                at = indptr[(x * n + y) * n + z]
                for i in range(first[x], last[x] + 1):
                    for j in range(first[y], last[y] + 1):
                        for k in range(first[z], last[z] + 1):
                            indices[at] = (i * side + j) * side + k
                            at += 1


SUITE: dict[str, Callable[[], CSR | Pair]] = {
    "hood": lambda: stencil((192, 192), box(2), 11, nodes=36757, entries=9895422, unknowns=6),
    "atmosmodl": lambda: stencil((198, 198, 38), CROSS, 12),
    "offshore": lambda: stencil((64, 64, 64), box(3), 13, nodes=259789, entries=4242673),
    "bmwcra_1": lambda: stencil((37, 37, 37), box(3), 14, nodes=49590, entries=10641602, unknowns=3),
    "mono_500Hz": lambda: stencil((56, 56, 56), box(3) + FAR, 15, nodes=169410, entries=5036288),
    "cage12": lambda: cage(130228, 2032536, 16),
    "cca": lambda: cube_connected_cycles(12, 18),
    "poisson3Da": lambda: stencil((24, 24, 24), box(3) + FAR, 19, nodes=13514, entries=352762),
    "orsirr_1": lambda: banded(1030, (1, 11, 164), 20),
    "webgoogle": lambda: web(916428, 5105039, 24),
    "roadnet": lambda: stencil((1414, 1414), ((0, 1), (1, 0)), 21, keep=0.7014, diagonal=False),
    "rmat17_e8": lambda: rmat(17, 8),
    "longrows": lambda: long_rows(200000, 64, 120000, 3001, 26),
    "amg_AP": lambda: galerkin(96, 28),
    "er_500k_d16": lambda: erdos_renyi(500000, 16, 23),
    "rmat18_e8": lambda: rmat(18, 8),
}
LARGE: dict[str, Callable[[], CSR | Pair]] = {
    "er_4m_d16": lambda: erdos_renyi(4_000_000, 16, 31),
    "rmat18_e16": lambda: rmat(18, 16),
    "poisson27_160": lambda: stencil((160, 160, 160), box(3), 32),
    "amg_AP_4x": lambda: galerkin(153, 33),
    "amg_AP_16x": lambda: galerkin(243, 34),
    "poisson27_256": lambda: grid(256, 35),
    "amg_AP_37x": lambda: galerkin(321, 36),
}
"""For `pipeline.py`: products several times as large as the memory they are given."""
TINY: dict[str, Callable[[], CSR | Pair]] = {
    "fem": lambda: stencil((24, 24), box(2), 1, unknowns=6),
    "27-point": lambda: stencil((12, 12, 12), box(3), 2, entries=40000),
    "orsirr_1": SUITE["orsirr_1"],
    "rmat": lambda: rmat(10, 8),
    "longrows": lambda: long_rows(5000, 4, 20000, 1001, 3),
    "galerkin": lambda: galerkin(12, 4),
}
"""Sizes for a test; between them they meet every kernel."""


def make(name: str, tiny: bool = False) -> Pair:
    """Return A and B of a named product."""
    made = (TINY if tiny else SUITE | LARGE)[name]()
    return made if isinstance(made, tuple) else (made, made)


def path_of(name: str, folder: Path, tiny: bool) -> Path:
    """Return where `prepare` keeps a product's matrices."""
    return folder / f"{'tiny-' if tiny else ''}{name}.npz"


def _store(folder: Path, tiny: bool, name: str) -> None:
    pair = make(name, tiny)
    square = pair[0] is pair[1]
    arrays = {}
    for letter, m in zip("a" if square else "ab", pair, strict=False):
        parts = {"indptr": m.indptr, "indices": m.indices, "data": m.data, "shape": np.array(m.shape)}
        arrays |= {f"{letter}_{part}": array for part, array in parts.items()}
    path = path_of(name, folder, tiny)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.replace(path)


def prepare(names: Iterable[str], folder: Path, tiny: bool = False) -> None:
    """Make the matrices that the folder does not hold yet, each in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not path_of(name, folder, tiny).exists()]
    if tiny:
        for name in missing:
            _store(folder, tiny, name)
    elif missing:
        processes = min(len(missing), count_cpus())
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(functools.partial(_store, folder, tiny), missing))


def load(name: str, folder: Path, tiny: bool = False) -> Pair:
    """Return A and B of a product that `prepare` has made."""
    with np.load(path_of(name, folder, tiny)) as arrays:
        matrices = {
            letter: CSR(*(arrays[f"{letter}_{part}"] for part in ("indptr", "indices", "data")), _shape(arrays, letter))
            for letter in "ab"
            if f"{letter}_shape" in arrays
        }
    return matrices["a"], matrices.get("b", matrices["a"])


def _shape(arrays: dict[str, npt.NDArray[np.int64]], letter: str) -> tuple[int, int]:
    nrows, ncols = arrays[f"{letter}_shape"]
    return int(nrows), int(ncols)
