"""A product by ESC on the GPU: its operands, the types its kernels are compiled for, and the counts of its rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import MatrixError
from spdist.kernels.cuda.constants import ROW_CLASSES, SCAN_ROWS, EscFact
from spdist.kernels.cuda.module import c_type, module, shared_memory
from spdist.kernels.esc.row_classes import EscClass, classes_that_fit
from spdist.kernels.esc.workspace import ESC_STATE, FACT_WORDS, esc_setup
from spdist.kernels.rounding import ceil_div
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import result_dtype

COUNT_FILE, LIST_FILE = "esc/count_products.cu", "rowwise_gpu/rows.cu"
CLASS_ROWS = FACT_WORDS
"""Place among the counters of the rows of each class."""
CLASS_TAKEN = CLASS_ROWS + ROW_CLASSES
"""Place among the counters of the rows of each class that are listed."""
LIST_KERNELS = ("list_rows", "offsets<long long>")
COUNT_LANES = (2, 4, 8, 32)
"""Lanes that count the products of a row, by the mean length of A's rows."""
MOST_BLOCKS = 2112
"""Thread blocks that count products at most: 16 on each of the 132 multiprocessors of an H100."""
SHARED_RESERVED = 2048
"""Bytes of shared memory left to the system and to the static arrays of the kernels."""


class Arena:
    """One device allocation, handed out by name; `sizes` has the bytes of each array."""

    def __init__(self, sizes: dict[str, int]) -> None:
        import cupy

        self.sizes, self.memory = sizes, cupy.empty(sum(sizes.values()), np.uint8)
        self.starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))

    def __call__(self, name: str, count: int, dtype: npt.DTypeLike) -> Any:
        """Return the first `count` items of the array of this name."""
        start, size = self.starts[name], count * np.dtype(dtype).itemsize
        assert size <= self.sizes[name]
        return self.memory[start : start + size].view(dtype)


@dataclass(frozen=True, eq=False)
class EscProduct:
    """Operands in the dtypes of C, on the current device."""

    a: CSR
    b: CSR
    copied: int  # bytes of the operands' arrays that had to be copied into other dtypes
    shared: int  # bytes of shared memory that a thread block may use
    classes: tuple[EscClass, ...]  # classes whose rows fit in it

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of C."""
        return self.a.nrows, self.b.ncols

    @property
    def tile(self) -> EscClass:
        """Shape of the thread blocks that sort tiles of long rows."""
        return self.classes[-1]

    @property
    def bucket(self) -> EscClass:
        """Shape of the thread blocks that merge buckets of long rows."""
        return self.classes[-2]

    @functools.cached_property
    def types(self) -> tuple[str, str, str]:
        """C types of values, columns and offsets."""
        return c_type(self.a.dtype), c_type(self.a.indices.dtype), c_type(self.a.indptr.dtype)

    @functools.cached_property
    def pattern(self) -> tuple[Any, ...]:
        """Arguments of kernels that count: offsets and columns of A and B."""
        return self.a.indptr, self.a.indices, self.b.indptr, self.b.indices

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Arguments of kernels that multiply: offsets, columns and values of A and B."""
        return self.a.indptr, self.a.indices, self.a.data, self.b.indptr, self.b.indices, self.b.data

    def shared_bytes(self, row_class: EscClass) -> int:
        """Return the shared memory of a thread block that takes rows of a class."""
        key = row_class.key_bytes(self.b.ncols)
        return row_class.shared_bytes(self.a.dtype.itemsize, self.a.indptr.dtype.itemsize, key)


def product_of(a: CSR, b: CSR) -> EscProduct:
    """Return the product of two matrices on the GPU, whose shapes fit, with operands cast to C's dtypes."""
    dtype = result_dtype(a.dtype, b.dtype)
    index = np.promote_types(a.indices.dtype, b.indices.dtype)
    pointer = np.promote_types(a.indptr.dtype, b.indptr.dtype)
    wanted = [pair for m in (a, b) for pair in ((m.indptr, pointer), (m.indices, index), (m.data, dtype))]
    copied = sum(len(array) * t.itemsize for array, t in wanted if array.dtype != t)

    def cast(m: CSR) -> CSR:
        indptr, indices = m.indptr.astype(pointer, copy=False), m.indices.astype(index, copy=False)
        return CSR(indptr, indices, m.data.astype(dtype, copy=False), m.shape)

    shared = shared_memory() - SHARED_RESERVED
    classes = classes_that_fit(shared, dtype.itemsize, pointer.itemsize)
    return EscProduct(cast(a), cast(b), copied, shared, classes)


class CountedRows(NamedTuple):
    """Counts of the rows of C, known once their products are counted."""

    # (words,) uint64: counters on the device: facts, rows of each class, rows listed, and the state of the scan
    state: Any
    lengths: Any  # (nrows,) uint32: products of each row, then its entries
    listed: Any  # (nrows,) uint32: rows by rising class
    places: Any  # (nrows,) int64: place of each row in the pool; -1 if the pool does not hold the row
    offsets: Any  # (nrows + 1,) int64: row offsets of C, once its entries are counted
    class_rows: list[int]  # rows of each class, the rows without products first
    # products of all rows and of the longest
    products: int
    longest: int

    def at(self, slot: int) -> int:
        """Return the device address of a counter."""
        return int(self.state.data.ptr) + 8 * slot

    def read(self) -> Any:
        """Wait for the device, and return a copy of the counters on the host."""
        return self.state[:ESC_STATE].get()

    def turn_lengths_into_offsets(self) -> None:
        """Queue the scan of the rows' entries that gives their offsets; it writes nnz(C) to the facts."""
        nrows = np.int64(len(self.lengths))
        module(LIST_FILE, LIST_KERNELS)(
            "offsets<long long>", ceil_div(int(nrows), SCAN_ROWS), 256,
            (nrows, self.lengths, self.at(ESC_STATE), self.offsets, self.at(EscFact.NNZ_C), None),
        )  # fmt: skip


def count_kernels(index: str, pointer: str) -> tuple[str, ...]:
    """Return the name expressions of the kernels that count products, in the order of `COUNT_LANES`."""
    return tuple(f"count_products<{index},{pointer},{lanes}>" for lanes in COUNT_LANES)


def count_rows(x: EscProduct) -> CountedRows:
    """Count the products of each row of C, list the rows by class, and check the operands; waits for the GPU.

    Raises `MatrixError` if an offset or a column is out of range.
    """
    import cupy

    a, b, nrows = x.a, x.b, x.a.nrows
    setup = esc_setup(nrows)
    arena, words = Arena(setup), setup["state"] // 8
    counted = CountedRows(
        arena("state", words, np.uint64), arena("lengths", nrows, np.uint32), arena("list", nrows, np.uint32),
        arena("places", nrows, np.int64), arena("offsets", nrows + 1, np.int64), [], 0, 0,
    )  # fmt: skip
    counted.state.data.memset_async(0, 8 * words)
    mean = a.nnz / nrows
    lanes = 2 if mean < 3 else 4 if mean < 10 else 8 if mean < 64 else 32
    sizes = tuple(map(np.int64, (nrows, a.nnz, b.nrows, b.nnz, b.ncols)))
    limits = _class_limits(cupy.cuda.runtime.getDevice(), x.classes)
    names = count_kernels(*x.types[1:])
    module(COUNT_FILE, names)(
        names[COUNT_LANES.index(lanes)], min(ceil_div(nrows, 256 // lanes), MOST_BLOCKS), 256,
        (*sizes, *x.pattern, limits, counted.lengths, counted.at(0), counted.at(CLASS_ROWS)),
    )  # fmt: skip
    module(LIST_FILE, LIST_KERNELS)(
        "list_rows", ceil_div(nrows, 256), 256,
        (sizes[0], counted.lengths, limits, counted.at(CLASS_ROWS), counted.at(CLASS_TAKEN), counted.listed),
    )  # fmt: skip
    facts = counted.read()
    if facts[EscFact.BAD_A] or facts[EscFact.BAD_B]:
        what = "A's offsets or columns, or B's offsets," if facts[EscFact.BAD_A] else "B's columns"
        raise MatrixError(f"{what} are out of range: rebuild the matrix or correct its shape")
    return counted._replace(
        class_rows=[int(n) for n in facts[CLASS_ROWS:CLASS_TAKEN]], products=int(facts[EscFact.ALL_PRODUCTS]),
        longest=int(facts[EscFact.LONGEST]),
    )  # fmt: skip


@functools.cache
def _class_limits(device: int, classes: tuple[EscClass, ...]) -> Any:
    """Return the most products of a row of each class, the rows without products first, on the device."""
    import cupy

    most = [0, *(row_class.max_products for row_class in classes)]
    return cupy.asarray(np.array([*most, *[2**64 - 1] * (ROW_CLASSES - len(most))], np.uint64))
