"""Bytes that a product takes on a worker: for each entry, for each block, and throughout."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cpu.workspace import fused_workspace
from spdist.kernels.engine import Workload, find_engine
from spdist.matrices.dtypes import Int64Array, index_dtype
from spdist.scheduler.planner.cut_rows import BlockTable
from spdist.scheduler.planner.estimate import Estimate, RowLimits
from spdist.scheduler.planner.memory import block_budget
from spdist.scheduler.planner.plan import PlannedOperand
from spdist.scheduler.planner.request import PlanRequest, operand
from spdist.scheduler.planner.tuning import PlannerTuning
from spdist.storage.direct.object_chunks import BYTES_AT_ONCE, most_moving
from spdist.storage.matrix import READ_CHUNKS, StoredMatrix
from spdist.storage.product_spec import StoredProductSpec
from spdist.stores.registry import at

READ_COPIES = 3
"""Copies of a Zarr chunk in memory while it is read: encoded, decoded, and in the array that takes its entries."""

ALLOCATOR_SHARE, ALLOCATOR_BYTES = 12, 16 << 20
"""Bytes that the allocator keeps for reuse: one part in `ALLOCATOR_SHARE` of the limit, at most `ALLOCATOR_BYTES`."""

B_ROW_BYTES = 24
"""Bytes of a row of B besides its entries."""

B_START_BYTES = 8
"""Bytes more of a row of B if kernels enter it at the diagonal."""

A_ROW_BYTES = 16
"""Bytes of a row of A besides its entries."""

C_ROW_BYTES = 8
"""Bytes of a row of C besides its entries."""

MASK_ROW_BYTES = 8
"""Bytes of a row of the mask besides its entries."""

RENUMBER_BYTES = 12
"""Bytes more of an entry of A while its column is renumbered to the block's rows of B."""

LEAST_CHUNK_LENGTH = 1 << 10
"""Least elements of C's Zarr chunks."""


class MemoryDivision(NamedTuple):
    """How a worker's memory is divided."""

    b_resident: bool  # whether all of B is resident
    threads: int  # blocks that are multiplied at once
    blocks_in_flight: int
    reserved: int  # bytes that the worker holds throughout
    budget: int  # bytes of each block in flight


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that a product takes on a worker of a given host memory."""

    request: PlanRequest
    row_limits: RowLimits
    estimate: Estimate
    limit: int  # bytes of the host's memory that the worker may use
    c_on_host: bool  # whether C reaches the host; GPUs that reduce it keep it
    tuning: PlannerTuning

    @functools.cached_property
    def a(self) -> PlannedOperand:
        """A as the plan describes it."""
        return operand(self.request.a)

    @functools.cached_property
    def b(self) -> PlannedOperand:
        """B as the plan describes it."""
        return operand(self.request.b)

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of C."""
        return self.request.spec.dtype(self.request.a, self.request.b)

    @property
    def index_bytes(self) -> int:
        """Bytes of a column index of C."""
        return index_dtype(self.request.b.ncols).itemsize

    @property
    def a_entry(self) -> int:
        """Bytes of an entry of A in a block, with its copies."""
        return self.a.entry_bytes + self.request.cast_bytes.a + RENUMBER_BYTES

    @property
    def b_entry(self) -> int:
        """Bytes of an entry of B in a block, with its copy."""
        return self.b.entry_bytes + self.request.cast_bytes.b

    @property
    def b_row(self) -> int:
        """Bytes of a row of B besides its entries."""
        return B_ROW_BYTES + (B_START_BYTES if self.row_limits.upper else 0)

    @property
    def c_entry(self) -> int:
        """Bytes of an entry of C."""
        return self.index_bytes + self.dtype.itemsize

    @property
    def c_entry_on_host(self) -> int:
        """Bytes of the host's memory that an entry of C takes."""
        return self.c_entry if self.c_on_host else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of a resident B, and of its copy in the dtype of C while that is made."""
        return self.b.nbytes + self.b.nnz * self.request.cast_bytes.b

    @property
    def usable(self) -> int:
        """Bytes that all blocks, and the memory held throughout, may take."""
        return block_budget(self.limit, 0, 1)

    @property
    def can_be_resident(self) -> bool:
        """Whether B is small enough to be resident, and not cut by a grid."""
        return self.request.cuts_rows_only and self.resident_bytes <= self.tuning.residency.most_share * self.usable

    @property
    def block_products(self) -> int:
        """Most products of a block; several threads share the product in some blocks each, if these are not tiny."""
        blocks, threads = self.tuning.blocks, self.request.threads
        if self.request.on_gpu or threads == 1:
            return blocks.gpu_products if self.request.on_gpu else blocks.cpu_products
        share = self._estimated_products() // (blocks.per_thread * threads)
        own = max(min(share, blocks.cpu_products), blocks.least_products)
        return own * threads if self.request.threads_share_blocks else own

    def _estimated_products(self) -> int:
        """Estimate the products that are made, before they are counted."""
        mean = self.estimate.row_products
        a, b = self.request.a, self.request.b
        whole = rough_products(a, b) if mean is None else mean * a.nrows
        return int(whole * self.estimate.share[0].mean())

    @functools.cached_property
    def chunk_length(self) -> int:
        """Elements of C's Zarr chunks: a power of two, more if C is large, less if the limit is small."""
        chunks = self.tuning.chunks
        most = max(self.usable // (16 * self.tuning.blocks.in_flight) // self.c_entry, 1)
        nnz = self._rough_nnz()
        many = nnz >= chunks.many * chunks.long_length
        roomy = self.request.to_objects and chunks.objects_share * BYTES_AT_ONCE <= self.usable
        least = chunks.long_length if many and (self.request.on_gpu or roomy) else chunks.length
        longest = min(max(least, 1 << (int(nnz) // chunks.most).bit_length()), chunks.longest)
        return int(min(longest, max(1 << (most.bit_length() - 1), LEAST_CHUNK_LENGTH)))

    def _rough_nnz(self) -> float:
        """Estimate nnz(C) before products are counted, as if rows were equally long."""
        a, b = self.request.a, self.request.b
        products = rough_products(a, b)
        row_products = products / max(a.nrows, 1)
        ratio = self.estimate.ratio[int(math.log2(max(row_products, 1)))]
        return float(min(products * ratio, a.nrows * min(self.row_limits.top_n, b.ncols)))

    def division(self, b_resident: bool, threads: int, blocks_in_flight: int) -> MemoryDivision:
        """Divide the memory into bytes held throughout and equal parts for blocks (hySpMM equation 5)."""
        reserved = self.reserved(b_resident, threads, blocks_in_flight)
        budget = block_budget(self.limit, reserved, blocks_in_flight)
        return MemoryDivision(b_resident, threads, blocks_in_flight, reserved, budget)

    def divisions(self, b_resident: bool) -> Iterator[MemoryDivision]:
        """Yield divisions of the memory into fewer and fewer parts, which are larger and larger.

        The first has as many threads as leave half of the memory besides B to blocks; the last one has one.
        """
        b_bytes = self.resident_bytes if b_resident else 0
        threads = self.request.threads
        while threads > 1:
            division = self.division(b_resident, threads, self.usual_in_flight(threads))
            if 2 * (division.reserved - b_bytes) <= self.usable - b_bytes:
                yield division
                break
            threads //= 2
        yield self.division(b_resident, 1, self.tuning.blocks.in_flight)
        yield self.division(b_resident, 1, 1)

    def usual_in_flight(self, threads: int) -> int:
        """Return the default number of blocks in flight on a worker; memory and small blocks may change it."""
        blocks = self.tuning.blocks
        if threads == 1 or not self.request.threads_share_blocks:
            return blocks.in_flight * threads
        return blocks.shared_in_flight if threads < blocks.many_threads else blocks.many_in_flight

    def reserved(self, b_resident: bool, threads: int, blocks_in_flight: int) -> int:
        """Return the bytes held throughout: resident B, kernels' workspace, read buffers, parts of C's Zarr chunks."""
        reading = READ_COPIES * (self.a.read_bytes + (0 if b_resident else READ_CHUNKS * self.b.read_bytes))
        writing = 2 * blocks_in_flight * self.chunk_length * self.c_entry
        resident = self.resident_bytes if b_resident else 0
        moving = self._moving_objects()
        allocator = min(self.limit // ALLOCATOR_SHARE, threads * ALLOCATOR_BYTES)
        kernels = (
            find_engine(self.request.engine)
            .for_values(self.request.a.dtype)
            .workspace_bytes(self._work(b_resident, threads))
        )
        return allocator + resident + kernels + min(threads, blocks_in_flight) * reading + writing + moving

    def _moving_objects(self) -> int:
        """Return the most bytes of encoded Zarr chunks that are transferred from and to object stores at once."""
        operands = [m for m in (self.request.a, self.request.b) if at(m.url).transfers_chunks]
        longest = [max(m.indices.chunk_nbytes, m.data.chunk_nbytes) for m in operands]
        longest += [self.chunk_length * max(self.dtype.itemsize, self.index_bytes)] if self.request.to_objects else []
        return most_moving(max(longest)) if longest else 0

    def _work(self, b_resident: bool, threads: int) -> Workload:
        """Return what the worker's kernels do at once in `threads` threads."""
        b, limits = self.request.b, self.row_limits
        # One kernel in several threads has scratch memory; kernels of a block each have none.
        kernels, threads_each = (1, threads) if self.request.threads_share_blocks else (threads, 1)
        work = workload(self.request.a, b, self.request.spec, self.limit, threads_each)
        rows = 0
        if limits.longest:
            top, sizes = min(limits.top_n, limits.longest), (self.dtype.itemsize, self.index_bytes)
            rows = fused_workspace(limits.longest, limits.longest_mask_row, top, *sizes, threads_each, b.nrows)
        starts = B_START_BYTES * b.nrows if limits.upper and b_resident else 0
        return replace(work, kernels=kernels, row_bytes=rows, shared_bytes=starts)

    def c_bytes(self, table: BlockTable, entries: str) -> Int64Array:
        """Return the bytes of each block's C, from one of the fields that count its entries; its longest row fits."""
        margin = self.tuning.blocks.margin
        longest = np.minimum(table["longest"], self.row_limits.top_n if entries == "nnz" else self.request.b.ncols)
        of_entries = np.maximum((table[entries] * margin).astype(np.int64), longest) * self.c_entry_on_host
        nbytes: Int64Array = of_entries + C_ROW_BYTES * (table["stop"] - table["start"])
        return nbytes


def rough_products(a: StoredMatrix, b: StoredMatrix) -> float:
    """Estimate the products before they are counted, as if the rows of B were equally long."""
    return a.nnz * b.nnz / max(b.nrows, 1)


def workload(a: StoredMatrix, b: StoredMatrix, spec: StoredProductSpec, limit: int, threads: int) -> Workload:
    """Return what a kernel does in `threads` threads, without masks and cuts of rows."""
    return Workload(a, b, spec.dtype(a, b), spec.plain, limit, threads)
