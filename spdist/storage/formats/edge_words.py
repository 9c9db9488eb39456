"""Words of a list of edges in compiled code (CPU, Numba): threads find them, then their names are numbered in order."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array, ValueArray

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
"""What hashes of names begin with: nobody can write a file whose names all fall in one place."""

Letters = np.ndarray[Any, np.dtype[np.uint8]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Words:
    """The words of lines that are all edges, comments or empty.

    Attributes
    ----------
    text : bytes
        The lines.
    begins, lengths : (2 k,) int64
        Where the two vertices of each edge are.
    keys : (2 k,) uint64
        The hash of each vertex' name; or the vertex, if these are numbers.
    weights : (k,) float64
    lines : int
    """

    text: bytes
    begins: Int64Array
    lengths: Int64Array
    keys: Hashes
    weights: ValueArray
    lines: int


def words_of(text: bytes, *, commas: bool, numbers: bool) -> Words | None:
    r"""Find the words of lines.

    Parameters
    ----------
    text : bytes
        Whole lines, the last one with its end too.
    commas : bool
        Whether commas separate words, instead of white space.
    numbers : bool
        Whether vertices are numbers.

    Returns
    -------
    Words or None
        None if a line is not an edge, or is one that Python has to read: a name in quotes, a number out of range.

    Examples
    --------
    >>> words_of(b"7 12 0.5\n", commas=False, numbers=True).keys
    array([ 7, 12], dtype=uint64)
    """
    most = len(text) // SHORTEST_LINE + 1
    begins, lengths, keys = np.empty(2 * most, np.int64), np.empty(2 * most, np.int64), np.empty(2 * most, np.uint64)
    weights, odd = np.empty(most), np.empty((most, 3), np.int64)
    letters = np.frombuffer(text, np.uint8)
    places = np.empty(8, np.int64)
    count, nodd, lines = find_words(
        letters, commas, numbers, BASIS, POWERS, places, begins, lengths, keys, weights, odd
    )
    if count < 0:
        return None
    for edge, begin, end in odd[:nodd].tolist():
        try:
            weights[edge] = float(text[begin:end])
        except ValueError:
            return None
    return Words(text, begins[: 2 * count], lengths[: 2 * count], keys[: 2 * count], weights[:count], lines)


@compiled
def find_words(
    text: Letters, commas: bool, numbers: bool, basis: int, powers: ValueArray, places: Int64Array,
    begins: Int64Array, lengths: Int64Array, keys: Hashes, weights: ValueArray, odd: Int64Array,
) -> Any:  # fmt: skip
    """Find the words of lines; return the number of edges, or -1, of weights that are left to Python, and of lines.

    Parameters
    ----------
    text : (n,) uint8
        Whole lines.
    commas, numbers : bool
    basis : int
        What hashes begin with.
    powers : (23,) float64
        Of ten.
    places : (8,) int64
        Room for the words of a line.
    begins, lengths, keys, weights : arrays
        Are written.
    odd : (lines, 3) int64
        Gets the edge, the begin and the end of each weight that is not exact as a number of few digits.
    """
    at, count, nodd, lines = 0, 0, 0, 0
    while at < len(text):
        stop = at
        while text[stop] != NEWLINE:
            stop += 1
        found = split_line(text, at, stop, commas, places)
        at = stop + 1
        lines += 1
        if found == 0:
            continue
        if found == 1 or found > 3:
            return -1, 0, 0
        for word in range(2):
            begin, end = places[2 * word], places[2 * word + 1]
            key = number_at(text, begin, end) if numbers else hash_of(text, begin, end, basis)
            if numbers and key == NO_NUMBER:
                return -1, 0, 0
            begins[2 * count + word], lengths[2 * count + word], keys[2 * count + word] = begin, end - begin, key
        weights[count] = 1.0 if found == 2 else weight_at(text, places[4], places[5], powers)
        if weights[count] != weights[count]:
            odd[nodd, 0], odd[nodd, 1], odd[nodd, 2] = count, places[4], places[5]
            nodd += 1
        count += 1
    return count, nodd, lines


@part
def split_line(text: Letters, at: int, stop: int, commas: bool, places: Int64Array) -> int:
    """Find the first four words of a line; return how many it has: 0 of a comment, 4 if Python has to read it."""
    found = 0
    while True:
        while at < stop and is_blank(text[at]):
            at += 1
        begin = at
        while at < stop and not (text[at] == COMMA if commas else is_blank(text[at])):
            if commas and text[at] == QUOTE:
                return 4
            at += 1
        end = at
        while end > begin and is_blank(text[end - 1]):
            end -= 1
        if end == begin:
            return 4 if commas and (at < stop or found > 0) else found
        if found == 0 and (text[begin] == COMMENTS[0] or text[begin] == COMMENTS[1]):
            return 0
        places[2 * found], places[2 * found + 1] = begin, end
        found += 1
        if found == 4 or (commas and at == stop):
            return found
        at += commas


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
    """Return the vertex that digits spell; all bits if it is none."""
    value = np.uint64(0)
    if end - begin > NUMBER_DIGITS:
        return NO_NUMBER
    for t in range(begin, end):
        if not 48 <= text[t] <= 57:
            return NO_NUMBER
        value = value * np.uint64(10) + np.uint64(text[t] - 48)
    return value


@part
def weight_at(text: Letters, begin: int, end: int, powers: ValueArray) -> Any:
    """Return the number of a word, rounded correctly; NaN if Python has to read it."""
    negative = text[begin] == MINUS
    at = begin + (negative or text[begin] == PLUS)
    whole, digits, decimals, dots = 0, 0, 0, 0
    while at < end and (48 <= text[at] <= 57 or text[at] == DOT):
        if text[at] == DOT:
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


class ManyNames:
    """Vertices that have names, numbered in the order in which they come.

    A slot of the table has a name's hash, where it begins among the names, its length, and 1 more than its vertex.
    """

    def __init__(self) -> None:
        self.count = 0
        self._slots: Int64Array = np.zeros((1 << 16, 4), np.int64)
        self._letters: Letters = np.empty(1 << 18, np.uint8)
        self._end = 0

    def look_up(self, words: Words) -> Int64Array:
        """Return the numbers of the vertices of edges, -1 of those that are new; threads may do so at a time."""
        text, out = np.frombuffer(words.text, np.uint8), np.empty(len(words.keys), np.int64)
        find_names(text, words.begins, words.lengths, words.keys, self._slots, self._letters, out)
        return out

    def number_all(self, words: Words, known: Int64Array | None = None) -> Int64Array:
        """Return the numbers of the vertices of edges; `known` are those that `look_up` found."""
        out = np.full(len(words.keys), -1) if known is None else known
        new = np.flatnonzero(out < 0)
        self._grow(len(new), len(words.text) + len(new))
        text, table = np.frombuffer(words.text, np.uint8), (self._slots, self._letters)
        self.count, self._end = add_names(
            text, words.begins, words.lengths, words.keys, new, *table, self.count, self._end, out
        )
        return out

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        text, begins = b"".join(words), np.cumsum(lengths) - lengths
        keys = np.empty(len(words), np.uint64)
        hash_words(np.frombuffer(text, np.uint8), begins, lengths, BASIS, keys)
        return self.number_all(Words(text, begins, lengths, keys, np.empty(0), 0))

    def listed(self) -> bytes:
        """Return the names in the order of their numbers, each with the end of a line."""
        return self._letters[: self._end].tobytes()

    def _grow(self, names: int, letters: int) -> None:
        """Make room for so many more names."""
        if self._end + letters > len(self._letters):
            longer = np.empty(max(self._end + letters, 2 * len(self._letters)), np.uint8)
            longer[: self._end] = self._letters[: self._end]
            self._letters = longer
        size = len(self._slots)
        while size < 2 * (self.count + names):
            size *= 2
        if size > len(self._slots):
            old, self._slots = self._slots, np.zeros((size, 4), np.int64)
            move_slots(old, self._slots)


@compiled
def hash_words(text: Letters, begins: Int64Array, lengths: Int64Array, basis: int, keys: Hashes) -> None:
    """Write the hash of each word."""
    for i in range(len(begins)):
        keys[i] = hash_of(text, begins[i], begins[i] + lengths[i], basis)


@compiled
def move_slots(old: Int64Array, slots: Int64Array) -> None:
    """Enter all names of a table into a larger one, which is empty."""
    last = np.uint64(len(slots) - 1)
    for i in range(len(old)):
        if old[i, 3] != 0:
            place = np.uint64(old[i, 0]) & last
            while slots[place, 3] != 0:
                place = (place + np.uint64(1)) & last
            for part_of_slot in range(4):
                slots[place, part_of_slot] = old[i, part_of_slot]


@part
def slot_of(text: Letters, begin: int, length: int, key: int, slots: Int64Array, letters: Letters) -> Any:
    """Return the slot of a word, or the free one that it would take."""
    last = np.uint64(len(slots) - 1)
    place = key & last
    while slots[place, 3] != 0:
        if np.uint64(slots[place, 0]) == key and slots[place, 2] == length:
            first, t = slots[place, 1], 0
            while t < length and text[begin + t] == letters[first + t]:
                t += 1
            if t == length:
                break
        place = (place + np.uint64(1)) & last
    return place


@compiled
def find_names(
    text: Letters, begins: Int64Array, lengths: Int64Array, keys: Hashes, slots: Int64Array, letters: Letters,
    out: Int64Array,
) -> None:  # fmt: skip
    """Write the number of each word, -1 of one that is not known.

    Parameters
    ----------
    text : (n,) uint8
    begins, lengths : (k,) int64
    keys : (k,) uint64
        Hashes.
    slots, letters : arrays
        The table.
    out : (k,) int64
        Gets the numbers.
    """
    for i in range(len(begins)):
        out[i] = slots[slot_of(text, begins[i], lengths[i], keys[i], slots, letters), 3] - 1


@compiled
def add_names(
    text: Letters, begins: Int64Array, lengths: Int64Array, keys: Hashes, words: Int64Array, slots: Int64Array,
    letters: Letters, count: int, end: int, out: Int64Array,
) -> Any:  # fmt: skip
    """Write the numbers of some words, of new names from `count` on; return how many are known, and their letters' end.

    Parameters
    ----------
    text : (n,) uint8
    begins, lengths : (k,) int64
    keys : (k,) uint64
        Hashes.
    words : (l,) int64
        Which words, in order.
    slots, letters : arrays
        The table, with room for all words.
    count, end : int
        Names that are known, and where their letters end.
    out : (k,) int64
        Gets the numbers.
    """
    for i in words:
        place = slot_of(text, begins[i], lengths[i], keys[i], slots, letters)
        if slots[place, 3] == 0:
            slots[place, 0], slots[place, 1] = np.int64(keys[i]), end
            slots[place, 2], slots[place, 3] = lengths[i], count + 1
            for t in range(lengths[i]):
                letters[end + t] = text[begins[i] + t]
            end += lengths[i] + 1
            letters[end - 1] = NEWLINE
            count += 1
        out[i] = slots[place, 3] - 1
    return count, end
