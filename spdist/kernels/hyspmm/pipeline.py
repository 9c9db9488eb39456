"""The GPU stage of hySpMM: several pairs of blocks on the device at once, each with its stream."""

from __future__ import annotations

import collections
import functools
import logging
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.kernels.cuda.constants import NARROW_COLUMNS, BlockStatus
from spdist.kernels.cuda.module import c_type
from spdist.kernels.cuda.pinned import array_at, pinned
from spdist.kernels.hyspmm.plan import HyspmmPlan
from spdist.kernels.hyspmm.preparation import BlockPreparation, PreparedBlock
from spdist.kernels.hyspmm.sort_groups import kernels_of, launch_block
from spdist.kernels.hyspmm.workspace import BlockLayout
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array

logger = logging.getLogger("spdist")


class BlockSlot(NamedTuple):
    """Device memory for one pair of blocks, its stream, an event, and page-locked words for its status."""

    memory: Any
    stream: Any
    event: Any
    status: Int64Array


class HostResult:
    """C on the host, in page-locked memory that grows if the estimate of its entries was too low.

    `slots`: their streams are waited for before memory grows.
    """

    def __init__(self, plan: HyspmmPlan, slots: list[BlockSlot]) -> None:
        from spdist.kernels.hyspmm import prepare

        self.code = prepare
        self.plan, self.slots = plan, slots  # without a reference cycle, pinned memory is freed at once
        self.index, self.dtype = plan.b.indices.dtype, plan.dtype
        self.indptr = array_at(pinned(8 * (plan.a.nrows + 1)), 0, plan.a.nrows + 1, np.int64)
        self.indptr[0] = 0
        self.local = array_at(pinned(plan.pointer.itemsize * plan.a.nrows), 0, plan.a.nrows, plan.pointer)
        self.bound = min(plan.total, plan.a.nrows * plan.b.ncols)
        self.capacity = self.nnz = self.products = 0
        self.indices: npt.NDArray[Any] = np.empty(0, self.index)
        self.data: npt.NDArray[Any] = np.empty(0, self.dtype)
        if self.bound * (self.index.itemsize + self.dtype.itemsize) <= plan.tuning.small_result:
            self._grow(self.bound)

    def _grow(self, capacity: int) -> None:
        indices = array_at(pinned(capacity * self.index.itemsize), 0, capacity, self.index)
        data = array_at(pinned(capacity * self.dtype.itemsize), 0, capacity, self.dtype)
        if self.nnz:
            for slot in self.slots:
                slot.stream.synchronize()
            indices[: self.nnz] = self.indices[: self.nnz]
            data[: self.nnz] = self.data[: self.nnz]
        self.capacity, self.indices, self.data = capacity, indices, data

    def add(self, entries: int, products: int) -> int:
        """Reserve room for a block's entries, sums of `products` products; return the place of its first entry in C."""
        place = self.nnz
        self.products += products
        if place + entries > self.capacity:
            expected = (place + entries) * self.plan.total // max(self.products, 1)
            self._grow(min(max(int(self.plan.tuning.margin * expected), place + entries), self.bound))
        self.nnz += entries
        return place

    def shift(self, start: int, stop: int, place: int) -> None:
        """Turn the offsets of rows [start, stop) inside their block, which goes to `place`, into offsets of C."""
        self.code.shift(self.local, start, stop, place, self.indptr)

    def matrix(self) -> CSR:
        """Return C."""
        shape = self.plan.a.nrows, self.plan.b.ncols
        return CSR(self.indptr, self.indices[: self.nnz], self.data[: self.nnz], shape)


@functools.cache
def _stream(device: int, number: int) -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


class BlockPipeline:
    """Upload, multiply and download blocks, `plan.pairs` of them at once.

    `in_flight`: launched blocks whose number of entries the host does not know yet, oldest first.
    `downloading`: rows, and first place in C, of blocks that are being downloaded.
    """

    def __init__(self, plan: HyspmmPlan) -> None:
        import cupy

        self.cuda, self.plan = cupy.cuda, plan
        device = cupy.cuda.runtime.getDevice()
        key = "u32" if plan.b.ncols <= NARROW_COLUMNS else "u64"
        self.kernels = kernels_of(device, *map(c_type, (plan.dtype, plan.b.indices.dtype, plan.pointer)), key)
        status = array_at(pinned(8 * len(BlockStatus) * plan.pairs), 0, len(BlockStatus) * plan.pairs, np.int64)
        self.slots = [
            BlockSlot(
                cupy.cuda.alloc(plan.budget),
                _stream(device, i),
                cupy.cuda.Event(disable_timing=True),
                status[2 * i : 2 * i + 2],
            )
            for i in range(plan.pairs)
        ]
        cupy.cuda.get_current_stream().synchronize()  # earlier users of the memory are done
        self.result = HostResult(plan, self.slots)
        self.in_flight: collections.deque[tuple[BlockSlot, PreparedBlock]] = collections.deque()
        self.downloading: collections.deque[tuple[int, int, int]] = collections.deque()

    def synchronize(self) -> None:
        """Wait for all streams."""
        for slot in self.slots:
            slot.stream.synchronize()

    def run(self) -> CSR:
        """Return C."""
        plan = self.plan
        blocks = BlockPreparation(plan, pinned)
        count = len(plan.cuts) - 1
        number = 0
        try:
            while number < count or self.in_flight:
                has_room = number < count and len(self.in_flight) < plan.pairs
                if self.in_flight and not (has_room and blocks.is_ready(number)):
                    blocks.release(self.finish())
                elif has_room:
                    self.start(self.slots[number % plan.pairs], blocks.take(number))
                    number += 1
        finally:
            self.synchronize()
            blocks.close()
        while self.downloading:
            self.result.shift(*self.downloading.popleft())
        logger.info("hyspmm: %d blocks, %s, %d pairs of %d bytes", count, plan.variant, plan.pairs, plan.budget)
        return self.result.matrix()

    def start(self, slot: BlockSlot, prepared: PreparedBlock) -> None:
        """Upload a block to a slot whose memory is free, and launch its kernels."""
        runtime, stream, layout = self.cuda.runtime, slot.stream, prepared.layout
        base = int(slot.memory.ptr)
        runtime.memcpyAsync(base, prepared.sent.ctypes.data, layout.sent, runtime.memcpyHostToDevice, stream.ptr)
        runtime.memsetAsync(base + layout.counts, 0, layout.end - layout.counts, stream.ptr)
        with stream:
            addresses = BlockLayout(*(base + offset for offset in layout))
            launch_block(self.kernels, prepared.block, prepared.lengths.tolist(), addresses, self.plan.b.ncols)
        self.download(slot, layout.status, slot.status)
        slot.event.record(stream)
        self.download(
            slot, layout.c_indptr + self.plan.pointer.itemsize, self.result.local[prepared.start : prepared.stop]
        )
        self.in_flight.append((slot, prepared))

    def download(self, slot: BlockSlot, offset: int, target: npt.NDArray[Any]) -> None:
        """Start a copy from byte `offset` of the slot's memory to page-locked `target`, whose length says how much."""
        runtime = self.cuda.runtime
        source = int(slot.memory.ptr) + offset
        runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, runtime.memcpyDeviceToHost, slot.stream.ptr)

    def finish(self) -> PreparedBlock:
        """Wait for the oldest block's number of entries, start the download of its C, and return the block."""
        slot, prepared = self.in_flight.popleft()
        slot.event.synchronize()
        entries, not_canonical = slot.status.tolist()
        if not_canonical:
            raise MatrixError(
                f"B: a row that rows {prepared.start:,} to {prepared.stop - 1:,} of A refer to is not sorted, holds a "
                f"duplicate, or has a column outside [0, {self.plan.b.ncols:,}): pass B in canonical form"
            )
        result, layout = self.result, prepared.layout
        place = result.add(entries, prepared.block.products)
        if entries:
            self.download(slot, layout.c_columns, result.indices[place : place + entries])
            self.download(slot, layout.c_values, result.data[place : place + entries])
        if len(self.downloading) >= self.plan.pairs:  # this stream has copied all of its block before this one
            result.shift(*self.downloading.popleft())
        self.downloading.append((prepared.start, prepared.stop, place))
        return prepared
