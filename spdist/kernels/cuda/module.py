"""Compile and launch CUDA kernels: a .cu file is compiled on first use for each choice of types.

Kernels that came compiled with spdist are loaded (`cubins`). CuPy compiles others through NVRTC and caches them on
disk; no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import InputError, MatrixError
from spdist.foundation.phases import COMPILATIONS, NOTED_SECONDS
from spdist.kernels.cuda import constants, cubins

FOLDER = Path(__file__).parent.parent
"""The folder of all kernels; sources are named by their path from here, such as ``"esc/long_rows.cu"``."""
C_TYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.complex64): "Complex<float>",
    np.dtype(np.complex128): "Complex<double>",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
}
EARLY_CUDA, EARLY_CAPABILITY = 12_030, 90
"""First CUDA version and compute capability with programmatic dependent launch that CUDA graphs can hold too."""
OTHER_VALUES = {np.dtype(np.bool_): "bool", np.dtype(np.uint32): "u32", np.dtype(np.uint64): "u64"}
"""Further dtypes of values that matrix products take: unsigned integers and bools."""
MANY_SHARED_BYTES = 32 << 10
"""Bytes of dynamic shared memory above which it is enabled explicitly: CUDA allows 48 KiB less static shared memory."""


def c_type(dtype: np.dtype[Any]) -> str:
    """Return the C type of a dtype of values, columns or offsets; raise `MatrixError` if no kernel takes the dtype."""
    name = C_TYPES.get(dtype)
    if name is None:
        raise MatrixError(f"dtype {dtype} is not multiplied on the GPU: convert it to float32, float64 or complex")
    return name


def value_type(dtype: np.dtype[Any]) -> str:
    """Return the C type of the values of a matrix product, which may be bools and unsigned integers too.

    Raises `MatrixError` if no kernel multiplies the dtype.
    """
    name = OTHER_VALUES.get(dtype) or C_TYPES.get(dtype)
    if name is None:
        raise MatrixError(
            f"dtype {dtype} is not multiplied on the GPU: convert it to float32, float64, complex, or whole numbers "
            f"of 32 or 64 bits"
        )
    return name


def options(file: str) -> tuple[str, ...]:
    """Return the compiler options of a .cu file, a path from the kernels' folder, without the caller's expressions.

    They hold the constants that the file shares with Python, and a digest of all headers, because CuPy's cache on disk
    is keyed by the source and the options, not by what the source includes. ``--split-compile=0`` optimizes the kernels
    of one file on all cores.
    """
    return (
        "-std=c++17",
        "-default-device",
        "--split-compile=0",
        f"-I{FOLDER}",
        f"-I{FOLDER / 'cuda'}",
        f"-DSPDIST_HEADERS=0x{_header_digest()}ull",
        *constants.defines(file),
    )


@functools.cache
def _header_digest() -> str:
    headers = b"".join(path.read_bytes() for path in sorted(FOLDER.rglob("*.cuh")))
    return hashlib.sha256(headers).hexdigest()[:16]


@functools.cache
def _source_digest(file: str) -> str:
    return cubins.source_digest((FOLDER / file).read_bytes(), options(file))


class LoadedKernel:
    """A kernel on a device."""

    DYNAMIC_SHARED_BYTES = 8  # ``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``

    def __init__(self, function: Any) -> None:
        self.function = function  # of CuPy, which keeps the module that it is of
        self.handle: int = function.ptr
        self._shared = MANY_SHARED_BYTES

    def allow_shared(self, nbytes: int) -> None:
        """Allow as many bytes of dynamic shared memory."""
        if nbytes > self._shared:
            import cupy

            cupy.cuda.driver.funcSetAttribute(self.handle, self.DYNAMIC_SHARED_BYTES, nbytes)
            self._shared = nbytes


class Module:
    """The kernels of one .cu file for one choice of types, on the current device; all are compiled at the first call.

    `names`: name expressions, such as ``"offsets<int>"``.
    `defines`: compiler options with the caller's C expressions, such as ``"-DSPDIST_APPLY=x * x"``.
    """

    def __init__(self, file: str, names: Iterable[str], defines: tuple[str, ...] = ()) -> None:
        import cupy

        self._file, self._names, self._defines = file, tuple(names), defines
        self._raw: Any = None
        self._kernels: dict[str, LoadedKernel] = {}
        self._launch = cupy.cuda.driver.launchKernel
        self._stream = cupy.cuda.get_current_stream

    def compile(self) -> None:
        """Load what came compiled, or compile, now rather than at the first call.

        Raises `InputError` if a C expression of the caller does not compile.
        """
        import cupy

        if self._kernels or self._raw is not None or self._load():
            return
        raw: Any = cupy.RawModule(
            code=(FOLDER / self._file).read_text(), options=(*options(self._file), *self._defines), backend="nvrtc",
            name_expressions=self._names,
        )  # fmt: skip
        try:
            with COMPILATIONS.around(self._file, NOTED_SECONDS):
                raw.compile()
        except cupy.cuda.compiler.CompileException as error:
            if not self._defines:
                raise
            raise InputError(
                f"a C expression for the GPU does not compile, {' '.join(self._defines)}: {error}"
            ) from None
        self._raw = raw

    def _load(self) -> bool:
        """Take all kernels from those that came compiled, if they are there."""
        import cupy

        device = cupy.cuda.runtime.getDevice()
        archive = None if self._defines else cubins.archive_for(device)
        found = None if archive is None else archive.find(self._file, _source_digest(self._file), self._names)
        if found is None:
            return False
        kernels = {}
        for name, (member, lowered) in found.items():
            kernels[name] = LoadedKernel(cubins.loaded_cubin(device, member).get_function(lowered))
        self._kernels.update(kernels)
        return True

    def __call__(
        self, name: str, grid: int | tuple[int, int], block: int, args: tuple[Any, ...], shared: int = 0,
        early: bool = False,
    ) -> None:  # fmt: skip
        """Launch a kernel on the current stream by its name expression.

        `grid`: thread blocks; 0 counts as 1. `block`: threads of a thread block. `shared`: bytes of dynamic shared
        memory.
        `args`: integers, CuPy arrays, None for a null pointer, and NumPy scalars of at most 8 bytes.
        `early`: whether the kernel may begin before the kernel before it has ended. It must then call ``take_turn``.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            self.compile()
            kernel = self._kernels.get(name)
            if kernel is None:
                kernel = self._kernels[name] = LoadedKernel(self._raw.get_function(name).kernel)
        kernel.allow_shared(shared)
        across, down = grid if isinstance(grid, tuple) else (grid, 1)
        words = [x if x.__class__ is int else _word(x) for x in args]
        memory = _argument_memory()
        memory.formats[len(words)].pack_into(memory.words, 0, *words)
        stream = self._stream().ptr
        sizes = across or 1, down or 1, 1, block, 1, 1
        if early and (launch := _early_launch()) is not None:
            launch(kernel.handle, sizes, shared, stream, memory.table)
        else:
            self._launch(kernel.handle, *sizes, shared, stream, memory.table, 0)


def _word(argument: Any) -> int:
    """Return the eight bytes of an argument; a kernel reads as many of them, lowest first, as it declares."""
    if argument is None:
        return 0
    if isinstance(argument, np.integer):
        return int(argument)
    if isinstance(argument, np.generic) and argument.nbytes <= 8:
        return int.from_bytes(argument.tobytes(), "little", signed=True)
    return int(argument.data.ptr)


class _ArgumentMemory(threading.local):
    """Memory for the arguments of a launch, and a table of pointers to each argument; each thread has its own.

    CuPy's own launch looks up the type of each argument, which takes longer than the launch.
    """

    MOST = 32
    formats = tuple(struct.Struct(f"<{count}q") for count in range(MOST + 1))

    def __init__(self) -> None:
        import cupy

        cupy.cuda.runtime.free(0)  # a new thread has no context of the device before its first call of the runtime
        self.words: Any = np.zeros(2 * self.MOST, np.int64)
        start = self.words.ctypes.data
        self.words[self.MOST :] = start + 8 * np.arange(self.MOST)
        self.table = start + 8 * self.MOST


@functools.cache
def _argument_memory() -> _ArgumentMemory:
    return _ArgumentMemory()


class _LaunchConfig(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _EarlyLaunch(threading.local):
    """Programmatic dependent launch: the kernel may begin before the kernel before it has ended (CUDA 12.3)."""

    SERIALIZATION = 6  # ``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``; its value is set to 1

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.launch = driver.cuLaunchKernelEx
        self.attribute = (ctypes.c_uint * 18)(self.SERIALIZATION, 0, 1)  # 8 bytes, then a union of 64
        self.config = _LaunchConfig(attributes=ctypes.addressof(self.attribute), count=1)
        self.address = ctypes.c_void_p(ctypes.addressof(self.config))

    def __call__(self, kernel: int, sizes: tuple[int, ...], shared: int, stream: int, table: int) -> None:
        """Launch a kernel: its handle, grid and block, bytes of shared memory, stream and table of arguments."""
        config = self.config
        config.sizes[:], config.shared, config.stream = sizes, shared, stream
        status = self.launch(self.address, ctypes.c_void_p(kernel), ctypes.c_void_p(table), None)
        if status:
            import cupy

            raise cupy.cuda.driver.CUDADriverError(status)


def _early_launch() -> _EarlyLaunch | None:
    """Return what launches kernels early on the current device; None if the device or CUDA cannot."""
    import cupy

    return _early_launch_of(cupy.cuda.runtime.getDevice())


@functools.cache
def _early_launch_of(device: int) -> _EarlyLaunch | None:
    import cupy

    runtime = cupy.cuda.runtime
    if runtime.is_hip or min(runtime.driverGetVersion(), runtime.runtimeGetVersion()) < EARLY_CUDA:
        return None
    if int(cupy.cuda.Device(device).compute_capability) < EARLY_CAPABILITY:
        return None
    return _EarlyLaunch(ctypes.CDLL("libcuda.so.1"))


def shared_memory() -> int:
    """Return the bytes of shared memory that a thread block may use on the current GPU."""
    import cupy

    return _shared_memory_of(cupy.cuda.runtime.getDevice())


@functools.cache
def _shared_memory_of(device: int) -> int:
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(97, device))  # cudaDevAttrMaxSharedMemoryPerBlockOptin


@functools.cache
def _module(device: int, file: str, names: tuple[str, ...], defines: tuple[str, ...]) -> Module:
    return Module(file, names, defines)


def module(file: str, names: tuple[str, ...], defines: tuple[str, ...] = ()) -> Module:
    """Return the compiled kernels of a file for the current device; later calls return the same object."""
    import cupy

    return _module(cupy.cuda.runtime.getDevice(), file, names, defines)
