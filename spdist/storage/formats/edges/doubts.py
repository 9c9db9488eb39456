"""What is doubtful in a list of edges: counted by both readers, named in the line that says what was read."""

from __future__ import annotations

import numpy as np

from spdist.errors import MatrixError
from spdist.foundation.units import counted
from spdist.matrices.dtypes import Int64Array
from spdist.storage.formats.edges.dialect import IN_WORDS, Dialect
from spdist.storage.formats.edges.fields import SPACE, TAB, TAB_OR_SPACE

COMMENT, LATE_COMMENT, TABBED, SPACED, SPACED_NAME, UNWEIGHTED, WEIGHTED, PADDED, COMMA_MARK, POINT_MARK = range(10)
"""Kinds of lines: comments, those after the first edge, lines whose fields tabs or spaces separate, lines with tabs and
a space in a name, edges without and with a weight, blanks around a name, weights with a decimal comma or point."""

KINDS = 10


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

    Raises
    ------
    MatrixError
        If lines contradict each other: what separates their fields, or what the decimal mark is.
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
    found = [_separator(dialect, counts, lines), *dialect.in_words()]
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
