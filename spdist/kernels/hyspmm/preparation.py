"""Prepare blocks of hySpMM by threads, ahead of the GPU: the CPU stage, its threads and its ring of memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.kernels.cpu.arrays import CsrArrays
from spdist.kernels.cuda.pinned import Bytes, pageable
from spdist.kernels.hyspmm import workspace
from spdist.kernels.hyspmm.plan import HyspmmPlan, threads_of
from spdist.kernels.hyspmm.sort_groups import LENGTH_GROUPS, group_table
from spdist.kernels.hyspmm.workspace import BlockLayout, BlockSizes
from spdist.matrices.dtypes import Int64Array

TRIES = 1 << 14
"""Looks at whether a block is ready before the threads are asked whether they failed."""


def _bits(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values as unsigned integers, as they are only copied: Numba then compiles for few dtypes."""
    return np.ascontiguousarray(data if data.itemsize > 8 else data.view(f"u{data.itemsize}"))


@dataclass(frozen=True, eq=False)
class PreparedBlock:
    """A block as the CPU leaves it."""

    # rows of A
    start: int
    stop: int
    block: BlockSizes
    layout: BlockLayout
    sent: Bytes  # (layout.sent,) uint8: the bytes to upload
    lengths: Int64Array  # (LENGTH_GROUPS,) int64: rows of each group by their products
    end: int  # where its bytes end in the ring, counted on without wrapping around


class BlockPreparation:
    """Blocks prepared by threads, and taken and released in order.

    `allocate`: takes a number of bytes, returns at least as many: page-locked if they are uploaded. `state, ready,
    reports`: shared with the threads: see `ring.SharedState`. `ring`: (room,): memory of the prepared blocks.
    """

    def __init__(self, plan: HyspmmPlan, allocate: Callable[[int], Bytes] = pageable) -> None:
        from spdist.kernels.hyspmm import prepare, ring

        self.plan, self.code, self.ring_code = plan, prepare, ring
        blocks = len(plan.cuts) - 1
        self.state, self.ready = np.zeros(ring.STATE, np.int64), np.zeros(blocks, np.int64)
        self.reports = np.zeros((blocks, prepare.LENGTHS + LENGTH_GROUPS + 1), np.int64)
        self.room = plan.ring_bytes()
        self.ring = allocate(self.room)[: self.room]
        self.futures: list[Future[None]] = []
        if blocks > 1:
            pool = threads_of(plan.threads)
            count = min(max(plan.threads - 1, 1), blocks)  # a core for the caller
            self.futures = [pool.submit(self._work) for _ in range(count)]
        elif blocks:
            self._work()

    def _work(self) -> None:
        plan = self.plan
        a, b = (CsrArrays(m.indptr, m.indices, _bits(m.data)) for m in (plan.a, plan.b))
        values, columns = self.ring.view(b.data.dtype), self.ring.view(b.indices.dtype)
        ring = self.ring_code.Ring(values, columns, self.ring.view(plan.pointer), self.ring.view(np.uint32), self.room)
        shared = self.ring_code.SharedState(self.state, self.ready, self.reports)
        distinct = plan.variant == "distinct"
        cuts = self.code.BlockCuts(tuple(plan.counted), plan.cuts, distinct, plan.types, group_table())
        self.code.prepare_blocks(a, b, cuts, shared, ring, *plan.scratch())

    def is_ready(self, number: int) -> bool:
        """Return whether block `number` can be taken without waiting."""
        return bool(self.ready[number])

    def take(self, number: int) -> PreparedBlock:
        """Return block `number`; wait until it is ready."""
        while not self.ring_code.wait_ready(self.ready, number, TRIES):
            for future in self.futures:
                if future.done():
                    future.result()
        plan, report = self.plan, self.reports[number]
        start, stop = int(plan.cuts[number]), int(plan.cuts[number + 1])
        products = int(np.diff(plan.products_before(plan.cuts[number : number + 2]))[0])
        place, b_rows, b_entries = (int(n) for n in report[: self.code.LENGTHS])
        entries = int(plan.a.indptr[stop] - plan.a.indptr[start])
        block = BlockSizes(stop - start, entries, products, b_rows, b_entries, plan.variant == "distinct")
        layout = workspace.block_layout(block, plan.types)
        at = place % self.room
        sent, lengths = self.ring[at : at + layout.sent], report[self.code.LENGTHS : -1]
        return PreparedBlock(start, stop, block, layout, sent, lengths, place + layout.sent)

    def release(self, prepared: PreparedBlock) -> None:
        """Free the memory of a block and of all blocks before it."""
        self.ring_code.free_place(self.state, prepared.end)

    def close(self) -> None:
        """Stop the threads and wait for them."""
        self.ring_code.close(self.state)
        for future in self.futures:
            future.result()
