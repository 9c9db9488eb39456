"""Verify a product with a semiring, mask, triangle, epilogue, threshold or top-n: recompute a sample of its rows.

Freivalds' check is for whole sums of products. Other products are checked in two ways. Every row of C must be sorted,
have at most top-n entries, no value below the threshold, and no entry outside the mask (inside its complement) or below
the diagonal. A random sample of rows, the first and the last among them, is recomputed with NumPy, which adds the
products of each entry in the order of k, and compared entry by entry: exactly, except floating sums, whose partial sums
the product may have added in another order. The result states how many rows were recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.foundation.units import counted
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.semirings import Operator, Semiring, both, either, first, larger, pair, plus, second, smaller, times
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import StoredProductSpec
from spdist.verification.result import Verification, WrongProductError

ROWS = 200
"""Most rows that are recomputed."""

PRODUCTS = 1 << 26
"""No further row is recomputed once the recomputed rows have this many products."""

SLACK = 4.0
"""Rounding errors, in units of the dtype's epsilon, allowed for each product of a floating sum."""

Progress = Callable[[int, int], None]
BoolArray = npt.NDArray[np.bool_]

ON_ARRAYS: dict[Operator, Operator] = {
    plus: np.add,
    times: np.multiply,
    smaller: lambda x, y: np.where(y < x, y, x),
    larger: lambda x, y: np.where(y > x, y, x),
    either: np.bitwise_or,
    both: np.bitwise_and,
    pair: lambda x, y: np.ones(np.broadcast(x, y).shape, np.int64),
    first: lambda x, y: np.broadcast_to(x, np.broadcast(x, y).shape),
    second: lambda x, y: np.broadcast_to(y, np.broadcast(x, y).shape),
}
"""The operators of the named semirings, for arrays."""


def verify_by_recomputing(
    a: StoredMatrix,
    b: StoredMatrix,
    c: StoredMatrix,
    spec: StoredProductSpec,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Check that `c` is the product of `a` and `b` that `spec` describes.

    The method of the result is ``sampled``, `reason` states how many rows were recomputed, and `vectors` and
    `smallest_error` are 0.

    `progress`: called with rows done and rows in all, of both checks together.
    Raises `InputError` if A and B have no such product.
    Raises `CorruptError` if a Zarr chunk is missing, truncated or altered.
    """
    began = time.perf_counter()
    spec.check(a, b, "auto")
    sample = _sample(a, seed)
    report = progress or (lambda done, total: None)
    try:
        _check_form(a, b, c, spec.dtype(a, b))
        for stop in _check_rows(c, spec):
            report(stop, c.nrows + len(sample))
        recomputed, products = 0, 0
        while recomputed < len(sample) and products < PRODUCTS:
            products += _check_row(a, b, c, spec, int(sample[recomputed]))
            recomputed += 1
            report(c.nrows + recomputed, c.nrows + len(sample))
        ok, reason = True, _reason_to_accept(c, spec, recomputed)
    except WrongProductError as error:
        ok, reason = False, str(error)
    return Verification(ok, reason, c.nrows, c.nnz, 0, "sampled", 0.0, time.perf_counter() - began)


def _reason_to_accept(c: StoredMatrix, spec: StoredProductSpec, recomputed: int) -> str:
    whole = counted(c.nrows, "row")
    rows = f"all {whole}" if recomputed == c.nrows else f"{recomputed:,} of {whole}, drawn at random,"
    limits = [
        *(["at most top_n entries"] if spec.per_row.top_n is not None else []),
        *(["values from the threshold up"] if spec.per_row.threshold is not None else []),
        *([f"{'out of' if spec.complement else 'inside'} the mask"] if spec.mask is not None else []),
        *(["on and above the diagonal"] if spec.per_row.triangle is not None else []),
    ]
    kept = ", ".join(["sorted", *limits])
    unlike = "" if recomputed == c.nrows else "; values of the others were not"
    return f"{rows} computed again by {spec.per_row.semiring.name} equal C; all {c.nrows:,} are {kept}{unlike}"


def _check_form(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, dtype: np.dtype[Any]) -> None:
    if c.shape != (a.nrows, b.ncols):
        raise WrongProductError(f"C is {c.nrows:,} x {c.ncols:,}, but A times B is {a.nrows:,} x {b.ncols:,}")
    if c.dtype != dtype:
        raise WrongProductError(f"C holds {c.dtype}, but this product of {a.dtype} and {b.dtype} is {dtype}")


# -- every row ---------------------------------------------------------------------------------------------------------


def _check_rows(c: StoredMatrix, spec: StoredProductSpec) -> Iterator[int]:
    """Check the form of every row; yield the number of rows done."""
    for start, stop, _ in c.row_blocks(4 * c.indices.chunk):
        rows = c.rows(start, stop)
        try:
            check_canonical(rows, c.url, start)
        except MatrixError as error:
            raise WrongProductError(str(error)) from None
        _check_selection(rows, start, spec.per_row)
        if spec.mask is not None:
            found = _inside(rows, spec.mask.rows_indices(start, stop))
            if (wrong := np.flatnonzero(found == spec.complement)).size:
                side = "inside" if spec.complement else "outside"
                raise WrongProductError(f"{_position(rows, start, wrong[0])} of C is {side} the mask")
        yield stop


def _check_selection(rows: CSR, start: int, spec: ProductSpec) -> None:
    """Check rows from `start` on against `top_n`, `threshold` and `triangle`."""
    top_n, lengths = spec.top_n, np.diff(rows.indptr)
    if top_n is not None and (long := np.flatnonzero(lengths > top_n)).size:
        count = lengths[long[0]]
        raise WrongProductError(f"row {start + long[0]:,} of C has {count:,} entries, but top_n is {top_n:,}")
    if spec.selects and (low := np.flatnonzero(~(rows.data >= spec.least(rows.dtype)))).size:
        position = _position(rows, start, low[0])
        raise WrongProductError(f"{position} of C holds {rows.data[low[0]]}, below the threshold")
    if spec.triangle is not None:
        below = np.flatnonzero(rows.indices < np.repeat(np.arange(start, start + rows.nrows), lengths))
        if below.size:
            raise WrongProductError(f"{_position(rows, start, below[0])} of C is below the diagonal")


def _position(rows: CSR, start: int, at: int) -> str:
    row = int(np.searchsorted(rows.indptr, at, side="right")) - 1
    return f"row {start + row:,}, column {int(rows.indices[at]):,}"


def _inside(c: CSR, mask: CSR) -> BoolArray:
    """Return which entries of C are in positions that the mask stores."""
    keys, marked = (
        np.repeat(np.arange(m.nrows, dtype=np.int64), np.diff(m.indptr)) * m.ncols + m.indices for m in (c, mask)
    )
    found: BoolArray = np.isin(keys, marked, assume_unique=True)
    return found


# -- some rows ---------------------------------------------------------------------------------------------------------


def _sample(a: StoredMatrix, seed: int) -> Int64Array:
    """Return the rows to recompute: the first, the last, and others drawn at random."""
    if a.nrows <= ROWS:
        return np.arange(a.nrows)
    drawn = np.random.default_rng(seed).choice(a.nrows, ROWS - 2, replace=False)
    return np.unique([0, *drawn, a.nrows - 1])


@dataclass(frozen=True)
class _Row:
    """A recomputed row: columns, values, and a bound on the rounding errors of these."""

    columns: Int64Array
    values: ValueArray
    error: ValueArray

    def take(self, selection: BoolArray | Int64Array) -> _Row:
        """Return some of the entries."""
        return _Row(self.columns[selection], self.values[selection], self.error[selection])


def _check_row(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, spec: StoredProductSpec, row: int) -> int:
    """Recompute one row and compare it with C's; return the number of its products."""
    left = a.rows(row, row + 1)
    right = b.take(left.indices.astype(np.int64))
    computed = _multiply_row(left, right, spec, c.dtype)
    mask = spec.read_mask(row, row + 1)
    if mask is not None:
        computed = computed.take(np.isin(computed.columns, mask.indices) != spec.complement)
    if spec.per_row.triangle is not None:
        computed = computed.take(computed.columns >= row)
    if spec.per_row.epilogue is not None:
        computed = _apply_epilogue(computed, spec.per_row.epilogue.of_rows(row, row + 1))
    found = c.rows(row, row + 1)
    expected = _select(computed, spec.per_row, c.dtype)
    if np.array_equal(found.indices, expected.columns):
        _compare(found.data, expected, row)
        return right.nnz
    column = int(np.setxor1d(found.indices, expected.columns)[0])
    if not computed.error.any() or not _is_other_selection(found, computed, spec.per_row, c.dtype):
        have = "is missing in C" if column in expected.columns else "of C should not be there"
        raise WrongProductError(f"row {row:,}, column {column:,}: this entry {have}")
    _compare(found.data, computed.take(np.searchsorted(computed.columns, found.indices)), row)
    return right.nnz


def _multiply_row(a: CSR, rows: CSR, spec: StoredProductSpec, dtype: np.dtype[Any]) -> _Row:
    """Multiply one row of A by the rows of B that its entries select; products are added in the order of k."""
    ring = spec.per_row.ring(dtype) or spec.per_row.semiring
    columns = np.unique(rows.indices).astype(np.int64)
    sums = np.full(len(columns), ring.zero_of(dtype), dtype)
    size = np.zeros(len(columns))
    inexact = dtype.kind in "fc" and (not ring.named or ring.add is plus)
    count = np.zeros(len(columns))
    left = a.data.astype(dtype) if "a" in ring.reads else np.zeros(a.nnz, dtype)
    with np.errstate(all="ignore"):
        for p in range(a.nnz):
            own = slice(int(rows.indptr[p]), int(rows.indptr[p + 1]))
            at = np.searchsorted(columns, rows.indices[own])
            right = rows.data[own].astype(dtype) if "b" in ring.reads else np.zeros(len(at), dtype)
            product = _apply(ring, ring.multiply, left[p : p + 1], right).astype(dtype)
            sums[at] = _apply(ring, ring.add, sums[at], product).astype(dtype)
            if inexact:
                size[at] += np.abs(product)
                count[at] += 1
        unit = float(np.finfo(dtype).eps) if inexact else 0.0
        return _Row(columns, sums, SLACK * unit * count * np.where(np.isfinite(size), size, 0.0))


def _apply(ring: Semiring, function: Operator, x: ValueArray, y: ValueArray) -> ValueArray:
    """Call an operator of a semiring on arrays; a user's function is called for each pair of scalars."""
    if ring.named:
        return np.asarray(ON_ARRAYS[function](x, y))
    call = getattr(function, "py_func", function)
    shape = np.broadcast(x, y).shape
    pairs = zip(np.broadcast_to(x, shape), np.broadcast_to(y, shape), strict=True)
    return np.array([call(one, other) for one, other in pairs], dtype=x.dtype).reshape(shape)


def _apply_epilogue(row: _Row, epilogue: Epilogue) -> _Row:
    """Apply an epilogue to the values of a row, and to the bounds of their rounding errors."""
    values, low, high = row.values, row.values - row.error, row.values + row.error
    for factors in (epilogue.rows, None if epilogue.columns is None else np.asarray(epilogue.columns)[row.columns]):
        if factors is not None:
            values, low, high = (x * np.asarray(factors).astype(values.dtype) for x in (values, low, high))
    if epilogue.apply is not None:
        call = getattr(epilogue.apply, "py_func", epilogue.apply)
        values, low, high = (np.array([call(one) for one in x], values.dtype) for x in (values, low, high))
    error = np.maximum(np.abs(high - values), np.abs(low - values))
    if epilogue.normalize is not None:
        size = np.linalg.norm(values, {"l1": 1, "l2": 2, "max": np.inf}[epilogue.normalize]) if len(values) else 0
        if size > 0:
            values, error = values / size, error / size + np.abs(values) / size * error.sum() / size
    if values.dtype.kind in "fc":
        error = error + SLACK * (len(values) + 2) * float(np.finfo(values.dtype).eps) * np.abs(values)
    out = _Row(row.columns, values, error)
    return out.take(values != 0) if epilogue.drop_zeros else out


def _select(row: _Row, spec: ProductSpec, dtype: np.dtype[Any]) -> _Row:
    """Keep entries from the threshold up, then the `top_n` largest; among equal values smaller columns win."""
    if not spec.selects:
        return row
    row = row.take(row.values >= spec.least(dtype))
    if spec.top_n is None or len(row.columns) <= spec.top_n:
        return row
    rank = np.unique(row.values, return_inverse=True)[1]  # ranks, because unsigned values cannot be negated
    return row.take(np.sort(np.lexsort((row.columns, -rank))[: spec.top_n]))


def _is_other_selection(found: CSR, computed: _Row, spec: ProductSpec, dtype: np.dtype[Any]) -> bool:
    """Whether rounding errors explain another selection: no entry left out is certainly larger than one kept."""
    if not spec.selects or not np.isin(found.indices, computed.columns).all():
        return False
    kept = np.isin(computed.columns, found.indices)
    least = spec.least(dtype)
    if not (computed.values[kept] + computed.error[kept] >= least).all():
        return False
    limit = least
    if spec.top_n is not None and found.nnz == spec.top_n:
        limit = max(limit, (computed.values[kept] + computed.error[kept]).min())
    left_out = computed.take(~kept & (computed.values == computed.values))
    return bool((left_out.values - left_out.error <= limit).all())


def _compare(values: ValueArray, expected: _Row, row: int) -> None:
    """Compare values; NaN equals NaN."""
    with np.errstate(all="ignore"):
        same = (values == expected.values) | ((values != values) & (expected.values != expected.values))
        near = same | (np.abs(values - expected.values) <= expected.error) if expected.error.any() else same
    if not near.all():
        at = int(np.argmin(near))
        raise WrongProductError(
            f"row {row:,}, column {int(expected.columns[at]):,}: C holds {values[at]}, computed again it is "
            f"{expected.values[at]}"
        )
