"""Launches of CUDA kernels: how arguments are handed over; a driver that writes them down takes the GPU's place."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from spdist.kernels import module

ARRAY = SimpleNamespace(data=SimpleNamespace(ptr=0x7F00_0000_1000))


@pytest.fixture
def launched(monkeypatch):
    """Give a module and the launches that it makes: grid, block, shared memory and the words of the arguments."""
    runtime = SimpleNamespace(free=lambda address: None)
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    module._arguments.cache_clear()
    seen = []

    def launch(kernel, *rest):
        *sizes, shared, stream, table, extra = rest
        assert (kernel, stream, extra) == (11, 22, 0)
        addresses = (ctypes.c_int64 * 6).from_address(table)
        seen.append((tuple(sizes), shared, [ctypes.c_int64.from_address(address).value for address in addresses]))

    made = module.Module.__new__(module.Module)
    made._kernels = {"kernel": SimpleNamespace(kernel=SimpleNamespace(ptr=11), max_dynamic_shared_size_bytes=1 << 20)}
    made._launch, made._stream = launch, lambda: SimpleNamespace(ptr=22)
    yield made, seen
    module._arguments.cache_clear()


def test_arguments_take_eight_bytes_each(launched):
    made, seen = launched
    args = 5, np.uint32(2**32 - 1), ARRAY, None, np.int64(-3), np.float32(1.0)
    made("kernel", (7, 2), 128, args, 40_000)
    bits = int(np.float32(1.0).view(np.int32))
    assert seen == [((7, 2, 1, 128, 1, 1), 40_000, [5, 2**32 - 1, ARRAY.data.ptr, 0, -3, bits])]


def test_no_grid_is_empty(launched):
    made, seen = launched
    made("kernel", 0, 256, (1, 2, 3, 4, 5, 6))
    assert seen == [((1, 1, 1, 256, 1, 1), 0, [1, 2, 3, 4, 5, 6])]


def test_threads_do_not_share_arguments(launched):
    made, seen = launched
    places = set()

    def work():
        made("kernel", 1, 32, (1,) * 6)
        places.add(module._arguments().table)

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == len(places) == 2
