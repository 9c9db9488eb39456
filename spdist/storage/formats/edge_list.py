"""Read a graph as a list of edges: two vertices and perhaps a weight a line, by number or by name.

Whitespace separates the fields of .abc and .tsv, a comma those of .csv. Lines that begin with ``#`` or ``%`` are
comments, as is the first line of a .tsv or .csv whose weight is no number. The file is read once: edges wait in a file
of numbers until all vertices are known.
"""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads
from spdist.matrices.dtypes import Int64Array
from spdist.storage.external_sort import Entries
from spdist.storage.formats.edge_words import ManyNames, Words, words_of
from spdist.storage.formats.source import Import, Source
from spdist.storage.formats.text import TextFile
from spdist.storage.names.names import AxisNames, names_in

TEXT_BYTES = 1 << 20
"""Bytes of text that a thread reads at a time, and most bytes of a line."""
COMPILED_BYTES = 1 << 20
"""Bytes of a file from which its words are found by compiled code: compiling that takes as long as some megabytes."""
ENTRIES = 1 << 20
"""Edges that are sorted at a time."""
EDGE = np.dtype([("row", np.int64), ("column", np.int64), ("weight", np.float64)])


def import_edges(job: Import) -> None:
    """Import a list of edges as a square matrix of float64.

    Parameters
    ----------
    job : Import
        With `has_names`, vertices have names, and are numbered in the order in which they come; their names are stored
        with the matrix, and written to `labels`, one a line. Without, vertices are numbers from 0 on.

    Raises
    ------
    MatrixError
        If a line is no edge; names it.
    """
    text = EdgeText(job.source, names=job.options.names)
    place, count = job.stage.scratch / "edges", 0
    with place.open("wb") as file:
        for edges in text.edges():
            file.write(edges.tobytes())
            count += len(edges)
            job.report_read(min(text.done, job.source.size), 2 * job.source.size)
    shape = job.shape((text.vertices.count, text.vertices.count))
    listed = text.vertices.listed()
    names = names_in(listed, job.path, shape[0]) if job.options.names else None
    named = replace(job, names=AxisNames(names, names))
    named.sort(_batches(place), shape, np.dtype(np.float64), count)
    place.unlink()
    if job.labels is not None:
        job.labels.write_bytes(listed)


def _batches(place: Path) -> Iterator[Entries]:
    """Yield the edges of a file of numbers."""
    with place.open("rb") as file:
        while raw := file.read(ENTRIES * EDGE.itemsize):
            edges: Any = np.frombuffer(raw, EDGE)
            yield Entries(*(np.ascontiguousarray(edges[name]) for name in EDGE.names or ()))


# -- vertices ----------------------------------------------------------------------------------------------------------


@dataclass
class Numbers:
    """Vertices that are numbers from 0 on."""

    count: int = 0

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices; raise ValueError if one is none."""
        found = np.array([int(word) for word in words], np.int64) if words else np.empty(0, np.int64)
        if len(found) and not (int(found.min()) >= 0 and int(found.max()) < (1 << 63) - 1):
            raise ValueError
        return self._counted(found)

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
    """Vertices that have names, numbered in the order in which they come: those of a small file."""

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
        places = zip(words.begins.tolist(), words.lengths.tolist(), strict=True)
        return self.numbers([words.text[begin : begin + length] for begin, length in places])

    def listed(self) -> bytes:
        """Return the names in the order of their numbers, each with the end of a line."""
        return b"".join(name + b"\n" for name in self.known)


# -- edges -------------------------------------------------------------------------------------------------------------


class EdgeText:
    """The edges of a text, and the vertices that were met so far.

    Parameters
    ----------
    source : Source
    names : bool
        Whether vertices have names.
    """

    def __init__(self, source: Source, *, names: bool) -> None:
        self.path, self.text = source.path, TextFile(source)
        self.commas = ".csv" in Path(source.path).suffixes
        self.large = source.size > COMPILED_BYTES
        self.vertices: Numbers | Names | ManyNames = Numbers() if not names else ManyNames() if self.large else Names()

    @property
    def done(self) -> int:
        """Bytes of text that were read."""
        return self.text.done

    def edges(self) -> Iterator[Any]:
        """Yield arrays of `EDGE`, in order."""
        line, texts = 1, _pieces(self.text, self.path)
        while pieces := list(itertools.islice(texts, count_cpus() if self.large else 1)):
            for piece, words in zip(pieces, self._words(pieces), strict=True):
                if words is None:
                    yield self._read_lines(piece, line)
                    line += piece.count(b"\n")
                else:
                    yield _array(self.vertices.number_all(*words), words[0].weights)
                    line += words[0].lines

    def _words(self, pieces: list[bytes]) -> list[tuple[Words, Int64Array | None] | None]:
        """Return the words of pieces, with the vertices that are known; None of one to be read line by line."""
        found: list[tuple[Words, Int64Array | None] | None] = [None] * len(pieces)

        def find(i: int) -> None:
            words = words_of(pieces[i], commas=self.commas, numbers=isinstance(self.vertices, Numbers))
            if words is not None:
                found[i] = words, self.vertices.look_up(words) if isinstance(self.vertices, ManyNames) else None

        if self.large:
            run_in_threads(len(pieces), find)
        return found

    def _read_lines(self, text: bytes, first: int) -> Any:
        """Return the edges of lines, read one by one; the first has number `first`."""
        words: list[bytes] = []
        weights, lines = [], []
        for line, raw in enumerate(text.split(b"\n"), first):
            fields = _by_commas(raw) if self.commas else raw.split()
            weight = _weight(fields, self.path, line)
            if weight is not None:
                words += fields[:2]
                weights.append(weight)
                lines.append(line)
        try:
            return _array(self.vertices.numbers(words), np.array(weights, np.float64))
        except (ValueError, OverflowError):
            wrong = next(i for i, word in enumerate(words) if not word.isdigit() or int(word) >= (1 << 63) - 1)
            raise _error(
                self.path,
                lines[wrong // 2],
                f"the vertex {_shown(words[wrong])} is no number from 0 on; if vertices have names, pass --names or "
                f"--labels FILE",
            ) from None


def _array(numbers: Int64Array, weights: Any) -> Any:
    """Return edges, given the numbers of the two vertices of each, one after the other."""
    edges = np.empty(len(weights), EDGE)
    edges["row"], edges["column"], edges["weight"] = numbers[::2], numbers[1::2], weights
    return edges


def _weight(words: list[bytes], path: str, line: int) -> float | None:
    """Return the weight of an edge; None of a line that is empty, a comment, or first and names the columns."""
    if not words or words[0][:1] in (b"#", b"%"):
        return None
    if len(words) not in (2, 3):
        raise _error(path, line, f"{len(words)} fields where two vertices and perhaps a weight are expected")
    try:
        return 1.0 if len(words) == 2 else float(words[2])
    except ValueError:
        if line == 1 and not path.endswith(".abc"):
            return None
        raise _error(path, line, f"the weight {_shown(words[2])} is no number") from None


def _pieces(text: TextFile, path: str) -> Iterator[bytes]:
    """Yield the lines of a text, some at a time, each with its end."""
    rest = b""
    while found := text.read(TEXT_BYTES):
        cut = found.rfind(b"\n") + 1
        if cut:
            yield rest + found[:cut]
        rest = found[cut:] if cut else rest + found
        if len(rest) > TEXT_BYTES:
            raise MatrixError(f"{path}: a line of more than {TEXT_BYTES:,} bytes; this is no list of edges")
    if rest:
        yield rest + b"\n"


def _by_commas(line: bytes) -> list[bytes]:
    """Return the fields of a line of CSV."""
    fields = next(csv.reader([line.decode("utf-8", "surrogateescape")]), []) if line.strip() else []
    return [each.strip().encode("utf-8", "surrogateescape") for each in fields]


def _shown(word: bytes) -> str:
    return one_line(repr(word.decode("utf-8", "replace")), 40)


def _error(path: str, line: int, what: str) -> MatrixError:
    return MatrixError(f"{path}, line {line:,}: {what}")
