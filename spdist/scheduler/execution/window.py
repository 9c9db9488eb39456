"""The window of blocks between the plan and the durable part of C, and the Zarr chunks that blocks share."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.executor import Handle
from spdist.scheduler.execution.records import BlockCounts, BlockTask


@dataclass(eq=False)
class BlockInFlight:
    """A block that was submitted and is not yet durable."""

    work: BlockWork  # ends where the block's capacity did, once that is known
    worker: str  # address of the worker that has it
    multiplied: Handle  # of the stage that its commit waits for
    counts: BlockCounts | None = None  # none until the block is multiplied
    offset: int = -1  # position of its first entry in C; -1 until the blocks before it are counted
    spilled: bool = False  # whether its worker holds it in files, not in memory
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
    `submitted`: blocks that were in flight, or are.
    """

    def __init__(self, works: Iterable[BlockWork], row: int) -> None:
        self.remaining = list(works)[::-1]
        self.in_flight: list[
            BlockInFlight
        ] = []  # thousands if blocks are spilled: taken from the front, added at the end
        self.submitted = 0
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
        bisect.insort(self.in_flight, block, key=lambda other: other.task.start)
        self.submitted += 1

    def set_counts(self, block: BlockInFlight, counts: BlockCounts) -> None:
        """Set a multiplied block's counts; rows that did not fit its capacity become the next block."""
        stop = block.task.start + counts.rows
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
        self._row = self.in_flight.pop(0).task.stop
        self._with_offset -= 1


class SharedChunks:
    """Zarr chunks of C's entries that several blocks share and that no join was submitted for.

    `length`: entries of a Zarr chunk.
    `done`: Zarr chunks that were written before the run.
    """

    def __init__(self, length: int, done: int) -> None:
        self.length, self._done = length, done
        self._commits: dict[int, list[Handle]] = {}

    def of_block(self, block: BlockInFlight) -> set[int]:
        """Return the Zarr chunks that a block with an offset fills in part; at most two."""
        ends = block.offset, block.offset + block.nnz
        shared = {position // self.length for position in ends if block.nnz and position % self.length}
        return {k for k in shared if k >= self._done}

    def add(self, k: int, commit: Handle) -> None:
        """Note the commit of a block that fills a Zarr chunk in part."""
        self._commits.setdefault(k, []).append(commit)

    def take_complete(self, nnz: int, *, is_last: bool) -> Iterator[tuple[int, Sequence[Handle]]]:
        """Yield each Zarr chunk whose blocks all have an offset, with their commits, to be joined.

        `nnz`: entries of C with a known position.
        `is_last`: whether these are all entries.
        """
        for k in sorted(self._commits):
            if (k + 1) * self.length <= nnz or is_last:
                yield k, self._commits.pop(k)
