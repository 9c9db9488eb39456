"""NVIDIA's cuSPARSE, called directly: CuPy's functions of it refuse to go into a CUDA graph.

References
----------
.. [1] NVIDIA, "cuSPARSE library", generic API.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import numpy as np

from spdist.errors import SpdistError
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import DeviceArray

VALUE_TYPES = {"float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
"""cudaDataType_t."""
INDEX_TYPES = {"int32": 2, "int64": 3}
"""cusparseIndexType_t."""
BASE_ZERO, NON_TRANSPOSE, SPMV_DEFAULT = 0, 0, 0

Pointer, Size = ctypes.c_void_p, ctypes.c_size_t
_handles = threading.local()


def load() -> Any:
    """Return the library that CuPy has loaded, from wherever it found it."""
    import cupy_backends.cuda.libs.cusparse  # noqa: F401

    for name in ("libcusparse.so.12", "libcusparse.so.13", "libcusparse.so.11", "libcusparse.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("cusparse").abs_path)


_library = functools.cache(load)


def call(name: str, *arguments: Any) -> None:
    """Call ``cusparse<name>``."""
    status = getattr(_library(), f"cusparse{name}")(*arguments)
    if status:
        raise SpdistError(f"cusparse{name} returned status {status}: choose another method, such as 'sell'")


def address(array: Any) -> ctypes.c_void_p:
    """Return where an array on the GPU starts, null for an empty one."""
    return Pointer(array.data.ptr if array is not None and array.size else None)


class Matrix:
    """A matrix on the GPU that cuSPARSE multiplies: as CSR, or with the row of each entry, as COO.

    Its arrays are kept, its descriptor is destroyed with it.
    """

    def __init__(self, a: CSR, rows: DeviceArray | None = None) -> None:
        self.shape, self.dtype, self._held = a.shape, np.dtype(a.dtype), (a, rows)
        self._descriptor = Pointer()
        sizes = tuple(map(ctypes.c_int64, (*a.shape, a.nnz)))
        index = INDEX_TYPES[np.dtype(a.indices.dtype).name]
        arrays = tuple(map(address, (a.indptr if rows is None else rows, a.indices, a.data)))
        kinds = (index,) if rows is not None else (INDEX_TYPES[np.dtype(a.indptr.dtype).name], index)
        create = "CreateCsr" if rows is None else "CreateCoo"
        call(create, ctypes.byref(self._descriptor), *sizes, *arrays, *kinds, BASE_ZERO, VALUE_TYPES[self.dtype.name])
        self._factors = np.ones(1, self.dtype), np.zeros(1, self.dtype)

    def multiply(self, x: DeviceArray, y: DeviceArray) -> None:
        """Write ``a @ x`` to y, on the current stream; both have the matrix's dtype and one dimension."""
        import cupy

        vectors = Pointer(), Pointer()
        kind = VALUE_TYPES[self.dtype.name]
        for vector, array in zip(vectors, (x, y), strict=True):
            call("CreateDnVec", ctypes.byref(vector), ctypes.c_int64(len(array)), address(array), kind)
        one, zero = (Pointer(factor.ctypes.data) for factor in self._factors)
        told = NON_TRANSPOSE, one, self._descriptor, vectors[0], zero, vectors[1], kind, SPMV_DEFAULT
        handle, size = _handle(), Size()
        call("SetStream", handle, Pointer(cupy.cuda.get_current_stream().ptr))
        call("SpMV_bufferSize", handle, *told, ctypes.byref(size))
        call("SpMV", handle, *told, Pointer(cupy.cuda.alloc(size.value).ptr))
        for vector in vectors:
            call("DestroyDnVec", vector)

    def __reduce__(self) -> tuple[Any, ...]:
        return Matrix, self._held

    def __del__(self) -> None:
        if self._descriptor:
            call("DestroySpMat", self._descriptor)


def _handle() -> ctypes.c_void_p:
    """Return this thread's handle on the current device."""
    import cupy

    made: dict[int, ctypes.c_void_p] = _handles.__dict__.setdefault("made", {})
    device = cupy.cuda.runtime.getDevice()
    if device not in made:
        made[device] = Pointer()
        call("Create", ctypes.byref(made[device]))
    return made[device]
