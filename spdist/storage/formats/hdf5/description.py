"""What the child process says of a file: the matrix that was asked for, or why there is none."""

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
    """What the parent asks for.

    Attributes
    ----------
    inner : str
        Path of the matrix in the file; empty for the matrix that the format has in its usual place.
    orient : str
        "cells-by-genes", "genes-by-cells" or empty.
    dense : bool
        Whether a dense array may be read.
    frames : dict
        Data frames that name the rows and columns of a matrix, by its folder in an AnnData.
    """

    inner: str
    orient: str
    dense: bool
    frames: dict[str, list[str]]


@dataclass(frozen=True)
class Array:
    """An array in a file, read slice by slice.

    Attributes
    ----------
    shape : tuple of int
    dtype : dtype
    read : callable
        Returns the elements in one slice for each dimension.
    chunk : tuple of int
        Elements in each dimension that are stored together.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[tuple[slice, ...]], npt.NDArray[Any]]
    chunk: tuple[int, ...] = (1,)


@dataclass
class Description:
    """A matrix in a file.

    Attributes
    ----------
    format : str
        Kind of the file, with its article.
    inner : str
        Path of the matrix in the file.
    kind : Kind
    shape : list
        As the file states it, unchecked.
    arrays : dict
        indptr, indices, data; rows, columns, data; or values.
    names : dict
        Arrays of strings that name "rows" and "columns", perhaps None.
    by_columns : bool
        Whether a column, not a row, of a dense array lies in one piece.
    sparse : str
        Paths of sparse matrices in the file; of a dense array that was not asked for.
    found, left_out : list of str
        As in `spdist.storage.formats.reading.Reading`.
    """

    format: str
    inner: str
    kind: Kind
    shape: list[Any]
    arrays: dict[str, Array]
    names: dict[str, Array | None] = field(default_factory=dict)
    by_columns: bool = False
    sparse: str = ""
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
