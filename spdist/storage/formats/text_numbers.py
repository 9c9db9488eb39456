"""Numbers in text: a grammar that every byte is held against, and the words of a piece as an array.

Readers of text convert many numbers in one call of a library that stops where a number ends, so that ``1,5`` would pass
for 1. What a library is given is therefore scanned first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.kernels.cpu.numba_compile import kept
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray
from spdist.storage.formats.text import TextFile

PIECE_BYTES = 1 << 20
"""Bytes of text that are converted at a time; its numbers take up to twelve times as much memory."""

MAX_WORD = 1 << 20
"""Bytes of the longest word or comment that is read."""

MOST_EXACT = 1 << 53
"""Number up to which float64 has all whole numbers."""


def is_whole(word: bytes) -> bool:
    """Whether `word` is digits only, and not so many that Python refuses to convert them."""
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
    """The numbers in a piece of text, in order.

    Attributes
    ----------
    values : (n,) float64
    begins : (n,) int64
        Places in the piece.
    """

    values: ValueArray
    begins: Int64Array


def pieces_of(text: TextFile, path: str, comment: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the rest of a text in pieces that end after a line, or after a word where a line is long.

    Parameters
    ----------
    text : TextFile
    path : str
        For messages.
    comment : bytes
        The character with which comments begin; a comment ends with its line and is in one piece.
    piece_bytes : int
        Bytes to read at a time.
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

    Parameters
    ----------
    text : bytes

    Returns
    -------
    words : Words
    wrong : int
        Place of the first word that is no finite number; -1 if there is none.
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


# -- the grammar of a number -------------------------------------------------------------------------------------------

_SPACE, _SIGN, _INT, _DOT, _FRACTION, _E, _E_SIGN, _EXPONENT, _BAD = range(9)
_DIGITS = "0123456789"


def _grammar(edges: list[tuple[int, str, int]], accepting: set[int], words: tuple[str, ...]) -> IndexArray:
    """Return the transition table [state, byte] of an automaton that reads numbers separated by spaces."""
    table = np.full((_BAD + 1 + sum(map(len, words)), 256), _BAD, np.uint8)
    for state, characters, to in edges:
        table[state, _codes(characters)] = to
    fresh = _BAD + 1
    for word in words:
        states = [_SPACE, _SIGN]
        for letter in word:
            to = int(table[states[0], ord(letter)])
            if to == _BAD:
                to, fresh = fresh, fresh + 1
            for state in states:
                table[state, _codes(letter + letter.upper())] = to
            states = [to]
        accepting = accepting | set(states)
    for state in (_SPACE, *accepting):
        table[state, _codes(" \t\r\n")] = _SPACE
    return table


def _codes(characters: str) -> list[int]:
    return [ord(character) for character in characters]


_WHOLE = [(_SPACE, "-", _SIGN), (_SPACE, _DIGITS, _INT), (_SIGN, _DIGITS, _INT), (_INT, _DIGITS, _INT)]
_DECIMAL = [
    (_SPACE, ".", _DOT), (_SIGN, ".", _DOT), (_INT, ".", _FRACTION), (_DOT, _DIGITS, _FRACTION),
    (_FRACTION, _DIGITS, _FRACTION), (_INT, "eE", _E), (_FRACTION, "eE", _E), (_E, "+-", _E_SIGN),
    (_E, _DIGITS, _EXPONENT), (_E_SIGN, _DIGITS, _EXPONENT), (_EXPONENT, _DIGITS, _EXPONENT),
]  # fmt: skip
INTEGERS = _grammar(_WHOLE, {_INT}, ())
REALS = _grammar(_WHOLE + _DECIMAL, {_INT, _FRACTION, _EXPONENT}, ("nan", "inf", "infinity"))


@functools.partial(kept, nogil=True)
def count_entries(text: IndexArray, table: IndexArray, numbers: int, whole: int) -> int:
    """Count the lines of `numbers` numbers, the first `whole` of them digits only; -1 if any other is not blank."""
    state, found, count = 0, 0, 0
    for byte in text:
        before = state
        state = table[before, byte]
        if state == _BAD:
            return -1
        if before == _SPACE and state != _SPACE:
            found += 1
        if state > _INT and found <= whole:
            return -1
        if byte == 10:
            if found == numbers:
                count += 1
            elif found != 0:
                return -1
            found = 0
    return count
