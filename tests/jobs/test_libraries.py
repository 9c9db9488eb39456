"""Libraries are loaded in threads while a product is planned; what is wrong with them is said by whoever uses them."""

import contextlib
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
        loading[0].join(30)
        assert not loading[0].is_alive()


@pytest.mark.parametrize(
    ("engine", "memory_limit", "asked"),
    [("cuda", None, ["pipeline", "context", "context"]), ("cuda", "1GiB", ["pipeline"]),
     ("numba", None, ["numba_engine"]), ("auto", None, []), ("hybrid", None, [])],
)  # fmt: skip
def test_what_is_loaded(monkeypatch, engine, memory_limit, asked):
    found: list[str] = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 2, memGetInfo=lambda: found.append("context"))
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda gpu: contextlib.nullcontext()))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    load = lambda name: found.append(name.rpartition(".")[2])  # noqa: E731
    monkeypatch.setattr(libraries, "importlib", SimpleNamespace(import_module=load))
    libraries.load_early(engine, memory_limit)
    wait_for_threads()
    assert sorted(found) == sorted(asked)


def test_an_error_is_left_to_the_product(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises
    monkeypatch.setattr(CUDA, "module", "spdist.no_such_module")
    libraries.load_early("cuda", None)
    wait_for_threads()
    assert capfd.readouterr() == ("", "")


def test_modules_are_there():
    modules = {find_engine(name).module for name in ENGINES} - {""}
    assert len(modules) == 2
    for name in modules:
        assert libraries.importlib.import_module(name)
