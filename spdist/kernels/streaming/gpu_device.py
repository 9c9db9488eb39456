"""One GPU: a place for B and slots for blocks in its memory, never more bytes than the memory limit."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from typing import Any

import numpy as np

from spdist.errors import MatrixError, MemoryBoundError
from spdist.kernels.bsr import multiply_gpu as bsr_gpu
from spdist.kernels.cuda import host_registration
from spdist.kernels.cuda.constants import ALLOCATION
from spdist.kernels.cuda.module import value_type
from spdist.kernels.cuda.pinned import Bytes, array_at, pinned
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import Part as Reduced
from spdist.kernels.reduction_spec import Reduction
from spdist.kernels.rowwise_gpu.epilogue import BlockEpilogue
from spdist.kernels.streaming import packing, pipeline
from spdist.kernels.streaming.packed_sizes import packed_bound, packed_units
from spdist.kernels.streaming.partition import (
    AHEAD_BYTES,
    DeviceDtypes,
    Part,
    Staged,
    cores,
    lay_out_whole,
    pool,
    share_entries,
)
from spdist.kernels.streaming.pipeline import ArenaFullError, Stage
from spdist.matrices.bsr import BSR
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import blocksize, number_dtype
from spdist.units import format_bytes

FREE_SHARE = 0.9
"""Of the GPU's free memory, the limit where none is given."""
PIECE = 4 << 20
"""Bytes that a thread copies to page-locked memory at a time on the way to the GPU; more or fewer take longer."""
STEPS = "upload", "multiply", "reduce", "pack", "download"
LEAST_PACKED = 12 << 20
"""Entries of C for which packing is tried: its launches, and the wait for them, take as long as it saves of as many."""
PLAIN_BLOCKS = 16
"""Blocks that are copied as they are after one for which packing would not have paid."""
LEAST_SLOT = 4 << 20
COPY_BYTES, COPIES = 32 << 20, 3
"""Bytes that are copied to see how quick the bus is, and how often each way."""
OUT_OF_MEMORY = 2
"""Status of the CUDA runtime."""
HOST_MEMORY = 1
"""Its type of page-locked host memory."""


def free_memory() -> int:
    """Return the memory limit where none is given: 0.9 of what the GPU has free."""
    import cupy

    return int(FREE_SHARE * (cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()))


def unpackers() -> int:
    """Return the threads that unpack C: others prepare blocks meanwhile."""
    return max(1, cores() // 2)


class Arena:
    """Device memory that is handed out from its start on, and taken back all at once."""

    def __init__(self, memory: Any, size: int) -> None:
        self.memory, self.size, self.used = memory, size, 0

    def reset(self, used: int = 0) -> None:
        """Take all back but the first `used` bytes."""
        self.used = -(-used // ALLOCATION) * ALLOCATION

    def malloc(self, size: int) -> Any:
        """Return memory; what CuPy calls while the arena is its allocator.

        Raises
        ------
        ArenaFullError
            If there is not so much left.
        """
        begin, self.used = self.used, self.used + -(-size // ALLOCATION) * ALLOCATION
        if self.used > self.size:
            raise ArenaFullError(self.used)
        return self.memory + begin


class GpuSlot:
    """Room for a block on the GPU, with a stream of its own; see `outofcore.Slot`.

    Copies go through two streams of the GPU's, one each way: among streams that copy both ways, one to the GPU waits
    for all to the host that were asked for before it.
    """

    def __init__(self, device: Gpu, memory: Any, size: int) -> None:
        import cupy

        self.device, self.cupy, self.size = device, cupy, size
        self.arena = Arena(memory, size)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.begun, self.ended = ({name: cupy.cuda.Event() for name in STEPS} for _ in range(2))
        self.staged: Staged | None = None
        self.c: Any = None
        self.held, self.idle = 0, True
        self.room: Any = None
        self.found: Any = None
        self.packed: packing.Packed | None = None
        self.steps: list[tuple[str, int, float]] = []
        self.work: list[Callable[[], None]] = []

    def _begin(self, name: str, stream: Any, after: str | None = None) -> float:
        """Begin a step on a stream, which waits for the step before it; return the time."""
        self.idle = False
        if after is not None:
            stream.wait_event(self.ended[after])
        self.begun[name].record(stream)
        return time.time()

    def _end(self, name: str, stream: Any, nbytes: int, begin: float) -> None:
        self.ended[name].record(stream)
        self.steps.append((name, nbytes, begin))

    def release(self) -> None:
        """Let go of the memory, whoever still holds the slot: a traceback may."""
        self.arena.memory, self.staged, self.c, self.room, self.packed = None, None, None, None, None

    def upload(self, staged: Staged) -> None:
        """Send a block; returns at once."""
        self.steps, self.staged, self.c, self.room, self.packed = [], staged, None, None, None
        if staged.nbytes > self.size:
            return  # `multiply` says so
        self.arena.reset(staged.nbytes)
        runtime, stream = self.cupy.cuda.runtime, self.device.up
        begin = self._begin("upload", stream)
        for array, at in staged.sends:
            target, size = self.arena.memory.ptr + at, array.nbytes
            if size:
                runtime.memcpyAsync(target, array.ctypes.data, size, runtime.memcpyHostToDevice, stream.ptr)
        self._end("upload", stream, staged.nbytes, begin)

    def multiply(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Multiply the block that was sent; return the entries of C that are kept."""
        assert self.staged is not None
        if self.staged.nbytes > self.size:
            raise ArenaFullError(self.staged.nbytes)
        begin = self._begin("multiply", self.stream, "upload")
        try:
            self._make_in_room(meanwhile)
        except ArenaFullError:
            if not self.device.entries_per_product:
                raise
            # C had more entries than those before let expect, and room was taken again: a sample of this one tells.
            self.device.entries_per_product = 0.0
            self.arena.reset(self.staged.nbytes)
            self._make_in_room(None)
        self._end("multiply", self.stream, self.c.nbytes, begin)
        work = self.device.work
        self.packed = self._pack() if work.reduction is None else None
        return 0 if work.counts else int(self.c.nnz)

    def _make_in_room(self, meanwhile: Callable[[], None] | None) -> None:
        """Make of the block what is wanted, in the memory of the slot."""
        staged, device = self.staged, self.device
        assert staged is not None
        b = device.b if staged.b is None else device.matrix(self.arena.memory, staged.b)
        assert b is not None
        try:
            with self.stream, self.cupy.cuda.using_allocator(self.arena.malloc):
                self._make(self._a(b), b, meanwhile)
        except ArenaFullError:
            self.cupy.cuda.Device().synchronize()  # kernels on other streams may use what is given back
            raise

    def _a(self, b: CSR) -> CSR:
        """Return the block's rows of A, as they were sent or out of B."""
        staged, cupy = self.staged, self.cupy
        assert staged is not None
        if staged.inside is not None:
            row, rows = staged.inside, staged.stop - staged.start
            first, last = self.device.inside(row, row + rows)
            indptr = cupy.subtract(b.indptr[row : row + rows + 1], b.indptr.dtype.type(first))
            a = CSR(indptr, b.indices[first:last], b.data[first:last], (rows, b.nrows))
        else:
            a = self.device.matrix(self.arena.memory, staged.a)
        if not staged.low:
            return a
        # A's columns are B's, counted from the first row of all B.
        return CSR(a.indptr, cupy.subtract(a.indices, a.indices.dtype.type(staged.low)), a.data, a.shape)

    def _make(self, a: Any, b: Any, meanwhile: Callable[[], None] | None) -> None:
        """Make of the block what is wanted."""
        device, work, staged = self.device, self.device.work, self.staged
        assert staged is not None
        if a.data.ndim > 1:
            self.c = device.product(a, b)
            self.held = self.c.nnz
        else:
            stays, expected = b is device.b, int(device.entries_per_product * staged.products)
            self.c, self.held = work.make(
                a, b, staged.start, device.deterministic, sound_b=stays and device.b_is_sound, expected=expected,
                meanwhile=meanwhile,
            )  # fmt: skip
            device.b_is_sound = device.b_is_sound or (stays and a.nnz > 0)  # else nobody has looked at B
            if staged.products and work.spec.mask is None:
                device.entries_per_product = self.held / staged.products
            self.room = None if work.reduction is None else work.room(self.c)

    def reduce(self, first: int) -> None:
        """Fetch what a reduction makes of C, row 0 of the product being row `first`; returns at once."""
        assert self.staged is not None
        room, runtime = self.room, self.cupy.cuda.runtime
        begin = self._begin("reduce", self.stream)
        with self.stream:
            self.device.work.reduce(self.c, first + self.staged.start, room)
        self._end("reduce", self.stream, room.nbytes, begin)
        self.found = array_at(self.device.allocate(room.nbytes), 0, len(room), room.dtype)
        stream = self.device.down
        begin = self._begin("download", stream, "reduce")
        if room.nbytes:
            target = self.found.ctypes.data
            runtime.memcpyAsync(target, room.data.ptr, room.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        self._end("download", stream, room.nbytes, begin)

    def take_part(self) -> Reduced:
        """Return what the block has come to."""
        return self.device.work.part(self.found)

    @property
    def is_packing(self) -> bool:
        """Whether C's columns are packed now: `download` waits for that."""
        return self.packed is not None

    def _pack(self) -> packing.Packed | None:
        """Begin to pack the columns of C into what is left of the slot; None where that does not pay."""
        c, device, arena = self.c, self.device, self.arena
        assert c is not None
        size = packed_bound(c.shape, c.nnz, c.indices.itemsize)
        # Columns of dense blocks are a small part of C.
        small = c.data.ndim > 1 or c.nnz < LEAST_PACKED or c.dtype.kind not in packing.KINDS
        if device.plain_blocks or small or arena.size - arena.used < size + ALLOCATION:
            device.plain_blocks = max(0, device.plain_blocks - 1)
            return None
        with self.stream, self.cupy.cuda.using_allocator(arena.malloc):
            begin = self._begin("pack", self.stream)
            packed = packing.pack(c, self.cupy.empty(size, np.uint8), values=False)
            self._end("pack", self.stream, c.nnz * c.indices.itemsize, begin)
        return packed

    def _take_packed(self) -> packing.Packed | None:
        """Wait until C is packed; None where it is not, or where that does not pay."""
        packed, self.packed = self.packed, None
        if packed is None or packed.wait().choose(unpackers()).columns:
            return packed
        self.device.plain_blocks = PLAIN_BLOCKS
        pipeline.logger.info("columns of C are copied as they are: %s", packed.why)
        return None

    def _unpack_later(self, packed: packing.Packed, host: Bytes, rows: int, indices: Any) -> None:
        """Note the parts of C's columns that threads are to unpack."""
        offsets, units = np.empty(rows + 1, packed.pointer), packed_units(rows, len(indices))
        cuts = np.unique(np.linspace(0, units, unpackers() + 1).astype(np.int64)).tolist()
        self.work = [
            functools.partial(packing.unpack, host, offsets, indices, None, first, last)
            for first, last in itertools.pairwise(cuts)
        ]

    def download(self, rows: int, nnz: int, offsets: Any, indices: Any, data: Any) -> None:
        """Fetch the first `rows` rows of C; returns at once, or when C is packed."""
        c: Any = self.c
        packed = self._take_packed() if (rows, nnz) == (c.nrows, c.nnz) else None
        runtime, stream = self.cupy.cuda.runtime, self.device.down
        begin = self._begin("download", stream, "pack" if packed else "multiply")
        parts = [
            (offsets, c.indptr.data.ptr + c.indptr.itemsize, offsets.nbytes),
            (indices, c.indices.data.ptr, indices.nbytes),
            (data, c.data.data.ptr, data.nbytes),
        ]
        if packed:
            host = self.device.allocate(packed.nbytes)
            self._unpack_later(packed, host, rows, indices)
            parts[1] = host, packed.source, packed.nbytes
        for target, source, size in parts:
            if size:
                runtime.memcpyAsync(target.ctypes.data, source, size, runtime.memcpyDeviceToHost, stream.ptr)
        self._end("download", stream, sum(size for _, _, size in parts), begin)

    def take_work(self) -> list[Callable[[], None]]:
        """Return what is left to be done on the host for the block that has come back."""
        work, self.work = self.work, []
        return work

    def wait(self) -> list[Stage]:
        """Wait until all that was asked of the slot is done; say what it took."""
        for event in () if self.idle else (self.ended["upload"], self.stream, self.ended["download"]):
            event.synchronize()
        self.idle = True
        self.device.let_go()
        steps, self.steps, staged = self.steps, [], self.staged
        if staged is not None:
            staged.sends.clear()  # arrays of the caller's may be among them
        if staged is None or staged.nbytes > self.size:
            return []
        elapsed = self.cupy.cuda.get_elapsed_time
        return [
            Stage(staged.start, name, begin, 1e-3 * elapsed(self.begun[name], self.ended[name]), nbytes)
            for name, nbytes, begin in steps
        ]


class Gpu:
    """The current GPU within a memory limit; see `outofcore.Device`.

    Parameters
    ----------
    memory_limit : int, optional
        Bytes of device memory, the CUDA context and compiled kernels not counted; by default 0.9 of what is free.
    deterministic : bool
        Whether products are added in the order of A's entries.
    ahead : int
        Bytes of page-locked host memory for blocks on their way to the GPU.
    pack : bool
        Whether C's columns may come back packed, where `packing` expects that to be quicker.
    malloc : callable, optional
        Takes bytes, returns device memory, as of a pool of CuPy's; by default memory that goes back to the system.

    Attributes
    ----------
    peak : int
        The most device memory that was held, in bytes.
    up, down : cupy.cuda.Stream
        For copies to the GPU, and to the host.
    """

    def __init__(
        self,
        memory_limit: int | None = None,
        *,
        deterministic: bool = False,
        ahead: int = AHEAD_BYTES,
        pack: bool = True,
        malloc: Callable[[int], Any] | None = None,
    ) -> None:
        import cupy

        self.cupy, self.deterministic, self.ahead = cupy, deterministic, ahead
        self.memory_limit = free_memory() if memory_limit is None else memory_limit
        self.malloc = malloc or self._from_system
        self.b: CSR | None = None
        self.b_is_sound = False  # or not looked at yet
        self.entries_per_product = 0.0  # of the last block
        self.ones: Any = None
        self.up, self.down = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._number = cupy.cuda.Device()  # which threads must say too
        self.peak = 0
        self.kinds: DeviceDtypes | None = None
        self._kept: tuple[CSR, DeviceDtypes] | None = None
        self._slots: list[GpuSlot] = []
        self._slot_bytes = self._b_bytes = self._work_bytes = 0
        self.work = BlockEpilogue(PLAIN, None, (0, 0), np.dtype(np.float64))
        self._b_memory: Any = None  # outlives B, for another of the same size
        self._sending: list[tuple[Any, Bytes]] = []  # page-locked memory that copies may still read
        self.plain_blocks = 0 if pack else sys.maxsize

    # -- memory --------------------------------------------------------------------------------------------------------

    def _from_system(self, size: int) -> Any:
        """Return device memory, from no pool."""
        cuda = self.cupy.cuda
        try:
            return cuda.MemoryPointer(cuda.Memory(size), 0)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            raise cuda.memory.OutOfMemoryError(size, 0) from None

    def _note(self) -> None:
        held = self._b_bytes + self._work_bytes + sum(slot.size for slot in self._slots)
        assert held <= self.memory_limit, f"{held} bytes of {self.memory_limit}"
        self.peak = max(self.peak, held)

    def begin(
        self, spec: ProductSpec, reduction: Reduction | None, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> int:
        """Take what blocks are to be made into; return the bytes that this takes besides B and the slots.

        Raises
        ------
        MatrixError
            If the GPU's kernels do not multiply such values.
        """
        number = number_dtype(dtype)
        value_type(number)
        if blocksize(dtype) is not None and number.kind not in "fc":
            raise MatrixError(
                f"blocks of {number} are not multiplied on the GPU: convert to float32, float64 or complex"
            )
        work, self.entries_per_product = BlockEpilogue(spec, reduction, shape, dtype), 0.0
        taken = sum(work.sizes)
        if self._work_bytes or taken > self._work_bytes:
            self._drop_slots()
        self.work, self._work_bytes = work, 0
        if 2 * taken <= self.memory_limit and taken:
            self._place(work)
            self._work_bytes = taken
        return taken

    def _place(self, work: BlockEpilogue) -> None:
        """Send the factors of rows and columns, and make room for sums."""
        memory = self.malloc(sum(work.sizes))
        arrays: list[Any] = []
        offset = 0
        sums = work.sums_of_columns
        for values, size in zip((*work.factors, sums), work.sizes, strict=True):
            if values is not None:
                self._send((values, values.dtype, memory.ptr + offset))
            arrays.append(None if values is None else self.cupy.ndarray((len(values),), values.dtype, memory + offset))
            offset += size
        work.take(arrays)

    def take_sums(self) -> Reduced:
        """Return the sums of the columns of all blocks."""
        sums, runtime = self.work.sums, self.cupy.cuda.runtime
        found = np.empty(len(sums), sums.dtype)
        runtime.memcpyAsync(found.ctypes.data, sums.data.ptr, sums.nbytes, runtime.memcpyDeviceToHost, self.down.ptr)
        self.down.synchronize()
        return self.work.part(found)

    def _drop_slots(self) -> None:
        for slot in self._slots:
            slot.release()
        self._slots, self._slot_bytes = [], 0

    def slots(self, count: int, size: int, kept: int) -> list[GpuSlot]:
        """Return slots of `size` bytes; of less where another program has taken the GPU's memory."""
        size = size // ALLOCATION * ALLOCATION
        if self._b_bytes not in (0, kept):
            self._forget()
            self._b_memory, self._b_bytes = None, 0
        if len(self._slots) == count and self._slot_bytes == size:
            return self._slots
        self._drop_slots()
        self._slot_bytes = size
        while not self._slots:
            try:
                self._slots = [GpuSlot(self, self.malloc(size), size) for _ in range(count)]
            except self.cupy.cuda.memory.OutOfMemoryError:
                self._slots = []
                self._shrunk(size)
                size = size // 2 // ALLOCATION * ALLOCATION
        self._note()
        return self._slots

    def _shrunk(self, size: int) -> None:
        """Say that the GPU has no room for slots of a size; give up where they would be too small."""
        free = self.cupy.cuda.runtime.memGetInfo()[0]
        if size < 2 * LEAST_SLOT:
            raise MemoryBoundError(
                f"the GPU has {format_bytes(free)} free, too little for a block: end what else uses it, or choose "
                f"another GPU with CUDA_VISIBLE_DEVICES"
            )
        pipeline.logger.warning(
            "the GPU has no room for blocks of %s, though memory_limit allows them: another program uses it; blocks "
            "of half the size from here on", format_bytes(size)
        )  # fmt: skip

    def _forget(self) -> None:
        if self._kept is not None:
            self.up.synchronize()  # B's arrays may be on their way
            self.let_go()
        self.b, self.ones, self._kept, self.b_is_sound = None, None, None, False

    def keep(self, b: CSR | None, kinds: DeviceDtypes) -> bool:
        """Keep B on the GPU, or nothing; return whether B is there.

        One of the same arrays is not sent again: these must not change from product to product.
        """
        self.kinds = kinds
        if b is not None and self._kept is not None and _is_same(self._kept[0], b) and self._kept[1] == kinds:
            return True
        self._forget()
        if b is None:
            return False
        part, size = lay_out_whole(b, kinds)
        if size != self._b_bytes:
            self._b_memory, self._b_bytes = None, 0
            try:
                self._b_memory = self.malloc(size)
            except self.cupy.cuda.memory.OutOfMemoryError:
                pipeline.logger.warning(
                    "the GPU has no room for B, another program uses it: its rows come block by block"
                )
                return False
            self._b_bytes = size
            self._note()
        memory = self._b_memory
        self._send(
            (b.data, kinds.b, memory.ptr + part.data),
            (b.indices, kinds.index, memory.ptr + part.indices),
            (b.indptr, kinds.pointer, memory.ptr + part.indptr),
        )
        self.b = self.matrix(memory, part)
        if kinds.blocked:
            self.ones = self.cupy.ndarray((b.nnz,), np.float32, memory + part.end)
            self.ones.fill(1)
            self.cupy.cuda.Device().synchronize()  # slots have streams of their own
        self._kept = b, kinds
        return True

    def inside(self, start: int, stop: int) -> tuple[int, int]:
        """Return where the entries of rows of the B that is kept begin and end."""
        assert self._kept is not None
        return int(self._kept[0].indptr[start]), int(self._kept[0].indptr[stop])

    def _send(self, *arrays: tuple[Any, np.dtype[Any], int]) -> None:
        """Copy arrays, each as a dtype to an address; they are still on their way after it.

        Those that are not in page-locked memory go by way of such, which threads fill; each sends what it has filled.
        """
        runtime, stream = self.cupy.cuda.runtime, self.up
        pieces: list[tuple[Any, np.dtype[Any], int]] = []
        for array, dtype, target in arrays:
            if array.dtype == dtype and self.is_locked(array):
                runtime.memcpyAsync(target, array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice, stream.ptr)
                continue
            step = PIECE // dtype.itemsize
            pieces.extend(
                (array[first : first + step], dtype, target + first * dtype.itemsize)
                for first in range(0, len(array), step)
            )
        threads = min(len(pieces), cores())
        if threads < 2:
            self._send_pieces(pieces)
            return
        submit = pool(cores(), "send").submit
        jobs = [submit(self._send_pieces, pieces[first::threads]) for first in range(threads)]
        wait(jobs)
        for job in jobs:
            job.result()

    def _send_pieces(self, pieces: list[tuple[Any, np.dtype[Any], int]]) -> None:
        """Copy pieces by way of page-locked memory: one is filled while the one before is on its way."""
        runtime, stream = self.cupy.cuda.runtime, self.up
        self._number.use()
        flying: collections.deque[tuple[Any, Bytes]] = collections.deque()
        for values, dtype, target in pieces:
            if len(flying) < 2:
                memory = pinned(PIECE)
            else:
                event, memory = flying.popleft()
                event.synchronize()
            piece = array_at(memory, 0, len(values), dtype)
            piece[:] = values
            runtime.memcpyAsync(target, piece.ctypes.data, piece.nbytes, runtime.memcpyHostToDevice, stream.ptr)
            flying.append((stream.record(), memory))
        self._sending.extend(flying)

    def let_go(self) -> None:
        """Let go of the page-locked memory that copies have read."""
        self._sending = [each for each in self._sending if not each[0].done]

    def note(self, arrays: Iterable[Any], /) -> None:
        """Take note of a product that reads arrays: the second finds them locked."""
        host_registration.note(arrays)

    def is_locked(self, array: Any, /) -> bool:
        """Whether the GPU copies from an array as it is."""
        runtime, size = self.cupy.cuda.runtime, array.nbytes
        ends = (array.ctypes.data, array.ctypes.data + size - 1) if size and array.flags.c_contiguous else ()
        return bool(ends) and all(runtime.pointerGetAttributes(end).type == HOST_MEMORY for end in ends)

    def matrix(self, memory: Any, part: Part) -> CSR:
        """Return the matrix that lies in a block's memory; blocks as values of three dimensions, (nnz, r, s)."""
        kinds = self.kinds
        assert kinds is not None

        def array(offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
            return self.cupy.ndarray(shape, dtype, memory + offset)

        size = blocksize(part.value) or ()
        return CSR(
            array(part.indptr, (part.nrows + 1,), kinds.pointer),
            array(part.indices, (part.nnz,), kinds.index),
            array(part.data, (part.nnz, *size), number_dtype(part.value)),
            (part.nrows, part.ncols),
        )

    def product(self, a: CSR, b: CSR) -> CSR:
        """Multiply two matrices whose values are blocks."""
        c = bsr_gpu.multiply(*map(_with_sizes, (a, b)), ones=self.ones if b is self.b else None)
        return c.pattern(c.data)

    def copy_rates(self) -> dict[str, float]:
        """Return the bytes/s at which a block is sent, and comes back; nothing where the GPU has no memory for that."""
        size = min(COPY_BYTES, self.memory_limit // 2)
        try:
            host, there = pinned(size), self.malloc(size)
        except self.cupy.cuda.memory.OutOfMemoryError:
            return {}
        runtime, ends = self.cupy.cuda.runtime, (there.ptr, host.ctypes.data)
        ways = {
            "gpu upload": (*ends, size, runtime.memcpyHostToDevice, self.up),
            "gpu download": (*ends[::-1], size, runtime.memcpyDeviceToHost, self.down),
        }
        return {name: size / min(self._copy_seconds(*way) for _ in range(COPIES)) for name, way in ways.items()}

    def _copy_seconds(self, target: int, source: int, size: int, kind: int, stream: Any) -> float:
        begin = time.perf_counter()
        self.cupy.cuda.runtime.memcpyAsync(target, source, size, kind, stream.ptr)
        stream.synchronize()
        return time.perf_counter() - begin

    def allocate(self, size: int, /) -> Bytes:
        """Return page-locked memory."""
        return pinned(size)


def _with_sizes(m: CSR) -> BSR:
    """Return a matrix whose values are blocks as what it is."""
    _, r, s = m.data.shape
    return BSR(m.indptr, m.indices, m.data, (m.nrows * r, m.ncols * s))


def _is_same(b: CSR, other: CSR) -> bool:
    """Return whether two matrices are of the same arrays."""
    return share_entries(b, other) and b.indptr is other.indptr and b.shape == other.shape
