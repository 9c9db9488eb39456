"""The window of blocks between the plan and the durable part of C, and the Zarr chunks that blocks share."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.executor import Handle
from spdist.scheduler.execution.records import BlockCounts, BlockNumber, BlockTask


@dataclass(eq=False)
class BlockInFlight:
    """A block that was submitted and is not yet durable."""

    work: BlockWork  # ends where the block's capacity did, once that is known
    worker: str  # address of the worker that has it
    multiplied: Handle  # of its first stage
    counts: BlockCounts | None = None  # none until the block is multiplied
    offset: int = -1  # position of its first entry in C; -1 until the blocks before it are counted
    committed: bool = False

    @property
    def task(self) -> BlockTask:
        """The rows that were submitted, or that fitted."""
        return self.work.task

    @property
    def nnz(self) -> int:
        """Entries of the block; 0 until it is counted."""
        return 0 if self.counts is None else self.counts.nnz


class BlockWindow:
    """Blocks that are left to submit, and blocks in flight; both by rising rows.

    `works`: blocks of the plan that are not submitted yet, by rising rows.
    `row`: first row of them all.
    `remaining`: the first block comes last, because it is taken first.
    `in_flight`: blocks with an offset in C come first.
    """

    def __init__(self, works: Iterable[BlockWork], row: int) -> None:
        self.remaining = list(works)[::-1]
        self.in_flight: deque[BlockInFlight] = deque()
        self._row = row
        self._with_offset = 0
        self._next_number = 0 if row == 0 else 1  # block 0 decides on compression, which a resumed C has decided

    def take(self, position: int) -> BlockWork:
        """Take the block at `position` of the remaining blocks, in the order of rows, and number it."""
        work = self.remaining.pop(-1 - position)
        self._next_number += 1
        return work._replace(task=replace(work.task, number=self._next_number - 1, products=work.products))

    def submit(self, block: BlockInFlight) -> None:
        """Add a block to the blocks in flight."""
        at = bisect.bisect(self.in_flight, block.task.start, key=lambda other: other.task.start)
        self.in_flight.insert(at, block)

    def set_counts(self, block: BlockInFlight, counts: BlockCounts) -> None:
        """Set a multiplied block's counts; rows that did not fit its capacity become the next block."""
        stop = block.task.start + len(counts.row_nnz)
        if stop < block.task.stop:
            block.work, rest = block.work.cut(stop)
            bisect.insort(self.remaining, rest, key=lambda work: -work.task.start)
        block.counts = counts

    def set_offsets(self, nnz: int) -> Iterator[BlockInFlight]:
        """Yield each counted block whose predecessors are all counted, with its offset; the first one's is `nnz`."""
        while self._with_offset < len(self.in_flight):
            block = self.in_flight[self._with_offset]
            row = self.in_flight[self._with_offset - 1].task.stop if self._with_offset else self._row
            if block.counts is None or block.task.start != row:
                return
            self._with_offset += 1
            block.offset = nnz
            nnz += block.nnz
            yield block

    def first_committed(self) -> BlockInFlight | None:
        """Return the first block in flight if it is committed."""
        if not self._with_offset or not self.in_flight[0].committed:
            return None
        return self.in_flight[0]

    def drop_first(self) -> None:
        """Remove the first block in flight, because it is durable."""
        self._row = self.in_flight.popleft().task.stop
        self._with_offset -= 1


class SharedChunks:
    """Zarr chunks of C's entries that are not written yet.

    `length`: entries of a Zarr chunk.
    `done`: Zarr chunks that were written before the run.
    """

    def __init__(self, length: int, done: int) -> None:
        self.length, self.done = length, done
        self._committing: dict[BlockNumber, int] = {}
        self._fragments: dict[int, list[Handle]] = {}
        self._joining: set[int] = set()

    def begin_commit(self, block: BlockInFlight, commit: Handle) -> None:
        """Record that a commit was submitted, and which Zarr chunks it fills in part."""
        if not block.nnz:
            return
        self._committing[block.task.number] = block.offset
        end = block.offset + block.nnz
        shared = {position // self.length for position in (block.offset, end) if position % self.length}
        for k in shared:
            if k >= self.done:
                self._fragments.setdefault(k, []).append(commit)

    def end_commit(self, number: BlockNumber) -> None:
        """Note that a block is committed."""
        self._committing.pop(number, None)

    def take_complete(self, nnz: int, *, is_last: bool) -> Iterator[tuple[int, Sequence[Handle]]]:
        """Yield each shared Zarr chunk whose fragments are all submitted, with their commits; it is being joined then.

        `nnz`: entries of C with a known position.
        `is_last`: whether these are all entries.
        """
        for k in sorted(self._fragments):
            if (k + 1) * self.length <= nnz or is_last:
                self._joining.add(k)
                yield k, self._fragments.pop(k)

    def end_join(self, k: int) -> None:
        """Note that a shared Zarr chunk is written."""
        self._joining.discard(k)

    def count_durable(self, nnz: int) -> int:
        """Return how many Zarr chunks from the first one on are written; never fewer than before."""
        offsets = (offset // self.length for offset in self._committing.values())
        durable = min([*self._joining, *self._fragments, *offsets], default=-(-nnz // self.length))
        self.done = max(self.done, durable)
        return self.done
