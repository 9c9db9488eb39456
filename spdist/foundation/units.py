"""Convert sizes such as ``2GiB`` to bytes and back; check counts, and put them in words."""

from __future__ import annotations

import re
from typing import Any

from spdist.errors import InputError, one_line

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PLURALS = {"entry": "entries", "vertex": "vertices", "matrix": "matrices"}
"""Plurals of nouns that take more than an s."""


def format_bytes(count: float) -> str:
    """Return a number of bytes as text; each unit is 1024 of the one before.

    Examples
    --------
    >>> format_bytes(3 * 2**30)
    '3.00 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, the noun in the singular for 1.

    `noun`: in the singular; the last of several words gets the plural.

    Examples
    --------
    >>> counted(1, "block"), counted(1234, "block"), counted(0, "stored entry")
    ('1 block', '1,234 blocks', '0 stored entries')
    """
    first, last = noun[: noun.rfind(" ") + 1], noun[noun.rfind(" ") + 1 :]
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {first}{_PLURALS.get(last, f'{last}s')}"


LEAST_BARE = 1 << 16
"""A number of less bytes that a user writes without a unit is a mistake: megabytes were meant."""


def parse_bytes(text: str | int) -> int:
    """Return the bytes that a size such as ``2GiB``, ``512MB``, ``1.5G`` or a number states.

    `text`: KiB, MiB, GiB and the letters alone are powers of 1024; KB, MB and GB are powers of 1000.
    Raises `InputError` if it is not a size above zero, or text of a small number without a unit.

    Examples
    --------
    >>> parse_bytes("32MiB"), parse_bytes("1GB")
    (33554432, 1000000000)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?B?)\s*", str(text), re.IGNORECASE)
    size = 0.0
    if found:
        base = 1000 if found[3].lower() == "b" else 1024
        size = float(found[1]) * base ** _UNITS[found[2].upper()]
    if not 1 <= size < 1 << 62:
        shown = one_line(repr(text), 60)
        raise InputError(f"memory limit {shown} is not a size: write for instance 512MiB or 2GiB")
    if found and not (found[2] or found[3]) and isinstance(text, str) and size < LEAST_BARE:
        raise InputError(f"memory limit {text!r} is {text} bytes: write {text}MiB, or {text}B if bytes are meant")
    return int(size)


def check_count(name: str, value: Any, without: str) -> None:
    """Check an optional count.

    `name`: the option, for the message.
    `value`: what the caller passed; None is accepted.
    `without`: what None means, for the message.
    Raises `InputError` if `value` is no whole number, or below 1.

    Examples
    --------
    >>> check_count("threads", 0, "one per core")
    Traceback (most recent call last):
    spdist.errors.InputError: threads=0 must be a whole number of at least 1; leave it out for one per core
    """
    if value is None:
        return
    if type(value) is bool or not hasattr(value, "__index__") or not 1 <= value < 1 << 62:
        value = one_line(repr(value), 60)
        raise InputError(f"{name}={value} must be a whole number of at least 1; leave it out for {without}")
