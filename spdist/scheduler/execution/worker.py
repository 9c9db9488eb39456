"""The state of one job on one worker: its GPU, a resident B, and the results that wait to be written."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spdist.foundation.engines import GPU_ENGINES
from spdist.kernels import reduction_spec
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu.prepare import EngineOrAuto, choose
from spdist.kernels.cuda.pinned import array_at
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.streaming.history import BlockHistory
from spdist.kernels.streaming.layout import SubmatrixOffset
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, blocksize, index_dtype, number_dtype
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.operands.resident import ResidentMatrix
from spdist.scheduler.execution.records import BlockNumber, BlockOperands, BlockTask, JobSpec, StageTiming
from spdist.scheduler.execution.telemetry import StageRecorder, TimingRecord
from spdist.scheduler.planner.plan import Plan, gpu_staging
from spdist.scheduler.planner.worker_memory import engine_workspace
from spdist.storage.chunked_array import FEW, load_codecs
from spdist.storage.matrix import Allocate, Held

if TYPE_CHECKING:  # CPUs need neither
    from spdist.kernels.streaming import pipeline
    from spdist.kernels.streaming.gpu_device import Gpu


class PartialResult(NamedTuple):
    """Rows of C of a block, of which `piece` is the last piece in it."""

    piece: int
    c: CSR


class WorkerContext:
    """One job on one worker; every stage takes it as its first argument.

    `results`: by block number: the sum of partial products so far. A complete one waits for its commit.
    `partial_results`: by block number: the partial product of one more piece, which waits for its merge.
    `last_band`: (int, CSR) or None: consecutive rows of B that the last block read, and the position of their first
    entry in B.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.telemetry = StageRecorder()
        self.results: dict[BlockNumber, PartialResult] = {}
        self.partial_results: dict[BlockNumber, PartialResult] = {}
        self.last_band: Held | None = None
        self._history = BlockHistory()
        self._b: ResidentMatrix | None = None
        self._gpu: Gpu | None = None
        self._lock, self._gpu_lock = threading.Lock(), threading.Lock()
        # Dask may give a worker more threads than the plan has workspace for.
        self._kernels = threading.BoundedSemaphore(1 if job.threads_share_blocks else job.threads)

    @property
    def on_gpu(self) -> bool:
        """Whether this worker multiplies on a GPU."""
        engine = self.job.engine
        return engine in GPU_ENGINES and (engine != "hybrid" or worker_process.gpu_name() is not None)

    # -- memory --------------------------------------------------------------------------------------------------------

    def gpu(self) -> Gpu:
        """Return this worker's GPU; the first call takes its memory."""
        from spdist.kernels.cuda.pinned import bound_pinned
        from spdist.kernels.streaming.gpu_device import Gpu

        with self._lock:
            if self._gpu is None:
                bound_pinned(self.job.host_limit or None)
                # Not packed: the cores that would unpack C are busy with reading and writing.
                self._gpu = Gpu(self.job.memory_limit, staging_bytes=gpu_staging(self.job.host_limit), pack=False)
            return self._gpu

    def gpu_peak(self) -> int:
        """Return the peak bytes of GPU memory; 0 without a GPU."""
        return self._gpu.peak if self._gpu is not None else 0

    @property
    def allocate(self) -> Allocate | None:
        """Allocator for the arrays that blocks are read into: page-locked memory for a GPU; None means any memory."""
        return self._allocate_pinned if self.on_gpu else None

    def _allocate_pinned(self, count: int, dtype: np.dtype[Any]) -> ValueArray:
        dtype = np.dtype(dtype)
        return array_at(self.gpu().allocate(count * dtype.itemsize), 0, count, dtype)

    def keep_band(self, first: int, b: CSR) -> None:
        """Keep the rows of B of this block for the next one, if there is room for two blocks."""
        self.last_band = (first, b) if self.job.blocks_in_flight > 1 else None

    def resident_b(self) -> ResidentMatrix:
        """Return the resident B, which may not have been read yet.

        Values are cast once if a CPU engine would cast them for each block; such a B is not shared.
        """
        with self._lock:
            if self._b is None:
                job = self.job
                dtype = job.product.dtype(job.a, job.b)
                is_read = "b" in job.product.per_row.semiring.reads and blocksize(dtype) is None
                casts = is_read and not self.on_gpu and dtype != job.b.dtype
                check = functools.partial(check_rows, name=job.b.url)
                self._b = ResidentMatrix(job.b, check, "" if casts else job.shared_name, dtype if casts else None)
            return self._b

    def take_over(self, earlier: WorkerContext) -> None:
        """Take over the GPU, the copy rates and, if B is resident, the B of a context that prefetched for this job."""
        self.telemetry.set_limits(earlier.telemetry.limits)
        self._gpu, self._b = earlier._give_away()
        if self._b is not None and not self.job.resident:
            self._b.drop()
            self._b = None

    def _give_away(self) -> tuple[Gpu | None, ResidentMatrix | None]:
        given, self._gpu, self._b = (self._gpu, self._b), None, None
        return given

    def release(self) -> None:
        """Release B, the GPU's memory, and page-locked memory that no block uses."""
        if self._b is not None:
            self._b.drop()
        if self._gpu is not None:
            from spdist.kernels.cuda.pinned import free_pinned

            self._gpu = None
            free_pinned()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, row: int, spec: ProductSpec, offset_in_b: SubmatrixOffset | None = None
    ) -> CSR:
        """Return as many rows of ``a @ b`` as fit in `capacity` entries; messages call the first one `row`."""
        if not self.on_gpu:
            job, threads = self.job, self.job.threads_per_kernel
            with self._kernels:
                return multiply_on_cpu(a, b, capacity, cpu_engine(job), spec, threads, kernel_workspace(job))
        from spdist.kernels.streaming import pipeline

        rows = pipeline.RowSlice(0, capacity, row, offset_in_b, self._history)
        with self._gpu_lock:
            report = functools.partial(self._record_gpu_stage, row)
            return pipeline.multiply_rows(a, b, self.gpu(), rows, report=report, spec=spec)

    def reduce_on_gpu(
        self, task: BlockTask, operands: BlockOperands, what: reduction_spec.Reduction
    ) -> reduction_spec.PartialReduction:
        """Multiply a block on the GPU and return its reduction; its rows of C stay there."""
        from spdist.kernels.streaming import pipeline

        b = self.resident_b().get() if operands.b is None else operands.b
        spec = self.job.product.of_rows(task.start, task.stop, operands.mask)
        rows = pipeline.RowSlice(0, None, task.start, operands.offset_in_b, self._history)
        with self._gpu_lock:
            report = functools.partial(self._record_gpu_stage, task.start)
            return pipeline.reduce(operands.a, b, what, self.gpu(), rows, report=report, spec=spec)

    def _record_gpu_stage(self, row: int, stage: pipeline.Stage) -> None:
        """Record a stage of a GPU block; its rows are counted from `row`, where this worker's block starts."""
        timing = StageTiming(f"gpu {stage.name}", row + stage.start, stage.begin, stage.seconds, stage.nbytes)
        self.telemetry.record(timing)

    # -- before the first block ----------------------------------------------------------------------------------------

    def load(self, plan: Plan) -> None:
        """Load what the blocks of a plan will need, before memory is measured; nothing that they may not need."""
        job = self.job
        if self.on_gpu or not plan.blocks:
            return
        if max(block.nnz for block in plan.blocks) > FEW * plan.chunk:
            load_codecs()
        a, b, spec = tiny_product(job)
        engine = cpu_engine(job)
        if engine == "auto" and spec.plain and blocksize(job.a.dtype) is None:
            engine = "scipy"
        load_cpu_kernels(a, b, spec, engine, merges=any(block.split for block in plan.blocks))

    def warm_up(self) -> None:
        """Load and compile everything that the stages need, with a product of one entry."""
        job = self.job
        worker_process.keep_small_arrays(job.host_bytes)
        load_codecs()
        a, b, spec = tiny_product(job)
        if self.on_gpu:
            c = self._warm_up_gpu(a, b, spec)
            load_row_kernels(a, b, spec, c if len(job.pieces) > 1 else None)
        else:
            load_cpu_kernels(a, b, spec, cpu_engine(job), merges=len(job.pieces) > 1)
        for m in (job.a, job.b):
            m.rows(0, min(m.nrows, 1))
        self.telemetry.set_limits(dict.fromkeys(("preprocess", "merge", "commit", "join"), worker_process.copy_rate()))

    def _warm_up_gpu(self, a: CSR, b: CSR, spec: ProductSpec) -> CSR:
        from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

        if not self.telemetry.limits:
            self.telemetry.set_limits(self.gpu().copy_rates())  # before slots take the memory
        dtype = number_dtype(self.job.product.dtype(self.job.a, self.job.b))
        rowwise_gpu.compile_kernels(dtype, self.job.b.ncols, self.job.product.per_row.semiring)
        c = self.multiply_rows(a, b, 1, 0, spec)
        self.telemetry.clear()  # these timings belong to no block
        return c


def kernel_workspace(job: JobSpec) -> int:
    """Return the bytes that the plan of a job leaves to an engine that "auto" chooses."""
    return engine_workspace(job.engine, job.a, job.b, job.product, job.host_bytes, job.threads_per_kernel)


def fix_engine(job: JobSpec, plan: Plan) -> JobSpec:
    """Return the job with the engine "numba" if "auto" would load it for one of the plan's blocks.

    All that the engine loads is then in memory before the first block is.
    """
    if job.engine != "auto" or blocksize(job.a.dtype) is not None or not plan.blocks:
        return job
    facts = {"threads": job.threads_per_kernel, "workspace_limit": kernel_workspace(job)}
    counts = plan.expansion, min(block.products for block in plan.blocks)
    chosen = {choose(job.a, job.b, sort=job.product.per_row.sort, products=n, **facts)[0] for n in counts}
    return replace(job, engine="numba") if "numba" in chosen or not job.product.plain else job


def cpu_engine(job: JobSpec) -> Any:
    """Return the engine of a job on a worker without a GPU."""
    return "auto" if job.engine == "hybrid" else job.engine


def tiny_product(job: JobSpec) -> tuple[CSR, CSR, ProductSpec]:
    """Return a product of one entry for which all kernels of a job are compiled: A, B and the options."""
    a, b = (
        CSR(np.array([0, n]), np.zeros(n, index_dtype(m.ncols)), np.ones(n, m.dtype), (1, m.ncols))
        for m in (job.a, job.b)
        for n in [min(1, m.ncols)]
    )
    spec = job.product.of_rows(0, 1, None if job.product.mask is None else b)
    return CSR(a.indptr, a.indices, a.data, (1, 1)), b, spec


def load_cpu_kernels(a: CSR, b: CSR, spec: ProductSpec, engine: EngineOrAuto, *, merges: bool = False) -> None:
    """Load the kernels of the CPU, or compile those that no cache has.

    `a, b`: of one row: types and sizes as `tiny_product` returns them.
    `merges`: whether partial products are merged.
    """
    engines: tuple[EngineOrAuto, ...] = (engine,)
    if engine == "auto":
        engines = ("numba", "scipy") if spec.plain else ("numba",)
    c = [multiply_on_cpu(a, b, 1, each, spec) for each in engines][-1]
    load_row_kernels(a, b, spec, c if merges else None, engine)


def load_row_kernels(a: CSR, b: CSR, spec: ProductSpec, partial: CSR | None, engine: str = "") -> None:
    """Load the kernels that check rows and, if there is a partial product, those that merge.

    `a, b`: of one row.
    `partial`: A partial product.
    `engine`: engine whose check of rows is loaded.
    """
    if partial is not None:
        add_partial(partial, partial, spec, is_last=False)
    if engine == "scipy":
        return
    from spdist.kernels.cpu.pattern_scan import COMPILED  # loads Numba

    for row in (a, b):
        COMPILED.offsets_rise(row.indptr, 0, 2)
        if row.nnz:
            COMPILED.columns(row.indptr, row.indices, 0, row.nnz)


CONTEXTS: dict[str, WorkerContext] = {}
"""Installed jobs of this process, by name."""


def multiply_on_cpu(
    a: CSR,
    b: CSR,
    capacity: int,
    engine: EngineOrAuto,
    spec: ProductSpec,
    threads: int = 1,
    workspace_limit: int | None = None,
) -> CSR:
    """Return as many rows of ``a @ b`` as fit in `capacity` entries; dense blocks have one kernel for all engines.

    `a`: (n, k) CSR.
    `b`: (k, m) CSR: its rows are numbered by the columns of `a`.
    `capacity`: entries of C for which there is room; at least one row is returned.
    `spec`: ignored for blocks, which have the ordinary product only.
    `threads`: ignored for blocks.
    `workspace_limit`: bytes that "auto" may use beyond operands and result.
    Returns the first rows of the product.
    """
    if blocksize(a.dtype) is None:
        return cpu.multiply_rows(
            a, b, 0, capacity, engine=engine, spec=spec, threads=threads, workspace_limit=workspace_limit
        )
    from spdist.kernels.bsr import multiply_cpu as bsr_cpu  # loads Numba

    return bsr_cpu.multiply_rows(a, b, 0, capacity)


def add_partial(c: CSR, partial: CSR, spec: ProductSpec, *, is_last: bool) -> CSR:
    """Return the sum of partial products; the last one applies threshold and top-n.

    `c, partial`: the sum so far, and the partial product to add to it. If one has fewer rows, the sum has as few.
    `spec`: its semiring adds.
    `is_last`: whether `partial` is the last summand.
    """
    from spdist.kernels.bsr import multiply_cpu as bsr_cpu  # both load Numba
    from spdist.kernels.cpu.finished.merge import merge

    if blocksize(c.dtype) is not None:
        return bsr_cpu.merge(c, partial)
    c = merge(c, partial, spec)
    return cpu.cut(c, spec) if is_last else c


def check_rows(m: CSR, name: str, first_row: int = 0) -> tuple[int, int]:
    """Check that rows are canonical: columns in range and strictly rising.

    `name`: the matrix, for the error message.
    `first_row`: number of the first row, for the error message.
    Returns `low, high`: the smallest column, and one more than the largest; (0, 0) without entries.
    Raises `MatrixError` if rows are not canonical.
    """
    facts = check_canonical(m, name, first_row, threads=1)
    return facts.low, facts.high + 1


def unpublished_timings(name: str) -> tuple[int, list[TimingRecord]]:
    """Return the number of timings that a worker has published, and the other timings; for `Client.run`."""
    if name not in CONTEXTS:
        return 0, []
    telemetry = CONTEXTS[name].telemetry
    return telemetry.published, telemetry.take_timings()


def stage_totals(name: str) -> dict[str, Any]:
    """Return a worker's `StageTotal` of each stage; for `Client.run`."""
    return CONTEXTS[name].telemetry.totals if name in CONTEXTS else {}
