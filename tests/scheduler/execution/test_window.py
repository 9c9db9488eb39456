"""Blocks between the plan and the durable part of C, and Zarr chunks that they share; without a cluster."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spdist.scheduler.execution.assignment import BlockWork
from spdist.scheduler.execution.records import BlockCounts, BlockTask
from spdist.scheduler.execution.window import BlockInFlight, BlockWindow, SharedChunks


def window_of(blocks: int, row: int = 0) -> BlockWindow:
    """Return a window of blocks of ten rows each."""
    starts = range(row, row + 10 * blocks, 10)
    return BlockWindow([BlockWork(BlockTask(-1, at, at + 10, 99, False), 100, 50) for at in starts], row)


def submit(window: BlockWindow, position: int) -> BlockInFlight:
    block = BlockInFlight(window.take(position), "worker", None)
    window.submit(block)
    return block


def counts(*row_nnz: int) -> BlockCounts:
    ends = np.cumsum(row_nnz, dtype=np.int64)
    return BlockCounts(len(row_nnz), sum(row_nnz), ends, ends[:0], b"", False)


def test_offsets_are_known_in_the_order_of_rows():
    window = window_of(3)
    last, first, middle = (submit(window, position) for position in (2, 0, 0))
    assert [block.task.number for block in (last, first, middle)] == [0, 1, 2]
    window.set_counts(last, counts(*[1] * 10))
    assert not list(window.set_offsets(0))
    window.set_counts(first, counts(*[2] * 10))
    assert list(window.set_offsets(0)) == [first]
    window.set_counts(middle, counts(*[3] * 10))
    assert [block.offset for block in window.set_offsets(20)] == [20, 50]


def test_rows_that_do_not_fit_come_next():
    window = window_of(2, row=40)
    first, second = submit(window, 0), submit(window, 0)
    window.set_counts(first, counts(5, 5, 5))
    window.set_counts(second, counts(*[1] * 10))
    assert list(window.set_offsets(0)) == [first]
    rest = submit(window, 0)
    assert (first.task.stop, rest.task.start, rest.task.stop) == (43, 43, 50)
    assert rest.task.number == 3  # block 0 was part of the run that is resumed
    window.set_counts(rest, counts(*[1] * 7))
    assert list(window.set_offsets(15)) == [rest, second]


def test_only_committed_blocks_leave_the_window():
    window = window_of(2)
    first, second = submit(window, 0), submit(window, 0)
    for block in (first, second):
        window.set_counts(block, counts(*[1] * 10))
    assert len(list(window.set_offsets(0))) == 2
    second.committed = True
    assert window.first_committed() is None
    first.committed = True
    assert window.first_committed() is first
    window.drop_first()
    assert window.first_committed() is second


@given(st.lists(st.integers(0, 25), min_size=1, max_size=12), st.integers(1, 10))
def test_each_shared_chunk_is_joined_once(sizes, length):
    """From the commits of all blocks that have entries in it."""
    chunks, nnz, joined = SharedChunks(length, 0), 0, {}
    ends = np.cumsum(sizes)
    for number, size in enumerate(sizes):
        block = BlockInFlight(BlockWork(BlockTask(number, number, number + 1, 0, False), 0, 0), "worker", None)
        block.counts, block.offset = counts(size), nnz
        nnz += size
        for k in chunks.of_block(block):
            chunks.add(k, number)
        joined |= dict(chunks.take_complete(nnz, is_last=number == len(sizes) - 1))
    expected = {}
    for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        for k in range((end - size) // length, -(-end // length)) if size else ():
            whole = end - size <= k * length and (k + 1) * length <= end
            if not whole:
                expected.setdefault(k, []).append(number)
    assert joined == expected


def test_blocks_without_entries_share_nothing():
    """Else a Zarr chunk that is written would be written again by a resumed run, from too few blocks."""
    block = BlockInFlight(BlockWork(BlockTask(1, 1, 2, 0, False), 0, 0), "worker", None)
    block.counts, block.offset = counts(0), 25
    assert not SharedChunks(10, 0).of_block(block)


def test_a_resumed_run_joins_no_zarr_chunk_that_is_written():
    block = BlockInFlight(BlockWork(BlockTask(1, 1, 2, 0, False), 0, 0), "worker", None)
    block.counts, block.offset = counts(20), 25
    assert SharedChunks(10, 0).of_block(block) == {2, 4}
    assert SharedChunks(10, 3).of_block(block) == {4}
