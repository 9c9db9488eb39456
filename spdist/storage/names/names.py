"""Names of the rows and columns of a matrix: UTF-8 text, in which a line break follows each name.

In memory they are read piece by piece. A matrix of spdist's keeps this text in its group, in the arrays of bytes
`spdist-rows` and `spdist-columns`, which have checksums and are under the seal as its other arrays. Programs that read
the matrix ignore them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError, SpdistError, one_line
from spdist.foundation.units import counted

logger = logging.getLogger("spdist")

ARRAYS = ("spdist-rows", "spdist-columns")
"""Names of the arrays in the group of a matrix."""

PIECE_BYTES = 1 << 20
"""Bytes of text in a Zarr chunk of these arrays."""

NameArray = npt.NDArray[np.object_]
"""Names as an array of str."""


@dataclass(frozen=True, eq=False)
class Names:
    """Names of rows or of columns, unread."""

    label: str  # what messages call them
    count: int  # rows or columns that the matrix has
    pieces: Callable[[], Iterator[bytes]]  # returns an iterator over their text, in pieces that may end within a name
    # whether another program wrote them, so that a result does without them if they cannot be read
    foreign: bool = False

    def text(self) -> Iterator[bytes]:
        """Yield the text in pieces.

        Raises `MatrixError` at the end, if there are more or fewer names than rows or columns.
        """
        found = 0
        for piece in self.pieces():
            found += piece.count(b"\n")
            yield piece
        if found != self.count:
            raise wrong_number(self.label, found, self.count)

    def to_array(self) -> NameArray:
        """Return the names as an array of str; bytes that are not UTF-8 become surrogates, as in paths of Python."""
        found = b"".join(self.text()).decode("utf-8", "surrogateescape").split("\n")[:-1]
        names = np.empty(len(found), object)
        names[:] = found
        return names


class AxisNames(NamedTuple):
    """Names of rows and of columns, each None without names."""

    rows: Names | None = None
    columns: Names | None = None

    @property
    def T(self) -> AxisNames:  # noqa: N802 (as of the matrix)
        """Names of the transpose."""
        return AxisNames(self.columns, self.rows)

    def filled(self, other: AxisNames) -> AxisNames:
        """Return these names; take an axis without names from `other`."""
        return AxisNames(self.rows or other.rows, self.columns or other.columns)

    def check(self) -> None:
        """Read all names once.

        Raises `MatrixError` if there are more or fewer names than rows or columns, or they cannot be read.
        """
        for names in self:
            for _ in names.text() if names is not None else ():
                pass

    def readable(self) -> AxisNames:
        """Return these names without foreign names that cannot be read; log a warning for each axis left out."""
        axes = zip(("rows", "columns"), self, strict=True)
        return AxisNames(*(names if names is None or _is_readable(names, axis) else None for axis, names in axes))


def _is_readable(names: Names, axis: str) -> bool:
    """Whether names can be read; names of spdist's own are not looked at, since damage to them is an error."""
    try:
        for _ in names.text() if names.foreign else ():
            pass
    except SpdistError as error:
        logger.warning("%s (the result has no names of %s)", error, axis)
        return False
    return True


NO_NAMES = AxisNames()
"""Names of a matrix whose rows and columns have none."""


def wrong_number(label: str, found: int, count: int) -> MatrixError:
    """Return the error to raise for more or fewer names than rows or columns."""
    return MatrixError(f"{label}: {counted(found, 'name')} where {count:,} are needed; correct them")


def given_names(names: Iterable[Any] | None, label: str, count: int) -> Names | None:
    """Return names that are in memory, or None.

    `label`: what messages call them.
    `count`: rows or columns that the matrix has.
    Raises `MatrixError` as `text_of`.

    Examples
    --------
    >>> given_names(["cat", "hat"], "rows", 2).to_array().tolist()
    ['cat', 'hat']
    """
    if names is None:
        return None
    return names_in(text_of(list(names), label), label, count)


def names_in(text: bytes, label: str, count: int) -> Names:
    """Return the names in a text; other parameters as for `given_names`."""
    return Names(label, count, lambda: iter([text]))


def text_of(names: list[Any], label: str) -> bytes:
    """Return the text of some names.

    Raises `MatrixError` if a name has a line break, or is no text that UTF-8 can write.
    """
    try:
        text = "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise MatrixError(f"{label}: a name that UTF-8 cannot write ({one_line(error, 60)}); correct it") from error
    if text.count(b"\n") != len(names):
        wrong = next(name for name in map(str, names) if "\n" in name)
        raise MatrixError(f"{label}: the name {one_line(repr(wrong), 40)} has a line break; names must have none")
    return text
