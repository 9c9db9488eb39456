"""Words of a list of edges in compiled code (CPU, Numba): threads find them, then their names are numbered in order."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array, ValueArray

COMMA, NEWLINE, QUOTE, MINUS, PLUS, DOT = b',\n"-+.'
COMMENTS = b"#%"
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
    """

    text: bytes
    begins: Int64Array
    lengths: Int64Array
    keys: Hashes
    weights: ValueArray


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
    most = text.count(b"\n")
    begins, lengths, keys = np.empty(2 * most, np.int64), np.empty(2 * most, np.int64), np.empty(2 * most, np.uint64)
    weights, odd = np.empty(most), np.empty((most, 3), np.int64)
    letters = np.frombuffer(text, np.uint8)
    places = np.empty(8, np.int64)
    count, nodd = find_words(letters, commas, numbers, BASIS, POWERS, places, begins, lengths, keys, weights, odd)
    if count < 0:
        return None
    for edge, begin, end in odd[:nodd].tolist():
        try:
            weights[edge] = float(text[begin:end])
        except ValueError:
            return None
    return Words(text, begins[: 2 * count], lengths[: 2 * count], keys[: 2 * count], weights[:count])


@compiled
def find_words(
    text: Letters, commas: bool, numbers: bool, basis: int, powers: ValueArray, places: Int64Array,
    begins: Int64Array, lengths: Int64Array, keys: Hashes, weights: ValueArray, odd: Int64Array,
) -> Any:  # fmt: skip
    """Find the words of lines; return the number of edges, or -1, and how many weights are left to Python.

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
    at, count, nodd = 0, 0, 0
    while at < len(text):
        stop = at
        while text[stop] != NEWLINE:
            stop += 1
        found = split_line(text, at, stop, commas, places)
        at = stop + 1
        if found == 0:
            continue
        if found == 1 or found > 3:
            return -1, 0
        for word in range(2):
            begin, end = places[2 * word], places[2 * word + 1]
            key = number_at(text, begin, end) if numbers else hash_of(text, begin, end, basis)
            if numbers and key == NO_NUMBER:
                return -1, 0
            begins[2 * count + word], lengths[2 * count + word], keys[2 * count + word] = begin, end - begin, key
        weights[count] = 1.0 if found == 2 else weight_at(text, places[4], places[5], powers)
        if weights[count] != weights[count]:
            odd[nodd, 0], odd[nodd, 1], odd[nodd, 2] = count, places[4], places[5]
            nodd += 1
        count += 1
    return count, nodd


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
    """Vertices that have names, numbered in the order in which they come: a table of hashes, and the names in a row."""

    def __init__(self) -> None:
        self.count = 0
        self._slots: Int64Array = np.zeros(1 << 16, np.int64)  # 1 more than the vertex; 0 where there is none
        self._hashes: Hashes = np.empty(1 << 15, np.uint64)
        self._ends: Int64Array = np.zeros((1 << 15) + 1, np.int64)
        self._letters: Letters = np.empty(1 << 18, np.uint8)

    def number_all(self, words: Words) -> Int64Array:
        """Return the numbers of the vertices of edges."""
        self._grow(len(words.keys), len(words.text))
        text, out = np.frombuffer(words.text, np.uint8), np.empty(len(words.keys), np.int64)
        table = self._slots, self._hashes, self._ends, self._letters
        self.count = number_names(text, words.begins, words.lengths, words.keys, *table, self.count, out)
        return out

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        text, begins = b"".join(words), np.cumsum(lengths) - lengths
        keys = np.empty(len(words), np.uint64)
        hash_words(np.frombuffer(text, np.uint8), begins, lengths, BASIS, keys)
        return self.number_all(Words(text, begins, lengths, keys, np.empty(0)))

    def names(self) -> Iterator[bytes]:
        """Yield the names in the order of their numbers."""
        ends, letters = self._ends[: self.count + 1].tolist(), self._letters.tobytes()
        for begin, end in itertools.pairwise(ends):
            yield letters[begin:end]

    def _grow(self, words: int, letters: int) -> None:
        """Make room for so many more names."""
        self._letters = _longer(self._letters, int(self._ends[self.count]) + letters)
        self._hashes = _longer(self._hashes, self.count + words)
        self._ends = _longer(self._ends, self.count + words + 1)
        size = len(self._slots)
        while size < 2 * (self.count + words):
            size *= 2
        if size > len(self._slots):
            self._slots = np.zeros(size, np.int64)
            fill_slots(self._slots, self._hashes, self.count)


def _longer(array: Any, length: int) -> Any:
    """Return an array with room for `length`, twice as long if it has to grow."""
    if length <= len(array):
        return array
    out = np.empty(max(length, 2 * len(array)), array.dtype)
    out[: len(array)] = array
    return out


@compiled
def hash_words(text: Letters, begins: Int64Array, lengths: Int64Array, basis: int, keys: Hashes) -> None:
    """Write the hash of each word."""
    for i in range(len(begins)):
        keys[i] = hash_of(text, begins[i], begins[i] + lengths[i], basis)


@compiled
def fill_slots(slots: Int64Array, hashes: Hashes, count: int) -> None:
    """Enter all names into an empty table."""
    last = np.uint64(len(slots) - 1)
    for vertex in range(count):
        place = hashes[vertex] & last
        while slots[place] != 0:
            place = (place + np.uint64(1)) & last
        slots[place] = vertex + 1


@compiled
def number_names(
    text: Letters, begins: Int64Array, lengths: Int64Array, keys: Hashes, slots: Int64Array, hashes: Hashes,
    ends: Int64Array, letters: Letters, count: int, out: Int64Array,
) -> int:  # fmt: skip
    """Write the number of each word, of new ones from `count` on; return how many are known then.

    Parameters
    ----------
    text : (n,) uint8
    begins, lengths : (k,) int64
    keys : (k,) uint64
        Hashes.
    slots, hashes, ends, letters : arrays
        The table, with room for all words.
    count : int
        Names that are known.
    out : (k,) int64
        Gets the numbers.
    """
    last = np.uint64(len(slots) - 1)
    for i in range(len(begins)):
        place = keys[i] & last
        while slots[place] != 0:
            vertex = slots[place] - 1
            if hashes[vertex] == keys[i] and is_name(
                text, begins[i], lengths[i], letters, ends[vertex], ends[vertex + 1]
            ):
                break
            place = (place + np.uint64(1)) & last
        if slots[place] == 0:
            slots[place] = count + 1
            hashes[count] = keys[i]
            for t in range(lengths[i]):
                letters[ends[count] + t] = text[begins[i] + t]
            ends[count + 1] = ends[count] + lengths[i]
            count += 1
        out[i] = slots[place] - 1
    return count


@part
def is_name(text: Letters, begin: int, length: int, letters: Letters, first: int, end: int) -> bool:
    """Whether a word is a name that is known."""
    same = end - first == length
    t = 0
    while same and t < length:
        same = text[begin + t] == letters[first + t]
        t += 1
    return same
