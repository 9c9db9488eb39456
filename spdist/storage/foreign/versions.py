"""Whether matrices are still what they were when a call began to read them: another program may rewrite one meanwhile.

A call notes each matrix before it reads it, and compares before its result is sealed: first what the storage tells of
the Zarr chunks (sizes, times and file numbers; ETags), then, where that differs or cannot tell, digests of the content.
A call inside another one goes by what the outer one saw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from spdist.errors import CorruptError, MatrixError
from spdist.matrices.dtypes import Int64Array
from spdist.storage import groups
from spdist.storage.lock import is_held
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.stores.registry import at


@dataclass(frozen=True)
class _Versions:
    """What the storage tells of the Zarr chunks of a matrix."""

    # by array a number for each Zarr chunk, which changes when the Zarr chunk is written; 0 if it is missing
    of_chunks: dict[str, Int64Array]
    # whether every later write shows: not if the storage has no times, or a file is as new as the comparison
    can_tell: bool


class _Watch:
    """The matrices that one call reads, and what they were when the outermost call first saw them."""

    def __init__(self, outer: _Watch | None) -> None:
        self.first_seen: dict[str, tuple[StoredMatrix, _Versions]] = {} if outer is None else outer.first_seen
        self.read: set[str] = set()


_current: ContextVar[_Watch | None] = ContextVar("spdist_versions", default=None)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watch the matrices that a call reads: the ``with`` block, or the function that this decorates, is the call."""
    token = _current.set(_Watch(_current.get()))
    try:
        yield
    finally:
        _current.reset(token)


def note(matrix: StoredMatrix) -> None:
    """Note what a matrix is before the call reads it; once for each matrix, unless this process holds its target."""
    watch = _current.get()
    if watch is None or is_held(matrix.url):
        return
    first, before = watch.first_seen.get(matrix.url) or (matrix, _versions_of(matrix))
    watch.first_seen[matrix.url] = first if first.known else matrix, before
    watch.read.add(matrix.url)


def check() -> None:
    """Raise `CorruptError` if a matrix that the call reads is no longer what it was; name its first new Zarr chunk."""
    watch = _current.get()
    if watch is None:
        return
    for url in sorted(watch.read):
        if what := _change(*watch.first_seen[url]):
            raise CorruptError(
                f"{url} was rewritten while it was read ({what}): what was made of it is a mixture and is discarded, "
                f"and what was there before stays; run the command again when nothing writes to {url}"
            )


def _change(matrix: StoredMatrix, before: _Versions) -> str:
    """Return what was rewritten of a matrix; empty if its content is what it was."""
    try:
        now = open_matrix(matrix.url)
    except (MatrixError, CorruptError) as error:
        return f"now: {error}"
    difference = _first_difference(before, _versions_of(now))
    if now == matrix:
        if difference is None and (before.can_tell or not matrix.is_known_canonical):
            return ""
        with contextlib.suppress(CorruptError):  # which names no more than the difference
            if matrix.is_known_canonical and (found := now.fingerprint()) == (matrix.known or found):
                return ""
    if difference is None:
        return "its content" if now == matrix else "its metadata"
    name, k = difference
    return f"Zarr chunk {k} of array '{name}', {getattr(matrix, name).chunk_keys()[k]}"


def _first_difference(before: _Versions, after: _Versions) -> tuple[str, int] | None:
    """Return array and number of the first Zarr chunk that was written between; None if none was."""
    for name, old in before.of_chunks.items():
        new = after.of_chunks[name]
        common = min(len(old), len(new))
        differ = np.flatnonzero(old[:common] != new[:common])
        if len(differ) or len(old) != len(new):
            return name, int(differ[0]) if len(differ) else common
    return None


def _versions_of(m: StoredMatrix) -> _Versions:
    keys = [array.chunk_keys() for array in (m.indptr, m.indices, m.data)]
    numbers, can_tell = at(m.url).versions([key for some in keys for key in some])
    parts = np.split(np.array(numbers, np.int64), np.cumsum([len(some) for some in keys])[:-1])
    return _Versions(dict(zip(groups.ARRAYS, parts, strict=True)), can_tell)
