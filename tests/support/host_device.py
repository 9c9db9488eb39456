"""A device whose memory is the host's: the host's part of the streaming pipeline runs without a GPU."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from spdist.errors import MatrixError
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu.reduce import reduce_rows
from spdist.kernels.cuda.pinned import array_at, pageable
from spdist.kernels.product_spec import PLAIN, ProductSpec
from spdist.kernels.reduction_spec import PartialReduction, combine
from spdist.kernels.streaming.layout import DeviceDtypes, MatrixLayout, StagedBlock
from spdist.kernels.streaming.protocols import ArenaFullError, DownloadTarget, Stage
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, blocksize


def poisoned(size: int) -> Any:
    """Return host memory with every bit set."""
    memory = pageable(size)
    memory[:] = 0xFF
    return memory


def multiply(a: CSR, b: CSR) -> CSR:
    """Return the product of matrices of numbers, or of blocks."""
    if blocksize(a.dtype) is None:
        return cpu.multiply(a, b, engine="scipy")
    return bsr_cpu.multiply_rows(a, b, 0, INT32_MAX)


class Room:
    """Memory of a slot; it is taken as long as anything holds it."""

    def __init__(self, size: int) -> None:
        self.size = size


class HostSlot:
    """Multiplies uploaded blocks on the CPU; holds C until the next block."""

    def __init__(self, device: HostDevice, size: int) -> None:
        self.device, self.size = device, size
        self.room: Room | None = Room(size)
        self.memory: Any = None
        self.staged: StagedBlock | None = None
        self.c: CSR | None = None
        self.pending: list[Any] = []
        self.work: list[Any] = []
        self.steps: list[str] = []
        self.held = 0
        self.part: PartialReduction | None = None

    def upload(self, staged: StagedBlock) -> None:
        assert not self.pending, "the block before has not come back"
        self.staged, self.memory, self.c, self.steps = staged, poisoned(staged.nbytes), None, ["upload"]
        for array, target in staged.copies:
            self.memory[target : target + array.nbytes] = array.reshape(-1).view(np.uint8)

    def _matrix(self, part: MatrixLayout) -> CSR:
        dtypes = self.device.dtypes
        indptr = array_at(self.memory, part.indptr, part.nrows + 1, dtypes.pointer).astype(np.int64)
        indices = array_at(self.memory, part.indices, part.nnz, dtypes.index)
        return CSR(indptr, indices, array_at(self.memory, part.data, part.nnz, part.value), (part.nrows, part.ncols))

    def multiply(self, expected: int = 0, while_busy: Callable[[], None] | None = None) -> int:
        assert self.staged is not None
        if while_busy is not None and self.staged.start % 3:  # a device may or may not be busy
            while_busy()
        room = self.room  # of the arrays of this frame
        assert room is not None
        b = self.device.b if self.staged.b is None else self._matrix(self.staged.b)
        row, rows = self.staged.row_in_b, self.staged.rows
        a = self._matrix(self.staged.a) if row is None else b.rows(row, row + rows)
        a = CSR(a.indptr, a.indices - a.indices.dtype.type(self.staged.column_offset), a.data, (rows, b.nrows))
        if a.nnz and not 0 <= a.indices.min() <= a.indices.max() < b.nrows:
            raise MatrixError("a column of A is out of range")  # as the GPU's kernels find
        options = self.device.spec.of_rows(self.staged.start, self.staged.start + a.nrows)
        whole = multiply(a, b) if options.plain else cpu.multiply(a, b, engine="numba", spec=options.unfinished)
        self.c, self.held = whole, whole.nnz
        if options.finishes:
            indptr, indices, data = (x.copy() for x in (whole.indptr, whole.indices, whole.data))
            self.c = cpu.cut(CSR(indptr, indices, data, whole.shape), options)
        needed = self.staged.nbytes + whole.nbytes
        self.device.most = max(self.device.most, needed if needed <= self.size else 0)
        if needed > room.size:
            raise ArenaFullError(needed)
        self.steps.append("multiply")
        return self.c.nnz

    def reduce(self, first_row: int) -> None:
        self.part = reduce_rows(self.device.reduction, self.c, first_row + self.staged.start)
        self.device.parts.append(self.part)
        self.steps.append("reduce")

    def take_part(self) -> PartialReduction:
        assert self.part is not None
        return self.part

    @property
    def is_packing(self) -> bool:
        """Every other block is, so that both ways are taken."""
        return self.staged is not None and self.staged.start % 2 == 0

    def download(self, target: DownloadTarget) -> None:
        rows, nnz, *arrays = target
        sources = self.c.indptr[1 : rows + 1], self.c.indices[:nnz], self.c.data[:nnz]
        self.pending = list(zip(arrays, sources, strict=True))
        self.steps.append("download")

    def wait(self) -> list[Stage]:
        for number, (target, source) in enumerate(self.pending):
            if number != 1:
                target[:] = source
                continue
            # Columns come back as if they were packed: two threads unpack them.
            for part in (slice(len(target) // 2), slice(len(target) // 2, None)):
                self.work.append(functools.partial(np.copyto, target[part], source[part], casting="unsafe"))
        self.pending = []
        steps, self.steps = self.steps, []
        return [Stage(self.staged.start, name, 0.0, 0.0, self.staged.nbytes) for name in steps]

    def take_host_work(self) -> list[Any]:
        work, self.work = self.work, []
        return work


class HostDevice:
    """Checks its calls, and records the most bytes of a block."""

    def __init__(self, memory_limit: int, staging_bytes: int = 1 << 30, pack: bool = True) -> None:
        self.memory_limit, self.staging_bytes, self.most = memory_limit, staging_bytes, 0
        self.b: CSR | None = None
        self.dtypes: DeviceDtypes
        self.taken: list[tuple[int, int]] = []
        self.living: weakref.WeakSet[Room] = weakref.WeakSet()
        self.given: list[HostSlot] = []
        self.spec, self.reduction, self.parts = PLAIN, None, []
        self.locked = False  # whether operands are sent from where they are
        self.allocated = 0

    @property
    def peak(self) -> int:
        return self.most

    def slots(self, count: int, size: int, kept: int) -> list[HostSlot]:
        for slot in self.given:
            slot.room = None
        deadline = time.monotonic() + 2
        while self.living and time.monotonic() < deadline:
            time.sleep(0.001)  # Dask's profiler looks at frames of other threads, and holds them meanwhile
        assert count * size + kept + sum(room.size for room in self.living) <= self.memory_limit
        self.taken.append((count, size))
        self.given = [HostSlot(self, size) for _ in range(count)]
        self.living.update(slot.room for slot in self.given)
        return self.given

    def begin(self, spec: ProductSpec, reduction: Any, shape: tuple[int, int], dtype: Any) -> int:
        self.spec, self.reduction, self.parts = spec, reduction, []
        return 0

    def take_sums(self) -> PartialReduction:
        return combine("column_sums", self.parts)

    def keep(self, b: CSR | None, dtypes: DeviceDtypes) -> bool:
        self.b, self.dtypes = b, dtypes
        return b is not None

    def allocate(self, size: int, /) -> Any:
        self.allocated += size
        return poisoned(size)

    def copy_rates(self) -> dict[str, float]:
        return {"gpu upload": 1e9}

    def note_operands(self, arrays: Any, /) -> None:
        pass

    def is_locked(self, array: Any, /) -> bool:
        return self.locked and bool(array.size)
