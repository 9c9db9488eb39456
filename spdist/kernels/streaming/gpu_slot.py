"""Slots of one GPU: device memory for a block, with a stream of its own, from upload to download."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from spdist.foundation.cpus import count_cpus
from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.kernels.cuda.constants import ALLOCATION
from spdist.kernels.cuda.pinned import Bytes, array_at, pinned
from spdist.kernels.product_spec import PLAIN
from spdist.kernels.reduction_spec import PartialReduction
from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue
from spdist.kernels.streaming import packing
from spdist.kernels.streaming.gpu_memory import Arena, GpuTuning, Malloc, ResidentB, Uploader, matrix_at
from spdist.kernels.streaming.layout import DeviceDtypes, MatrixLayout, StagedBlock
from spdist.kernels.streaming.protocols import ArenaFullError, DownloadTarget, Stage, logger
from spdist.kernels.streaming.workspace import packed_bound, packed_units
from spdist.matrices.bsr import BSR
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import IndexArray, ValueArray

STEPS = "upload", "multiply", "reduce", "pack", "download"


def unpacking_threads() -> int:
    """Return the number of threads that unpack C; other cores prepare blocks meanwhile."""
    return max(1, count_cpus() // 2)


class PackingPolicy:
    """Decides for which blocks the columns of C are packed."""

    def __init__(self, enabled: bool, tuning: GpuTuning) -> None:
        self._tuning = tuning
        self._plain_blocks = 0 if enabled else sys.maxsize

    def room_for(self, c: CSR, free: int) -> int:
        """Return the bytes to pack C's columns into, if `free` bytes are left in the slot; 0 if they are not packed."""
        size = packed_bound(c.shape, c.nnz, c.indices.itemsize)
        # Columns of dense blocks are a small part of C.
        small = c.data.ndim > 1 or c.nnz < self._tuning.least_packed or c.dtype.kind not in packing.PACKED_KINDS
        if self._plain_blocks or small or free < size + ALLOCATION:
            self._plain_blocks = max(0, self._plain_blocks - 1)
            return 0
        return size

    def pays(self, packed: packing.Packed) -> bool:
        """Wait until C is packed; return whether to download the packed form. If not, do not pack the next blocks."""
        if packed.wait().choose(unpacking_threads(), self._tuning.packing).columns:
            return True
        self._plain_blocks = self._tuning.plain_blocks
        logger.info("columns of C are copied as they are: %s", packed.why)
        return False


class GpuContext:
    """State that the slots of a GPU share: streams for copies, the resident B, and the options applied to each block.

    One stream copies to the GPU and another to the host. On a stream that copied both ways, an upload would wait for
    all earlier downloads.
    """

    def __init__(self, deterministic: bool, pack: bool, tuning: GpuTuning, malloc: Malloc) -> None:
        import cupy

        self.deterministic, self.packing = deterministic, PackingPolicy(pack, tuning)
        self.uploader = Uploader(tuning)
        self.download_stream = cupy.cuda.Stream(non_blocking=True)
        self.resident = ResidentB(self.uploader, malloc)
        self.work = BlockEpilogue(PLAIN, None, (0, 0), np.dtype(np.float64))
        self.dtypes: DeviceDtypes | None = None
        self._runtime = cupy.cuda.runtime

    def begin(self, work: BlockEpilogue) -> None:
        """Apply the options in `work` to all later blocks."""
        self.work = work

    def keep(self, b: CSR | None, dtypes: DeviceDtypes) -> bool:
        """Set the dtypes and the resident B of later blocks; return whether B is resident. See `Gpu.keep`."""
        self.dtypes = dtypes
        return self.resident.keep(b, dtypes)

    def download(self, target: ValueArray, address: int, nbytes: int) -> None:
        """Start the copy from a device address to a page-locked array."""
        if nbytes:
            to_host = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(target.ctypes.data, address, nbytes, to_host, self.download_stream.ptr)


class StepTimer:
    """Records when the steps of a slot begin and end on the GPU."""

    def __init__(self) -> None:
        import cupy

        self._elapsed = cupy.cuda.get_elapsed_time
        self._begun, self._ended = ({name: cupy.cuda.Event() for name in STEPS} for _ in range(2))
        self._steps: list[tuple[str, int, float]] = []
        self._is_idle = True

    def reset(self) -> None:
        """Forget the steps of the previous block."""
        self._steps = []

    def begin(self, name: str, stream: Any, after: str | None = None) -> float:
        """Begin one of `STEPS`, after the step `after` of the slot; return the time, in seconds since 1970."""
        self._is_idle = False
        if after is not None:
            stream.wait_event(self._ended[after])
        self._begun[name].record(stream)
        return time.time()

    def end(self, name: str, stream: Any, nbytes: int, begin: float) -> None:
        """End a step that took `begin` from `begin`, and reads or writes `nbytes`."""
        self._ended[name].record(stream)
        self._steps.append((name, nbytes, begin))

    def wait(self, stream: Any) -> None:
        """Wait until all steps are done: the steps on `stream`, and the copies."""
        for event in () if self._is_idle else (self._ended["upload"], stream, self._ended["download"]):
            event.synchronize()
        self._is_idle = True

    def take_stages(self, start: int) -> list[Stage]:
        """Return the steps of the block that begins at row `start`, and forget them."""
        steps, self._steps = self._steps, []
        return [
            Stage(start, name, begin, 1e-3 * self._elapsed(self._begun[name], self._ended[name]), nbytes)
            for name, nbytes, begin in steps
        ]


class GpuSlot:
    """Room of `size` bytes for a block on the GPU; see `protocols.Slot`."""

    def __init__(self, context: GpuContext, memory: Any, size: int) -> None:
        import cupy

        self.context, self.size, self._cupy = context, size, cupy
        self._arena = Arena(memory, size)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._timer = StepTimer()
        self.staged: StagedBlock | None = None
        self.held = 0
        self._c: Any = None
        self._reduced: Any = None  # on the device
        self._found: Any = None  # the reduction on the host
        self._packed: packing.Packed | None = None
        self._unpack_calls: list[Callable[[], None]] = []

    def release(self) -> None:
        """Release the memory, even if something still refers to the slot, such as a traceback."""
        self._arena.release()
        self.staged, self._c, self._reduced, self._packed = None, None, None, None

    def upload(self, staged: StagedBlock) -> None:
        """Start the upload of a block; return at once."""
        self._timer.reset()
        self.staged, self._c, self._reduced, self._packed = staged, None, None, None
        if staged.nbytes > self.size:
            return  # `multiply` raises
        self._arena.reset(staged.nbytes)
        uploader = self.context.uploader
        begin = self._timer.begin("upload", uploader.stream)
        for array, target in staged.copies:
            uploader.copy(self._arena.memory.ptr + target, array)
        self._timer.end("upload", uploader.stream, staged.nbytes, begin)

    # -- multiply ------------------------------------------------------------------------------------------------------

    def multiply(self, expected: int = 0, while_busy: Callable[[], None] | None = None) -> int:
        """Multiply the uploaded block; return the entries of C that are kept."""
        assert self.staged is not None
        if self.staged.nbytes > self.size:
            raise ArenaFullError(self.staged.nbytes)
        begin = self._timer.begin("multiply", self._stream, "upload")
        try:
            self._multiply_in_arena(expected, while_busy)
        except ArenaFullError:
            if not expected:
                raise
            # C has more entries than expected, so memory was allocated twice: let the kernels estimate the entries.
            self._arena.reset(self.staged.nbytes)
            self._multiply_in_arena(0, None)
        self._timer.end("multiply", self._stream, self._c.nbytes, begin)
        work = self.context.work
        self._packed = self._start_packing() if work.reduction is None else None
        return 0 if work.counts else int(self._c.nnz)

    def _multiply_in_arena(self, expected: int, while_busy: Callable[[], None] | None) -> None:
        """Multiply in the memory of the slot."""
        staged, resident = self.staged, self.context.resident
        assert staged is not None
        b = resident.matrix if staged.b is None else self._uploaded(staged.b)
        assert b is not None
        try:
            with self._stream, self._cupy.cuda.using_allocator(self._arena.malloc):
                a = self._rows_of_a(b)
                if a.data.ndim > 1:
                    self._c = _multiply_dense_blocks(a, b, resident.ones if b is resident.matrix else None)
                    self.held = self._c.nnz
                else:
                    self._multiply_rows(a, b, expected, while_busy)
        except ArenaFullError:
            self._cupy.cuda.Device().synchronize()  # kernels on other streams may use the memory that is given back
            raise

    def _multiply_rows(self, a: CSR, b: CSR, expected: int, while_busy: Callable[[], None] | None) -> None:
        """Multiply rows whose values are numbers, and apply the options."""
        context, work, staged = self.context, self.context.work, self.staged
        assert staged is not None
        resident, is_resident = context.resident, b is context.resident.matrix
        self._c, self.held = work.make(
            a, b, staged.start, context.deterministic, sound_b=is_resident and resident.is_sound, expected=expected,
            meanwhile=while_busy,
        )  # fmt: skip
        if is_resident and a.nnz > 0:  # else no kernel has checked B
            resident.trust()
        self._reduced = None if work.reduction is None else work.room(self._c)

    def _uploaded(self, layout: MatrixLayout) -> CSR:
        """Return a matrix of the block that was uploaded."""
        assert self.context.dtypes is not None
        return matrix_at(self._arena.memory, layout, self.context.dtypes)

    def _rows_of_a(self, b: CSR) -> CSR:
        """Return the block's rows of A: the uploaded rows, or rows of B."""
        staged, cupy = self.staged, self._cupy
        assert staged is not None
        if staged.row_in_b is not None:
            start, stop = staged.row_in_b, staged.row_in_b + staged.rows
            first, last = self.context.resident.entries(start, stop)
            indptr = cupy.subtract(b.indptr[start : stop + 1], b.indptr.dtype.type(first))
            a = CSR(indptr, b.indices[first:last], b.data[first:last], (staged.rows, b.nrows))
        else:
            a = self._uploaded(staged.a)
        if not staged.column_offset:
            return a
        columns = cupy.subtract(a.indices, a.indices.dtype.type(staged.column_offset))
        return CSR(a.indptr, columns, a.data, a.shape)

    # -- reduce --------------------------------------------------------------------------------------------------------

    def reduce(self, first_row: int) -> None:
        """Start to reduce C and to download the result; return at once."""
        context, reduced = self.context, self._reduced
        assert self.staged is not None
        begin = self._timer.begin("reduce", self._stream)
        with self._stream:
            context.work.reduce(self._c, first_row + self.staged.start, reduced)
        self._timer.end("reduce", self._stream, reduced.nbytes, begin)
        self._found = array_at(pinned(reduced.nbytes), 0, len(reduced), reduced.dtype)
        begin = self._timer.begin("download", context.download_stream, "reduce")
        if reduced.nbytes:
            context.download(self._found, reduced.data.ptr, reduced.nbytes)
        self._timer.end("download", context.download_stream, reduced.nbytes, begin)

    def take_part(self) -> PartialReduction:
        """Return the downloaded reduction of the block."""
        return self.context.work.part(self._found)

    # -- download ------------------------------------------------------------------------------------------------------

    @property
    def is_packing(self) -> bool:
        """Whether C's columns are being packed, so that `download` would wait."""
        return self._packed is not None

    def _start_packing(self) -> packing.Packed | None:
        """Start to pack the columns of C into the free memory of the slot; None if packing would not pay."""
        c, arena = self._c, self._arena
        size = self.context.packing.room_for(c, arena.free)
        if not size:
            return None
        with self._stream, self._cupy.cuda.using_allocator(arena.malloc):
            begin = self._timer.begin("pack", self._stream)
            packed = packing.pack(c, self._cupy.empty(size, np.uint8), values=False)
            self._timer.end("pack", self._stream, c.nnz * c.indices.itemsize, begin)
        return packed

    def download(self, target: DownloadTarget) -> None:
        """Start the download of the first rows of C; return at once, or once C is packed."""
        c, context = self._c, self.context
        rows, nnz, offsets, indices, data = target
        packed, self._packed = self._packed, None
        if packed is not None and ((rows, nnz) != (c.nrows, c.nnz) or not context.packing.pays(packed)):
            packed = None
        begin = self._timer.begin("download", context.download_stream, "pack" if packed else "multiply")
        columns: tuple[Any, int, int] = indices, c.indices.data.ptr, indices.nbytes
        if packed:
            host = pinned(packed.nbytes)
            self._unpack_calls = _unpack_calls(packed, host, rows, indices)
            columns = host, packed.source, packed.nbytes
        copies = (
            (offsets, c.indptr.data.ptr + c.indptr.itemsize, offsets.nbytes),
            columns,
            (data, c.data.data.ptr, data.nbytes),
        )
        for array, address, nbytes in copies:
            context.download(array, address, nbytes)
        self._timer.end("download", context.download_stream, sum(nbytes for _, _, nbytes in copies), begin)

    def take_host_work(self) -> list[Callable[[], None]]:
        """Return the calls that unpack the columns of the downloaded block."""
        calls, self._unpack_calls = self._unpack_calls, []
        return calls

    def wait(self) -> list[Stage]:
        """Wait until all work of the slot is done; return the stages since the last upload."""
        self._timer.wait(self._stream)
        self.context.uploader.release_sent()
        staged = self.staged
        if staged is not None:
            staged.release_host_arrays()
        if staged is None or staged.nbytes > self.size:
            self._timer.reset()
            return []
        return self._timer.take_stages(staged.start)


def _unpack_calls(packed: packing.Packed, host: Bytes, rows: int, indices: IndexArray) -> list[Callable[[], None]]:
    """Return calls that unpack parts of C's columns, one for each thread."""
    offsets, units = np.empty(rows + 1, packed.pointer), packed_units(rows, len(indices))
    cuts = np.unique(np.linspace(0, units, unpacking_threads() + 1).astype(np.int64)).tolist()
    return [
        functools.partial(packing.unpack, host, offsets, indices, None, first, last)
        for first, last in itertools.pairwise(cuts)
    ]


def _multiply_dense_blocks(a: CSR, b: CSR, ones: ValueArray | None) -> CSR:
    """Multiply two matrices whose values are dense blocks; `ones` has a one for each entry of a resident B."""
    c = bsr_gpu.multiply(*map(_block_matrix, (a, b)), ones=ones)
    return c.pattern(c.data)


def _block_matrix(m: CSR) -> BSR:
    """Return the block matrix of a CSR whose values have shape (nnz, r, s)."""
    _, r, s = m.data.shape
    return BSR(m.indptr, m.indices, m.data, (m.nrows * r, m.ncols * s))
