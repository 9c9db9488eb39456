"""Candidate plans: a plan from a table of blocks, and the variants of one that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from spdist.matrices.dtypes import Int64Array, blocksize
from spdist.scheduler.planner.cut_rows import (
    BlockRecord,
    BlockTable,
    block_records,
    block_table,
    joined_records,
)
from spdist.scheduler.planner.memory import block_budget
from spdist.scheduler.planner.plan import Block, Plan, PlannedOperand, even_bounds
from spdist.scheduler.planner.stored_rows import Lengths
from spdist.scheduler.planner.worker_memory import C_ROW_BYTES, MemoryDivision, WorkerMemory

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class BlockSizes:
    """Cuts of the inner dimension and of B's columns, and the bytes of each block under them."""

    # bounds of the inner dimension and of B's columns
    inner: Bounds
    columns: Bounds
    split: npt.NDArray[np.bool_]  # (blocks,) bool: whether the block uses these cuts
    # (blocks,) int64: bytes of the rows of B that are in memory at once, and of C
    b_bytes: Int64Array
    c_bytes: Int64Array

    def needed(self, table: BlockTable) -> Int64Array:
        """Return the bytes of each block: `Block.needed`."""
        total: Int64Array = table["a_bytes"] + self.b_bytes + self.c_bytes
        return total


@dataclass(frozen=True)
class Assembler:
    """Turns tables of blocks into plans."""

    memory: WorkerMemory
    b_lengths: Lengths  # (nrows of B,) integers: weights by which the inner dimension is cut

    def sizes(self, table: BlockTable, budget: int) -> BlockSizes:
        """Return the bytes of each block under the cuts that the worst block needs."""
        inner, columns = self._bounds(table, budget)
        pieces = (len(inner) - 1) * (len(columns) - 1)
        b_bytes, c_bytes = table["b_bytes"], self.memory.c_bytes(table, "nnz")
        split = (table["a_bytes"] + b_bytes + c_bytes > budget) | (self.memory.request.grid is not None)
        split &= pieces > 1
        # One slice of B at a time, but the sum so far, the partial product and their sum together, none of them cut.
        uncut = 3 * self.memory.c_bytes(table, "uncut_nnz")
        b_bytes, c_bytes = np.where(split, -(-b_bytes // pieces), b_bytes), np.where(split, uncut, c_bytes)
        return BlockSizes(inner, columns, split, b_bytes, c_bytes)

    def _bounds(self, table: BlockTable, budget: int) -> tuple[Bounds, Bounds]:
        """Return the cuts of the inner dimension and of B's columns: forced, or as many as the worst block needs."""
        grid, (_, inner), (_, ncols) = self.memory.request.grid, self.memory.a.shape, self.memory.b.shape
        if grid is not None:
            forced = even_bounds(self.b_lengths + 1, grid[1]) if grid[1] > 1 else (0, inner)
            return forced, tuple(i * ncols // grid[2] for i in range(grid[2] + 1))
        rest = table["a_bytes"] + 3 * self.memory.c_bytes(table, "uncut_nnz")
        whole = table["a_bytes"] + table["b_bytes"] + self.memory.c_bytes(table, "nnz")
        over = (whole > budget) & (rest < budget)
        if not over.any():
            return (0, inner), (0, ncols)
        parts = int(np.max(-(-table["b_bytes"][over] // np.maximum(budget - rest[over], 1)))) + 1
        return even_bounds(self.b_lengths + 1, min(parts, inner)), (0, ncols)

    def plan(self, table: BlockTable, division: MemoryDivision) -> Plan:
        """Return the plan of these blocks."""
        memory, request = self.memory, self.memory.request
        sizes = self.sizes(table, division.budget)
        blocks = self._blocks(table, sizes, division.budget)
        c = PlannedOperand(
            (request.a.nrows, request.b.ncols),
            sum(block.nnz for block in blocks),
            memory.dtype.itemsize,
            memory.chunk_length * memory.c_entry,
            blocksize(memory.dtype) or (1, 1),
        )
        return Plan(
            memory.a, memory.b, c, request.engine, memory.limit, division.reserved, division.blocks_in_flight,
            division.b_resident, memory.chunk_length, sizes.inner, sizes.columns, blocks,
            sum(block.products for block in blocks),
            memory.limit, counted=not memory.row_limits.upper, threads=division.threads,
            threads_share_blocks=division.threads > 1 and request.threads_share_blocks,
        )  # fmt: skip

    def _blocks(self, table: BlockTable, sizes: BlockSizes, budget: int) -> tuple[Block, ...]:
        chosen = zip(
            block_records(table), sizes.split.tolist(), sizes.b_bytes.tolist(), sizes.c_bytes.tolist(), strict=True
        )
        return tuple(self._block(*each, budget) for each in chosen)

    def worst_block(self, table: BlockTable, budget: int) -> Block:
        """Return the block that needs most bytes; the others are not made."""
        sizes = self.sizes(table, budget)
        at = int(sizes.needed(table).argmax())
        (record,) = block_records(table[at : at + 1])
        return self._block(record, bool(sizes.split[at]), int(sizes.b_bytes[at]), int(sizes.c_bytes[at]), budget)

    def _block(self, record: BlockRecord, split: bool, b_bytes: int, c_bytes: int, budget: int) -> Block:
        """Return one block, with room for as many entries of C as the budget leaves."""
        memory, rows = self.memory, record.stop - record.start
        room = _entries_in(memory, budget - record.a_bytes - b_bytes, rows, split=split)
        expected = int((record.uncut_nnz if split else record.nnz) * memory.tuning.blocks.margin)
        capacity = max(room, expected)
        most = rows * memory.b.shape[1]
        bound = most if memory.row_limits.upper else min(record.products, most)  # a triangle's products are estimated
        return Block(
            record.start, record.stop, split, record.products, record.nnz, max(1, min(capacity, bound)),
            record.a_bytes, b_bytes, c_bytes, record.b_chunks * memory.b.read_bytes,
        )  # fmt: skip


def join_blocks(
    memory: WorkerMemory, table: BlockTable, budget: int, most: int | None = None, products: Int64Array | None = None
) -> BlockTable:
    """Join neighbouring blocks while they fit a larger budget, without another scan of A.

    `table`: rows of B that two joined blocks both need count twice.
    `budget`: most bytes of a joined block.
    `most`: most blocks that become one; by default any number.
    `products`: (blocks,) int64, optional: most products of a joined block that ends with this block; by default
    `WorkerMemory.block_products`.
    Returns at most as many blocks, which cover the same rows.
    """
    joined: list[BlockRecord] = []
    count = 0
    bounds = [memory.block_products] * len(table) if products is None else products.tolist()
    for record, bound in zip(block_records(table), bounds, strict=True):
        both = joined_records(joined[-1], record) if joined else record
        entries = max(both.nnz, min(both.longest, memory.row_limits.top_n))
        nbytes = both.a_bytes + both.b_bytes + entries * memory.c_entry_on_host
        nbytes += (both.stop - both.start) * C_ROW_BYTES
        fits = nbytes * memory.tuning.blocks.margin <= budget and both.products <= bound
        count += 1
        if joined and fits and (most is None or count <= most):
            joined[-1] = both._replace(b_chunks=min(both.b_chunks, memory.request.b.indices.nchunks))
        else:
            joined.append(record)
            count = 1
    return block_table(joined)


def tapered(memory: WorkerMemory, table: BlockTable, division: MemoryDivision) -> BlockTable:
    """Join blocks that a GPU only reduces into ever smaller ones, so that all GPUs end at about the same time.

    A GPU is idle from the end of one block to the beginning of the next. Blocks are therefore large at first and
    small only toward the end.

    `division`: with the bytes of a joined block, `MemoryDivision.budget`.
    Returns `table` itself if C is written, a grid is forced, B is not resident, or workers without a GPU multiply too.
    """
    request, tuning = memory.request, memory.tuning.blocks
    if request.writes_c or not request.on_gpus_alone or not division.b_resident or request.grid is not None:
        return table
    left = np.cumsum(table["products"][::-1])[::-1]
    products = np.clip(left // tuning.taper, memory.block_products, tuning.gpu_reduced_products)
    return join_blocks(memory, table, division.budget, products=products)


def with_more_in_flight(memory: WorkerMemory, plan: Plan) -> Plan:
    """Put more blocks in flight if something other than the memory limit keeps blocks small: this hides latency.

    Returns with as many blocks in flight as fit the limit, up to ``BlockTuning.most_in_flight``; never fewer than
    before.
    """
    if not plan.blocks:
        return plan
    worst = max(block.needed for block in plan.blocks)
    for count in range(plan.blocks_in_flight + 1, memory.tuning.blocks.most_in_flight + 1):
        reserved = memory.reserved(plan.resident, plan.threads, count)
        if reserved + count * worst > block_budget(memory.limit, 0, 1):
            break
        plan = replace(plan, blocks_in_flight=count, reserved_memory=reserved)
    if not memory.c_entry_on_host:
        return plan
    budget = block_budget(memory.limit, plan.reserved_memory, plan.blocks_in_flight)
    return replace(plan, blocks=tuple(_within(memory, block, budget) for block in plan.blocks))


def _within(memory: WorkerMemory, block: Block, budget: int) -> Block:
    """Return a block with room for no more entries of C than a budget in bytes leaves."""
    room = _entries_in(memory, budget - block.a_bytes - block.b_bytes, block.stop - block.start, split=block.split)
    return replace(block, capacity=max(1, min(block.capacity, room)))


def _entries_in(memory: WorkerMemory, nbytes: int, rows: int, *, split: bool) -> int:
    """Return the entries of C for which there is room; a split block holds two partial products and their sum."""
    return (nbytes // (3 if split else 1) - C_ROW_BYTES * rows) // memory.c_entry


def with_fewer_reads(assembler: Assembler, plan: Plan, table: BlockTable) -> Plan:
    """Put half as many blocks in flight, twice as large, if most of the time goes into reading B again and again.

    `table`: blocks of the same rows as they were cut, before any were joined.
    Returns the plan of less predicted time: `plan`, or the plan of joined blocks.
    """
    memory = assembler.memory
    if memory.request.grid is not None or not plan.rereads:
        return plan
    if plan.blocks_in_flight != memory.usual_in_flight(plan.threads):
        return plan
    division = memory.division(plan.resident, plan.threads, max(1, plan.blocks_in_flight // 2))
    joined = assembler.plan(join_blocks(memory, table, division.budget), division)
    return min(plan, joined, key=predicted_seconds)


def with_own_rows_of_b(assembler: Assembler, b_reads: BlockTable) -> Plan | None:
    """Return a plan of blocks that each read their own rows of B, for GPUs and if these rows are neighbours.

    These blocks together do not read much less than all of B. But a resident B is read whole by every worker, while its
    GPU waits. Neighbouring blocks that would read much of each other's rows are joined.

    `b_reads`: blocks with the rows of B that they need, although B can be resident.
    Returns none if B should be resident.
    """
    memory, tuning = assembler.memory, assembler.memory.tuning.residency
    reread = int(b_reads["b_chunks"].sum()) * memory.b.read_bytes / max(memory.b.nbytes, 1) - 1
    joins = max(1, math.ceil(reread / tuning.most_reread))
    few = len(b_reads) < tuning.least_blocks * joins
    if not memory.request.on_gpu or few or joins > tuning.most_joined or reread <= -1:
        return None
    division = memory.division(False, 1, memory.tuning.blocks.in_flight)
    table = join_blocks(memory, b_reads, division.budget, joins)
    table["b_chunks"] = table["b_chunks"] * (1 + reread * len(table) / len(b_reads)) / (1 + reread)
    sizes = assembler.sizes(table, division.budget)
    if sizes.split.any() or sizes.needed(table).max() > division.budget:
        return None
    return with_more_in_flight(memory, assembler.plan(table, division))


def predicted_seconds(plan: Plan) -> float:
    """Return the wall time that one worker should need: the score by which candidates are compared."""
    return plan.seconds(1)
