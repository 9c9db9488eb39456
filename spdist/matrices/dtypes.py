"""Dtypes of indices and values, blocks among them, and the array module, NumPy or CuPy, that an array belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError
from spdist.foundation.cpus import count_cpus
from spdist.foundation.threads import run_in_threads

IndexArray = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]
DeviceArray = npt.NDArray[Any]
"""An array of NumPy, or one of CuPy, which has NumPy's interface."""

INT32_MAX = np.iinfo(np.int32).max
"""Largest column index, and largest number of entries, that int32 arrays hold."""
CONVERTED_PART = 1 << 20
"""Elements for which another thread is worth its start."""


def index_dtype(ncols: int) -> np.dtype[Any]:
    """Return the dtype of column indices below `ncols`: int32 if they fit, else int64.

    Examples
    --------
    >>> index_dtype(2**31 - 1)
    dtype('int32')
    >>> index_dtype(2**31)
    dtype('int64')
    """
    return np.dtype(np.int32 if ncols <= INT32_MAX else np.int64)


def converted(array: npt.NDArray[Any], dtype: np.dtype[Any], threads: int | None = None) -> npt.NDArray[Any]:
    """Return an array in a dtype: itself if it has it, else a copy, which several threads make if it is long.

    `array`: (n,) array.
    `threads`: most threads; by default one a CPU.

    Examples
    --------
    >>> converted(np.array([1, 2], np.int32), np.dtype(np.int64))
    array([1, 2])
    """
    if array.dtype == dtype:
        return array
    out = np.empty(len(array), dtype)
    count = max(1, min(threads or count_cpus(), len(array) // CONVERTED_PART))
    cuts = np.linspace(0, len(array), count + 1).astype(np.int64)

    def convert(part: int) -> None:
        """Convert a part; its thread is the first to touch the memory."""
        out[cuts[part] : cuts[part + 1]] = array[cuts[part] : cuts[part + 1]]

    run_in_threads(count, convert)
    return out


def block_dtype(dtype: np.dtype[Any], size: tuple[int, int]) -> np.dtype[Any]:
    """Return the dtype of values that are dense blocks of r x s; a `CSR` of such values is a block matrix.

    `dtype`: of the numbers in the blocks.
    `size`: (r, s).
    Returns A structured dtype whose one field, ``block``, is an (r, s) array of `dtype`.

    Examples
    --------
    >>> block_dtype(np.dtype("f4"), (3, 2)).itemsize
    24
    """
    try:
        return np.dtype([("block", dtype, size)])
    except ValueError:  # NumPy counts bytes in a C int
        raise InputError(f"blocks of {size[0]} x {size[1]} take more than 2 GiB each: choose smaller ones") from None


def blocksize(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks if a dtype is a `block_dtype`; None if it is one of numbers.

    Examples
    --------
    >>> blocksize(block_dtype(np.dtype("f4"), (3, 2)))
    (3, 2)
    """
    return (dtype["block"].shape[0], dtype["block"].shape[1]) if dtype.names == ("block",) else None


def from_blocks(data: npt.NDArray[Any]) -> ValueArray:
    """Return an array of blocks, (n, r, s), as (n,) values of `block_dtype`; a view if the array has no gaps.

    Examples
    --------
    >>> from_blocks(np.zeros((5, 3, 2))).shape
    (5,)
    """
    size = (data.shape[1], data.shape[2])
    flat = np.ascontiguousarray(data).reshape(-1, size[0] * size[1])
    return flat.view(block_dtype(data.dtype, size)).reshape(-1)


def number_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the numbers in the blocks if a dtype is a `block_dtype`; otherwise the dtype itself.

    Examples
    --------
    >>> number_dtype(block_dtype(np.dtype("f4"), (3, 2)))
    dtype('float32')
    """
    return dtype if blocksize(dtype) is None else dtype["block"].base


def result_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a product: NumPy's ``result_type``; bool times bool is bool (an OR of ANDs).

    `a, b`: of the values of A and B, numbers or blocks.
    Returns blocks of r x s times blocks of s x t give blocks of r x t.
    Raises `MatrixError` if one operand holds blocks and the other does not, or their blocks do not fit.

    Examples
    --------
    >>> result_dtype(np.dtype("f4"), np.dtype("i4"))
    dtype('float64')
    """
    left, right = blocksize(a), blocksize(b)
    if left is None and right is None:
        return np.result_type(a, b)
    if left is None or right is None or left[1] != right[0]:
        sizes = ["numbers" if size is None else f"blocks of {size[0]} x {size[1]}" for size in (left, right)]
        raise MatrixError(
            f"A holds {sizes[0]}, B {sizes[1]}: both need blocks, of r x s and of s x t; import one of them again with "
            f"another --block-size, or without"
        )
    return block_dtype(np.result_type(number_dtype(a), number_dtype(b)), (left[0], right[1]))


FRACTIONS = frozenset(map(np.dtype, ("f4", "f8", "c8", "c16")))
"""Dtypes with fractions that spdist multiplies."""


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return `dtype` if spdist multiplies it: bool, integers, float32/64, complex64/128, or blocks of these.

    Raises `MatrixError` for any other dtype, float16 and long double among them.
    """
    number = number_dtype(dtype)
    if number.kind not in "biu" and number not in FRACTIONS:
        wider = {2: "float32", 16: "float64"}.get(number.itemsize, "") if number.kind == "f" else ""
        remedy = f", as a.astype('{wider}') does" if wider else ""
        raise MatrixError(
            f"values of dtype {dtype} cannot be multiplied: convert them to bool, an integer, float32, float64, "
            f"complex64 or complex128{remedy}"
        )
    return dtype


def is_on_gpu(array: object) -> bool:
    """Whether an array is CuPy's, by the module of its class, so that CuPy is not imported."""
    return type(array).__module__.partition(".")[0] == "cupy"


def module_of(array: object) -> Any:
    """Return the module, CuPy or NumPy, that an array belongs to."""
    if is_on_gpu(array):
        import cupy

        return cupy
    return np
