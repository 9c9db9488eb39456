"""Words of a list of edges in compiled code (CPU, Numba): the grammar of `fields` and `lines`, for threads.

Text that only Python can read is left to it, a piece at a time: quotes within quotes, quoted line breaks, unusual
numbers, and everything that is wrong.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.storage.formats.edges.dialect import Dialect
from spdist.storage.formats.edges.doubts import (
    COMMA_MARK,
    COMMENT,
    LATE_COMMENT,
    PADDED,
    POINT_MARK,
    SPACED,
    SPACED_NAME,
    TABBED,
    UNWEIGHTED,
    WEIGHTED,
    no_doubts,
)
from spdist.storage.formats.edges.fields import SPACE, TAB, TAB_OR_SPACE, weight_of
from spdist.storage.formats.edges.lines import BYTE_ORDER_MARK

COMMA, NEWLINE, QUOTE, MINUS, PLUS, DOT = b',\n"-+.'
COMMENTS = b"#%"
SHORTEST_LINE = len(b"a b\n")
POWERS = 10.0 ** np.arange(23)
"""Powers of ten that float64 holds exactly."""
EXACT_DIGITS = 15
"""Digits of a whole number that float64 always holds."""
NUMBER_DIGITS = 18
"""Digits of a vertex that is a number; int64 holds all of them."""
NO_NUMBER = np.uint64((1 << 64) - 1)
BASIS = secrets.randbits(63) | 1
"""First value of each hash; random, so that nobody can write a file whose names all fall in one slot."""
LEFT_TO_PYTHON = -1
"""Number of fields of a line that only Python can read."""
SPANS = 7
"""Begin and end of source, target and weight in a line; whether blanks are around a name."""

Letters = np.ndarray[Any, np.dtype[np.uint8]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Words:
    """The words of lines that are all edges, comments or blank."""

    text: bytes  # the lines
    # (2 k,) int64: where the two vertices of each edge are
    begins: Int64Array
    lengths: Int64Array
    keys: Hashes  # (2 k,) uint64: the hash of each vertex' name; or the vertex, if vertices are numbers
    weights: ValueArray  # (k,) float64
    lines: int
    doubts: Int64Array  # (KINDS, 2) int64: lines that are doubtful, counted from 1


def words_of(text: bytes, dialect: Dialect, *, numbers: bool, allow_nan: bool = False) -> Words | None:
    r"""Find the words of whole lines; None if only Python can read one of them.

    Examples
    --------
    >>> words_of(b"7 12 0.5\n", Dialect(SPACE, False, (0, 1, 2), 3), numbers=True).keys
    array([ 7, 12], dtype=uint64)
    """
    if b"\0" in text or (not text.isascii() and BYTE_ORDER_MARK in text):
        return None
    if dialect.raw and dialect.raw + b"\n" in text:
        return None
    most = len(text) // SHORTEST_LINE + 1
    begins, lengths, keys = np.empty(2 * most, np.int64), np.empty(2 * most, np.int64), np.empty(2 * most, np.uint64)
    weights, odd, doubts = np.empty(most), np.empty((most, 3), np.int64), no_doubts()
    count, nodd, lines = find_words(
        np.frombuffer(text, np.uint8), _rules(dialect), numbers, BASIS, POWERS, np.empty(SPANS, np.int64),
        begins, lengths, keys, weights, odd, doubts,
    )  # fmt: skip
    if count < 0:
        return None
    for edge, begin, end in odd[:nodd].tolist():
        try:
            weights[edge] = weight_of(text[begin:end], decimal_comma=dialect.decimal_comma, allow_nan=allow_nan)
        except ValueError:
            return None
    return Words(text, begins[: 2 * count], lengths[: 2 * count], keys[: 2 * count], weights[:count], lines, doubts)


def _rules(dialect: Dialect) -> Int64Array:
    """Return a dialect as numbers: separator, quotes, decimal mark, columns, bounds of fields by tabs and by spaces."""
    mark = COMMA if dialect.decimal_comma else DOT
    bounds = *dialect.bounds(TAB), *dialect.bounds(SPACE)
    return np.array([dialect.separator, dialect.quotes, mark, *dialect.columns, *bounds], np.int64)


@compiled
def find_words(
    text: Letters, rules: Int64Array, numbers: bool, basis: int, powers: ValueArray, spans: Int64Array,
    begins: Int64Array, lengths: Int64Array, keys: Hashes, weights: ValueArray, odd: Int64Array, doubts: Int64Array,
) -> Any:  # fmt: skip
    """Find the words of lines; return the number of edges, or -1, of weights that are left to Python, and of lines.

    `rules` are made by `_rules`, `basis` is the first value of each hash, `powers` (23,) are powers of ten, and
    `spans` (SPANS,) is workspace for the words of a line. Written: `begins`, `lengths` and `keys` (2 edges,),
    `weights` (edges,), `odd` (lines, 3), with edge, begin and end of each weight that is not exact as a number of few
    digits, and `doubts`.
    """
    at, count, nodd, lines = 0, 0, 0, 0
    rule, quotes, mark, third = rules[0], rules[1] != 0, rules[2], rules[5]
    while at < len(text):
        stop, separator, first = at, rule, at
        tabs, blanks, quoted = False, False, False
        while True:
            letter = text[stop]
            if letter <= QUOTE:  # rare letters: tabs, the end of the line, quotes, spaces
                if letter == NEWLINE:
                    break
                tabs |= letter == TAB
                blanks |= letter != TAB and letter <= SPACE
                quoted |= letter == QUOTE
            stop += 1
        lines += 1
        while first < stop and is_blank(text[first]):
            first += 1
        begin_of_line, at = at, stop + 1
        if first == stop:
            continue
        if text[first] == COMMENTS[0] or text[first] == COMMENTS[1]:
            count_line(doubts, COMMENT, lines)
            if count > 0:
                count_line(doubts, LATE_COMMENT, lines)
            continue
        if separator == TAB_OR_SPACE:
            separator = TAB if tabs else SPACE
        is_plain = separator != SPACE and not blanks and not quoted and (separator == TAB or not tabs)
        if is_plain:
            found = split_plain(text, begin_of_line, stop, separator, rules[3], rules[4], third, spans)
        else:
            found = split_line(text, begin_of_line, stop, separator, quotes, rules[3], rules[4], third, spans)
        bounds = 8 if separator == SPACE else 6
        if found < rules[bounds] or found > rules[bounds + 1]:
            return -1, 0, 0
        for word in range(2):
            begin, end = spans[2 * word], spans[2 * word + 1]
            if begin == end:
                return -1, 0, 0
            key = number_at(text, begin, end) if numbers else hash_of(text, begin, end, basis)
            if numbers and key == NO_NUMBER:
                return -1, 0, 0
            begins[2 * count + word], lengths[2 * count + word], keys[2 * count + word] = begin, end - begin, key
        weight, weighted = 1.0, 0 <= third < found
        if weighted:
            weight = weight_at(text, spans[4], spans[5], mark, powers)
            if weight != weight:
                odd[nodd, 0], odd[nodd, 1], odd[nodd, 2] = count, spans[4], spans[5]
                nodd += 1
        weights[count] = weight
        count_line(doubts, WEIGHTED if weighted else UNWEIGHTED, lines)
        if rule == TAB_OR_SPACE:
            count_line(doubts, SPACED if separator == SPACE else TABBED, lines)
        if not numbers:
            if spans[6] and not (quotes and quoted):
                count_line(doubts, PADDED, lines)
            if blanks and rule == TAB_OR_SPACE and separator == TAB and doubts[SPACED_NAME, 0] == 0:
                note_spaces(text, lines, spans, doubts)
        if weighted and mark == COMMA:
            note_mark(text, lines, spans, doubts)
        count += 1
    return count, nodd, lines


@part
def note_spaces(text: Letters, line: int, spans: Int64Array, doubts: Int64Array) -> None:
    """Count a line with a blank in the name of a vertex."""
    for word in range(2):
        for t in range(spans[2 * word], spans[2 * word + 1]):
            if is_blank(text[t]):
                doubts[SPACED_NAME, 0], doubts[SPACED_NAME, 1] = 1, line


@part
def note_mark(text: Letters, line: int, spans: Int64Array, doubts: Int64Array) -> None:
    """Count a line whose weight has a decimal mark."""
    for t in range(spans[4], spans[5]):
        if text[t] == COMMA or text[t] == DOT:
            count_line(doubts, COMMA_MARK if text[t] == COMMA else POINT_MARK, line)


@part
def count_line(doubts: Int64Array, kind: int, line: int) -> None:
    """Count one line of a kind."""
    doubts[kind, 0] += 1
    if doubts[kind, 1] == 0:
        doubts[kind, 1] = line


@part
def split_plain(
    text: Letters, at: int, stop: int, separator: int, source: int, target: int, weight: int, spans: Int64Array
) -> int:
    """Find the words of a line without blanks and quotes; return how many fields it has."""
    found = 0
    spans[6] = 0
    while True:
        begin = at
        while at < stop and text[at] != separator:
            at += 1
        if found == source:
            spans[0], spans[1] = begin, at
        elif found == target:
            spans[2], spans[3] = begin, at
        elif found == weight:
            spans[4], spans[5] = begin, at
        found += 1
        if at == stop:
            return found
        at += 1


@part
def split_line(
    text: Letters, at: int, stop: int, separator: int, quotes: bool, source: int, target: int, weight: int,
    spans: Int64Array,
) -> int:  # fmt: skip
    """Find the words of a line that are read; return how many fields it has, or `LEFT_TO_PYTHON`."""
    found, spaced = 0, separator == SPACE
    spans[6] = 0
    while True:
        whole = at
        while at < stop and is_blank(text[at]) and text[at] != separator:
            at += 1
        if spaced:
            while at < stop and is_blank(text[at]):
                at += 1
            if at == stop:
                return found
        begin = at
        if quotes and at < stop and text[at] == QUOTE:
            begin, at = at + 1, at + 1
            while at < stop and text[at] != QUOTE:
                at += 1
            if at == stop:
                return LEFT_TO_PYTHON
            end, at = at, at + 1
            after = at
            while at < stop and is_blank(text[at]) and (spaced or text[at] != separator):
                at += 1
            if at < stop and (after == at if spaced else text[at] != separator):
                return LEFT_TO_PYTHON
            padded = False
        else:
            while at < stop and not (is_blank(text[at]) if spaced else text[at] == separator):
                at += 1
            end = at
            while end > begin and is_blank(text[end - 1]):
                end -= 1
            padded = not spaced and (begin > whole or end < at)
        if found == source:
            spans[0], spans[1] = begin, end
            spans[6] |= padded
        elif found == target:
            spans[2], spans[3] = begin, end
            spans[6] |= padded
        elif found == weight:
            spans[4], spans[5] = begin, end
        found += 1
        if not spaced:
            if at == stop:
                return found
            at += 1


@part
def is_blank(letter: int) -> bool:
    """Whether a letter separates words, as `bytes.split` has it."""
    return letter == 32 or 9 <= letter <= 13


@part
def hash_of(text: Letters, begin: int, end: int, basis: int) -> Any:
    """Return the hash of a name."""
    value = np.uint64(basis)
    for t in range(begin, end):
        value = (value ^ np.uint64(text[t])) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value


@part
def number_at(text: Letters, begin: int, end: int) -> Any:
    """Return the vertex that digits spell; all bits set if the word is not a number."""
    value = np.uint64(0)
    if end - begin > NUMBER_DIGITS:
        return NO_NUMBER
    for t in range(begin, end):
        if not 48 <= text[t] <= 57:
            return NO_NUMBER
        value = value * np.uint64(10) + np.uint64(text[t] - 48)
    return value


@part
def weight_at(text: Letters, begin: int, end: int, mark: int, powers: ValueArray) -> Any:
    """Return the number of a word, rounded correctly; NaN if Python has to read it. `mark` is the decimal mark."""
    negative = text[begin] == MINUS
    at = begin + (negative or text[begin] == PLUS)
    whole, digits, decimals, dots = 0, 0, 0, 0
    while at < end and (48 <= text[at] <= 57 or text[at] == mark):
        if text[at] == mark:
            dots += 1
        else:
            whole = whole * 10 + (text[at] - 48)
            digits += 1
            decimals += dots
        if digits > EXACT_DIGITS or dots > 1:
            return np.nan
        at += 1
    if digits == 0:
        return np.nan
    exponent = -decimals
    if at < end and (text[at] == 69 or text[at] == 101):
        at += 1
        down = at < end and text[at] == MINUS
        at += at < end and (down or text[at] == PLUS)
        first, power = at, 0
        while at < end and 48 <= text[at] <= 57 and at - first < 4:
            power = power * 10 + (text[at] - 48)
            at += 1
        if at == first:
            return np.nan
        exponent += -power if down else power
    if at < end or not -22 <= exponent <= 22:
        return np.nan
    value = whole / powers[-exponent] if exponent < 0 else whole * powers[exponent]
    return -value if negative else value
