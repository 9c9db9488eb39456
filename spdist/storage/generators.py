"""Generate matrices of any size, row block by row block, for benchmarks and tests.

The same call gives the same matrix on every machine that has the same release of NumPy: values are a hash of the seed,
row and column, random patterns come from counter-based generators, one for each fixed range of rows or edges. No block
size that a caller or a memory limit chooses changes the matrix.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.foundation.units import counted
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, check_dtype, index_dtype
from spdist.storage.atomic_replace import Progress, Stage, ignore_progress, staged_matrix
from spdist.storage.external_sort import Entries, RowSorter
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.writer import MatrixWriter

ENTRIES = 1 << 20
"""Entries generated at a time."""

EDGES = 1 << 19
"""Edges that one random generator of ``rmat`` draws; another number gives other matrices."""

RANGE_ENTRIES = 1 << 16
"""Expected entries that one random generator of ``erdos-renyi`` draws; another number gives other matrices."""

LARGEST = 1 << 62
"""Exclusive upper bound on the rows of a matrix, for 64-bit indices."""

WIDEST = 1 << 56
"""Most positions from which one generator of ``erdos-renyi`` picks, so that 64-bit sums do not overflow."""

Weigh = Callable[[Int64Array, Int64Array], ValueArray]
"""Returns the values of entries, from their rows and columns."""


@dataclass(frozen=True)
class Request:
    """Parameters of every generator: where to write, the dtype of values and the seed."""

    stage: Stage
    dtype: np.dtype[Any]
    seed: int


@dataclass(frozen=True)
class Rows:
    """The result of a generator: columns, estimated number of entries, and the rows in order."""

    ncols: int
    expected: int
    blocks: Iterator[CSR]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a generator."""

    # converts a Python value or text; raises ValueError or TypeError if that is impossible
    convert: Callable[[Any], Any]
    default: Any  # none if the parameter is required
    help: str  # what the parameter means, and which values it may have


@dataclass(frozen=True)
class Kind:
    """A generator and its parameters, for `generate` and for the command line."""

    function: Callable[..., Rows]
    help: str
    parameters: Mapping[str, Parameter]


def generate(
    kind: str,
    target: str | Path,
    *,
    overwrite: bool = False,
    steal: bool = False,
    progress: Progress | None = None,
    dtype: npt.DTypeLike = "float64",
    seed: int = 0,
    **parameters: object,
) -> StoredMatrix:
    """Write a matrix of a known kind, streaming, so that it may exceed memory.

    Parameters
    ----------
    kind : str
        A key of `KINDS`: poisson, rmat, erdos-renyi, banded or fem-blocks.
    target : str or Path
        A path or fsspec URL; gets the matrix when all is written.
    overwrite : bool
        Replace the matrix at `target`.
    steal : bool
        Take over from a run on another host that writes `target` and had no heartbeat for a minute.
    progress : callable, optional
        Called as ``progress(done, total)``, in entries; the total may be an estimate.
    dtype : dtype
        Of the values. Random values are uniform in [0, 1); integers are from 1 to 9, bools are all true.
    seed : int
        Not negative.
    **parameters
        Parameters of the kind; see `KINDS`.

    Returns
    -------
    StoredMatrix

    Raises
    ------
    InputError
        If the kind, a parameter or a value is unknown, with what to pass instead; or if `target` exists.

    Examples
    --------
    >>> generate("poisson", "memory://poisson.zarr", dims=(30, 30), points=5).nnz
    4380
    """
    if kind not in KINDS:
        raise InputError(f"'{kind}' is not a kind of matrix; known are {', '.join(KINDS)}")
    arguments = _arguments(kind, parameters)
    values = _dtype(dtype)
    if seed < 0:
        raise InputError(f"seed={seed} is negative; give 0 or more")
    note = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    facts = {"provenance": {"command": "generate", "kind": kind, "seed": seed, **note}}
    report = progress or ignore_progress
    with staged_matrix(target, overwrite=overwrite, steal=steal) as stage:
        rows = KINDS[kind].function(Request(stage, values, seed), **arguments)
        writer = MatrixWriter(stage.url, rows.ncols, values, facts)
        for block in rows.blocks:
            writer.append(block)
            report(min(writer.nnz, rows.expected), rows.expected)
        writer.close()
    return open_matrix(target)


def _arguments(kind: str, given: dict[str, object]) -> dict[str, Any]:
    """Return all parameters of `kind`, converted."""
    known = KINDS[kind].parameters
    for name in given:
        if name not in known:
            raise InputError(f"{kind} has no parameter '{name}'; it has {', '.join(known)}")
    out = {}
    for name, parameter in known.items():
        value = given.get(name)
        value = parameter.default if value is None else value
        if value is None:
            raise InputError(f"{kind} needs {name}: {parameter.help}")
        try:
            out[name] = parameter.convert(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{kind}: {name}={value!r} is not valid; give {parameter.help}") from error
    return out


def _dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        return check_dtype(np.dtype(dtype))
    except TypeError as error:
        raise InputError(f"dtype={dtype!r} is not a NumPy dtype; give for instance float64") from error
    except MatrixError as error:
        raise InputError(str(error)) from error


# -- values ------------------------------------------------------------------------------------------------------------


def _hash(seed: int, rows: IndexArray, columns: IndexArray) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each position: two rounds of SplitMix64's finaliser.

    References
    ----------
    .. [1] G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    bits: npt.NDArray[np.uint64] = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed % (1 << 64))
    for added in (columns.astype(np.uint64), np.uint64(0x632BE59BD9B4E019)):
        bits = bits + added
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def _uniform(bits: npt.NDArray[np.uint64], dtype: np.dtype[Any]) -> ValueArray:
    """Convert random bits to values: floats in [0, 1), integers from 1 to 9, or true."""
    if dtype.kind == "b":
        return np.ones(bits.shape, np.bool_)
    if dtype.kind in "iu":
        return (bits % np.uint64(9) + np.uint64(1)).astype(dtype)
    if dtype.kind == "c":
        part = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
        high, low = _uniform(bits, part), _uniform(bits << np.uint64(32), part)
        return (high + 1j * low).astype(dtype)
    digits = 24 if dtype.itemsize == 4 else 53  # so that no value rounds up to 1
    fractions: ValueArray = (bits >> np.uint64(64 - digits)).astype(dtype) * dtype.type(0.5**digits)
    return fractions


# -- stencils on grids -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """Nodes of a grid, numbered with the last dimension fastest."""

    dims: tuple[int, ...]  # nodes along each dimension
    steps: list[tuple[int, ...]]  # steps from a node to its neighbours and to itself
    dof: int  # unknowns at each node: degrees of freedom

    @property
    def nrows(self) -> int:
        """Number of unknowns."""
        return math.prod(self.dims) * self.dof

    def count(self) -> int:
        """Return the number of entries."""
        pairs = (math.prod(max(n - abs(s), 0) for n, s in zip(self.dims, step, strict=True)) for step in self.steps)
        return sum(pairs) * self.dof**2

    def blocks(self, weigh: Weigh) -> Iterator[CSR]:
        """Yield the rows; `weigh` gives the values."""
        nodes = math.prod(self.dims)
        per_block = max(ENTRIES // (len(self.steps) * self.dof**2), 1)
        for start in range(0, nodes, per_block):
            yield self._block(start, min(start + per_block, nodes), weigh)

    def _block(self, start: int, stop: int, weigh: Weigh) -> CSR:
        """Return the rows of nodes ``[start:stop)``."""
        node = np.arange(start, stop, dtype=np.int64)
        inside, neighbour = self._neighbours(node)
        if self.dof > 1:  # a dense block for each pair of neighbours
            unknown = np.arange(self.dof)
            node = (node[:, None] * self.dof + unknown).ravel()
            neighbour = (neighbour[:, :, None] * self.dof + unknown).reshape(len(inside), -1)
            inside, neighbour = np.repeat(inside, self.dof, 1), np.repeat(neighbour, self.dof, 0)
            inside = np.repeat(inside, self.dof, 0)
        return _rows_inside(node, neighbour, inside, self.nrows, weigh)

    def _neighbours(self, node: Int64Array) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """Return for each node and step whether there is a neighbour, and the neighbour's number."""
        inside = np.ones((len(node), len(self.steps)), np.bool_)
        neighbour = np.repeat(node[:, None], len(self.steps), 1)
        stride, rest = 1, node
        for axis in range(len(self.dims) - 1, -1, -1):
            rest, position = np.divmod(rest, self.dims[axis])
            along = np.array([step[axis] for step in self.steps])
            for step in (-1, 1):
                outside = position == (0 if step < 0 else self.dims[axis] - 1)
                inside[np.ix_(outside, along == step)] = False
            neighbour += along * stride
            stride *= self.dims[axis]
        return inside, neighbour


def _rows_inside(rows: Int64Array, columns: Int64Array, inside: npt.NDArray[np.bool_], ncols: int, weigh: Weigh) -> CSR:
    """Return the rows with these columns, one row a line, as far as they are inside; `weigh` gives the values."""
    counts = inside.sum(1)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    kept = columns[inside]
    values = weigh(np.repeat(rows, counts), kept)
    return CSR(indptr, kept.astype(index_dtype(ncols)), values, (len(rows), ncols))


def _steps(ndim: int, *, star: bool) -> list[tuple[int, ...]]:
    """Return the steps to the neighbours and to the node itself, in the order of their numbers."""
    steps = itertools.product((-1, 0, 1), repeat=ndim)
    return [step for step in steps if not star or sum(map(abs, step)) <= 1]


def _check_size(what: str, *sizes: int) -> None:
    if math.prod(sizes) >= LARGEST:
        raise InputError(f"{what} makes {math.prod(sizes):,} rows, more than 64-bit indices reach; give smaller ones")


def _poisson(request: Request, dims: tuple[int, ...], points: int) -> Rows:
    """Laplacian with Dirichlet boundary: `points` - 1 on the diagonal, -1 for each neighbour."""
    fitting = {2: (5, 9), 3: (7, 27)}.get(len(dims), ())
    if points not in fitting:
        raise InputError(
            f"poisson: points={points} does not fit dims={dims}; give points=5 or 9 with two dimensions, 7 or 27 with "
            f"three"
        )
    if request.dtype.kind == "u":
        raise InputError(f"poisson: dtype={request.dtype} has no -1; give a signed dtype")
    _check_size(f"poisson: dims={dims}", *dims)
    grid = _Grid(dims, _steps(len(dims), star=points in (5, 7)), 1)

    def weigh(rows: Int64Array, columns: Int64Array) -> ValueArray:
        values: ValueArray = np.where(rows == columns, request.dtype.type(points - 1), request.dtype.type(-1))
        return values

    return Rows(grid.nrows, grid.count(), grid.blocks(weigh))


def _fem_blocks(request: Request, dims: tuple[int, ...], dof: int) -> Rows:
    """27-point node stencil of dense blocks: symmetric with a dominant diagonal, as of solid finite elements."""
    if len(dims) != 3:
        raise InputError(f"fem-blocks: dims={dims} must be three numbers, for instance 40x40x40")
    _check_size(f"fem-blocks: dims={dims}, dof={dof}", *dims, dof)
    if request.dtype.kind in "iu" and np.iinfo(request.dtype).max < 27 * dof:
        raise InputError(
            f"fem-blocks: the diagonal is {27 * dof}, too large for dtype={request.dtype}; give a wider one"
        )
    grid = _Grid(dims, _steps(3, star=False), dof)

    def weigh(rows: Int64Array, columns: Int64Array) -> ValueArray:
        bits = _hash(request.seed, np.minimum(rows, columns), np.maximum(rows, columns))
        values = _uniform(bits, request.dtype)
        values[rows == columns] = request.dtype.type(27 * dof)
        return values

    return Rows(grid.nrows, grid.count(), grid.blocks(weigh))


# -- bands -------------------------------------------------------------------------------------------------------------


def _banded(request: Request, n: int, bandwidth: int, offsets: tuple[int, ...]) -> Rows:
    """Square, with entries in the diagonals `offsets`, or in `bandwidth` diagonals on each side of the main one."""
    steps = np.array(sorted(set(offsets)) if offsets else range(-bandwidth, bandwidth + 1), np.int64)
    if np.any(np.abs(steps) >= n):
        raise InputError(
            f"banded: offset {steps[np.argmax(np.abs(steps))]} lies outside {counted(n, 'column')}; raise n"
        )
    expected = sum(n - abs(step) for step in steps.tolist())
    per_block = max(ENTRIES // len(steps), 1)

    def weigh(rows: Int64Array, columns: Int64Array) -> ValueArray:
        return _uniform(_hash(request.seed, rows, columns), request.dtype)

    def blocks() -> Iterator[CSR]:
        for start in range(0, n, per_block):
            row = np.arange(start, min(start + per_block, n), dtype=np.int64)
            columns = row[:, None] + steps
            yield _rows_inside(row, columns, (columns >= 0) & (columns < n), n, weigh)

    return Rows(n, expected, blocks())


# -- random graphs -----------------------------------------------------------------------------------------------------


def _generator(seed: int, number: int) -> np.random.Generator:
    """Return the random generator of range `number`; it depends on nothing but the seed and this number."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), number], np.uint64)))


def _erdos_renyi(request: Request, nrows: int, ncols: int, per_row: float) -> Rows:
    """Each position has an entry with probability ``per_row / ncols``, independently of the others."""
    if not 0 < per_row <= ncols:
        raise InputError(f"erdos-renyi: per_row={per_row} must be above 0 and at most ncols={ncols:,}")
    if ncols > WIDEST:
        raise InputError(f"erdos-renyi: ncols={ncols:,} is above {WIDEST:,}; give fewer")
    span = min(max(1, int(RANGE_ENTRIES // per_row)), WIDEST // ncols, nrows)

    def blocks() -> Iterator[CSR]:
        for number, start in enumerate(range(0, nrows, span)):
            count = min(span, nrows - start)
            at = _positions(_generator(request.seed, number), per_row / ncols, span * ncols)
            row, columns = np.divmod(at[: np.searchsorted(at, count * ncols)], ncols)
            values = _uniform(_hash(request.seed, row + start, columns), request.dtype)
            indptr = np.searchsorted(row, np.arange(count + 1)).astype(np.int64)
            yield CSR(indptr, columns.astype(index_dtype(ncols)), values, (count, ncols))

    return Rows(ncols, max(round(nrows * per_row), 1), blocks())


def _positions(generator: np.random.Generator, probability: float, size: int) -> Int64Array:
    """Pick each of ``range(size)`` with `probability`; return them sorted. Gaps between picks are geometric."""
    parts, end = [], -1
    while end < size - 1:
        expected = (size - 1 - end) * probability
        gaps = generator.geometric(probability, int(expected + 4 * math.sqrt(expected) + 16))
        parts.append(end + np.cumsum(np.minimum(gaps, size + 1)))
        end = int(parts[-1][-1])
    picked = np.concatenate(parts)
    return picked[: np.searchsorted(picked, size)]


def _rmat(request: Request, scale: int, edge_factor: float, a: float, b: float, c: float, duplicates: str) -> Rows:
    """R-MAT graph: each edge falls into a quadrant with probability a, b, c, 1 - a - b - c, `scale` times over.

    References
    ----------
    .. [1] D. Chakrabarti, Y. Zhan, C. Faloutsos, "R-MAT: A Recursive Model for Graph Mining", SDM 2004.
    """
    if min(a, b, c) < 0 or a + b + c > 1:
        raise InputError(f"rmat: a={a}, b={b}, c={c} are not probabilities; each at least 0, together at most 1")
    if duplicates not in ("sum", "first"):
        raise InputError(f"rmat: duplicates={duplicates!r} is not known; give sum or first")
    if not 0 <= scale <= 40:
        raise InputError(f"rmat: scale={scale} must lie from 0 to 40")
    n, nedges = 1 << scale, round(edge_factor * (1 << scale))
    rule: Any = duplicates
    sorter = RowSorter(request.stage.scratch, (n, n), request.dtype, expected=nedges, duplicates=rule)

    def blocks() -> Iterator[CSR]:
        for number, start in enumerate(range(0, nedges, EDGES)):
            edges = _edges(_generator(request.seed, number), scale, (a, b, c), request.dtype)
            sorter.add(edges.take(slice(0, nedges - start)))
        yield from sorter.blocks()

    return Rows(n, max(nedges, 1), blocks())


def _edges(
    generator: np.random.Generator, scale: int, probabilities: tuple[float, float, float], dtype: np.dtype[Any]
) -> Entries:
    """Return `EDGES` random edges."""
    a, b, c = probabilities
    rows, columns = np.zeros(EDGES, np.int64), np.zeros(EDGES, np.int64)
    for _ in range(scale):
        draw = generator.random(EDGES, dtype=np.float32)
        low = draw >= a + b  # the lower half: c or d
        right = ((draw >= a) & ~low) | (draw >= a + b + c)
        rows = rows << 1 | low
        columns = columns << 1 | right
    bits = generator.integers(0, 1 << 64, EDGES, dtype=np.uint64)
    return Entries(rows, columns, _uniform(bits, dtype))


# -- the table ---------------------------------------------------------------------------------------------------------


def _whole(value: float | str, least: float = -math.inf) -> int:
    if isinstance(value, float) and value != int(value):
        raise ValueError("not a whole number")
    if (number := int(value)) < least:
        raise ValueError(f"below {least}")
    return number


_positive = functools.partial(_whole, least=1)
_not_negative = functools.partial(_whole, least=0)


def _finite(value: float | str) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError("not finite")
    return number


def _list(value: str | Iterable[float | str]) -> list[Any]:
    return value.replace("x", ",").split(",") if isinstance(value, str) and value else list(value)


def _dims(value: str | Iterable[float | str]) -> tuple[int, ...]:
    return tuple(map(_positive, _list(value)))


def _offsets(value: str | Iterable[float | str]) -> tuple[int, ...]:
    return tuple(map(_whole, _list(value)))


_GRID = Parameter(_dims, None, "the numbers of grid points, such as 100x100x100")

KINDS: dict[str, Kind] = {
    "poisson": Kind(
        _poisson,
        "Laplacian on a 2-D or 3-D grid",
        {"dims": _GRID, "points": Parameter(_positive, 7, "5 or 9 in two dimensions, 7 or 27 in three")},
    ),
    "rmat": Kind(
        _rmat,
        "power-law graph (R-MAT) of 2**scale vertices",
        {
            "scale": Parameter(_not_negative, None, "the binary logarithm of the number of rows, 0 to 40"),
            "edge_factor": Parameter(_finite, 16, "edges per row, before duplicates meet"),
            "a": Parameter(_finite, 0.57, "the probability of the upper left quadrant"),
            "b": Parameter(_finite, 0.19, "the probability of the upper right quadrant"),
            "c": Parameter(_finite, 0.19, "the probability of the lower left quadrant"),
            "duplicates": Parameter(str, "sum", "sum to add up edges in one place, first to keep one"),
        },
    ),
    "erdos-renyi": Kind(
        _erdos_renyi,
        "uniformly random pattern",
        {
            "nrows": Parameter(_positive, None, "the number of rows, 1 or more"),
            "ncols": Parameter(_positive, None, "the number of columns, 1 or more"),
            "per_row": Parameter(_finite, 8, "entries per row on average, above 0 and at most ncols"),
        },
    ),
    "banded": Kind(
        _banded,
        "square band matrix with random values",
        {
            "n": Parameter(_positive, None, "the number of rows and columns, 1 or more"),
            "bandwidth": Parameter(_not_negative, 1, "diagonals on each side of the main one, 0 or more"),
            "offsets": Parameter(_offsets, (), "the diagonals, such as -10,0,10, in place of bandwidth"),
        },
    ),
    "fem-blocks": Kind(
        _fem_blocks,
        "3-D 27-point node stencil of dense blocks, as finite elements make",
        {"dims": _GRID, "dof": Parameter(_positive, 3, "unknowns per node, the size of a block, 1 or more")},
    ),
}
