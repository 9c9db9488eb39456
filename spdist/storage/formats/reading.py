"""What a caller chooses about reading a file, and what a reader found in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

from spdist.errors import InputError
from spdist.storage.external_sort import Duplicates
from spdist.storage.names.names import AxisNames

Separator = Literal["tab", "comma", "semicolon", "space"]
"""What separates the fields of a line."""

Orient = Literal["cells-by-genes", "genes-by-cells"]
"""What the rows of a matrix of single cells are."""


class ReadKeywords(TypedDict, total=False):
    """The fields of `ReadOptions` as keywords."""

    names: bool
    duplicates: Duplicates
    header: bool | None
    columns: Sequence[int | str] | None
    separator: Separator | None
    quotes: bool | None
    allow_nan: bool
    orient: Orient | None
    dense: bool


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file; each format takes some of these (`Format.takes`)."""

    names: bool = False  # whether vertices of a list of edges have names
    duplicates: Duplicates = "sum"  # how to combine several edges from one vertex to another
    header: bool | None = None  # whether the first line names the columns; by default it does if it has the known words
    # columns of source, target and perhaps weight: numbers from 1, or names in the header
    columns: tuple[int | str, ...] | None = None
    separator: Separator | None = None  # by default what the ending of the file and its lines say
    quotes: bool | None = None  # whether fields may be quoted; by default they may, except in .abc
    allow_nan: bool = False  # whether weights may be NaN
    # rows and columns of a matrix of single cells; by default cells by genes, as in AnnData
    orient: Orient | None = None
    dense: bool = False  # read a dense array, and keep its nonzeros

    def __post_init__(self) -> None:
        for name, choices in (("duplicates", Duplicates), ("separator", Separator), ("orient", Orient)):
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise InputError(f"{name}={value!r}: choose one of {', '.join(get_args(choices))}")
        if self.columns is not None:
            object.__setattr__(self, "columns", _checked_columns(self.columns))

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their defaults."""
        fields = {each.name: each.default for each in dataclasses.fields(self)}
        return {name: value for name, default in fields.items() if (value := getattr(self, name)) != default}


def _checked_columns(columns: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return two or three different columns; raise InputError if they are not."""
    found = tuple(columns) if not isinstance(columns, str) else ()
    sound = all(each >= 1 if isinstance(each, int) else bool(each) for each in found)
    if len(found) not in (2, 3) or len(set(found)) != len(found) or not sound:
        raise InputError(
            f"columns={columns!r}: name the columns of source, target and perhaps weight, as numbers from 1 or by the "
            f"names in the header, for instance 1,2,4"
        )
    return found


@dataclass
class Reading:
    """What a reader found, collected while it reads and said in one line at the end."""

    path: str  # the file, for messages
    format: str  # what it was read as, with its article
    found: list[str] = field(default_factory=list)  # what was decided: header, columns, separator, orientation
    left_out: list[str] = field(default_factory=list)  # what the file holds and the matrix does not

    def line(self, names: AxisNames) -> str:
        """Return what was read as one line, without shape and entries, which the matrix has."""
        axes = [axis for axis, each in zip(("rows", "columns"), names, strict=True) if each is not None]
        parts = [f"read as {self.format}", *self.found, f"names of {' and '.join(axes)}" if axes else "no names"]
        return "; ".join(parts) + (f"; left out: {', '.join(self.left_out)}" if self.left_out else "")
