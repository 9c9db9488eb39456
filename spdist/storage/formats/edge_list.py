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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.matrices.dtypes import Int64Array
from spdist.storage.external_sort import Entries
from spdist.storage.formats.source import BoundedText, Import

TEXT_BYTES = 1 << 20
"""Bytes of text that are read at a time, and most bytes of a line."""
ENTRIES = 1 << 20
"""Edges that are sorted at a time."""
EDGE = np.dtype([("row", np.int64), ("column", np.int64), ("weight", np.float64)])


def import_edges(job: Import) -> None:
    """Import a list of edges as a square matrix of float64.

    Parameters
    ----------
    job : Import
        With `labels`, vertices are names, and numbered in the order in which they come; their names are written there,
        one a line. Without, vertices are numbers from 0 on.

    Raises
    ------
    MatrixError
        If a line is no edge; names it.
    """
    vertices = Names() if job.labels is not None else Numbers()
    place = job.stage.scratch / "edges"
    with place.open("wb") as file:
        count = _read(job, vertices, file)
    shape = job.shape((vertices.count, vertices.count))
    job.sort(_batches(place), shape, np.dtype(np.float64), count)
    place.unlink()
    if job.labels is not None:
        job.labels.write_bytes(b"".join(name + b"\n" for name in vertices.names()))


@dataclass
class Numbers:
    """Vertices that are numbers from 0 on."""

    count: int = 0

    def number(self, word: bytes) -> int:
        """Return the number of a vertex; raise ValueError if it is none."""
        return int(self.numbers([word])[0])

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices; raise ValueError if one is none."""
        found = np.array([int(word) for word in words], np.int64) if words else np.empty(0, np.int64)
        if len(found) and not (int(found.min()) >= 0 and int(found.max()) < (1 << 63) - 1):
            raise ValueError
        self.count = max(self.count, int(found.max(initial=-1)) + 1)
        return found

    def names(self) -> Iterator[bytes]:
        """Yield nothing: there are no names."""
        yield from ()


@dataclass
class Names:
    """Vertices that have names, numbered in the order in which they come."""

    known: defaultdict[bytes, int] = field(default_factory=lambda: defaultdict(itertools.count().__next__))

    @property
    def count(self) -> int:
        """Number of vertices."""
        return len(self.known)

    def number(self, word: bytes) -> int:
        """Return the number of a vertex."""
        return self.known[word]

    def numbers(self, words: list[bytes]) -> Int64Array:
        """Return the numbers of some vertices."""
        return np.fromiter(map(self.known.__getitem__, words), np.int64, len(words))

    def names(self) -> Iterator[bytes]:
        """Yield the names in the order of their numbers."""
        yield from self.known


def _read(job: Import, vertices: Numbers | Names, file: BinaryIO) -> int:
    """Write the edges of the text to a file of numbers; return how many there are."""
    split = _by_commas if ".csv" in Path(job.path).suffixes else bytes.split
    text, count, line = BoundedText(job.source), 0, 0
    for lines in _pieces(text, job.path):
        edges = _alike(lines, vertices) if split is bytes.split else None
        if edges is None:
            found = [_line(split(raw), vertices, job, number) for number, raw in enumerate(lines, line + 1)]
            edges = np.array([edge for edge in found if edge is not None], EDGE)
        file.write(edges.tobytes())
        line, count = line + len(lines), count + len(edges)
        job.report_read(min(text.done, job.source.size), 2 * job.source.size)
    return count


def _alike(lines: list[bytes], vertices: Numbers | Names) -> Any:
    """Return the edges of lines that all have as many fields and no comment; None of others, which are read singly."""
    text = b"\n".join(lines)
    words = text.split()
    fields = len(words) // max(len(lines), 1)
    if fields not in (2, 3) or len(words) != fields * len(lines) or b"#" in text or b"%" in text:
        return None
    letters: Any = np.frombuffer(text + b"\n", np.uint8)
    space = (letters == 32) | ((letters >= 9) & (letters <= 13))
    begins = ~space
    begins[1:] &= space[:-1]
    until = np.cumsum(begins)[letters == 10]
    if (np.diff(until, prepend=0) != fields).any():
        return None
    edges = np.empty(len(lines), EDGE)
    try:
        edges["weight"] = np.array(words[2::3]).astype(np.float64) if fields == 3 else 1.0
        del words[2::fields]
        numbers = vertices.numbers(words)
    except (ValueError, OverflowError):
        return None
    edges["row"], edges["column"] = numbers[::2], numbers[1::2]
    return edges


def _line(words: list[bytes], vertices: Numbers | Names, job: Import, line: int) -> tuple[int, int, float] | None:
    """Return the edge of a line; None of one that is empty, a comment or a header."""
    if not words or words[0][:1] in (b"#", b"%"):
        return None
    return _edge(words, vertices, job, line)


def _edge(words: list[bytes], vertices: Numbers | Names, job: Import, line: int) -> tuple[int, int, float] | None:
    """Return the edge of a line; None of a first line that names the columns."""
    if len(words) not in (2, 3):
        raise _error(job, line, f"{len(words)} fields where two vertices and perhaps a weight are expected")
    try:
        weight = 1.0 if len(words) == 2 else float(words[2])
    except ValueError:
        if line == 1 and not job.path.endswith(".abc"):
            return None
        raise _error(job, line, f"the weight {_shown(words[2])} is no number") from None
    try:
        return vertices.number(words[0]), vertices.number(words[1]), weight
    except ValueError:
        wrong = words[0] if not words[0].isdigit() else words[1]
        raise _error(
            job, line, f"the vertex {_shown(wrong)} is no number from 0 on; for names, say where to list them: --labels"
        ) from None


def _pieces(text: BoundedText, path: str) -> Iterator[list[bytes]]:
    """Yield the lines of a text, some at a time."""
    rest = b""
    while found := text.read(TEXT_BYTES):
        *lines, rest = (rest + found).split(b"\n")
        if len(rest) > TEXT_BYTES:
            raise MatrixError(f"{path}: a line of more than {TEXT_BYTES:,} bytes; this is no list of edges")
        yield lines
    if rest:
        yield [rest]


def _by_commas(line: bytes) -> list[bytes]:
    """Return the fields of a line of CSV."""
    fields = next(csv.reader([line.decode("utf-8", "surrogateescape")]), [])
    return [each.strip().encode("utf-8", "surrogateescape") for each in fields]


def _batches(place: Path) -> Iterator[Entries]:
    """Yield the edges of a file of numbers."""
    with place.open("rb") as file:
        while raw := file.read(ENTRIES * EDGE.itemsize):
            edges: Any = np.frombuffer(raw, EDGE)
            yield Entries(*(np.ascontiguousarray(edges[name]) for name in EDGE.names or ()))


def _shown(word: bytes) -> str:
    return one_line(repr(word.decode("utf-8", "replace")), 40)


def _error(job: Import, line: int, what: str) -> MatrixError:
    return MatrixError(f"{job.path}, line {line:,}: {what}")
