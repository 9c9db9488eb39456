"""How much of C is durable while it is written: row offsets and checksums as they become known."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from spdist.errors import CorruptError
from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.execution.recovery import BATCH, resume_from
from spdist.scheduler.execution.unfinished import DurablePart, plan_digest, write_journal
from spdist.storage import notes
from spdist.storage.checksums import Checksums, Table
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.writer import ChunkBuffer, Layout

LATE_FILE_SECONDS = 5.0
"""Seconds to wait for a Zarr chunk that a worker wrote: a network file system shows new files late."""

READERS = 4
"""Threads that read checksums, so that the latency of a network file system is paid for several files at once."""


class UnseenChunkError(Exception):
    """A Zarr chunk that was written is not there.

    `k`: number of the Zarr chunk.
    """

    def __init__(self, array: ChunkedArray, k: int) -> None:
        super().__init__(f"{array.url}/{array.key(k)}")
        self.array, self.k = array, k


def is_seen(array: ChunkedArray, k: int) -> bool:
    """Whether this process sees a Zarr chunk; for `Client.run`.

    `k`: number of the Zarr chunk.
    """
    try:
        array.stored_checksums(k, k + 1)
    except CorruptError:
        return False
    return True


class WrittenChunks:
    """Reads the checksums of C's entries as workers write their Zarr chunks, in threads of its own.

    `checksums`: of the Zarr chunks that were written before.
    `count`: Zarr chunks, from the first one on, whose checksums are read.
    """

    def __init__(self, layout: Layout, checksums: Checksums) -> None:
        self._arrays = layout.array("indices"), layout.array("data")
        self._tables = [[checksums.indices], [checksums.data]]
        self.count = self._asked = len(checksums.indices)
        self._reading: deque[Future[tuple[Table, Table]]] = deque()
        self._readers = ThreadPoolExecutor(READERS, "spdist-checksums")
        self._closed = threading.Event()

    def advance(self, written: int, *, wait: bool = False) -> int:
        """Read the checksums of Zarr chunks up to `written`; return how many are read, all of them with `wait`.

        Raises `UnseenChunkError` if a Zarr chunk is not there.
        """
        for first in range(self._asked, written, BATCH):
            last = min(first + BATCH, written)
            self._reading.append(self._readers.submit(self._read, first, last))
        self._asked = max(self._asked, written)
        while self._reading and (wait or self._reading[0].done()):
            tables = self._reading[0].result()  # stays the first if it fails: those after it do not count
            self._reading.popleft()
            for known, table in zip(self._tables, tables, strict=True):
                known.append(table)
            self.count += len(tables[0])
        return self.count

    def _read(self, first: int, last: int) -> tuple[Table, Table]:
        indices, data = (self._read_late(array, first, last) for array in self._arrays)
        return indices, data

    def _read_late(self, array: ChunkedArray, first: int, last: int) -> Table:
        """Return stored checksums; wait a while for Zarr chunks that are not seen yet."""
        deadline = time.monotonic() + LATE_FILE_SECONDS
        while True:
            try:
                return array.stored_checksums(first, last)
            except CorruptError as error:
                if time.monotonic() > deadline or self._closed.is_set():
                    unseen = (k for k in range(first, last) if not is_seen(array, k))
                    raise UnseenChunkError(array, next(unseen, first)) from error
                notes.refresh(array)
                self._closed.wait(0.2)

    def tables(self) -> tuple[Table, Table]:
        """Return the checksums of `indices` and `data`."""
        self._tables = [[np.concatenate(parts)] for parts in self._tables]
        return self._tables[0][0], self._tables[1][0]

    def close(self) -> None:
        """Stop the threads."""
        self._closed.set()
        self._readers.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class JournalTuning:
    """When the journal is written."""

    seconds: float = 0.5  # least seconds between two writes
    # largest share of the time that writes take: the journal grows with C, and then it is written less often
    share: float = 0.01


TUNING = JournalTuning()


class Journal:
    """The durable part of C during a run: the only writer of C's row offsets and of its journal.

    `layout`: of C, which is continued from its journal; see `resume_from`.
    """

    def __init__(self, layout: Layout, tuning: JournalTuning | None = None) -> None:
        self.url, self._tuning = layout.url, tuning or TUNING
        part = resume_from(layout)
        self.checkpoint = part.checkpoint
        self._plan = plan_digest(layout.url)
        self.chunks = WrittenChunks(layout, part.checksums)
        self._offset_checksums = part.checksums.indptr
        self._offsets = ChunkBuffer(layout.array("indptr"), (part.checkpoint.row + 1) - len(part.offsets))
        self._offsets.append(part.offsets)
        self._next_write, self._was_written = time.monotonic() + self._tuning.seconds, False

    def add_rows(self, stop: int, offset: int, row_nnz: Int64Array) -> None:
        """Add rows up to `stop` to the durable part; their entries begin at `offset`."""
        ends = offset + np.cumsum(row_nnz, dtype=np.int64)
        self._offsets.append(ends)
        self._note_offsets()
        self.checkpoint = replace(self.checkpoint, row=stop, nnz=int(ends[-1]) if len(ends) else offset)

    def keep(self, chunks: int, *, is_last: bool = False) -> None:
        """Set how many Zarr chunks are durable, and write the journal now and then.

        The last time it is written, too, unless the whole run took less time than lies between two writes.
        """
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
        indices, data = (table[: self.checkpoint.chunks] for table in self.chunks.tables())
        sums = Checksums(self._offset_checksums, indices, data)
        write_journal(self.url, DurablePart(self.checkpoint, np.concatenate(self._offsets.parts), sums), self._plan)

    def close(self) -> Checksums:
        """Write the last Zarr chunk of row offsets; return the checksums of C."""
        self._offsets.close()
        self._note_offsets()
        return Checksums(self._offset_checksums, *self.chunks.tables())

    def _note_offsets(self) -> None:
        """Read the checksums of the Zarr chunks of row offsets that were written since the last call."""
        known, written = len(self._offset_checksums), -(-self._offsets.position // self._offsets.array.chunk)
        if known < written:
            new = self._offsets.array.stored_checksums(known, written)
            self._offset_checksums = np.concatenate([self._offset_checksums, new])
