"""Random walks of Markov clustering in the memory of the host or of a GPU, and the steps that they take there."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from spdist import api
from spdist.applications.rows import inflate, stacked
from spdist.applications.walks import DTYPE, Pruning, finished, stochastic
from spdist.kernels.cpu.finished.inflate import thread_bounds
from spdist.kernels.cpu.threads import run_in_threads
from spdist.matrices.csr import CSR, from_scipy
from spdist.matrices.dtypes import index_dtype
from spdist.options import EngineKeywords
from spdist.storage.external_sort import Entries, sort_entries
from spdist.units import parse_bytes

SAMPLE, MANY = 100, 0.3
"""Rows of a sample of an expansion, and the share of them with too little left from which all rows are expanded at once
with all that both rules may keep."""
COPIES = 3
"""Matrices of the size of the walks that a step has at a time."""
SORT_BYTES = 200
"""Bytes of GPU memory for each edge while both directions are sorted."""
BLOCK_ENTRY_BYTES = 32
"""Bytes of GPU memory for each entry that an expansion may have, with what the product needs besides."""
BLOCK_ENTRIES = 1 << 30
"""Most entries of a block of an expansion: offsets are int32."""


class Walks(Protocol):
    """Walks in memory."""

    def take(self, power: float) -> float:
        """Take a step, inflated by `power`; return the chaos."""
        ...

    @property
    def nnz(self) -> int:
        """Entries of the walks."""
        ...

    def on_host(self) -> CSR:
        """Return the walks on the host."""
        ...


def walks_of(edges: Entries, n: int, pre_inflation: float | None, pruning: Pruning, engine: EngineKeywords) -> Walks:
    """Return one step of a walk, where the engine multiplies.

    Parameters
    ----------
    edges : Entries
        Of a graph; of those between two vertices the heaviest counts.
    n : int
        Vertices.
    pre_inflation : float or None
        Power to which weights are raised first.
    pruning : Pruning
    engine : EngineKeywords

    Returns
    -------
    Walks
        On a GPU if the engine is "cuda" and its memory holds them whatever they become.
    """
    if fit_on_gpu(n, len(edges.rows), pruning, engine):
        return GpuWalks(first_walks_on_gpu(edges, n, pre_inflation), pruning, _gpu_limit(engine))
    return HostWalks(first_walks(edges, n, pre_inflation), pruning, engine)


def fit_on_gpu(n: int, edges: int, pruning: Pruning, engine: EngineKeywords) -> bool:
    """Whether the engine is one of GPUs, and walks cannot outgrow half of the current one's memory.

    Raises
    ------
    InputError
        If there is no GPU.
    """
    if engine.get("engine") != "cuda":
        return False
    return max(2 * most_bytes(pruning, n), SORT_BYTES * edges) <= _gpu_limit(engine)


def most_bytes(pruning: Pruning, n: int) -> int:
    """Return the bytes of the walks from `n` vertices that a step has at a time, at the most."""
    return COPIES * pruning.most_entries(n) * (DTYPE.itemsize + index_dtype(n).itemsize)


def _gpu_limit(engine: EngineKeywords) -> int:
    """Return the bytes of GPU memory that may be used."""
    from spdist.inmemory.through_gpu import check_gpu

    check_gpu("cuda")
    from spdist.kernels.streaming.gpu_device import free_memory

    given = engine.get("memory_limit")
    return free_memory() if given is None else min(parse_bytes(given), free_memory())


# -- on the host -------------------------------------------------------------------------------------------------------


def first_walks(edges: Entries, n: int, pre_inflation: float | None) -> CSR:
    """Return one step of a walk.

    Parameters
    ----------
    edges : Entries
        None of negative weight.
    n : int
        Vertices.
    pre_inflation : float or None
        Power to which weights are raised first.

    Returns
    -------
    CSR
        The graph made symmetric by the larger weight, with a loop at each vertex as heavy as its heaviest edge; rows
        sum to 1.
    """
    rows, columns, weights = sort_entries(edges, n, "max")
    m = sp.csr_array((weights, (rows, columns)), shape=(n, n))
    return stochastic(0, from_scipy(m.maximum(sp.csr_array(m.T))), pre_inflation)


class HostWalks:
    """Walks whose products `spdist.matmul` makes, on the CPU or through a GPU that need not hold them."""

    def __init__(self, rows: CSR, pruning: Pruning, engine: EngineKeywords) -> None:
        self.rows, self.pruning, self._engine = rows, pruning, engine

    def take(self, power: float) -> float:
        """Take a step; return the chaos."""
        self.rows, chaos = finished(0, self._expanded(), power)
        return chaos

    @property
    def nnz(self) -> int:
        """Entries of the walks."""
        return self.rows.nnz

    def on_host(self) -> CSR:
        """Return the walks."""
        return self.rows

    def _expanded(self) -> CSR:
        """Return the expansion, cut.

        Usually rows of which too little is left are expanded again. Where a sample says that these are many, all rows
        are expanded once, with all that may be taken in again.
        """
        pruning, walks = self.pruning, self.rows.to_scipy()

        def expand(rows: Any, options: dict[str, Any]) -> CSR:
            return from_scipy(api.matmul(rows, walks, **options, **self._engine))

        if len(pruning.poor(expand(walks[_sample(walks.shape[0])], pruning.of_expansion()))) > MANY * SAMPLE:
            return _kept_in_threads(expand(walks, pruning.of_all()), pruning)
        rows = expand(walks, pruning.of_expansion())
        poor = pruning.poor(rows)
        if not len(poor):
            return rows
        return pruning.replaced(rows, poor, expand(walks[poor], pruning.of_recovery()))


def _sample(n: int) -> Any:
    """Return the numbers of some rows."""
    return np.linspace(0, n - 1, min(SAMPLE, n)).astype(np.int64)


def _kept_in_threads(rows: CSR, pruning: Pruning) -> CSR:
    """Return what both rules keep of rows, each range of rows in a thread of its own."""
    bounds = thread_bounds(rows)
    parts: list[CSR] = [rows] * (len(bounds) - 1)

    def run(i: int) -> None:
        parts[i] = pruning.kept(rows.rows(bounds[i], bounds[i + 1]))

    run_in_threads(len(parts), run)
    return stacked(parts)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def first_walks_on_gpu(edges: Entries, n: int, pre_inflation: float | None) -> CSR:
    """Return one step of a walk on the current GPU; see `first_walks`."""
    import cupy

    rows, columns = (cupy.asarray(each).astype(np.int64) for each in (edges.rows, edges.columns))
    weights = cupy.asarray(edges.values.astype(np.float64, copy=False))
    places = cupy.concatenate([rows * n + columns, columns * n + rows])
    places, weights = _largest(places, cupy.concatenate([weights, weights]))
    rows, columns = places // n, places % n
    fit = (rows != columns) & (weights > 0)
    places, rows, weights = places[fit], rows[fit], weights[fit]
    loops = cupy.ones(n, np.float64)
    with_edges, heaviest = _largest(rows, weights)
    loops[with_edges] = heaviest
    places = cupy.concatenate([places, cupy.arange(n) * (n + 1)])
    order = cupy.argsort(places, kind="stable")
    places = places[order]
    indptr = cupy.searchsorted(places // n, cupy.arange(n + 1)).astype(np.int32)
    columns = (places % n).astype(index_dtype(n))
    whole = CSR(indptr, columns, cupy.concatenate([weights, loops])[order], (n, n))
    inflate(whole, 1.0 if pre_inflation is None else pre_inflation)
    return CSR(whole.indptr, whole.indices, whole.data.astype(DTYPE), whole.shape)


def _largest(places: Any, values: Any) -> tuple[Any, Any]:
    """Return each place once, rising, with the largest of its values, none of which is negative."""
    import cupy

    order = cupy.lexsort(cupy.stack([(values + 0.0).view(np.int64), places]))  # bits of positive floats rise with them
    places, values = places[order], values[order]
    last = cupy.ones(len(places), np.bool_)
    last[:-1] = places[1:] != places[:-1]
    return places[last], values[last]


class GpuWalks:
    """Walks that stay on a GPU: each step multiplies and cuts blocks of rows there.

    Parameters
    ----------
    rows : CSR
        Of CuPy's arrays.
    pruning : Pruning
    limit : int
        Bytes of GPU memory.
    """

    def __init__(self, rows: CSR, pruning: Pruning, limit: int) -> None:
        self.rows, self.pruning, self._limit = rows, pruning, limit

    def take(self, power: float) -> float:
        """Take a step; return the chaos."""
        from spdist.kernels.rowwise_gpu.multiply import multiply

        blocks, chaos, bounds = [], 0.0, self._bounds()
        for start, stop in itertools.pairwise(bounds):
            expanded = multiply(self.rows.rows(start, stop), self.rows, sound_b=start > 0)
            rows, found = finished(start, self.pruning.kept(expanded), power)
            del expanded
            blocks.append(rows)
            chaos = max(chaos, found)
        self.rows = stacked(blocks)
        return chaos

    @property
    def nnz(self) -> int:
        """Entries of the walks."""
        return self.rows.nnz

    def on_host(self) -> CSR:
        """Return the walks on the host."""
        indptr, indices, data = self.rows.indptr, self.rows.indices, self.rows.data  # type: Any, Any, Any
        return CSR(indptr.get().astype(np.int64), indices.get(), data.get(), self.rows.shape)

    def _bounds(self) -> list[int]:
        """Return the bounds of blocks of rows whose expansions fit, whatever they turn out to be."""
        import cupy

        rows = self.rows
        lengths = (rows.indptr[1:] - rows.indptr[:-1]).astype(np.int64)
        products = cupy.zeros(rows.nnz + 1, np.int64)
        cupy.cumsum(lengths[rows.indices], out=products[1:])
        at_rows = products[rows.indptr].get()
        most = np.minimum(np.diff(at_rows), rows.ncols)
        free = self._limit - COPIES * rows.nbytes - most_bytes(self.pruning, rows.nrows) // COPIES
        return blocks_of(most, min(max(free, 0) // BLOCK_ENTRY_BYTES, BLOCK_ENTRIES))


def blocks_of(sizes: Any, limit: int) -> list[int]:
    """Return the bounds of ranges whose sizes add up to no more than a limit; a larger one is alone.

    Examples
    --------
    >>> blocks_of(np.array([3, 4, 9, 1, 1]), 8)
    [0, 2, 3, 5]
    """
    ends, bounds = np.concatenate([[0], np.cumsum(sizes)]), [0]
    while bounds[-1] < len(sizes):
        last = int(np.searchsorted(ends, ends[bounds[-1]] + limit, side="right")) - 1
        bounds.append(max(last, bounds[-1] + 1))
    return bounds
