"""How files of other kinds begin: they are refused by name where a list of edges is expected."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spdist.errors import MatrixError

_BEGINS = (
    (rb"%%\s*matrixmarket\s", "a Matrix Market file", "pass --format mtx"),
    (rb"\(mclheader", "a matrix in mcl's native format", "pass --format mci"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "get the file itself: git lfs pull"),
    (rb"PK\x03\x04", "a ZIP archive or an Excel workbook", "unpack it, or save it as CSV"),
    (rb"\xd0\xcf\x11\xe0", "an old Excel workbook", "save it as CSV"),
    (rb"<(!doctype|html|head|\?xml|graphml|gexf)\b", "HTML or XML", "write its edges as lines, or get the file again"),
    (rb"[{\[]\s*(\"|[{\[]|$)", "JSON", "write its edges as lines"),
    (rb"\*(vertices|network|arcs|edges)\b", "a file of Pajek", "write its edges as lines"),
    (rb"p\s+(sp|edge|col|max|min|tw)\s+\d+\s+\d+\s*$", "a file of DIMACS", "write its edges as lines"),
    (rb"graph\s*\[|creator\s+\"", "GML", "write its edges as lines"),
    (rb"(strict\s+)?(di)?graph\b[^\t,;]*\{", "DOT of Graphviz", "write its edges as lines"),
    (rb"nodedef>", "GDF", "write its edges as lines"),
)
_KINDS = [(re.compile(begin, re.IGNORECASE), kind, remedy) for begin, kind, remedy in _BEGINS]
_REMARK = re.compile(rb"c(\s|$)")
"""Begin of a comment of DIMACS."""


def refuse_other_kinds(lines: Sequence[bytes], path: str) -> None:
    """Refuse text whose first line says that it is no list of edges."""
    for number, line in enumerate(lines, 1):
        begin = line.strip()[:200]
        found = next((each for each in _KINDS if each[0].match(begin)), None)
        if found is not None:
            raise MatrixError(f"{path}, line {number:,}: this is {found[1]}, and no list of edges; {found[2]}")
        if begin and begin[:1] not in (b"#", b"%") and not _REMARK.match(begin):
            return
