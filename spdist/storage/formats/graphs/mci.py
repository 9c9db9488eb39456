"""Read graphs and matrices in mcl's native text format: a list of columns, each a list of rows and values.

mcl calls the columns' domain the source of its arcs, and the rows' domain their destination. Here an arc from a
to b is the entry (a, b), as in a list of edges: mcl's columns become rows. ``mcxdump -imx`` lists the same triples.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.foundation.units import counted
from spdist.matrices.dtypes import Int64Array, ValueArray
from spdist.storage.external_sort import Entries
from spdist.storage.formats.source import Import
from spdist.storage.formats.text import TextFile
from spdist.storage.formats.text_numbers import MAX_WORD, MOST_EXACT, excerpt, find_words, is_whole, pieces_of
from spdist.storage.names.names import AxisNames, names_in

BINARY = b"\x1b\xc2\x4d\xe8"
"""The bytes that mcl's binary format begins with."""

MAX_PROSE = 10_000
"""Lines before the header at most."""

COMMENT = re.compile(rb"#[^\n]*")
TOKEN = re.compile(rb"[()$]|[^\s()$]+")
DIMENSIONS = re.compile(rb"(\d{1,19})x(\d{1,19})")


def import_mci(job: Import) -> None:
    """Import a matrix in mcl's native format as float64; domains other than 0, 1, ... become names.

    As in mcl, zeros are dropped, and of several entries in one position the first is kept.

    Raises `MatrixError` if it is binary or damaged; names the line.
    """
    text = TextFile(job.source)
    head = _Head(job, text)
    shape = head.shape
    names = AxisNames(*(None if each is None else names_in(_lines(each), job.path, len(each)) for each in head.domains))
    job.reading.found.append("mcl's columns are rows, so that an arc from a to b is entry (a, b)")
    if any(each is not None for each in head.domains):
        job.reading.found.append("names are mcl's numbers of vertices")
    body = _Body(job, head)
    options = replace(job.options, duplicates="first")  # as mcl
    about = (job.source.inflated if text.packing else job.source.size) // 4
    replace(job, names=names, options=options).sort(body.entries(text), shape, np.dtype(np.float64), about)


def _lines(numbers: Int64Array) -> bytes:
    return b"".join(b"%d\n" % number for number in numbers.tolist())


# -- before the columns ------------------------------------------------------------------------------------------------


class _Head:
    """What comes before the columns.

    `line`: number of the line with the word ``begin``.
    `rest`: what follows this word in its line.
    `shape`: sources and destinations.
    `domains`: numbers of sources and of destinations, in order, where they are not 0, 1, ...
    """

    def __init__(self, job: Import, text: TextFile) -> None:
        self.job, self.text, self.line, self.rest = job, text, 0, b""
        self.domains: tuple[Int64Array | None, Int64Array | None] = (None, None)
        self._tokens = self._read_tokens()
        self.shape = self._read_dimensions()
        while (section := self._section()) != b"mclmatrix":
            self._read_domain(section)
        if next(self._tokens, b"") != b"begin":
            raise self.error("expected the word 'begin' after '(mclmatrix'")

    def error(self, what: str) -> MatrixError:
        """Return an error that names the line which was read last."""
        return MatrixError(f"{self.job.path}, line {self.line:,}: {what}")

    def _read_tokens(self) -> Iterator[bytes]:
        """Yield words, brackets and $, with what follows each in `rest`."""
        raw = self._skip_prose()
        while raw:
            line = COMMENT.sub(b"", raw)
            for found in TOKEN.finditer(line):
                self.rest = line[found.end() :]
                yield found[0]
            raw = self._next_line()

    def _next_line(self) -> bytes:
        self.line += 1
        return self.text.readline(MAX_WORD)

    def _skip_prose(self) -> bytes:
        """Return the line with the header, before which there may be any text."""
        while raw := self._next_line():
            if raw.startswith(BINARY) and self.line == 1:
                raise MatrixError(
                    f"{self.job.path}: a matrix in mcl's binary format, which depends on the machine and is not read; "
                    f"write it as text: mcx convert FILE FILE.mci"
                )
            if raw.lstrip().startswith(b"(mclheader") or self.line > MAX_PROSE:
                return raw
        raise MatrixError(f"{self.job.path}: no line with '(mclheader'; it is not a matrix in mcl's native format")

    def _section(self) -> bytes:
        """Return the name of the next section."""
        bracket, name = next(self._tokens, b""), next(self._tokens, b"")
        if bracket != b"(" or not name.startswith(b"mcl"):
            raise self.error(
                "not a matrix in mcl's native format; expected '(mclheader', '(mclrows', '(mclcols', '(mcldoms' or "
                "'(mclmatrix'"
            )
        return name

    def _read_dimensions(self) -> tuple[int, int]:
        """Return the numbers of sources and destinations, which the header states as rows x columns."""
        found = None
        if self._section() == b"mclheader":
            words: list[bytes] = []
            while len(words) < 100 and (word := next(self._tokens, b")")) != b")":
                words.append(word)
            pairs = dict(itertools.pairwise(words))
            found = DIMENSIONS.fullmatch(pairs.get(b"dimensions", b"")) if pairs.get(b"mcltype") == b"matrix" else None
        if found is None:
            raise self.error("expected the header '(mclheader mcltype matrix dimensions ROWSxCOLUMNS )'")
        return self.job.shape((int(found[2]), int(found[1])))

    def _read_domain(self, section: bytes) -> None:
        """Read the numbers of sources, of destinations, or of both."""
        axes = {b"mclcols": (0,), b"mclrows": (1,), b"mcldoms": (0, 1)}.get(section)
        if axes is None:
            raise self.error(f"'{excerpt(section)}' is not a section of mcl's native format")
        length = self.shape[axes[0]]
        numbers: list[int] = []
        while (word := next(self._tokens, b"")) != b"$":
            if is_whole(word) and int(word) >= MOST_EXACT:
                raise self.error(f"vertex {int(word):,}: numbers of vertices are read up to {MOST_EXACT:,}")
            if not is_whole(word) or len(numbers) == length:
                raise self.error(f"expected {counted(length, 'number')} and a $, got '{excerpt(word)}'")
            numbers.append(int(word))
        domain = np.unique(np.array(numbers, np.int64))
        if len(domain) != length or any(self.shape[axis] != length for axis in axes) or next(self._tokens, b"") != b")":
            raise self.error(f"expected {length:,} different numbers, a $ and a closing bracket")
        kept = None if length == 0 or domain[-1] == length - 1 else domain
        self.domains = kept if 0 in axes else self.domains[0], kept if 1 in axes else self.domains[1]


# -- the columns -------------------------------------------------------------------------------------------------------


@dataclass
class _Body:
    """The columns, read piece by piece; a piece may end within a column."""

    job: Import
    head: _Head
    line: int = 0  # number of the first line of the piece
    source: float = -1.0  # the source whose arcs are read; -1 before its number

    def entries(self, text: TextFile) -> Iterator[Entries]:
        """Yield the entries up to the closing bracket."""
        self.line = self.head.line
        pieces = self._pieces(text)
        for piece in pieces:
            body, bracket, after = piece.partition(b")")
            yield self._read(body)
            self.line += body.count(b"\n")
            if bracket:
                if self.source >= 0:
                    raise self._error(b"", 0, "a column ends without a $")
                if after.strip() or any(each.strip() for each in pieces):
                    self.job.reading.left_out.append("what follows the matrix")
                return
        raise MatrixError(f"{self.job.path}: the file ends before the matrix does; get it again")

    def _pieces(self, text: TextFile) -> Iterator[bytes]:
        """Yield the text without comments, what the head has left first."""
        rest, self.head.rest = self.head.rest, b""
        if rest:
            yield rest
        for piece in pieces_of(text, self.job.path, b"#"):
            yield COMMENT.sub(b"", piece) if b"#" in piece else piece

    def _error(self, text: bytes, at: int, what: str) -> MatrixError:
        """Return an error about the line of a position in the piece."""
        line = self.line + text.count(b"\n", 0, at)
        return MatrixError(f"{self.job.path}, line {line:,}: {what}")

    def _read(self, text: bytes) -> Entries:
        """Return the entries of a piece of text."""
        words, wrong = find_words(text.translate(_MARKS_TO_SPACES))
        if wrong >= 0:
            word = text[wrong:].translate(_MARKS_TO_SPACES).split(None, 1)[0]
            raise self._error(text, wrong, f"'{excerpt(word)}' is not a number")
        raw = np.frombuffer(text, np.uint8)
        colons, ends = np.flatnonzero(raw == ord(":")), np.flatnonzero(raw == ord("$"))
        colons_before = np.searchsorted(colons, words.begins)
        ends_before = np.searchsorted(ends, words.begins)
        is_value = np.diff(colons_before, prepend=0) > 0
        is_source = np.diff(ends_before, prepend=0) > 0
        if len(is_source):
            is_source[0] |= self.source < 0
        self._check_marks(text, words.begins, colons, ends, is_value, is_source)
        sources = np.concatenate([[self.source], words.values[is_source]])[np.cumsum(is_source)]
        at = np.flatnonzero(~is_value & ~is_source)
        has_value = np.concatenate([is_value[1:], [False]])[at]
        values = np.where(has_value, np.concatenate([words.values, [1.0]])[at + 1], 1.0)
        of_sources = np.flatnonzero(is_source)
        self._positions(text, words.begins[of_sources], words.values[of_sources], 0)
        rows = self._positions(text, words.begins[at], sources[at], 0)
        columns = self._positions(text, words.begins[at], words.values[at], 1)
        if len(words.begins) or len(ends):
            is_closed = len(ends) > 0 and (not len(words.begins) or ends[-1] > words.begins[-1])
            self.source = -1.0 if is_closed else float(sources[-1])
        return Entries(rows, columns, values).take(values != 0)  # as mcl, to which a zero is no arc

    def _check_marks(
        self, text: bytes, begins: Int64Array, colons: Int64Array, ends: Int64Array, is_value: Any, is_source: Any
    ) -> None:
        """Refuse colons without two numbers, and columns without one."""
        followed = np.searchsorted(begins, colons)  # the word after each colon
        after = np.concatenate([is_value, [False]])[followed] & (followed > 0)
        wrong = ~after | np.concatenate([np.diff(followed) == 0, [False]])[: len(colons)]
        before = np.concatenate([[False], is_value])[followed]
        crossed = np.concatenate([is_source, [False]])[followed]
        for bad in (wrong, before, crossed):
            if bad.any():
                raise self._error(text, int(colons[np.argmax(bad)]), "a colon must stand between two numbers")
        empty = np.diff(np.searchsorted(begins, ends), prepend=0 if self.source < 0 else -1) == 0
        if empty.any():
            raise self._error(text, int(ends[np.argmax(empty)]), "a column without its number before a $")

    def _positions(self, text: bytes, begins: Int64Array, numbers: ValueArray, axis: int) -> Int64Array:
        """Return the positions of some numbers in a domain; refuse one that is not in it."""
        domain, length = self.head.domains[axis], self.head.shape[axis]
        whole = np.trunc(np.clip(numbers, -1, MOST_EXACT)).astype(np.int64)
        found: Int64Array = whole if domain is None else np.searchsorted(domain, whole)
        inside = (found >= 0) & (found < length)
        if domain is not None and length:
            inside &= domain[np.minimum(found, length - 1)] == whole
        wrong = ~inside | (whole != numbers)
        if wrong.any():
            first = int(np.argmax(wrong))
            what = ("column", "row")[axis]
            where = f"0 to {length - 1:,}" if domain is None else f"mcl's {what}s"
            raise self._error(text, int(begins[first]), f"{what} {numbers[first]:.15g} is outside {where}")
        return found


_MARKS_TO_SPACES = bytes.maketrans(b":$", b"  ")
