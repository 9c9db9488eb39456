"""Description of a file by the child process: the requested matrix, or why it cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["rows", "columns", "coordinates", "dense"]
"""How a matrix is stored: compressed by rows or columns, as coordinates, or with its zeros."""

TENX = "a 10x Genomics file"
"""What messages call a file of 10x Genomics, the only one whose matrix `orient` turns."""

MAX_LISTED = 20
"""Names in a list of what a file holds."""


class RefusedError(Exception):
    """Why a file is not read, as the message says it after the file's name."""


@dataclass(frozen=True)
class Settings:
    """What the parent asks for."""

    inner: str  # path of the matrix in the file; empty for the matrix that the format has in its usual place
    orient: str  # "cells-by-genes", "genes-by-cells" or empty
    dense: bool  # whether a dense array may be read
    frames: dict[str, list[str]]  # data frames that name the rows and columns of a matrix, by its folder in an AnnData


@dataclass(frozen=True)
class Array:
    """An array in a file, read slice by slice."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[tuple[slice, ...]], npt.NDArray[Any]]  # returns the elements in one slice for each dimension
    chunk: tuple[int, ...] = (1,)  # elements in each dimension that are stored together


@dataclass
class Description:
    """A matrix in a file."""

    format: str  # kind of the file, with its article
    inner: str  # path of the matrix in the file
    kind: Kind
    shape: list[Any]  # as the file states it, unchecked
    arrays: dict[str, Array]  # indptr, indices, data; rows, columns, data; or values
    # arrays of strings that name "rows" and "columns", perhaps None
    names: dict[str, Array | None] = field(default_factory=dict)
    by_columns: bool = False  # whether a column, not a row, of a dense array lies in one piece
    sparse: str = ""  # paths of sparse matrices in the file; of a dense array that was not asked for
    # as in `spdist.storage.formats.reading.Reading`
    found: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the description as JSON takes it."""
        arrays = {name: [list(each.shape), each.dtype.str, list(each.chunk)] for name, each in self.arrays.items()}
        lengths = {axis: None if each is None else each.shape[0] for axis, each in self.names.items()}
        kept = {name: getattr(self, name) for name in ("format", "inner", "kind", "by_columns", "sparse", "found")}
        left_out = [listed(self.left_out)] if self.left_out else []
        return kept | {"shape": self.shape[:9], "arrays": arrays, "names": lengths, "left_out": left_out}


def listed(names: Iterable[str]) -> str:
    """Return names as a list in a sentence, cut if it is long."""
    found = list(names)
    more = f", and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return ", ".join(found[:MAX_LISTED]) + more or "none"
