"""Operands, results and buffers of the Numba kernels, as named tuples: Numba takes their fields as it takes arrays.

A field that is None has a type of its own. Branches that test it are left out of the compiled code only if it is an
argument of its own: kernels pass such a field on to the function that has the branch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from spdist.kernels.semirings import Semiring
from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]
Integer: TypeAlias = int | np.int64
"""An integer of a caller in Python, or of a compiled caller."""


class CsrArrays(NamedTuple):
    """The arrays of a `CSR`."""

    indptr: Int64Array
    indices: IndexArray
    data: ValueArray


class RowRanges(NamedTuple):
    """B by rows: row k is entries ``[starts[k], stops[k])``."""

    starts: Int64Array
    indices: IndexArray
    data: ValueArray
    stops: Int64Array


class ProductArguments(NamedTuple):
    """A product as the kernels take it."""

    a: CsrArrays
    b: RowRanges  # its starts are moved if C is a triangle
    ring: Semiring | None  # None for plus and times
    wide: bool | None  # None if C has at most `WINDOW` columns: such a kernel takes half as long to compile. Else True
    prefetches: bool  # whether to prefetch rows of B


class RowExtent(NamedTuple):
    """What the products of a row come to."""

    row: int  # row of A
    products: np.int64
    first: np.int64  # first column of the row of C
    last: np.int64  # last column of the row of C; below `first` in an empty row
    parts: int  # rows of B that take part


class RowsOut(NamedTuple):
    """Where rows of C go."""

    indices: IndexArray  # (capacity + 1,): the spare entry takes all entries that do not fit
    data: ValueArray  # (capacity + 1,)
    ends: Int64Array  # ``ends[i]`` becomes the number of entries in the first i + 1 rows
    capacity: np.uint64  # entries


class Window(NamedTuple):
    """A dense accumulator. Between rows all totals are the semiring's zero and all marks are 0."""

    totals: ValueArray
    hits: Bytes  # 1 for each column that was hit
    hits64: Bytes  # 1 for each group of 64 columns with a hit


class SortBuffers(NamedTuple):
    """Room for the radix sort of the products of a row."""

    keys: Words  # (2, products): the sort moves keys from one row to the other
    values: ValueArray
    bins: Int32Array


class Batch(NamedTuple):
    """Room for the rank sort of a batch of small rows."""

    keys: Int32Array
    ordered: Words
    values: ValueArray
    sizes: Words  # products of each row
    firsts: Words  # first column of each row
    ends: Words  # end of each row in C


class Workspace(NamedTuple):
    """The buffers of one thread."""

    window: Window
    sorting: SortBuffers
    batch: Batch


class AllowedMask(NamedTuple):
    """A mask that C is confined to, with a hash table for a row; between rows totals are zero, and hits are 0."""

    indptr: Int64Array
    indices: IndexArray
    keys: IndexArray
    places: IndexArray
    totals: ValueArray  # a total for each column of the longest row of the mask
    hits: Bytes


class ForbiddenMask(NamedTuple):
    """A mask that C is kept out of, with a thread's hash table for a row of it."""

    indptr: Int64Array
    indices: IndexArray
    keys: IndexArray
    places: IndexArray
    shift: Words  # (1,): the shift of the table's hash


class EpilogueArguments(NamedTuple):
    """An epilogue as the kernels take it."""

    rows: ValueArray | None  # factor for each row
    columns: ValueArray | None  # factor for each column
    function: Any  # compiled function of one value, or None
    norm: int  # 0 for none, else 1 more than the position in `product_spec.NORMS`
    drop_zeros: bool


class Selection(NamedTuple):
    """How a row is cut to its largest entries."""

    least: Any  # smallest value to keep
    top: int  # most entries to keep
    heap: ValueArray  # (top + 1,)
    bar: Any  # the largest value that is not kept or is not above the semiring's zero
    has_bar: bool
    """Whether rows may be made without the values up to the bar, if enough others are found: no epilogue changes
    values, and there may be values above the bar."""
    skips_below: bool  # whether these values are not kept anyway
    places: Words  # (MOST_PLACES,): places in rows of B, or of A's entries
    costs: npt.NDArray[np.float64]  # (MOST_ORDERED,)
    peaks: ValueArray | None  # (rows of B,): largest magnitude of each row, if products may be left out
    epsilon: float  # of the dtype


class RowCuts(NamedTuple):
    """What fused kernels keep of each row. Fields that are None are left out of the compiled code."""

    allowed: AllowedMask | None  # the mask that rows are confined to
    forbidden: ForbiddenMask | None  # the mask that rows are kept out of; not together with `allowed`
    epilogue: EpilogueArguments | None
    selection: Selection | None
    diagonal: int | None  # the first wanted column of row 0, one more for each row after it; None for whole rows


class MaskRow(NamedTuple):
    """A row of a mask."""

    columns: IndexArray  # columns of the whole mask
    first: np.uintp  # first entry of the row
    length: np.uintp  # entries of the row


class _WritableAlias:
    """The memory of a read-only array, for a second array that Numba takes for a writable one."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or one of the same memory, contiguous and not marked read-only; no kernel writes to operands.

    Numba compiles once more for read-only arrays.
    """
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else np.asarray(_WritableAlias(array))
