"""Bounds on rounding errors: how far a right C may differ from its check, by rows through vectors or by entries.

References
----------
.. [1] N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM 2002, sections 2.2, 3.1, 3.6.
.. [2] C.-P. Jeannerod, S. M. Rump, "Improved error bounds for inner products in floating-point arithmetic", SIAM J.
   Matrix Anal. Appl. 34(2), 2013: ``n u`` holds for sums of n products in any order and of any length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.matrices.dtypes import Int64Array, ValueArray

CHECK_ROUNDOFF = 2.0**-53
"""Unit roundoff of the checking arithmetic, which is float64 or complex128 for every dtype of C."""

SLACK = 1 + 2.0**-10
"""Factor that covers terms of second order and the rounding of the bounds themselves."""

SCALE = 2.0**-515
"""Factor on both operands of a float64 product that may overflow."""

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class RowLengths(NamedTuple):
    """Counts for a range of rows."""

    # (nrows,) int64: entries of the row of A and of the row of C
    a: Int64Array
    c: Int64Array
    products: Int64Array  # (nrows,) int64: products of the row
    longest_b: Int64Array  # (nrows,) int64: entries of the longest row of B that the row of A multiplies


def vector_error_factor(dtype: np.dtype[Any], rows: RowLengths) -> FloatArray:
    """Bound the computed ``|C x - A (B x)|`` of a right C, row by row, in units of ``|A||B||x|``.

    Let u be the unit roundoff of C's dtype, v = 2^-53 the unit roundoff of the check, s = ``|A||B||x|`` and, in each
    row, n the products of an entry, k and r the entries of A and of C, m the entries of the longest row of B touched:

    * C's value is a sum of at most n products in any order: wrong by at most ``n u |A||B|`` [2]_. n is at most k, and
      at most ``products - r + 1``, since each other entry takes a product. 64-bit integers become floats first, which
      adds 2.
    * ``C x`` as computed is wrong by at most ``r v |C||x|``, and ``|C| <= (1 + n u) |A||B|``.
    * ``A (B x)`` as computed is wrong by at most ``(k + m) v s``.
    * A product that underflows, flushed to zero or not, is wrong by at most the smallest normal number, a complex one
      by four times that. The caller adds this term.

    A complex sum of n products is two real sums of 2 n products, of size ``|a||b|`` together: ``2 sqrt(2) n u``, taken
    as 3. All of this is worst case: a statistical bound, about the square root, would at times reject a right product.

    `dtype`: of C, real or complex floating.
    Returns (nrows,) float64.

    References
    ----------
    .. [2] C.-P. Jeannerod, S. M. Rump, "Improved error bounds for inner products in floating-point arithmetic", SIAM J.
       Matrix Anal. Appl. 34(2), 2013.

    Examples
    --------
    >>> one = np.ones(1, np.int64)
    >>> bool(vector_error_factor(np.dtype("f8"), RowLengths(one, one, one, one))[0] < 1e-14)
    True
    """
    u, weight = float(np.finfo(dtype).eps) / 2, 3.0 if dtype.kind == "c" else 1.0
    n = np.minimum(rows.a, np.maximum(rows.products - rows.c + 1, 1)) + 2.0
    own = weight * n * u
    check = weight * (rows.c * (1 + own) + rows.a + rows.longest_b + 2.0) * CHECK_ROUNDOFF
    return np.asarray(SLACK * (own + check), np.float64)


class ProductFacts(NamedTuple):
    """Facts of products whose sums over an entry's products decide which values the entry may have."""

    # 1 if the product is NaN, Inf or -Inf because an operand is not finite; the other facts of the product but
    # `products` are 0 then
    nan: ValueArray
    plus_inf: ValueArray
    minus_inf: ValueArray
    products: ValueArray  # 1
    # the product and its absolute value
    value: ValueArray
    size: ValueArray
    # parts of the product of operands scaled by `SCALE`, so that it does not overflow: if real, the positive and the
    # negative part; if complex, the product and its absolute value
    scaled: ValueArray
    scaled_other: ValueArray


def product_facts(left: ValueArray, right: ValueArray) -> ValueArray:
    """Return the facts of products as one array, a row for each field of `ProductFacts`.

    `left, right`: (products,) float64 or complex128.
    Returns (8, products) array of the dtype of the products.

    Examples
    --------
    >>> ProductFacts(*product_facts(np.array([2.0, np.inf]), np.array([-3.0, 1.0]))).value
    array([-6.,  0.])
    """
    finite = np.isfinite(left) & np.isfinite(right)
    product = left * right
    real = left.dtype.kind == "f"
    plus, minus = (~finite & real & (product.real == sign * np.inf) for sign in (1, -1))
    left, right = np.where(finite, left, 0), np.where(finite, right, 0)
    near, far = np.abs(left), np.abs(right)
    scaled = (left * SCALE) * (right * SCALE)
    parts = (np.maximum(scaled, 0), np.maximum(-scaled, 0)) if real else (scaled, near * SCALE * (far * SCALE))
    nan = ~finite & ~plus & ~minus
    return np.stack([nan, plus, minus, np.ones(len(left)), left * right, near * far, *parts])


def wrong_values(dtype: np.dtype[Any], table: ValueArray, values: ValueArray) -> tuple[ValueArray, BoolArray]:
    """Return the expected values, and which of `values` no order of summation gives.

    A finite value must lie within rounding of the sum, and no operand may be NaN or Inf. An infinite value needs an Inf
    of its sign among the products, or products of its sign that together overflow. NaN needs a NaN among the products,
    or infinities of both signs. Complex values that are not finite are compared only as such: their parts differ
    between ways to multiply.

    `table`: (8, entries): sums of `product_facts` over the products of each entry.
    `values`: (entries,): what C holds.
    Returns `expected`: (entries,) array: NaN or Inf if only this fits.
    Returns `wrong`: (entries,) bool: true if no order of summation gives the value in `values`.
    """
    facts = ProductFacts(*table)
    nan, plus, minus, count, size = (
        each.real for each in (facts.nan, facts.plus_inf, facts.minus_inf, facts.products, facts.size)
    )
    total, info, complex_ = facts.value, np.finfo(dtype), dtype.kind == "c"
    first, second = facts.scaled, facts.scaled_other
    scaled, scaled_size = (first, second.real) if complex_ else (first - second, first + second)
    factor = SLACK * (3.0 if complex_ else 1.0) * (count + 2) * (float(info.eps) / 2 + CHECK_ROUNDOFF)
    within = np.abs(values - total) <= factor * size + 4 * float(info.tiny) * count
    within_scaled = np.abs(values * SCALE * SCALE - scaled) <= factor * scaled_size
    regular = (nan == 0) & (plus == 0) & (minus == 0)
    finite_ok = regular & np.where(np.isfinite(total) & np.isfinite(size), within, within_scaled)
    limit = float(info.max) * SCALE * SCALE * (1 - 2 * factor)
    if complex_:
        wanted = np.where(regular, total, np.nan)
        return wanted, ~np.where(np.isfinite(values), finite_ok, ~regular | (scaled_size >= limit / 4))
    up, down = (plus > 0) | (first >= limit), (minus > 0) | (second >= limit)
    no_number = (nan > 0) | ((plus > 0) & (minus > 0))
    right = np.where(np.isnan(values), no_number | (up & down), finite_ok)
    right = np.where(values == np.inf, ~no_number & up & (minus == 0), right)
    right = np.where(values == -np.inf, ~no_number & down & (plus == 0), right)
    wanted = np.select([no_number, plus > 0, minus > 0], [np.nan, np.inf, -np.inf], total)
    return wanted, ~right
