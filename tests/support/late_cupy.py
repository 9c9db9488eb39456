"""CuPy without a GPU, whose streams do what they are given as late as they may: a missing wait shows in the result.

Arrays are NumPy's that say they are CuPy's. Copies, and what `Stream.give` is given, run when something waits for them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse import linalg

from spdist.kernels.spmv.prepared import PreparedCsr
from spdist.matrices.csr import CSR
from spdist.operators import operator
from tests.support.host_cupy import HostArray
from tests.support.host_cupy import empty as host_empty

Array = type("ndarray", (HostArray,), {"__module__": "cupy"})
"""An array that `is_on_gpu`."""


class Stream:
    """Runs its queued work when something waits for it."""

    current: Stream
    capturing: Stream | None = None

    def __init__(self, non_blocking: bool = False) -> None:
        self.given: list[Callable[[], Any]] = []
        self.done = 0

    def give(self, call: Callable[[], Any]) -> None:
        assert Stream.capturing is not self
        self.given.append(call)

    def run(self, count: int) -> None:
        """Do all that was given up to a place."""
        while self.done < count:
            self.done += 1
            self.given[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        place = event.place
        if place is not None:
            self.give(lambda: place[0].run(place[1]))

    def record(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.run(len(self.given))

    def is_capturing(self) -> bool:
        return Stream.capturing is self

    def begin_capture(self) -> None:
        Stream.capturing = self

    def end_capture(self) -> Any:
        Stream.capturing = None
        return SimpleNamespace(launch=None)

    def __enter__(self) -> Stream:
        self.before, Stream.current = Stream.current, self
        return self

    def __exit__(self, *error: object) -> None:
        Stream.current = self.before

    @property
    def ptr(self) -> Stream:
        return self


class Event:
    """A position in a stream."""

    def __init__(self, **options: bool) -> None:
        self.place: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.place = stream, len(stream.given)

    def synchronize(self) -> None:
        if self.place is not None:
            self.place[0].run(self.place[1])


def array(values: Any) -> Any:
    """Return a copy of an array as one of the GPU's."""
    out = empty(np.shape(values), np.asarray(values).dtype)
    out[...] = values
    return out


def empty(shape: Any, dtype: Any = float) -> Any:
    return host_empty(shape, dtype).view(Array)


def gather(x: Any, order: Any) -> Any:
    """Take the place of `multiply_gpu.gather`."""
    out = empty((len(order), *x.shape[1:]), x.dtype)
    Stream.current.give(lambda: out.__setitem__(..., x[np.asarray(order)]))
    return out


def copy(target: int, source: int, size: int, kind: int, stream: Stream) -> None:
    stream.give(lambda: ctypes.memmove(target, source, size))


class Late(PreparedCsr):
    """Rows on the GPU: SciPy multiplies them when the stream reaches the call."""

    def multiply(self, x: Any, out: Any, threads: int) -> Any:
        y = empty((self.matrix.nrows, *x.shape[1:]), x.dtype) if out is None else out
        m = host_matrix(self.matrix)
        Stream.current.give(lambda: y.__setitem__(..., m @ np.asarray(x)))
        return y


def on_gpu(m: sp.csr_array) -> CSR:
    """Return a matrix of SciPy's as one of the GPU's."""
    return CSR(*(array(part) for part in (m.indptr.astype(np.int64), m.indices, m.data)), m.shape)


def host_matrix(m: CSR) -> sp.csr_array:
    """Return a matrix of the GPU's as SciPy's."""
    return sp.csr_array(tuple(np.array(part) for part in (m.data, m.indices, m.indptr)), shape=m.shape)


class CupyxMatrix:
    """A matrix of `cupyx.scipy.sparse`, as far as `device.from_cupyx` looks."""

    format, ndim = "csr", 2

    def __init__(self, m: sp.csr_array) -> None:
        made = on_gpu(m)
        self.indptr, self.indices, self.data, self.shape = made.indptr, made.indices, made.data, made.shape


CupyxMatrix.__module__ = "cupyx.scipy.sparse"


def install(patch: Any) -> Any:
    """Let `import cupy` find this, until the test ends; return it. `patch` is pytest's monkeypatch."""
    Stream.current, Stream.capturing = Stream(), None
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(memcpyAsync=copy, memcpyDeviceToHost=2, memcpyHostToDevice=1),
        Stream=Stream, Event=Event, get_current_stream=lambda: Stream.current,
        MemoryPool=lambda: SimpleNamespace(malloc=None, free_all_blocks=lambda: None),
        using_allocator=lambda allocator: nullcontext(),
    )  # fmt: skip
    cupy.empty, cupy.asarray = empty, array
    cupy.ones = lambda shape, dtype=float: array(np.ones(shape, dtype))
    patch.setitem(sys.modules, "cupy", cupy)
    patch.setitem(sys.modules, "cupyx.scipy.sparse.linalg", linalg)  # its linear operators know no library's arrays
    patch.setattr(operator, "_linear_class", functools.cache(operator._linear_class.__wrapped__))
    return cupy
