"""CUDA kernels: load a family's .cu file, compile it on first use for the types at hand, keep it.

CuPy compiles through NVRTC and caches on disk; no CUDA toolkit is needed.
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

FOLDER = Path(__file__).parent.parent
"""The kernels' folder: sources are named from here, by family."""
HEADERS = ("cuda/common.cuh", "cuda/sort.cuh", "cuda/groups.cuh")
C_TYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.complex64): "Complex<float>",
    np.dtype(np.complex128): "Complex<double>",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
}
EARLY_CUDA, EARLY_CAPABILITY = 12_030, 90
"""CUDA and compute capability from which on a kernel may begin before the one before it has ended, in graphs too."""
OTHER_VALUES = {np.dtype(np.bool_): "bool", np.dtype(np.uint32): "u32", np.dtype(np.uint64): "u64"}
"""Values that products have besides: whole numbers of 32 and 64 bits, and bools."""


def c_type(dtype: np.dtype[Any]) -> str:
    """Return the kernels' name of a dtype.

    Raises
    ------
    MatrixError
        If the GPU kernels do not know the dtype.
    """
    name = C_TYPES.get(dtype)
    if name is None:
        raise MatrixError(f"dtype {dtype} is not multiplied on the GPU: convert it to float32, float64 or complex")
    return name


def value_type(dtype: np.dtype[Any]) -> str:
    """Return the kernels' name of a dtype of values that products are made of.

    Raises
    ------
    MatrixError
        If there are no kernels for the dtype.
    """
    name = OTHER_VALUES.get(dtype) or C_TYPES.get(dtype)
    if name is None:
        raise MatrixError(
            f"dtype {dtype} is not multiplied on the GPU: convert it to float32, float64, complex, or whole numbers "
            f"of 32 or 64 bits"
        )
    return name


def options() -> tuple[str, ...]:
    """Return the compiler's options; they hold a digest of the headers, which CuPy's cache does not look into.

    Kernels of one file are optimized side by side on all cores.
    """
    digest = hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in HEADERS)).hexdigest()[:16]
    return (
        "-std=c++17",
        "-default-device",
        "--split-compile=0",
        f"-I{FOLDER / 'cuda'}",
        f"-DSPDIST_HEADERS=0x{digest}ull",
    )


class Module:
    """The kernels of one .cu file for one choice of types, on the current device.

    Parameters
    ----------
    file : str
        Path of the file from the kernels' folder.
    names : iterable of str
        Name expressions, such as ``"offsets<int>"``; all of them are compiled at the first call.
    defines : tuple of str
        Options of the compiler, such as ``"-DSPDIST_APPLY=x * x"``.
    """

    def __init__(self, file: str, names: Iterable[str], defines: tuple[str, ...] = ()) -> None:
        import cupy

        self._module: Any = cupy.RawModule(
            code=(FOLDER / file).read_text(), options=(*options(), *defines), backend="nvrtc",
            name_expressions=tuple(names),
        )  # fmt: skip
        self._defines, self._failed = defines, cupy.cuda.compiler.CompileException
        self._kernels: dict[str, Any] = {}
        self._launch = cupy.cuda.driver.launchKernel
        self._stream = cupy.cuda.get_current_stream

    def compile(self) -> None:
        """Compile now rather than at the first call.

        Raises
        ------
        InputError
            If expressions of the caller's do not compile.
        """
        try:
            self._module.compile()
        except self._failed as error:
            if not self._defines:
                raise
            raise InputError(
                f"a C expression for the GPU does not compile, {' '.join(self._defines)}: {error}"
            ) from None

    def __call__(
        self, name: str, grid: int | tuple[int, int], block: int, args: tuple[Any, ...], shared: int = 0,
        early: bool = False,
    ) -> None:  # fmt: skip
        """Launch a kernel on the current stream; `shared` is dynamic shared memory in bytes.

        Arguments are integers, arrays of CuPy, None for no array, or scalars of NumPy. A kernel that is launched
        `early` may begin before the one before it has ended, and waits for it by itself (``take_turn``).
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            if not self._kernels:
                self.compile()
            kernel = self._kernels[name] = self._module.get_function(name)
        if shared > 32 << 10 and kernel.max_dynamic_shared_size_bytes < shared:
            kernel.max_dynamic_shared_size_bytes = shared
        across, down = grid if isinstance(grid, tuple) else (grid, 1)
        words = [x if x.__class__ is int else _word(x) for x in args]
        place = _arguments()
        place.forms[len(words)].pack_into(place.memory, 0, *words)
        stream = self._stream().ptr
        sizes = across or 1, down or 1, 1, block, 1, 1
        if early and (launch := _early_launch()) is not None:
            launch(kernel.kernel.ptr, sizes, shared, stream, place.table)
        else:
            self._launch(kernel.kernel.ptr, *sizes, shared, stream, place.table, 0)


def _word(argument: Any) -> int:
    """Return the eight bytes of an argument; a kernel reads as many of them, from the lowest, as it declares."""
    if argument is None:
        return 0
    if isinstance(argument, np.integer):
        return int(argument)
    if isinstance(argument, np.generic) and argument.nbytes <= 8:
        return int.from_bytes(argument.tobytes(), "little", signed=True)
    return int(argument.data.ptr)


class _Arguments(threading.local):
    """Memory for the arguments of a launch, and the address of a table that points to each; each thread has its own.

    CuPy's own way to launch looks up the type of each argument.
    """

    MOST = 32
    forms = tuple(struct.Struct(f"<{count}q") for count in range(MOST + 1))

    def __init__(self) -> None:
        import cupy

        cupy.cuda.runtime.free(0)  # a new thread has no context of the device before its first call of the runtime
        self.memory: Any = np.zeros(2 * self.MOST, np.int64)
        start = self.memory.ctypes.data
        self.memory[self.MOST :] = start + 8 * np.arange(self.MOST)
        self.table = start + 8 * self.MOST


@functools.cache
def _arguments() -> _Arguments:
    return _Arguments()


class _Config(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _EarlyLaunch(threading.local):
    """Launches kernels that may begin before the one before has ended: programmatic dependent launch, CUDA 12.3."""

    SERIALIZATION = 6
    """The number of the attribute, whose value is 1."""

    def __init__(self, driver: Any) -> None:
        self.launch = driver.cuLaunchKernelEx
        self.attribute = (ctypes.c_uint * 18)(self.SERIALIZATION, 0, 1)  # 8 bytes, then a union of 64
        self.config = _Config(attributes=ctypes.addressof(self.attribute), count=1)
        self.address = ctypes.c_void_p(ctypes.addressof(self.config))

    def __call__(self, kernel: int, sizes: tuple[int, ...], shared: int, stream: int, table: int) -> None:
        """Launch a kernel: its handle, grid and block, bytes of shared memory, stream and table of arguments.

        Raises
        ------
        cupy.cuda.driver.CUDADriverError
        """
        config = self.config
        config.sizes[:], config.shared, config.stream = sizes, shared, stream
        status = self.launch(self.address, ctypes.c_void_p(kernel), ctypes.c_void_p(table), None)
        if status:
            import cupy

            raise cupy.cuda.driver.CUDADriverError(status)


def _early_launch() -> _EarlyLaunch | None:
    """Return what launches kernels early on the current device; None where it cannot."""
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


@functools.cache
def _module(device: int, file: str, names: tuple[str, ...], defines: tuple[str, ...]) -> Module:
    return Module(file, names, defines)


def module(file: str, names: tuple[str, ...], defines: tuple[str, ...] = ()) -> Module:
    """Return the compiled kernels of `file` for the current device, from memory where they were asked for before."""
    import cupy

    return _module(cupy.cuda.runtime.getDevice(), file, names, defines)
