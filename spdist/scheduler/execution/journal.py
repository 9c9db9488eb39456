"""How much of C is durable while it is written: row offsets and checksums as they become known."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from spdist.errors import CorruptError
from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.execution.records import BlockCounts, BlockTask
from spdist.scheduler.execution.recovery import BATCH, resume_from
from spdist.scheduler.execution.unfinished import DurablePart, plan_digest, write_journal
from spdist.storage import groups, notes
from spdist.storage.checksums import Checksums, Table, WrittenChunks
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.writer import ChunkBuffer, Layout

LATE_FILE_SECONDS = 5.0
"""Seconds to wait for a Zarr chunk that a worker wrote: a network file system shows new files late."""


class UnseenChunkError(Exception):
    """A Zarr chunk that was written is not there.

    `k`: number of the Zarr chunk.
    """

    def __init__(self, array: ChunkedArray, k: int) -> None:
        super().__init__(f"{array.url}/{array.key(k)}")
        self.array, self.k = array, k


def is_seen(array: ChunkedArray, k: int, expected: Table | None = None) -> bool:
    """Whether this process sees Zarr chunk `k`, or this and those after it with their checksums; for `Client.run`."""
    try:
        found = array.stored_checksums(k, k + (1 if expected is None else len(expected)))
    except CorruptError:
        return False
    return expected is None or bool((found == expected).all())


class KnownChecksums:
    """Checksums of the Zarr chunks of one array, which become known in any order.

    `count`: Zarr chunks, from the first one on, whose checksums are known.
    """

    def __init__(self, sums: Table) -> None:
        self.count, self._sums, self._known = len(sums), sums.copy(), np.ones(len(sums), bool)

    def add(self, first: int, sums: Table) -> None:
        """Note checksums; of a Zarr chunk that was written again, the later one counts."""
        stop = first + len(sums)
        if stop > len(self._known):
            room = max(stop, 2 * len(self._known)) - len(self._known)
            self._known, self._sums = np.pad(self._known, (0, room)), np.pad(self._sums, (0, room))
        self._sums[first:stop], self._known[first:stop] = sums, True
        further = self._known[self.count :]
        self.count += len(further) if further.all() else int(further.argmin())

    def table(self, first: int = 0) -> Table:
        """Return the checksums of the Zarr chunks from `first` on, up to the first one that is not known."""
        return self._sums[first : self.count].copy()


class DurableChunks:
    """Checksums of C's Zarr chunks, as those who wrote them tell; looks whether this process sees the same.

    It looks at every Zarr chunk of entries, in a thread, or at the newest if there come more than it can look at.

    `checksums`: of the Zarr chunks that were written before.
    """

    def __init__(self, layout: Layout, checksums: Checksums) -> None:
        self._arrays = layout.array("indices"), layout.array("data")
        self._known = {name: KnownChecksums(getattr(checksums, name)) for name in groups.ARRAYS}
        self._asked = self.count
        self._looks: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "spdist-look")
        self._closed = threading.Event()

    @property
    def count(self) -> int:
        """Zarr chunks of `indices` and `data`, from the first one on, that are written."""
        return min(self._known["indices"].count, self._known["data"].count)

    def add(self, written: Iterable[WrittenChunks]) -> None:
        """Note Zarr chunks that are written."""
        for chunks in written:
            self._known[chunks.array].add(chunks.first, chunks.sums)

    def checksums(self, offsets: int, entries: int) -> Checksums:
        """Return the checksums of the first Zarr chunks: `offsets` of row offsets, `entries` of columns and values."""
        lengths = zip(groups.ARRAYS, (offsets, entries, entries), strict=True)
        return Checksums(*(self._known[name].table()[:length] for name, length in lengths))

    def look(self, *, wait: bool = False) -> None:
        """Look at Zarr chunks written since the last look, unless one is going on; with `wait`, until it ends.

        Raises `UnseenChunkError` if a Zarr chunk of an earlier look is not there.
        """
        if self._looks is not None and (wait or self._looks.done()):
            self._looks.result()
            self._looks = None
        if self._looks is None and self._asked < self.count:
            first, count = max(self._asked, self.count - BATCH), self.count
            self._asked = count
            self._looks = self._thread.submit(self._see, first, count)
            if wait:
                self.look(wait=True)

    def _see(self, first: int, last: int) -> None:
        for array in self._arrays:
            self._see_late(array, first, last)

    def _see_late(self, array: ChunkedArray, first: int, last: int) -> None:
        """Compare stored checksums; wait a while for Zarr chunks that are not seen yet, or were just written again."""
        deadline = time.monotonic() + LATE_FILE_SECONDS
        while not is_seen(array, first, expected := self._known[array.name].table(first)[: last - first]):
            if time.monotonic() > deadline or self._closed.is_set():
                unseen = (k for k in range(first, last) if not is_seen(array, k, expected[k - first : k - first + 1]))
                raise UnseenChunkError(array, next(unseen, first))
            notes.refresh(array)
            self._closed.wait(0.2)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class JournalTuning:
    """When the journal is written."""

    seconds: float = 0.5  # least seconds between two writes
    # largest share of the time that writes take: the journal grows with C, and then it is written less often
    share: float = 0.01


TUNING = JournalTuning()


class Journal:
    """The durable part of C during a run; it writes the journal, and the row offsets that blocks share.

    `layout`: of C, which is continued from its journal; see `resume_from`.
    """

    def __init__(self, layout: Layout, tuning: JournalTuning | None = None) -> None:
        self.url, self._tuning = layout.url, tuning or TUNING
        part = resume_from(layout)
        self.checkpoint = part.checkpoint
        self._plan = plan_digest(layout.url)
        self.chunks = DurableChunks(layout, part.checksums)
        self._offsets = ChunkBuffer(layout.array("indptr"), (part.checkpoint.row + 1) - len(part.offsets))
        self._append(part.offsets)
        self._next_write, self._was_written = time.monotonic() + self._tuning.seconds, False

    def add_rows(self, task: BlockTask, offset: int, counts: BlockCounts) -> None:
        """Add the rows of a block, which are durable; their entries begin at `offset`."""
        self._append(offset + counts.head)
        stop = task.start + counts.rows + 1
        if len(counts.head) < counts.rows:  # its worker wrote what lies between
            self._offsets.position = stop - len(counts.tail)
            self._append(offset + counts.tail)
        self.checkpoint = replace(self.checkpoint, row=stop - 1, nnz=offset + counts.nnz)

    def _append(self, offsets: Int64Array) -> None:
        """Add row offsets; note which Zarr chunks they fill."""
        first, length = self._offsets.position, self._offsets.array.chunk
        self._offsets.append(offsets)
        self._note_offsets(first // length, self._offsets.position // length)

    def keep(self, *, is_last: bool = False) -> None:
        """Note how many Zarr chunks are durable, and write the journal now and then.

        The last time it is written, too, unless the whole run took less time than lies between two writes.
        """
        chunks = self.chunks.count
        has_grown = chunks != self.checkpoint.chunks
        self.checkpoint = replace(self.checkpoint, chunks=chunks)
        begin = time.monotonic()
        is_due = begin > self._next_write
        if (has_grown and is_due) or (is_last and (is_due or self._was_written)):
            self.write()
            now, self._was_written = time.monotonic(), True
            self._next_write = now + max(self._tuning.seconds, (now - begin) / self._tuning.share)

    def set_compressed(self) -> None:
        """Note that C's values are compressed."""
        self.checkpoint = replace(self.checkpoint, compressed=True)

    def write(self) -> None:
        """Write the journal."""
        sums = self.chunks.checksums(self._offsets.position // self._offsets.array.chunk, self.checkpoint.chunks)
        write_journal(self.url, DurablePart(self.checkpoint, np.concatenate(self._offsets.parts), sums), self._plan)

    def close(self) -> Checksums:
        """Write the last Zarr chunk of row offsets; return the checksums of C."""
        first, length = self._offsets.position, self._offsets.array.chunk
        self._offsets.close()
        count = -(-self._offsets.position // length)
        self._note_offsets(first // length, count)
        return self.chunks.checksums(count, self.chunks.count)

    def _note_offsets(self, first: int, stop: int) -> None:
        array = self._offsets.array
        self.chunks.add([WrittenChunks(array.name, first, array.stored_checksums(first, stop))])
