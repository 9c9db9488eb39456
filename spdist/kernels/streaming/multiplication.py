"""One multiplication as a device carries it out: operands, dtypes, options for C, and rows to multiply."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import Reduction
from spdist.kernels.rounding import ceil_div
from spdist.kernels.streaming.layout import DeviceDtypes, SubmatrixOffset, device_dtypes, share_entries
from spdist.kernels.streaming.partition import BlockHistory, bad_row_error
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array


@dataclass(frozen=True)
class RowSlice:
    """Which rows of A one call multiplies, and how A belongs to a larger multiplication."""

    start: int = 0  # first row of A to multiply
    capacity: int | None = None  # entries of C to return at most, in whole rows; None for no bound
    first_row: int = 0  # number of A's row 0 in the whole C: messages and reductions count from it
    offset: SubmatrixOffset | None = None  # where all of A lies in B, if it does: the device then takes A from B
    # ratios that earlier calls for rows of the same C measured; this call adds its own
    history: BlockHistory = field(default_factory=BlockHistory)
    products: int = 0  # that all rows of A were planned to have; 0 if unknown


@dataclass(frozen=True)
class Multiplication:
    """One call's work: ``a @ b`` for a slice of A's rows, with the options for C."""

    # on the host. Values that the semiring does not read are zeros.
    a: CSR
    b: CSR
    dtypes: DeviceDtypes
    spec: ProductSpec
    reduction: Reduction | None  # reduction of C to return; None to return C
    rows: RowSlice  # with `offset` set if the device may take A from B

    @property
    def nrows(self) -> int:
        """Number of rows to multiply."""
        return self.a.nrows - self.rows.start

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of all of ``a @ b``."""
        return self.a.nrows, self.b.ncols

    @property
    def is_whole(self) -> bool:
        """Whether all rows of A are multiplied, however many entries C has."""
        return self.rows.start == 0 and self.rows.capacity is None

    @property
    def is_empty(self) -> bool:
        """Whether C has no entries because there are no rows, or an operand has no entries."""
        return 0 in (self.nrows, self.a.nnz, self.b.nnz)

    def expects_at_most(self, products: int) -> bool:
        """Return whether A's entries times B's mean row length are at most `products`."""
        return self.a.nnz * self.b.nnz <= products * self.b.nrows

    def triangle_share(self, start: int, stop: int) -> float:
        """Return the share of rows [start, stop) that a triangle keeps if columns are spread evenly; else 1.0."""
        if self.spec.diagonal is None:
            return 1.0
        return max(1 - (self.spec.diagonal + (start + stop) / 2) / self.b.ncols, 0.5 / self.b.ncols)

    def most_entries(self, products: int) -> int:
        """Bound the entries of C by its products, the options and the capacity."""
        top_n, inside, capacity = self.spec.top_n, self.spec.inside, self.rows.capacity
        bounds = (
            products,
            None if top_n is None else top_n * self.nrows,
            None if inside is None else inside.nnz,
            capacity,
        )
        return min(bound for bound in bounds if bound is not None)

    def sampled_rows(self, count: int, entries: int) -> Int64Array:
        """Return evenly spaced rows to multiply: at most `count`, with about `entries` entries at most.

        Raises `MatrixError` if offsets of A are out of range.
        """
        a, start = self.a, self.rows.start
        rows = np.unique(np.linspace(start, a.nrows - 1, min(count, self.nrows)).astype(np.int64))
        lengths = a.indptr[rows + 1] - a.indptr[rows]
        bad = (lengths < 0) | (a.indptr[rows + 1] > a.nnz)
        if bad.any():
            raise bad_row_error(int(rows[np.argmax(bad)]), a.ncols)
        step = max(1, ceil_div(int(lengths.sum()), entries))
        return rows[step // 2 :: step] if step < len(rows) else rows[:1]

    def with_b_as_uploaded(self) -> Multiplication:
        """Return the multiplication with B in the device's dtypes, so that copying its rows converts nothing."""
        b, dtypes = self.b, self.dtypes
        indices, data = b.indices.astype(dtypes.index, copy=False), b.data.astype(dtypes.b, copy=False)
        return replace(self, b=CSR(b.indptr, indices, data, b.shape))


def plan_multiplication(
    a: CSR, b: CSR, spec: ProductSpec, reduction: Reduction | None, rows: RowSlice
) -> Multiplication:
    """Check the arguments of a multiplication of matrices on the host, and determine whether A is a view of B.

    Its `rows.offset` is None unless the device may take A from B. `reduction`: None to return C.
    Raises `InputError` if `rows` are out of range, or the GPU has no kernels for the options; `MatrixError` if shapes
    or dtypes do not fit.
    """
    if not 0 <= rows.start <= a.nrows or (rows.capacity or 0) < 0:
        raise InputError(
            f"start={rows.start:,} must lie in [0, {a.nrows:,}], and capacity={rows.capacity} must not be negative"
        )
    if a.ncols != b.nrows:
        raise MatrixError(
            f"A has {a.ncols:,} columns but B has {b.nrows:,} rows: A @ B needs as many rows of B as A has columns"
        )
    offset, reads = rows.offset, spec.semiring.reads
    if share_entries(a, b) and _are_equal(a.indptr, b.indptr):
        offset = SubmatrixOffset()
    value = None if spec.plain else spec.semiring.result_dtype(a.dtype, b.dtype)
    if value is not None:
        a, b = _without_unread_values(a, b, reads, value)
    dtypes = device_dtypes(a, b, value)
    if ("a" in reads) != ("b" in reads) or dtypes.a != dtypes.b:
        offset = None  # A and B share columns, but not values
    spec.check((a.nrows, b.ncols), dtypes.value)
    spec.check_device()
    return Multiplication(a, b, dtypes, spec, reduction, replace(rows, offset=offset))


def _without_unread_values(a: CSR, b: CSR, reads: str, dtype: np.dtype[Any]) -> tuple[CSR, CSR]:
    """Return the operands with zeros for values that are not read: those need not fit the dtype of C."""
    values = [m.data if name in reads else np.zeros(m.nnz, dtype) for name, m in (("a", a), ("b", b))]
    if a.data is b.data and not reads:
        values[1] = values[0]
    return CSR(a.indptr, a.indices, values[0], a.shape), CSR(b.indptr, b.indices, values[1], b.shape)


def _are_equal(a: Int64Array, b: Int64Array) -> bool:
    """Return whether two arrays of offsets are equal."""
    return a is b or np.array_equal(a, b)


def gather_rows(m: CSR, rows: Int64Array) -> CSR:
    """Gather rows of a matrix, in any order and repeated at will, into a new one."""
    lengths = m.indptr[rows + 1] - m.indptr[rows]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    at = np.repeat(m.indptr[rows] - indptr[:-1], lengths) + np.arange(indptr[-1])
    return CSR(indptr, m.indices[at], m.data[at], (len(rows), m.ncols))
