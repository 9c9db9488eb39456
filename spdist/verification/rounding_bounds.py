"""How far a right product may be from its check: bounds on rounding errors, of rows through vectors and of entries.

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
    """Counts of a range of rows, each (nrows,) int64.

    Attributes
    ----------
    a, c : entries of A and of C
    products : products of the row
    longest_b : entries of the longest row of B that the row of A touches
    """

    a: Int64Array
    c: Int64Array
    products: Int64Array
    longest_b: Int64Array


def vector_error_factor(dtype: np.dtype[Any], rows: RowLengths) -> FloatArray:
    """Bound ``|C x - A (B x)|`` of a right C, as computed, per row and in units of ``|A||B||x|``.

    With u the unit roundoff of C's dtype, v = 2^-53 that of the check, s = ``|A||B||x|`` and, per row, n the products
    of an entry, k and r the entries of A's and C's row, m those of the longest row of B touched:

    * C's value is a sum of at most n products in any order: wrong by at most ``n u |A||B|`` [2]_. n is at most k, and
      at most ``products - r + 1``, since each other entry takes a product. 64-bit integers become floats first: 2 more.
    * ``C x`` as computed is wrong by at most ``r v |C||x|``, and ``|C| <= (1 + n u) |A||B|``.
    * ``A (B x)`` as computed is wrong by at most ``(k + m) v s``.
    * What underflows, which the caller adds, is wrong by at most the smallest normal number for each product, flushed
      to zero or not, and four times that where it is complex.

    A complex sum of n products is two real ones of 2 n products of size ``|a||b|`` together: ``2 sqrt(2) n u``, taken
    as 3. All of this is worst case: a statistical bound, about the root of it, would at times accuse a right product.
    """
    u, weight = float(np.finfo(dtype).eps) / 2, 3.0 if dtype.kind == "c" else 1.0
    n = np.minimum(rows.a, np.maximum(rows.products - rows.c + 1, 1)) + 2.0
    own = weight * n * u
    check = weight * (rows.c * (1 + own) + rows.a + rows.longest_b + 2.0) * CHECK_ROUNDOFF
    return np.asarray(SLACK * (own + check), np.float64)


def float_table(left: ValueArray, right: ValueArray) -> ValueArray:
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
    scaled = (left * SCALE) * (right * SCALE)
    parts = (np.maximum(scaled, 0), np.maximum(-scaled, 0)) if real else (scaled, near * SCALE * (far * SCALE))
    nan = ~finite & ~plus & ~minus
    return np.stack([nan, plus, minus, np.ones(len(left)), left * right, near * far, *parts])


def wrong_values(dtype: np.dtype[Any], table: ValueArray, values: ValueArray) -> tuple[ValueArray, BoolArray]:
    """Return the values expected and which of `values` no order of summation gives.

    A finite value must lie within rounding of the sum, and none of its operands may be NaN or Inf. An infinite one
    needs an Inf of its sign among the products, or products of its sign that together overflow; NaN needs a NaN among
    them, or both signs of the former. Of complex values that are not finite only that is compared: their parts differ
    between ways to multiply.
    """
    nan, plus, minus, count, size = (table[k].real for k in (0, 1, 2, 3, 5))
    total, info, complex_ = table[4], np.finfo(dtype), dtype.kind == "c"
    scaled, scaled_size = (table[6], table[7].real) if complex_ else (table[6] - table[7], table[6] + table[7])
    factor = SLACK * (3.0 if complex_ else 1.0) * (count + 2) * (float(info.eps) / 2 + CHECK_ROUNDOFF)
    within = np.abs(values - total) <= factor * size + 4 * float(info.tiny) * count
    within_scaled = np.abs(values * SCALE * SCALE - scaled) <= factor * scaled_size
    regular = (nan == 0) & (plus == 0) & (minus == 0)
    finite_ok = regular & np.where(np.isfinite(total) & np.isfinite(size), within, within_scaled)
    limit = float(info.max) * SCALE * SCALE * (1 - 2 * factor)
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
