"""Orders of rows and columns with which more of x is in the caches during products with vectors.

``levels`` numbers the rows of a graph level by level from a row of few neighbours, as Cuthill and McKee do: neighbours
get nearby numbers. ``popular`` numbers columns by how often they are used: if a few columns have most of the entries,
these lie next to each other. On the GPU both take a small part of the time of SciPy's reordering on the host.

References
----------
E. Cuthill, J. McKee, "Reducing the bandwidth of sparse symmetric matrices", Proc. 24th ACM National Conference, 1969.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cuda.constants import REORDER_UNSEEN as UNSEEN
from spdist.kernels.cuda.module import C_TYPES, c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray, is_on_gpu

FILE = "spmv/reorder.cu"
MOST_LEVELS = 4096
"""Most levels, of all components together; later rows keep their order, as the host waits for each level."""
NULL = np.intp(0)


def level_names(index: str, pointer: str) -> tuple[str, str, str]:
    """Return the name expressions of the kernels that find a level, sort it and number it."""
    return f"next_level<{index}, {pointer}>", f"level_keys<{index}>", f"number_level<{index}>"


def _types(a: CSR) -> tuple[str, str]:
    return C_TYPES[np.dtype(a.indices.dtype)], C_TYPES[np.dtype(a.indptr.dtype)]


def levels(a: CSR) -> Any:
    """Return the rows of a square matrix level by level, (nrows,) int32; its pattern should be symmetric.

    On the host, SciPy's reverse Cuthill-McKee gives the order.
    """
    if not is_on_gpu(a.data):
        from scipy.sparse.csgraph import reverse_cuthill_mckee

        return reverse_cuthill_mckee(a.to_scipy(), symmetric_mode=False).astype(np.int32, copy=False)
    return _Levels(a).run()


class _Levels:
    """The search for levels on the GPU: one wait for the host per level."""

    def __init__(self, a: CSR) -> None:
        import cupy

        self.xp, self.a = cupy, a
        self.order = cupy.empty(a.nrows, np.int32)
        self.place, self.parent = (cupy.full(a.nrows, UNSEEN, np.int32) for _ in range(2))
        self.next, self.found = cupy.empty(a.nrows, np.int32), cupy.zeros(1, np.int32)
        self.names = level_names(*_types(a))
        self.kernels = module(FILE, self.names)

    def run(self) -> Any:
        """Return the order."""
        counts = self.a.indptr[1:] - self.a.indptr[:-1]
        done = 0
        for _ in range(MOST_LEVELS):
            if done == self.a.nrows:
                return self.order
            start = int(self.xp.where(self.place == UNSEEN, counts, counts.dtype.type(UNSEEN)).argmin())
            self.order[done] = start
            self.place[start] = done
            first, done = done, done + 1
            while first < done and self.levels_left():
                first, done = done, self._level(first, done)
        left = self.xp.flatnonzero(self.place == UNSEEN)
        self.order[done:] = left
        return self.order

    def levels_left(self) -> bool:
        """Whether there may be another level."""
        self.number = getattr(self, "number", 0) + 1
        return self.number < MOST_LEVELS

    def _level(self, first: int, last: int) -> int:
        """Place the level after places ``[first:last)``; return its end."""
        self.found.fill(0)
        search, keys_of, number = self.names
        self.kernels(search, min(ceil_div(last - first, 8), 4096), 256, (
            np.int32(first), np.int32(last), self.a.indptr, self.a.indices, self.order, self.place, self.parent,
            self.next, self.found,
        ))  # fmt: skip
        count = int(self.found[0])
        if count:
            keys = self.xp.empty(count, np.int64)
            self.kernels(keys_of, ceil_div(count, 256), 256, (np.int32(count), self.next, self.parent, keys))
            keys.sort()
            self.kernels(number, ceil_div(count, 256), 256, (
                np.int32(count), np.int32(last), keys, self.order, self.place
            ))  # fmt: skip
        return last + count


def popular(a: CSR) -> Any:
    """Return the columns of a matrix, those with most entries first; int32."""
    xp = np
    if is_on_gpu(a.data):
        import cupy as xp  # type: ignore[no-redef]
    counts = xp.bincount(a.indices, minlength=a.ncols)
    return xp.argsort(-counts, kind="stable").astype(np.int32)


def inverse(order: DeviceArray) -> Any:
    """Return the inverse of an order: the place of each number."""
    xp = np
    if is_on_gpu(order):
        import cupy as xp  # type: ignore[no-redef]
    place = xp.empty_like(order)
    place[order] = xp.arange(len(order), dtype=order.dtype)
    return place


def apply(a: CSR, rows: DeviceArray | None, columns: DeviceArray | None) -> CSR:
    """Return a matrix with the row, and the column, at each place of new orders; None keeps an order.

    Rows are sorted by new columns; on the GPU only rows short enough for sorting to pay.
    """
    place = None if columns is None else inverse(columns)
    if not is_on_gpu(a.data):
        m = a.to_scipy().copy() if rows is None else a.to_scipy()[rows]
        if place is not None:
            m.indices = place[m.indices]
            m.has_sorted_indices = False
        m.sort_indices()
        return CSR(m.indptr.astype(np.int64), m.indices, m.data, a.shape)
    import cupy

    counts = a.indptr[1:] - a.indptr[:-1]
    indptr = cupy.zeros_like(a.indptr)
    indptr[1:] = cupy.cumsum(counts if rows is None else counts[rows])
    out = CSR(indptr, cupy.empty_like(a.indices), cupy.empty_like(a.data), a.shape)
    name = f"reorder_rows<{c_type(np.dtype(a.dtype))}, {', '.join(_types(a))}>"
    if a.nrows:
        module(FILE, (name,))(name, ceil_div(a.nrows, 256), 256, (
            np.int64(a.nrows), a.indptr, a.indices, a.data, NULL if rows is None else rows,
            NULL if place is None else place, indptr, out.indices, out.data,
        ))  # fmt: skip
    return out
