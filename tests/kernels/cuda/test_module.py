"""Launches of CUDA kernels: how arguments are handed over; a driver that writes them down takes the GPU's place."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from spdist.kernels.cuda import module

ARRAY = SimpleNamespace(data=SimpleNamespace(ptr=0x7F00_0000_1000))


@pytest.fixture
def launched(monkeypatch):
    """Give a module and the launches that it makes: grid, block, shared memory and the words of the arguments."""
    runtime = SimpleNamespace(free=lambda address: None)
    driver = SimpleNamespace(funcSetAttribute=lambda *which: allowed.append(which))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, driver=driver)))
    allowed = []
    module._argument_memory.cache_clear()
    seen = []

    def launch(kernel, *rest):
        *sizes, shared, stream, table, extra = rest
        assert (kernel, stream, extra) == (11, 22, 0)
        addresses = (ctypes.c_int64 * 6).from_address(table)
        seen.append((tuple(sizes), shared, [ctypes.c_int64.from_address(address).value for address in addresses]))

    made = module.Module.__new__(module.Module)
    made._kernels = {"kernel": module.LoadedKernel(SimpleNamespace(ptr=11))}
    made._launch, made._stream = launch, lambda: SimpleNamespace(ptr=22)
    yield made, seen
    assert allowed in ([], [(11, 8, 40_000)]), "more shared memory is allowed once"
    module._argument_memory.cache_clear()


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
        places.add(module._argument_memory().table)

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == len(places) == 2


class Driver:
    """Takes launches of the driver that have attributes, and writes down what they were."""

    def __init__(self, status=0):
        self.seen, self.status = [], status

    def cuLaunchKernelEx(self, config, kernel, table, extra):  # noqa: N802
        found = module._LaunchConfig.from_address(config.value)
        attribute = (ctypes.c_uint * 18).from_address(found.attributes)
        words = [ctypes.c_int64.from_address(at).value for at in (ctypes.c_int64 * 2).from_address(table.value)]
        assert (found.count, tuple(attribute[:3]), kernel.value, extra) == (1, (6, 0, 1), 11, None)
        self.seen.append((tuple(found.sizes), found.shared, found.stream, words))
        return self.status


def test_an_early_launch_has_the_attribute(launched, monkeypatch):
    made, seen = launched
    driver = Driver()
    early = module._EarlyLaunch(driver)
    monkeypatch.setattr(module, "_early_launch", lambda: early)
    made("kernel", (7, 2), 128, (5, ARRAY), 40_000, early=True)
    assert driver.seen == [((7, 2, 1, 128, 1, 1), 40_000, 22, [5, ARRAY.data.ptr])]
    assert not seen


def test_where_no_launch_is_early_the_usual_one_is_made(launched, monkeypatch):
    made, seen = launched
    monkeypatch.setattr(module, "_early_launch", lambda: None)
    made("kernel", 3, 64, (1, 2, 3, 4, 5, 6), early=True)
    assert seen == [((3, 1, 1, 64, 1, 1), 0, [1, 2, 3, 4, 5, 6])]


def test_an_early_launch_that_fails_raises(launched, monkeypatch):
    made, _ = launched
    early = module._EarlyLaunch(Driver(status=719))
    monkeypatch.setattr(module, "_early_launch", lambda: early)
    monkeypatch.setattr(sys.modules["cupy"].cuda.driver, "CUDADriverError", ValueError, raising=False)
    with pytest.raises(ValueError, match="719"):
        made("kernel", 3, 64, (1,), early=True)
