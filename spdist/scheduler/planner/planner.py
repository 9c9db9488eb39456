"""From two stored matrices to a `Plan`, in bounded memory.

Three streaming passes, none holding a matrix: the row lengths of B (4 bytes a row), nnz(C) of a sample of rows, and a
scan over A's columns that counts products and distinct rows of B and ends a block when a bound is reached. If GPUs
reduce C, which does not leave them then, there is no sample, and entries of C bound nothing.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from spdist.errors import InputError, MemoryBoundError, SpdistError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.units import format_bytes
from spdist.matrices.checks import check_canonical, check_product_shapes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import Int64Array, blocksize, result_dtype
from spdist.scheduler.planner.candidates import (
    Assembler,
    predicted_seconds,
    tapered,
    with_fewer_reads,
    with_more_in_flight,
    with_own_rows_of_b,
)
from spdist.scheduler.planner.cut_rows import BlockCosts, BlockRecord, BlockTable, block_table
from spdist.scheduler.planner.estimate import NO_COMPRESSION, Estimate, RowLimits, Survey, row_limits
from spdist.scheduler.planner.plan import Block, Plan, even_bounds
from spdist.scheduler.planner.remote_readers import RemoteReaders
from spdist.scheduler.planner.request import PlanRequest, operand
from spdist.scheduler.planner.row_scan import RowScan
from spdist.scheduler.planner.sampling import count_row, sample_rows
from spdist.scheduler.planner.stored_rows import Lengths, check_end_offsets, check_rows, even_rows, row_lengths
from spdist.scheduler.planner.tuning import PlannerTuning
from spdist.scheduler.planner.worker_memory import (
    A_ROW_BYTES,
    C_ROW_BYTES,
    MASK_ROW_BYTES,
    MemoryDivision,
    WorkerMemory,
)
from spdist.storage.matrix import StoredMatrix

DEFAULT_TUNING = PlannerTuning()
"""Tuning that `make_plan` and `will_be_resident` use by default."""
COUNTED_COLUMNS_SHARE = 8
"""Entries of single rows of C are counted where a byte for each of its columns is at most this part of the limit."""


def make_plan(request: PlanRequest, readers: RemoteReaders | None = None, tuning: PlannerTuning | None = None) -> Plan:
    """Cut A @ B so that every worker stays within the memory limit.

    `readers`: processes that read parts of large matrices; they must have started. The plan is the same with and
    without them. They are not used if a matrix is in the memory of this process.
    Returns the same on every machine.
    Raises `MemoryBoundError` if the smallest block does not fit; says how much is needed.
    Raises `InputError` if the shapes do not fit, or the grid has more blocks than there are rows or columns.
    Raises `MatrixError` if offsets or columns of A or B are out of range, or their rows are not sorted.
    """
    tuning = (tuning or DEFAULT_TUNING).within(request.host_bytes, count_cpus())
    a, b, scan = request.a, request.b, tuning.scan
    parts = max(1, min(scan.parts, a.nnz // scan.part_entries)) if request.grid is None else 1
    b_lengths, limits = _checked_lengths(request)
    if request.in_process:
        readers = None
    with ThreadPoolExecutor(1) as pool:
        even = pool.submit(even_rows, a, parts, b_lengths if a == b else None) if parts > 1 else None
        source = _PlanSource(request, b_lengths, limits, readers, tuning)
        if not request.writes_c and request.on_gpus_alone and not limits.upper:
            with contextlib.suppress(MemoryBoundError):  # the plan from a sample fits, or raises the error
                plan = source.plan(NO_COMPRESSION, [0, a.nrows] if even is None else even.result(), c_on_host=False)
                if not any(block.split for block in plan.blocks):  # partial products are added on the host
                    return plan
        if request.survey is None:
            sample_readers = readers if parts > 1 else None  # of a small A there is not enough to read
            estimate = sample_rows(a, b, b_lengths, triangle=limits.upper, readers=sample_readers, tuning=tuning.sample)
        else:
            estimate = request.survey.estimate
        return source.plan(estimate, [0, a.nrows] if even is None else even.result(), c_on_host=True)


def survey(request: PlanRequest) -> Survey:
    """Look at lengths and samples of rows, as `make_plan` does at first; for errors see there."""
    tuning = DEFAULT_TUNING.within(request.host_bytes, count_cpus())
    b_lengths, limits = _checked_lengths(request)
    estimate = sample_rows(request.a, request.b, b_lengths, triangle=limits.upper, tuning=tuning.sample)
    return Survey(b_lengths, limits, estimate)


def _checked_lengths(request: PlanRequest) -> tuple[Lengths, RowLimits]:
    """Check operands and grid; return the lengths of B's rows, and the limits of C's rows."""
    a, b = request.a, request.b
    if request.survey is not None:
        return request.survey.b_lengths, request.survey.limits
    check_operands(a, b, request.grid)
    b_lengths = row_lengths(b)
    check_end_offsets(a)
    if not b.is_known_canonical:
        b.check()
    return b_lengths, row_limits(request.spec, a, b, b_lengths)


@dataclass(frozen=True)
class _PlanSource:
    """Facts about a product that are known before its rows are cut."""

    request: PlanRequest
    b_lengths: Lengths
    limits: RowLimits
    readers: RemoteReaders | None
    tuning: PlannerTuning

    def plan(self, estimate: Estimate, bounds: list[int], *, c_on_host: bool) -> Plan:
        """Return the best plan under an estimate of C, from a scan of parts of A that begin at `bounds`."""
        request, tuning = self.request, self.tuning
        memory = WorkerMemory(request, self.limits, estimate, request.host_bytes, c_on_host, tuning)
        lengths = self.b_lengths, self.limits.mask_lengths
        scan = RowScan(request.a, request.b, request.spec.mask, *lengths, bounds, self.readers, tuning.scan)
        plan = PlanSearch(scan).best(memory)
        return plan.through_gpu(request.memory_limit) if request.on_gpu else plan


def will_be_resident(request: PlanRequest, tuning: PlannerTuning | None = None) -> bool:
    """Guess whether the plan of the same request will keep B resident on the workers.

    Returns true if B is small and, if GPUs multiply, some Zarr chunks of A each need so much of B that blocks which
    read their own rows of it would not be faster. False if in doubt, or if A cannot be read.
    """
    residency = (tuning or DEFAULT_TUNING).residency
    nbytes = operand(request.b).nbytes + request.b.nnz * request.cast_bytes.b
    if not request.cuts_rows_only or nbytes > residency.small_share * request.host_bytes:
        return False
    most = (1 + residency.most_reread * residency.most_joined) / residency.least_blocks
    try:
        return not request.on_gpu or _needed_share(request.a, request.b, residency.sampled_chunks) > most
    except SpdistError:
        return False  # `make_plan` raises it


def _needed_share(a: StoredMatrix, b: StoredMatrix, samples: int) -> float:
    """Return the share of B's Zarr chunks that one Zarr chunk of A needs: the mean of some from all over A."""
    rows = max(1, -(-b.nrows // max(b.indices.nchunks, 1)))
    needed = np.zeros((samples, b.nrows // rows + 1), bool)
    for sample, k in enumerate(np.arange(samples) * a.indices.nchunks // samples):
        columns = a.read_indices(int(k) * a.indices.chunk, min(int(k + 1) * a.indices.chunk, a.nnz))
        needed[sample, np.clip(columns // rows, 0, needed.shape[1] - 1)] = True
    return float(needed.sum(axis=1).mean()) / max(b.indices.nchunks, 1)


def check_operands(a: StoredMatrix, b: StoredMatrix, grid: tuple[int, int, int] | None) -> None:
    """Refuse operands whose shapes do not fit, or a grid of more blocks than there are rows or columns.

    `grid`: (int, int, int), optional: numbers of row, inner and column blocks.
    Raises `MatrixError` if one is stored in blocks and the other is not, or in blocks that do not fit.
    """
    if {blocksize(a.dtype), blocksize(b.dtype)} != {None}:
        result_dtype(a.dtype, b.dtype)
    check_product_shapes(a.shape, b.shape)
    if grid is None:
        return
    for count, size, what in zip(grid, (a.nrows, a.ncols, b.ncols), ("row", "inner", "column"), strict=True):
        if count < 1 or count > max(size, 1):
            raise InputError(f"grid {grid}: {count} {what} blocks of {size:,} {what}s; ask for 1 to {max(size, 1):,}")


# -- the search --------------------------------------------------------------------------------------------------------


class CutResult(NamedTuple):
    """Blocks that were cut for one division of the memory."""

    table: BlockTable
    # if B is resident and A was scanned, the same blocks with the rows of B that they would read otherwise
    b_reads: BlockTable | None = None


class ResidencyCandidate(NamedTuple):
    """The plan for a B that is resident or is not, or why the rows do not fit."""

    plan: Plan | None  # none if a block does not fit
    worst: Block | None  # the block that needs most bytes, if there is no plan
    division: MemoryDivision  # how the memory was divided in the end
    b_reads: BlockTable  # of the last `CutResult` that has it; else empty

    @property
    def needed(self) -> int:
        """Bytes held throughout, and of the worst block."""
        return self.division.reserved + (self.worst.needed if self.worst else 0)


class PlanSearch:
    """Search for the plan of least predicted time among candidates that fit.

    In a candidate B is resident or read block by block, and each thread has two blocks in flight; if these do not fit,
    there is one thread with two blocks or one. If even one row needs too much of B, the inner dimension is cut.
    """

    def __init__(self, scan: RowScan) -> None:
        self.scan = scan
        self._counted: dict[int, int] = {}
        self._checked = scan.a.is_known_canonical  # no scan has to look again whether the rows of A are sorted

    def best(self, memory: WorkerMemory) -> Plan:
        """Return the plan of least predicted time for one worker of this memory.

        Raises `MemoryBoundError` if no plan fits; names a limit that is enough.
        """
        assembler = Assembler(memory, self.scan.b_lengths)
        plans: list[Plan] = []
        attempts: list[ResidencyCandidate] = []
        for b_resident in (True, False) if memory.can_be_resident else (False,):
            attempt = self._attempt(memory, b_resident)
            if b_resident and (plan := with_own_rows_of_b(assembler, attempt.b_reads)) is not None:
                return plan
            plans += [] if attempt.plan is None else [attempt.plan]
            attempts.append(attempt)
            if plans and memory.resident_bytes <= memory.tuning.residency.small_share * memory.limit:
                break
        if not plans:
            raise self._refusal(memory, min(attempts, key=lambda attempt: attempt.needed))
        return min(plans, key=predicted_seconds)

    def _attempt(self, memory: WorkerMemory, b_resident: bool) -> ResidencyCandidate:
        """Return the candidate with as many blocks in flight as fit, and its variants that should take less time."""
        assembler = Assembler(memory, self.scan.b_lengths)
        b_reads = block_table()
        for division in memory.divisions(b_resident):
            cut = self._cut(memory, division)
            b_reads = b_reads if cut.b_reads is None else cut.b_reads
            needed = self._count_long_rows(assembler, cut.table, division.budget)
            if not len(needed) or needed.max() <= division.budget:
                plan = with_more_in_flight(memory, assembler.plan(tapered(memory, cut.table, division), division))
                return ResidencyCandidate(with_fewer_reads(assembler, plan, cut.table), None, division, b_reads)
        return ResidencyCandidate(None, assembler.worst_block(cut.table, division.budget), division, b_reads)

    def _count_long_rows(self, assembler: Assembler, table: BlockTable, budget: int) -> Int64Array:
        """Return the bytes of each block, after exact counts of rows that only their entries keep out.

        Such a row has a block of its own, unless a grid is forced. Its record in the table becomes exact.
        """
        memory, least = assembler.memory, table.copy()
        for entries in ("nnz", "uncut_nnz", "longest"):
            least[entries] = 0
        needed, without_c = (assembler.sizes(one, budget).needed(one) for one in (table, least))
        single = table["stop"] == table["start"] + 1
        if memory.row_limits.upper or self.scan.b.ncols > memory.limit // COUNTED_COLUMNS_SHARE:
            return needed
        for at in np.flatnonzero((needed > budget) & (without_c <= budget) & single).tolist():
            row = int(table["start"][at])
            if row not in self._counted:
                self._counted[row] = count_row(self.scan.a, self.scan.b, self.scan.b_lengths, row)
            exact = min(self._counted[row], int(table["longest"][at]))
            table["uncut_nnz"][at] = table["longest"][at] = exact
            table["nnz"][at] = min(exact, memory.row_limits.top_n)
        return assembler.sizes(table, budget).needed(table)

    def _fits(self, memory: WorkerMemory) -> bool:
        """Whether a worker of this memory has a plan."""
        if self._attempt(memory, False).plan is not None:
            return True
        return memory.can_be_resident and self._attempt(memory, True).plan is not None

    def _enough(self, memory: WorkerMemory) -> int:
        """Return a limit, in bytes, that is enough: the least of doublings, then of halvings of the last step.

        It is a whole number of MiB, at most a sixteenth more than the least such limit.
        """
        low = high = -(-memory.limit // 2**20)
        fits = False
        while not fits:
            low, high = high, 2 * high
            fits = self._fits(replace(memory, limit=high << 20))
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(replace(memory, limit=middle << 20)) else (middle, high)
        return high << 20

    def _refusal(self, memory: WorkerMemory, attempt: ResidencyCandidate) -> MemoryBoundError:
        """Return the error for the attempt that came nearest."""
        worst, division, request = attempt.worst, attempt.division, memory.request
        assert worst is not None
        limit = "host_limit" if request.on_gpu else "memory_limit"
        one = worst.stop == worst.start + 1
        what = f"row {worst.start:,}" if one else f"the block of rows {worst.start:,} to {worst.stop:,}"
        enough = self._enough(memory) // 2**20  # MiB
        held = "buffers, workspace and B" if division.b_resident else "buffers and workspace"
        return MemoryBoundError(
            f"{what} of A expands to {worst.products:,} products and needs {format_bytes(worst.needed)}, but "
            f"{limit}={format_bytes(memory.limit)} leaves {format_bytes(max(division.budget, 0))} for a block after "
            f"{format_bytes(division.reserved)} for {held}: raise {limit} to at least {enough}MiB"
            + (", or ask for a finer grid" if request.grid else "")
        )

    def _cut(self, memory: WorkerMemory, division: MemoryDivision) -> CutResult:
        """Cut the rows of A into blocks for which there is room."""
        request, budget = memory.request, max(division.budget, 1)
        if request.grid is not None:
            forced = np.array(even_bounds(self._row_products(memory), request.grid[0])[1:-1], np.int64)
            forced = forced if len(forced) else np.array([request.a.nrows], np.int64)
        elif (one := self._one_block(memory, division)) is not None:
            return CutResult(one)
        else:
            forced = np.empty(0, np.int64)
        if division.b_resident and request.writes_c and request.on_gpu:
            budget = min(budget, memory.tuning.blocks.gpu_bytes)
        limits = memory.row_limits
        costs = BlockCosts(
            a_entry=memory.a_entry, b_entry=memory.b_entry, b_row=memory.b_row, c_entry=memory.c_entry_on_host,
            c_row=C_ROW_BYTES, nrows=request.a.nrows, ncols=request.b.ncols,
            budget=int(budget / memory.tuning.blocks.margin), max_products=memory.block_products,
            mask_entry=memory.index_bytes, inside=limits.inside, top_n=limits.top_n, b_resident=division.b_resident,
            upper=limits.upper,
        )  # fmt: skip
        table = self.scan.blocks(costs, memory.estimate, forced, check_canonical=not self._checked)
        self._checked = True
        if not division.b_resident:
            return CutResult(table)
        b_reads = table.copy()
        table["b_bytes"] = table["b_chunks"] = 0
        return CutResult(table, b_reads)

    def _one_block(self, memory: WorkerMemory, division: MemoryDivision) -> BlockTable | None:
        """Return the one block of a small product; None if it is not small. Needs no compiled scan."""
        a, ncols, limits, tuning = memory.request.a, memory.request.b.ncols, memory.row_limits, memory.tuning.blocks
        if a.nnz > tuning.small_nnz or not a.nrows or not division.b_resident:
            return None
        rows = a.rows_indices(0, a.nrows)
        check_canonical(rows, a.url)
        products = self._products(rows)
        uncut = np.minimum(np.ceil(products * memory.estimate.row_ratios(products)), products)
        uncut = limits.entries(np.minimum(uncut, ncols).astype(np.int64), ncols)
        longest = int(limits.entries(np.minimum(products, ncols), ncols).max())
        a_bytes = rows.nnz * memory.a_entry + A_ROW_BYTES * a.nrows
        if len(limits.mask_lengths):
            a_bytes += int(limits.mask_lengths.astype(np.int64).sum()) * memory.index_bytes + MASK_ROW_BYTES * a.nrows
        products, uncut = np.ceil(memory.estimate.shares(a.nrows) * (products, uncut)).astype(np.int64)
        nnz, total = int(np.minimum(uncut, limits.top_n).sum()), int(products.sum())
        nbytes = a_bytes + max(nnz, min(longest, limits.top_n)) * memory.c_entry_on_host + a.nrows * C_ROW_BYTES
        if total > tuning.small_products or nbytes * tuning.margin > max(division.budget, 1):
            return None
        return block_table([BlockRecord(0, a.nrows, total, nnz, a_bytes, 0, 0, int(uncut.sum()), longest)])

    def _row_products(self, memory: WorkerMemory) -> Int64Array:
        """Return the products of every row that are made; only a forced grid needs them all at once."""
        a = memory.request.a
        out = np.empty(a.nrows, np.int64)
        for start, stop, offsets in a.row_blocks(8 * a.indices.chunk):
            columns = a.read_indices(int(offsets[0]), int(offsets[-1]))
            rows = CSR(offsets - int(offsets[0]), columns, columns, (stop - start, a.ncols))
            check_rows(a, rows, start, canonical=False)
            out[start:stop] = self._products(rows)
        made: Int64Array = np.ceil(out * memory.estimate.shares(a.nrows)[0]).astype(np.int64)
        return made

    def _products(self, rows: CSR) -> Int64Array:
        """Return the products of each row."""
        total = np.concatenate([[0], np.cumsum(self.scan.b_lengths[rows.indices], dtype=np.int64)])
        products: Int64Array = np.diff(total[rows.indptr])
        return products
