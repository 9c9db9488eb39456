"""NVIDIA's products through ctypes: each algorithm of SpGEMM and of SpMV, buffers from CuPy's current allocator.

CuPy itself binds one algorithm of the five of SpGEMM, and no preprocessing for SpMV, so the library that CuPy has
loaded is called directly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from spdist.kernels.spmv.cusparse import load
from spdist.kernels.spmv.sell import sell
from spdist.kernels.spmv.sell.format import LANES, value_places
from spdist.matrices.csr import CSR

ALGORITHMS = {"alg1": 3, "reuse": 0, "alg2": 4, "alg3": 5}
"""cusparseSpGEMMAlg_t, fastest first as a rule; "reuse" is the default algorithm by way of SpGEMMreuse."""
VALUE_TYPES = {"float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
"""cudaDataType_t."""
INDEX_32I, BASE_ZERO, NON_TRANSPOSE = 2, 0, 0
FRACTION = 0.2
"""Share of the products that ALG3 holds at a time."""

Pointer = ctypes.c_void_p
Size = ctypes.c_size_t


class CusparseError(RuntimeError):
    """A call that cuSPARSE refused."""


class Cusparse:
    """A library and a handle, on the current device and stream.

    `path`: the library's file; by default the one that CuPy finds.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(path)) if path else load()
        self._library.cusparseGetErrorName.restype = ctypes.c_char_p
        self.handle = Pointer()
        self.call("Create", ctypes.byref(self.handle))
        self.call("SetStream", self.handle, Pointer(cupy.cuda.get_current_stream().ptr))

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``cusparse<name>``.

        Raises
        ------
        CusparseError
            With the name of the function and of the status.
        """
        function = getattr(self._library, f"cusparse{name}", None)
        if function is None:
            raise CusparseError(f"{name}: this library has no such function")
        status = function(*arguments)
        if status:
            raise CusparseError(f"{name}: {self._library.cusparseGetErrorName(status).decode()}")

    @property
    def version(self) -> str:
        """Version, as cuSPARSE numbers itself."""
        number = ctypes.c_int()
        self.call("GetVersion", self.handle, ctypes.byref(number))
        return f"{number.value // 1000}.{number.value // 100 % 10}.{number.value % 100}"

    def bind(self, algorithm: str, a: CSR, b: CSR) -> Callable[[], CSR]:
        """Return the function that multiplies; the descriptors of A and B are made here, outside of its time."""
        multiply = _reuse if algorithm == "reuse" else _multiply
        return functools.partial(multiply, _Product(self, ALGORITHMS[algorithm], a, b))


class _Matrix:
    """A descriptor of a CSR matrix, destroyed with the object."""

    def __init__(self, library: Cusparse, shape: tuple[int, int], parts: tuple[Any, ...], dtype: np.dtype[Any]) -> None:
        self.library, self.parts = library, parts
        self.descriptor = Pointer()
        nnz = len(parts[1]) if parts[1] is not None else 0
        library.call(
            "CreateCsr", ctypes.byref(self.descriptor), *map(ctypes.c_int64, (*shape, nnz)), *map(_address, parts),
            INDEX_32I, INDEX_32I, BASE_ZERO, VALUE_TYPES[dtype.name],
        )  # fmt: skip

    def __del__(self) -> None:
        if self.descriptor:
            self.library.call("DestroySpMat", self.descriptor)


class _Product:
    """What every call about one product is told."""

    def __init__(self, library: Cusparse, algorithm: int, a: CSR, b: CSR) -> None:
        self.library, self.algorithm, self.shape = library, algorithm, (a.nrows, b.ncols)
        self.dtype = a.dtype
        self.a, self.b = (_Matrix(library, m.shape, (m.indptr, m.indices, m.data), m.dtype) for m in (a, b))
        self._one, self._zero = np.ones(1, self.dtype), np.zeros(1, self.dtype)

    def begin(self, indptr: Any = None) -> None:
        """Make the descriptors of a new C and of its product."""
        self.c = _Matrix(self.library, self.shape, (indptr, None, None), self.dtype)
        self.descriptor = Pointer()
        self.library.call("SpGEMM_createDescr", ctypes.byref(self.descriptor))

    def end(self) -> None:
        """Destroy them."""
        self.library.call("SpGEMM_destroyDescr", self.descriptor)
        del self.c, self.descriptor

    def pattern(self, name: str, *arguments: Any) -> None:
        """Call a function that does not look at values."""
        matrices = (m.descriptor for m in (self.a, self.b, self.c))
        self.library.call(
            name, self.library.handle, NON_TRANSPOSE, NON_TRANSPOSE, *matrices, self.algorithm, self.descriptor,
            *arguments,
        )  # fmt: skip

    def values(self, name: str, *arguments: Any) -> None:
        """Call a function that takes the values' type and the factors of ``1 A B + 0 C``."""
        one, zero = (Pointer(x.ctypes.data) for x in (self._one, self._zero))
        self.library.call(
            name, self.library.handle, NON_TRANSPOSE, NON_TRANSPOSE, one, self.a.descriptor, self.b.descriptor, zero,
            self.c.descriptor, VALUE_TYPES[self.dtype.name], self.algorithm, self.descriptor, *arguments,
        )  # fmt: skip

    def allocate(self, indptr: Any = None) -> CSR:
        """Return C with room for the entries that were counted, and tell cuSPARSE of it."""
        size = [ctypes.c_int64() for _ in range(3)]
        self.library.call("SpMatGetSize", self.c.descriptor, *map(ctypes.byref, size))
        nnz = size[2].value
        indptr = cupy.empty(self.shape[0] + 1, np.int32) if indptr is None else indptr
        c = CSR(indptr, cupy.empty(nnz, np.int32), cupy.empty(nnz, self.dtype), self.shape)
        self.library.call("CsrSetPointers", self.c.descriptor, *map(_address, (c.indptr, c.indices, c.data)))
        return c


def _address(array: Any) -> Pointer:
    return Pointer(array.data.ptr if array is not None and array.size else None)


def _buffers(function: Callable[..., None], name: str, *before: Any, count: int = 1) -> list[Any]:
    """Ask a function how many bytes each of its buffers needs, allocate them, call it again with them."""
    sizes = [Size() for _ in range(count)]
    ask = [argument for size in sizes for argument in (ctypes.byref(size), None)]
    function(name, *before, *ask)
    buffers = [cupy.cuda.alloc(size.value) for size in sizes]
    give = [x for size, buffer in zip(sizes, buffers, strict=True) for x in (ctypes.byref(size), Pointer(buffer.ptr))]
    function(name, *before, *give)
    return buffers


def _multiply(p: _Product) -> CSR:
    """ALG1, ALG2 and ALG3; the latter two say beforehand how much `compute` needs at most."""
    p.begin()
    try:
        held = _buffers(p.values, "SpGEMM_workEstimation")
        if p.algorithm == ALGORITHMS["alg1"]:
            held += _buffers(p.values, "SpGEMM_compute")
        else:
            need, scratch_size, share = Size(), Size(), ctypes.c_float(FRACTION)
            p.values("SpGEMM_estimateMemory", share, ctypes.byref(scratch_size), None, None)
            scratch = cupy.cuda.alloc(scratch_size.value)
            p.values(
                "SpGEMM_estimateMemory", share, ctypes.byref(scratch_size), Pointer(scratch.ptr), ctypes.byref(need)
            )
            del scratch
            held.append(cupy.cuda.alloc(need.value))
            p.values("SpGEMM_compute", ctypes.byref(need), Pointer(held[-1].ptr))
        c = p.allocate()
        p.values("SpGEMM_copy")
        cupy.cuda.get_current_stream().synchronize()  # before the buffers return to the pool
    finally:
        p.end()
    return c


def _reuse(p: _Product) -> CSR:
    """SpGEMMreuse: the pattern first, then the values."""
    indptr = cupy.empty(p.shape[0] + 1, np.int32)
    p.begin(indptr)
    try:
        work = _buffers(p.pattern, "SpGEMMreuse_workEstimation")
        counted = _buffers(p.pattern, "SpGEMMreuse_nnz", count=3)
        del work, counted[0]
        c = p.allocate(indptr)
        copied = _buffers(p.pattern, "SpGEMMreuse_copy")
        del counted[0]
        p.values("SpGEMMreuse_compute")
        cupy.cuda.get_current_stream().synchronize()
        del counted, copied
    finally:
        p.end()
    return c


# -- products with vectors ---------------------------------------------------------------------------------------------

SPMV = {"csr_alg1": 2, "csr_alg2": 3, "coo_alg1": 1, "coo_alg2": 4, "sell": 5, "sell_sorted": 5, "bsr": 6}
"""cusparseSpMVAlg_t by the names used here; "sell_sorted" leaves y in the order of the sorted rows."""
SPMV_OP = {"op_alg1": 1, "op_alg2": 2}
"""cusparseSpMVOpAlg_t, of cuSPARSE 12.7.3 and later."""
SORTED_WINDOW = 16384
MOST_PADDING = 1.6
"""Places per entry from which sliced ELL is left out."""
ORDER_ROW = 2


class SpMV:
    """y = A x by one algorithm, preprocessed; call it to multiply.

    Parameters
    ----------
    library : Cusparse
        Of the stream that is current at each call.
    name : str
        One of `SPMV`.
    a : CSR
        On the device, 32-bit indices.
    x, y : device arrays
        Read and written by every call.

    Raises
    ------
    CusparseError
        Where cuSPARSE, or the format, does not suit the matrix.
    """

    def __init__(self, library: Cusparse, name: str, a: CSR, x: Any, y: Any) -> None:
        self.plan, self.operation = Pointer(), Pointer()
        self.library, self.held, self.dtype = library, [a, x, y], VALUE_TYPES[a.dtype.name]
        self.order: Any = None
        self.matrix, self.vectors = Pointer(), [Pointer(), Pointer()]
        library.call("SetStream", library.handle, Pointer(cupy.cuda.get_current_stream().ptr))
        create, arguments = getattr(self, f"_{name.split('_')[0]}")(a, name)
        library.call(f"Create{create}", ctypes.byref(self.matrix), *arguments)
        for operand, array in zip(self.vectors, (x, y), strict=True):
            self._describe(operand, array)
        self.factors = np.ones(1, a.dtype), np.zeros(1, a.dtype)
        self.one, self.zero = (Pointer(factor.ctypes.data) for factor in self.factors)
        if name in SPMV_OP:
            self._plan(SPMV_OP[name])
            return
        self._prepare(name)

    def _prepare(self, name: str) -> None:
        """Ask for the buffer, and preprocess."""
        self.arguments = (
            NON_TRANSPOSE, self.one, self.matrix, self.vectors[0], self.zero, self.vectors[1], self.dtype, SPMV[name]
        )  # fmt: skip
        self._preprocess("SpMV")

    def _preprocess(self, function: str) -> None:
        size = Size()
        self.library.call(f"{function}_bufferSize", self.library.handle, *self.arguments, ctypes.byref(size))
        self.buffer = cupy.cuda.alloc(max(size.value, 16))
        self.library.call(f"{function}_preprocess", self.library.handle, *self.arguments, Pointer(self.buffer.ptr))

    def __call__(self) -> None:
        """Multiply, on the current stream."""
        self.library.call("SetStream", self.library.handle, Pointer(cupy.cuda.get_current_stream().ptr))
        if self.plan:
            x, y = self.vectors
            self.library.call("SpMVOp", self.library.handle, self.plan, self.one, self.zero, x, y, y)
            return
        self.library.call("SpMV", self.library.handle, *self.arguments, Pointer(self.buffer.ptr))

    def _describe(self, operand: Pointer, array: Any) -> None:
        """Make the descriptor of x or y."""
        self.library.call("CreateDnVec", ctypes.byref(operand), ctypes.c_int64(len(array)), _address(array), self.dtype)

    def _plan(self, algorithm: int) -> None:
        """Prepare ``z = A x + 0 y``, with y for z."""
        x, y = self.vectors
        told = (NON_TRANSPOSE, self.matrix, x, y, y, self.dtype, algorithm)
        size = Size()
        self.library.call("SpMVOp_bufferSize", self.library.handle, *told, ctypes.byref(size))
        self.buffer = cupy.cuda.alloc(max(size.value, 16))
        self.library.call(
            "SpMVOp_createDescr", self.library.handle, ctypes.byref(self.operation), *told, Pointer(self.buffer.ptr)
        )
        self.library.call(
            "SpMVOp_createPlan", self.library.handle, self.operation, ctypes.byref(self.plan), None, Size(0)
        )

    def __del__(self) -> None:
        if self.plan:
            self.library.call("SpMVOp_destroyPlan", self.plan)
        if self.operation:
            self.library.call("SpMVOp_destroyDescr", self.operation)
        if self.matrix:
            self.library.call("DestroySpMat", self.matrix)
        for vector in filter(None, self.vectors):
            self.library.call("DestroyDnVec", vector)

    def _op(self, a: CSR, name: str) -> tuple[str, tuple[Any, ...]]:
        return self._csr(a, name)

    def _csr(self, a: CSR, name: str) -> tuple[str, tuple[Any, ...]]:
        sizes = map(ctypes.c_int64, (*a.shape, a.nnz))
        arrays = map(_address, (a.indptr, a.indices, a.data))
        return "Csr", (*sizes, *arrays, INDEX_32I, INDEX_32I, BASE_ZERO, self.dtype)

    def _coo(self, a: CSR, name: str) -> tuple[str, tuple[Any, ...]]:
        rows = (cupy.searchsorted(a.indptr, cupy.arange(a.nnz), side="right") - 1).astype(np.int32)
        self.held.append(rows)
        sizes = map(ctypes.c_int64, (*a.shape, a.nnz))
        return "Coo", (*sizes, *map(_address, (rows, a.indices, a.data)), INDEX_32I, BASE_ZERO, self.dtype)

    def _sell(self, a: CSR, name: str) -> tuple[str, tuple[Any, ...]]:
        sigma = SORTED_WINDOW if name == "sell_sorted" else 1
        made = sell.build(a, height=LANES, sigma=sigma, index="wide", block=1)
        if len(made.long_rows) or len(made.values) > MOST_PADDING * a.nnz + 1000:
            raise CusparseError(f"sliced ELL has {len(made.values) / max(a.nnz, 1):.1f} places per entry")
        offsets = cupy.append(value_places(made.chunks), len(made.values)).astype(np.int32)
        self.order = made.rows
        self.held += [made, offsets]
        sizes = map(ctypes.c_int64, (*a.shape, a.nnz, len(made.values), LANES))
        arrays = map(_address, (offsets, made.wide, made.values))
        return "SlicedEll", (*sizes, *arrays, INDEX_32I, INDEX_32I, BASE_ZERO, self.dtype)

    def _bsr(self, a: CSR, name: str) -> tuple[str, tuple[Any, ...]]:
        side = sell.build(a, sigma=1).block
        rows = a.nrows // side
        if side == 1 or a.nrows % side or a.nnz % (side * side):
            raise CusparseError("the matrix has no dense blocks")
        indptr = a.indptr[::side] // (side * side)
        owner = cupy.searchsorted(indptr, cupy.arange(a.nnz // side**2), side="right") - 1
        within = cupy.arange(len(owner)) - indptr[owner]
        unit = cupy.arange(side)
        starts = a.indptr[owner[:, None] * side + unit] + side * within[:, None]
        indices = a.indices[starts[:, 0]] // side
        data = a.data[(starts[:, :, None] + unit).ravel()]
        self.held += [indptr, indices, data]
        sizes = (*map(ctypes.c_int64, (rows, rows, len(indices), side, side)),)
        arrays = map(_address, (indptr, indices, data))
        return "Bsr", (*sizes, *arrays, INDEX_32I, INDEX_32I, BASE_ZERO, self.dtype, ORDER_ROW)


# -- products with several vectors -------------------------------------------------------------------------------------

SPMM = {"csr_alg1": 4, "csr_alg2": 6, "csr_alg3": 12, "coo_alg4": 5}
"""cusparseSpMMAlg_t that take matrices in C order."""


class SpMM(SpMV):
    """Y = A X by one algorithm of `SPMM`, preprocessed; x and y are (n, k) in C order."""

    def _describe(self, operand: Pointer, array: Any) -> None:
        sizes = map(ctypes.c_int64, (*array.shape, array.shape[1]))
        self.library.call("CreateDnMat", ctypes.byref(operand), *sizes, _address(array), self.dtype, ORDER_ROW)

    def _prepare(self, name: str) -> None:
        self.arguments = (
            NON_TRANSPOSE, NON_TRANSPOSE, self.one, self.matrix, self.vectors[0], self.zero, self.vectors[1],
            self.dtype, SPMM[name],
        )  # fmt: skip
        self._preprocess("SpMM")

    def __call__(self) -> None:
        """Multiply, on the current stream."""
        self.library.call("SetStream", self.library.handle, Pointer(cupy.cuda.get_current_stream().ptr))
        self.library.call("SpMM", self.library.handle, *self.arguments, Pointer(self.buffer.ptr))

    def __del__(self) -> None:
        if self.matrix:
            self.library.call("DestroySpMat", self.matrix)
        for matrix in filter(None, self.vectors):
            self.library.call("DestroyDnMat", matrix)
