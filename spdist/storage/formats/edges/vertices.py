"""Vertices of a list of edges: numbers as they are, or names, which are numbered in the order in which they come."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from spdist.matrices.dtypes import Int64Array
from spdist.storage.formats.edges.fields import vertex_of

if TYPE_CHECKING:
    from spdist.storage.formats.edges.words import Words


@dataclass
class Numbers:
    """Vertices that are numbers from 0 on."""

    count: int = 0

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices, each known to be one by `vertex_of`."""
        return self._counted(np.fromiter(map(vertex_of, words), np.int64, len(words)))

    def number_all(self, words: Words, known: Int64Array | None = None) -> Int64Array:
        """Return the numbers of the vertices of edges."""
        return self._counted(words.keys.view(np.int64))

    def listed(self) -> bytes:
        """Return nothing: there are no names."""
        return b""

    def _counted(self, found: Int64Array) -> Int64Array:
        self.count = max(self.count, int(found.max(initial=-1)) + 1)
        return found


@dataclass
class Names:
    """Vertices that have names, in a small file."""

    known: defaultdict[bytes, int] = field(default_factory=lambda: defaultdict(itertools.count().__next__))

    @property
    def count(self) -> int:
        """Number of vertices."""
        return len(self.known)

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices."""
        return np.fromiter(map(self.known.__getitem__, words), np.int64, len(words))

    def number_all(self, words: Words, known: Int64Array | None = None) -> Int64Array:
        """Return the numbers of the vertices of edges."""
        spans = zip(words.begins.tolist(), words.lengths.tolist(), strict=True)
        return self.numbers([words.text[begin : begin + length] for begin, length in spans])

    def listed(self) -> bytes:
        """Return the names in the order of their numbers, each with the end of a line."""
        return b"".join(name + b"\n" for name in self.known)
