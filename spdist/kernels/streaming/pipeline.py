"""C = A @ B from host memory to host memory, through a GPU that need not hold any of the three.

A is cut into blocks of rows within the memory bound of hySpMM. Each block is multiplied row by row
(`rowwise_gpu.multiply`) in a slot of the GPU's memory. Several blocks are in flight: threads prepare blocks in
page-locked memory, one block is uploaded, one is multiplied, and the C of a third is downloaded. Both directions of the
bus are busy while the GPU computes::

    threads    prepare: A's rows, and the rows of B that they need
    slot 0     upload ─▶ count, multiply ─▶ download
    slot 1               upload ─▶ count, multiply ─▶ download
    slot 2                         upload ─▶ ...

B is resident if it fits in addition to the slots. Else each block brings its rows of B: all from the first to the last
if few of these are not needed, else each needed row once.

References
----------
X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015: equations 3 and 5, and the pipeline of section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.foundation.units import format_bytes
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import PartialReduction, Reduction
from spdist.kernels.streaming.in_flight import DeviceMemory, DownloadQueue, InFlightBlock, UploadQueue
from spdist.kernels.streaming.layout import StagedBlock
from spdist.kernels.streaming.multiplication import Multiplication, RowSlice, gather_rows, plan_multiplication
from spdist.kernels.streaming.partition import (
    BLOCK_TUNING,
    COUNT_TUNING,
    BlockCutter,
    BlockTuning,
    CountedProducts,
    CountTuning,
    ExpectedProducts,
    single_block_bytes,
)
from spdist.kernels.streaming.protocols import ArenaFullError, Device, Report, Stage, ignore_stage, logger
from spdist.kernels.streaming.results import (
    NO_SAMPLE,
    Collector,
    EntryEstimate,
    MatrixCollector,
    PartCollector,
    SampleEstimate,
)
from spdist.kernels.streaming.staging import STAGING_TUNING, BlockPreparer, BlockStager, StagingTuning, WindowPreparer
from spdist.kernels.streaming.workspace import BLOCKS_IN_FLIGHT
from spdist.matrices.csr import CSR, empty
from spdist.matrices.dtypes import INT32_MAX

__all__ = ["PipelineTuning", "RowSlice", "Stage", "StreamingPipeline", "multiply", "multiply_rows", "reduce"]


@dataclass(frozen=True)
class PipelineTuning:
    """How a multiplication is cut into blocks, and how many blocks are in flight."""

    blocks_in_flight: int = BLOCKS_IN_FLIGHT  # slots on the device
    blocks_without_upload: int = 3  # slots if nothing is uploaded for a block: fewer, so that blocks can be larger
    uploaded_ahead: int = 2  # blocks that are uploaded before they are multiplied
    # up to this many entries of A and of B, and this many expected products, a multiplication is one block that brings
    # all of A and B, and no thread is woken; if its slot has room for the largest C there can be
    small_entries: int = 1 << 20
    small_products: int = 1 << 24
    # up to this many expected products, and if A lies in a resident B, no sample is multiplied: the first block, which
    # is small, says how large C will be
    unsampled_products: int = 1 << 30
    sample_rows: int = 2048  # rows of A in the sample that predicts nnz(C), evenly spaced
    # entries of A in the sample: if B is resident, and if its rows of B are uploaded with the sample
    sample_entries_resident: int = 1 << 16
    sample_entries: int = 1 << 15
    blocks: BlockTuning = BLOCK_TUNING
    counts: CountTuning = COUNT_TUNING
    staging: StagingTuning = STAGING_TUNING

    def __post_init__(self) -> None:
        if self.blocks_in_flight < 1:
            raise InputError(f"blocks_in_flight={self.blocks_in_flight} must be 1 or more")


TUNING = PipelineTuning()


class _RowTooLongError(Exception):
    """A single row does not fit its slot: its block would have held `needed` bytes when its allocation failed."""

    def __init__(self, staged: StagedBlock, needed: int) -> None:
        super().__init__(staged, needed)
        self.staged, self.needed = staged, needed


class StreamingPipeline:
    """Streams the rows of one multiplication through a device, in one block or in several. Use it once.

    Raises `MemoryBoundError` if factors and sums alone take more than half of the memory limit.
    """

    def __init__(
        self, work: Multiplication, device: Device, report: Report = ignore_stage, tuning: PipelineTuning = TUNING
    ) -> None:
        self.work, self.tuning = work, tuning
        self.memory = DeviceMemory(device, work, device.memory_limit - _reserve(device, work))
        self.collector: Collector = (
            MatrixCollector(work, device.allocate) if work.reduction is None else PartCollector(work)
        )
        self.downloads = DownloadQueue(report)
        self._loop: BlockLoop | None = None

    def run(self) -> None:
        """Multiply all rows; the collector then has the result.

        Raises `MatrixError` if offsets or columns of A or B are out of range, `MemoryBoundError` if a single row does
        not fit.
        """
        try:
            if not (self._is_small and self._run_as_one()):
                self._run_in_blocks()
        except MatrixError:
            self._close()
            CountedProducts(self.work.a, self.work.b, self.tuning.counts).upper_bound(0)  # names a bad row of A
            raise
        except BaseException:
            self._close()
            raise
        for error in self._close():
            raise error

    def _close(self) -> list[Exception]:
        """Wait for all uploads, kernels and downloads, even if some fail; return the errors."""
        if self._loop is not None:
            self._loop.close()
        return self.memory.wait() + self.downloads.close()

    @property
    def _is_small(self) -> bool:
        """Whether all rows are multiplied, and a single block takes the least time."""
        work, tuning = self.work, self.tuning
        few = max(work.a.nnz, work.b.nnz) <= tuning.small_entries and work.expects_at_most(tuning.small_products)
        return few and not work.dtypes.blocked and work.is_whole

    def _run_as_one(self) -> bool:
        """Multiply all rows as one block; return False if C might not fit in a slot."""
        work, memory, preparer = self.work, self.memory, WindowPreparer(self.work, self.memory.device)
        memory.take_slots(self.tuning.blocks_in_flight, beside_b=False)
        slot, most = memory.slots[0], ExpectedProducts(work.a, work.b).upper_bound(0)
        if not preparer.has_sound_ends or not 0 <= most <= INT32_MAX:
            return False
        if single_block_bytes(work.a, work.b, work.dtypes, most, self.tuning.blocks) > slot.size:
            return False
        memory.device.keep(None, work.dtypes)
        staged = preparer.prepare_all()
        slot.upload(staged)
        try:
            nnz = slot.multiply()
        except ArenaFullError as full:
            logger.info("one block for all rows needs more than %d bytes: multiply in several blocks", full.needed)
            return False
        self.downloads = DownloadQueue(self.downloads.report, in_caller=True)
        self.collector.collect_only(InFlightBlock(slot, staged), nnz, self.downloads)
        self.downloads.complete_all()
        return True

    def _run_in_blocks(self) -> None:
        """Multiply the rows in several blocks."""
        products = _count_products(self.work, self.tuning)
        try:
            self._loop = BlockLoop(self.work, self.memory, self.tuning, products, self.downloads)
            self._loop.run(self.collector)
        finally:
            products.cancel()


class BlockLoop:
    """Multiplies rows in blocks: while one block is multiplied, one is uploaded and others are downloaded."""

    def __init__(
        self, work: Multiplication, memory: DeviceMemory, tuning: PipelineTuning,
        products: CountedProducts | ExpectedProducts, downloads: DownloadQueue,
    ) -> None:  # fmt: skip
        self.work, self.memory, self.tuning, self.downloads = work, memory, tuning, downloads
        self._take_memory()
        memory.device.note_operands(x for m in memory.uploaded_operands(self.work) for x in (m.indices, m.data))
        self.work.rows.history.begin()
        stager = _make_stager(self.work, memory, tuning, products)
        most = 1 if memory.has_all_of(work) else tuning.uploaded_ahead
        self.uploads = UploadQueue(memory, stager, downloads, most)
        sample = _learn(self.work, memory, stager, tuning)
        self.estimate = EntryEstimate(self.work, products, sample, tuning.blocks.margin)

    def _take_memory(self) -> None:
        """Allocate the device's memory: slots, and B if it will be resident."""
        memory, tuning = self.memory, self.tuning
        few = min(tuning.blocks_in_flight, tuning.blocks_without_upload)
        memory.take_slots(few if memory.has_all_of(self.work) else tuning.blocks_in_flight, beside_b=memory.b_resident)
        if memory.b_resident:
            if memory.make_resident(self.work.b):
                return
            memory.take_slots(tuning.blocks_in_flight, beside_b=False)
        self._upload_b_with_blocks()

    def _upload_b_with_blocks(self) -> None:
        """Upload the rows of B with each block from here on."""
        self.memory.drop_b()
        self.work = self.work.with_b_as_uploaded()

    def run(self, collector: Collector) -> None:
        """Multiply all blocks, and wait until they are downloaded."""
        more = True
        while more:
            self.uploads.fill()
            block = self.uploads.take()
            if block is None:
                break
            try:
                more = self._compute(block, collector)
            except _RowTooLongError as error:
                self.uploads.recall(error.staged.start, block.staged.stop)
                self.uploads.prepare_again(self._make_room(error))
        self.downloads.complete_all()

    def close(self) -> None:
        """Drop prepared blocks; wait for threads that are preparing one."""
        self.uploads.stager.close()

    def _compute(self, block: InFlightBlock, collector: Collector) -> bool:
        """Multiply a block and start the download of its result; return whether there is room for more."""
        needed = 0
        try:
            nnz = block.multiply(self.work, self.uploads.fill_while_busy)
        except ArenaFullError as full:
            needed = full.needed
        if needed:  # not in the handler: the error's frames hold memory of the slot
            return self._split(block, needed, collector)
        return collector.collect(block, nnz, self.downloads, self.estimate)

    def _split(self, block: InFlightBlock, needed: int, collector: Collector) -> bool:
        """Multiply the halves of a block whose C does not fit in its slot."""
        start, stop, slot = block.staged.start, block.staged.stop, block.slot
        if stop - start == 1:
            raise _RowTooLongError(block.staged, needed)
        logger.info("rows %d to %d need more than %d bytes: split", start, stop - 1, slot.size)
        middle = self.uploads.stager.cutter.products.middle(start, stop)
        halves = (start, middle), (middle, stop)
        return all(self._compute(self.uploads.upload_rows(slot, *half), collector) for half in halves)

    def _make_room(self, error: _RowTooLongError) -> Sequence[tuple[int, int]]:
        """Make room for a long row: continue with a single slot, then without a resident B.

        Returns rows of prepared blocks that must be prepared again.
        """
        memory, stager = self.memory, self.uploads.stager
        self._check_room(error)
        row = self.work.rows.first_row + error.staged.start
        self.downloads.complete_all()
        for slot in memory.slots:
            slot.wait()
        recalled: list[StagedBlock] = []
        if len(memory.slots) > 1:
            logger.info("row %d needs more than a slot: one block at a time from here on", row)
        else:
            logger.info("row %d needs the room of B: blocks bring their rows of B from here on", row)
            recalled = stager.recall()
            self._upload_b_with_blocks()
            self.work.rows.history.record_b(0.0)
            preparer = BlockPreparer(self.work, memory.device, False, self.tuning.staging)
            stager = BlockStager(preparer, stager.cutter, stager.next_row)
            self.uploads.use_stager(stager)
        memory.take_slots(1, beside_b=memory.b_resident)
        stager.use_cutter(replace(stager.cutter, room=memory.slots[0].size, b_resident=memory.b_resident))
        return [(staged.start, staged.stop) for staged in recalled]

    def _check_room(self, error: _RowTooLongError) -> None:
        """Refuse a long row if no more room can be made."""
        if len(self.memory.slots) > 1 or self.memory.b_resident:
            return
        work, start, slot = self.work, error.staged.start, self.memory.slots[0]
        products = CountedProducts(work.a.rows(start, error.staged.stop), work.b, self.tuning.counts).between(0, 1)
        raise MemoryBoundError(
            f"row {work.rows.first_row + start:,} of A expands to {products:,} products and needs more than "
            f"{format_bytes(error.needed)} on the GPU, but memory_limit={format_bytes(self.memory.memory_limit)} "
            f"leaves {format_bytes(slot.size)} for a block: raise memory_limit, or cut the inner dimension with a grid"
        )


# -- how blocks are set up ---------------------------------------------------------------------------------------------


def _reserve(device: Device, work: Multiplication) -> int:
    """Begin a multiplication on a device; return the bytes that it reserves."""
    reserved, limit = device.begin(work.spec, work.reduction, work.shape, work.dtypes.value), device.memory_limit
    if 2 * reserved > limit:
        raise MemoryBoundError(
            f"factors of rows and columns, edges, and sums of columns, take {format_bytes(reserved)} of the GPU's "
            f"{format_bytes(limit)}, of which they may take half: raise memory_limit"
        )
    return reserved


def _learns_from_first_block(work: Multiplication, memory: DeviceMemory, tuning: PipelineTuning) -> bool:
    """Return whether the first block predicts the sizes of later ones, because C is too small to be sampled first."""
    return memory.has_all_of(work) and work.is_whole and work.expects_at_most(tuning.unsampled_products)


def _count_products(work: Multiplication, tuning: PipelineTuning) -> CountedProducts | ExpectedProducts:
    """Start to count the products of A's rows unless they were planned, or the entries of A predict them."""
    if 0 < work.rows.products <= INT32_MAX and work.spec.diagonal is None:  # a triangle's are those that it keeps
        return ExpectedProducts(work.a, work.b, work.rows.products)
    expected = ExpectedProducts(work.a, work.b)
    return expected if expected.is_even(tuning.counts) else CountedProducts(work.a, work.b, tuning.counts)


def _make_stager(
    work: Multiplication, memory: DeviceMemory, tuning: PipelineTuning, products: CountedProducts | ExpectedProducts
) -> BlockStager:
    """Return the stager that cuts and prepares the blocks."""
    device, blocks = memory.device, tuning.blocks
    preparer = BlockPreparer(work, device, memory.b_resident, tuning.staging)
    growth = blocks.unprepared_growth if preparer.is_brief else blocks.growth
    cutter = BlockCutter(
        products, work.a.indptr, work.dtypes, memory.slots[0].size, device.staging_bytes, work.rows.history,
        memory.b_resident, growth, blocks,
    )  # fmt: skip
    return BlockStager(preparer, cutter, work.rows.start)


def _learn(work: Multiplication, memory: DeviceMemory, stager: BlockStager, tuning: PipelineTuning) -> SampleEstimate:
    """Predict the size of C: from blocks of an earlier call, else from a sample, else from the first block."""
    if work.rows.history.is_known:
        if stager.preparer.is_brief:
            stager.cutter.cut_large()
        return NO_SAMPLE
    if _learns_from_first_block(work, memory, tuning):
        return NO_SAMPLE
    return _learn_from_sample(work, memory, stager, tuning)


def _learn_from_sample(
    work: Multiplication, memory: DeviceMemory, stager: BlockStager, tuning: PipelineTuning
) -> SampleEstimate:
    """Multiply a sample of the rows, to predict the room that the first blocks and C need."""
    slot, history = memory.slots[0], work.rows.history
    limit = tuning.sample_entries_resident if memory.b_resident else tuning.sample_entries
    rows = work.sampled_rows(tuning.sample_rows, limit)
    sample = gather_rows(work.a, rows)
    counted = CountedProducts(sample, work.b, tuning.counts, rows)
    cutter = replace(stager.cutter, products=counted, indptr=sample.indptr)
    per_entry = counted.between(0, sample.nrows) / max(sample.nnz, 1)
    stop = cutter.last_fitting(0, cutter.room / 2)
    if not counted.between(0, stop):
        return SampleEstimate(per_entry)
    sampled = replace(work, a=sample, rows=RowSlice(history=history))  # sampled rows are not neighbours in B
    preparer = BlockPreparer(sampled, memory.device, memory.b_resident, tuning.staging)
    block = InFlightBlock(slot, preparer.prepare(0, stop, counted.between(0, stop)))
    slot.upload(block.staged)
    try:
        block.multiply(sampled)
    except ArenaFullError:
        history.assume(1 / tuning.blocks.first_share)  # C grows as blocks arrive
    slot.wait()
    estimate = SampleEstimate(per_entry, history.kept_ratio)
    if not memory.b_resident:
        _learn_share_of_b(work, stager, tuning.blocks)
    return estimate


def _learn_share_of_b(work: Multiplication, stager: BlockStager, tuning: BlockTuning) -> None:
    """Count the entries of B that a first block asks for: sampled rows share fewer rows of B than neighbours do."""
    cutter, first = stager.cutter, work.rows.start
    room = min(tuning.first_bytes, cutter.room / tuning.first_share)
    stop = replace(cutter, b_resident=True).last_fitting(first, room)
    products = cutter.products.between(first, stop)
    work.rows.history.record_b(stager.preparer.entries_of_b(first, stop) / products if products else 0.0)


# -- public functions --------------------------------------------------------------------------------------------------


def multiply(
    a: CSR, b: CSR, device: Device, *, spec: ProductSpec = PLAIN, report: Report = ignore_stage,
    tuning: PipelineTuning = TUNING,
) -> CSR:  # fmt: skip
    """Return ``a @ b`` of matrices on the host, of any sizes, within the memory limit of a device.

    Rows of A need not be sorted and may hold duplicates; rows of B are canonical. Values may be dense blocks that fit
    (`csr.block_dtype`); rows, columns and entries are then of blocks. Entries that options drop are not downloaded. C
    lies in page-locked memory, which is used again when the arrays are gone.
    Raises `MatrixError` if operands do not fit, or B is not canonical; `InputError` if the GPU has no kernels for the
    options; `MemoryBoundError` with the bytes if one row alone does not fit in the limit.
    X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
    University, 2015: equations 3 and 5, section 3.4.
    """
    return multiply_rows(a, b, device, RowSlice(), spec=spec, report=report, tuning=tuning)


def multiply_rows(
    a: CSR, b: CSR, device: Device, rows: RowSlice, *, spec: ProductSpec = PLAIN, report: Report = ignore_stage,
    tuning: PipelineTuning = TUNING,
) -> CSR:  # fmt: skip
    """Return as many whole rows of ``a @ b``, from `rows.start` on, as fit in `rows.capacity` entries; one at least.

    Calls for rows of the same C share a history. Raises `InputError` if `rows` are out of range; else as `multiply`
    does.
    """
    work = plan_multiplication(a, b, spec, None, rows)
    pipeline = StreamingPipeline(work, device, report, tuning)
    if work.is_empty:
        return empty((work.nrows, b.ncols), work.dtypes.value)
    pipeline.run()
    assert isinstance(pipeline.collector, MatrixCollector)
    return pipeline.collector.result()


def reduce(
    a: CSR, b: CSR, what: Reduction, device: Device, rows: RowSlice | None = None, *, spec: ProductSpec = PLAIN,
    report: Report = ignore_stage,
) -> PartialReduction:  # fmt: skip
    """Reduce rows of ``a @ b`` after the options are applied, without a copy of C on the host; errors as of `multiply`.

    `rows`: all rows of A, so that `start` is 0 and `capacity` None. `reduction_spec.combine` combines the parts of
    several calls.
    """
    work = plan_multiplication(a, b, spec, what, RowSlice() if rows is None else rows)
    pipeline = StreamingPipeline(work, device, report)
    if work.is_empty:
        return reduce_rows(what, empty(work.shape, work.dtypes.value), work.rows.first_row)
    pipeline.run()
    assert isinstance(pipeline.collector, PartCollector)
    return device.take_sums() if what == "column_sums" else pipeline.collector.result()
