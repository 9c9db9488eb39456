"""Nearest neighbours of sparse and of dense rows, with the interface of scikit-learn's `KNeighborsTransformer`; exact.

Cosines are computed as scikit-learn computes them: rows are scaled to length 1 in their own dtype, then multiplied. Its
brute force finds the same distances, to the last bit, of sparse rows in memory.

Needs scikit-learn. Nothing else of spdist imports this module.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.preprocessing import normalize
from sklearn.utils.validation import check_is_fitted, validate_data

from spdist.api import products as api
from spdist.applications.nearest_rows import check_count, without_own
from spdist.applications.similarity import METRICS
from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.other_objects import refuse_other_objects
from spdist.foundation.threads import run_in_threads
from spdist.interop.dask_arrays import from_dask, from_hdf5, is_dask_array
from spdist.jobs.operands import open_operand, place_of
from spdist.matrices.csr import from_scipy
from spdist.storage.matrix import StoredMatrix
from spdist.storage.writer import MatrixWriter

MODES = "distance", "connectivity", "similarity"

PART_ENTRIES = 1 << 22
"""Entries of a stored matrix read at a time."""
PART_ROWS = 1 << 11
"""Rows from which another thread pays for its start."""
DENSE_ENTRIES = 1 << 24
"""Similarities held at a time while rows with too few neighbours are filled."""


class TopNTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Find the nearest neighbours of rows by cosine similarity or inner product; of dense rows by distance, too.

    The similarities of all pairs are computed block by block and cut to the largest of each row at once; the matrix of
    all of them is never whole. Dense arrays, for instance principal components, are searched as dense ones. It stands
    in for `sklearn.neighbors.KNeighborsTransformer`, for instance before a classifier with ``metric="precomputed"``,
    and in ``scanpy.pp.neighbors(transformer=...)``.

    Parameters
    ----------
    n_neighbors : int
        Neighbours of each row. With mode "distance" there is one more, as each row is its own nearest neighbour when it
        is transformed with the rows it was fitted on.
    mode : {"distance", "connectivity", "similarity"}
        Whether entries are distances (1 minus the cosine, or Euclidean ones), ones, or similarities.
    metric : {"cosine", "inner_product", "euclidean"}
        By Euclidean distance, sparse and stored rows are made dense, block by block.
    threshold : float, optional
        Least similarity. Rows then have as many neighbours as reach it, up to the number asked for. Without, each row
        has that number: where fewer rows have something in common with it, others follow with similarity 0.
    engine, memory_limit
        As in `spdist.multiply`.
    folder : str or Path, optional
        Where the graph of stored rows lies while it is made; by default the folder for temporary files.

    Attributes
    ----------
    n_features_in_, n_samples_fit_ : int

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from spdist.neighbors import TopNTransformer
    >>> rows = sp.csr_array([[1.0, 0.0], [2.0, 0.1], [0.0, 3.0]])
    >>> TopNTransformer(1).fit_transform(rows).toarray().round(2)
    array([[0.  , 0.  , 0.  ],
           [0.  , 0.  , 0.  ],
           [0.  , 0.95, 0.  ]])
    """

    def __init__(
        self, n_neighbors: int = 5, *, mode: str = "distance", metric: str = "cosine", threshold: float | None = None,
        engine: str = "auto", memory_limit: int | str | None = None, folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.n_neighbors, self.mode, self.metric = n_neighbors, mode, metric
        self.threshold, self.engine, self.memory_limit, self.folder = threshold, engine, memory_limit, folder

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803 (scikit-learn's name)
        """Take the rows to search for neighbours.

        Parameters
        ----------
        X : (n_samples, n_features) sparse or dense matrix, path, URL, StoredMatrix, Dask array, X of a backed AnnData
            Stored matrices, Dask arrays and matrices of backed AnnData may be larger than memory.
        y : ignored

        Returns
        -------
        self

        Raises
        ------
        InputError
            If a parameter has an invalid value.
        """
        self._check_parameters()
        self._rows = self._taken(X, reset=True)
        self.n_samples_fit_ = self._rows.shape[0]
        return self

    def transform(self, X: Any) -> sp.csr_matrix:  # noqa: N803
        """Find the neighbours of rows among the rows given to `fit`.

        Parameters
        ----------
        X : (n_samples, n_features)
            As for `fit`.

        Returns
        -------
        (n_samples, n_samples_fit) csr_matrix
            The entries of a row are ordered from the nearest neighbour to the farthest.

        Raises
        ------
        ValueError
            If there are fewer rows than neighbours asked for.
        """
        check_is_fitted(self)
        return self._graph(self._taken(X, reset=False), is_fit=False)

    def fit_transform(self, X: Any, y: Any = None) -> sp.csr_matrix:  # type: ignore[override]  # noqa: N803
        """Fit, and find the neighbours of the same rows; by cosine each row is its own nearest neighbour.

        Parameters
        ----------
        X : (n_samples, n_features)
            As for `fit`.
        y : ignored

        Returns
        -------
        (n_samples, n_samples) csr_matrix
        """
        self.fit(X)
        return self._graph(self._rows, is_fit=True)

    def kneighbors(
        self,
        X: Any = None,  # noqa: N803
        n_neighbors: int | None = None,
        return_distance: bool = True,
    ) -> Any:
        """Find the neighbours of new rows, or of the fitted ones, as scikit-learn's searches return them.

        Parameters
        ----------
        X : (n_samples, n_features), optional
            As for `fit`; by default the fitted rows, and none is its own neighbour.
        n_neighbors : int, optional
            By default the transformer's.
        return_distance : bool
            Whether to return distances too; similarities if the mode is "similarity".

        Returns
        -------
        distances : (n_samples, n_neighbors) array
        columns : (n_samples, n_neighbors) array
            Numbers of the fitted rows, from the nearest on.

        Raises
        ------
        ValueError
            If there are fewer rows than neighbours asked for.
        InputError
            If a threshold leaves a row with fewer neighbours.
        """
        check_is_fitted(self)
        is_fit = X is None
        rows = self._rows if is_fit else self._taken(X, reset=False)
        asked = int(self.n_neighbors if n_neighbors is None else n_neighbors)
        columns, values = self._nearest(rows, asked + is_fit, is_fit=is_fit)
        if is_fit:
            columns, values = without_own(columns, values, 0)
        if (columns < 0).any():
            row = int((columns < 0).any(axis=1).argmax())
            raise InputError(f"threshold={self.threshold} leaves row {row:,} with fewer neighbours: use transform")
        return (values, columns) if return_distance else columns

    @property
    def _n_features_out(self) -> int:
        return int(self.n_samples_fit_)

    def __sklearn_tags__(self) -> Any:
        tags: Any = super().__sklearn_tags__()  # type: ignore[no-untyped-call]
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _check_parameters(self) -> None:
        for name, known in (("mode", MODES), ("metric", (*METRICS, "euclidean"))):
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.mode == "distance" and self.metric == "inner_product":
            raise InputError("mode='distance' is 1 minus the cosine: with an inner product choose mode='similarity'")
        if self.metric == "euclidean" and (self.mode == "similarity" or self.threshold is not None):
            raise InputError("mode='similarity' and threshold are of similarities: metric='euclidean' has distances")
        check_count(self.n_neighbors)

    def _taken(self, x: Any, *, reset: bool) -> Any:
        """Return rows as CSR in memory; stored rows stay stored."""
        place = place_of(from_hdf5(x))
        if is_dask_array(place) or isinstance(place, str | Path | StoredMatrix):
            found = place if is_dask_array(place) else open_operand(place)
            if found.dtype.kind != "f":
                raise MatrixError(f"similarities of stored rows need values of float32 or float64, not {found.dtype}")
            if reset:
                self.n_features_in_ = found.shape[1]
            elif found.shape[1] != self.n_features_in_:
                raise ValueError(f"X has {found.shape[1]} features, but {self.n_features_in_} were fitted")
            return found
        if not hasattr(x, "__array__") and not isinstance(x, list):  # scikit-learn takes these
            refuse_other_objects(x)
        checked = validate_data(self, x, reset=reset, accept_sparse="csr", dtype=[np.float64, np.float32])
        is_dense = isinstance(checked, np.ndarray) and self.threshold is None
        return checked if is_dense else sp.csr_array(checked)

    def _graph(self, rows: Any, *, is_fit: bool) -> sp.csr_matrix:
        """Return the neighbours of some rows."""
        columns, values = self._nearest(rows, int(self.n_neighbors) + (self.mode == "distance"), is_fit=is_fit)
        there = columns >= 0
        indptr = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
        chosen = slice(None) if there.all() else there  # a mask that selects all would copy them
        values = np.ones_like(values) if self.mode == "connectivity" else values
        parts = values[chosen].ravel().astype(rows.dtype, copy=False), columns[chosen].ravel(), indptr
        return sp.csr_matrix(parts, shape=(rows.shape[0], self.n_samples_fit_))

    def _nearest(self, rows: Any, asked: int, *, is_fit: bool) -> tuple[Any, Any]:
        """Return the neighbours of each row, nearest first, and distances, or similarities if these are the mode.

        Returns `columns, values`: (rows, asked); -1 in `columns` marks an empty slot.
        """
        if asked > self.n_samples_fit_:
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {asked}, n_samples_fit = "
                f"{self.n_samples_fit_}, n_samples = {rows.shape[0]}"
            )
        are_dense = isinstance(rows, np.ndarray) and isinstance(self._rows, np.ndarray)
        if are_dense or self.metric == "euclidean":
            return self._nearest_dense(rows, asked, is_fit=is_fit)
        is_cosine = self.metric == "cosine"
        with ExitStack() as stack:
            a, b, folder = self._operands(rows, stack, normalize if is_cosine else None)
            found = _Similarities(a, b, is_fit and is_cosine, folder)
            columns, values = found.nearest(asked, self.threshold, {"engine": self.engine}, self.memory_limit)
        return columns, np.maximum(1 - values, 0) if self.mode == "distance" else values

    def _nearest_dense(self, rows: Any, asked: int, *, is_fit: bool) -> tuple[Any, Any]:
        """Return what `_nearest` does of rows that are dense, or made dense block by block."""
        from spdist.applications.nearest_rows import search_blocks  # loads Numba

        if is_dask_array(rows) or is_dask_array(self._rows):
            raise InputError("Euclidean distances of a Dask array: spdist.from_dask(x, 'A.zarr') stores it")
        metric: Any = self.metric
        columns = np.empty((rows.shape[0], asked), np.int64)
        values = np.empty(columns.shape)
        for found in search_blocks(rows, self._rows, asked, metric, self.memory_limit, self.engine):
            mine = slice(found.start, found.start + len(found.columns))
            columns[mine], values[mine] = found.columns, found.distances
        if metric == "inner_product":
            return columns, -values
        if metric == "euclidean" and rows.dtype == self._rows.dtype == np.float32:
            values = _rounded(values)
        if is_fit:
            _put_first(columns, values, 0, 0.0)
        return columns, 1 - values if self.mode != "distance" and metric == "cosine" else values

    def _operands(self, rows: Any, stack: ExitStack, change: Callable[[Any], Any] | None) -> tuple[Any, Any, str]:
        """Return both operands in memory, or both stored in a folder that is removed at the end.

        `change`: what is made of their rows first.
        """
        pair = {id(m): sp.csr_array(m) if isinstance(m, np.ndarray) else m for m in (rows, self._rows)}
        if not any(isinstance(m, StoredMatrix) or is_dask_array(m) for m in pair.values()):
            made = {number: m if change is None else change(m) for number, m in pair.items()}
            return made[id(rows)], made[id(self._rows)], ""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spdist-neighbors-", dir=self.folder))
        stored = {
            number: _stored(m, f"{folder}/{place}.zarr", change) for place, (number, m) in enumerate(pair.items())
        }
        return stored[id(rows)], stored[id(self._rows)], folder


class _Similarities:
    """The largest similarities between each row of A and the rows of B.

    `a, b`: both in memory or both stored.
    `is_self`: whether row i of A is row i of B, and its own nearest neighbour.
    `folder`: where the graph of stored rows is written.
    """

    def __init__(self, a: Any, b: Any, is_self: bool, folder: str) -> None:
        self.a, self.b, self.is_self, self.folder = a, b, is_self, folder

    def nearest(
        self, count: int, threshold: float | None, engine: dict[str, Any], limit: int | str | None
    ) -> tuple[Any, Any]:
        """Return the columns of the largest similarities of each row, from the largest on, and the similarities.

        Returns `columns, values`: (nrows, count); -1 in `columns` marks an empty slot.
        """
        least = threshold if threshold is not None else float(np.finfo(self.a.dtype).tiny)
        options = {"top_n": count, "threshold": least, **engine}
        columns, values = _by_size(self._product(options, limit), count)
        if threshold is None:
            self._complete(columns, values)
        if self.is_self:
            _over_rows(lambda i, j: _put_first(columns[i:j], values[i:j], i, 1.0), len(columns))
        return columns, values

    def _product(self, options: dict[str, Any], limit: int | str | None) -> Any:
        if not isinstance(self.a, StoredMatrix):
            return api.matmul(self.a, self.b.T.tocsr(), memory_limit=limit, **options)
        place = f"{self.folder}/graph.zarr"
        api.multiply(self.a, self.b, place, transpose_b=True, memory_limit=limit, **options)
        return open_operand(place).to_scipy()

    def _complete(self, columns: Any, values: Any) -> None:
        """Fill rows with too few positive similarities: by zeros, or by the largest others if any is negative."""
        short = np.flatnonzero(columns[:, -1] < 0)
        if not len(short):
            return
        if min(_least_value(self.a), _least_value(self.b)) >= 0:
            _add_zeros(columns, values, short, self.b.shape[0])
            return
        if isinstance(self.a, StoredMatrix):
            raise InputError(
                f"row {short[0]:,} has fewer neighbours of positive similarity than asked for, and negative values are "
                f"among the stored ones: ask for fewer n_neighbors, or pass threshold"
            )
        right, count = self.b.T.tocsr(), columns.shape[1]
        step = max(1, DENSE_ENTRIES // self.b.shape[0])
        for part in (short[i : i + step] for i in range(0, len(short), step)):
            all_of = (self.a[part] @ right).toarray()
            columns[part] = np.argsort(-all_of, axis=1, kind="stable")[:, :count]
            values[part] = np.take_along_axis(all_of, columns[part], axis=1)


def _stored(m: Any, place: str, change: Callable[[Any], Any] | None) -> StoredMatrix:
    """Return rows as a stored matrix, changed; without a change, stored rows stay where they are."""
    if not isinstance(m, StoredMatrix) and not is_dask_array(m):
        return api.save(place, m if change is None else change(m))
    rows: StoredMatrix = m if isinstance(m, StoredMatrix) else from_dask(m, f"{place}.unchanged")
    if change is None:
        return rows
    writer = MatrixWriter(place, rows.ncols, rows.dtype, {})
    for start, stop, _ in rows.row_blocks(PART_ENTRIES):
        writer.append(from_scipy(change(rows.rows(start, stop).to_scipy())))
    return writer.close()


def _least_value(m: Any) -> float:
    """Return the smallest value of rows in memory or stored."""
    if not isinstance(m, StoredMatrix):
        return float(m.data.min(initial=math.inf))
    blocks = (m.rows(start, stop) for start, stop, _ in m.row_blocks(PART_ENTRIES))
    return min((float(rows.data.min(initial=math.inf)) for rows in blocks), default=math.inf)


def _by_size(found: Any, count: int) -> tuple[Any, Any]:
    """Return columns and values of each row, largest value first, padded with columns of -1."""
    rows = sp.csr_array(found)
    columns, values = np.empty((rows.shape[0], count), np.int64), np.empty((rows.shape[0], count), rows.dtype)

    def sort(first: int, last: int) -> None:
        """Sort some rows."""
        there = np.arange(count) < np.diff(rows.indptr[first : last + 1])[:, None]
        entries = slice(rows.indptr[first], rows.indptr[last])
        mine, sizes = np.full(there.shape, -1, np.int64), np.full(there.shape, -np.inf, rows.dtype)
        mine[there], sizes[there] = rows.indices[entries], rows.data[entries]
        order = np.argsort(-sizes, axis=1, kind="stable")  # equal values stay in the order of their columns
        columns[first:last], values[first:last] = (np.take_along_axis(each, order, axis=1) for each in (mine, sizes))
        values[first:last][columns[first:last] < 0] = 0

    _over_rows(sort, rows.shape[0])
    return columns, values


def _over_rows(work: Callable[[int, int], None], nrows: int) -> None:
    """Call ``work(first, last)`` for ranges of rows, in threads if they are many."""
    count = max(1, min(count_cpus(), nrows // PART_ROWS))
    cuts = np.linspace(0, nrows, count + 1).astype(np.int64).tolist()
    run_in_threads(count, lambda part: work(cuts[part], cuts[part + 1]))


def _add_zeros(columns: Any, values: Any, short: Any, ncols: int) -> None:
    """Fill rows up with the first columns that they do not have; their similarity is 0."""
    count = columns.shape[1]
    candidates = min(2 * count, ncols)
    mine = columns[short]
    taken = np.zeros((len(short), candidates), bool)
    low = (mine >= 0) & (mine < candidates)
    taken[np.nonzero(low)[0], mine[low]] = True
    free = np.argsort(taken, axis=1, kind="stable")  # columns that are not taken come first, in their order
    missing = mine < 0
    rank = np.cumsum(missing, axis=1) - 1
    mine[missing] = np.take_along_axis(free, np.maximum(rank, 0), axis=1)[missing]
    columns[short] = mine


def _rounded(distances: Any) -> Any:
    """Round Euclidean distances of float32 rows as scikit-learn does: first their squares, then the roots."""
    squares = np.square(distances)
    return np.sqrt(squares.astype(np.float32)) if squares.max(initial=0.0) < np.finfo(np.float32).max else distances


def _put_first(columns: Any, values: Any, first: int, own_value: float) -> None:
    """Make each row from `first` on its own nearest neighbour, with `own_value`, even if a tie has dropped it."""
    columns[:, 1:], values[:, 1:] = without_own(columns, values, first)
    columns[:, 0], values[:, 0] = np.arange(first, first + len(columns)), own_value
