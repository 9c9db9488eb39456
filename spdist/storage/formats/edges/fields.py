"""The grammar of a line: its fields, and the numbers that they spell. `words` is the same grammar in compiled code."""

from __future__ import annotations

import math
import re

COMMA, SEMICOLON, TAB, SPACE, TAB_OR_SPACE = *b",;\t ", 0
"""Separators of fields. SPACE is a run of white space; TAB_OR_SPACE is TAB in a line that has one, else SPACE."""

LARGEST_VERTEX = (1 << 63) - 2
"""Largest number of a vertex, so that the number of vertices is an int64."""

_QUOTED = re.compile(rb'"((?:[^"]+|"")*+)"')
_BLANKS = {TAB: re.compile(rb"[ \v\f\r\n]*")}
_BLANK = re.compile(rb"[ \t\v\f\r\n]*")
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SPECIAL = re.compile(rb"[+-]?(nan|inf|infinity)", re.IGNORECASE)


def separator_of(record: bytes, separator: int) -> int:
    """Return what separates the fields of one record."""
    if separator != TAB_OR_SPACE:
        return separator
    return TAB if b"\t" in record else SPACE


def split_fields(record: bytes, separator: int, quotes: bool) -> list[bytes] | None:
    r"""Return the fields of a record, without the blanks around them; None if a quote is still open at its end.

    Raises `ValueError` if text follows a closing quote.

    Examples
    --------
    >>> split_fields(b'"Smith, J" , b,0.5', COMMA, True)
    [b'Smith, J', b'b', b'0.5']
    >>> split_fields(b"gene A\tgene B", TAB_OR_SPACE, True)
    [b'gene A', b'gene B']
    """
    separator = separator_of(record, separator)
    if not quotes or b'"' not in record:
        return record.split() if separator == SPACE else [each.strip() for each in record.split(bytes((separator,)))]
    fields: list[bytes] = []
    blanks, at = _BLANKS.get(separator, _BLANK), 0
    while True:
        at = blanks.match(record, at).end()  # type: ignore[union-attr]
        if separator == SPACE and at == len(record):
            return fields
        if record[at : at + 1] == b'"':
            quoted = _QUOTED.match(record, at)
            if quoted is None:
                return None
            fields.append(quoted[1].replace(b'""', b'"'))
            at = blanks.match(record, quoted.end()).end()  # type: ignore[union-attr]
            ended = at == len(record) or (at > quoted.end() if separator == SPACE else record[at] == separator)
            if not ended:
                raise ValueError
        else:
            end = _end_of_field(record, at, separator)
            fields.append(record[at:end].strip())
            at = end
        if separator != SPACE:
            if at == len(record):
                return fields
            at += 1


def _end_of_field(record: bytes, at: int, separator: int) -> int:
    """Return where an unquoted field ends: at its separator, or at the end of the record."""
    if separator == SPACE:
        return at + len(record[at:].split(None, 1)[0])
    end = record.find(separator, at)
    return len(record) if end < 0 else end


def weight_of(field: bytes, *, decimal_comma: bool, allow_nan: bool) -> float:
    """Return the number that a field spells.

    Raises `ValueError`; says what is wrong with it, for a message.

    Examples
    --------
    >>> weight_of(b"1,5", decimal_comma=True, allow_nan=False)
    1.5
    """
    if decimal_comma and b"." not in field:
        field = field.replace(b",", b".", 1)
    if _SPECIAL.fullmatch(field):
        value = float(field)
        if value != value and not allow_nan:
            raise ValueError("is NaN; pass --allow-nan to keep such weights, or correct it")
        return value
    if not field:
        raise ValueError("is empty; write a number")
    if not _NUMBER.fullmatch(field):
        raise ValueError("is no number")
    value = float(field)
    if math.isinf(value):
        raise ValueError("is too large for float64")
    return value


def vertex_of(field: bytes) -> int:
    """Return the vertex that a field spells; raise ValueError if it is no number from 0 on that int64 holds."""
    if not field.isdigit() or (vertex := int(field[:40])) > LARGEST_VERTEX:
        raise ValueError("is no number from 0 on; if vertices have names, pass --names or --labels FILE")
    return vertex
