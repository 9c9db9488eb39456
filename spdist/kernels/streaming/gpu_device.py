"""One GPU: room for a resident B and slots for blocks in its memory, never more bytes than the memory limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from spdist.errors import MatrixError, MemoryBoundError
from spdist.foundation.units import format_bytes
from spdist.kernels.cuda import host_registration
from spdist.kernels.cuda.constants import ALLOCATION
from spdist.kernels.cuda.module import value_type
from spdist.kernels.cuda.pinned import Bytes, pinned
from spdist.kernels.product_spec import ProductSpec
from spdist.kernels.reduction_spec import PartialReduction, Reduction
from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue
from spdist.kernels.streaming.gpu_memory import GPU_TUNING, GpuTuning, Malloc, Upload, system_malloc
from spdist.kernels.streaming.gpu_slot import GpuContext, GpuSlot
from spdist.kernels.streaming.layout import DeviceDtypes
from spdist.kernels.streaming.protocols import logger
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, blocksize, number_dtype

FREE_SHARE = 0.9
"""Share of the GPU's free memory that is the limit if none is given."""
STAGING_BYTES = 4 << 30
"""Bytes of page-locked host memory for blocks on their way to the GPU if no limit is given."""


NEARLY = 9 / 8
"""Slots that would get at most so much larger are kept as they are."""


def free_memory() -> int:
    """Return the default memory limit: 0.9 of the bytes that the GPU has free."""
    import cupy

    return int(FREE_SHARE * (cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()))


class Gpu:
    """The current GPU within a memory limit; see `protocols.Device`.

    `memory_limit`: bytes of device memory, the CUDA context and compiled kernels not counted; by default 0.9 of the
    free bytes. `deterministic`: whether products are added in the order of A's entries. `staging_bytes`: bytes of
    page-locked host memory for blocks that are being uploaded. `pack`: whether C's columns may be packed for the
    download, if `packing` expects that to be faster. `malloc`: takes bytes, returns device memory, as a memory pool of
    CuPy does; by default memory that is returned to the system when freed. `peak`: the most bytes of device memory that
    were held. `context`: state that the slots share.
    """

    def __init__(
        self,
        memory_limit: int | None = None,
        *,
        deterministic: bool = False,
        staging_bytes: int = STAGING_BYTES,
        pack: bool = True,
        malloc: Malloc = system_malloc,
        tuning: GpuTuning = GPU_TUNING,
    ) -> None:
        import cupy

        self._cupy, self._malloc, self._tuning = cupy, malloc, tuning
        self.memory_limit = free_memory() if memory_limit is None else memory_limit
        self.staging_bytes = staging_bytes
        self.peak = 0
        self.context = GpuContext(deterministic, pack, tuning, malloc)
        self._slots: list[GpuSlot] = []
        self._slot_bytes = self._work_bytes = 0

    def _note_peak(self) -> None:
        held = self.context.resident.nbytes + self._work_bytes + sum(slot.size for slot in self._slots)
        assert held <= self.memory_limit, f"{held} bytes of {self.memory_limit}"
        self.peak = max(self.peak, held)

    # -- a multiplication ----------------------------------------------------------------------------------------------

    def begin(
        self, spec: ProductSpec, reduction: Reduction | None, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> int:
        """Begin a multiplication; return the bytes that it reserves besides B and slots.

        Raises `MatrixError` if the GPU has no kernels for such values.
        """
        number = number_dtype(dtype)
        value_type(number)
        if blocksize(dtype) is not None and number.kind not in "fc":
            raise MatrixError(
                f"blocks of {number} are not multiplied on the GPU: convert to float32, float64 or complex"
            )
        work = BlockEpilogue(spec, reduction, shape, dtype)
        reserved = sum(work.sizes)
        if self._work_bytes or reserved:
            self._drop_slots()
        self.context.begin(work)
        self._work_bytes = 0
        if 2 * reserved <= self.memory_limit and reserved:
            self._upload_factors(work)
            self._work_bytes = reserved
        return reserved

    def _upload_factors(self, work: BlockEpilogue) -> None:
        """Upload the factors of rows and columns, and zeros for sums."""
        memory = self._malloc(sum(work.sizes))
        arrays: list[Any] = []
        offset = 0
        for values, size in zip((*work.factors, work.sums_of_columns), work.sizes, strict=True):
            if values is not None:
                self.context.uploader.send(Upload(values, values.dtype, memory.ptr + offset))
            arrays.append(None if values is None else self._cupy.ndarray((len(values),), values.dtype, memory + offset))
            offset += size
        work.take(arrays)

    def take_sums(self) -> PartialReduction:
        """Return the column sums of all blocks."""
        work, stream = self.context.work, self.context.download_stream
        found = np.empty(len(work.sums), work.sums.dtype)
        self.context.download(found, work.sums.data.ptr, work.sums.nbytes)
        stream.synchronize()
        return work.part(found)

    def keep(self, b: CSR | None, dtypes: DeviceDtypes) -> bool:
        """Make B resident, or drop it if `b` is None; return whether B is resident.

        A B of the same arrays is not uploaded again: the caller must not change them between multiplications.
        """
        is_resident = self.context.keep(b, dtypes)
        self._note_peak()
        return is_resident

    # -- slots ---------------------------------------------------------------------------------------------------------

    def slots(self, count: int, size: int, kept: int) -> list[GpuSlot]:
        """Return slots of `size` bytes for blocks; slots returned earlier lose their memory first.

        They are smaller if another program has taken the GPU's memory, and if the slots of the last call nearly have
        the size: allocating them takes longer than many a block. `kept`: bytes that stay free for B.
        """
        size = size // ALLOCATION * ALLOCATION
        resident = self.context.resident
        if kept <= resident.nbytes or not resident.nbytes:
            held = max(kept, resident.nbytes) + self._work_bytes + count * self._slot_bytes
            if len(self._slots) == count and size <= self._slot_bytes * NEARLY and held <= self.memory_limit:
                return self._slots
        if resident.nbytes not in (0, kept):
            resident.forget()
            resident.free()
        self._drop_slots()
        self._slot_bytes = size
        while not self._slots:
            try:
                self._slots = [GpuSlot(self.context, self._malloc(size), size) for _ in range(count)]
            except self._cupy.cuda.memory.OutOfMemoryError:
                self._slots = []
                _check_shrinkable(size, self._tuning.least_slot)
                size = size // 2 // ALLOCATION * ALLOCATION
        self._note_peak()
        return self._slots

    def _drop_slots(self) -> None:
        for slot in self._slots:
            slot.release()
        self._slots, self._slot_bytes = [], 0

    # -- the host's memory ---------------------------------------------------------------------------------------------

    def allocate(self, size: int, /) -> Bytes:
        """Return page-locked memory."""
        return pinned(size)

    def note_operands(self, arrays: Iterable[Any], /) -> None:
        """Note that a multiplication reads arrays: large arrays are page-locked when a later one reads them too."""
        host_registration.note_operands(arrays)

    def is_locked(self, array: ValueArray, /) -> bool:
        """Return whether an array is page-locked, so that the GPU copies from it as it is."""
        return self.context.uploader.is_locked(array)

    def copy_rates(self) -> dict[str, float]:
        """Measure the bus: bytes/s of "gpu upload" and "gpu download"; empty if the GPU has no memory for copies."""
        size = min(self._tuning.probe_bytes, self.memory_limit // 2)
        try:
            host, there = pinned(size), self._malloc(size)
        except self._cupy.cuda.memory.OutOfMemoryError:
            return {}
        context = self.context
        ways = {
            "gpu upload": (lambda: context.uploader.copy(there.ptr, host), context.uploader.stream),
            "gpu download": (lambda: context.download(host, there.ptr, size), context.download_stream),
        }
        return {
            name: size / min(_seconds_of(copy, stream) for _ in range(self._tuning.probes))
            for name, (copy, stream) in ways.items()
        }


def _seconds_of(copy: Callable[[], None], stream: Any) -> float:
    begin = time.perf_counter()
    copy()
    stream.synchronize()
    return time.perf_counter() - begin


def _check_shrinkable(size: int, least: int) -> None:
    """Log that the GPU has no room for slots of `size` bytes; raise if half of it is below `least`."""
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    if size < 2 * least:
        raise MemoryBoundError(
            f"the GPU has {format_bytes(free)} free, too little for a block: end what else uses it, or choose "
            f"another GPU with CUDA_VISIBLE_DEVICES"
        )
    logger.warning(
        "the GPU has no room for blocks of %s, though memory_limit allows them: another program uses it; blocks "
        "of half the size from here on", format_bytes(size)
    )  # fmt: skip
