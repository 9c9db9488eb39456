"""Time, weigh and check a product on the GPU; what the benchmark's commands share."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cupy
import cupyx
import cupyx.scipy.sparse
import numpy as np
from cusparse import ALGORITHMS, Cusparse, CusparseError

from spdist.matrices.csr import CSR

Product = Callable[[], CSR]

TOLERANCE = {"f": 1e-5, "d": 1e-12, "F": 1e-5, "D": 1e-12}
"""Greatest error allowed, in units of the same sum over absolute values; by the character of the dtype."""
AT_ONCE = 1 << 25
"""Values compared at a time, so that the check of a large C needs little memory."""


def on_device(m: CSR, dtype: Any) -> CSR:
    """Copy a matrix to the GPU with 32-bit indices; complex values get an imaginary part from the matrix itself."""
    values = m.data.astype(dtype)
    if np.issubdtype(dtype, np.complexfloating):
        values += (1j * m.data[::-1]).astype(dtype)
    return CSR(*(cupy.asarray(x) for x in (m.indptr.astype(np.int32), m.indices.astype(np.int32), values)), m.shape)


def on_host(m: CSR) -> CSR:
    """Copy a matrix from the GPU."""
    return CSR(m.indptr.get(), m.indices.get(), m.data.get(), m.shape)


def page_locked(m: CSR, dtype: Any) -> CSR:
    """Copy a matrix of the host's to page-locked memory, with values of a dtype."""
    arrays = []
    for array, kind in ((m.indptr, np.int32), (m.indices, np.int32), (m.data, dtype)):
        arrays.append(cupyx.empty_pinned(len(array), kind))
        arrays[-1][:] = array
    return CSR(*arrays, m.shape)


def is_on_host(m: CSR) -> bool:
    """Whether a product has come back to the host."""
    return isinstance(m.data, np.ndarray)


def cupyx_matrix(m: CSR) -> Any:
    """Return CuPy's matrix on the same arrays."""
    return cupyx.scipy.sparse.csr_matrix((m.data, m.indices, m.indptr), shape=m.shape)


def with_values(m: CSR, data: Any) -> CSR:
    """Return a matrix of the same pattern."""
    return CSR(m.indptr, m.indices, data, m.shape)


def clock(product: Product) -> float:
    """Return the milliseconds from the call to the last kernel's end."""
    device = cupy.cuda.Device()
    device.synchronize()
    begin = time.perf_counter()
    c = product()
    device.synchronize()
    seconds = time.perf_counter() - begin
    del c
    return 1e3 * seconds


def copy_bandwidth(nbytes: int = 1 << 30, runs: int = 10) -> float:
    """Return bytes a second, read and written, of a copy within the GPU's memory."""
    source, target = cupy.zeros(nbytes, np.uint8), cupy.zeros(nbytes, np.uint8)
    stream, times = cupy.cuda.get_current_stream(), []
    for _ in range(runs):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        target.data.copy_from_device_async(source.data, nbytes, stream)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    return 2 * nbytes / (1e-3 * float(np.median(times)))


def pcie_bandwidth(nbytes: int = 1 << 28, runs: int = 10) -> dict[str, float]:
    """Return bytes a second between page-locked memory and the GPU, each way by itself."""
    host, device = cupyx.empty_pinned(nbytes, np.uint8), cupy.empty(nbytes, np.uint8)
    host[:] = 1
    both = {"to_device": lambda: device.set(host), "to_host": lambda: device.get(out=host)}
    return {way: nbytes / (1e-3 * min(clock(copy) for _ in range(runs))) for way, copy in both.items()}


class ThereAndBack:
    """CuPy's ``A @ B``, A and B sent from page-locked memory and C brought back to such.

    Parameters
    ----------
    a, b : CSR
    dtype : dtype
    once : bool
        Send A only, where B is the same.
    """

    def __init__(self, a: CSR, b: CSR, dtype: Any, *, once: bool = False) -> None:
        self.operands = [page_locked(m, dtype) for m in ((a,) if once and b is a else (a, b))]
        self.room: list[Any] = []

    def __call__(self) -> CSR:
        """Multiply."""
        sent = [cupyx_matrix(CSR(*map(_sent, (m.indptr, m.indices, m.data)), m.shape)) for m in self.operands]
        c = sent[0] @ sent[-1]
        parts = c.indptr, c.indices, c.data
        if [len(part) for part in parts] != [len(room) for room in self.room]:
            self.room = [cupyx.empty_pinned(len(part), part.dtype) for part in parts]
        for part, room in zip(parts, self.room, strict=True):
            part.get(out=room, blocking=False)
        cupy.cuda.get_current_stream().synchronize()
        return CSR(*self.room, c.shape)


def _sent(array: Any) -> Any:
    """Copy a page-locked array to the GPU, without waiting."""
    sent = cupy.empty(len(array), array.dtype)
    sent.data.copy_from_host_async(array.ctypes.data, array.nbytes)
    return sent


class Poison:
    """An allocator that fills all it gives with ones in every bit (NaN, -1), and notes the most that was in use."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.peak = pool, pool.used_bytes()

    def __call__(self, size: int) -> Any:
        """Allocate."""
        memory = self.pool.malloc(size)
        self.peak = max(self.peak, self.pool.used_bytes())
        if size:
            memory.memset_async(0xFF, size)
        return memory


class Verdict(NamedTuple):
    """What the check of a product found."""

    fault: str | None
    """What keeps C from being canonical; None where each row's columns rise strictly and lie in C."""
    pattern: bool | None
    """The pattern is cuSPARSE's; None where there is none to compare with."""
    entry_error: float
    """Greatest error of an entry against cuSPARSE in double precision, in units of ``|A| |B|`` there."""
    row_error: float
    """Greatest error of ``C x`` against ``A (B x)`` on the host, in units of ``|A| |B| |x|``; x random."""
    tolerance: float

    @property
    def right(self) -> bool:
        """Whether nothing is wrong; a NaN is."""
        entries = self.pattern is None or (self.pattern and self.entry_error <= self.tolerance)
        return self.fault is None and entries and self.row_error <= self.tolerance


class Reference:
    """The same product in double precision, by cuSPARSE entry by entry and by SciPy row by row.

    Parameters
    ----------
    library : Cusparse
    a, b : CSR
        On the GPU, of the dtype that is measured.
    """

    def __init__(self, library: Cusparse, a: CSR, b: CSR) -> None:
        self.tolerance = TOLERANCE[a.dtype.char]
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        left = with_values(a, a.data.astype(wide, copy=False))
        right = left if b is a else with_values(b, b.data.astype(wide, copy=False))
        self.c = _first_to_succeed(library, left, right)
        self.scale = None
        if self.c is not None:
            positive = wide is np.float64 and all(bool((m.data >= 0).all()) for m in (a, b) if m.nnz)
            magnitudes = (with_values(m, abs(m.data)) for m in (left, right))
            absolute = self.c if positive else _first_to_succeed(library, *magnitudes)
            self.scale = None if absolute is None else absolute.data
        self.x = np.random.default_rng(0).uniform(-1, 1, b.ncols)
        hosts = [on_host(m).to_scipy() for m in (left, right)]
        self.y = hosts[0] @ (hosts[1] @ self.x)
        self.y_scale = abs(hosts[0]) @ (abs(hosts[1]) @ abs(self.x))

    def check(self, c: CSR, *, sort: bool = False) -> Verdict:
        """Check a product; with `sort`, rows that are not sorted are sorted first."""
        if is_on_host(c):
            c = CSR(*(cupy.asarray(x) for x in (c.indptr.astype(np.int32), c.indices, c.data)), c.shape)
        fault = fault_of(c)
        if sort and fault:
            cupyx_matrix(c).sort_indices()
            fault = fault_of(c)
        if fault:  # reading further could leave the arrays
            return Verdict(fault, False, np.nan, np.nan, self.tolerance)
        pattern, entry_error = None, np.nan
        if self.c is not None and self.scale is not None:
            pattern = all(
                p.shape == q.shape and bool((p == q).all())
                for p, q in ((c.indptr, self.c.indptr), (c.indices, self.c.indices))
            )
            entry_error = _worst(c.data, self.c.data, self.scale) if pattern else np.nan
        y = (cupyx_matrix(with_values(c, c.data.astype(self.y.dtype, copy=False))) @ cupy.asarray(self.x)).get()
        filled = self.y_scale > 0
        wrong = abs(y - self.y) / np.where(filled, self.y_scale, 1)
        return Verdict(None, pattern, entry_error, float(np.max(wrong, initial=0.0)), self.tolerance)


def _first_to_succeed(library: Cusparse, a: CSR, b: CSR) -> CSR | None:
    """Return the product by the first algorithm that has memory for it, rows sorted."""
    for algorithm in ALGORITHMS:
        try:
            c = library.bind(algorithm, a, b)()
        except (CusparseError, cupy.cuda.memory.OutOfMemoryError):
            continue
        if fault_of(c):
            cupyx_matrix(c).sort_indices()
        return c
    return None


def _worst(values: Any, expected: Any, scale: Any) -> float:
    """Return the greatest of ``|values - expected| / scale``; NaN if one is NaN."""
    worst = [0.0]
    for start in range(0, len(values), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        error = abs(values[part] - expected[part]) / cupy.maximum(abs(scale[part]), np.finfo(np.float64).tiny)
        worst.append(float(error.max()))
    return float(np.max(worst))


def fault_of(c: CSR) -> str | None:
    """Return what keeps a matrix from being canonical: its offsets, columns out of range, rows that do not rise."""
    steps = cupy.diff(c.indptr)
    if int(c.indptr[0]) != 0 or int(c.indptr[-1]) != c.nnz or (len(steps) and int(steps.min()) < 0):
        return f"offsets do not rise from 0 to {c.nnz:,}"
    outside = int(((c.indices < 0) | (c.indices >= c.ncols)).sum())
    if outside:
        return f"{outside:,} columns outside [0, {c.ncols:,})"
    falls = c.indices[1:] <= c.indices[:-1]
    starts = c.indptr[1:-1][steps[1:] > 0]
    falls[starts[starts > 0] - 1] = False
    count = int(falls.sum())
    if not count:
        return None
    first = falls.argmax().reshape(1).astype(c.indptr.dtype)
    row = int(cupy.searchsorted(c.indptr, first, side="right")[0]) - 1
    return f"{count:,} columns do not rise, the first in row {row:,} of {int(steps[row]):,} entries"


def same_bits(c: CSR, d: CSR) -> bool:
    """Whether two matrices are equal bit for bit."""
    parts = ((c.indptr, d.indptr), (c.indices, d.indices), (c.data.view(np.uint8), d.data.view(np.uint8)))
    return all(p.shape == q.shape and bool((p == q).all()) for p, q in parts)


def measure(
    product: Product, reference: Reference, pool: Any, runs: int, *, peer: bool = False, twice: bool = False,
    patience: float = np.inf,
) -> dict[str, Any]:  # fmt: skip
    """Check a product in poisoned memory, weigh it, then time it.

    Parameters
    ----------
    product : function
        Returns C.
    pool : cupy.cuda.MemoryPool
        CuPy's own.
    runs : int
        Timed runs, after two that are not; more where they are short.
    peer : bool
        Whether rows may be unsorted.
    twice : bool
        Ask for the same bits in a second run.
    patience : float
        Milliseconds; a product that takes longer is timed once.

    Returns
    -------
    dict
        ms, ms_min, runs, nnz_c, c_bytes, workspace (bytes, peak less operands and C), right, and the verdict's fields.
    """
    pool.free_all_blocks()
    before, poison = pool.used_bytes(), Poison(pool)
    with cupy.cuda.using_allocator(poison):
        c = product()
        again = product() if twice else None
    c_bytes = 0 if is_on_host(c) else c.nbytes
    most = poison.peak - before - (c_bytes if again is None else 2 * c_bytes)
    verdict = reference.check(c, sort=peer)
    found = {
        "nnz_c": c.nnz, "c_bytes": c.nbytes, "workspace": max(0, most), "right": verdict.right,
        **{k: None if v != v else v for k, v in verdict._asdict().items()},  # JSON has no NaN
    }  # fmt: skip
    if again is not None:
        found["same_bits"] = same_bits(c, again)
        found["right"] = verdict.right and found["same_bits"]
    del c, again
    if not verdict.right:
        found["right_in_clean_memory"] = reference.check(product(), sort=peer).right
    pool.free_all_blocks()
    gc.collect()
    gc.disable()
    try:
        clock(product)
        times = [clock(product)]
        if times[0] < patience:
            times = [clock(product) for _ in range(max(runs, min(50, int(20 / times[0]))))]
    finally:
        gc.enable()
    return {**found, "ms": round(float(np.median(times)), 5), "ms_min": round(min(times), 5), "runs": len(times)}


class Launch(NamedTuple):
    """One kernel's run."""

    ms: float
    name: str
    grid: int | tuple[int, int]
    block: int
    shared: int


@contextlib.contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collect every launch of spdist's kernels, each timed alone."""
    from spdist.kernels.cuda.module import Module

    original, seen = Module.__call__, []

    def timed(self: Module, name: str, grid: Any, block: int, args: tuple[Any, ...], shared: int = 0) -> None:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.Device().synchronize()
        begin.record()
        original(self, name, grid, block, args, shared)
        end.record()
        end.synchronize()
        seen.append(Launch(cupy.cuda.get_elapsed_time(begin, end), name, grid, block, shared))

    Module.__call__ = timed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Module.__call__ = original  # type: ignore[method-assign]
