"""Edges of a text, line by line in Python: all of the grammar; names the line of an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import counted
from spdist.matrices.dtypes import Int64Array
from spdist.storage.formats.edges import doubts
from spdist.storage.formats.edges.dialect import Dialect, is_comment
from spdist.storage.formats.edges.fields import (
    COMMA,
    SEMICOLON,
    SPACE,
    TAB,
    TAB_OR_SPACE,
    separator_of,
    split_fields,
    vertex_of,
    weight_of,
)

BLANK = re.compile(rb"\s")
RECORD_BYTES = 1 << 16
"""Bytes of the longest record with line breaks in quotes."""

HINTS = {
    COMMA: (b",", "commas", "comma"), SEMICOLON: (b";", "semicolons", "semicolon"), TAB: (b"\t", "tabs", "tab"),
    SPACE: (b" ", "spaces", "space"),
}  # fmt: skip
"""What a line may have that separates fields; its name in the plural, and as an option."""

BYTE_ORDER_MARK = "\ufeff".encode()


@dataclass
class Lines:
    """The edges of some lines."""

    words: list[bytes]  # the two vertices of each edge, one after the other
    weights: list[float]
    doubts: Int64Array  # (KINDS, 2) int64
    rest: bytes = b""  # lines at the end in which a quote is open, to be read with those that follow
    lines: int = 0  # lines that were read, without the lines in `rest`


class LineReader:
    """Reads lines one by one."""

    def __init__(self, dialect: Dialect, path: str, *, numbers: bool, allow_nan: bool) -> None:
        self.dialect, self.path, self.numbers, self.allow_nan = dialect, path, numbers, allow_nan

    def read(self, text: bytes, before: int) -> Lines:
        """Return the edges of whole lines.

        `before`: lines before the first one.
        Raises `MatrixError` if a line is no edge; names it.
        """
        out = Lines([], [], doubts.no_doubts())
        for line, record in self._records(text, before, out):
            if is_comment(record):
                doubts.note(out.doubts, doubts.COMMENT, line)
                if out.weights:
                    doubts.note(out.doubts, doubts.LATE_COMMENT, line)
            elif record.strip():
                self._add(record, line, before, out)
        return out

    def _records(self, text: bytes, before: int, out: Lines) -> Iterator[tuple[int, bytes]]:
        """Yield the first line, counted from 1 in the text, and the text of each record; note the rest."""
        lines = text.split(b"\n")[:-1]
        quotes, begin = self.dialect.quotes and b'"' in text, 0
        while begin < len(lines):
            record, end = lines[begin], begin + 1
            while quotes and b'"' in record and not is_comment(record) and self._is_open(record, before + begin + 1):
                if end == len(lines):
                    out.rest = record + b"\n"
                    out.lines = begin
                    return
                record, end = record + b"\n" + lines[end], end + 1
                if len(record) > RECORD_BYTES:
                    raise self.unclosed(before + begin + 1)
            yield begin + 1, record
            begin = end
        out.lines = begin

    def _is_open(self, record: bytes, line: int) -> bool:
        """Whether a quote is open at the end of a record."""
        try:
            return split_fields(record, self.dialect.separator, True) is None
        except ValueError:
            raise self.error(
                line, f"text follows a closing quote in {_shown(record)}; if quotes belong to names, pass --no-quotes"
            ) from None

    def _add(self, record: bytes, line: int, before: int, out: Lines) -> None:
        """Add the edge of a record."""
        dialect, number = self.dialect, before + line
        if b"\0" in record:
            raise self.error(number, "a zero byte; this is no text, or UTF-16 text: convert it to UTF-8")
        separator = separator_of(record, dialect.separator)
        fields = split_fields(record, separator, dialect.quotes) or []
        if dialect.raw and record == dialect.raw:
            raise self.error(number, f"the header of line {dialect.line:,} again; remove it, as files were joined here")
        least, most = dialect.bounds(separator)
        if not least <= len(fields) <= most:
            raise self.error(number, self._wrong_count(record, separator, len(fields)))
        ends = [fields[k] for k in dialect.columns[:2]]
        for field in ends:
            self._check_vertex(field, number)
        weighted = 0 <= dialect.columns[2] < len(fields)
        weight = self._weight(fields[dialect.columns[2]], number) if weighted else 1.0
        out.words += ends
        out.weights.append(weight)
        doubts.note(out.doubts, doubts.WEIGHTED if weighted else doubts.UNWEIGHTED, line)
        if dialect.separator == TAB_OR_SPACE:
            doubts.note(out.doubts, doubts.SPACED if separator == SPACE else doubts.TABBED, line)
        if not self.numbers:
            may_have_spaces = dialect.separator == TAB_OR_SPACE and separator == TAB
            if may_have_spaces and not out.doubts[doubts.SPACED_NAME, 0] and any(map(BLANK.search, ends)):
                doubts.note(out.doubts, doubts.SPACED_NAME, line)
            if separator != SPACE and self._is_padded(record, separator):
                doubts.note(out.doubts, doubts.PADDED, line)
        if weighted and dialect.decimal_comma:
            mark = fields[dialect.columns[2]]
            if b"," in mark or b"." in mark:
                doubts.note(out.doubts, doubts.COMMA_MARK if b"," in mark else doubts.POINT_MARK, line)

    def _check_vertex(self, field: bytes, line: int) -> None:
        """Refuse a vertex that has no name, or is no number where vertices are numbers."""
        if not field:
            raise self.error(line, "a vertex has an empty name; write both vertices, or leave the line out")
        if BYTE_ORDER_MARK in field:
            raise self.error(line, "a byte order mark inside the text; remove it, as files were joined here")
        if b"\n" in field:
            raise self.error(line, f"the name {_shown(field)} has a line break; names must have none")
        if self.numbers:
            try:
                vertex_of(field)
            except ValueError as error:
                raise self.error(line, f"the vertex {_shown(field)} {error}{self._header(line)}") from None

    def _weight(self, field: bytes, line: int) -> float:
        try:
            return weight_of(field, decimal_comma=self.dialect.decimal_comma, allow_nan=self.allow_nan)
        except ValueError as error:
            others = "; choose other columns with --columns" if self.dialect.fields > 2 else ""
            if field.startswith(b"{"):
                others = "; networkx.write_weighted_edgelist writes plain weights"
            header = self._header(line) if field[-1:].isalpha() else ""
            raise self.error(line, f"the weight {_shown(field)} {error}{others}{header}") from None

    def _header(self, line: int) -> str:
        """Return what to do if the first record is a header."""
        is_first = line == self.dialect.line and not self.dialect.header
        return "; if this line names the columns, pass --header" if is_first else ""

    def _wrong_count(self, record: bytes, separator: int, count: int) -> str:
        """Say that a record has too few or too many fields, and what may help."""
        if count < 2:
            tried = (TAB, SPACE) if self.dialect.separator == TAB_OR_SPACE else (separator,)
            likely = (each for key, each in HINTS.items() if key not in tried)
            hint = next((each for each in likely if each[0] in record.strip()), None)
            remedy = f"; if {hint[1]} separate, pass --separator {hint[2]}" if hint else ""
            return f"{counted(count, 'field')} where two vertices and perhaps a weight are expected{remedy}"
        return (
            f"{counted(count, 'field')} where line {self.dialect.line:,} has {self.dialect.fields}; correct it, or "
            f"choose columns with --columns"
        )

    def _is_padded(self, record: bytes, separator: int) -> bool:
        """Whether a vertex has blanks around its name, outside of quotes."""
        if self.dialect.quotes and b'"' in record:
            return False
        raw = record.split(bytes((separator,)))
        return any(raw[k] != raw[k].strip() for k in self.dialect.columns[:2])

    def unclosed(self, line: int) -> MatrixError:
        """Return the error of a quote that has no end."""
        return self.error(line, "a quote is opened and not closed; close it, or pass --no-quotes if names have quotes")

    def error(self, line: int, what: str) -> MatrixError:
        """Return an error that names a line of the file."""
        return MatrixError(f"{self.path}, line {line:,}: {what}")


def _shown(word: bytes) -> str:
    return one_line(repr(word.decode("utf-8", "replace")), 40)
