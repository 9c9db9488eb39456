"""Memory of one GPU: arenas that slots hand out, uploads from any host memory, and the resident B."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.foundation import threads
from spdist.foundation.cpus import count_cpus
from spdist.kernels.cuda.constants import ALLOCATION
from spdist.kernels.cuda.pinned import Bytes, array_at, pinned
from spdist.kernels.rounding import round_up
from spdist.kernels.streaming.layout import DeviceDtypes, MatrixLayout, lay_out_resident, share_entries
from spdist.kernels.streaming.packing import PACKING_COSTS, PackingCosts
from spdist.kernels.streaming.protocols import ArenaFullError, logger
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import blocksize, number_dtype

OUT_OF_MEMORY = 2
"""Status of the CUDA runtime."""
HOST_MEMORY = 1
"""Memory type of the CUDA runtime: page-locked host memory."""

Malloc = Callable[[int], Any]
"""Takes bytes, returns device memory: a `cupy.cuda.MemoryPointer`."""


@dataclass(frozen=True)
class GpuTuning:
    """Sizes for uploads, slots and the packing of C."""

    # bytes that a thread copies to page-locked memory at a time before an upload; more or fewer take longer
    piece_bytes: int = 4 << 20
    # least entries of C that are packed: for fewer, the launches and the wait take as long as packing saves
    least_packed: int = 12 << 20
    plain_blocks: int = 16  # after packing did not pay, send this many blocks unpacked before trying again
    least_slot: int = 4 << 20  # least bytes of a slot: if the GPU has less room, the multiplication fails
    probe_bytes: int = 32 << 20  # bytes that are copied to measure the bus
    probes: int = 3  # copies each way
    packing: PackingCosts = PACKING_COSTS  # when packing pays


GPU_TUNING = GpuTuning()


def system_malloc(size: int) -> Any:
    """Allocate device memory without a pool, so that it returns to the system when it is freed.

    Raises `cupy.cuda.memory.OutOfMemoryError` if the GPU has fewer than `size` bytes free.
    """
    import cupy

    cuda = cupy.cuda
    try:
        return cuda.MemoryPointer(cuda.Memory(size), 0)
    except cuda.runtime.CUDARuntimeError as error:
        if error.status != OUT_OF_MEMORY:
            raise
        raise cuda.memory.OutOfMemoryError(size, 0) from None


class Arena:
    """Device memory of `size` bytes that is handed out from its start on, and freed all at once."""

    def __init__(self, memory: Any, size: int) -> None:
        self.memory, self.size, self.used = memory, size, 0

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return self.size - self.used

    def reset(self, used: int = 0) -> None:
        """Free all but the first `used` bytes."""
        self.used = round_up(used, ALLOCATION)

    def malloc(self, size: int) -> Any:
        """Return memory; CuPy calls this while the arena is its allocator.

        Raises `ArenaFullError` if fewer than `size` bytes are left.
        """
        begin, self.used = self.used, self.used + round_up(size, ALLOCATION)
        if self.used > self.size:
            raise ArenaFullError(self.used)
        return self.memory + begin

    def release(self) -> None:
        """Release the memory, even if something still refers to the arena, such as a traceback."""
        self.memory = None


def matrix_at(memory: Any, layout: MatrixLayout, dtypes: DeviceDtypes) -> CSR:
    """Return a matrix in device memory, without a copy; `memory` is the start of the block's memory.

    Values that are dense blocks have shape (nnz, r, s).
    """
    import cupy

    size = blocksize(layout.value) or ()
    return CSR(
        cupy.ndarray((layout.nrows + 1,), dtypes.pointer, memory + layout.indptr),
        cupy.ndarray((layout.nnz,), dtypes.index, memory + layout.indices),
        cupy.ndarray((layout.nnz, *size), number_dtype(layout.value), memory + layout.data),
        (layout.nrows, layout.ncols),
    )


class Upload(NamedTuple):
    """An array on the host to copy to a device address, converted to a dtype."""

    array: npt.NDArray[Any]
    dtype: np.dtype[Any]
    address: int


class Uploader:
    """Copies arrays of the host to the GPU on one stream, whether they are page-locked or not."""

    def __init__(self, tuning: GpuTuning) -> None:
        import cupy

        self._runtime, self._piece_bytes = cupy.cuda.runtime, tuning.piece_bytes
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._device = cupy.cuda.Device()  # which each thread must select
        self._in_use: list[tuple[Any, Bytes]] = []  # events, and page-locked memory that copies read until then

    def copy(self, address: int, array: npt.NDArray[Any]) -> None:
        """Start the copy of a page-locked array to a device address."""
        if array.nbytes:
            to_device = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, to_device, self.stream.ptr)

    def send(self, *uploads: Upload) -> None:
        """Start the copies of arrays.

        An array that is not page-locked, or has another dtype, is copied by way of page-locked memory, which threads
        fill; each thread starts the copies of the pieces that it has filled.
        """
        pieces: list[Upload] = []
        for array, dtype, address in uploads:
            if array.dtype == dtype and self.is_locked(array):
                self.copy(address, array)
                continue
            step = self._piece_bytes // dtype.itemsize
            pieces.extend(
                Upload(array[first : first + step], dtype, address + first * dtype.itemsize)
                for first in range(0, len(array), step)
            )
        count = min(len(pieces), count_cpus())
        if count < 2:
            self._send_pieces(pieces)
            return
        submit = threads.thread_pool(count_cpus(), "send").submit
        tasks = [submit(self._send_pieces, pieces[first::count]) for first in range(count)]
        wait(tasks)
        for task in tasks:
            task.result()

    def _send_pieces(self, pieces: list[Upload]) -> None:
        """Copy pieces by way of page-locked memory: one is filled while the previous one is uploaded."""
        self._device.use()
        on_the_way: collections.deque[tuple[Any, Bytes]] = collections.deque()
        for values, dtype, address in pieces:
            if len(on_the_way) < 2:
                memory = pinned(self._piece_bytes)
            else:
                event, memory = on_the_way.popleft()
                event.synchronize()
            piece = array_at(memory, 0, len(values), dtype)
            piece[:] = values
            self.copy(address, piece)
            on_the_way.append((self.stream.record(), memory))
        self._in_use.extend(on_the_way)

    def release_sent(self) -> None:
        """Release page-locked memory whose copies are done."""
        self._in_use = [each for each in self._in_use if not each[0].done]

    def is_locked(self, array: npt.NDArray[Any]) -> bool:
        """Return whether a whole array is page-locked, so that the GPU can copy it in place."""
        size = array.nbytes
        ends = (array.ctypes.data, array.ctypes.data + size - 1) if size and array.flags.c_contiguous else ()
        return bool(ends) and all(self._runtime.pointerGetAttributes(end).type == HOST_MEMORY for end in ends)


class ResidentB:
    """B on the GPU, for all blocks of a multiplication, and for later multiplications with the same B.

    `nbytes`: device memory that is held, with B or for the next B of about the same size. `ones`: a one for each entry
    of a B of dense blocks. `is_sound`: whether a kernel has checked B.
    """

    def __init__(self, uploader: Uploader, malloc: Malloc) -> None:
        self._uploader, self._malloc = uploader, malloc
        self.matrix: CSR | None = None
        self.ones: Any = None
        self.is_sound = False
        self.nbytes = 0
        self._memory: Any = None
        self._source: tuple[CSR, DeviceDtypes] | None = None

    def keep(self, b: CSR | None, dtypes: DeviceDtypes) -> bool:
        """Make B resident, or drop it if `b` is None; return whether B is resident. See `Gpu.keep`."""
        import cupy

        if b is not None and self._source is not None and _is_same(self._source[0], b) and self._source[1] == dtypes:
            return True
        self.forget()
        if b is None:
            return False
        layout, size = lay_out_resident(b, dtypes)
        if not self._take_memory(size):
            return False
        memory = self._memory
        self._uploader.send(
            Upload(b.data, dtypes.b, memory.ptr + layout.data),
            Upload(b.indices, dtypes.index, memory.ptr + layout.indices),
            Upload(b.indptr, dtypes.pointer, memory.ptr + layout.indptr),
        )
        self.matrix = matrix_at(memory, layout, dtypes)
        if dtypes.blocked:
            self.ones = cupy.ndarray((b.nnz,), np.float32, memory + layout.end)
            self.ones.fill(1)
            cupy.cuda.Device().synchronize()  # slots have streams of their own
        self._source = b, dtypes
        return True

    def _take_memory(self, size: int) -> bool:
        """Allocate at least `size` bytes; return False if the GPU has fewer free."""
        import cupy

        if size <= self.nbytes:
            return True
        self.free()
        try:
            self._memory = self._malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            logger.warning("the GPU has no room for B, another program uses it: its rows come block by block")
            return False
        self.nbytes = size
        return True

    def forget(self) -> None:
        """Drop B; keep its memory for another B of about the same size."""
        if self._source is not None:
            self._uploader.stream.synchronize()  # B's arrays may be on their way
            self._uploader.release_sent()
        self.matrix, self.ones, self._source, self.is_sound = None, None, None, False

    def free(self) -> None:
        """Free the memory; call `forget` first."""
        self._memory, self.nbytes = None, 0

    def trust(self) -> None:
        """Note that a kernel has checked B."""
        self.is_sound = True

    def entries(self, start: int, stop: int) -> tuple[int, int]:
        """Return the offsets at which the entries of rows [start, stop) of B begin and end."""
        assert self._source is not None
        indptr = self._source[0].indptr
        return int(indptr[start]), int(indptr[stop])


def _is_same(b: CSR, other: CSR) -> bool:
    """Return whether two matrices consist of the same arrays."""
    return share_entries(b, other) and b.indptr is other.indptr and b.shape == other.shape
