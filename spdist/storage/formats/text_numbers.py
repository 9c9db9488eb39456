"""Numbers in text: pieces that end after a word, and the words of a piece as an array.

Readers of text convert many numbers in one call of a library that stops where a number ends, so that ``1,5`` would pass
for 1. What a library is given is therefore scanned first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.storage.formats.text import TextFile

PIECE_BYTES = 1 << 20
"""Bytes of text that are converted at a time; its numbers take up to twelve times as much memory."""

MAX_WORD = 1 << 20
"""Bytes of the longest word or comment that is read."""

MOST_EXACT = 1 << 53
"""Number up to which float64 has all whole numbers."""


def is_whole(word: bytes) -> bool:
    """Whether `word` is digits only, and short enough for Python to convert."""
    return word.isdigit() and len(word) < 100


def excerpt(text: bytes) -> str:
    """Return the begin of a text for a message."""
    return one_line(text[:2000].strip().decode("latin-1"), 40)


def with_e(text: bytes) -> bytes:
    """Return numbers with ``e`` for the ``D`` that Fortran writes before exponents of double precision."""
    return text.translate(_D_TO_E) if b"D" in text or b"d" in text else text


_D_TO_E = bytes.maketrans(b"dD", b"ee")


# -- words as an array -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """The numbers in a piece of text, in order."""

    values: ValueArray  # (n,) float64
    begins: Int64Array  # (n,) int64: positions in the piece


def pieces_of(text: TextFile, path: str, comment: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the rest of a text in pieces that end after a line, or after a word where a line is long.

    `comment`: the character with which comments begin; a comment ends with its line and is in one piece.
    """
    rest = b""
    while found := text.read(piece_bytes):
        rest += found
        cut = rest.rfind(b"\n") + 1
        if not cut and comment not in rest:
            cut = max(rest.rfind(b" "), rest.rfind(b"\t")) + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        if len(rest) > max(MAX_WORD, piece_bytes):
            raise MatrixError(f"{path}: a word or a comment is longer than {MAX_WORD:,} bytes; it is not what it seems")
    if rest:
        yield rest + b"\n"


def find_words(text: bytes) -> tuple[Words, int]:
    """Convert a piece of text that holds numbers and spaces.

    Returns `wrong`: position of the first word that is no finite number, or -1.
    """
    inside = ~_IS_SPACE[np.frombuffer(text, np.uint8)]
    begins = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    if not len(begins):
        return Words(np.empty(0), begins), -1
    if _UNLIKE_NUMBERS.search(text) is None:
        try:
            values = np.fromstring(text, np.float64, sep=" ")
        except (ValueError, DeprecationWarning):
            values = np.empty(0)
        if len(values) == len(begins) and np.isfinite(values).all():
            return Words(values, begins), -1
    return Words(np.empty(0), begins), next(at for at in begins.tolist() if not _is_number(text[at:].split(None, 1)[0]))


def _is_number(word: bytes) -> bool:
    return _NUMBER.fullmatch(word) is not None and abs(float(word)) < np.inf


_IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))
_UNLIKE_NUMBERS = re.compile(rb"[^0-9eE.+\-\s]")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
