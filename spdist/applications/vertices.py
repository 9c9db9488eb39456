"""Vertices of a graph that users name, as rows of its matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spdist.errors import InputError
from spdist.foundation.units import counted
from spdist.storage.matrix import StoredMatrix


def rows_of_vertices(sources: Sequence[int | str], matrix: Any) -> list[int]:
    """Return the rows of vertices given by number or by name.

    Raises `InputError` if one is not a vertex.
    """
    n = matrix.shape[0]
    if isinstance(sources, str) or not len(sources) or not all(isinstance(x, int | np.integer | str) for x in sources):
        raise InputError(
            f"sources={sources!r} is not a list of vertices: name some, counted from 0, for instance [0, 17]"
        )
    named = matrix.row_names if isinstance(matrix, StoredMatrix) else None
    wanted = {one for one in sources if isinstance(one, str)}
    rows: dict[str, list[int]] = {one: [] for one in wanted}
    for row, name in enumerate(named if named is not None and wanted else ()):
        if name in wanted:
            rows[name].append(row)
    has_numbers = named is None or not any(name.isdigit() for name in named)
    found = [_row_of(one, rows, has_numbers, n) for one in sources]
    if wrong := [one for one in found if not 0 <= one < n]:
        raise InputError(f"sources: vertex {wrong[0]} of a graph of {counted(n, 'vertex')}; they are counted from 0")
    return found


def _row_of(source: int | str, rows: dict[str, list[int]], has_numbers: bool, n: int) -> int:
    """Return the row of a vertex: a text is its name or, if no vertex has a number as its name, its number."""
    if not isinstance(source, str):
        return int(source)
    if has_numbers and source.isdecimal() and source.isascii():
        return int(source)
    if len(rows[source]) != 1:
        times = f"is the name of {len(rows[source]):,} vertices" if rows[source] else "is the name of no vertex"
        raise InputError(f"sources: {source!r} {times} of {n:,}; name others")
    return rows[source][0]
