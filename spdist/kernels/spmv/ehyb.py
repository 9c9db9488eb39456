"""EHYB: the matrix in parts, each part's share of x in the shared memory of the thread block that multiplies it.

1. Choose the number of parts, so that each part's share of x fits shared memory (`part_count`, equations 1 and 2).
2. Cut the matrix's graph into these parts by METIS, on the host (`partition`).
3. In each part put rows wholly inside first, longest first, then the others, and cut them into slices of 32 rows.
4. In each slice store the entries whose column is in the part as 16-bit places, then the others as 32-bit columns.
5. Multiply: a thread block caches its part's share of x and takes slice after slice.

The paper adds the entries outside of the parts in a second pass; here they follow in the same slice, and y is written
once. Rows keep their numbers for the caller: x is read, and y written, through the order of the parts. A solver may
stay in that order instead (`permuted`).

References
----------
.. [1] C. Chen, "Explicit caching HYB: a new high-performance SpMV framework on GPGPU", arXiv 2204.06666.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.kernels.cuda.constants import EHYB_NO_PLACE, EHYB_THREADS, EhybSlice
from spdist.kernels.cuda.module import C_TYPES, c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.kernels.spmv.sell import build_gpu, multiply_gpu
from spdist.kernels.spmv.sell.format import GPU_LONG, Sell, host
from spdist.kernels.spmv.sell.sell import long_rows
from spdist.kernels.spmv.sell.sell import to_csr as from_sell
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, DeviceArray, is_on_gpu

FILE = "spmv/ehyb.cu"
SHARED_SHARE = 0.45
"""Share of a multiprocessor's shared memory that a part of x may fill, so that two thread blocks fit."""
SLACK = 0.95
"""Share of that memory that a mean part fills: METIS makes parts of unequal size."""


@dataclass(frozen=True, eq=False)
class Ehyb:
    """A square matrix in EHYB, on the GPU."""

    shape: tuple[int, int]  # (nrows, nrows)
    nnz: int
    order: Any  # (nrows,) int32 or None: row at each position; None if x and y are in the order of the parts
    starts: Any  # (nparts + 1,) int32: first position of each part
    ends: Any  # (nparts,) int32: position after the last row in slices of each part; the part's rows in `long` follow
    first_slices: Any  # (nparts + 1,) int32: first slice of each part
    slices: Any  # (nslices, len(EhybSlice)) int64: the words of each slice, as `EhybSlice` names them
    values: Any
    places: Any
    columns: Any
    most: int  # rows of the largest part
    long: Sell  # rows that are too long for a lane

    @property
    def dtype(self) -> Any:
        """Dtype of the stored values."""
        return np.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        order = 0 if self.order is None else 2 * self.order.nbytes  # for x and for y
        parts = self.slices.nbytes + self.values.nbytes + self.places.nbytes + self.columns.nbytes
        return int(parts + order + self.long.nbytes)

    @property
    def outside(self) -> float:
        """Share of the slots whose x is not cached."""
        return len(self.columns) / max(len(self.values), 1)


def part_count(nrows: int, itemsize: int, processors: int, shared: int) -> tuple[int, int]:
    """Return the number of parts and the rows of each, by equations 1 and 2 of C. Chen, arXiv 2204.06666.

    `itemsize`: bytes of an element of x. `processors`: multiprocessors of the device. `shared`: bytes of shared memory
    that a part of x may take.
    """
    rows = min(shared // itemsize, EHYB_NO_PLACE)
    multiple = max(1, ceil_div(nrows, processors * rows))
    parts = multiple * processors
    return parts, ceil_div(nrows, parts)


def has_metis() -> bool:
    """Whether pymetis, which `partition` needs, is installed."""
    return importlib.util.find_spec("pymetis") is not None


def partition(a: CSR, parts: int, side: int = 1) -> Any:
    """Return the part of each row of a square matrix, by METIS; nodes of `side` rows, which divide it, stay together.

    Raises `InputError` if pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError:
        raise InputError("METIS cuts matrices through pymetis: install it, or pass the part of each row") from None
    import scipy.sparse as sp

    indptr, indices = host(a.indptr).astype(np.int64), host(a.indices)
    nodes = a.nrows // side
    if side > 1:  # rows of a node have the same columns, in runs of `side`
        lengths = (indptr[1::side] - indptr[:-1:side]) // side
        starts = np.append(0, np.cumsum(lengths))
        entry = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        indices = indices[np.repeat(indptr[:-1:side], lengths) + side * entry] // side
        indptr = starts
    graph = sp.csr_matrix((np.ones(len(indices), np.int8), indices, indptr), shape=(nodes, nodes))
    graph = graph + graph.T
    graph.setdiag(0)
    graph.eliminate_zeros()
    _, part = pymetis.part_graph(parts, pymetis.CSRAdjacency(graph.indptr, graph.indices))
    return np.repeat(np.asarray(part, np.int32), side)


def build(a: CSR, *, part: DeviceArray | None = None, dtype: npt.DTypeLike | None = None) -> Ehyb:
    """Convert a square matrix on the GPU to EHYB; its entries come in any order, duplicates count twice.

    `part`: (nrows,): part of each row, numbered from 0; by default METIS chooses.
    Raises `MatrixError` if the matrix is not square, or a part is larger than shared memory.
    """
    import cupy

    if a.nrows != a.ncols or a.nrows > INT32_MAX:
        raise MatrixError(f"EHYB is for square matrices of less than 2**31 rows, this is {a.nrows:,} x {a.ncols:,}")
    if not is_on_gpu(a.data):
        raise MatrixError("EHYB is for matrices on the GPU")
    stored, limit = np.dtype(a.dtype if dtype is None else dtype), shared_limit()
    if part is None:
        share = int(SHARED_SHARE * SLACK * limit)
        parts, _ = part_count(a.nrows, a.dtype.itemsize, processors(), share)
        side = build_gpu.Builder(a, 32, 0).find_block()
        part = partition(a, parts, side if a.nrows % side == 0 else 1)
    part = cupy.asarray(part, np.int32)
    sizes = host(cupy.bincount(part)) if a.nrows else np.zeros(1, np.int64)
    if int(sizes.max()) > min(limit // a.dtype.itemsize, EHYB_NO_PLACE):
        raise MatrixError(
            f"a part of {int(sizes.max()):,} rows does not fit {limit:,} bytes of shared memory: use more parts"
        )
    return _Build(a, part, sizes, stored).run()


def shared_limit() -> int:
    """Return the bytes of shared memory that a thread block may have."""
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(97, cupy.cuda.runtime.getDevice())) - 1024


def processors() -> int:
    """Return the multiprocessors of the current device."""
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(16, cupy.cuda.runtime.getDevice()))


class _Build:
    """The steps of `build` once the parts are known."""

    def __init__(self, a: CSR, part: DeviceArray, sizes: DeviceArray, dtype: np.dtype[Any]) -> None:
        import cupy

        self.xp, self.a, self.part, self.sizes, self.dtype = cupy, a, part, sizes, dtype
        self.types = f"{C_TYPES[np.dtype(a.indices.dtype)]}, {C_TYPES[np.dtype(a.indptr.dtype)]}"
        self.lengths = (a.indptr[1:] - a.indptr[:-1]).astype(np.int64)

    def run(self) -> Ehyb:
        """Return the matrix."""
        xp, a = self.xp, self.a
        inside = xp.zeros(a.nrows, np.int32)
        if a.nnz:
            self._launch(f"ehyb_count<{self.types}>", a.nrows, (
                np.int64(a.nrows), a.indptr, a.indices, self.part, inside
            ))  # fmt: skip
        near, is_long = inside.astype(np.int64), self.lengths > GPU_LONG
        far = self.lengths - near
        order = self._order(near, far, is_long)
        starts = np.append(0, np.cumsum(self.sizes)).astype(np.int32)
        ends = starts[1:] - host(xp.bincount(self.part[is_long], minlength=len(self.sizes))).astype(np.int32)
        first, owner, first_slices = _cut(starts, ends)
        near_width = self._widths(near[order], first, ends[owner])
        far_width = self._widths(far[order], first, ends[owner])
        slices = xp.empty((len(first), len(EhybSlice)), np.int64)
        totals = []
        widths = {
            EhybSlice.VALUES_AT: near_width + far_width,
            EhybSlice.OUTER_AT: far_width,
            EhybSlice.INNER_AT: near_width,
        }
        for word, width in widths.items():
            sums = xp.cumsum(32 * width)
            slices[:, int(word)] = sums - 32 * width
            totals.append(int(sums[-1]) if len(first) else 0)
        slices[:, int(EhybSlice.ROWS)] = xp.asarray(first.astype(np.int64)) | near_width << 32 | far_width << 48
        dtypes = (self.dtype, np.int32, np.uint16)
        values, columns, places = (xp.empty(total, dtype) for total, dtype in zip(totals, dtypes, strict=True))
        device = {"starts": xp.asarray(starts), "ends": xp.asarray(ends), "owner": xp.asarray(owner.astype(np.int32))}
        if len(first):
            name = f"ehyb_fill<{c_type(np.dtype(a.dtype))}, {c_type(self.dtype)}, {self.types}>"
            self._launch(name, len(first), (
                np.int64(len(first)), a.indptr, a.indices, a.data, self.part, order, self._places(order),
                device["starts"], device["ends"], device["owner"], slices, values, places, columns,
            ))  # fmt: skip
        most = int(self.sizes.max())
        return Ehyb(
            a.shape, a.nnz, order, device["starts"], device["ends"], xp.asarray(first_slices), slices, values, places,
            columns, most, long_rows(a, self.dtype),
        )  # fmt: skip

    def _order(self, near: DeviceArray, far: DeviceArray, is_long: DeviceArray) -> Any:
        """Return the rows part by part: rows wholly inside, longest first; other rows; rows in CSR."""
        kind = self.xp.where(is_long, 2, (far > 0).astype(np.int64))
        length = self.xp.where(far > 0, far, near)
        key = (self.part.astype(np.int64) * 3 + kind) << 32 | (INT32_MAX - length)
        return self.xp.argsort(key, kind="stable").astype(np.int32)

    def _places(self, order: DeviceArray) -> Any:
        place = self.xp.empty_like(order)
        place[order] = self.xp.arange(len(order), dtype=np.int32)
        return place

    def _widths(self, lengths: DeviceArray, first: DeviceArray, ends: DeviceArray) -> Any:
        """Return the longest of each slice's rows."""
        xp = self.xp
        lanes = xp.asarray(first.astype(np.int64))[:, None] + xp.arange(32)
        within = lanes < xp.asarray(ends.astype(np.int64))[:, None]
        return xp.where(within, lengths[xp.minimum(lanes, max(len(lengths) - 1, 0))], 0).max(axis=1)

    def _launch(self, name: str, warps: int, arguments: tuple[Any, ...]) -> None:
        module(FILE, (name,))(name, ceil_div(warps, 8), 256, arguments)


def _cut(starts: DeviceArray, ends: DeviceArray) -> tuple[Any, Any, Any]:
    """Return first positions and parts of the slices, and the first slice of each part."""
    counts = -(-(ends - starts[:-1]) // 32)
    first_slices = np.append(0, np.cumsum(counts)).astype(np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = starts[:-1][owner] + 32 * (np.arange(len(owner)) - first_slices[:-1][owner])
    return first.astype(np.int32), owner, first_slices


def multiply_name(value: str, vector: str, alone: bool) -> str:
    """Return the name expression of a product's kernel; `alone` if x has no other columns."""
    return f"ehyb_multiply<{value}, {vector}, {str(alone).lower()}>"


def multiply(a: Ehyb, x: Any, out: Any = None) -> Any:
    """Return ``a @ x`` for x on the GPU, (nrows,) or (nrows, k) in C order; columns are multiplied one by one."""
    import cupy

    y = cupy.empty(x.shape, x.dtype) if out is None else out
    stride = x.shape[1] if x.ndim == 2 else 1
    name = multiply_name(c_type(a.dtype), c_type(np.dtype(x.dtype)), stride == 1)
    kernels, shared = module(FILE, (name,)), a.most * x.dtype.itemsize
    if len(a.slices):
        for k in range(stride):
            kernels(name, len(a.ends), EHYB_THREADS, (
                np.int64(stride), a.starts, a.ends, a.first_slices, np.intp(0) if a.order is None else a.order,
                a.slices, a.values, a.places, a.columns, x.data.ptr + k * x.dtype.itemsize,
                y.data.ptr + k * x.dtype.itemsize,
            ), shared, early=True)  # fmt: skip
    if len(a.long.long_rows):
        multiply_gpu.multiply(a.long, x, y)
    return y


def permuted(a: Ehyb) -> Ehyb:
    """Return the matrix for x and y in the order of the parts, which `permute` and `unpermute` convert to and from."""
    if a.order is None:
        return a
    import cupy

    place = cupy.empty_like(a.order)
    place[a.order] = cupy.arange(len(a.order), dtype=np.int32)
    columns = cupy.where(a.columns >= 0, place[cupy.maximum(a.columns, 0)], -1).astype(np.int32)
    long = replace(a.long, long_rows=place[a.long.long_rows], long_indices=place[a.long.long_indices])
    return replace(a, order=None, columns=columns, long=long)


def permute(a: Ehyb, x: DeviceArray) -> Any:
    """Return the rows of x, which are in the caller's order, in the order of the parts of `a`."""
    return x[a.order]


def unpermute(a: Ehyb, x: DeviceArray) -> Any:
    """Return the rows of x in the caller's order; undoes `permute`."""
    import cupy

    out = cupy.empty_like(x)
    out[a.order] = x
    return out


def to_csr(a: Ehyb) -> CSR:
    """Return the matrix on the host as canonical CSR, in the order of the parts if `a` is."""
    import scipy.sparse as sp

    slices, starts = host(a.slices), host(a.starts).astype(np.int64)
    order = np.arange(a.shape[0]) if a.order is None else host(a.order)
    owner = np.repeat(np.arange(len(host(a.ends))), np.diff(host(a.first_slices)))
    rows = slices[:, EhybSlice.ROWS]
    near, far = rows >> 32 & 0xFFFF, rows >> 48
    position = np.repeat(rows & 0xFFFFFFFF, 32 * (near + far)) + np.arange(len(a.values)) % 32
    runs = 32 * np.stack([near, far], axis=1).ravel()  # slots inside and outside, slice by slice
    inner = np.repeat(np.arange(len(runs)) % 2 == 0, runs)

    place, columns = host(a.places), np.empty(len(a.values), np.int64)
    base = np.repeat(starts[owner], 32 * near)
    columns[inner] = np.where(place == EHYB_NO_PLACE, -1, order[np.minimum(base + place, len(order) - 1)])
    columns[~inner] = host(a.columns)
    kept = columns >= 0
    m = sp.coo_matrix((host(a.values)[kept], (order[position[kept]], columns[kept])), shape=a.shape).tocsr()
    long = from_sell(a.long)
    m = m if not long.nnz else (m + long.to_scipy())
    m.sum_duplicates()
    return CSR(m.indptr.astype(np.int64), m.indices, m.data, a.shape)
