"""Libraries that multiply, loaded in threads while the product is checked and planned.

To load a library is to wait for files for a part of the time, on some hosts for most of it.
"""

from __future__ import annotations

import contextlib
import ctypes
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
        _in_thread(_make_context)


def _in_thread(load: Callable[[], object]) -> None:
    """Call a function in a daemon thread; the product meets its error again, and says it."""

    def work() -> None:
        with contextlib.suppress(Exception):
            load()

    threading.Thread(target=work, name="spdist-load", daemon=True).start()


def _load_cupy() -> None:
    import cupy  # noqa: F401


def _make_context() -> None:
    """Make the primary context of the first GPU by the driver itself: meanwhile CuPy is loaded."""
    driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
