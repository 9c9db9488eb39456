"""Verify a stored product: does C hold A @ B? Out of core, in the time of a few reads of the three matrices.

Freivalds' check: for a random vector x, ``C x = A (B x)`` holds for the right C and almost surely for no other. It is
made row by row, each row against its own bound on the rounding errors, so that one wrong value among 10^8 shows.
What cannot be checked through vectors, products of bools and rows with NaN, Inf or overflow, is computed again, a
bounded number of products at a time, and compared entry by entry.

Memory: matrices are read `ENTRIES` entries at a time and thread. The only whole-length arrays are the random vectors
(``ncols(B)`` each), their products with B and the size of these (``nrows(B)`` each), and the offsets of B's rows. A row
of any length is summed in pieces; only where it must be computed again is one row of C held, at about 100 bytes an
entry.

References
----------
.. [1] R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977; "Fast probabilistic
   algorithms", MFCS 1979.
.. [2] N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM 2002, sections 2.2, 3.1, 3.6.
.. [3] C.-P. Jeannerod, S. M. Rump, "Improved error bounds for inner products in floating-point arithmetic", SIAM J.
   Matrix Anal. Appl. 34(2), 2013: ``n u`` holds for sums of n products in any order and of any length.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from spdist.errors import InputError, MatrixError
from spdist.matrices.checks import check_canonical, check_product_shapes, is_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray, index_dtype, result_dtype
from spdist.storage.block_layout import as_numbers
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix

ENTRIES = 1 << 21
"""Entries of A and C, or of B, that one thread holds at a time: 24 MiB of float64 with its columns."""

OFFSETS = 1 << 18
"""Offsets read at a time."""

PRODUCTS = 1 << 18
"""Products that one thread expands at a time to recompute float and integer rows: about 35 MB."""

BOOL_PRODUCTS = 1 << 20
"""The same for bools, which SciPy multiplies unexpanded: about 30 MB."""

NAMED_PRODUCTS = 1 << 24
"""Products up to which a row found wrong is recomputed to name the entry."""

_TRUE = 1 << 21  # a True counts as this, a stored False as 1: BOOL_PRODUCTS terms with a False stay below True * True
_V = 2.0**-53  # unit roundoff of the checking arithmetic, float64 or complex128 whatever C's dtype
_SLACK = 1 + 2.0**-10  # covers terms of second order and the rounding of the bound itself
_TINY_SIZE = 2.0**-1000  # rows of B with a mean value below may lose bits to gradual underflow in B x
_SCALE = 2.0**-515  # of both operands where a float64 product may overflow

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes
    ----------
    ok : bool
        Whether C is A @ B, as far as the check can tell.
    reason : str
        One line: what is wrong, with row, column and figures, or why C is taken to be right.
    rows, nnz : int
        Of C.
    vectors : int
        Random vectors used; 0 where every row was recomputed.
    method : str
        ``freivalds`` (float, complex), ``modular`` (integers) or ``recompute`` (bool).
    smallest_error : float
        An error of one value of C that is larger than this, in units of its row's sum of ``|A||B|``, is caught with
        certainty; of the worst row. 0 means any error. Where C is false: as far as the check came.
    seconds : float
    """

    ok: bool
    reason: str
    rows: int
    nnz: int
    vectors: int
    method: str
    smallest_error: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return asdict(self)


class _FalseError(Exception):
    """C is false; the message says why."""


def verify(
    a: StoredMatrix,
    b: StoredMatrix,
    c: StoredMatrix,
    *,
    vectors: int = 2,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check that `c` is ``a @ b``, by reading each once.

    Row by row: columns rise strictly; at least as many entries as the longest row of B it touches has, and at most as
    many as there are products; and ``C x = A (B x)`` for random x with ``0.5 <= |x_j| <= 1``. Integers are compared
    modulo 2^w, exactly, by odd and uniform x. Bools, and rows with NaN, Inf or overflow, are recomputed.

    Products summed in any order pass; see `_factor` for what rounding errors may be. Not seen are values that are wrong
    by less than `Verification.smallest_error`, a missing or additional entry of such a value (of zero, say) among them.

    Parameters
    ----------
    a, b, c : StoredMatrix
    vectors : int
        Random vectors. One catches any single error above the bound; several errors of one row could cancel with a
        probability near 0 for floats, and of at most one half for each further vector for integers.
    seed : int
        Of the random vectors.
    threads : int, optional
        Default: the CPUs this process may use.
    progress : callable, optional
        Called with entries done and entries in all.

    Raises
    ------
    InputError
        If A and B do not fit, are not canonical, or `vectors` or `threads` is below 1.
    CorruptError
        If a Zarr chunk of any of the three is missing or altered.
    """
    began = time.perf_counter()
    a, b, c = as_numbers(a), as_numbers(b), as_numbers(c)
    _check_input(a, b, vectors, threads)
    dtype = result_dtype(a.dtype, b.dtype)
    method = {"b": "recompute", "u": "modular", "i": "modular"}.get(dtype.kind, "freivalds")
    state = _State(0 if method == "recompute" else vectors)
    try:
        _check_form(a, b, c, dtype)
        _run(_Job(a, b, c, method, state.vectors, seed), threads or _cpus(), state, progress)
        ok, reason = True, _praise(c, method, state)
    except _FalseError as error:
        ok, reason = False, str(error)
    seconds = time.perf_counter() - began
    return Verification(ok, reason, c.nrows, c.nnz, state.vectors, method, state.smallest_error, seconds)


def _check_input(a: StoredMatrix, b: StoredMatrix, vectors: int, threads: int | None) -> None:
    check_product_shapes(a.shape, b.shape)
    if vectors < 1 or (threads is not None and threads < 1):
        raise InputError(f"vectors={vectors} and threads={threads} must be at least 1")


def _check_form(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, dtype: np.dtype[Any]) -> None:
    if c.shape != (a.nrows, b.ncols):
        raise _FalseError(f"C is {c.nrows:,} x {c.ncols:,}, but A @ B is {a.nrows:,} x {b.ncols:,}")
    if c.dtype != dtype:
        raise _FalseError(f"C holds {c.dtype}, but {a.dtype} times {b.dtype} is {dtype}")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _praise(c: StoredMatrix, method: str, state: _State) -> str:
    if method == "recompute":
        return f"all {c.nrows:,} rows, recomputed because bool products are not linear, equal C in pattern and values"
    if method == "modular":
        bits = 8 * c.dtype.itemsize
        how = f"modulo 2^{bits} for {state.vectors} random x; any one wrong value would have been caught"
    else:
        how = (
            f"within rounding for {state.vectors} random x; one value wrong by {state.smallest_error:.2g} of its row's "
            f"|A||B| sum would have been caught"
        )
    more = f"; {state.recomputed:,} rows with NaN, Inf or overflow were recomputed" if state.recomputed else ""
    return f"C x equals A (B x) in all {c.nrows:,} rows {how}{more}"


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What is known so far."""

    vectors: int
    smallest_error: float = 0.0
    recomputed: int = 0


@dataclass(frozen=True)
class _Operand:
    """A matrix and what to raise where it is not canonical."""

    matrix: StoredMatrix
    name: str
    error: type[Exception]


@dataclass(frozen=True)
class _Range:
    """Rows ``[start:stop)`` and their offsets in each of some matrices."""

    start: int
    stop: int
    offsets: tuple[Int64Array, ...]

    @property
    def nrows(self) -> int:
        return self.stop - self.start

    @property
    def entries(self) -> int:
        return sum(int(offsets[-1] - offsets[0]) for offsets in self.offsets)


class _Job:
    """The three matrices, the random vectors, and their products with B once `fill` has seen all of B."""

    def __init__(self, a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, method: str, vectors: int, seed: int) -> None:
        self.a, self.b = _Operand(a, "A", MatrixError), _Operand(b, "B", MatrixError)
        self.c = _Operand(c, "C", _FalseError)
        self.method, self.dtype, self.ncols = method, c.dtype, c.ncols
        wide = {"b": np.bool_, "u": np.uint64, "i": np.uint64, "f": np.float64, "c": np.complex128}
        self.work: np.dtype[Any] = np.dtype(wide[c.dtype.kind])
        self.x, self.x_size = _draw(self.work, vectors, c.ncols, seed)
        self.bx = np.zeros((vectors, b.nrows), self.work)
        self.size = np.zeros(b.nrows if method == "freivalds" else 0)
        self.guarded: FloatArray | None = None
        self.b_offsets = np.zeros(b.nrows + 1, np.int64)

    def fill(self, block: _Range, bx: ValueArray, size: FloatArray) -> None:
        """Note B x for some rows."""
        rows = slice(block.start, block.stop)
        self.bx[:, rows] = bx
        self.b_offsets[block.start : block.stop + 1] = block.offsets[0]
        if self.method == "freivalds":
            self.size[rows] = size

    def guard(self) -> None:
        """Keep a second size where values of B are so small that B x is not accurate to a unit roundoff.

        A product that falls below 2^-1022 errs by up to 2^-1075 instead of in proportion. To count a row of B at no
        less than 2^-1000 per entry covers that, and changes nothing where values are larger.
        """
        floor = np.diff(self.b_offsets) * _TINY_SIZE
        if self.method == "freivalds" and np.any(self.size < floor):
            self.guarded = np.maximum(self.size, floor)

    @cached_property
    def b_held(self) -> CSR | None:
        """B, where it is small enough to be held for recomputing."""
        b = self.b.matrix
        if b.nnz > ENTRIES:
            return None
        return _read(self.b, self.b_offsets, 0, b.nnz, 0, self.work)


def _draw(work: np.dtype[Any], vectors: int, n: int, seed: int) -> tuple[ValueArray, FloatArray]:
    """Return random vectors, one a row, and the absolute values that they share where they are floating.

    Of integers the first vector is odd: it has an inverse modulo 2^w, so no single error is lost. The others are
    uniform: odd ones only would lose two errors of 2^(w-1) in one row for certain.
    """
    rng = np.random.default_rng(seed)
    if work.kind == "u":
        x = rng.integers(0, 2**64, (vectors, n), np.uint64)
        x[0] |= np.uint64(1)
        return x, np.zeros(0)
    if work.kind == "b":
        return np.zeros((0, n), work), np.zeros(0)
    size = rng.uniform(0.5, 1.0, n)
    out = np.empty((vectors, n), work)
    for row in out:  # one at a time: the vectors are the largest arrays there are
        if work.kind == "c":
            np.multiply(size, np.exp(2j * np.pi * rng.random(n)), out=row)
        else:
            row[:] = np.where(rng.integers(0, 2, n, np.uint8) == 0, size, -size)
    return out, size


def _run(job: _Job, threads: int, state: _State, progress: Callable[[int, int], None] | None) -> None:
    """Read B, then A and C side by side; raises `_FalseError` at the first row found false."""
    total, done = sum(operand.matrix.nnz for operand in (job.a, job.b, job.c)), 0
    for block, (bx, size) in _in_order(threads, lambda block: _multiply_b(job, block), _ranges((job.b,))):
        job.fill(block, bx, size)
        done += block.entries
        if progress:
            progress(done, total)
    job.guard()
    for block, found in _in_order(threads, lambda block: _check_range(job, block), _ranges((job.a, job.c))):
        state.smallest_error = max(state.smallest_error, found.smallest_error)
        state.recomputed += found.recomputed
        if found.message:
            raise _FalseError(found.message)
        done += block.entries
        if progress:
            progress(done, total)


def _in_order(threads: int, task: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Run `task` on all items, a few ahead, and yield the results in order, so that the first error is the first."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(task, item)))
                if len(waiting) > 2 * threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# -- reading -----------------------------------------------------------------------------------------------------------


def _ranges(operands: tuple[_Operand, ...]) -> Iterator[_Range]:
    """Cut the common rows of `operands` into ranges of `ENTRIES` entries together, or of one longer row.

    Offsets are checked here: nothing else may use them before they are known to rise from 0 to nnz.
    """
    nrows = operands[0].matrix.nrows
    for at in range(0, nrows, OFFSETS):
        end = min(at + OFFSETS, nrows)
        offsets = [operand.matrix.read_indptr(at, end) for operand in operands]
        for operand, own in zip(operands, offsets, strict=True):
            _check_offsets(operand, own, at)
        entries = sum(own - own[0] for own in offsets)
        start = 0
        while start < end - at:
            stop = int(np.searchsorted(entries, entries[start] + ENTRIES, side="right")) - 1
            stop = max(stop, start + 1)
            yield _Range(at + start, at + stop, tuple(own[start : stop + 1] for own in offsets))
            start = stop
    if nrows == 0:
        for operand in operands:
            _check_offsets(operand, operand.matrix.read_indptr(0, 0), 0)


def _check_offsets(operand: _Operand, offsets: Int64Array, start: int) -> None:
    """Check the offsets that follow row `start`; that they go on where the ones before ended is checked by overlap."""
    matrix, last = operand.matrix, start + len(offsets) - 1
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        row = int(np.argmax(falls))
        what = f"falls from {int(offsets[row]):,} to {int(offsets[row + 1]):,} at row {start + row:,}"
    elif start == 0 and offsets[0] != 0:
        what = f"starts at {int(offsets[0]):,}, not 0"
    elif offsets[0] < 0 or offsets[-1] > matrix.nnz or (last == matrix.nrows and offsets[-1] != matrix.nnz):
        what = f"reaches {int(offsets[-1]):,} at row {last:,} of {matrix.nrows:,}, but there are {matrix.nnz:,} entries"
    else:
        return
    raise operand.error(f"{operand.name} ({matrix.url}): indptr {what}")


def _pieces(operand: _Operand, offsets: Int64Array, start: int, work: np.dtype[Any]) -> Iterator[CSR]:
    """Read some rows, checked and with values of dtype `work`: in one piece, or one long row in several."""
    first, last = int(offsets[0]), int(offsets[-1])
    if len(offsets) != 2 or last - first <= ENTRIES:
        yield _read(operand, offsets - first, first, last, start, work)
        return
    before = -1
    for at in range(first, last, ENTRIES):
        end = min(at + ENTRIES, last)
        piece = _read(operand, np.array([0, end - at]), at, end, start, work)
        if piece.indices[0] <= before:
            raise operand.error(
                f"{operand.name} ({operand.matrix.url}): row {start:,} is not sorted or holds a duplicate at column "
                f"{int(piece.indices[0]):,}"
            )
        before = int(piece.indices[-1])
        yield piece


def _read(operand: _Operand, indptr: Int64Array, first: int, last: int, start: int, work: np.dtype[Any]) -> CSR:
    """Read entries ``[first:last)``, rows from `start` on, and check their columns."""
    matrix = operand.matrix
    raw = matrix.indices.read(first, last)  # checked before it is cast: a wide index must not wrap into range
    if len(raw) and (int(raw.min()) < 0 or int(raw.max()) >= matrix.ncols):
        at = int(np.argmax((raw < 0) | (raw >= matrix.ncols)))
        row = start + int(np.searchsorted(indptr, at, side="right")) - 1
        raise operand.error(
            f"{operand.name} ({matrix.url}): column {int(raw[at]):,} in row {row:,} is outside [0, {matrix.ncols:,})"
        )
    indices = raw.astype(index_dtype(matrix.ncols), copy=False)
    values = matrix.data.read(first, last).astype(work, copy=False)
    out = CSR(indptr, indices, values, (len(indptr) - 1, matrix.ncols))
    if not is_canonical(out):
        try:
            check_canonical(out, f"{operand.name} ({matrix.url})", start)
        except MatrixError as error:
            raise operand.error(str(error)) from None
    return out


# -- Freivalds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What a range of rows gave."""

    message: str = ""
    smallest_error: float = 0.0
    recomputed: int = 0


def _multiply_b(job: _Job, block: _Range) -> tuple[ValueArray, FloatArray]:
    """Return B x and |B||x| of some rows of B."""
    bx, size = np.zeros((len(job.x), block.nrows), job.work), np.zeros(block.nrows)
    with np.errstate(all="ignore"):
        for piece in _pieces(job.b, block.offsets[0], block.start, job.work):
            _add_product(bx, piece, job.x)
            if job.method == "freivalds":
                size += _absolute(piece) @ job.x_size
    return bx, size


def _add_product(out: ValueArray, piece: CSR, x: ValueArray) -> None:
    matrix = piece.to_scipy()
    for row, vector in zip(out, x, strict=True):  # one vector at a time: SciPy's loop over several is slower
        row += matrix @ vector


def _absolute(piece: CSR) -> sp.csr_matrix:
    out: sp.csr_matrix = CSR(piece.indptr, piece.indices, np.abs(piece.data), piece.shape).to_scipy()
    return out


def _check_range(job: _Job, block: _Range) -> _Found:
    """Check some rows of C against A and B x."""
    with np.errstate(all="ignore"):
        if job.method == "recompute":
            return _Found(_recompute(job, block, np.arange(block.nrows)) or "")
        cx = np.zeros((len(job.x), block.nrows), job.work)
        for piece in _pieces(job.c, block.offsets[1], block.start, job.work):
            _add_product(cx, piece, job.x)
        sums = _RowSums(job, block)
        thin = sums.pattern_errors(job.ncols)
        wrong, strange, smallest = _compare_exact(job, cx, sums) if job.work.kind == "u" else _compare(job, cx, sums)
        first = np.flatnonzero(thin | wrong)[:1]
        named = first[sums.products[first] <= NAMED_PRODUCTS]  # recomputed only to name the entry
        again = np.union1d(np.flatnonzero(strange), named)
        message = _recompute(job, block, again) if len(again) else None
        if message is None and len(first):
            message = f"row {block.start + int(first[0]):,} of C: " + sums.explain(int(first[0]), bool(thin[first[0]]))
    return _Found(message or "", smallest, int(np.count_nonzero(strange)))


class _RowSums:
    """A (B x) of some rows, and per row what bounds its error and its pattern.

    Attributes
    ----------
    product : (vectors, nrows)
        A (B x).
    size, guarded : (nrows,) float64
        |A||B||x|, and the same with tiny rows of B counted as `_Job.guard` says.
    a_lengths, c_lengths, products, longest : (nrows,) int64
        Entries of A, entries of C, products, entries of the longest row of B that is touched.
    """

    def __init__(self, job: _Job, block: _Range) -> None:
        self.start, nrows = block.start, block.nrows
        self.product = np.zeros((len(job.x), nrows), job.work)
        self.size, self.guarded = np.zeros(nrows), np.zeros(nrows)
        self.a_lengths, self.c_lengths = np.diff(block.offsets[0]), np.diff(block.offsets[1])
        self.products, self.longest = np.zeros(nrows, np.int64), np.zeros(nrows, np.int64)
        for piece in _pieces(job.a, block.offsets[0], block.start, job.work):
            self._add(job, piece)

    def _add(self, job: _Job, piece: CSR) -> None:
        _add_product(self.product, piece, job.bx)
        if job.method == "freivalds":
            absolute = _absolute(piece)
            size = absolute @ job.size
            self.size += size
            self.guarded += size if job.guarded is None else absolute @ job.guarded
        lengths = _lengths(job, piece)
        self.products += np.diff(_offsets(lengths)[piece.indptr])
        filled = np.flatnonzero(np.diff(piece.indptr))
        if len(filled):
            most = np.maximum.reduceat(lengths, piece.indptr[filled])
            self.longest[filled] = np.maximum(self.longest[filled], most)

    def explain(self, row: int, thin: bool) -> str:
        """Say what is wrong with a row that is too long to look for the entry."""
        if not thin:
            return "C x differs from A (B x) by more than rounding"
        return (
            f"{self.c_lengths[row]:,} entries, but {self.products[row]:,} products and rows of B of up to "
            f"{self.longest[row]:,} entries lead to them"
        )

    def pattern_errors(self, ncols: int) -> BoolArray:
        """Whether C's row is shorter than a row of B it holds, or longer than its products allow."""
        return (self.c_lengths < self.longest) | (self.c_lengths > np.minimum(self.products, ncols))


def _lengths(job: _Job, a: CSR) -> Int64Array:
    """Return for each entry of A the entries of the row of B that it multiplies."""
    out: Int64Array = job.b_offsets[a.indices + 1] - job.b_offsets[a.indices]
    return out


def _offsets(lengths: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _compare_exact(job: _Job, cx: ValueArray, sums: _RowSums) -> tuple[BoolArray, BoolArray, float]:
    """Compare integers modulo 2^w: computed modulo 2^64, of which that is the lower part."""
    differs = (cx - sums.product).astype(f"u{job.dtype.itemsize}") != 0
    return differs.any(axis=0), np.zeros(cx.shape[1], np.bool_), 0.0


def _compare(job: _Job, cx: ValueArray, sums: _RowSums) -> tuple[BoolArray, BoolArray, float]:
    """Compare floats: which rows are wrong, which cannot be told through vectors, and the smallest error caught."""
    factor = _factor(job.dtype, sums)
    bound = factor * sums.guarded + 4 * float(np.finfo(job.dtype).tiny) * sums.products
    strange = ~(np.isfinite(cx).all(axis=0) & np.isfinite(sums.product).all(axis=0) & np.isfinite(bound))
    wrong = (np.abs(cx - sums.product) > bound).any(axis=0) & ~strange
    told = ~strange & (sums.size > 0)
    # An error e adds e x_j with |x_j| >= 1/2 to what rounding may have left, and that is at most the bound.
    caught = np.where(strange, factor, np.divide(bound, sums.size, out=np.zeros_like(bound), where=told))
    return wrong, strange, float(4 * np.max(caught, initial=0.0))


def _factor(dtype: np.dtype[Any], sums: _RowSums) -> FloatArray:
    """Bound ``|C x - A (B x)|`` of a right C, as computed, per row and in units of ``|A||B||x|``.

    With u the unit roundoff of C's dtype, v = 2^-53 that of the check, s = ``|A||B||x|`` and, per row, n the products
    of an entry, k and r the entries of A's and C's row, m those of the longest row of B touched:

    * C's value is a sum of at most n products in any order: wrong by at most ``n u |A||B|`` [3]_. n is at most k, and
      at most ``products - r + 1``, since each other entry takes a product. 64-bit integers become floats first: 2 more.
    * ``C x`` as computed is wrong by at most ``r v |C||x|``, and ``|C| <= (1 + n u) |A||B|``.
    * ``A (B x)`` as computed is wrong by at most ``(k + m) v s``.
    * What underflows, which the caller adds, is wrong by at most the smallest normal number for each product, flushed
      to zero or not, and four times that where it is complex.

    A complex sum of n products is two real ones of 2 n products of size ``|a||b|`` together: ``2 sqrt(2) n u``, taken
    as 3. All of this is worst case: a statistical bound, about the root of it, would at times accuse a right product.
    """
    u, weight = float(np.finfo(dtype).eps) / 2, 3.0 if dtype.kind == "c" else 1.0
    n = np.minimum(sums.a_lengths, np.maximum(sums.products - sums.c_lengths + 1, 1)) + 2.0
    own = weight * n * u
    check = weight * (sums.c_lengths * (1 + own) + sums.a_lengths + sums.longest + 2.0) * _V
    return np.asarray(_SLACK * (own + check), np.float64)


# -- recomputing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Terms:
    """Entries of ``A @ B``: their keys ``row * ncols + column``, rising, and what was summed up, a column of each."""

    keys: Int64Array
    table: ValueArray


def _recompute(job: _Job, block: _Range, rows: Int64Array) -> str | None:
    """Compute `rows` of the range again, entry by entry; return what the first wrong one is, or None."""
    pieces = list(_pieces(job.c, block.offsets[1], block.start, job.dtype))
    indices, data = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("indices", "data"))
    c = CSR(block.offsets[1] - block.offsets[1][0], indices, data, (block.nrows, job.ncols))
    for part, terms in _expected(job, block, rows):
        own = _take(c, part)
        keys = _entry_rows(own) * job.ncols + own.indices
        found = _first_difference(job, terms, keys, own.data)
        if found is not None:
            key, what = found
            row, column = divmod(key, job.ncols)
            return f"row {block.start + int(part[row]):,}, column {column:,} of C: {what}"
    return None


def _expected(job: _Job, block: _Range, rows: Int64Array) -> Iterator[tuple[Int64Array, _Terms]]:
    """Yield `rows` of ``A @ B`` in order, a bounded number of products at a time; a row of more is merged."""
    limit, op = (BOOL_PRODUCTS, np.maximum) if job.method == "recompute" else (PRODUCTS, np.add)
    held: tuple[slice, _Terms] | None = None
    for piece in _pieces(job.a, block.offsets[0], block.start, job.work):
        a = _take(piece, rows)
        for chosen, cut in _cuts(a, _lengths(job, a), limit):
            terms = _bool_terms(job, cut) if job.method == "recompute" else _expand(job, cut)
            if held and held[0] == chosen:
                both = np.concatenate([held[1].table, terms.table], axis=1)
                terms = _compress(np.concatenate([held[1].keys, terms.keys]), both, op)
            elif held:
                yield rows[held[0]], held[1]
            held = chosen, terms
    if held:
        yield rows[held[0]], held[1]


def _cuts(a: CSR, products: Int64Array, limit: int) -> Iterator[tuple[slice, CSR]]:
    """Cut `a` into groups of rows of at most `limit` products, or parts of one row, of at least one entry."""
    running = _offsets(products)
    at_rows = running[a.indptr]
    row = 0
    while row < a.nrows:
        stop = int(np.searchsorted(at_rows, at_rows[row] + limit, side="right")) - 1
        if stop > row:
            yield slice(row, stop), a.rows(row, stop)
            row = stop
            continue
        at, last = int(a.indptr[row]), int(a.indptr[row + 1])
        while at < last:
            end = min(max(int(np.searchsorted(running, running[at] + limit, side="right")) - 1, at + 1), last)
            part = CSR(np.array([0, end - at]), a.indices[at:end], a.data[at:end], (1, a.ncols))
            yield slice(row, row + 1), part
            at = end
        row += 1


def _positions(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return ``start, start + 1, ...`` of each start, `lengths` of them, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out: Int64Array = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return out


def _entry_rows(m: CSR) -> Int64Array:
    return np.repeat(np.arange(m.nrows), np.diff(m.indptr))


def _take(m: CSR, rows: Int64Array) -> CSR:
    """Return some rows of `m`."""
    if len(rows) == m.nrows:
        return m
    lengths = np.diff(m.indptr)[rows]
    at = _positions(m.indptr[rows], lengths)
    return CSR(_offsets(lengths), m.indices[at], m.data[at], (len(rows), m.ncols))


def _gather(job: _Job, rows: IndexArray) -> CSR:
    """Return some rows of B, `rows` rising."""
    if job.b_held is not None:
        return _take(job.b_held, rows.astype(np.int64))
    b, starts = job.b.matrix, job.b_offsets[rows]
    lengths = job.b_offsets[rows + 1] - starts
    at = _positions(starts, lengths)
    indices = _gather_array(b.indices, at).astype(index_dtype(b.ncols), copy=False)
    values = _gather_array(b.data, at).astype(job.work, copy=False)
    return CSR(_offsets(lengths), indices, values, (len(rows), b.ncols))


def _gather_array(array: ChunkedArray, at: Int64Array) -> ValueArray:
    """Return the elements at rising positions, reading one Zarr chunk at a time."""
    out = np.empty(len(at), array.dtype)
    chunks = at // array.chunk
    for k in np.unique(chunks):
        lo, hi = np.searchsorted(chunks, k), np.searchsorted(chunks, k, side="right")
        first = int(k) * array.chunk
        out[lo:hi] = array.read(first, min(first + array.chunk, array.length))[at[lo:hi] - first]
    return out


def _bool_terms(job: _Job, a: CSR) -> _Terms:
    """Return 2 where an entry of the OR of ANDs is True and 1 where it is False.

    One integer product tells both: True counts as 2^21 and a stored False as 1, so that a sum of up to 2^20 products
    reaches 2^42 only with a True AND True, and none of them is zero, which SciPy would drop.
    """
    touched, columns = np.unique(a.indices, return_inverse=True)
    b = _gather(job, touched)
    left = sp.csr_matrix((_weigh(a.data), columns, a.indptr), shape=(a.nrows, len(touched)))
    names, own = (None, b.indices)
    if job.ncols > 4 * BOOL_PRODUCTS:  # SciPy takes workspace for every column
        names, own = np.unique(b.indices, return_inverse=True)
    width = job.ncols if names is None else len(names)
    out = (left @ sp.csr_matrix((_weigh(b.data), own, b.indptr), shape=(len(touched), width))).tocsr()
    out.sort_indices()
    found = out.indices if names is None else names[out.indices]
    rows = np.repeat(np.arange(a.nrows), np.diff(out.indptr))
    return _Terms(rows * job.ncols + found, np.where(out.data >= _TRUE * _TRUE, 2, 1).astype(np.int8)[None])


def _weigh(values: BoolArray) -> Int64Array:
    return np.where(values, _TRUE, 1).astype(np.int64)


def _expand(job: _Job, a: CSR) -> _Terms:
    """Multiply by expanding all products, sorting them and adding up, so that entries that become zero stay."""
    touched, which = np.unique(a.indices, return_inverse=True)
    b = _gather(job, touched)
    lengths = np.diff(b.indptr)[which]
    at = _positions(b.indptr[which], lengths)
    keys = np.repeat(_entry_rows(a), lengths) * job.ncols + b.indices[at]
    left, right = np.repeat(a.data, lengths), b.data[at]
    table = (left * right)[None] if job.work.kind == "u" else _float_table(left, right)
    return _compress(keys, table, np.add)


def _float_table(left: ValueArray, right: ValueArray) -> ValueArray:
    """Return what must be known of each product, one row for each fact, so that sums of them tell what an entry may be.

    Rows 0 to 2 count NaN, Inf and -Inf that come of operands which are not finite; such products are zero below. Row 3
    is one; 4 and 5 are the product and its absolute value; 6 and 7 tell what may overflow, from operands scaled so that
    they do not: the positive and the negative part of the product, or, complex, the product and its absolute value.
    """
    finite = np.isfinite(left) & np.isfinite(right)
    product = left * right
    real = left.dtype.kind == "f"
    plus, minus = (~finite & real & (product.real == sign * np.inf) for sign in (1, -1))
    left, right = np.where(finite, left, 0), np.where(finite, right, 0)
    near, far = np.abs(left), np.abs(right)
    scaled = (left * _SCALE) * (right * _SCALE)
    parts = (np.maximum(scaled, 0), np.maximum(-scaled, 0)) if real else (scaled, near * _SCALE * (far * _SCALE))
    nan = ~finite & ~plus & ~minus
    return np.stack([nan, plus, minus, np.ones(len(left)), left * right, near * far, *parts])


def _compress(keys: Int64Array, table: ValueArray, op: np.ufunc) -> _Terms:
    """Sort by key and combine what shares one."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(keys), 1), np.bool_), keys[1:] != keys[:-1]]))
    if len(starts) == 0:
        return _Terms(keys, table)
    return _Terms(keys[starts], op.reduceat(table[:, order], starts, axis=1))


def _first_difference(job: _Job, terms: _Terms, keys: Int64Array, values: ValueArray) -> tuple[int, str] | None:
    """Return the key of the first entry of C that is not as `terms` say, and what is wrong with it."""
    if not np.array_equal(keys, terms.keys):
        odd = int(np.setxor1d(keys, terms.keys, assume_unique=True)[0])
        return odd, "this entry is missing" if odd in terms.keys else "A @ B has no entry there"
    if job.work.kind == "f" or job.work.kind == "c":
        wanted, wrong = _judge(job.dtype, terms.table, values.astype(job.work))
    else:
        wanted = terms.table[0] == 2 if job.work.kind == "b" else terms.table[0].astype(job.dtype)
        wrong = wanted != values
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return int(keys[at]), f"C holds {values[at]}, A @ B gives {wanted[at]}"


def _judge(dtype: np.dtype[Any], table: ValueArray, values: ValueArray) -> tuple[ValueArray, BoolArray]:
    """Return the values expected and which of `values` no order of summation gives.

    A finite value must lie within rounding of the sum, and none of its operands may be NaN or Inf. An infinite one
    needs an Inf of its sign among the products, or products of its sign that together overflow; NaN needs a NaN among
    them, or both signs of the former. Of complex values that are not finite only that is compared: their parts differ
    between ways to multiply.
    """
    nan, plus, minus, count, size = (table[k].real for k in (0, 1, 2, 3, 5))
    total, info, complex_ = table[4], np.finfo(dtype), dtype.kind == "c"
    scaled, scaled_size = (table[6], table[7].real) if complex_ else (table[6] - table[7], table[6] + table[7])
    factor = _SLACK * (3.0 if complex_ else 1.0) * (count + 2) * (float(info.eps) / 2 + _V)
    within = np.abs(values - total) <= factor * size + 4 * float(info.tiny) * count
    within_scaled = np.abs(values * _SCALE * _SCALE - scaled) <= factor * scaled_size
    regular = (nan == 0) & (plus == 0) & (minus == 0)
    finite_ok = regular & np.where(np.isfinite(total) & np.isfinite(size), within, within_scaled)
    limit = float(info.max) * _SCALE * _SCALE * (1 - 2 * factor)
    if complex_:
        wanted = np.where(regular, total, np.nan)
        return wanted, ~np.where(np.isfinite(values), finite_ok, ~regular | (scaled_size >= limit / 4))
    up, down = (plus > 0) | (table[6] >= limit), (minus > 0) | (table[7] >= limit)
    no_number = (nan > 0) | ((plus > 0) & (minus > 0))
    right = np.where(np.isnan(values), no_number | (up & down), finite_ok)
    right = np.where(values == np.inf, ~no_number & up & (minus == 0), right)
    right = np.where(values == -np.inf, ~no_number & down & (plus == 0), right)
    wanted = np.select([no_number, plus > 0, minus > 0], [np.nan, np.inf, -np.inf], total)
    return wanted, ~right
