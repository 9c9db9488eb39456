"""Libraries are loaded in threads while a product is planned; what is wrong with them is said by whoever uses them."""

import sys
import threading
from types import SimpleNamespace

import pytest

from spdist.jobs.starting import libraries
from spdist.kernels.engine import ENGINES, find_engine
from spdist.kernels.streaming.engine import CUDA


def wait_for_threads():
    """Wait for the loading threads, and for those that they start."""
    while loading := [thread for thread in threading.enumerate() if thread.name == "spdist-load"]:
        loading[0].join(200)
        assert not loading[0].is_alive()


class Driver:
    """Notes whose context is made; `status` is what every call returns."""

    def __init__(self, found, status=0):
        self.found, self.status = found, status

    def cuInit(self, flags):  # noqa: N802
        return self.status

    def cuDeviceGet(self, device, number):  # noqa: N802
        device._obj.value = 40 + number
        return self.status

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        self.found.append(f"context of {device.value}")
        return self.status


@pytest.mark.parametrize(
    ("engine", "status", "asked"),
    [("cuda", 0, ["context of 40", "pipeline"]), ("cuda", 100, ["pipeline"]),
     ("numba", 0, ["numba_engine"]), ("auto", 0, []), ("hybrid", 0, [])],
)  # fmt: skip
def test_what_is_loaded(monkeypatch, engine, status, asked):
    found: list[str] = []
    load = lambda name: found.append(name.rpartition(".")[2])  # noqa: E731
    monkeypatch.setattr(libraries, "importlib", SimpleNamespace(import_module=load))
    monkeypatch.setattr(libraries.ctypes, "CDLL", lambda name: Driver(found, status))
    libraries.load_early(engine)
    wait_for_threads()
    assert sorted(found) == sorted(asked)


def test_an_error_is_left_to_the_product(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises
    monkeypatch.setattr(CUDA, "module", "spdist.no_such_module")
    libraries.load_early("cuda")
    wait_for_threads()
    assert capfd.readouterr() == ("", "")


def test_modules_are_there():
    modules = {find_engine(name).module for name in ENGINES} - {""}
    assert len(modules) == 2
    for name in modules:
        assert libraries.importlib.import_module(name)
