"""Integer division and multiples, rounded up."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b``, rounded up; b is above 0."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Return the least multiple of `b`, which is above 0, that is at least `a`."""
    return ceil_div(a, b) * b
