"""Batches: many products in memory by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spdist.errors import InputError
from spdist.inmemory import cupy_operands
from spdist.options import InMemoryOptions, ProductOptions

Multiply = Callable[[Any, Any], Any]


def is_batch(a: object, b: object) -> bool:
    """Whether operands are lists of matrices, and not rows of numbers."""
    return any(isinstance(one, list | tuple) and all(hasattr(m, "shape") for m in one) for one in (a, b))


def multiply(a: Any, b: Any, product: ProductOptions, options: InMemoryOptions, multiply_one: Multiply) -> list[Any]:
    """Multiply the matrices of two lists, pair by pair; small ones on the GPU together.

    Raises `InputError` if one operand is no list, or the other is longer; else as `multiply_one` does.
    """
    if not (isinstance(a, list | tuple) and isinstance(b, list | tuple)):
        raise InputError("one operand is a list of matrices and the other is not: a batch takes two lists")
    if len(a) != len(b):
        raise InputError(f"A is a list of {len(a):,} matrices and B of {len(b):,}: a batch takes as many of both")
    pairs = list(zip(a, b, strict=True))
    kinds = {type(m): cupy_operands.is_cupyx(m) and m.format == "csr" for m in (*a, *b)}
    found: list[Any] = [None] * len(pairs)
    if product == ProductOptions() and options.method in ("auto", "rowwise"):
        joined = [number for number, (x, y) in enumerate(pairs) if kinds[type(x)] and kinds[type(y)]]
        made = cupy_operands.multiply_batch([pairs[number] for number in joined], options.deterministic)
        for number, c in zip(joined, made, strict=True):
            found[number] = c
    return [multiply_one(x, y) if c is None else c for (x, y), c in zip(pairs, found, strict=True)]
