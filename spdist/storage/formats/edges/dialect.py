"""How a list of edges is written, decided once from its first lines: separator, header, columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spdist.errors import MatrixError, one_line
from spdist.storage.formats.edges.fields import (
    COMMA,
    SEMICOLON,
    SPACE,
    TAB,
    TAB_OR_SPACE,
    split_fields,
    weight_of,
)
from spdist.storage.formats.reading import ReadOptions

SAMPLED = 1000
"""Records that decide what separates the fields of a .csv."""

ANY = 1 << 30
"""Most fields of a record that may have any number of further columns."""

SEPARATORS = {"comma": COMMA, "semicolon": SEMICOLON, "tab": TAB, "space": SPACE}
IN_WORDS = {
    COMMA: "commas separate", SEMICOLON: "semicolons separate, and commas are decimal", TAB: "tabs separate",
    SPACE: "spaces separate",
}  # fmt: skip

_NODE = r"(node|vertex|gene|protein|id|user|interactor|entity|item|label|name)s?"
_SOURCE = re.compile(rf"(source|src|from)({_NODE})?(id)?|row(index)?")
_TARGET = re.compile(rf"(target|tgt|dst|dest|destination|to)({_NODE})?(id)?|col(umn)?(index)?")
_FIRST_AND_SECOND = re.compile(rf"({_NODE}(id)?)[1a] \1[2b]")
_WEIGHT = re.compile(
    r"(edge|combined)?(weight|score|value|val|similarity|distance|dist|count|counts|freq|frequency|strength|correlation|"
    r"corr|cost|capacity|confidence|evalue|pvalue|probability|prob|length|time|timestamp|date|wt)s?"
)  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """How the records of a list of edges are written.

    Attributes
    ----------
    separator : int
        One of `fields.COMMA`, `SEMICOLON`, `TAB`, `SPACE` and `TAB_OR_SPACE`.
    quotes : bool
        Whether fields may be quoted.
    columns : (int, int, int)
        Fields of source, target and weight, from 0; the last is -1 if there are no weights.
    fields : int
        Fields of the header or the first edge.
    chosen : bool
        Whether the caller or the header chose the columns: none may be missing then.
    header : tuple of str
        Names of the columns; empty if there is no header.
    line, header_lines : int
        Line of the first record, from 1, and the number of lines of the header.
    """

    separator: int
    quotes: bool
    columns: tuple[int, int, int]
    fields: int
    chosen: bool = False
    header: tuple[str, ...] = ()
    line: int = 0
    header_lines: int = 0

    @property
    def decimal_comma(self) -> bool:
        """Whether commas are decimal marks: in files whose fields semicolons separate, as of spreadsheets."""
        return self.separator == SEMICOLON

    def bounds(self, separator: int) -> tuple[int, int]:
        """Return the fewest and the most fields of a record whose fields `separator` separates.

        Names may have spaces, so the number of fields between spaces must never change with chosen columns.
        """
        if self.chosen:
            return (self.fields, self.fields) if separator == SPACE else (max(self.columns) + 1, ANY)
        if self.fields > 3:
            return self.fields, self.fields
        return (2, max(self.fields, 2)) if self.header else (2, 3)

    def in_words(self) -> list[str]:
        """Return what was decided about header and columns, for the line that says what was read."""
        source, target, weight = (self._column(each) for each in self.columns)
        weights = f"weights from column {weight}" if self.columns[2] >= 0 else "no weights"
        header = f"line {self.line:,} is the header" if self.header else "no header"
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

    Parameters
    ----------
    lines : sequence of bytes
        The first lines of the file.
    ending : str
        Of the file, as in ".csv".
    options : ReadOptions
    path : str
        For messages.

    Raises
    ------
    MatrixError
        If two separators fit, a column is not there, or columns are named without a header.
    """
    quotes = ending != ".abc" if options.quotes is None else options.quotes
    separator = _separator(lines, ending, options, quotes, path)
    line, length, first = _first_record(lines, separator, quotes)
    if not first:
        return Dialect(separator, quotes, (0, 1, 2), 3)
    names = tuple(each.decode("utf-8", "replace") for each in first)
    named = options.columns is not None and any(isinstance(each, str) for each in options.columns)
    has_header = is_header(first) or named if options.header is None else options.header
    if named and not has_header:
        raise MatrixError(
            f"{path}: columns={options.columns!r} names columns, which needs a header; give their numbers"
        )
    if options.header is None and not has_header and _is_doubtful(first, lines[line + length - 1 :]):
        raise MatrixError(
            f"{path}, line {line:,}: '{one_line(' '.join(names[:2]), 40)}' may name columns or vertices; pass "
            f"--header or --no-header"
        )
    header = names if has_header else ()
    columns = _chosen(options.columns, names, path) if options.columns is not None else None
    if columns is None and header:
        columns = _by_header(first)
    chosen = columns is not None
    if columns is None:
        columns = (0, 1, 2 if len(first) > 2 or not header else -1)
    return Dialect(separator, quotes, columns, len(first), chosen, header, line, length if header else 0)


def is_header(fields: Sequence[bytes]) -> bool:
    """Whether the fields of a first record are known words for columns, and not an edge.

    Examples
    --------
    >>> is_header([b"source", b"target"]), is_header([b"a", b"b", b"weight"]), is_header([b"a", b"b", b"NA"])
    (True, True, False)
    """
    if len(fields) < 2 or (len(fields) > 2 and _is_weight(fields[2], decimal_comma=True)):
        return False
    sides = _matching(fields, _SOURCE), _matching(fields, _TARGET)
    return all(sides) or (len(fields) > 2 and bool(_WEIGHT.fullmatch(_word(fields[2]))))


def _is_doubtful(fields: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Whether a first record as ``gene1 gene2`` may be a header: no other line has words that begin like these."""
    pair = _FIRST_AND_SECOND.fullmatch(f"{_word(fields[0])} {_word(fields[1])}") if len(fields) > 1 else None
    if pair is None or (len(fields) > 2 and _is_weight(fields[2], decimal_comma=True)):
        return False
    return not any(fields[0][:-1] in line for line in others)


def _by_header(fields: Sequence[bytes]) -> tuple[int, int, int] | None:
    """Return the columns that a header names, if they are not the first ones; None if it does not say."""
    sources, targets, weights = (_matching(fields, each) for each in (_SOURCE, _TARGET, _WEIGHT))
    if len(sources) != 1 or len(targets) != 1 or sources == targets:
        return None
    exact = [k for k in weights if _word(fields[k]) == "weight"] or weights
    if len(exact) != 1:
        return None
    return sources[0], targets[0], exact[0]


def _chosen(columns: Sequence[int | str], names: Sequence[str], path: str) -> tuple[int, int, int]:
    """Return the columns that the caller chose, from 0."""
    found = []
    for each in columns:
        if isinstance(each, str) and names.count(each) != 1:
            raise MatrixError(
                f"{path}: {'no column' if each not in names else 'several columns'} {one_line(repr(each), 40)} in its "
                f"header ({one_line(', '.join(names), 100)}); correct --columns, or give numbers"
            )
        found.append(names.index(each) if isinstance(each, str) else each - 1)
        if found[-1] >= len(names):
            raise MatrixError(f"{path}: its first record has {len(names)} fields, and column {each} was chosen")
    return found[0], found[1], found[2] if len(found) > 2 else -1


def _matching(fields: Sequence[bytes], words: re.Pattern[str]) -> list[int]:
    return [k for k, each in enumerate(fields) if words.fullmatch(_word(each))]


def _word(field: bytes) -> str:
    return re.sub(r"[\W_]", "", field.decode("utf-8", "replace").lower())


def _is_weight(field: bytes, *, decimal_comma: bool) -> bool:
    try:
        weight_of(field, decimal_comma=decimal_comma, allow_nan=True)
    except ValueError:
        return False
    return True


# -- what separates ----------------------------------------------------------------------------------------------------


def _separator(lines: Sequence[bytes], ending: str, options: ReadOptions, quotes: bool, path: str) -> int:
    """Return what separates fields: what the caller said, else what the ending and the first lines say."""
    if options.separator is not None:
        return SEPARATORS[options.separator]
    sound = (each for each in lines if each.strip() and not is_comment(each) and not (quotes and each.count(b'"') % 2))
    records = list(itertools.islice(sound, SAMPLED))
    if ending == ".csv":
        return _of_commas(records, options, quotes, path)
    if not records or any(b"\t" in each for each in records):
        return TAB_OR_SPACE
    words = [each.split() for each in records]
    fitting = [each for each in (COMMA, SEMICOLON) if _rows(records, each, quotes)]
    if len(fitting) == 1 and all(word.endswith(bytes(fitting)) for each in words for word in each[:-1]):
        if ending in (".txt", ".edges"):
            return fitting[0]
        name = next(name for name, each in SEPARATORS.items() if each == fitting[0])
        raise MatrixError(
            f"{path}: {name}s end the words of its lines; say what separates: --separator {name}, or --separator space"
        )
    return TAB_OR_SPACE


def _of_commas(records: Sequence[bytes], options: ReadOptions, quotes: bool, path: str) -> int:
    """Return what separates the fields of a .csv."""
    readings = {each: _rows(records, each, quotes) for each in (COMMA, SEMICOLON)}
    fitting = [each for each, rows in readings.items() if rows and _weights_fit(rows, options, each)]
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
    raise MatrixError(
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
    """Whether the third fields are numbers, but that of a header; chosen columns may be anything."""
    edges = rows[1:] if options.header or is_header(rows[0]) else rows
    if options.columns is not None:
        return True
    return all(
        len(row) < 3 or len(row) > 3 or _is_weight(row[2], decimal_comma=separator == SEMICOLON) for row in edges
    )


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
