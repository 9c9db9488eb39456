"""The state of one job on one worker: its engine, a resident B, and the results that wait to be written."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.engine import Engine, WorkerLimits, find_engine
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.checks import check_canonical
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import blocksize, index_dtype
from spdist.scheduler.execution import worker_process
from spdist.scheduler.execution.operands.resident import ResidentMatrix
from spdist.scheduler.execution.records import BlockNumber, JobSpec, StageTiming
from spdist.scheduler.execution.telemetry import StageRecorder, TimingRecord
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.worker_memory import workload
from spdist.storage.matrix import Allocate, Held


class PartialResult(NamedTuple):
    """Rows of C of a block, summed over its pieces 0 to `piece`."""

    piece: int
    c: CSR


class WorkerContext:
    """One job on one worker; every stage takes it as its first argument.

    `gpu, gpus`: as of `kernels.engine.WorkerLimits`.
    `results`: by block number: the sum of partial products so far. A complete one waits for its commit.
    `partial_results`: by block number: the partial product of one more piece, which waits for its merge.
    `last_band`: (int, CSR) or None: consecutive rows of B that the last block read, and the position of their first
    entry in B.
    """

    def __init__(self, job: JobSpec, gpu: int | None = None, gpus: int = 1) -> None:
        self.job = job
        self.telemetry = StageRecorder()
        self.results: dict[BlockNumber, PartialResult] = {}
        self.partial_results: dict[BlockNumber, PartialResult] = {}
        self.last_band: Held | None = None
        self._b: ResidentMatrix | None = None
        self._lock = threading.Lock()
        self.engine = engine_on_worker(job)
        self.multiplier = self.engine.begin(kernel_limits(job)._replace(gpu=gpu, gpus=gpus), self._record)

    @property
    def on_gpu(self) -> bool:
        """Whether this worker multiplies on a GPU."""
        return self.engine.uses_gpu

    def gpu_peak(self) -> int:
        """Return the peak bytes of GPU memory; 0 without a GPU."""
        return self.multiplier.peak

    @property
    def allocate(self) -> Allocate | None:
        """Allocator for the arrays that blocks are read into: page-locked memory for a GPU; None means any memory."""
        return self.multiplier.allocate

    def _record(self, stage: str, row: int, begin: float, seconds: float, nbytes: int) -> None:
        self.telemetry.record(StageTiming(stage, row, begin, seconds, nbytes))

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

    def share_b(self, other: WorkerContext) -> None:
        """Use the resident B of another context of this process, which alone releases it."""
        self._b = other.resident_b()

    def take_over(self, earlier: WorkerContext) -> None:
        """Take over the GPU, the copy rates and, if B is resident, the B of a context that prefetched for this job."""
        self.telemetry.set_limits(earlier.telemetry.limits)
        self.multiplier.take_over(earlier.multiplier)
        self._b, earlier._b = earlier._b, None
        if self._b is not None and not self.job.resident:
            self._b.drop()
            self._b = None

    def release(self) -> None:
        """Release B, and what the engine holds."""
        if self._b is not None:
            self._b.drop()
        self.multiplier.close()

    # -- before the first block ----------------------------------------------------------------------------------------

    def load(self, plan: Plan) -> None:
        """Load what the blocks of a plan will need, before memory is measured; nothing that they may not need."""
        job = self.job
        if not plan.blocks or self.on_gpu:
            return
        engine = self.engine.at_first(job.product.plain)
        load_cpu_kernels(*tiny_product(job), engine, merges=any(block.split for block in plan.blocks))

    def warm_up(self) -> None:
        """Load and compile everything that the stages need, with a product of one entry."""
        job = self.job
        worker_process.keep_small_arrays(job.host_bytes)
        a, b, spec = tiny_product(job)
        if not self.telemetry.limits:
            self.telemetry.set_limits(self.multiplier.copy_rates())
        c = self.multiplier.warm_up(a, b, spec)
        self.telemetry.clear()  # timings that belong to no block
        load_row_kernels(a, b, spec, c if len(job.pieces) > 1 else None, checks=self.engine.compiles)
        for m in (job.a, job.b):
            m.rows(0, min(m.nrows, 1))
        self.telemetry.set_limits(dict.fromkeys(("preprocess", "merge", "commit", "join"), worker_process.copy_rate()))


def kernel_limits(job: JobSpec) -> WorkerLimits:
    """Return what the plan of a job leaves to the kernels of a worker."""
    work = workload(job.a, job.b, job.product, job.host_bytes, job.threads_per_kernel)
    kernels = 1 if job.threads_share_blocks else job.threads
    workspace = find_engine(job.engine).kernel_bytes(work)
    return WorkerLimits(job.memory_limit, job.host_limit, job.threads_per_kernel, kernels, workspace)


def engine_on_worker(job: JobSpec) -> Engine:
    """Return what multiplies the blocks of a job in this process."""
    chosen = find_engine(job.engine).on_worker(lambda: worker_process.gpu_name() is not None)
    return chosen.for_values(job.a.dtype)


def fix_engine(job: JobSpec, plan: Plan) -> JobSpec:
    """Return the job with the engine that all its blocks will have, if their products decide that now.

    All that the engine loads is then in memory before the first block is.
    """
    if not plan.blocks:
        return job
    counts = plan.expansion, min(block.products for block in plan.blocks)
    engine = find_engine(job.engine).settled(job.a, job.b, job.product, counts, kernel_limits(job))
    return replace(job, engine=engine.name)


def tiny_product(job: JobSpec) -> tuple[CSR, CSR, ProductSpec]:
    """Return a product of one entry for which all kernels of a job are compiled: A, B and the options."""
    a, b = (
        CSR(np.array([0, n]), np.zeros(n, index_dtype(m.ncols)), np.ones(n, m.dtype), (1, m.ncols))
        for m in (job.a, job.b)
        for n in [min(1, m.ncols)]
    )
    spec = job.product.of_rows(0, 1, None if job.product.mask is None else b)
    return CSR(a.indptr, a.indices, a.data, (1, 1)), b, spec


def load_cpu_kernels(a: CSR, b: CSR, spec: ProductSpec, engine: Engine, *, merges: bool = False) -> None:
    """Load the kernels of the CPU, or compile those that no cache has.

    `a, b`: of one row: types and sizes as `tiny_product` returns them.
    `merges`: whether partial products are merged.
    """
    c = engine.begin(WorkerLimits(), lambda *_: None).warm_up(a, b, spec)
    load_row_kernels(a, b, spec, c if merges else None, checks=engine.compiles)


def load_row_kernels(a: CSR, b: CSR, spec: ProductSpec, partial: CSR | None, *, checks: bool = True) -> None:
    """Load the kernels that check rows and, if there is a partial product, those that merge.

    `a, b`: of one row.
    `partial`: A partial product.
    `checks`: whether rows are checked by compiled kernels.
    """
    if partial is not None:
        add_partial(partial, partial, spec, is_last=False)
    if not checks:
        return
    from spdist.kernels.cpu.pattern_scan import COMPILED  # loads Numba

    for row in (a, b):
        COMPILED.offsets_rise(row.indptr, 0, 2)
        if row.nnz:
            COMPILED.columns(row.indptr, row.indices, 0, row.nnz)


CONTEXTS: dict[str, WorkerContext] = {}
"""Installed jobs of this process, by name."""


def add_partial(c: CSR, partial: CSR, spec: ProductSpec, *, is_last: bool) -> CSR:
    """Return the sum of partial products; the last one applies threshold and top-n.

    `c, partial`: the sum so far, and the partial product to add to it. The sum has as many rows as the shorter operand.
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
