"""Results from the device: C in page-locked memory of the host, or a reduction of C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from spdist.kernels.cuda.pinned import Bytes, array_at
from spdist.kernels.reduction_spec import PartialReduction, combine
from spdist.kernels.streaming.in_flight import DownloadQueue, HostWork, InFlightBlock
from spdist.kernels.streaming.layout import DeviceDtypes
from spdist.kernels.streaming.multiplication import Multiplication
from spdist.kernels.streaming.partition import CountedProducts, ExpectedProducts
from spdist.kernels.streaming.protocols import DownloadTarget
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import index_dtype

SPARE_ENTRIES = 1 << 20
"""Entries of C that are reserved beyond the estimate."""


class ResultBuffer:
    """C on the host, in page-locked memory that can grow.

    `capacity`: entries to make room for at first. `offsets`: (nrows,): where each row ends, counted from the first
    entry of its block. `rows, nnz`: rows and entries that have a place.
    """

    def __init__(
        self, shape: tuple[int, int], capacity: int, dtypes: DeviceDtypes, allocate: Callable[[int], Bytes]
    ) -> None:
        nrows, self.ncols = shape
        self.dtypes, self._allocate = dtypes, allocate
        self.offsets = array_at(allocate(dtypes.pointer.itemsize * nrows), 0, nrows, dtypes.pointer)
        self.indptr = array_at(allocate(8 * (nrows + 1)), 0, nrows + 1, np.dtype(np.int64))
        self.indptr[0] = 0
        self.rows = self.nnz = 0
        self.indices, self.data = np.empty(0, dtypes.index), np.empty(0, dtypes.value)
        self.grow(capacity)

    @property
    def capacity(self) -> int:
        """Entries for which there is room."""
        return len(self.indices)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` entries; no download may be under way."""
        dtypes = self.dtypes
        indices = array_at(self._allocate(capacity * dtypes.index.itemsize), 0, capacity, dtypes.index)
        data = array_at(self._allocate(capacity * dtypes.value.itemsize), 0, capacity, dtypes.value)
        indices[: self.nnz], data[: self.nnz] = self.indices[: self.nnz], self.data[: self.nnz]
        self.indices, self.data = indices, data

    def add_rows(self, rows: int, nnz: int) -> DownloadTarget:
        """Give the next rows their place."""
        begin, end = self.nnz, self.nnz + nnz
        target = DownloadTarget(
            rows, nnz, self.offsets[self.rows : self.rows + rows], self.indices[begin:end], self.data[begin:end]
        )
        self.rows, self.nnz = self.rows + rows, end
        return target

    def shift_offsets(self, first: int, rows: int, base: int) -> None:
        """Write `indptr` of the rows of a downloaded block, whose first entry is entry `base` of C."""
        ends = self.indptr[first + 1 : first + rows + 1]
        np.add(self.offsets[first : first + rows], base, out=ends, dtype=np.int64)  # else 32-bit offsets add in 32 bits

    def matrix(self) -> CSR:
        """Return C."""
        shape = self.rows, self.ncols
        indices = self.indices[: self.nnz].astype(index_dtype(self.ncols), copy=False)  # B may have more rows
        return CSR(self.indptr[: self.rows + 1], indices, self.data[: self.nnz], shape)


class SampleEstimate(NamedTuple):
    """Ratios that a sample of A's rows predicts for C."""

    products_per_entry: float = 0.0  # products for each entry of A; 0.0 if unknown
    kept_ratio: float = 0.0  # entries of C that are kept, per product; 0.0 if unknown


NO_SAMPLE = SampleEstimate()


class EntryEstimate:
    """Predicts how many entries C will have, while it is made; `margin` is a factor on them."""

    def __init__(
        self, work: Multiplication, products: CountedProducts | ExpectedProducts, sample: SampleEstimate, margin: float
    ) -> None:
        self._work, self._products, self._sample, self._margin = work, products, sample, margin

    @functools.cached_property
    def most(self) -> int:
        """Bound of the entries of C; waits until products are counted."""
        return self._work.most_entries(self._products.upper_bound(self._work.rows.start))

    def first_capacity(self) -> int:
        """Return the entries of C to make room for when the first block was multiplied."""
        work, start, capacity = self._work, self._work.rows.start, self._work.rows.capacity
        # The sample goes first: A's first rows may be unlike the others, as rows at the edge of a grid are.
        kept = self._sample.kept_ratio or work.rows.history.kept_ratio
        kept *= work.triangle_share(start, work.a.nrows)
        expected = int(self._margin * kept * self._expected_products()) + SPARE_ENTRIES
        expected = expected if capacity is None else min(capacity, expected)
        return min(expected, self._products.upper_bound(start)) if self._products.is_complete else expected

    def _expected_products(self) -> int:
        """Estimate the number of products without waiting until all are counted."""
        indptr, start = self._work.a.indptr, self._work.rows.start
        counted_rows, counted = self._products.so_far()
        row = max(counted_rows, start)
        before, after = int(indptr[row] - indptr[0]), int(indptr[-1] - indptr[row])
        per_entry = max(counted / max(before, 1), self._sample.products_per_entry)
        return counted - self._products.between(0, start) + int(after * per_entry)

    def grown_capacity(self, nnz: int, stop: int) -> int:
        """Return the entries of C to make room for; the rows before `stop` have `nnz`."""
        work, start = self._work, self._work.rows.start
        done = self._products.between(start, stop)
        shares = work.triangle_share(start, work.a.nrows) / work.triangle_share(start, stop)
        expected = nnz * (self._total / max(done, 1)) * shares
        return min(int(self._margin * expected) + 1, self.most)

    @functools.cached_property
    def _total(self) -> int:
        """Products of all rows; waits until they are counted."""
        return self._products.between(self._work.rows.start, self._work.a.nrows)


class Collector(Protocol):
    """Collects the results of blocks."""

    def collect_only(self, block: InFlightBlock, nnz: int, downloads: DownloadQueue) -> None:
        """Start the download of the result of the only block, whose C keeps `nnz` entries."""

    def collect(self, block: InFlightBlock, nnz: int, downloads: DownloadQueue, estimate: EntryEstimate) -> bool:
        """Start the download of the result of a block; return whether there is room for more blocks."""

    def result(self) -> Any:
        """Return C, or its reduction, once all blocks are downloaded."""


class MatrixCollector:
    """Collects C on the host, in page-locked memory."""

    def __init__(self, work: Multiplication, allocate: Callable[[int], Bytes]) -> None:
        self._work, self._allocate = work, allocate
        self._buffer: ResultBuffer | None = None

    def collect_only(self, block: InFlightBlock, nnz: int, downloads: DownloadQueue) -> None:
        """Start the download of the C of the only block."""
        self._buffer = self._make_buffer(nnz)
        self._download(block, block.staged.rows, nnz, downloads)

    def collect(self, block: InFlightBlock, nnz: int, downloads: DownloadQueue, estimate: EntryEstimate) -> bool:
        """Start the download of a block's C, or of the rows that fit; return whether there is room for more blocks."""
        if self._buffer is None:
            self._buffer = self._make_buffer(estimate.first_capacity())
        needed = self._buffer.nnz + nnz
        if needed > self._buffer.capacity:
            downloads.complete_all()
            downloads.finish_host_work()
            if needed > estimate.most:
                self._collect_fitting(block, downloads, estimate.most)
                return False
            self._buffer.grow(estimate.grown_capacity(needed, block.staged.stop))
        self._download(block, block.staged.rows, nnz, downloads)
        return True

    def _make_buffer(self, capacity: int) -> ResultBuffer:
        return ResultBuffer((self._work.nrows, self._work.b.ncols), capacity, self._work.dtypes, self._allocate)

    def _download(self, block: InFlightBlock, rows: int, nnz: int, downloads: DownloadQueue) -> None:
        """Start the download of the first rows of a block."""
        buffer = self._buffer
        assert buffer is not None
        shift = functools.partial(buffer.shift_offsets, buffer.rows, rows, buffer.nnz)
        block.set_target(buffer.add_rows(rows, nnz), lambda done: [shift, *done.slot.take_host_work()])
        downloads.add_packing(block)

    def _collect_fitting(self, block: InFlightBlock, downloads: DownloadQueue, most: int) -> None:
        """Start the download of the rows of a block that fit in `most` entries of C; they are the last rows."""
        buffer, rows = self._buffer, block.staged.rows
        assert buffer is not None
        ends = np.empty(rows, self._work.dtypes.pointer)
        block.slot.download(DownloadTarget(rows, 0, ends, buffer.indices[:0], buffer.data[:0]))
        for stage in block.slot.wait():
            if stage.name != "download":  # reported when the entries are downloaded
                downloads.report(stage)
        fitting = int(np.searchsorted(ends, most - buffer.nnz, side="right"))
        if fitting == 0 and buffer.rows == 0:
            fitting = 1
        if fitting:
            nnz = int(ends[fitting - 1])
            buffer.grow(max(buffer.nnz + nnz, buffer.capacity))
            self._download(block, fitting, nnz, downloads)

    def result(self) -> CSR:
        """Return C."""
        assert self._buffer is not None
        return self._buffer.matrix()


class PartCollector:
    """Collects the reductions of the blocks of C."""

    def __init__(self, work: Multiplication) -> None:
        self._work = work
        self._parts: list[PartialReduction] = []

    def collect_only(self, block: InFlightBlock, nnz: int, downloads: DownloadQueue) -> None:
        """Reduce the C of the only block."""
        block.slot.reduce(self._work.rows.first_row)
        block.set_target(None, self._receive)
        downloads.add(block)

    def collect(self, block: InFlightBlock, nnz: int, downloads: DownloadQueue, estimate: EntryEstimate) -> bool:
        """Reduce the C of a block; there is always room for more."""
        self.collect_only(block, nnz, downloads)
        return True

    def _receive(self, block: InFlightBlock) -> HostWork:
        """Take the downloaded reduction of a block; the device itself adds column sums."""
        if self._work.reduction != "column_sums":
            self._parts.append(block.slot.take_part())
        return []

    def result(self) -> PartialReduction:
        """Return the reduction of all blocks."""
        assert self._work.reduction is not None
        return combine(self._work.reduction, self._parts)
