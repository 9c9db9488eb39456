"""Blocks on the device: dtypes, places of arrays in a block's memory, and the arrays that the host uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.constants import ALLOCATION, aligned
from spdist.kernels.rounding import round_up
from spdist.kernels.streaming.workspace import PAIR_BYTES
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import INT32_MAX, block_dtype, blocksize, index_dtype, number_dtype, result_dtype


class SubmatrixOffset(NamedTuple):
    """Position of A inside B, if A is a view of B."""

    row: int = 0  # row of B that is A's row 0
    column: int = 0  # offset to subtract from B's column indices to get A's


@dataclass(frozen=True)
class DeviceDtypes:
    """Dtypes of the arrays on the device.

    The three dtypes of values are equal unless values are dense blocks (`csr.block_dtype`): then A, B and C have blocks
    of their own shapes.
    """

    value: np.dtype[Any]  # values of C
    index: np.dtype[Any]  # columns of A, B and C
    pointer: np.dtype[Any]  # offsets of rows
    # values of A and of B
    a: np.dtype[Any]
    b: np.dtype[Any]

    @property
    def blocked(self) -> bool:
        """Whether values are dense blocks."""
        return blocksize(self.value) is not None

    @property
    def entry(self) -> int:
        """Bytes of an entry of C."""
        return self.value.itemsize + self.index.itemsize

    @property
    def a_entry(self) -> int:
        """Bytes of an entry of A."""
        return self.a.itemsize + self.index.itemsize

    @property
    def b_entry(self) -> int:
        """Bytes of an entry of B."""
        return self.b.itemsize + self.index.itemsize


def device_dtypes(a: CSR, b: CSR, value: np.dtype[Any] | None = None) -> DeviceDtypes:
    """Choose the dtypes that the arrays of ``a @ b`` have on the device: 32-bit columns and offsets if all sizes fit.

    `value`: values of C; by default the result dtype of plus and times.
    """
    value = result_dtype(a.dtype, b.dtype) if value is None else value
    wide = max(b.nrows, b.ncols) > INT32_MAX
    index = np.dtype(np.int64) if wide else index_dtype(b.ncols)
    # 31 bits count the entries of a block's A unless a single row has more: `BlockCutter` sees to it.
    longest = int(np.max(np.diff(a.indptr))) if a.nnz > INT32_MAX else 0
    pointer = np.dtype(np.int64 if max(b.nnz, longest, b.ncols if wide else 0) > INT32_MAX else np.int32)
    sizes = (blocksize(m.dtype) for m in (a, b))
    number = number_dtype(value)
    return DeviceDtypes(
        value, index, pointer, *(number if size is None else block_dtype(number, size) for size in sizes)
    )


class MatrixLayout(NamedTuple):
    """Places of the arrays of a CSR matrix in a block's memory."""

    nrows: int
    ncols: int
    nnz: int
    value: np.dtype[Any]  # values of the matrix
    # byte at which each array begins
    data: int
    indices: int
    indptr: int
    end: int  # byte after the last array


def lay_out(
    shape: tuple[int, int], nnz: int, value: np.dtype[Any], dtypes: DeviceDtypes, begin: int = 0
) -> MatrixLayout:
    """Lay out values, columns and offsets of a matrix from byte `begin` on, each aligned as the kernels need.

    `value`: dtype of the matrix's values; `dtypes`: dtypes of indices and offsets.
    """
    indices = begin + aligned(nnz * value.itemsize)
    indptr = indices + aligned(nnz * dtypes.index.itemsize)
    end = indptr + aligned((shape[0] + 1) * dtypes.pointer.itemsize)
    return MatrixLayout(*shape, nnz, value, begin, indices, indptr, end)


def lay_out_resident(b: CSR, dtypes: DeviceDtypes) -> tuple[MatrixLayout, int]:
    """Lay out a resident B; return also the bytes of all arrays, with room for a B that is a little larger.

    If values are blocks, the last array counts the pairs of blocks.
    """
    layout = lay_out(b.shape, b.nnz, dtypes.b, dtypes)
    size = layout.end + (aligned(PAIR_BYTES * b.nnz) if dtypes.blocked else 0)
    return layout, round_up(size, max(ALLOCATION, 1 << size.bit_length() >> 6))


class HostCopy(NamedTuple):
    """An array on the host to copy to byte `target` of a block's device memory."""

    array: npt.NDArray[Any]
    target: int


@dataclass
class StagedBlock:
    """A block of rows, ready to be uploaded."""

    # rows of A
    start: int
    stop: int
    products: int  # number of products that they expand to
    copies: list[HostCopy]  # page-locked arrays. Empty if the whole block is on the device.
    a: MatrixLayout  # places of A in the block's device memory
    b: MatrixLayout | None  # places of B; None if B is resident
    begin: float  # start of the preparation, in seconds since 1970
    seconds: float = 0.0  # seconds of the preparation
    column_offset: int = 0  # offset that the device subtracts from A's column indices when A is a view of B; else 0
    row_in_b: int | None = None  # row of the resident B that is the block's first row of A; None if A is uploaded

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the upload fills, gaps included."""
        return (self.b or self.a).end

    def release_host_arrays(self) -> None:
        """Drop the arrays that were uploaded; the caller's own may be among them."""
        self.copies.clear()


def share_entries(a: CSR, b: CSR) -> bool:
    """Return whether two matrices have their columns and values in the same arrays: A may be rows of B."""
    return a.indices is b.indices and a.data is b.data
