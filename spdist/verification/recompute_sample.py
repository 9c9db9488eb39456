"""Verify a product that is an answer: what mask, threshold and top-n demand of every row, and some rows made again.

Freivalds' check is for sums of products, whole. What a semiring, a mask, a threshold or top-n made of them is checked
in two ways. Every row of C: sorted, no longer than top-n, no value below the threshold, inside the mask or outside of
it, on and above the diagonal. And rows drawn at random, the first and the last among them: made again with NumPy, the
products of each entry added in the order of k, and compared entry by entry; exactly, but for floating sums, whose
partial sums may have been added in another order. What was checked is said in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.semirings import Operator, Semiring, both, either, first, larger, pair, plus, second, smaller, times
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import StoredProductSpec
from spdist.verification.result import Verification, WrongProductError

ROWS = 200
"""Rows made again, at the most."""
PRODUCTS = 1 << 26
"""Products of these rows, from which no further one is made."""
SLACK = 4.0
"""Roundings allowed for each product of a floating sum."""

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
"""What the operators of the named semirings are on arrays."""


def verify_by_recomputing(
    a: StoredMatrix,
    b: StoredMatrix,
    c: StoredMatrix,
    spec: StoredProductSpec,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Check that `c` is what `spec` makes of A @ B.

    Parameters
    ----------
    a, b, c : StoredMatrix
    spec : StoredProductSpec
    seed : int
        Of the rows that are drawn.
    progress : callable, optional
        Called with rows done and rows in all, of both checks together.

    Returns
    -------
    Verification
        Of method ``sampled``; `reason` says how many rows were made again. Its `vectors` and `smallest_error` are 0.
    """
    began = time.perf_counter()
    spec.check(a, b, "auto")
    chosen = _choose(a, seed)
    tell = progress or (lambda done, total: None)
    try:
        _check_form(a, b, c, spec.dtype(a, b))
        for stop in _check_rows(c, spec):
            tell(stop, c.nrows + len(chosen))
        again, products = 0, 0
        while again < len(chosen) and products < PRODUCTS:
            products += _check_row(a, b, c, spec, int(chosen[again]))
            again += 1
            tell(c.nrows + again, c.nrows + len(chosen))
        ok, reason = True, _praise(c, spec, again)
    except WrongProductError as error:
        ok, reason = False, str(error)
    return Verification(ok, reason, c.nrows, c.nnz, 0, "sampled", 0.0, time.perf_counter() - began)


def _praise(c: StoredMatrix, spec: StoredProductSpec, again: int) -> str:
    rows = f"all {c.nrows:,} rows" if again == c.nrows else f"{again:,} of {c.nrows:,} rows, drawn at random,"
    limits = [
        *(["at most top_n entries"] if spec.per_row.top_n is not None else []),
        *(["values from the threshold up"] if spec.per_row.threshold is not None else []),
        *([f"{'out of' if spec.complement else 'inside'} the mask"] if spec.mask is not None else []),
        *(["on and above the diagonal"] if spec.per_row.triangle is not None else []),
    ]
    kept = ", ".join(["sorted", *limits])
    unlike = "" if again == c.nrows else "; values of the others were not"
    return f"{rows} made again by {spec.per_row.semiring.name} equal C; all {c.nrows:,} are {kept}{unlike}"


def _check_form(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, dtype: np.dtype[Any]) -> None:
    if c.shape != (a.nrows, b.ncols):
        raise WrongProductError(f"C is {c.nrows:,} x {c.ncols:,}, but A times B is {a.nrows:,} x {b.ncols:,}")
    if c.dtype != dtype:
        raise WrongProductError(
            f"C holds {c.dtype}, but the product of {a.dtype} and {b.dtype} that was asked for is {dtype}"
        )


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
                raise WrongProductError(f"{_place(rows, start, wrong[0])} of C is {side} the mask")
        yield stop


def _check_selection(rows: CSR, start: int, spec: ProductSpec) -> None:
    """Check rows from `start` on against `top_n`, `threshold` and `triangle`."""
    top_n, lengths = spec.top_n, np.diff(rows.indptr)
    if top_n is not None and (long := np.flatnonzero(lengths > top_n)).size:
        count = lengths[long[0]]
        raise WrongProductError(f"row {start + long[0]:,} of C has {count:,} entries, but top_n is {top_n:,}")
    if spec.selects and (low := np.flatnonzero(~(rows.data >= spec.least(rows.dtype)))).size:
        place = _place(rows, start, low[0])
        raise WrongProductError(f"{place} of C holds {rows.data[low[0]]}, below the threshold")
    if spec.triangle is not None:
        below = np.flatnonzero(rows.indices < np.repeat(np.arange(start, start + rows.nrows), lengths))
        if below.size:
            raise WrongProductError(f"{_place(rows, start, below[0])} of C is below the diagonal")


def _place(rows: CSR, start: int, at: int) -> str:
    row = int(np.searchsorted(rows.indptr, at, side="right")) - 1
    return f"row {start + row:,}, column {int(rows.indices[at]):,}"


def _inside(c: CSR, mask: CSR) -> BoolArray:
    """Return which entries of C the mask has as well."""
    keys, marked = (
        np.repeat(np.arange(m.nrows, dtype=np.int64), np.diff(m.indptr)) * m.ncols + m.indices for m in (c, mask)
    )
    found: BoolArray = np.isin(keys, marked, assume_unique=True)
    return found


# -- some rows ---------------------------------------------------------------------------------------------------------


def _choose(a: StoredMatrix, seed: int) -> Int64Array:
    """Return the rows to make again: the first, the last, and others drawn at random."""
    if a.nrows <= ROWS:
        return np.arange(a.nrows)
    drawn = np.random.default_rng(seed).choice(a.nrows, ROWS - 2, replace=False)
    return np.unique([0, *drawn, a.nrows - 1])


def _within(a: StoredMatrix, b: StoredMatrix, rows: Int64Array) -> Iterator[int]:
    """Yield as many of the rows as come to `PRODUCTS` products."""
    products = 0
    for row in rows.tolist():
        columns = a.rows_indices(row, row + 1).indices
        products += sum(int(np.diff(b.read_indptr(k, k + 1))[0]) for k in columns.tolist())
        if products > PRODUCTS and row != rows[0]:
            return
        yield row


@dataclass(frozen=True)
class _Row:
    """Entries of a row made again: columns, values, and what rounding may have changed these by."""

    columns: Int64Array
    values: ValueArray
    error: ValueArray

    def only(self, chosen: BoolArray | Int64Array) -> _Row:
        """Return some of its entries."""
        return _Row(self.columns[chosen], self.values[chosen], self.error[chosen])


def _check_row(a: StoredMatrix, b: StoredMatrix, c: StoredMatrix, spec: StoredProductSpec, row: int) -> int:
    """Make one row again and compare; return its products."""
    left = a.rows(row, row + 1)
    right = b.take(left.indices.astype(np.int64))
    made = _make(left, right, spec, c.dtype)
    mask = spec.read_mask(row, row + 1)
    if mask is not None:
        made = made.only(np.isin(made.columns, mask.indices) != spec.complement)
    if spec.per_row.triangle is not None:
        made = made.only(made.columns >= row)
    if spec.per_row.epilogue is not None:
        made = _finish(made, spec.per_row.epilogue.of_rows(row, row + 1))
    found = c.rows(row, row + 1)
    expected = _cut(made, spec.per_row, c.dtype)
    if np.array_equal(found.indices, expected.columns):
        _compare(found.data, expected, row)
        return right.nnz
    odd = int(np.setxor1d(found.indices, expected.columns)[0])
    if not made.error.any() or not _may_be(found, made, spec.per_row, c.dtype):
        have = "is missing in C" if odd in expected.columns else "of C should not be there"
        raise WrongProductError(f"row {row:,}, column {odd:,}: this entry {have}")
    at = np.searchsorted(made.columns, found.indices)
    _compare(found.data, made.only(at), row)
    return right.nnz


def _make(a: CSR, rows: CSR, spec: StoredProductSpec, dtype: np.dtype[Any]) -> _Row:
    """Make a row of C from one of A and the rows of B beside its entries: products are added in the order of k."""
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
    """Call an operator on arrays; one's own is called for each pair of scalars."""
    if ring.named:
        return np.asarray(ON_ARRAYS[function](x, y))
    call = getattr(function, "py_func", function)
    shape = np.broadcast(x, y).shape
    pairs = zip(np.broadcast_to(x, shape), np.broadcast_to(y, shape), strict=True)
    return np.array([call(one, other) for one, other in pairs], dtype=x.dtype).reshape(shape)


def _finish(row: _Row, epilogue: Epilogue) -> _Row:
    """Apply an epilogue to a row, and to what its roundings may come to."""
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
    made = _Row(row.columns, values, error)
    return made.only(made.values != 0) if epilogue.drop_zeros else made


def _cut(row: _Row, spec: ProductSpec, dtype: np.dtype[Any]) -> _Row:
    """Cut a row to the threshold and its largest entries, of equal ones those in smaller columns."""
    if not spec.selects:
        return row
    row = row.only(row.values >= spec.least(dtype))
    if spec.top_n is None or len(row.columns) <= spec.top_n:
        return row
    rank = np.unique(row.values, return_inverse=True)[1]  # of unsigned values there is no negative
    return row.only(np.sort(np.lexsort((row.columns, -rank))[: spec.top_n]))


def _may_be(found: CSR, made: _Row, spec: ProductSpec, dtype: np.dtype[Any]) -> bool:
    """Whether another choice of entries comes of roundings: all that were left out are as small as those kept."""
    if not spec.selects or not np.isin(found.indices, made.columns).all():
        return False
    kept = np.isin(made.columns, found.indices)
    least = spec.least(dtype)
    if not (made.values[kept] + made.error[kept] >= least).all():
        return False
    cut = least
    if spec.top_n is not None and found.nnz == spec.top_n:
        cut = max(cut, (made.values[kept] + made.error[kept]).min())
    left = made.only(~kept & (made.values == made.values))
    return bool((left.values - left.error <= cut).all())


def _compare(values: ValueArray, expected: _Row, row: int) -> None:
    """Compare values; NaN equals NaN."""
    with np.errstate(all="ignore"):
        same = (values == expected.values) | ((values != values) & (expected.values != expected.values))
        near = same | (np.abs(values - expected.values) <= expected.error) if expected.error.any() else same
    if not near.all():
        at = int(np.argmin(near))
        raise WrongProductError(
            f"row {row:,}, column {int(expected.columns[at]):,}: C holds {values[at]}, made again it is "
            f"{expected.values[at]}"
        )
