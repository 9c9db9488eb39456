"""CUDA kernels: load a .cu file of this folder, compile it on first use for the types at hand, keep it.

CuPy compiles through NVRTC and caches on disk; no CUDA toolkit is needed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spdist.errors import MatrixError

FOLDER = Path(__file__).parent
HEADERS = ("common.cuh", "sort.cuh")
C_TYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.complex64): "Complex<float>",
    np.dtype(np.complex128): "Complex<double>",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
}


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


def options() -> tuple[str, ...]:
    """Return the compiler's options; they hold a digest of the headers, which CuPy's cache does not look into."""
    digest = hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in HEADERS)).hexdigest()[:16]
    return ("-std=c++17", f"-I{FOLDER}", f"-DSPDIST_HEADERS=0x{digest}ull")


class Module:
    """The kernels of one .cu file for one choice of types, on the current device.

    Parameters
    ----------
    file : str
        Name of the file in this folder.
    names : iterable of str
        Name expressions, such as ``"offsets<int>"``; all of them are compiled at the first call.
    """

    def __init__(self, file: str, names: Iterable[str]) -> None:
        import cupy

        self._module: Any = cupy.RawModule(
            code=(FOLDER / file).read_text(), options=options(), backend="nvrtc", name_expressions=tuple(names)
        )
        self._kernels: dict[str, Any] = {}

    def compile(self) -> None:
        """Compile now rather than at the first call."""
        self._module.compile()

    def __call__(
        self, name: str, grid: int | tuple[int, int], block: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        """Launch a kernel on the current stream; `shared` is dynamic shared memory in bytes."""
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self._module.get_function(name)
        if shared > 32 << 10 and kernel.max_dynamic_shared_size_bytes < shared:
            kernel.max_dynamic_shared_size_bytes = shared
        kernel(grid if isinstance(grid, tuple) else (grid,), (block,), args, shared_mem=shared)


@functools.cache
def _module(device: int, file: str, names: tuple[str, ...]) -> Module:
    return Module(file, names)


def module(file: str, names: tuple[str, ...]) -> Module:
    """Return the compiled kernels of `file` for the current device, from memory where they were asked for before."""
    import cupy

    return _module(cupy.cuda.runtime.getDevice(), file, names)
