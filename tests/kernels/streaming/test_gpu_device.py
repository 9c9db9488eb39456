"""The memory of one GPU: what is held at any time, and which B; host memory takes the GPU's place."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_array_equal

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.kernels.bsr import multiply_cpu as bsr_cpu
from spdist.kernels.cpu import multiply as cpu
from spdist.kernels.cpu.reduce import reduce_product
from spdist.kernels.cuda import pinned
from spdist.kernels.product_spec import Epilogue, ProductSpec
from spdist.kernels.reduction_spec import REDUCTIONS, Histogram, final_value
from spdist.kernels.rowwise_gpu import epilogue as gpu_epilogue
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.kernels.semirings import PLUS_TIMES, SEMIRINGS, Semiring
from spdist.kernels.streaming import packing, pipeline
from spdist.kernels.streaming.gpu_device import Gpu
from spdist.kernels.streaming.gpu_memory import GpuTuning
from spdist.kernels.streaming.layout import DeviceDtypes, SubmatrixOffset, device_dtypes
from spdist.kernels.streaming.multiplication import RowSlice
from spdist.kernels.streaming.partition import BlockTuning
from spdist.kernels.streaming.pipeline import PipelineTuning
from spdist.matrices.bsr import BSR, from_rows
from spdist.matrices.csr import CSR, from_scipy
from tests.conftest import random_matrix
from tests.kernels.bsr.test_multiply_cpu import assert_is_block_product, block_matrix
from tests.support import epilogue_twin, host_cupy, packing_twin

TUNING = PipelineTuning(small_entries=-1, blocks=BlockTuning(first_bytes=0, scratch_bytes=1 << 10))
DTYPES = DeviceDtypes(*map(np.dtype, ("f8", "i4", "i4", "f8", "f8")))


LOCKED: set[int] = set()
"""Host memory that is page-locked."""


class Memory:
    """Device memory that is counted while it is held."""

    held = 0
    most = 0

    def __init__(self, size: int) -> None:
        self.bytes, self.size = np.empty(size, np.uint8), size
        Memory.held += size
        Memory.most = max(Memory.most, Memory.held)

    def __del__(self) -> None:
        Memory.held -= self.size


class Pointer:
    """An address in memory that it holds."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self.memory, self.offset = memory, offset
        self.ptr = memory.bytes.ctypes.data + offset

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


class DeviceArray(np.ndarray):
    """An array in such memory."""

    @property
    def data(self) -> Pointer:
        return SimpleNamespace(ptr=self.ctypes.data)


def array(shape, dtype, pointer):
    flat = pinned.array_at(pointer.memory.bytes, pointer.offset, math.prod(shape), dtype)
    return flat.reshape(shape).view(DeviceArray)


class Event:
    """Must be recorded before a stream waits for it, and before it tells the time."""

    recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        pass


class Stream(host_cupy.Stream):
    """A stream that is done at once; it waits for what was recorded only."""

    def wait_event(self, event: Event) -> None:
        assert event.recorded


def elapsed(begin: Event, end: Event) -> float:
    assert begin.recorded
    assert end.recorded
    return 1.0


class Allocator:
    """What CuPy takes memory from at the moment."""

    malloc = None

    @contextlib.contextmanager
    def using(self, malloc):
        before, self.malloc = self.malloc, malloc
        yield
        self.malloc = before

    def empty(self, size, dtype):
        dtype = np.dtype(dtype)
        return array((size,), dtype, self.malloc(size * dtype.itemsize))

    def of(self, values):
        new = self.empty(values.size, values.dtype).reshape(values.shape)
        new[:] = values
        return new


@pytest.fixture
def allocator():
    return Allocator()


@pytest.fixture
def device(monkeypatch, allocator):
    """Give a GPU of 1 MiB."""
    runtime = SimpleNamespace(
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        pointerGetAttributes=lambda pointer: SimpleNamespace(type=int(pointer in LOCKED)),
        CUDARuntimeError=RuntimeError,
    )
    memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    names = {"runtime": runtime, "memory": memory, "Memory": Memory, "MemoryPointer": Pointer}
    names |= {"using_allocator": allocator.using, "get_elapsed_time": elapsed, "Stream": Stream, "Event": Event}
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(use=list, synchronize=list), **names)
    whole = SimpleNamespace(
        cuda=cuda, ndarray=array, empty=allocator.empty, asarray=allocator.of,
        zeros=lambda size, dtype: allocator.of(np.zeros(size, dtype)),
        subtract=lambda x, y: allocator.of(np.subtract(x, y)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", whole)
    for name in ("gpu_device", "gpu_slot", "gpu_memory"):
        monkeypatch.setattr(f"spdist.kernels.streaming.{name}.pinned", pinned.pageable)
    Memory.held = Memory.most = 0
    return Gpu(1 << 20, pack=True, tuning=GpuTuning(least_packed=50, plain_blocks=2))


@pytest.fixture
def multiplies(monkeypatch, allocator):
    """Multiply matrices of this GPU on the CPU, and pack C in plain Python."""

    def on_host(m):
        return CSR(m.indptr.astype(np.int64), np.asarray(m.indices), np.asarray(m.data), m.shape)

    def product(a, b, semiring, mask=None, complement=False):
        return cpu.multiply(on_host(a), on_host(b), spec=ProductSpec(semiring, mask, complement))

    def under_mask(a, b, mask, complement, deterministic, semiring, sound_b):
        c = product(a, b, semiring, on_host(mask), complement)
        return to_device(c), c.nnz

    def multiply(a, b, deterministic, semiring, sound_b, expected, meanwhile):
        if meanwhile is not None:
            meanwhile()
        return to_device(product(a, b, semiring))

    def to_device(c):
        return CSR(allocator.of(c.indptr.astype(np.int32)), allocator.of(c.indices), allocator.of(c.data), c.shape)

    def offsets(lengths, dtype):
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)
        return allocator.of(indptr), int(indptr[-1])

    def multiply_blocks(a, b, ones=None):
        left, right = (
            BSR(m.indptr.astype(np.int64), np.asarray(m.indices), np.asarray(m.data), m.shape) for m in (a, b)
        )
        assert ones is None or (len(ones) == b.blocks and (ones == 1).all())
        c = bsr_cpu.multiply(left, right)
        arrays = c.indptr.astype(np.int32), c.indices, c.data
        return BSR(*map(allocator.of, arrays), c.shape)

    def pack(c, out, values):
        assert not values
        data = np.asarray(c.data) if c.data.ndim == 1 else np.random.default_rng(1).random(c.nnz)  # never looked at
        c = CSR(c.indptr.astype(np.int64), np.asarray(c.indices), data, c.shape)
        made, values = packing_twin.pack(c)
        if not values:
            assert len(made) <= len(out)
            out[: len(made)] = made
        found = SimpleNamespace(nbytes=len(made), source=out.data.ptr, pointer=np.dtype(np.int32), why="so")
        found.choose = lambda threads, costs: found
        found.wait, found.columns = lambda: found, not values and c.nnz % 7 != 0
        return found

    monkeypatch.setattr("spdist.kernels.rowwise_gpu.multiply.multiply", multiply)
    monkeypatch.setattr("spdist.kernels.rowwise_gpu.masked.multiply", under_mask)
    monkeypatch.setattr("spdist.kernels.rowwise_gpu.analysis.offsets", offsets)
    monkeypatch.setattr(
        "spdist.kernels.rowwise_gpu.multiply.count",
        lambda a, b: allocator.of(np.diff(product(a, b, PLUS_TIMES).indptr).astype(np.uint32)),
    )
    monkeypatch.setattr(gpu_epilogue, "_module", lambda *types: (epilogue_twin.NAMES, epilogue_twin.launch))
    monkeypatch.setattr("spdist.kernels.bsr.multiply_gpu.multiply", multiply_blocks)
    monkeypatch.setattr(packing, "pack", pack)


def multiply(a: CSR, b: CSR, device: Gpu, **options: Any) -> CSR:
    return pipeline.multiply(a, b, device, **({"tuning": TUNING} | options))


@pytest.mark.parametrize("limit", [1 << 17, 1 << 20, 1 << 24])
@pytest.mark.parametrize("kind", ["random", "banded"])
def test_blocks_go_through_slots(device, multiplies, kind, limit):
    """With B resident, or sent in rows or windows; columns packed, not packed, and tried again."""
    m = random_matrix(3000, 3000, 6.0, 3)
    if kind == "banded":
        m = sp.csr_matrix(sp.diags_array([np.random.default_rng(k).random(3000) for k in range(7)],
                                         offsets=range(-3, 4), shape=(3000, 3000)))  # fmt: skip
    a, stages = from_scipy(m), []
    device.memory_limit = limit
    c = multiply(a, a, device, report=stages.append)
    d = cpu.multiply(a, a, engine="scipy")
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices)):
        assert_array_equal(x, y)
    np.testing.assert_allclose(c.data, d.data, rtol=1e-14)
    names = Counter(stage.name for stage in stages)
    assert names["download"] == names["multiply"] == names["upload"] == names["prepare"]
    assert 0 < names["pack"] <= names["multiply"] or limit == 1 << 24


@pytest.mark.parametrize("limit", [1 << 18, 1 << 20])
def test_rows_that_lie_in_b(device, multiplies, limit):
    """Under the larger limit B stays, and its columns are renumbered by the rows on the device."""
    device.memory_limit, n, row, low = limit, 900, 200, 7
    b = from_scipy(random_matrix(n, n, 9.0, 3))
    b = CSR(b.indptr, b.indices + low, b.data, (n, n + low))
    part = b.rows(row, row + 500)
    a = CSR(part.indptr, part.indices - low, part.data, (500, n))
    c, d = (
        pipeline.multiply_rows(a, b, device, RowSlice(offset=SubmatrixOffset(row, low)), tuning=TUNING),
        cpu.multiply(a, b, engine="scipy"),
    )
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices)):
        assert_array_equal(x, y)
    np.testing.assert_allclose(c.data, d.data, rtol=1e-14)


def test_b_is_looked_at_until_a_block_has_entries(device, multiplies, monkeypatch):
    """Rows without entries read nothing of B."""
    m = random_matrix(3000, 3000, 6.0, 3).tolil()
    m[:1500] = 0
    a, trusted, kernel = from_scipy(m.tocsr()), [], rowwise_gpu.multiply

    def noting(x, y, **known):
        trusted.append((x.nnz, known["sound_b"]))
        return kernel(x, y, **known)

    monkeypatch.setattr(rowwise_gpu, "multiply", noting)
    device.memory_limit = 1 << 20
    assert multiply(a, a, device).nnz == cpu.multiply(a, a).nnz
    first = next(number for number, (entries, _) in enumerate(trusted) if entries)
    assert first > 0
    assert not any(sound for _, sound in trusted[: first + 1])
    assert all(sound for _, sound in trusted[first + 1 :])


def test_memory_is_kept_until_copies_have_read_it(device, multiplies, monkeypatch):
    """A B in ordinary memory is still on its way when `keep` returns."""
    b = from_scipy(random_matrix(800, 800, 6.0, 3))
    monkeypatch.setattr(Stream, "done", False)
    device.keep(b, device_dtypes(b, b))
    assert len(device.context.uploader._in_use) == 3  # values, columns, offsets
    device.context.uploader.release_sent()
    assert len(device.context.uploader._in_use) == 3
    monkeypatch.setattr(Stream, "done", True)
    assert multiply(b, b, device).nnz == cpu.multiply(b, b).nnz
    assert not device.context.uploader._in_use


N = 500
EPILOGUES = {
    "all": Epilogue(
        rows=np.arange(N) % 5 - 1.0, columns=np.arange(N) % 3 - 1.0, apply=lambda x: x * x + 1, cuda="x * x + 1",
        normalize="l2",
    ),
    "rows": Epilogue(rows=np.arange(N) % 4 - 1.0, drop_zeros=True),
    "l1": Epilogue(normalize="l1"),
    "max": Epilogue(normalize="max", drop_zeros=True),
}  # fmt: skip
OPTIONS = {
    "top": ProductSpec(top_n=3),
    "threshold": ProductSpec(threshold=1.5),
    "both": ProductSpec(threshold=-2.0, top_n=11, epilogue=EPILOGUES["rows"]),
    "min_plus": ProductSpec(SEMIRINGS["min_plus"], top_n=2),
    "plus_pair": ProductSpec(SEMIRINGS["plus_pair"], threshold=2),
    "or_and": ProductSpec(SEMIRINGS["or_and"], top_n=4),
    "whole": ProductSpec(SEMIRINGS["max_times"]),
} | {name: ProductSpec(epilogue=epilogue) for name, epilogue in EPILOGUES.items()}


def small_whole_numbers(seed: int) -> CSR:
    """Return a matrix whose products repeat, cancel, and are exact in any order."""
    m = random_matrix(N, N, 9.0, seed)
    m.data = np.random.default_rng(seed).integers(-2, 3, m.nnz).astype(float)
    return from_scipy(m)


MASK = small_whole_numbers(9)
OPTIONS["inside"] = ProductSpec(SEMIRINGS["plus_pair"], MASK)
OPTIONS["outside"] = ProductSpec(mask=MASK, complement=True, top_n=5)


@pytest.mark.parametrize("limit", [1 << 17, 1 << 22])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_blocks_are_made_into_answers(device, multiplies, name, limit):
    a, b, options = small_whole_numbers(1), small_whole_numbers(2), OPTIONS[name]
    device.memory_limit = limit
    c, d = multiply(a, b, device, spec=options), cpu.multiply(a, b, spec=options)
    assert c.dtype == d.dtype
    assert_array_equal(c.indptr, d.indptr)
    assert_array_equal(c.indices, d.indices)
    np.testing.assert_allclose(c.data, d.data, rtol=1e-13)
    assert Memory.most <= limit
    assert multiply(a, b, device).nnz == cpu.multiply(a, b).nnz  # nothing is left of the options


@pytest.mark.parametrize("what", [*REDUCTIONS, Histogram((-5.0, 0.0, 3.0))], ids=str)
@pytest.mark.parametrize("name", [None, "top", "all", "inside", "or_and"])
def test_blocks_are_reduced(device, multiplies, name, what):
    a, b, options = small_whole_numbers(3), small_whole_numbers(4), OPTIONS[name] if name else ProductSpec()
    stages = []
    part = pipeline.reduce(a, b, what, device, spec=options, report=stages.append)
    expected = reduce_product(what, a, b, threads=1, spec=options)
    found = final_value(what, part, N)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert np.asarray(found).dtype == np.asarray(expected).dtype
    back = [stage.nbytes for stage in stages if stage.name == "download"]
    assert sum(back) <= 8 * (N + 2 * len(back))
    assert Memory.most <= 1 << 20
    if name not in ("all", "inside"):  # have factors for all rows
        some = pipeline.reduce(a.rows(7, 90), b, what, device, RowSlice(first_row=7), spec=options)
        assert len(some.values) in (1, 2, 83, N)


def test_what_the_gpu_does_not_do_is_refused(device):
    a = small_whole_numbers(1)
    own = Semiring(lambda x, y: x + y, lambda x, y: x, 0)
    for options, message in (
        (ProductSpec(own), "no C expressions"),
        (ProductSpec(epilogue=Epilogue(apply=abs)), "C expression of x"),
    ):
        with pytest.raises(InputError, match=message):
            multiply(a, a, device, spec=options)
    short = CSR(a.indptr, a.indices, a.data.astype(np.int16), a.shape)
    with pytest.raises(MatrixError, match="int16 is not multiplied on the GPU"):
        multiply(short, short, device)
    device.memory_limit = 3 * 8 * N
    with pytest.raises(MemoryBoundError, match="raise memory_limit"):
        multiply(a, a, device, spec=ProductSpec(epilogue=EPILOGUES["all"]))


def test_a_small_product_goes_through_one_slot(device, multiplies, monkeypatch):
    """With one copy to the GPU, where A is B."""
    device.memory_limit = 1 << 22
    a, stages, kinds, runtime = from_scipy(random_matrix(300, 300, 6.0, 3)), [], [], sys.modules["cupy"].cuda.runtime
    copy = runtime.memcpyAsync
    monkeypatch.setattr(runtime, "memcpyAsync", lambda *args: kinds.append(args[3]) or copy(*args))
    tuning = replace(TUNING, small_entries=1 << 20)
    c, d = multiply(a, a, device, report=stages.append, tuning=tuning), cpu.multiply(a, a, engine="scipy")
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices)):
        assert_array_equal(x, y)
    assert [stage.name for stage in stages if stage.name == "multiply"] == ["multiply"]
    assert kinds.count(runtime.memcpyHostToDevice) == 1
    assert device.context.resident.matrix is None


@pytest.mark.parametrize("limit", [1 << 17, 1 << 20, 1 << 24])
@pytest.mark.parametrize("sides", [(2, 2, 2), (3, 2, 4)])
def test_values_that_are_blocks_go_through_slots(device, multiplies, sides, limit):
    a, b = block_matrix(900, 900, 6.0, sides[:2], 1, "float32"), block_matrix(900, 900, 6.0, sides[1:], 2)
    device.memory_limit = limit
    rows, stages = b.rows(), []
    for _ in range(2):  # B is kept for the second
        c = multiply(a.rows(), rows, device, report=stages.append)
        assert_is_block_product(from_rows(c), a, b)
    assert (device.context.resident.ones is None) == (device.context.resident.matrix is None)
    assert device.peak <= limit
    names = Counter(stage.name for stage in stages)
    assert names["download"] == names["multiply"] == names["upload"] == names["prepare"]
    assert names["multiply"] > 2


def test_slots_go_before_others_come(device):
    """Whoever still holds those before, such as a traceback."""
    before = device.slots(4, 1 << 18, 0)
    after = device.slots(1, 1 << 20, 0)
    assert [len(before), len(after)] == [4, 1]
    assert Memory.most == device.peak == 1 << 20
    assert device.slots(1, 1 << 20, 0) is after


def test_slots_and_b_fit_the_limit_in_any_order(device):
    b = from_scipy(random_matrix(900, 900, 20.0, 1))
    for kept in (300_000, 0, 300_000):
        device.slots(2, (1 << 20) - kept >> 1, kept)
        assert device.keep(b if kept else None, DTYPES) == bool(kept)
    assert Memory.most <= 1 << 20


@pytest.mark.parametrize("locked", [(0, -1), (0,), (-1,), ()])
def test_locked_b_is_copied_from_where_it_is(device, monkeypatch, locked):
    """Only if all of it is locked."""
    b, sizes = from_scipy(random_matrix(900, 900, 20.0, 1)), []
    bytes_ = b.data.view(np.uint8)
    monkeypatch.setattr(sys.modules[__name__], "LOCKED", {bytes_[end:].ctypes.data for end in locked})
    copy = sys.modules["cupy"].cuda.runtime.memcpyAsync
    sys.modules["cupy"].cuda.runtime.memcpyAsync = lambda *args: sizes.append(args[2]) or copy(*args)
    device = Gpu(1 << 20, tuning=GpuTuning(piece_bytes=1 << 12))
    device.slots(2, 1 << 18, 1 << 19)
    assert device.keep(b, DTYPES)
    assert_array_equal(device.context.resident.matrix.data, b.data)
    assert (b.data.nbytes in sizes) == (len(locked) == 2)


def test_locked_operands_are_sent_from_where_they_are(device, multiplies, monkeypatch):
    """A's values and columns, B resident; whichever part of them a block takes."""
    a, b = (from_scipy(random_matrix(900, 900, 9.0, seed)) for seed in (1, 2))
    device.memory_limit, sources = 1 << 20, []
    places = [(x.ctypes.data, x.ctypes.data + x.nbytes) for m in (a, b) for x in (m.data, m.indices)]
    monkeypatch.setattr(sys.modules[__name__], "LOCKED", {end for first, stop in places for end in (first, stop - 1)})
    copy = sys.modules["cupy"].cuda.runtime.memcpyAsync
    sys.modules["cupy"].cuda.runtime.memcpyAsync = lambda *args: sources.append(args[1:3]) or copy(*args)
    c, d = multiply(a, b, device), cpu.multiply(a, b, engine="scipy")
    for x, y in ((c.indptr, d.indptr), (c.indices, d.indices)):
        assert_array_equal(x, y)
    np.testing.assert_allclose(c.data, d.data, rtol=1e-14)
    for first, stop in places:
        assert sum(size for source, size in sources if first <= source < stop) == stop - first
    assert not any(slot.staged.copies for slot in device._slots)  # which would keep the caller's arrays


def test_what_the_bus_copies_is_measured_within_the_limit(device):
    device.memory_limit, Memory.most = 1 << 20, 0
    rates = device.copy_rates()
    assert sorted(rates) == ["gpu download", "gpu upload"]
    assert min(rates.values()) > 0
    assert 0 < Memory.most <= 1 << 20
    assert Memory.held == 0


def test_other_values_of_one_structure_are_sent_again(device):
    b = from_scipy(random_matrix(100, 100, 5.0, 2))
    other = CSR(b.indptr, b.indices, 2 * b.data, b.shape)
    for m in (b, other):
        assert device.keep(m, DTYPES)
        for x, y in (
            (device.context.resident.matrix.indptr, m.indptr),
            (device.context.resident.matrix.indices, m.indices),
            (device.context.resident.matrix.data, m.data),
        ):
            assert_array_equal(x, y)
    sent = device.context.resident.matrix
    assert device.keep(CSR(b.indptr, b.indices, other.data, b.shape), DTYPES)
    assert device.context.resident.matrix is sent


def test_few_sizes_are_kept(monkeypatch):
    locked = []
    monkeypatch.setattr(pinned, "_lock", lambda size: locked.append(size) or np.empty(size, np.uint8))
    pool, rng = pinned.Pool(), np.random.default_rng(1)
    for size in rng.integers(1 << 20, 1 << 21, 200):
        memory = pool.take(pinned.pinned_bytes(int(size)))
        assert len(memory) == pinned.pinned_bytes(int(size))
        del memory
    assert len(locked) <= 4
    first, second = pool.take(1 << 20), pool.take(1 << 20)
    assert not np.may_share_memory(first, second)


def test_as_much_memory_as_was_asked_for(monkeypatch):
    """Whole arrays are uploaded: a longer array would overwrite memory behind its target."""
    monkeypatch.setattr(pinned, "_lock", lambda size: np.empty(size, np.uint8))
    monkeypatch.setattr(pinned, "POOL", pinned.Pool())
    assert [len(pinned.pinned(size)) for size in (0, 1, 1_000_000)] == [0, 1, 1_000_000]


def test_threads_that_lock_memory_first_share_a_pool():
    """Memory of a pool that another thread's replaces would be freed and stay locked: none could be locked there."""
    spec = importlib.util.find_spec("spdist.kernels.cuda.pinned")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    locked, unlocked, together = [], [], threading.Barrier(8)

    def lock(size):
        locked.append(np.empty(size, np.uint8))
        return locked[-1]

    def slow():
        time.sleep(0.05)  # each thread is in the middle of it when the next one comes
        return 1 << 40

    fresh._lock, fresh._unlock, fresh.host_memory = lock, unlocked.append, slow

    def take(_):
        together.wait()
        return fresh.pinned(1 << 20)

    with ThreadPoolExecutor(8) as pool:
        leases = list(pool.map(take, range(8)))
    del leases
    fresh.free_pinned()
    assert len(locked) == 8
    assert {id(memory) for memory in unlocked} == {id(memory) for memory in locked}


def test_what_is_idle_longest_goes_first(monkeypatch):
    unlocked = []
    monkeypatch.setattr(pinned, "_lock", lambda size: np.empty(size, np.uint8))
    monkeypatch.setattr(pinned, "_unlock", lambda memory: unlocked.append(len(memory)))
    pool = pinned.Pool(most_idle=10 << 20)
    leases = [pool.take(size << 20) for size in (1, 2, 4)]
    del leases[1], leases[0], leases[0]  # of 2, 1 and 4 MiB, in this order
    pool.take(8 << 20)
    assert unlocked == [2 << 20, 1 << 20, 4 << 20]
    pool.take(7 << 20)
    assert [len(memory) >> 20 for memory in pool.idle] == [8]
    pool.shrink(0)
    assert unlocked[3:] == [8 << 20]


@pytest.mark.parametrize("most", [None, 6 << 20, 1 << 20])
def test_what_is_locked_in_all_is_bounded(monkeypatch, most):
    """If no kept buffer fits, unused buffers are freed to stay within the bound, and used ones stay."""
    monkeypatch.setattr(pinned, "_lock", lambda size: np.empty(size, np.uint8))
    monkeypatch.setattr(pinned, "_unlock", lambda memory: None)
    pool, rng = pinned.Pool(most_idle=1 << 30), np.random.default_rng(3)
    pool.most, used, peak = most, [], 0
    for size in rng.integers(1, 64, 300) << 14:
        used = [*used, pool.take(int(size))][-3:]
        live = sum(len(np.asarray(lease.base).base.memory) for lease in used)
        peak = max(peak, pool.held)
        assert pool.held == live + sum(map(len, pool.idle))
        assert most is None or pool.held <= max(most, 5 << 20)
    assert (peak > 6 << 20) == (most is None)
    del used
    pool.shrink(0)
    assert pool.held == 0


def test_memory_comes_back_to_a_pool_that_is_in_use():
    """The garbage collector may find a lease while the same thread takes another."""
    pool = pinned.Pool()
    with pool.lock:
        pool.give_back(np.empty(1 << 16, np.uint8))
    assert len(pool.take(1 << 16)) == 1 << 16
