"""The memory of one GPU: what is held at any time, and which B; host memory takes the GPU's place."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from spdist.csr import CSR, from_scipy
from spdist.kernels import pinned
from spdist.kernels.device_blocks import Kinds
from spdist.kernels.gpu_device import Gpu
from tests.conftest import random_matrix

KINDS = Kinds(*map(np.dtype, ("f8", "i4", "i4")))


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


class Stream:
    """A stream that is done at once."""

    ptr = 0

    def __init__(self, **options: bool) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> Stream:
        return self


def array(shape, dtype, pointer):
    return pinned.array_at(pointer.memory.bytes, pointer.offset, shape[0], dtype)


@pytest.fixture
def device(monkeypatch):
    """Give a GPU of 1 MiB."""
    runtime = SimpleNamespace(
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
        memcpyHostToDevice=1,
        CUDARuntimeError=RuntimeError,
    )
    memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    names = {"runtime": runtime, "memory": memory, "Memory": Memory, "MemoryPointer": Pointer}
    cuda = SimpleNamespace(Stream=Stream, Event=object, **names)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=array))
    monkeypatch.setattr("spdist.kernels.gpu_device.pinned", pinned.pageable)
    Memory.held = Memory.most = 0
    return Gpu(1 << 20)


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
        assert device.keep(b if kept else None, KINDS) == bool(kept)
    assert Memory.most <= 1 << 20


def test_other_values_of_one_structure_are_sent_again(device):
    b = from_scipy(random_matrix(100, 100, 5.0, 2))
    other = CSR(b.indptr, b.indices, 2 * b.data, b.shape)
    for m in (b, other):
        assert device.keep(m, KINDS)
        for x, y in ((device.b.indptr, m.indptr), (device.b.indices, m.indices), (device.b.data, m.data)):
            assert_array_equal(x, y)
    sent = device.b
    assert device.keep(CSR(b.indptr, b.indices, other.data, b.shape), KINDS)
    assert device.b is sent


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


def test_memory_comes_back_to_a_pool_that_is_in_use():
    """The garbage collector may find a lease while the same thread takes another."""
    pool = pinned.Pool()
    with pool.lock:
        pool.give_back(np.empty(1 << 16, np.uint8))
    assert len(pool.take(1 << 16)) == 1 << 16
