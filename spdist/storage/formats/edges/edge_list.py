"""Read a graph as a list of edges: two vertices and perhaps a weight a line, by number or by name.

`fields` has the grammar of a line. What separates fields, whether the first line names the columns, and which columns
are read is decided once, from the first lines (`dialect`). Small files and unusual pieces of text are read in Python
(`lines`), the rest in compiled code (`words`). The file is read once: edges wait in a file of numbers until all
vertices are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from spdist.errors import MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads
from spdist.matrices.dtypes import Int64Array
from spdist.storage.external_sort import Entries
from spdist.storage.formats.edges import doubts
from spdist.storage.formats.edges.dialect import (
    SAYS_BIPARTITE,
    SAYS_SEPARATOR,
    SEPARATORS,
    Dialect,
    dialect_of,
    is_comment,
)
from spdist.storage.formats.edges.lines import LineReader
from spdist.storage.formats.edges.vertices import Names, Numbers
from spdist.storage.formats.reading import Reading, ReadOptions, Separator
from spdist.storage.formats.source import Import, Source
from spdist.storage.formats.text import TextFile
from spdist.storage.names.names import AxisNames, names_in

if TYPE_CHECKING:
    from spdist.storage.formats.edges.many_names import ManyNames
    from spdist.storage.formats.edges.words import Words

TEXT_BYTES = 1 << 20
"""Bytes of text that a thread reads at a time, and most bytes of a line."""
HEAD_BYTES = 16 << 20
"""Bytes of comments among which the first edge is looked for before it is decided how the file is written."""
SAMPLE_BYTES = 1 << 16
"""Bytes of text that are read at least before it is decided how the file is written."""
COMPILED_BYTES = 1 << 20
"""Bytes of a file from which its words are found by compiled code: compiling that takes as long as some megabytes."""
ENTRIES = 1 << 20
"""Edges that are sorted at a time."""
EDGE = np.dtype([("row", np.int64), ("column", np.int64), ("weight", np.float64)])


def import_edges(job: Import) -> None:
    """Import a list of edges as a square matrix of float64.

    With `names`, vertices are numbered in the order in which they come; their names are stored with the matrix, and
    written to `labels`, one a line. Without, vertices are numbers from 0 on.
    """
    text = EdgeText(job.source, job.options, job.reading)
    path, count = job.stage.scratch / "edges", 0
    with path.open("wb") as file:
        for edges in text.edges():
            file.write(edges.tobytes())
            count += len(edges)
            job.report_read(min(text.done, job.source.size), 2 * job.source.size)
    shape = job.shape((text.vertices.count, text.vertices.count))
    listed = text.listed
    names = names_in(listed, job.path, shape[0]) if job.options.names else None
    named = replace(job, names=AxisNames(names, names))
    named.sort(_batches(path), shape, np.dtype(np.float64), count)
    path.unlink()
    if job.labels is not None:
        job.labels.write_bytes(listed)


def _batches(path: Path) -> Iterator[Entries]:
    """Yield the edges of a file of numbers."""
    with path.open("rb") as file:
        while raw := file.read(ENTRIES * EDGE.itemsize):
            edges: Any = np.frombuffer(raw, EDGE)
            yield Entries(*(np.ascontiguousarray(edges[name]) for name in EDGE.names or ()))


class EdgeText:
    """The edges of a text, and the vertices that were met so far."""

    def __init__(self, source: Source, options: ReadOptions, reading: Reading) -> None:
        self.source, self.path, self.text = source, source.path, TextFile(source)
        self.options, self.reading = options, reading
        self.large = source.size > COMPILED_BYTES
        self.vertices: Numbers | Names | ManyNames = self._vertices()
        self.lines, self.begun, self.doubts = 0, False, doubts.no_doubts()

    def _vertices(self) -> Numbers | Names | ManyNames:
        if not self.options.names:
            return Numbers()
        if not self.large:
            return Names()
        from spdist.storage.formats.edges.many_names import ManyNames

        return ManyNames()

    @property
    def done(self) -> int:
        """Bytes of text that were read."""
        return self.text.done

    def edges(self) -> Iterator[Any]:
        """Yield arrays of `EDGE`, in order."""
        pieces = self._pieces()
        head, options = self._without_first_line(_head(pieces))
        dialect = dialect_of(b"".join(head).split(b"\n")[:-1], self.source.ending, options, self.path)
        reader = LineReader(dialect, self.path, numbers=not self.options.names, allow_nan=self.options.allow_nan)
        rest = b""
        for piece, words in self._batches(_without_header(itertools.chain(head, pieces), dialect), dialect):
            if rest or words is None:
                found = reader.read(rest + piece, self.lines)
                rest = found.rest
                edges = _array(self.vertices.numbers(found.words), np.array(found.weights, np.float64))
                self._count(found.doubts, found.lines)
            else:
                edges = _array(self.vertices.number_all(*words), words[0].weights)
                self._count(words[0].doubts, words[0].lines)
            self.begun |= len(edges) > 0
            yield edges
        if rest:
            raise reader.unclosed(self.lines + 1)
        found_words, left_out = doubts.in_words(self.doubts, dialect, names=self.options.names, path=self.path)
        self.reading.found += found_words
        self.reading.left_out += left_out
        if self.options.names:
            self.reading.found += doubts.of_names(self.listed)

    @cached_property
    def listed(self) -> bytes:
        """The names in the order of their numbers, each with the end of a line, once all is read."""
        return self.vertices.listed()

    def _without_first_line(self, head: list[bytes]) -> tuple[list[bytes], ReadOptions]:
        """Return the first pieces with a blank line in place of one that only says what separates, and the options."""
        line = head[0].partition(b"\n")[0] if head else b""
        if SAYS_BIPARTITE.match(line):
            self.reading.found.append("line 1 says bipartite: equal numbers of both sides are one vertex here")
        said = SAYS_SEPARATOR.fullmatch(line)
        if said is None:
            return head, self.options
        self.reading.found.append("line 1 says what separates")
        name = next(name for name, each in SEPARATORS.items() if each == said[1][0])
        separator = self.options.separator or cast(Separator, name)
        return [head[0][len(line) :], *head[1:]], replace(self.options, separator=separator)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the lines of the text, some at a time, each with its end."""
        rest, yielded = b"", 0
        while found := self.text.read(TEXT_BYTES):
            cut = found.rfind(b"\n") + 1
            if cut:
                yield rest + found[:cut]
                yielded += len(rest) + cut
            rest = found[cut:] if cut else rest + found
            if len(rest) > TEXT_BYTES:
                raise self._too_long(yielded)
        if rest:
            yield rest + b"\n"

    def _too_long(self, before: int) -> MatrixError:
        """Return the error of a line that is too long, `before` bytes after the begin of the text."""
        self.source.file.seek(0)
        text, lines = TextFile(self.source), 0
        while before > 0 and (found := text.read(min(TEXT_BYTES, before))):
            before -= len(found)
            lines += found.count(b"\n")
        return MatrixError(
            f"{self.path}, line {lines + 1:,}: a line of more than {TEXT_BYTES:,} bytes; this is no list of edges"
        )

    def _count(self, table: Int64Array, lines: int) -> None:
        if self.begun:
            table[doubts.LATE_COMMENT] = table[doubts.COMMENT]
        doubts.add(self.doubts, table, self.lines)
        self.lines += lines

    def _batches(
        self, pieces: Iterator[bytes], dialect: Dialect
    ) -> Iterator[tuple[bytes, tuple[Words, Int64Array | None] | None]]:
        """Yield pieces of text with their words, found in threads; None for a piece to be read line by line."""
        while batch := list(itertools.islice(pieces, count_cpus() if self.large else 1)):
            yield from zip(batch, self._words(batch, dialect), strict=True)

    def _words(self, pieces: list[bytes], dialect: Dialect) -> list[tuple[Words, Int64Array | None] | None]:
        """Return the words of pieces, with the vertices that are known; None of one to be read line by line."""
        found: list[tuple[Words, Int64Array | None] | None] = [None] * len(pieces)
        if not self.large:
            return found
        from spdist.storage.formats.edges.words import words_of

        vertices = self.vertices

        def find(i: int) -> None:
            numbers = isinstance(vertices, Numbers)
            words = words_of(pieces[i], dialect, numbers=numbers, allow_nan=self.options.allow_nan)
            if words is not None:
                found[i] = words, None if isinstance(vertices, Numbers | Names) else vertices.look_up(words)

        run_in_threads(len(pieces), find)
        return found


def _array(numbers: Int64Array, weights: Any) -> Any:
    """Return edges, given the numbers of the two vertices of each, one after the other."""
    edges = np.empty(len(weights), EDGE)
    edges["row"], edges["column"], edges["weight"] = numbers[::2], numbers[1::2], weights
    return edges


def _head(pieces: Iterator[bytes]) -> list[bytes]:
    """Return the first pieces of a text, up to some lines after the first edge."""
    head: list[bytes] = []
    has_edge, size = False, 0
    for piece in pieces:
        head.append(piece)
        size += len(piece)
        has_edge = has_edge or any(line.strip() and not is_comment(line) for line in piece.split(b"\n"))
        if size > (SAMPLE_BYTES if has_edge else HEAD_BYTES):
            break
    return head


def _without_header(pieces: Iterator[bytes], dialect: Dialect) -> Iterator[bytes]:
    """Yield pieces of text, with blank lines in place of the header's."""
    before, header = 0, range(dialect.line - 1, dialect.line - 1 + dialect.header_lines)
    for piece in pieces:
        count = piece.count(b"\n") if before < header.stop else 0
        if header and before < header.stop and before + count > header.start:
            lines = piece.split(b"\n")
            for k in range(max(header.start - before, 0), min(header.stop - before, count)):
                lines[k] = b""
            piece = b"\n".join(lines)
        before += count
        yield piece
