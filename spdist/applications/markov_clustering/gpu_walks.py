"""Random walks that stay on a GPU: each step multiplies and cuts blocks of rows there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from spdist.applications.markov_clustering.pruning import DTYPE, Pruning
from spdist.applications.markov_clustering.rows import inflate, stacked
from spdist.applications.markov_clustering.walks import COPIES, finished, most_bytes
from spdist.foundation.units import parse_bytes
from spdist.kernels.engine import find_engine
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype
from spdist.options import EngineKeywords
from spdist.storage.external_sort import Entries

BLOCK_ENTRY_BYTES = 32
"""Bytes of GPU memory for each entry that an expansion may have, with what the product needs besides."""
BLOCK_ENTRIES = 1 << 30
"""Most entries of a block of an expansion: offsets are int32."""


SORT_BYTES = 200
"""Bytes of GPU memory for each edge while both directions are sorted."""


def fit_on_gpu(n: int, edges: int, pruning: Pruning, engine: EngineKeywords) -> bool:
    """Whether the engine uses GPUs alone, and walks cannot outgrow half of the current GPU's memory.

    Raises `InputError` if there is no GPU.
    """
    chosen = find_engine(engine.get("engine", "auto"))
    if not chosen.uses_gpu or chosen.uses_cpus:
        return False
    return max(2 * most_bytes(pruning, n), SORT_BYTES * edges) <= gpu_limit(engine)


def gpu_limit(engine: EngineKeywords) -> int:
    """Return the bytes of GPU memory that may be used."""
    from spdist.inmemory.through_gpu import check_gpu

    check_gpu(engine.get("engine", ""))
    from spdist.kernels.streaming.gpu_device import free_memory

    given = engine.get("memory_limit")
    return free_memory() if given is None else min(parse_bytes(given), free_memory())


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
    """Return each place once, rising, with the largest of its values, which are not negative."""
    import cupy

    order = cupy.lexsort(cupy.stack([(values + 0.0).view(np.int64), places]))  # bits of positive floats rise with them
    places, values = places[order], values[order]
    last = cupy.ones(len(places), np.bool_)
    last[:-1] = places[1:] != places[:-1]
    return places[last], values[last]


class GpuWalks:
    """Walks that stay on a GPU: each step multiplies and cuts blocks of rows there.

    `rows`: of CuPy's arrays.
    `limit`: bytes of GPU memory.
    """

    place = "gpu"

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
        """Return the bounds of blocks of rows whose expansions fit, even if no products combine."""
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
