"""Verify that a stored C is A @ B, out of core, in the time of a few reads of the three matrices.

Freivalds' check: for a random vector x, ``C x = A (B x)`` holds for the right C, and for a wrong C almost never. Each
row is compared with its own bound on the rounding errors, so that one wrong value among 10^8 shows. Products of bools,
and rows with NaN, Inf or overflow, cannot be checked by vectors; `recompute_rows` computes them again and compares
entry by entry.

Memory: `Limits.entries` entries of the matrices for each thread. The only whole-length arrays are the random vectors
(``ncols(B)`` each), their products with B and the sizes of these products (``nrows(B)`` each), and the offsets of B's
rows. A row of any length is summed in pieces; only when it must be recomputed is one row of C held, at about 100 bytes
an entry.

References
----------
.. [1] R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977; "Fast probabilistic
   algorithms", MFCS 1979.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy.sparse as sp

from spdist.errors import InputError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import counted
from spdist.matrices.checks import check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, result_dtype
from spdist.storage.block_layout import as_numbers
from spdist.storage.matrix import StoredMatrix
from spdist.verification.operands import Limits, Operands, RowRange, operands_of, row_ranges
from spdist.verification.recompute_rows import first_wrong_entry, sum_before
from spdist.verification.result import Verification, WrongProductError
from spdist.verification.rounding_bounds import BoolArray, FloatArray, RowLengths, vector_error_factor

LIMITS = Limits()

TINY_SIZE = 2.0**-1000
"""Mean magnitude of the entries of a row of B below which ``B x`` may lose bits to gradual underflow."""

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def verify(
    a: StoredMatrix,
    b: StoredMatrix,
    c: StoredMatrix,
    *,
    vectors: int = 2,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check that `c` is ``a @ b``, by reading each matrix once.

    Row by row: columns rise strictly; a row of C has at least as many entries as the longest row of B that it touches,
    and at most as many as it has products; and ``C x = A (B x)`` for random x with ``0.5 <= |x_j| <= 1``. Integers are
    compared modulo 2^w, exactly, by odd and uniform x. Bools, and rows with NaN, Inf or overflow, are recomputed.

    Products summed in any order pass; `rounding_bounds.vector_error_factor` bounds their rounding errors. The check
    does not find a value that is wrong by less than `Verification.smallest_error`, nor a missing or additional entry
    with a value below that (zero, for instance).

    `vectors`: one finds any single error above the bound. Several errors in one row may cancel: with a probability near
    0 for floats; for integers, of at most one half for each vector after the first.
    A wrong C raises nothing.
    Raises `InputError` if A and B do not fit, are not canonical, or `vectors` or `threads` is below 1.
    Raises `CorruptError` if a Zarr chunk of any of the three is missing or altered.

    References
    ----------
    .. [1] R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977.
    """
    began = time.perf_counter()
    a, b, c = as_numbers(a), as_numbers(b), as_numbers(c)
    check_product_shapes(a.shape, b.shape)
    if vectors < 1 or (threads is not None and threads < 1):
        raise InputError(f"vectors={vectors} and threads={threads} must be at least 1")
    dtype = result_dtype(a.dtype, b.dtype)
    method = {"b": "recompute", "u": "modular", "i": "modular"}.get(dtype.kind, "freivalds")
    totals = _RowTotals(0 if method == "recompute" else vectors)
    try:
        _check_form(a, b, c, dtype)
        check = _Check(operands_of(a, b, c, method, LIMITS), totals.vectors, seed)
        _run(check, threads or count_cpus(), totals, progress or (lambda done, total: None))
        ok, reason = True, _reason_to_accept(c, method, totals)
    except WrongProductError as error:
        ok, reason = False, str(error)
    seconds = time.perf_counter() - began
    return Verification(ok, reason, c.nrows, c.nnz, totals.vectors, method, totals.smallest_error, seconds)


def _check_form(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, dtype: np.dtype[Any]) -> None:
    if c.shape != (a.nrows, b.ncols):
        raise WrongProductError(f"C is {c.nrows:,} x {c.ncols:,}, but A @ B is {a.nrows:,} x {b.ncols:,}")
    if c.dtype != dtype:
        raise WrongProductError(f"C holds {c.dtype}, but {a.dtype} times {b.dtype} is {dtype}")


@dataclass
class _RowTotals:
    """Totals over the rows checked so far, for the result of `verify`."""

    vectors: int
    smallest_error: float = 0.0
    recomputed: int = 0

    def add(self, found: _RangeResult) -> None:
        """Count the rows of one range."""
        self.smallest_error = max(self.smallest_error, found.smallest_error)
        self.recomputed += found.recomputed


def _reason_to_accept(c: StoredMatrix, method: str, totals: _RowTotals) -> str:
    rows = counted(c.nrows, "row")
    if method == "recompute":
        return f"all {rows}, recomputed because bool products are not linear, equal C in pattern and values"
    if method == "modular":
        bits = 8 * c.dtype.itemsize
        how = f"modulo 2^{bits} for {totals.vectors} random x; any one wrong value would have been caught"
    else:
        how = (
            f"within rounding for {totals.vectors} random x; one value wrong by {totals.smallest_error:.2g} of its "
            f"row's |A||B| sum would have been caught"
        )
    more = f"; {counted(totals.recomputed, 'row')} with NaN, Inf or overflow recomputed" if totals.recomputed else ""
    return f"C x equals A (B x) in all {rows} {how}{more}"


# -- vectors -----------------------------------------------------------------------------------------------------------


class _Check:
    """The operands, the random vectors, and the vectors' products with B once `add_rows_of_b` has seen all of B.

    `x`: (vectors, ncols(B)): random vectors.
    `x_size`: (ncols(B),) float64: absolute values that all vectors share; empty unless values are floating.
    `bx`: (vectors, nrows(B)): B x.
    `size`: (nrows(B),) float64: |B||x|; empty unless values are floating.
    `guarded_size`: (nrows(B),) float64, optional: `size` with rows of tiny values counted higher; see
    `guard_tiny_rows`.
    """

    def __init__(self, operands: Operands, vectors: int, seed: int) -> None:
        nrows, self.operands = operands.b.matrix.nrows, operands
        self.x, self.x_size = _draw(operands.work, vectors, operands.ncols, seed)
        self.bx = np.zeros((vectors, nrows), operands.work)
        self.size = np.zeros(nrows if self.is_rounded else 0)
        self.guarded_size: FloatArray | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether values are floating, so that sums are rounded."""
        return self.operands.method == "freivalds"

    def multiply_b(self, block: RowRange) -> tuple[ValueArray, FloatArray]:
        """Return B x and |B||x| of some rows of B."""
        bx, size = np.zeros((len(self.x), block.nrows), self.operands.work), np.zeros(block.nrows)
        with np.errstate(all="ignore"):
            for piece in self.operands.read(self.operands.b, block, 0):
                _add_product(bx, piece, self.x)
                if self.is_rounded:
                    size += _absolute(piece) @ self.x_size
        return bx, size

    def add_rows_of_b(self, block: RowRange, bx: ValueArray, size: FloatArray) -> None:
        """Keep the products of some rows of B.

        `bx`: (vectors, block.nrows) array.
        `size`: (block.nrows,) float64: |B||x|.
        """
        rows = slice(block.start, block.stop)
        self.bx[:, rows] = bx
        self.operands.note_offsets(block)
        if self.is_rounded:
            self.size[rows] = size

    def guard_tiny_rows(self) -> None:
        """Keep a second size if values of B are so small that B x is not accurate to a unit roundoff.

        The rounding error of a product below 2^-1022 is up to 2^-1075, not proportional. A size of at least 2^-1000 for
        each entry of a row of B covers this error, and does not change rows of larger values.
        """
        floor = np.diff(self.operands.b_offsets) * TINY_SIZE
        if self.is_rounded and np.any(self.size < floor):
            self.guarded_size = np.maximum(self.size, floor)


def _draw(work: np.dtype[Any], vectors: int, n: int, seed: int) -> tuple[ValueArray, FloatArray]:
    """Return random vectors, one a row, and the absolute values that they share if they are floating.

    The first vector of integers is odd, and so has an inverse modulo 2^w: every single error shows. The others are
    uniform: with odd vectors only, two errors of 2^(w-1) in one row would always cancel.
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


def _add_product(out: ValueArray, piece: CSR, x: ValueArray) -> None:
    matrix = piece.to_scipy()
    for row, vector in zip(out, x, strict=True):  # one vector at a time: SciPy's loop over several is slower
        row += matrix @ vector


def _absolute(piece: CSR) -> sp.csr_matrix:
    out: sp.csr_matrix = CSR(piece.indptr, piece.indices, np.abs(piece.data), piece.shape).to_scipy()
    return out


# -- the run -----------------------------------------------------------------------------------------------------------


def _run(check: _Check, threads: int, totals: _RowTotals, progress: Progress) -> None:
    """Read B, then A and C together; raises `WrongProductError` at the first wrong row."""
    operands = check.operands
    total, done = sum(operand.matrix.nnz for operand in (operands.a, operands.b, operands.c)), 0
    for block, (bx, size) in _in_order(threads, check.multiply_b, row_ranges((operands.b,), operands.limits)):
        check.add_rows_of_b(block, bx, size)
        done += block.entries
        progress(done, total)
    check.guard_tiny_rows()
    ranges = row_ranges((operands.a, operands.c), operands.limits)
    for block, found in _in_order(threads, lambda block: _check_range(check, block), ranges):
        totals.add(found)
        if found.message:
            raise WrongProductError(found.message)
        done += block.entries
        progress(done, total)


def _in_order(threads: int, task: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Run `task` on all items, a few in advance, and yield results in order, so that the first wrong row raises."""
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


# -- a range of rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RangeResult:
    """Result of the check of a range of rows; an empty message if all rows are right."""

    message: str = ""
    smallest_error: float = 0.0
    recomputed: int = 0


class _Comparison(NamedTuple):
    """Rows that are wrong, rows that cannot be checked by vectors, and the smallest error that would be found."""

    wrong: BoolArray
    not_finite: BoolArray
    smallest_error: float


def _check_range(check: _Check, block: RowRange) -> _RangeResult:
    """Check some rows of C against A and B x."""
    operands = check.operands
    with np.errstate(all="ignore"):
        if operands.method == "recompute":
            return _RangeResult(first_wrong_entry(operands, block, np.arange(block.nrows)) or "")
        cx = np.zeros((len(check.x), block.nrows), operands.work)
        for piece in operands.read(operands.c, block, 1):
            _add_product(cx, piece, check.x)
        sums = _sum_rows(check, block)
        wrong_length = sums.wrong_lengths(operands.ncols)
        compared = (
            _compare_exact(operands.dtype, cx, sums)
            if operands.work.kind == "u"
            else _compare(operands.dtype, cx, sums)
        )
        first = np.flatnonzero(wrong_length | compared.wrong)[:1]
        named = first[sums.lengths.products[first] <= operands.limits.named_products]  # recomputed to name the entry
        again = np.union1d(np.flatnonzero(compared.not_finite), named)
        message = first_wrong_entry(operands, block, again) if len(again) else None
        if message is None and len(first):
            row = int(first[0])
            message = f"row {block.start + row:,} of C: " + sums.explain(row, bool(wrong_length[row]))
    return _RangeResult(message or "", compared.smallest_error, int(np.count_nonzero(compared.not_finite)))


@dataclass(frozen=True)
class _RowSums:
    """A (B x) of some rows, and the bounds on the error and the length of each row."""

    product: ValueArray  # (vectors, nrows): A (B x)
    # (nrows,) float64: |A||B||x|, and |A| times `_Check.guarded_size`
    size: FloatArray
    guarded_size: FloatArray
    lengths: RowLengths = field(repr=False)

    def explain(self, row: int, wrong_length: bool) -> str:
        """Say what is wrong with a row that is too long to look for the entry."""
        if not wrong_length:
            return "C x differs from A (B x) by more than rounding"
        return (
            f"{self.lengths.c[row]:,} entries, but {self.lengths.products[row]:,} products and rows of B of up to "
            f"{self.lengths.longest_b[row]:,} entries lead to them"
        )

    def wrong_lengths(self, ncols: int) -> BoolArray:
        """Whether C's row is shorter than a row of B it holds, or longer than its products allow."""
        most = np.minimum(self.lengths.products, ncols)
        return (self.lengths.c < self.lengths.longest_b) | (self.lengths.c > most)


def _sum_rows(check: _Check, block: RowRange) -> _RowSums:
    """Read some rows of A and multiply them with B x."""
    operands, nrows = check.operands, block.nrows
    counts = np.zeros((2, nrows), np.int64)
    lengths = RowLengths(np.diff(block.offsets[0]), np.diff(block.offsets[1]), counts[0], counts[1])
    sums = _RowSums(np.zeros((len(check.x), nrows), operands.work), np.zeros(nrows), np.zeros(nrows), lengths)
    for piece in operands.read(operands.a, block, 0):
        _add_product(sums.product, piece, check.bx)
        if check.is_rounded:
            absolute = _absolute(piece)
            size = absolute @ check.size
            sums.size[:] += size
            sums.guarded_size[:] += size if check.guarded_size is None else absolute @ check.guarded_size
        in_b = operands.lengths_in_b(piece)
        lengths.products[:] += np.diff(sum_before(in_b)[piece.indptr])
        filled = np.flatnonzero(np.diff(piece.indptr))
        if len(filled):
            most = np.maximum.reduceat(in_b, piece.indptr[filled])
            lengths.longest_b[filled] = np.maximum(lengths.longest_b[filled], most)
    return sums


def _compare_exact(dtype: np.dtype[Any], cx: ValueArray, sums: _RowSums) -> _Comparison:
    """Compare integers modulo 2^w: they are computed modulo 2^64, whose lower part that is."""
    differs = (cx - sums.product).astype(f"u{dtype.itemsize}") != 0
    return _Comparison(differs.any(axis=0), np.zeros(cx.shape[1], np.bool_), 0.0)


def _compare(dtype: np.dtype[Any], cx: ValueArray, sums: _RowSums) -> _Comparison:
    """Compare floats within their rounding errors."""
    factor = vector_error_factor(dtype, sums.lengths)
    bound = factor * sums.guarded_size + 4 * float(np.finfo(dtype).tiny) * sums.lengths.products
    not_finite = ~(np.isfinite(cx).all(axis=0) & np.isfinite(sums.product).all(axis=0) & np.isfinite(bound))
    wrong = (np.abs(cx - sums.product) > bound).any(axis=0) & ~not_finite
    comparable = ~not_finite & (sums.size > 0)
    # An error e adds e x_j with |x_j| >= 1/2 to what rounding may have left, and that is at most the bound.
    relative = np.divide(bound, sums.size, out=np.zeros_like(bound), where=comparable)
    caught = np.where(not_finite, factor, relative)
    return _Comparison(wrong, not_finite, float(4 * np.max(caught, initial=0.0)))
