"""How much of C is durable: row offsets and checksums as they become known, and the journal for ``--resume``.

The journal holds the crc32c of every durable Zarr chunk. A resumed run compares them with what lies there, and goes
back to the last row before the first Zarr chunk that is missing or other.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from spdist.errors import CorruptError
from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.planner.plan import Plan
from spdist.storage import groups, notes
from spdist.storage.checksums import Checksums, Table, digest_of
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.writer import ChunkBuffer, Layout

PLAN, JOURNAL = notes.UNFINISHED_NOTES
"""Names of the notes in an unfinished C that hold its plan and its journal."""

CHECKED_WHOLE = 1 << 29
"""Decoded bytes of an array's newest Zarr chunks that a resumed run reads whole; of the others it reads checksums."""

LATE_FILE_SECONDS = 5.0
"""Seconds to wait for a Zarr chunk that a worker wrote: a network file system shows new files late."""

READ_AT_ONCE = 1 << 25
"""Decoded bytes of Zarr chunks that are read whole at a time."""

BATCH = 256
"""Zarr chunks whose checksums are read at a time."""

READERS = 4
"""Threads that read checksums, so that the latency of a network file system is paid for several files at once."""

_FOREIGN = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors that whole notes of another version of spdist make."""

logger = logging.getLogger("spdist")


@dataclass(frozen=True)
class Checkpoint:
    """The durable part of C, and where work continues after it.

    Attributes
    ----------
    row, nnz : int
        First row that is not durable, and the position of its first entry in C.
    chunks : int
        Zarr chunks of `indices` and `data` that are written, from the first one on.
    compressed : bool
        Whether the values are compressed.
    """

    row: int = 0
    nnz: int = 0
    chunks: int = 0
    compressed: bool = False


def _no_checksums() -> Checksums:
    return Checksums(*(np.empty(0, np.uint32) for _ in groups.ARRAYS))


@dataclass(frozen=True)
class DurablePart:
    """What a journal holds.

    Attributes
    ----------
    checkpoint : Checkpoint
    offsets : (n,) int64
        Row offsets since the last whole Zarr chunk of `indptr`.
    checksums : Checksums
        Of the whole Zarr chunks of `indptr`, and of the first `checkpoint.chunks` Zarr chunks of `indices` and `data`.
    """

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    offsets: Int64Array = field(default_factory=lambda: np.zeros(1, np.int64))
    checksums: Checksums = field(default_factory=_no_checksums)

    @property
    def is_whole(self) -> bool:
        """Whether the parts fit each other."""
        front, sums, count = self.checkpoint, self.checksums, len(self.offsets)
        fits = front.row + 1 >= count if len(sums.indptr) else front.row + 1 == count
        ends = not count or int(self.offsets[-1]) == front.nnz
        return fits and ends and len(sums.indices) == len(sums.data) == front.chunks


# -- notes of an unfinished C ------------------------------------------------------------------------------------------


def write_plan(url: str, plan: Plan, product: object) -> None:
    """Write the plan of an unfinished C.

    Parameters
    ----------
    url : str
        Of C.
    plan : Plan
    product : object
        What C is a product of, as JSON; `read_plan` must be given an equal one.
    """
    notes.write_note(url, PLAN, f"{digest_of(_json(product))}\n{plan.to_json()}".encode())


def has_plan_of(url: str, product: object) -> bool:
    """Whether an unfinished C has a plan that was written for this product.

    Parameters
    ----------
    url : str
        Path or URL of C.
    product : object
        As for `write_plan`.
    """
    content = notes.read_note(url, PLAN)
    return content is not None and content.partition(b"\n")[0] == digest_of(_json(product)).encode()


def read_plan(url: str, product: object = None) -> Plan | None:
    """Read the plan of an unfinished C; None if there is none.

    Parameters
    ----------
    url : str
        Of C.
    product : object
        As for `write_plan`; None takes the plan of any product.

    Returns
    -------
    Plan or None

    Raises
    ------
    CorruptError
        If the plan is damaged, or belongs to another C.
    ResumeError
        If another version of spdist wrote it.
    """
    content = notes.read_note(url, PLAN)
    if content is None:
        return None
    owner, _, text = content.partition(b"\n")
    try:
        plan = Plan.from_json(text)
    except _FOREIGN as error:
        raise notes.foreign_note(url, PLAN) from error
    if product is not None and owner != digest_of(_json(product)).encode():
        raise notes.damaged_note(url, PLAN, "it is the plan of another product")
    return plan


def write_journal(url: str, part: DurablePart, plan: str) -> None:
    """Write the journal of an unfinished C, in one file and one step.

    Parameters
    ----------
    url : str
        Of C.
    part : DurablePart
    plan : str
        From `plan_digest`.
    """
    head = asdict(part.checkpoint) | {"plan": plan, "offsets": len(part.offsets)}
    body = part.offsets.astype("<i8").tobytes() + part.checksums.to_bytes()
    notes.write_note(url, JOURNAL, _json(head) + b"\n" + body)


def read_journal(url: str) -> DurablePart:
    """Read the journal of an unfinished C.

    Parameters
    ----------
    url : str
        Of C.

    Returns
    -------
    DurablePart
        Without a journal, the checkpoint of an empty C, with its single offset.

    Raises
    ------
    CorruptError
        If the journal is damaged, or belongs to another plan.
    ResumeError
        If another version of spdist wrote it.
    """
    content = notes.read_note(url, JOURNAL)
    if content is None:
        return DurablePart()
    head, _, body = content.partition(b"\n")
    try:
        facts = json.loads(head)
        plan, size = facts.pop("plan"), 8 * facts.pop("offsets")
        offsets = np.frombuffer(body[:size], "<i8").astype(np.int64)
        part = DurablePart(Checkpoint(**facts), offsets, Checksums.from_bytes(body[size:]))
    except _FOREIGN as error:
        raise notes.foreign_note(url, JOURNAL) from error
    if plan != plan_digest(url):
        raise notes.damaged_note(url, JOURNAL, "it belongs to another plan")
    if not part.is_whole:
        raise notes.damaged_note(url, JOURNAL, "its parts do not fit each other")
    return part


def _json(facts: object) -> bytes:
    return json.dumps(facts, sort_keys=True).encode()


def plan_digest(url: str) -> str:
    """Return a digest of the plan of an unfinished C, to which its journal belongs."""
    return digest_of(notes.read_note(url, PLAN) or b"")


# -- Zarr chunks in storage compared with the journal ------------------------------------------------------------------


def resume_from(layout: Layout) -> DurablePart:
    """Return the durable part of an unfinished C, after a look at it; Zarr chunks beyond that part are deleted.

    Parameters
    ----------
    layout : Layout
        Of C.

    Returns
    -------
    DurablePart
        What the journal says; or less if Zarr chunks are missing or other than they were, which a warning says. A
        damaged journal says that nothing is durable.

    Raises
    ------
    ResumeError
        If another version of spdist wrote the journal.
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

    Parameters
    ----------
    layout : Layout
        Of C.
    part : DurablePart
        What the journal says.

    Returns
    -------
    DurablePart
        `part` itself if nothing is missing or other.
    """
    sums = part.checksums
    whole = [count_whole(layout.array(name), getattr(sums, name)) for name in groups.ARRAYS]
    if whole == [len(getattr(sums, name)) for name in groups.ARRAYS]:
        return part
    chunks = min(whole[1:])
    offsets = layout.array("indptr")
    newest = whole[0] if whole[0] == len(sums.indptr) else whole[0] - 1  # after the last whole one come the journal's
    for j in range(newest, -1, -1):
        values = part.offsets
        if j < len(sums.indptr):
            try:
                values = offsets.read(j * layout.chunk, (j + 1) * layout.chunk)
            except CorruptError:
                continue
        fit = int(np.searchsorted(values, chunks * layout.chunk, side="right"))
        if fit:
            filled = j + fit // layout.chunk
            front = replace(part.checkpoint, row=j * layout.chunk + fit - 1, nnz=int(values[fit - 1]), chunks=chunks)
            kept = Checksums(sums.indptr[:filled], sums.indices[:chunks], sums.data[:chunks])
            return DurablePart(front, values[fit - fit % layout.chunk : fit].copy(), kept)
    return DurablePart()


def count_whole(array: ChunkedArray, expected: Table) -> int:
    """Return how many Zarr chunks, from the first one on, are there and have the checksum that they should have.

    Parameters
    ----------
    array : ChunkedArray
    expected : (n,) uint32
        A checksum for each Zarr chunk. The contents are compared with their checksums in the newest Zarr chunks only,
        as many as `CHECKED_WHOLE` allows.

    Returns
    -------
    int
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


# -- during a run ------------------------------------------------------------------------------------------------------


class UnseenChunkError(Exception):
    """A Zarr chunk that was written is not there.

    Parameters
    ----------
    array : ChunkedArray
    k : int
        Number of the Zarr chunk.
    """

    def __init__(self, array: ChunkedArray, k: int) -> None:
        super().__init__(f"{array.url}/{array.key(k)}")
        self.array, self.k = array, k


def is_seen(array: ChunkedArray, k: int) -> bool:
    """Whether this process sees a Zarr chunk; for `Client.run`.

    Parameters
    ----------
    array : ChunkedArray
    k : int
        Number of the Zarr chunk.
    """
    try:
        array.stored_checksums(k, k + 1)
    except CorruptError:
        return False
    return True


class WrittenChunks:
    """Reads the checksums of C's entries as workers write their Zarr chunks, in threads of its own.

    Parameters
    ----------
    layout : Layout
        Of C.
    checksums : Checksums
        Of the Zarr chunks that were written before.

    Attributes
    ----------
    count : int
        Zarr chunks, from the first one on, whose checksums are read.
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

        Raises
        ------
        UnseenChunkError
            If a Zarr chunk is not there.
        """
        for first in range(self._asked, written, BATCH):
            last = min(first + BATCH, written)
            self._reading.append(self._readers.submit(self._read, first, last))
        self._asked = max(self._asked, written)
        while self._reading and (wait or self._reading[0].done()):
            tables = self._reading.popleft().result()
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
    """When the journal is written.

    Attributes
    ----------
    seconds : float
        Least seconds between two writes.
    share : float
        Largest share of the time that writes take: the journal grows with C, and then it is written less often.
    """

    seconds: float = 0.5
    share: float = 0.01


TUNING = JournalTuning()


class Journal:
    """The durable part of C during a run: the only writer of C's row offsets and of its journal.

    Parameters
    ----------
    layout : Layout
        Of C, which is continued from its journal; see `resume_from`.
    tuning : JournalTuning, optional
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
        self._next_write = time.monotonic() + self._tuning.seconds

    def add_rows(self, stop: int, offset: int, row_nnz: Int64Array) -> None:
        """Add rows up to `stop` to the durable part; their entries begin at `offset`."""
        ends = offset + np.cumsum(row_nnz, dtype=np.int64)
        self._offsets.append(ends)
        self._note_offsets()
        self.checkpoint = replace(self.checkpoint, row=stop, nnz=int(ends[-1]) if len(ends) else offset)

    def keep(self, chunks: int, *, is_last: bool = False) -> None:
        """Set how many Zarr chunks are durable, and write the journal now and then, or if it is the last time.

        Parameters
        ----------
        chunks : int
        is_last : bool
        """
        has_grown = chunks != self.checkpoint.chunks
        self.checkpoint = replace(self.checkpoint, chunks=chunks)
        begin = time.monotonic()
        if is_last or (has_grown and begin > self._next_write):
            self.write()
            now = time.monotonic()
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
