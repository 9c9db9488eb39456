"""Whether the first record of a list of edges names the columns, may do so, or is an edge; which columns are read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spdist.errors import MatrixError, one_line
from spdist.storage.formats.edges.fields import weight_of

Columns = tuple[int, int, int]
"""Columns of source, target and weight, from 0; the last is -1 if there are no weights."""

Fields = Sequence[bytes]

_NODE = r"(node|vertex|gene|protein|id|user|interactor|entity|item|label|name)s?"
_SOURCE = re.compile(rf"(source|src|from)({_NODE})?(id)?|row(index)?")
_TARGET = re.compile(rf"(target|tgt|dst|dest|destination|to)({_NODE})?(id)?|col(umn)?(index)?")
_FIRST_AND_SECOND = re.compile(rf"({_NODE}(id)?)[1a] \1[2b]")
_WEIGHT = re.compile(
    r"(edge|combined|total)?(weight|score|value|val|similarity|distance|dist|count|strength|correlation|corr|cost|"
    r"capacity|confidence|evalue|pvalue|probability|prob|length|wt|rating|amount|freq|frequency|importance)s?"
)
_NO_WEIGHT = re.compile(
    rf"(edge)?({_NODE}|type|kind|interaction|relation|relationship|category|directed|direction|timeset|time|timestamp|"
    r"unixts|date|year|key|index|sharedname|sharedinteraction|selected|suid)"
)
"""What a further column may be called that is no weight."""
_NUMBERED = re.compile(r"([a-z]+)[1a] \1[2b]")
_ENDS = re.compile(
    r"head tail|tail head|start(id)? end(id)?|begin end|origin destination|parent child|child parent|"
    r"citing cited|sender receiver|sender recipient|caller callee|follower followe[er]|follower following|user item|"
    r"subject object|query subject|query target|tf (gene|target)s?|regulator (gene|target)s?|ligand receptor|"
    r"predecessor successor|buyer seller|"
    r"author coauthor|quelle ziel|von nach|origine cible|origine destination|origen destino"
)
"""First two words of headers that might also be names of vertices."""
_COMMENT = re.compile(rb"//|--$|;$")
"""Begin of a first field that other programs take for a comment."""


def is_header(fields: Fields) -> bool:
    """Whether the fields of a first record are known words for columns, and not an edge.

    Examples
    --------
    >>> is_header([b"source", b"target"]), is_header([b"a", b"b", b"weight"]), is_header([b"a", b"b", b"NA"])
    (True, True, False)
    """
    if len(fields) < 2 or (len(fields) > 2 and is_weight(fields[2], decimal_comma=True)):
        return False
    if _matching(fields, _SOURCE) and _matching(fields, _TARGET):
        return True
    weights = _matching(fields, _WEIGHT)
    return 2 in weights or (max(weights, default=0) > 2 and _are_first_and_second(fields))


def doubt_of(fields: Fields, others: Sequence[Fields]) -> str:
    """Return what makes a first record doubtful that has no known words of a header; empty for an edge."""
    counts = {len(each) for each in others}
    if len(fields) > 1 and len(others) > 1 and len(counts) == 1 and len(fields) not in counts:
        return f"it has {len(fields)} fields, and the lines after it have {min(counts)}"
    whole = [fields, *others]
    if len(whole) > 2 and all(len(each) == len(whole) and all(v in (b"0", b"1") for v in each) for each in whole):
        return "it may be the first row of an adjacency matrix"
    ends = [each[:2] for each in others]
    if len(fields) < 2 or any(len(each) < 2 for each in ends):
        return ""
    if [*fields] == [b"%d" % k for k in range(len(fields))] and ends and not any(v.isdigit() for e in ends for v in e):
        return f"{_shown(fields)} may number the columns"
    if len(fields) > 2 and is_weight(fields[2], decimal_comma=True):
        return ""
    doubtful = f"{_shown(fields)} may name columns or vertices"
    if _COMMENT.match(fields[0]):
        return f"{_shown(fields)} may be a comment, of which only # and % are known"
    if ends and all(v.isdigit() for e in ends for v in e) and not any(v.isdigit() for v in fields[:2]):
        return doubtful
    return doubtful if _may_name_columns(fields) and not _come_again(fields, ends) else ""


def columns_of(header: Fields, *, counts_lines: bool = False) -> Columns | None:
    """Return the columns that a header says; None if it is not clear. The first one may only count the lines.

    Examples
    --------
    >>> columns_of([b"Id", b"Source", b"Target", b"Weight"]), columns_of([b"", b"from", b"to"])
    ((1, 2, 3), (1, 2, -1))
    """
    sources, targets = _matching(header, _SOURCE), _matching(header, _TARGET)
    source, target = int(counts_lines), int(counts_lines) + 1
    if len(sources) == len(targets) == 1 and sources != targets:
        source, target = sources[0], targets[0]
    elif not header[source]:
        return None
    rest = [k for k in range(len(header)) if k not in (source, target)]
    weights = [k for k in _matching(header, _WEIGHT) if k in rest]
    exact = [k for k in weights if _word(header[k]) == "weight"]
    for found in (exact, weights):
        if len(found) == 1:
            return source, target, found[0]
    if weights:
        return (source, target, target + 1) if target + 1 in weights else None
    unknown = [k for k in rest if header[k] and not _NO_WEIGHT.fullmatch(_word(header[k]))]
    if len(unknown) > 1:
        return None
    return source, target, unknown[0] if unknown else -1


def names_ends(header: Fields) -> bool:
    """Whether a header says which columns are the vertices."""
    sources, targets = _matching(header, _SOURCE), _matching(header, _TARGET)
    return (len(sources) == len(targets) == 1 and sources != targets) or _are_first_and_second(header)


def lacks_first(header: Fields, others: Sequence[Fields]) -> bool:
    """Whether a header has no name for the first column, which counts the lines, as R writes tables."""
    first = [each[0] for each in others if each]
    return (
        bool(others)
        and all(len(each) == len(header) + 1 for each in others)
        and first == [b"%d" % k for k in range(1, len(first) + 1)]
    )


def chosen(columns: Sequence[int | str], names: Sequence[str], count: int, path: str) -> Columns:
    """Return the columns that the caller chose, from 0; `count` is how many there are."""
    found = []
    for each in columns:
        if isinstance(each, str) and names.count(each) != 1:
            raise MatrixError(
                f"{path}: {'no column' if each not in names else 'several columns'} {one_line(repr(each), 40)} in its "
                f"header ({one_line(', '.join(names), 100)}); correct --columns, or give numbers"
            )
        found.append(names.index(each) if isinstance(each, str) else each - 1)
        if found[-1] >= count:
            raise MatrixError(f"{path}: its first record has {count} fields, and column {each} was chosen")
    return found[0], found[1], found[2] if len(found) > 2 else -1


def is_weight(field: bytes, *, decimal_comma: bool) -> bool:
    """Whether a field is a number."""
    try:
        weight_of(field, decimal_comma=decimal_comma, allow_nan=True)
    except ValueError:
        return False
    return True


def _may_name_columns(fields: Fields) -> bool:
    """Whether the first two words are ones that headers have, known or not."""
    pair = f"{_word(fields[0])} {_word(fields[1])}"
    known = any(words.fullmatch(_word(each)) for words in (_SOURCE, _TARGET) for each in fields[:2])
    return known or bool(_NUMBERED.fullmatch(pair) or _ENDS.fullmatch(pair))


def _come_again(fields: Fields, ends: Sequence[Fields]) -> bool:
    """Whether later lines have the first two names, or, if these are numbered, others that are."""
    first, second = fields[:2]
    same = first[:-1] if first[:-1] == second[:-1] else None
    return any(
        each in (first, second) or (same is not None and each.startswith(same) and each[len(same) :].isdigit())
        for row in ends
        for each in row
    )


def _are_first_and_second(fields: Fields) -> bool:
    return len(fields) > 1 and bool(_FIRST_AND_SECOND.fullmatch(f"{_word(fields[0])} {_word(fields[1])}"))


def _matching(fields: Fields, words: re.Pattern[str]) -> list[int]:
    return [k for k, each in enumerate(fields) if words.fullmatch(_word(each))]


def _word(field: bytes) -> str:
    """Return a word for comparison: small letters, without what stands between the words of a header."""
    return re.sub(r"[\s_.:()/-]", "", field.decode("utf-8", "replace").lower())


def _shown(fields: Fields) -> str:
    return f"'{one_line(b' '.join(fields[:2]).decode('utf-8', 'replace'), 40)}'"
