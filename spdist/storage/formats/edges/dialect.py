"""How a list of edges is written, decided once from its first lines: separator, header, columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import counted
from spdist.storage.formats.edges.fields import (
    COMMA,
    SEMICOLON,
    SPACE,
    TAB,
    TAB_OR_SPACE,
    separator_of,
    split_fields,
)
from spdist.storage.formats.edges.header import (
    chosen,
    columns_of,
    doubt_of,
    is_header,
    is_weight,
    lacks_first,
    names_ends,
)
from spdist.storage.formats.edges.signatures import refuse_other_kinds
from spdist.storage.formats.reading import ReadOptions

SAMPLED = 1000
"""Records that decide what separates the fields of a .csv."""

SEPARATORS = {"comma": COMMA, "semicolon": SEMICOLON, "tab": TAB, "space": SPACE}
IN_WORDS = {
    COMMA: "commas separate", SEMICOLON: "semicolons separate, and commas are decimal", TAB: "tabs separate",
    SPACE: "spaces separate",
}  # fmt: skip

SAYS_BIPARTITE = re.compile(rb"%\s*bip\b")
"""A first line of KONECT, which counts the vertices of the two sides apart."""

SAYS_SEPARATOR = re.compile(rb'\s*"?sep=([,;\t ])"?[,;\s]*', re.IGNORECASE)
"""A first line that says to Excel what separates fields."""

_THOUSANDS = re.compile(rb"[+-]?\d{1,3}")
_ONES = re.compile(rb"\d{3}")


@dataclass(frozen=True)
class Dialect:
    """How the records of a list of edges are written."""

    separator: int  # one of `fields.COMMA`, `SEMICOLON`, `TAB`, `SPACE` and `TAB_OR_SPACE`
    quotes: bool  # whether fields may be quoted
    columns: tuple[int, int, int]  # fields of source, target and weight, from 0; the last is -1 if there are no weights
    fields: int  # fields of the header or the first edge
    chosen: bool = False  # whether the caller or the header chose the columns: none may be missing then
    header: tuple[str, ...] = ()  # names of the columns; empty if there is no header
    # line of the first record, from 1, and the number of lines of the header
    line: int = 0
    header_lines: int = 0
    comment: int = 0  # line of the comment that names the columns; 0 if none does
    raw: bytes = b""  # text of the header; empty without a header

    @property
    def decimal_comma(self) -> bool:
        """Whether commas are decimal marks: in files whose fields semicolons separate, as of spreadsheets."""
        return self.separator == SEMICOLON

    def bounds(self, separator: int) -> tuple[int, int]:
        """Return the fewest and the most fields of a record whose fields `separator` separates.

        Fields at the end may be missing if they are not read. Names may have spaces, so the number of fields between
        spaces must never change with chosen columns.
        """
        if self.chosen:
            return (self.fields if separator == SPACE else max(self.columns) + 1), self.fields
        if self.fields > 3:
            return self.fields, self.fields
        return (2, max(self.fields, 2)) if self.header else (2, 3)

    def in_words(self, *, weighted: bool) -> list[str]:
        """Return what was decided about header and columns, for the line that says what was read."""
        source, target, weight = (self._column(each) for each in self.columns)
        weights = f"weights from column {weight}" if weighted and self.columns[2] >= 0 else "no weights"
        header = f"line {self.line:,} is the header" if self.header_lines else "no header"
        if self.comment:
            header = f"line {self.comment:,}, a comment, names the columns"
        return [header, f"vertices from columns {source} and {target}, {weights}"]

    def left_out(self) -> list[str]:
        """Return the columns that are not read."""
        others = [self._column(k) for k in range(self.fields) if k not in self.columns]
        shown = ", ".join(others[:8]) + (f" and {len(others) - 8:,} more" if len(others) > 8 else "")
        return [f"{'column' if len(others) == 1 else 'columns'} {shown}"] if others else []

    def _column(self, k: int) -> str:
        name = self.header[k] if 0 <= k < len(self.header) else ""
        return f"{k + 1} ({one_line(name, 20)})" if name else f"{k + 1}"


def dialect_of(lines: Sequence[bytes], ending: str, options: ReadOptions, path: str) -> Dialect:
    """Decide how a list of edges is written.

    Raises `MatrixError` if two separators fit, a column is not there, or columns are named without a header.
    """
    quotes = ending != ".abc" if options.quotes is None else options.quotes
    if options.header is None:
        refuse_other_kinds(lines, path)
    separator = _separator(lines, ending, options, quotes, path)
    line, length, first = _first_record(lines, separator, quotes)
    if not first:
        return Dialect(separator, quotes, (0, 1, 2), 3)
    others = _others(lines[line + length - 1 :], separator, quotes)
    named = options.columns is not None and any(isinstance(each, str) for each in options.columns)
    comment, words = (0, None) if options.header else _commented_header(lines[: line - 1], len(first), separator)
    has_header = options.header
    if has_header is None:
        has_header = is_header(first) or (named and words is None)
    if has_header:
        return _with_header(first, others, Dialect(
            separator, quotes, (0, 1, -1), len(first), line=line, header_lines=length,
            raw=b"\n".join(lines[line - 1 : line - 1 + length]),
        ), options, path)  # fmt: skip
    if options.header is None and ending != ".abc" and (doubt := doubt_of(first, others)):  # mcl knows no headers
        raise MatrixError(f"{path}, line {line:,}: {doubt}; pass --header or --no-header")
    names = tuple(each.decode("utf-8", "replace") for each in words or ())
    plain = Dialect(separator, quotes, (0, 1, 2), len(first), header=names, line=line, comment=comment)
    if options.columns is not None:
        if named and not names:
            raise MatrixError(
                f"{path}: columns={options.columns!r} names columns, which needs a header; give their numbers"
            )
        columns = chosen(options.columns, names, len(first), path)
        return replace(plain, columns=columns, chosen=True)
    if words is not None:
        found = columns_of(words) if names_ends(words) else None
        if found is None:
            raise _unclear(path, comment, len(words))
        return replace(plain, columns=found, chosen=True)
    if separator == COMMA:
        _refuse_split_numbers([first, *others], path, line)
    return plain


def _with_header(
    first: Sequence[bytes], others: Sequence[Sequence[bytes]], dialect: Dialect, options: ReadOptions, path: str
) -> Dialect:
    """Return the dialect of a file with a header, whose fields are `first`."""
    counts_lines = lacks_first(first, others)
    fields = [b"", *first] if counts_lines else [*first]
    names = tuple(each.decode("utf-8", "replace") for each in fields)
    dialect = replace(dialect, header=names, fields=len(names))
    counts = {len(each) for each in others}
    by_number = options.columns is not None and not any(isinstance(each, str) for each in options.columns)
    if counts == {len(names) + 1} and not by_number:
        raise MatrixError(
            f"{path}, line {dialect.line:,}: the header has {counted(len(names), 'name')}, and the lines after it have "
            f"{len(names) + 1} fields; choose columns by their numbers, as in --columns 1,2,3"
        )
    if options.columns is not None:
        dialect = replace(dialect, fields=max([len(names), *counts]))
        return replace(dialect, columns=chosen(options.columns, names, dialect.fields, path), chosen=True)
    if len(names) < 2:
        return dialect
    columns = columns_of(fields, counts_lines=counts_lines)
    if columns is None:
        if is_header(first) or not first[0]:
            raise _unclear(path, dialect.line, len(names))
        columns = (0, 1, 2)
    return replace(dialect, columns=columns, chosen=len(names) > 2)


def _unclear(path: str, line: int, count: int) -> MatrixError:
    return MatrixError(
        f"{path}, line {line:,}: it names {count} columns, and not clearly those of vertices and weights; choose them, "
        f"as in --columns 1,2 or --columns 1,2,3"
    )


def _others(lines: Sequence[bytes], separator: int, quotes: bool) -> list[list[bytes]]:
    """Return the fields of the records after the first one, as far as each is on a line of its own."""
    others = []
    for record in _records(lines, quotes):
        try:
            fields = split_fields(record, separator, quotes)
        except ValueError:
            continue
        if fields:
            others.append(fields)
    return others


def _commented_header(lines: Sequence[bytes], count: int, separator: int) -> tuple[int, list[bytes] | None]:
    """Return the line and the words of a comment right before the first record that names its columns, if it does.

    The comment must have a word for each field, and more than three fields: otherwise any comment might match.
    """
    if count <= 3 or not lines or not is_comment(lines[-1]):
        return 0, None
    words = split_fields(lines[-1].lstrip().lstrip(b"#%").lstrip(b" "), separator, False) or []
    if len(words) != count or any(is_weight(each, decimal_comma=True) for each in words):
        return 0, None
    if separator_of(lines[-1], separator) == SPACE and not names_ends(words):
        return 0, None  # any sentence has words
    return len(lines), words


def _refuse_split_numbers(rows: Sequence[Sequence[bytes]], path: str, line: int) -> None:
    """Refuse weights as 1,000 in a file whose fields commas separate: their halves are two fields."""
    if all(len(row) == 4 and _THOUSANDS.fullmatch(row[2]) and _ONES.fullmatch(row[3]) for row in rows):
        number = b",".join(rows[0][2:]).decode()
        raise MatrixError(
            f"{path}, line {line:,}: '{one_line(number, 40)}' may be one number or two fields; write numbers without "
            f"commas, or pass --columns 1,2,3"
        )


# -- what separates ----------------------------------------------------------------------------------------------------


def _separator(lines: Sequence[bytes], ending: str, options: ReadOptions, quotes: bool, path: str) -> int:
    """Return what separates fields: what the caller said, else what the ending and the first lines say."""
    if options.separator is not None:
        return SEPARATORS[options.separator]
    records = _records(lines, quotes)
    if ending == ".csv":
        return _of_commas(records, options, quotes, path)
    if not records or any(b"\t" in each for each in records):
        return TAB_OR_SPACE
    words = [each.split() for each in records]
    fitting = [each for each in (COMMA, SEMICOLON) if _rows(records, each, quotes)]
    if len(fitting) == 1 and all(word.endswith(bytes(fitting)) for each in words for word in each[:-1]):
        if ending in (".txt", ".edges", ".edgelist"):
            return fitting[0]
        name = next(name for name, each in SEPARATORS.items() if each == fitting[0])
        raise MatrixError(
            f"{path}: {name}s end the words of its lines; say what separates: --separator {name}, or --separator space"
        )
    return TAB_OR_SPACE


def _records(lines: Sequence[bytes], quotes: bool) -> list[bytes]:
    """Return the first lines that are whole records."""
    sound = (each for each in lines if each.strip() and not is_comment(each) and not (quotes and each.count(b'"') % 2))
    return list(itertools.islice(sound, SAMPLED))


def _of_commas(records: Sequence[bytes], options: ReadOptions, quotes: bool, path: str) -> int:
    """Return what separates the fields of a .csv."""
    readings = {each: _rows(records, each, quotes) for each in (COMMA, SEMICOLON)}
    fitting = [each for each, rows in readings.items() if rows and _weights_fit(rows, options, each)]
    rest = readings[SEMICOLON]
    if fitting == [COMMA] and rest and all(len(row) == 2 for row in readings[COMMA]) and all(len(r) > 2 for r in rest):
        raise _ambiguous(path)  # a;b;1.000,5
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        others = not any(readings.values()) and records and _rows(records, TAB, quotes)
        return TAB if others else SEMICOLON if readings[SEMICOLON] and not readings[COMMA] else COMMA
    weighted = [each for each in fitting if all(len(row) > 2 for row in readings[each])]
    if len(weighted) == 1:
        return weighted[0]
    for separator, other in ((SEMICOLON, b","), (COMMA, b";")):
        if not any(other in field for row in readings[separator] for field in row[:2]):
            return separator
    raise _ambiguous(path)


def _ambiguous(path: str) -> MatrixError:
    return MatrixError(
        f"{path}: commas and semicolons could both separate the fields of its lines; say which by --separator comma or "
        f"--separator semicolon"
    )


def _rows(records: Sequence[bytes], separator: int, quotes: bool) -> list[list[bytes]]:
    """Return the fields of records if each has two or more; else nothing."""
    rows = []
    for record in records:
        try:
            fields = split_fields(record, separator, quotes)
        except ValueError:
            return []
        if fields is None or len(fields) < 2:
            return []
        rows.append(fields)
    return rows


def _weights_fit(rows: Sequence[Sequence[bytes]], options: ReadOptions, separator: int) -> bool:
    """Whether the third field of each record but a header is a number; always true if columns were chosen."""
    edges = rows[1:] if options.header or is_header(rows[0]) else rows
    if options.columns is not None:
        return True
    return all(len(row) < 3 or len(row) > 3 or is_weight(row[2], decimal_comma=separator == SEMICOLON) for row in edges)


def _first_record(lines: Sequence[bytes], separator: int, quotes: bool) -> tuple[int, int, list[bytes]]:
    """Return the line of the first record, from 1, its number of lines, and its fields; none if it is not sound."""
    begin = next((k for k, each in enumerate(lines) if each.strip() and not is_comment(each)), len(lines))
    for end in range(begin + 1, len(lines) + 1):
        try:
            fields = split_fields(b"\n".join(lines[begin:end]), separator, quotes)
        except ValueError:
            break
        if fields is not None:
            return begin + 1, end - begin, fields
    return 0, 0, []


def is_comment(line: bytes) -> bool:
    """Whether a line is a comment: its first letter says so."""
    return line.lstrip()[:1] in (b"#", b"%")
