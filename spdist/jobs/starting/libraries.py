"""Libraries that multiply, loaded in threads while the product is checked and planned.

To load a library is to wait for files for a part of the time, on some hosts for most of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Callable

from spdist.kernels.engine import ENGINES, find_engine


def load_early(engine: str) -> None:
    """Begin to load what an engine needs; whoever uses it waits until it is there.

    `engine`: of a product that this process makes. Nothing is loaded for one that may need none of it.
    """
    chosen = find_engine(engine) if engine in ENGINES else None
    if chosen is None or not chosen.module:
        return
    import numpy  # noqa: F401 (whole, before threads load what imports parts of it)

    _in_thread(lambda: importlib.import_module(chosen.module))
    if chosen.uses_gpu:
        _in_thread(_load_cupy)
        _in_thread(_make_contexts)


def _in_thread(load: Callable[[], object]) -> None:
    """Call a function in a daemon thread; the product meets its error again, and says it."""

    def work() -> None:
        with contextlib.suppress(Exception):
            load()

    threading.Thread(target=work, name="spdist-load", daemon=True).start()


def _load_cupy() -> None:
    import cupy  # noqa: F401


def _make_contexts() -> None:
    """Make the primary contexts of all GPUs, each in a thread, by the driver itself: meanwhile CuPy is loaded."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for gpu in range(count.value):
            _in_thread(functools.partial(_make_context, driver, gpu))


def _make_context(driver: ctypes.CDLL, gpu: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), gpu) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
