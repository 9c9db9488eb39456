"""CUDA kernels without a GPU: g++ compiles them, `host_cuda.h` runs them thread by thread, arrays are NumPy's.

Only what `spdist.kernels` asks of CuPy is here, and it knows neither streams nor the limits of a device. What is found
this way is wrong indices, barriers that do not match, wrong results; not what takes a real memory model to go wrong.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import shutil
import subprocess
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from spdist.kernels.cuda import constants, module
from spdist.kernels.cuda.pinned import pageable
from spdist.kernels.hyspmm import pipeline as hyspmm_pipeline
from spdist.kernels.hyspmm import sort_groups
from spdist.kernels.rowwise_gpu import analysis, families

CAN_RUN = shutil.which("g++") is not None and platform.machine() == "x86_64"
"""Whether kernels run on the host here: g++, and switches between threads in x86-64's registers."""
HEADER = Path(__file__).parent / "host_cuda.h"
FLAGS = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC"]


class HostPointer:
    """Where an array starts, or a place in it; it keeps the array."""

    def __init__(self, owner: Any, ptr: int) -> None:
        self.owner, self.ptr = owner, ptr

    def __add__(self, offset: int) -> HostPointer:
        return HostPointer(self.owner, self.ptr + offset)

    def memset_async(self, value: int, size: int) -> None:
        ctypes.memset(self.ptr, value, size)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the array of `shape` that begins here."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        bytes_ = (
            np.frombuffer((ctypes.c_uint8 * size).from_address(self.ptr), np.uint8) if size else np.empty(0, np.uint8)
        )
        found = bytes_.view(dtype).reshape(shape).view(HostArray)
        found.owner = self.owner
        return found


class HostArray(np.ndarray):
    """An array of NumPy's with the pointer attributes of CuPy's."""

    owner: Any = None

    @property
    def data(self) -> HostPointer:
        return HostPointer(self, self.ctypes.data)

    def get(self) -> Any:
        return np.array(self)

    def set(self, values: Any) -> None:
        self[...] = values


def empty(shape: Any, dtype: Any = float) -> Any:
    """Return an array whose bytes are all 0xa5."""
    shape = (shape,) if np.ndim(shape) == 0 else shape
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(size, 0xA5, np.uint8).view(dtype).reshape(shape).view(HostArray)


def filled(values: Any, dtype: Any = None) -> Any:
    values = np.asarray(values, dtype)
    out = empty(values.shape, values.dtype)
    out[...] = values
    return out


class Graph:
    """What was captured, to be done when it is launched."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def launch(self) -> None:
        for call in self.calls:
            call()


class Stream:
    """A stream, an event, or a device, on which all is done at once; while one captures, launches are noted instead."""

    ptr = 0
    captured: list[Any] | None = None

    def __init__(self, **options: bool) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    done = True

    def record(self, stream: Any = None) -> Stream:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def use(self) -> None:
        pass

    def begin_capture(self) -> None:
        Stream.captured = []

    def end_capture(self) -> Graph:
        calls, Stream.captured = Stream.captured, None
        assert calls is not None
        return Graph(calls)


class Memory:
    """Device memory: bytes, and their address."""

    def __init__(self, values: Any) -> None:
        self.values, self.ptr = values, values.ctypes.data


class Pool:
    """A pool that has nothing."""

    malloc = None

    def free_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        pass


class OutOfMemoryError(MemoryError):
    pass


class Module:
    """The kernels of one .cu file for some types, as `spdist.kernels.cuda.module.Module` has them."""

    folder: Path
    launched: ClassVar[list[str]] = []

    def __init__(self, file: str, names: tuple[str, ...], defines: tuple[str, ...] = ()) -> None:
        self.file, self.names, self.defines = file, tuple(names), defines

    @functools.cached_property
    def library(self) -> Any:
        source = self._source()
        defines = *constants.defines(self.file), *self.defines
        digest = hashlib.sha256(repr((source, defines)).encode()).hexdigest()[:16]
        place = self.folder / f"{digest}.cpp"
        if not place.with_suffix(".so").exists():
            _precompile_header(self.folder)
            place.write_text(source)
            include = f"-I{HEADER.parent}", f"-I{module.FOLDER}", f"-I{module.FOLDER / 'cuda'}"
            command = ["g++", *FLAGS, *include, *defines, str(place), "-o", str(place)[:-3] + "so"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(place.with_suffix(".so")))

    def _source(self) -> str:
        """Return the file, and a function that launches its kernels by name."""
        shared = r"extern __shared__ __align__\(16\) ([\w ]+) (\w+)\[\];"
        text = (module.FOLDER / self.file).read_text()
        text = re.sub(shared, r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);", text)
        text = re.sub(r'asm\("mma\..*?\);', "host_mma(c, a, b);", text, flags=re.DOTALL)
        text = re.sub(r'asm\("cvt\.rna\.tf32.*?\((\w+)\) : "f"\((\w+)\)\);', r"\1 = host_tf32(\2);", text)
        calls = "".join(
            f'    if (!strcmp(name, "{name}")) return count != parameters({name}) ? 2 : '
            f"(launch({name}, {{x, y, 1}}, block, shared, arguments), 0);\n"
            for name in self.names
        )
        head = "const char* name, unsigned x, unsigned y, unsigned block, size_t shared, const int64_t* arguments, "
        head += "size_t count"
        return f'#include "{HEADER.name}"\n{text}\nextern "C" int launch_named({head}) {{\n{calls}    return 1;\n}}\n'

    def compile(self) -> None:
        """Wait for the first call: most tests call the kernels of few files."""

    def __call__(
        self, name: str, grid: Any, block: int, args: tuple[Any, ...], shared: int = 0, early: bool = False
    ) -> None:
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        words = (ctypes.c_int64 * len(args))(*[a if a.__class__ is int else module._word(a) for a in args])
        sizes = ctypes.c_uint(x or 1), ctypes.c_uint(y or 1), ctypes.c_uint(block), ctypes.c_size_t(shared)

        def launch() -> None:
            Module.launched.append(name)
            status = self.library.launch_named(name.encode(), *sizes, words, ctypes.c_size_t(len(args)))
            assert status == 0, (name, {1: "is no kernel", 2: f"takes other than {len(args)} arguments"}[status])

        (launch if Stream.captured is None else functools.partial(Stream.captured.append, launch))()


def _precompile_header(folder: Path) -> None:
    """Compile what every source includes, once in a folder: g++ looks for it next to the source."""
    made = folder / f"{HEADER.name}.gch"
    if not made.exists():
        subprocess.run(["g++", *FLAGS, "-x", "c++-header", HEADER, "-o", made], check=True)


def fake_cupy() -> ModuleType:
    """Return the module that the kernels' modules import as CuPy."""
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        memGetInfo=lambda: (1 << 30, 1 << 30),
        deviceGetAttribute=lambda what, device: 227 << 10,
        memcpyAsync=lambda to, source, size, kind, stream: ctypes.memmove(to, source, size),
        memsetAsync=lambda to, value, size, stream: ctypes.memset(to, value, size),
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
    )
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        runtime=runtime, Stream=Stream, Event=Stream, Device=Stream, get_current_stream=Stream,
        using_allocator=lambda allocator: nullcontext(), MemoryPool=Pool,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError), alloc=lambda size: Memory(empty(size, np.uint8)),
        alloc_pinned_memory=bytearray,
    )  # fmt: skip
    cupy.empty, cupy.asarray = empty, filled
    cupy.ndarray = lambda shape, dtype, memptr: memptr.array(shape, dtype)
    cupy.ones = lambda shape, dtype=float: filled(np.ones(shape, dtype))
    cupy.cumsum = lambda values, out=None: filled(np.cumsum(values)) if out is None else np.cumsum(values, out=out)
    cupy.where = lambda *values: filled(np.where(*values))
    cupy.arange = lambda *values, dtype=None: filled(np.arange(*values, dtype=dtype))
    cupy.argsort = lambda values, kind: filled(np.argsort(values, kind=kind))
    cupy.lexsort = lambda keys: filled(np.lexsort(keys))
    cupy.stack = lambda values: filled(np.stack(values))
    cupy.flatnonzero = lambda values: filled(np.flatnonzero(values))
    cupy.searchsorted = lambda values, what, side="left": filled(np.searchsorted(values, what, side=side))
    cupy.concatenate = lambda values: filled(np.concatenate(values))
    cupy.ascontiguousarray = lambda values, dtype: values if values.dtype == dtype else filled(values, dtype)
    cupy.zeros = lambda shape, dtype=float: filled(np.zeros(shape, dtype))
    cupy.empty_like = lambda x: empty(x.shape, x.dtype)
    cupy.full = lambda shape, value, dtype=None: filled(np.full(shape, value, dtype))
    cupy.get_default_memory_pool = Pool
    cupy.cublas = SimpleNamespace(gemm=lambda ta, tb, a, b, out: np.matmul(a, b.T, out=out))
    return cupy


@contextmanager
def installed(patch: Any, folder: Path) -> Any:
    """Let kernels run on the host, compiled into `folder`; `patch` is pytest's monkeypatch."""
    Module.folder = folder
    kept = (
        analysis.kernels_of,
        analysis.class_limits,
        sort_groups.kernels_of,
        analysis._mirror,
        families._streams,
        module._module,
    )
    for one in kept:
        one.cache_clear()
    patch.setitem(__import__("sys").modules, "cupy", fake_cupy())
    patch.setattr(module, "Module", Module)
    patch.setattr(hyspmm_pipeline, "pinned", pageable)
    yield
    for one in kept:
        one.cache_clear()
