"""Engines of GPUs: blocks stream through a GPU, alone or beside workers without one; CuPy is imported when one runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from spdist.errors import InputError
from spdist.kernels.engine import (
    NOTHING_KNOWN,
    BlockFacts,
    Engine,
    Multiplier,
    Record,
    WorkerLimits,
    Workload,
    find_engine,
)
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import PartialReduction, Reduction
from spdist.kernels.streaming.workspace import staging_bytes
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, blocksize, number_dtype, result_dtype

if TYPE_CHECKING:
    from spdist.kernels.streaming import pipeline
    from spdist.kernels.streaming.gpu_device import Gpu


class CudaEngine(Engine):
    """One GPU for each worker."""

    name, uses_gpu, uses_cpus = "cuda", True, False
    module = "spdist.kernels.streaming.pipeline"
    alternative = "hybrid"

    def check_values(self, dtype: np.dtype[Any]) -> None:
        """Refuse values of C that the GPU does not multiply."""
        number = number_dtype(dtype)
        if blocksize(dtype) is not None and number.kind not in "fc":
            raise InputError(
                f"engine={self.name!r} multiplies float and complex values, not {number}, in blocks: choose 'auto'"
            )
        if number.kind in "iu" and number.itemsize < 4:
            raise InputError(
                f"engine={self.name!r} multiplies floats, complex values, bools, and whole numbers of 32 or 64 bits, "
                f"not {number}: choose engine='auto'"
            )

    def check_options(self, spec: ProductSpec) -> None:
        """Refuse options for which the GPU has no kernels."""
        spec.check_device()

    def kernel_bytes(self, work: Workload) -> int:
        """Return 0: no kernel runs on the CPU."""
        return 0

    def workspace_bytes(self, work: Workload) -> int:
        """Return the bytes of blocks on their way to the GPU."""
        return staging_bytes(work.limit)

    def begin(self, limits: WorkerLimits, record: Record) -> Multiplier:
        """Return what multiplies the blocks of a product on a worker; its first block takes the GPU's memory."""
        return GpuMultiplier(limits, record)


class HybridEngine(CudaEngine):
    """One GPU for each worker, and workers of one core each, which have none."""

    name, uses_cpus, module, alternative = "hybrid", True, "", "auto"

    def kernel_bytes(self, work: Workload) -> int:
        """Return the workspace of the kernel of a worker without a GPU, in bytes."""
        return find_engine("numba").kernel_bytes(work)

    def workspace_bytes(self, work: Workload) -> int:
        """Return the bytes that either kind of worker takes."""
        cpu = find_engine("numba").for_values(work.dtype)
        return max(super().workspace_bytes(work), cpu.workspace_bytes(work))

    def on_worker(self, has_gpu: Callable[[], bool]) -> Engine:
        """Return the engine of workers with a GPU, or without."""
        return CUDA if has_gpu() else find_engine("auto")


class GpuMultiplier(Multiplier):
    """Multiplies blocks on one GPU, one after the other; any thread may call it."""

    def __init__(self, limits: WorkerLimits, record: Record) -> None:
        from spdist.kernels.streaming.partition import BlockHistory

        self.limits, self.record = limits, record
        self._history = BlockHistory()
        self._device: Gpu | None = None
        self._lock, self._device_lock = threading.Lock(), threading.Lock()

    def device(self) -> Gpu:
        """Return this worker's GPU; the first call takes its memory."""
        from spdist.kernels.cuda.pinned import bound_pinned
        from spdist.kernels.streaming.gpu_device import Gpu

        with self._lock, self._selected():
            if self._device is None:
                bound_pinned(self.limits.host * self.limits.gpus or None)
                # Not packed: the cores that would unpack C are busy with reading and writing.
                self._device = Gpu(self.limits.memory, staging_bytes=staging_bytes(self.limits.host), pack=False)
            return self._device

    def _selected(self) -> AbstractContextManager[object]:
        """Make the multiplier's GPU the current one of the calling thread during a ``with`` block."""
        if self.limits.gpu is None:
            return contextlib.nullcontext()
        import cupy

        device: AbstractContextManager[object] = cupy.cuda.Device(self.limits.gpu)
        return device

    @property
    def peak(self) -> int:
        """Peak bytes of GPU memory."""
        return self._device.peak if self._device is not None else 0

    @property
    def allocate(self) -> Callable[[int, np.dtype[Any]], ValueArray]:
        """Allocator of page-locked memory."""
        return self._allocate

    def _allocate(self, count: int, dtype: np.dtype[Any]) -> ValueArray:
        from spdist.kernels.cuda.pinned import array_at

        dtype = np.dtype(dtype)
        with self._selected():
            return array_at(self.device().allocate(count * dtype.itemsize), 0, count, dtype)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Page-lock memory of these bytes for results, while the first blocks are read."""
        from spdist.kernels.cuda.pinned import reserve_pinned

        with self._selected():
            self.device()  # bounds the memory
            for size in sizes:
                reserve_pinned(size)

    def multiply_rows(
        self, a: CSR, b: CSR, capacity: int, row: int, spec: ProductSpec, known: BlockFacts = NOTHING_KNOWN
    ) -> CSR:
        """Return as many rows of ``a @ b`` as fit in `capacity` entries; messages call the first one `row`."""
        from spdist.kernels.streaming import pipeline

        rows = pipeline.RowSlice(0, capacity, row, known.offset_in_b, self._history, known.products)
        with self._device_lock, self._selected():
            return pipeline.multiply_rows(a, b, self.device(), rows, report=self._report(row), spec=spec)

    def reduce(
        self, a: CSR, b: CSR, what: Reduction, row: int, spec: ProductSpec, known: BlockFacts = NOTHING_KNOWN
    ) -> PartialReduction:
        """Return a reduction of ``a @ b``; its rows stay on the GPU."""
        from spdist.kernels.streaming import pipeline

        rows = pipeline.RowSlice(0, None, row, known.offset_in_b, self._history, known.products)
        with self._device_lock, self._selected():
            return pipeline.reduce(a, b, what, self.device(), rows, report=self._report(row), spec=spec)

    def _report(self, row: int) -> Callable[[pipeline.Stage], None]:
        """Return what records the stages of a block; their rows are counted from `row`."""
        return lambda s: self.record(f"gpu {s.name}", row + s.start, s.begin, s.seconds, s.nbytes)

    def warm_up(self, a: CSR, b: CSR, spec: ProductSpec) -> CSR:
        """Compile all kernels that products of such types need; return the product, which has one row."""
        from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu

        dtype = (result_dtype if spec.plain else spec.semiring.result_dtype)(a.dtype, b.dtype)
        with self._selected():
            rowwise_gpu.compile_kernels(number_dtype(dtype), b.ncols, spec.semiring)
        return self.multiply_rows(a, b, 1, 0, spec)

    def copy_rates(self) -> Mapping[str, float]:
        """Return the best bytes/s of the bus, each way; to be asked before a block takes the memory."""
        with self._selected():
            return self.device().copy_rates()

    def take_over(self, earlier: Multiplier) -> None:
        """Take over the GPU of a multiplier that prefetched for the same product."""
        if isinstance(earlier, GpuMultiplier):
            self._device, earlier._device = earlier._device, None

    def close(self) -> None:
        """Release the GPU's memory, and page-locked memory that no block uses."""
        if self._device is not None:
            from spdist.kernels.cuda.pinned import free_pinned

            with self._selected():
                self._device = None
                free_pinned()


CUDA = CudaEngine()
HYBRID = HybridEngine()
