"""Matrices of jobs: which are refused, and those that a job writes next to its result on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def square(key: str, a: Any) -> Any:
    """Return a stored matrix if it is square and not empty.

    Parameters
    ----------
    key : str
        The job's key that names the matrix.
    a : StoredMatrix

    Returns
    -------
    StoredMatrix
        The matrix `a`.

    Raises
    ------
    MatrixError
        If it is not square, or empty.
    """
    import spdist

    if a.nrows != a.ncols or not a.nrows:
        raise spdist.MatrixError(
            f"{key}: {a.url} is {a.nrows:,} x {a.ncols:,}; a square matrix is needed, with a row and a column for each "
            f"vertex or unknown: name another"
        )
    return a


def with_values(key: str, a: Any, fit: Callable[[Any], Any], needed: str) -> Any:
    """Return a stored matrix if all of its values fit; rows are read block by block.

    Parameters
    ----------
    key : str
        The job's key that names the matrix.
    a : StoredMatrix
    fit : callable
        Takes an array of values; returns a bool for each.
    needed : str
        The values that fit, in words.

    Returns
    -------
    StoredMatrix
        The matrix `a`.

    Raises
    ------
    MatrixError
        If a value does not fit, values are complex, or the matrix is stored in blocks.
    """
    import spdist

    if a.blocksize is not None:
        raise spdist.MatrixError(
            f"{key}: {a.url} is stored in blocks; store it by entries: `spdist export` it, `spdist import` that"
        )
    if a.dtype.kind == "c":
        raise spdist.MatrixError(f"{key}: {a.url} holds {a.dtype}; {needed} are needed: convert it")
    for start, stop, _ in a.row_blocks(1 << 20):
        block = a.rows(start, stop).to_scipy().tocoo()
        if not (fits := fit(block.data)).all():
            at = int(fits.argmin())
            raise spdist.MatrixError(
                f"{key}: {a.url} holds {block.data[at]} in row {start + block.row[at]:,}, column {block.col[at]:,}; "
                f"{needed} are needed: correct it"
            )
    return a


@contextmanager
def scratch(out: str, *names: str, keep: bool = False) -> Iterator[list[str]]:
    """Give places beside `out` for a job's own matrices, and remove these matrices in the end.

    Parameters
    ----------
    out : str
    *names : str
        A place is ``out.name``.
    keep : bool
        Keep the matrices if the job is stopped or fails: it continues from them.

    Yields
    ------
    list of str
        The places.
    """
    places = [f"{out}.{name}" for name in names]
    if not keep:
        remove(places)
    done = False
    try:
        yield places
        done = True
    finally:
        if done or not keep:
            remove(places)


def remove(places: Sequence[str]) -> None:
    """Remove matrices of a job."""
    import fsspec

    for place in places:
        system, path = fsspec.core.url_to_fs(place)
        if system.exists(path):
            system.rm(path, recursive=True)


def put(place: str, out: str) -> None:
    """Move a job's matrix to `out`, in place of what an earlier run left there.

    Parameters
    ----------
    place, out : str
        Paths or URLs on one file system.
    """
    import fsspec

    remove([out])
    fsspec.core.url_to_fs(place)[0].mv(place, out, recursive=True)


def remove_steps(place: str, last: int) -> None:
    """Remove the matrices that the steps of a job left.

    Parameters
    ----------
    place : str
        Step i lies at ``place-i``.
    last : int
        Number of the last step; the first is 0.
    """
    remove([f"{place}-{step}" for step in range(last + 1)])
