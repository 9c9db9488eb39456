"""Where an interrupted run continues: Zarr chunks in storage compared with the journal.

A resumed run goes back to the last row before the first Zarr chunk that is missing or other.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from spdist.errors import CorruptError
from spdist.scheduler.execution.unfinished import DurablePart, read_journal
from spdist.storage import groups, notes
from spdist.storage.checksums import Checksums, Table
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.writer import Layout

CHECKED_WHOLE = 1 << 29
"""Decoded bytes of an array's newest Zarr chunks that a resumed run reads whole; of the others it reads checksums."""

READ_AT_ONCE = 1 << 25
"""Decoded bytes of Zarr chunks that are read whole at a time."""

BATCH = 256
"""Zarr chunks whose checksums are read at a time."""

logger = logging.getLogger("spdist")


def resume_from(layout: Layout) -> DurablePart:
    """Return the durable part of an unfinished C, after a look at it; Zarr chunks beyond that part are deleted.

    Returns what the journal says; or less if Zarr chunks are missing or other than they were, which a warning says. A
    damaged journal says that nothing is durable.
    Raises `ResumeError` if another version of spdist wrote the journal.
    """
    try:
        found = read_journal(layout.url)
    except CorruptError as error:
        logger.warning("%s: the journal is damaged, so that work begins again at row 0 (%s)", layout.url, error)
        found = DurablePart()
    part = roll_back(replace(layout, compressed=found.checkpoint.compressed), found)
    if part is not found:
        logger.warning(
            "%s: Zarr chunks are missing or other than they were when they were written; work goes back from row "
            "%s to row %s", layout.url, f"{found.checkpoint.row:,}", f"{part.checkpoint.row:,}",
        )  # fmt: skip
    for name, kept in zip(groups.ARRAYS, (len(part.checksums.indptr), *[part.checkpoint.chunks] * 2), strict=True):
        notes.remove_chunks(layout.array(name), kept)
    return part


def roll_back(layout: Layout, part: DurablePart) -> DurablePart:
    """Return the part of C before the first Zarr chunk that is missing or other than the journal says.

    `part`: what the journal says.
    Returns `part` itself if nothing is missing or other.
    """
    sums = part.checksums
    whole = [count_whole(layout.array(name), getattr(sums, name)) for name in groups.ARRAYS]
    if whole == [len(getattr(sums, name)) for name in groups.ARRAYS]:
        return part
    chunks = min(whole[1:])
    offsets = layout.array("indptr")
    newest = whole[0] if whole[0] == len(sums.indptr) else whole[0] - 1  # after the last whole one come the journal's
    length = offsets.chunk
    for j in range(newest, -1, -1):
        values = part.offsets
        if j < len(sums.indptr):
            try:
                values = offsets.read(j * length, (j + 1) * length)
            except CorruptError:
                continue
        fit = int(np.searchsorted(values, chunks * layout.chunk, side="right"))
        if fit:
            filled = j + fit // length
            front = replace(part.checkpoint, row=j * length + fit - 1, nnz=int(values[fit - 1]), chunks=chunks)
            kept = Checksums(sums.indptr[:filled], sums.indices[:chunks], sums.data[:chunks])
            return DurablePart(front, values[fit - fit % length : fit].copy(), kept)
    return DurablePart()


def count_whole(array: ChunkedArray, expected: Table) -> int:
    """Return how many Zarr chunks, from the first one on, are there and have the checksum that they should have.

    `expected`: (n,) uint32: A checksum for each Zarr chunk. The contents are compared with their checksums in the
    newest Zarr chunks only, as many as `CHECKED_WHOLE` allows.
    """
    for k in range(0, len(expected), BATCH):
        good = _count_equal(array, k, expected[k : k + BATCH])
        if k + good < min(k + BATCH, len(expected)):
            return _count_readable(array, k + good)
    return _count_readable(array, len(expected))


def _count_equal(array: ChunkedArray, first: int, expected: Table) -> int:
    """Return how many Zarr chunks from `first` on have the expected checksums."""
    try:
        differ = np.flatnonzero(array.stored_checksums(first, first + len(expected)) != expected)
        return int(differ[0]) if len(differ) else len(expected)
    except CorruptError:
        if len(expected) == 1:
            return 0
    half = len(expected) // 2
    good = _count_equal(array, first, expected[:half])
    return good if good < half else half + _count_equal(array, first + half, expected[half:])


def _count_readable(array: ChunkedArray, count: int) -> int:
    """Return how many of the first `count` Zarr chunks come before one, among the newest, whose content is damaged."""
    oldest = max(count - max(CHECKED_WHOLE // array.chunk_nbytes, 1), 0)
    at_once = min(max(READ_AT_ONCE // array.chunk_nbytes, 1), BATCH)
    for last in range(count, oldest, -at_once):
        first = max(last - at_once, oldest)
        if not _is_readable(array, first, last):
            count = next((k for k in range(first, last) if not _is_readable(array, k, k + 1)), last)
    return count


def _is_readable(array: ChunkedArray, first: int, last: int) -> bool:
    try:
        array.read(first * array.chunk, last * array.chunk)
    except CorruptError:
        return False
    return True
