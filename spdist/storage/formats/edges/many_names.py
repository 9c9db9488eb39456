"""Names of the vertices of a large list of edges: a hash table in compiled code (CPU, Numba)."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdist.kernels.cpu.numba_compile import compiled, part
from spdist.matrices.dtypes import Int64Array
from spdist.storage.formats.edges.doubts import no_doubts
from spdist.storage.formats.edges.words import BASIS, NEWLINE, Hashes, Letters, Words, hash_of

LOOKED_UP = 32
"""Names that are looked up together, so that the waits for memory overlap."""


class ManyNames:
    """Vertices that have names, in a file of any length.

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
        return self.number_all(Words(text, begins, lengths, keys, np.empty(0), 0, no_doubts()))

    def listed(self) -> bytes:
        """Return the names in the order of their numbers, each with the end of a line."""
        return self._letters[: self._end].tobytes()

    def _grow(self, names: int, letters: int) -> None:
        """Reserve space for `names` more names and `letters` more bytes."""
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
            slot = np.uint64(old[i, 0]) & last
            while slots[slot, 3] != 0:
                slot = (slot + np.uint64(1)) & last
            for part_of_slot in range(4):
                slots[slot, part_of_slot] = old[i, part_of_slot]


@part
def slot_of(text: Letters, begin: int, length: int, key: int, slots: Int64Array, letters: Letters) -> Any:
    """Return the slot of a word, or the free one that it would take."""
    last = np.uint64(len(slots) - 1)
    slot = key & last
    while slots[slot, 3] != 0:
        if np.uint64(slots[slot, 0]) == key and slots[slot, 2] == length:
            first, t = slots[slot, 1], 0
            while t < length and text[begin + t] == letters[first + t]:
                t += 1
            if t == length:
                break
        slot = (slot + np.uint64(1)) & last
    return slot


@compiled
def find_names(
    text: Letters, begins: Int64Array, lengths: Int64Array, keys: Hashes, slots: Int64Array, letters: Letters,
    out: Int64Array,
) -> None:  # fmt: skip
    """Write the number of each word, -1 of one that is not known.

    `begins, lengths`: (k,) int64.
    `keys`: (k,) uint64: hashes.
    `slots, letters`: the table.
    `out`: (k,) int64: gets the numbers.
    """
    last = np.uint64(len(slots) - 1)
    for first in range(0, len(begins), LOOKED_UP):
        stop = min(first + LOOKED_UP, len(begins))
        for i in range(first, stop):  # slots, then letters come from memory side by side, before they are compared
            out[i] = slots[keys[i] & last, 1]
        for i in range(first, stop):
            out[i] = letters[out[i]]
        for i in range(first, stop):
            out[i] = slots[slot_of(text, begins[i], lengths[i], keys[i], slots, letters), 3] - 1


@compiled
def add_names(
    text: Letters, begins: Int64Array, lengths: Int64Array, keys: Hashes, words: Int64Array, slots: Int64Array,
    letters: Letters, count: int, end: int, out: Int64Array,
) -> Any:  # fmt: skip
    """Write the numbers of some words, of new names from `count` on; return how many are known, and their letters' end.

    `begins, lengths`: (k,) int64.
    `keys`: (k,) uint64: hashes.
    `words`: (l,) int64: which words, in order.
    `slots, letters`: the table, with room for all words.
    `count, end`: names that are known, and where their letters end.
    `out`: (k,) int64: gets the numbers.
    """
    for i in words:
        slot = slot_of(text, begins[i], lengths[i], keys[i], slots, letters)
        if slots[slot, 3] == 0:
            slots[slot, 0], slots[slot, 1] = np.int64(keys[i]), end
            slots[slot, 2], slots[slot, 3] = lengths[i], count + 1
            for t in range(lengths[i]):
                letters[end + t] = text[begins[i] + t]
            end += lengths[i] + 1
            letters[end - 1] = NEWLINE
            count += 1
        out[i] = slots[slot, 3] - 1
    return count, end
