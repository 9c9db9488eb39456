"""Integer division and multiples, rounded up."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up; b is above 0.

    Examples
    --------
    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Return the least multiple of `b`, which is above 0, that is at least `a`.

    Examples
    --------
    >>> round_up(7, 3), round_up(6, 3)
    (9, 6)
    """
    return ceil_div(a, b) * b
