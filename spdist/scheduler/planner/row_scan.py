"""The scan over the columns of A that counts products and distinct rows of B, and cuts row blocks.

Parts of A of equally many entries are scanned independently: by threads, or by other processes (`RemoteReaders`), since
reads need the interpreter. The parts, and with them the plan, are the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spdist.errors import SpdistError
from spdist.foundation.cpus import count_cpus
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, ValueArray, index_dtype
from spdist.matrices.pattern import is_worth_compiled
from spdist.scheduler.planner.cut_rows import (
    BlockCosts,
    BlockCutter,
    BlockTable,
    ExpectedRows,
    block_table,
)
from spdist.scheduler.planner.estimate import Estimate
from spdist.scheduler.planner.remote_readers import RemoteReaders, raise_first_error, results_or_errors
from spdist.scheduler.planner.stored_rows import Lengths, check_rows, mask_lengths, row_lengths
from spdist.scheduler.planner.tuning import ScanTuning
from spdist.storage.matrix import StoredMatrix
from spdist.storage.product_spec import Diagonal


class ColumnReader:
    """Reads the columns of consecutive rows of a matrix, each Zarr chunk once, into two buffers in turn.

    `buffers`: the buffer at index 0 is filled next. Buffers grow and are used again: new memory takes longer than
    decoding.
    `rest`: (size,) integers: columns of the last decoded Zarr chunk that lie beyond the rows read so far.
    `end`: entries of the matrix read so far, `rest` included.
    """

    def __init__(self, a: StoredMatrix) -> None:
        self.a = a
        empty: ValueArray = np.empty(0, a.indices.dtype)
        self.buffers, self.rest, self.end = [empty, empty], empty, 0

    def read(self, offsets: Int64Array) -> ValueArray:
        """Return the columns of the next rows, after the last call's; valid until the call after the next."""
        a, first, last = self.a, int(offsets[0]), int(offsets[-1])
        if a.indices.dtype != index_dtype(a.ncols) or not 0 <= first <= last <= a.nnz:
            return a.read_indices(first, last)  # converts, or raises the error
        rest = self.rest if first + len(self.rest) == self.end else self.rest[:0]
        begin = first + len(rest)
        end = max(begin, min(-(-last // a.indices.chunk) * a.indices.chunk, a.nnz))
        out = self._next_buffer(end - first)
        out[: len(rest)] = rest
        a.indices.read_into(out[len(rest) :], begin)
        self.rest, self.end = out[last - first :], end
        return out[: last - first]

    def _next_buffer(self, size: int) -> ValueArray:
        if len(self.buffers[0]) < size:
            self.buffers[0] = np.empty(size, self.a.indices.dtype)
        self.buffers.reverse()
        return self.buffers[1][:size]


class ScannedRows(NamedTuple):
    """Rows ``[start:stop)`` of A: their offsets and their columns."""

    start: int
    stop: int
    offsets: Int64Array
    columns: ValueArray


def read_ranges(a: StoredMatrix, first: int, last: int, tuning: ScanTuning) -> Iterator[ScannedRows]:
    """Yield rows ``[first:last)`` by ranges, and read the next range meanwhile.

    `first, last`: first row, and the row after the last.
    `tuning`: A range has `read_entries` entries, or the entries of two Zarr chunks if these are more.
    Yields its columns are valid until the range after the next is yielded.
    """
    reader = ColumnReader(a)
    with ThreadPoolExecutor(1) as thread:
        before: tuple[tuple[int, int, Int64Array], Future[ValueArray]] | None = None
        for rows in a.row_blocks(max(tuning.read_entries, 2 * a.indices.chunk), first, last):
            columns = thread.submit(reader.read, rows[2])
            if before is not None:
                yield ScannedRows(*before[0], before[1].result())
            before = rows, columns
        if before is not None:
            yield ScannedRows(*before[0], before[1].result())


@dataclass(frozen=True)
class ScanTask:
    """The matrices to scan and the figures to count: some kilobytes, which travel to other processes."""

    a: StoredMatrix
    b: StoredMatrix
    mask: StoredMatrix | Diagonal | None
    costs: BlockCosts  # bounds that end a block
    estimate: Estimate
    forced: Int64Array  # (n,) int64: rows at which blocks must start. If there are any, the bounds end no block.
    check_canonical: bool  # whether to refuse rows of A that are not sorted
    tuning: ScanTuning


def scan_parts(
    task: ScanTask, parts: Sequence[tuple[int, int]], threads: int, known: tuple[Lengths, Lengths] | None = None
) -> list[BlockTable | SpdistError | None]:
    """Scan ranges of rows, several at once.

    `parts`: first row of each range, and the row after its last.
    `threads`: most ranges at once; fewer if `ScanTuning.stamp_bytes` is not enough.
    `known`: (b_lengths, mask_lengths), optional: row lengths of B and of the mask; read here if they are not given.
    Returns of each range the blocks, or an error; see `results_or_errors`.
    """
    b_lengths, masked = known or (row_lengths(task.b), mask_lengths(task.mask))
    expected = ExpectedRows(task.estimate.ratio, task.estimate.share, masked)
    cut: Callable[..., int] | None = None
    if not task.costs.b_resident or is_worth_compiled(task.a.nnz):
        from spdist.scheduler.planner import cut_kernel  # loads Numba

        cut = cut_kernel.cut

    def scan(part: tuple[int, int]) -> BlockTable:
        cutter = BlockCutter(task.costs, expected, b_lengths, task.b.indices.nchunks, task.forced, part[0], cut)
        return scan_rows(task, cutter, *part)

    return results_or_errors(scan, parts, min(threads, task.tuning.stamp_bytes // (4 * max(task.a.ncols, 1))))


def scan_rows(task: ScanTask, cutter: BlockCutter, first: int, last: int) -> BlockTable:
    """Cut rows ``[first:last)`` of A into blocks.

    `cutter`: begins at row `first`. It is closed here, so use it once.
    `first, last`: first row, and the row after the last.
    Returns in order of rows.
    Raises `MatrixError` if offsets or columns of A are out of range, or ``task.check_canonical`` and rows are not
    sorted.
    """
    closed = []
    for start, stop, offsets, columns in read_ranges(task.a, first, last, task.tuning):
        rows = CSR(offsets - int(offsets[0]), columns, columns, (stop - start, task.a.ncols))
        check_rows(task.a, rows, start, canonical=task.check_canonical)
        closed.append(cutter.feed(offsets, columns))
    closed.append(cutter.close())
    return np.concatenate(closed)


@dataclass(frozen=True)
class RowScan:
    """Scans all rows of A for blocks under given costs."""

    a: StoredMatrix
    b: StoredMatrix
    mask: StoredMatrix | Diagonal | None
    # their row lengths, as this process knows them
    b_lengths: Lengths
    mask_lengths: Lengths
    bounds: list[int]  # rows at which parts begin, and the number of rows
    readers: RemoteReaders | None  # processes that scan the parts
    tuning: ScanTuning

    def blocks(self, costs: BlockCosts, estimate: Estimate, forced: Int64Array, *, check_canonical: bool) -> BlockTable:
        """Return the blocks, in order of rows; for the parameters see `ScanTask`."""
        task = ScanTask(self.a, self.b, self.mask, costs, estimate, forced, check_canonical, self.tuning)
        parts = list(itertools.pairwise(self.bounds))
        if self.readers is None or len(parts) == 1:
            found = scan_parts(task, parts, count_cpus(), (self.b_lengths, self.mask_lengths))
        else:
            found = self.readers.map(functools.partial(scan_parts, task), parts)
        return np.concatenate([block_table(), *raise_first_error(found)])
