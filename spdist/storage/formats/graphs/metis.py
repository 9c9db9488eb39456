"""Read graphs as METIS and Chaco write them: a line for each vertex, with its neighbours from 1 on.

The first line has the numbers of vertices and edges, perhaps a word of up to three digits (sizes of vertices, weights
of vertices, weights of edges: 1 if the lines have them) and how many weights a vertex has. An empty line is a vertex
without edges. Each edge is in the lines of both of its vertices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.foundation.units import counted
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.storage.external_sort import Entries
from spdist.storage.formats.source import Import
from spdist.storage.formats.text import TextFile
from spdist.storage.formats.text_numbers import MAX_WORD, excerpt, find_words, is_whole, pieces_of

UInt64Array = npt.NDArray[np.uint64]

COMMENT = re.compile(rb"%[^\n]*")

MAX_WEIGHTS = 1000
"""Weights of a vertex at most."""


def import_metis(job: Import) -> None:
    """Import a graph of METIS as its symmetric adjacency matrix of float64.

    Raises `MatrixError` if a line is not what the first line announces, or edges are in the line of one vertex only;
    names the line.
    """
    text = TextFile(job.source)
    head = _read_header(text, job.path)
    shape = job.shape((head.vertices, head.vertices))
    room = job.source.inflated if text.packing else job.source.size
    if max(2 * head.edges, head.vertices) > room + 1:  # a digit and what follows it for each edge, an end for each line
        raise head.error(
            head.line,
            f"{counted(head.vertices, 'vertex')} and {counted(head.edges, 'edge')} do not fit into a file "
            f"of {job.source.size:,} bytes; correct their numbers, or get the file again",
        )
    job.reading.found.append(counted(head.edges, "edge") + (" with weights" if head.weighted else ""))
    job.reading.left_out += ["sizes of vertices"] * head.has_sizes + ["weights of vertices"] * bool(head.weights)
    job.sort(_Lines(head).entries(text), shape, np.dtype(np.float64), 2 * head.edges)


@dataclass(frozen=True)
class _Header:
    """The first line."""

    name: str  # the file, in messages
    line: int
    vertices: int
    edges: int
    # whether vertices have sizes, and edges weights
    has_sizes: bool
    weighted: bool
    weights: int  # weights of each vertex

    @property
    def before(self) -> int:
        """Numbers in a line before the first neighbour."""
        return self.has_sizes + self.weights

    @property
    def each(self) -> int:
        """Numbers in a line for each neighbour."""
        return 1 + self.weighted

    def error(self, line: int, what: str) -> MatrixError:
        """Return an error that names a line and says what is wrong with it."""
        return MatrixError(f"{self.name}, line {line:,}: {what}")


def _read_header(text: TextFile, name: str) -> _Header:
    line, raw = 0, b"%"
    while not raw.partition(b"%")[0].strip():
        line, raw = line + 1, text.readline(MAX_WORD)
        if not raw:
            raise MatrixError(f"{name}, line {line:,}: the file ends before the numbers of vertices and edges")
    words = raw.partition(b"%")[0].split()
    kinds = words[2] if len(words) > 2 else b"0"
    sound = 2 <= len(words) <= 4 and all(map(is_whole, words)) and len(kinds) <= 3 and not kinds.strip(b"01")
    weights = int(words[3]) if sound and len(words) == 4 else 1
    if not sound or weights > MAX_WEIGHTS:
        raise MatrixError(
            f"{name}, line {line:,}: expected the numbers of vertices and edges, and perhaps which weights there are, "
            f"as in '7 11 011'; got '{excerpt(raw)}'"
        )
    sizes, vertex_weights, edge_weights = (digit == "1" for digit in kinds.decode().zfill(3))
    return _Header(name, line, int(words[0]), int(words[1]), sizes, edge_weights, weights * vertex_weights)


class _Lines:
    """The lines of the vertices, read piece by piece; a piece may end within a long line.

    `line`: number of the next line.
    `vertex, done`: the vertex whose line is read, from 0 on, and how many numbers of its line were read.
    `count, loops, balance`: entries; loops among them; and a sum over edges that is 0 if each is there in both
    directions.
    """

    def __init__(self, header: _Header) -> None:
        self.header, self.line = header, header.line + 1
        self.vertex, self.done = 0, 0
        self.count, self.loops, self.balance = 0, 0, 0

    def entries(self, text: TextFile) -> Iterator[Entries]:
        """Yield the entries of the adjacency matrix; check at the end that edges and lines are complete."""
        held = b""
        for piece in pieces_of(text, self.header.name, b"%"):
            entries, held = self._read(held + piece)
            yield entries
        self._check_end()

    def _read(self, text: bytes) -> tuple[Entries, bytes]:
        """Return the entries of a piece of text, and a neighbour at its end whose weight comes in the next piece."""
        if b"%" in text:
            text = COMMENT.sub(b"%", text)
        raw = np.frombuffer(text, np.uint8)
        newlines = np.flatnonzero(raw == ord("\n"))
        words, wrong = find_words(text.replace(b"%", b" "))
        if wrong >= 0:
            raise self._error(newlines, wrong, f"'{excerpt(text[wrong:].split(None, 1)[0])}' is not a number")
        lengths = np.diff(np.searchsorted(words.begins, newlines), prepend=0)
        is_comment = (raw[newlines - 1] == ord("%")) & (lengths == 0)
        if len(newlines):
            is_comment[0] &= self.done == 0
        ends, lengths = newlines[~is_comment], lengths[~is_comment]
        local = np.searchsorted(ends, words.begins)  # vertex of each word, from the piece's first vertex on
        starts = np.concatenate([[0], np.cumsum(lengths)])
        starts[0] -= self.done
        positions = np.arange(len(local)) - starts[local] - self.header.before
        if len(lengths):
            lengths[0] += self.done
        self._check_lines(newlines, ends, lengths)
        held = b""
        is_open = len(local) > 0 and local[-1] == len(ends)
        if is_open and self.header.weighted and positions[-1] >= 0 and positions[-1] % 2 == 0:
            held = text[int(words.begins[-1]) :]
            words = type(words)(words.values[:-1], words.begins[:-1])
            local, positions = local[:-1], positions[:-1]
        entries = self._entries(newlines, words.begins, words.values, local + self.vertex, positions)
        self.done = int(np.count_nonzero(local == len(ends))) + (0 if len(ends) else self.done)
        self.vertex += len(ends)
        self.line += len(newlines)
        return entries, held

    def _check_lines(self, newlines: Int64Array, ends: Int64Array, lengths: Int64Array) -> None:
        """Refuse lines that have too few numbers; `lengths`: numbers in each."""
        head = self.header
        left = max(head.vertices - self.vertex, 0)
        lengths, ends = lengths[:left], ends[:left]
        wrong = (lengths < head.before) | ((lengths - head.before) % head.each != 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise self._error(
                newlines,
                int(ends[at]),
                f"{counted(int(lengths[at]), 'number')} of vertex {self.vertex + at + 1:,}, where {head.before} "
                f"before the neighbours and {head.each} for each of them are expected",
            )

    def _entries(
        self, newlines: Int64Array, begins: Int64Array, values: ValueArray, vertices: Int64Array, positions: Int64Array
    ) -> Entries:
        """Return the entries that numbers in lines mean; `positions`: of each, counted from the first neighbour."""
        head = self.header
        if len(vertices) and vertices[-1] >= head.vertices:
            at = int(begins[np.argmax(vertices >= head.vertices)])
            raise self._error(newlines, at, f"more than the {head.vertices:,} vertices that line {head.line} announces")
        where = np.flatnonzero((positions >= 0) & (positions % head.each == 0))
        neighbours = values[where]
        wrong = (neighbours < 1) | (neighbours > head.vertices) | (neighbours != np.trunc(neighbours))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise self._error(
                newlines, int(begins[where[first]]),
                f"neighbour {neighbours[first]:.15g} is outside 1 to {head.vertices:,} (vertices count from 1)",
            )  # fmt: skip
        rows, columns = vertices[where], neighbours.astype(np.int64) - 1
        weights = values[where + 1] if head.weighted else np.ones(len(where))
        self.count += len(where)
        self.loops += int(np.count_nonzero(rows == columns))
        self.balance = (self.balance + _balance(rows, columns, weights)) % (1 << 64)
        return Entries(rows, columns, weights)

    def _error(self, newlines: Int64Array, at: int, what: str) -> MatrixError:
        """Return an error about the line of a position in the piece."""
        return self.header.error(self.line + int(np.searchsorted(newlines, at)), what)

    def _check_end(self) -> None:
        """Refuse a graph with fewer vertices or edges than announced, or with an edge in one direction only."""
        head = self.header
        missing_line = self.vertex == head.vertices - 1 and head.before == 0  # empty, and without its end
        if self.vertex < head.vertices and not missing_line:
            raise head.error(
                self.line - 1, f"the file ends after {self.vertex:,} of {head.vertices:,} vertices; is it truncated?"
            )
        if 2 * head.edges not in (self.count, self.count + self.loops):
            raise head.error(
                head.line,
                f"{counted(head.edges, 'edge')} announced, but the lines have {counted(self.count, 'neighbour')}, "
                f"where each edge is in the lines of both of its vertices; correct the number, or list both directions",
            )
        if self.balance:
            raise MatrixError(
                f"{head.name}: an edge is in the line of only one of its vertices, or has two weights; list both "
                f"directions with one weight"
            )


def _balance(rows: Int64Array, columns: Int64Array, weights: ValueArray) -> int:
    """Return a sum over entries, modulo 2^64, in which an entry and its mirror image cancel.

    Each edge counts by a hash of its vertices and weight, so that other sums are 0 with a probability of 2^-64 only.
    """
    below, above = np.minimum(rows, columns).view(np.uint64), np.maximum(rows, columns).view(np.uint64)
    mixed = _mix(_mix(_mix(below) ^ above) ^ np.ascontiguousarray(weights + 0.0).view(np.uint64))
    sign = np.sign(rows - columns).astype(np.int64).view(np.uint64)
    return int(np.sum(mixed * sign, dtype=np.uint64))


def _mix(bits: UInt64Array) -> UInt64Array:
    """Return a hash of 64 bits (the finalizer of SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
