"""What is doubtful in a list of edges: counted by both readers, named in the line that says what was read."""

from __future__ import annotations

import re

import numpy as np

from spdist.errors import MatrixError, one_line
from spdist.foundation.units import counted
from spdist.matrices.dtypes import Int64Array
from spdist.storage.formats.edges.dialect import IN_WORDS, Dialect
from spdist.storage.formats.edges.fields import SPACE, TAB, TAB_OR_SPACE

COMMENT, LATE_COMMENT, TABBED, SPACED, SPACED_NAME, UNWEIGHTED, WEIGHTED, PADDED, COMMA_MARK, POINT_MARK = range(10)
"""Kinds of lines: comments, those after the first edge, lines whose fields tabs or spaces separate, lines with tabs and
a space in a name, edges without and with a weight, blanks around a name, weights with a decimal comma or point."""

KINDS = 10

_NOT_ASCII = re.compile(rb"[^\n]*[\x80-\xff][^\n]*")
_ODD = rb"(\xc2\xa0|\xe2\x80[\x80-\x8b\xaf]|\xe3\x80\x80)"
_ODD_BLANKS = re.compile(rb"^" + _ODD + rb"[^\n]*|^[^\n]*" + _ODD + rb"$", re.MULTILINE)
"""Names that begin or end with a blank outside ASCII: no-break, of some width, of no width, ideographic."""


def no_doubts() -> Int64Array:
    """Return the table of no lines: (KINDS, 2) int64, the number of lines of a kind and the first of them, from 1."""
    return np.zeros((KINDS, 2), np.int64)


def note(table: Int64Array, kind: int, line: int) -> None:
    """Count one line of a kind."""
    table[kind, 0] += 1
    if table[kind, 1] == 0:
        table[kind, 1] = line


def add(table: Int64Array, more: Int64Array, lines: int) -> None:
    """Add the lines of a later piece of text, before which there are `lines` lines."""
    new = (table[:, 1] == 0) & (more[:, 1] > 0)
    table[new, 1] = more[new, 1] + lines
    table[:, 0] += more[:, 0]


def in_words(table: Int64Array, dialect: Dialect, *, names: bool, path: str) -> tuple[list[str], list[str]]:
    """Return what was found and what was left out, in words.

    Raises `MatrixError` if lines contradict each other: what separates their fields, or what the decimal mark is.
    """
    counts, lines = table[:, 0].tolist(), table[:, 1].tolist()
    if names and counts[SPACED] and counts[SPACED_NAME]:
        raise MatrixError(
            f"{path}, line {lines[SPACED]:,}: it has no tab, but in line {lines[SPACED_NAME]:,} tabs separate and "
            f"names have spaces; write all lines with tabs"
        )
    if counts[COMMA_MARK] and counts[POINT_MARK]:
        raise MatrixError(
            f"{path}, line {lines[POINT_MARK]:,}: a decimal point, and in line {lines[COMMA_MARK]:,} a decimal comma; "
            f"write all weights alike"
        )
    if not counts[WEIGHTED] and not counts[UNWEIGHTED]:
        if counts[COMMENT]:
            raise MatrixError(
                f"{path}, line {lines[COMMENT]:,}: a comment, and no line is an edge; if names begin with # or %, put "
                f"them in quotes"
            )
        return ["no edges", *([f"line {dialect.line:,} is the header"] if dialect.header_lines else [])], []
    found = [_separator(dialect, counts, lines), *dialect.in_words(weighted=counts[WEIGHTED] > 0)]
    if counts[UNWEIGHTED] and counts[WEIGHTED]:
        found.append(f"{_lines(counts[UNWEIGHTED], lines[UNWEIGHTED])} without a weight, taken as 1")
    left_out: list[str] = dialect.left_out()
    if counts[COMMENT]:
        left_out.append(counted(counts[COMMENT], "comment"))
    if counts[LATE_COMMENT]:
        left_out[-1] += f" (after the first edge in {_lines(counts[LATE_COMMENT], lines[LATE_COMMENT])})"
    if counts[PADDED]:
        left_out.append(f"spaces around names in {_lines(counts[PADDED], lines[PADDED])}")
    return found, left_out


def of_names(listed: bytes) -> list[str]:
    """Return what is odd about newline-terminated names: invalid UTF-8, or blanks that are no spaces."""
    if listed.isascii():
        return []
    wrong = [each[0] for each in _NOT_ASCII.finditer(listed) if not _is_utf8(each[0])]
    blank = [each[0] for each in _ODD_BLANKS.finditer(listed)]
    found = []
    for names, what in ((wrong, "not UTF-8"), (blank, "with a no-break space or the like around")):
        if names:
            first = one_line(repr(names[0]) if what == "not UTF-8" else ascii(names[0].decode("utf-8", "replace")), 40)
            found.append(f"{counted(len(names), 'name')} {what}, kept as written (first: {first})")
    return found


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _separator(dialect: Dialect, counts: list[int], lines: list[int]) -> str:
    """Return what separates fields."""
    if dialect.separator != TAB_OR_SPACE:
        return IN_WORDS[dialect.separator]
    if not counts[TABBED] or not counts[SPACED]:
        return IN_WORDS[TAB if counts[TABBED] else SPACE]
    rare, other = (SPACED, "spaces") if counts[SPACED] <= counts[TABBED] else (TABBED, "tabs")
    return f"{IN_WORDS[TAB if rare == SPACED else SPACE]}, {other} in {_lines(counts[rare], lines[rare])}"


def _lines(count: int, first: int) -> str:
    return f"line {first:,}" if count == 1 else f"{count:,} lines (first: line {first:,})"
