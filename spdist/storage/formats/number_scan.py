"""The grammar of numbers in Matrix Market, which every byte is held against in compiled code (CPU, Numba)."""

from __future__ import annotations

import functools

import numpy as np

from spdist.kernels.cpu.numba_compile import kept
from spdist.matrices.dtypes import IndexArray

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
