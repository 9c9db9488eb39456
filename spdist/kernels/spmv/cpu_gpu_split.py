"""Rows of a matrix split between a GPU and this process's cores, for products with vectors.

The GPU multiplies the first rows, the host the others. While the GPU's rows are launched, the elements of x that the
host's rows use are downloaded to page-locked memory; the host's rows of y are uploaded while the GPU multiplies. The
caller's stream waits for the upload, the host only for the download.

The split is fixed when the matrix is prepared: both sides are timed, and the rows are split so that both take equally
long. The split is used only if its product is faster than the GPU alone, by more than repeated timings differ.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.kernels.cuda.pinned import Bytes, array_at, pinned
from spdist.kernels.spmv.prepared import PreparedMatrix
from spdist.kernels.spmv.sell import multiply_gpu
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, DeviceArray

FIRST_SHARE = 1 / 32
"""Share of the matrix for which the host is timed first."""
ROUNDS = 3
"""Most shares for which the host is timed."""
CLOSE = 0.1
"""Relative change of the share below which the host is not timed again."""
ALTERNATIONS = 9
"""Final timings of the split product and of the GPU alone, alternating."""
PRODUCTS = 5
"""Products that one timing averages."""
TRIES = 3
"""Timings of the host for a share; the least counts."""
WIDER = 1.25
"""A range of x is copied whole, not gathered, if it has at most this many times the elements that are used."""


class HostTransfers:
    """Downloads of x and uploads of y for the host's rows, on a separate stream.

    `lock`: held during a product: there is one staging buffer for each direction.
    """

    def __init__(self) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self.lock, self.stream = threading.Lock(), cupy.cuda.Stream(non_blocking=True)
        self._ready, self._arrived, self._returned = (cupy.cuda.Event(disable_timing=True) for _ in range(3))
        self._memory: dict[str, Bytes] = {}

    def download(self, used: Any, caller: Any) -> Any:
        """Start the download of elements of x after `caller`'s earlier work; return the staging buffer for them."""
        staged = self._buffer("x", used.shape, used.dtype)
        self._ready.record(caller)
        self.stream.wait_event(self._ready)
        if used.size:
            down = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(staged.ctypes.data, used.data.ptr, used.nbytes, down, self.stream.ptr)
        self._arrived.record(self.stream)
        return staged

    def rows(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Wait for the download; return a staging buffer for rows of y, whose previous upload has ended by then."""
        self._arrived.synchronize()
        return self._buffer("y", shape, dtype)

    def upload(self, rows: Any, out: Any, caller: Any) -> None:
        """Start the upload of rows of y, which come from `rows`; later work on the stream `caller` waits for it."""
        if rows.size:
            up = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(out.data.ptr, rows.ctypes.data, rows.nbytes, up, self.stream.ptr)
        self._returned.record(self.stream)
        caller.wait_event(self._returned)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return page-locked memory as an array."""
        count = math.prod(shape)
        if name not in self._memory or len(self._memory[name]) < count * dtype.itemsize:
            self.stream.synchronize()  # a failed product may have left a copy in flight to memory that is freed here
            self._memory[name] = pinned(count * dtype.itemsize)
        return array_at(self._memory[name], 0, count, dtype).reshape(shape)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be gone
            self.stream.synchronize()  # the memory is reused


@dataclass(frozen=True, eq=False)
class PreparedSplit:
    """The first rows on the GPU, the others on the host; x and y are on the GPU."""

    device: PreparedMatrix | None  # the rows before `cut`; None to time the host's rows alone
    host: PreparedMatrix  # the other rows; their columns count only the elements of x that they use
    shape: tuple[int, int]  # (nrows, ncols)
    cut: int  # the first row on the host
    # the host's rows use columns of ``[low, high)`` only
    low: int
    high: int
    # (n,) int32 or None: the columns that the host's rows use, on the GPU; None if they use all of ``[low, high)``
    columns: Any = None

    @property
    def matrix(self) -> Any:
        """The matrix of the GPU's rows."""
        return getattr(self.device, "matrix", None)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the matrix, on the GPU and on the host."""
        order = 0 if self.columns is None else int(self.columns.nbytes)
        return self.host.nbytes + order + (0 if self.device is None else self.device.nbytes)

    @property
    def host_elements(self) -> int:
        """Elements of x that are downloaded to the host."""
        return self.high - self.low if self.columns is None else len(self.columns)

    def multiply(self, x: DeviceArray, out: DeviceArray | None, threads: int) -> Any:
        """Return ``a @ x``; raise `InputError` if the stream is being captured."""
        import cupy

        caller = cupy.cuda.get_current_stream()
        if caller.is_capturing():
            raise InputError(
                f"rows from {self.cut:,} on are multiplied by cores of the host, which a CUDA graph cannot capture: "
                f"call products one by one, or prepare the operator by another method than 'hybrid'"
            )
        y = cupy.empty((self.shape[0], *x.shape[1:]), x.dtype) if out is None else out
        transfers = self._transfers
        with transfers.lock:
            used = x[self.low : self.high] if self.columns is None else multiply_gpu.gather(x, self.columns)
            staged = transfers.download(used, caller)
            if self.device is not None:
                self.device.multiply(x, y[: self.cut], threads)
            rows = transfers.rows((self.shape[0] - self.cut, *x.shape[1:]), x.dtype)
            self.host.multiply(staged, rows, threads)
            transfers.upload(rows, y[self.cut :], caller)
        return y

    @functools.cached_property
    def _transfers(self) -> HostTransfers:
        return HostTransfers()

    def describe(self) -> str:
        """Describe the form, for people."""
        form = "none" if self.device is None else self.device.describe()
        return (
            f"{self.cut:,} rows on the GPU ({form}), {self.shape[0] - self.cut:,} on the host "
            f"({self.host.describe()}), which reads {self.host_elements:,} elements of x"
        )


# -- rows of both sides ------------------------------------------------------------------------------------------------


class Cuts:
    """A matrix on the GPU, to be cut between two rows; raises `MatrixError` if it has 2**31 rows or columns."""

    def __init__(self, a: CSR) -> None:
        if max(a.shape) > INT32_MAX:
            raise MatrixError(
                f"method='hybrid' has 32-bit columns, the matrix is {a.nrows:,} x {a.ncols:,}: choose method='csr'"
            )
        self.a, self.offsets = a, _on_host(a.indptr).astype(np.int64)
        self.weights = self.offsets + np.arange(len(self.offsets))  # an entry, and a row to write

    def row(self, share: float) -> int:
        """Return the first row of the last `share` of the matrix; never row 0, so that the GPU has a row."""
        at = int(np.searchsorted(self.weights, (1 - share) * self.weights[-1]))
        return min(max(at, 1), self.a.nrows - 1)

    def share(self, cut: int) -> float:
        """Return the share of the matrix in the rows from `cut` on."""
        return 1 - float(self.weights[cut] / self.weights[-1])

    def before(self, cut: int) -> CSR:
        """Return the rows before a cut, on the GPU, without a copy."""
        a, end = self.a, int(self.offsets[cut])
        return CSR(a.indptr[: cut + 1], a.indices[:end], a.data[:end], (cut, a.ncols))

    def after(self, cut: int) -> CSR:
        """Return the rows from a cut on, in host memory."""
        a, first = self.a, int(self.offsets[cut])
        indices, data = _on_host(a.indices[first:]), _on_host(a.data[first:])
        return CSR(self.offsets[cut:] - first, indices, data, (a.nrows - cut, a.ncols))


def _on_host(array: DeviceArray) -> Any:
    """Return an array as NumPy's."""
    return array.get() if hasattr(array, "get") else array


def renumbered(a: CSR) -> tuple[CSR, int, int, Any]:
    """Return the host's rows with columns that count only the elements of x that they use.

    Returns the rows, the range ``[low, high)`` of columns that they use, and these columns; None if they use all of it.
    """
    uses = np.zeros(a.ncols, bool)
    uses[a.indices] = True
    columns = np.flatnonzero(uses).astype(np.int32)
    low, high = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
    if high - low <= WIDER * len(columns):
        return CSR(a.indptr, (a.indices - low).astype(np.int32), a.data, (a.nrows, high - low)), low, high, None
    place = np.cumsum(uses, dtype=np.int32) - 1
    return CSR(a.indptr, place[a.indices].astype(np.int32), a.data, (a.nrows, len(columns))), low, high, columns


def to_csr(before: CSR, after: CSR, product: PreparedSplit) -> CSR:
    """Join the rows before ``product.cut`` and the rows after it, canonical and in host memory, to one matrix there.

    Columns of `after` are numbered as ``product.host`` numbers them, columns of the result are the whole matrix's.
    """
    columns = product.low + np.arange(product.high - product.low) if product.columns is None else product.columns
    indices = _on_host(columns)[after.indices].astype(before.indices.dtype)
    return CSR(
        np.append(before.indptr, before.indptr[-1] + after.indptr[1:]), np.append(before.indices, indices),
        np.append(before.data, after.data), product.shape,
    )  # fmt: skip


# -- the share ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forms:
    """Functions that prepare rows on either side, and that time the GPU alone."""

    # prepare rows that are in the memory of the GPU, or of the host
    on_gpu: Callable[[CSR], PreparedMatrix]
    on_host: Callable[[CSR], PreparedMatrix]
    alone: Callable[[], float]  # returns the seconds of a product of the whole matrix on the GPU
    dtype: np.dtype[Any]  # dtype of vectors
    threads: int  # threads of the host


def prepare(a: CSR, forms: Forms) -> tuple[PreparedSplit | None, str]:
    """Split a matrix on the GPU between it and the host if the split product is faster.

    During the timings the GPU holds its rows of the split product as well as the whole matrix.
    Returns the split matrix, or None if the GPU alone is as fast; and the reason, for people. Raises as `Cuts` does.
    """
    cuts = Cuts(a)
    if a.nrows < 2 or not a.nnz:
        return None, f"the GPU alone: {a.nrows:,} rows with {a.nnz:,} entries are not to be shared"
    vectors = _vectors(a, forms.dtype)
    alone = forms.alone()

    def host_seconds(share: float) -> float:
        product = _cut(cuts, cuts.row(share), forms, gpu=False)
        return min(_seconds(product, vectors, forms.threads) for _ in range(TRIES))

    fixed = host_seconds(0.0)
    if alone <= fixed:
        return None, f"the GPU alone, {_us(alone)}: copies to the host and back take {_us(fixed)} for a single row"
    share = balance(alone, fixed, host_seconds)
    product = _cut(cuts, cuts.row(share), forms, gpu=True)
    ours, theirs = _alternating(lambda: _seconds(product, vectors, forms.threads), forms.alone)
    split = f"{cuts.share(product.cut):.1%} of the matrix on the host, threads={forms.threads}"
    both, one = _us(statistics.median(ours)), _us(statistics.median(theirs))
    if wins(ours, theirs):
        return product, f"{split}: {both}, the GPU alone {one}"
    return None, f"the GPU alone, {one}: with {split}, {both}, no gain beyond the noise"


def balance(alone: float, fixed: float, host_seconds: Callable[[float], float]) -> float:
    """Return the share of the matrix for which the host takes as long as the GPU takes for the rest.

    `alone`: seconds of the GPU for the whole matrix; a part is assumed to take proportionally less. `fixed`: seconds of
    the host for a single row. `host_seconds`: the host's seconds for a share, with download and upload.
    """
    share = FIRST_SHARE
    for _ in range(ROUNDS):
        slope = max(host_seconds(share) - fixed, 0.0) / share
        before, share = share, (alone - fixed) / (alone + slope)
        if abs(share - before) <= CLOSE * before:
            break
    return share


def wins(ours: list[float], theirs: list[float]) -> bool:
    """Whether the upper quartile of `ours` is below the lower quartile of `theirs`, two values at least in each."""
    return statistics.quantiles(ours, n=4)[2] < statistics.quantiles(theirs, n=4)[0]


def _cut(cuts: Cuts, cut: int, forms: Forms, gpu: bool) -> PreparedSplit:
    """Prepare a matrix cut at a row; the GPU's rows only if `gpu` is set."""
    rows, low, high, columns = renumbered(cuts.after(cut))
    if columns is not None:
        import cupy

        columns = cupy.asarray(columns)
    device = forms.on_gpu(cuts.before(cut)) if gpu else None
    return PreparedSplit(device, forms.on_host(rows), cuts.a.shape, cut, low, high, columns)


def _vectors(a: CSR, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return an x and a place for y, on the GPU."""
    import cupy

    return cupy.ones(a.ncols, dtype), cupy.empty(a.nrows, dtype)


def _seconds(product: PreparedSplit, vectors: tuple[Any, Any], threads: int) -> float:
    """Return the mean seconds of several products, by the clock of the host, which takes part in them."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    product.multiply(*vectors, threads)
    stream.synchronize()
    begin = time.perf_counter()
    for _ in range(PRODUCTS):
        product.multiply(*vectors, threads)
    stream.synchronize()
    return (time.perf_counter() - begin) / PRODUCTS


def _alternating(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Time two products alternately, so that a disturbance affects both."""
    pairs = [(ours(), theirs()) for _ in range(ALTERNATIONS)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"
