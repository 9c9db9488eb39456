"""Matrices of jobs: checks, and intermediate matrices beside the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def square(key: str, a: Any) -> Any:
    """Return a stored matrix if it is square and not empty."""
    import spdist

    if a.nrows != a.ncols or not a.nrows:
        raise spdist.MatrixError(
            f"{key}: {a.url} is {a.nrows:,} x {a.ncols:,}; a square matrix is needed, with a row and a column for each "
            f"vertex or unknown: name another"
        )
    return a


@contextmanager
def scratch(out: str, *names: str) -> Iterator[list[str]]:
    """Yield paths beside `out` for a job's own matrices, and remove these at the end.

    `names`: a path is ``out.name``.
    """
    urls = [f"{out}.{name}" for name in names]
    remove(urls)
    try:
        yield urls
    finally:
        remove(urls)


def remove(urls: Sequence[str]) -> None:
    """Remove matrices of a job."""
    import fsspec

    for url in urls:
        system, path = fsspec.core.url_to_fs(url)
        if system.exists(path):
            system.rm(path, recursive=True)
