"""Libraries that multiply, loaded in threads while the product is checked and planned.

To load a library is to wait for files for a part of the time, on some hosts for most of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable

from spdist.kernels.engine import ENGINES, find_engine


def load_early(engine: str, memory_limit: str | None) -> None:
    """Begin to load what an engine needs; whoever uses it waits until it is there.

    `engine`: of a product that this process makes. Nothing is loaded for one that may need none of it.
    `memory_limit`: as the user gave it. Without one, planning asks the GPU for its free memory.
    """
    chosen = find_engine(engine) if engine in ENGINES else None
    if chosen is None or not chosen.module:
        return
    import numpy  # noqa: F401 (whole, before threads load what imports parts of it)

    _in_thread(lambda: importlib.import_module(chosen.module))
    if chosen.uses_gpu:
        _in_thread(_load_cupy if memory_limit is not None else _make_contexts)


def _in_thread(load: Callable[[], object]) -> None:
    """Call a function in a daemon thread; the product meets its error again, and says it."""

    def work() -> None:
        with contextlib.suppress(Exception):
            load()

    threading.Thread(target=work, name="spdist-load", daemon=True).start()


def _load_cupy() -> None:
    import cupy  # noqa: F401


def _make_contexts() -> None:
    """Make the contexts of all GPUs, as asking for their free memory does, each in a thread."""
    import cupy

    def make(gpu: int) -> None:
        with cupy.cuda.Device(gpu):
            cupy.cuda.runtime.memGetInfo()

    for gpu in range(cupy.cuda.runtime.getDeviceCount()):
        _in_thread(functools.partial(make, gpu))
