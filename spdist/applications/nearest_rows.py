"""The graph of nearest rows of dense data, for instance of cells by their principal components; exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Unpack, get_args

import numpy as np
import scipy.sparse as sp
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from spdist.applications.files import beside, file_format, imported, in_folder
from spdist.applications.operands import check_values, opened
from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.memory import available_memory
from spdist.foundation.units import parse_bytes
from spdist.kernels.dense import nearest, nearest_gpu
from spdist.kernels.dense.by_blocks import THREAD_BYTES, Found, RowBlocks, block_rows, nearest_by_blocks
from spdist.kernels.dense.nearest import DenseMetric
from spdist.kernels.engine import find_engine
from spdist.kernels.streaming.gpu_device import free_memory
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype, is_on_gpu
from spdist.options import FileKeywords, lists_keywords
from spdist.scheduler.execution import worker_process
from spdist.storage.atomic_replace import staged_matrix
from spdist.storage.foreign import versions
from spdist.storage.groups import is_array
from spdist.storage.import_export import parted
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.names.names import AxisNames
from spdist.storage.names.of_matrix import names_for
from spdist.storage.writer import MatrixWriter
from spdist.stores.registry import at, normalise

METRICS: tuple[DenseMetric, ...] = get_args(DenseMetric)
ROOM = 0.5
"""Share of the free memory that a search takes without a limit."""
GPU_WORK = 1 << 37
"""Products of numbers from which a GPU repays its start: half a second of 16 cores."""

logger = logging.getLogger("spdist")


@lists_keywords(FileKeywords)
@versions.watched()
def kneighbors_graph(
    a: Any,
    out: str | Path | None = None,
    *,
    corpus: Any = None,
    n_neighbors: int = 15,
    metric: DenseMetric = "euclidean",
    engine: str = "auto",
    memory_limit: int | str | None = None,
    overwrite: bool = False,
    steal: bool = False,
    **keywords: Unpack[FileKeywords],
) -> Any:
    """Find the nearest rows of each row of dense data, exactly; all pairs are compared by BLAS, block by block.

    Sparse rows are made dense block by block, too: of rows with many columns and few entries, `similarity` finds the
    most similar ones sooner.

    Parameters
    ----------
    a : (n, d) array or sparse matrix; path, URL or StoredMatrix; CuPy array; path of a .npy, .h5ad or another file
        Real and finite. Other types than float32 are compared as float64. A dense array inside a file or a group is
        named by ``::``, as in ``cells.h5ad::obsm/X_pca``.
    out : str or Path, optional
        Where to store the graph, with the names of the rows.
    corpus : as `a`, optional
        (m, d) rows that are searched; by default the rows of `a`, and a row is not its own neighbour.
    n_neighbors : int
        Neighbours of each row.
    metric : {"euclidean", "cosine", "inner_product"}
        Entries are Euclidean distances, 1 minus the cosine, or inner products; the largest products are nearest.
    engine : {"auto", "numba", "cuda"}
        Whether cores or a GPU search, by default a GPU where it repays its start; they find the same graph.
    memory_limit : int or str, optional
        Bytes for blocks of rows, on the host and on a GPU; by default half of what is free, 0.9 on a GPU.
    overwrite, steal
        As in `save`.
    format, header, columns, separator, quotes, allow_nan, orient, dense
        As in `import_matrix`: how to read a file.

    Returns
    -------
    (n, n) or (n, m) csr_array or StoredMatrix
        Float64; in memory without `out`, on the GPU if `a` is a CuPy array. The entries of a row are in the order of
        columns.

    Raises
    ------
    InputError
        If an argument is wrong; nothing has been written.
    MatrixError
        If a value is complex, infinite or not a number.
    MemoryBoundError
        If the limit holds no blocks.

    Examples
    --------
    >>> import numpy as np
    >>> kneighbors_graph(np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]), n_neighbors=1).toarray().round(2)
    array([[0.  , 0.  , 1.  ],
           [0.  , 0.  , 4.24],
           [1.  , 0.  , 0.  ]])
    """
    if metric not in METRICS:
        raise InputError(f"metric={metric!r} is not one of {', '.join(METRICS)}")
    check_count(n_neighbors)
    check_engine(engine, n_neighbors + (corpus is None))
    how = {"overwrite": overwrite, "steal": steal}
    place = in_folder() if out is None else beside(out, "neighbours", how)  # type: ignore[arg-type]
    with _rows_of(a, place, keywords) as rows, _rows_of(rows if corpus is None else corpus, in_folder(), {}) as others:
        itself, (m, ncols) = corpus is None, others.shape
        if rows.shape[1] != ncols:
            raise InputError(f"rows of {rows.shape[1]:,} columns have no neighbours among rows of {ncols:,}")
        if n_neighbors + itself > m:
            raise InputError(f"n_neighbors={n_neighbors}: there are {m:,} rows to search; ask for fewer")
        found = _search(rows, others, int(n_neighbors), itself, metric, memory_limit, engine)
        if out is None:
            parts = [part.to_scipy() for part in found]
            graph = sp.csr_array(sp.vstack(parts, format="csr")) if parts else sp.csr_array((0, m))
            return to_gpu(graph) if is_on_gpu(a) else graph
        names = AxisNames(*(m.names.rows if isinstance(m, StoredMatrix) else None for m in (rows, others)))
        facts = {"provenance": {"command": "neighbors", "metric": metric}}
        with staged_matrix(normalise(out), shape=(rows.shape[0], m), **how) as stage:
            writer = MatrixWriter(stage.url, m, np.dtype(np.float64), facts, names_for(stage.target, names))
            for part in found:
                writer.append(part)
            writer.close()
    return open_matrix(normalise(out))


def to_gpu(graph: sp.csr_array) -> Any:
    """Return a graph as a matrix of CuPy."""
    import cupyx.scipy.sparse as csp

    return csp.csr_matrix(graph)


def check_count(n_neighbors: Any) -> None:
    """Refuse what is no whole number of neighbours."""
    if type(n_neighbors) is bool or not hasattr(n_neighbors, "__index__") or n_neighbors < 1:
        raise InputError(f"n_neighbors={n_neighbors!r} must be a whole number of at least 1")


@contextmanager
def _rows_of(a: Any, place: AbstractContextManager[str], keywords: Mapping[str, object]) -> Iterator[Any]:
    """Yield rows that were checked: an array of two dimensions, SciPy's CSR, or a stored matrix."""
    a = a.get() if is_on_gpu(a) else a
    if isinstance(a, str | Path) and _may_be_dense(a, keywords):
        keywords = {**keywords, "dense": True}
    with imported(a, place, keywords, duplicates="sum") as operand:
        if isinstance(operand, np.ndarray):
            if operand.ndim != 2:
                raise InputError(f"an array of shape {operand.shape} where rows are expected: pass two dimensions")
            if operand.dtype.kind not in "biuf" or not np.isfinite(operand).all():
                raise MatrixError("the rows hold values that are not finite real numbers: correct them")
            yield operand
            return
        matrix = opened(operand, "neighbours")
        check_values(matrix, np.isfinite, "finite real values")
        yield matrix


def _may_be_dense(path: str | Path, keywords: Mapping[str, object]) -> bool:
    """Whether a file's format, or the array of Zarr at a path, is for dense data, too."""
    kind = file_format(path, keywords)
    if kind is not None:
        return "dense" in kind.takes
    url, inner = parted(str(path))
    place = at(f"{normalise(url)}/{inner}".rstrip("/"))
    return place.exists() and is_array(place)


def dense_blocks(m: Any) -> RowBlocks:
    """Return rows as blocks of a dense array.

    `m`: an array of two dimensions, SciPy's CSR, or a stored matrix.
    """
    dtype = np.dtype(np.float32 if m.dtype == np.float32 else np.float64)

    def read(start: int, stop: int) -> Any:
        if isinstance(m, np.ndarray):
            return np.ascontiguousarray(m[start:stop], dtype)
        rows = m.rows(start, stop).to_scipy() if isinstance(m, StoredMatrix) else m[start:stop]
        return rows.toarray().astype(dtype, copy=False)

    return RowBlocks(m.shape, read)


def search_blocks(
    queries: Any, corpus: Any, count: int, metric: DenseMetric, limit: int | str | None, engine: str = "auto"
) -> Iterator[Found]:
    """Yield the nearest rows of a corpus for blocks of queries; both as `dense_blocks` takes them.

    Raises `InputError` if the engine cannot search, and `MemoryBoundError` if the limit holds no blocks.
    """
    check_engine(engine, count)
    ncols = corpus.shape[1]
    on_gpu = _takes_gpu(engine, count, queries.shape[0] * corpus.shape[0] * ncols)
    given = None if limit is None else parse_bytes(limit)
    room = given or int(ROOM * available_memory())
    rows = block_rows(ncols, count, count_cpus() * THREAD_BYTES, room)
    if on_gpu:
        rows = min(rows, block_rows(ncols, count, nearest_gpu.TILE_BYTES, given or free_memory()))
        logger.info("the nearest rows are searched on %s", worker_process.gpu_name())
    search = nearest_gpu.nearest if on_gpu else nearest.nearest
    with threadpool_limits(1, "blas"):  # spdist has a thread for each CPU
        yield from nearest_by_blocks(dense_blocks(queries), dense_blocks(corpus), count, metric, rows, search)


def check_engine(name: str, count: int) -> None:
    """Refuse an engine that does not find as many neighbours of dense rows, or is not there."""
    engine = find_engine(name)
    if engine.mixes:
        raise InputError(f"engine={name!r} does not search dense rows: name one of a GPU or of cores, or 'auto'")
    if engine.uses_gpu:
        worker_process.count_gpus()
        if count > nearest_gpu.MOST_NEIGHBOURS:
            raise InputError(
                f"engine={name!r} finds {nearest_gpu.MOST_NEIGHBOURS} neighbours at most, not {count}: use 'auto'"
            )


def _takes_gpu(name: str, count: int, work: int) -> bool:
    """Whether a GPU searches. `work`: products of numbers."""
    if name != "auto":
        return find_engine(name).uses_gpu
    pays = count <= nearest_gpu.MOST_NEIGHBOURS and work >= GPU_WORK
    return pays and worker_process.gpu_name() is not None


def _search(
    queries: Any, corpus: Any, count: int, itself: bool, metric: DenseMetric, limit: int | str | None, engine: str
) -> Iterator[CSR]:
    """Yield rows of the graph, in order; `itself`: whether queries are the corpus, and no row its own neighbour."""
    for found in search_blocks(queries, corpus, count + itself, metric, limit, engine):
        columns: Any = found.columns
        values: Any = found.distances
        if itself:
            columns, values = without_own(columns, values, found.start)
        order = np.argsort(columns, axis=1)
        columns, values = np.take_along_axis(columns, order, axis=1), np.take_along_axis(values, order, axis=1)
        indptr = np.arange(len(columns) + 1) * count
        data = (-values if metric == "inner_product" else values).ravel()
        yield CSR(indptr, columns.ravel().astype(index_dtype(corpus.shape[0])), data, (len(columns), corpus.shape[0]))


def without_own(columns: Any, values: Any, first: int) -> tuple[Any, Any]:
    """Leave each row out of its own neighbours; the farthest where a tie has dropped it."""
    own = columns == np.arange(first, first + len(columns))[:, None]
    place = np.where(own.any(axis=1), own.argmax(axis=1), columns.shape[1] - 1)
    keep = np.arange(columns.shape[1])[None, :] != place[:, None]
    return columns[keep].reshape(len(columns), -1), values[keep].reshape(len(columns), -1)
