"""Operands, results and buffers of the Numba kernels, as named tuples: Numba takes their fields as it takes arrays.

A field that is None has a type of its own. Branches that ask for it are left out of the compiled code only if it is
an argument of its own: kernels pass such fields on one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]


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


class RowsOut(NamedTuple):
    """Where rows of C go."""

    indices: IndexArray
    """(capacity + 1,): the spare entry takes all entries that do not fit."""
    data: ValueArray
    """(capacity + 1,)."""
    ends: Int64Array
    """``ends[i]`` becomes the number of entries in the first i + 1 rows."""
    capacity: np.uint64
    """Entries."""


class Window(NamedTuple):
    """A dense accumulator. Between rows all totals are the semiring's zero and all marks are 0."""

    totals: ValueArray
    hits: Bytes
    """1 for each column that was hit."""
    hits64: Bytes
    """1 for each 64 columns of which one was hit."""


class SortBuffers(NamedTuple):
    """Room for the radix sort of the products of a row."""

    keys: Words
    """(2, products): the sort moves keys from one row to the other."""
    values: ValueArray
    bins: Int32Array


class Batch(NamedTuple):
    """Room for the rank sort of a batch of small rows."""

    keys: Int32Array
    ordered: Words
    values: ValueArray
    sizes: Words
    """Products of each row."""
    firsts: Words
    """First column of each row."""
    ends: Words
    """End of each row in C."""


class Workspace(NamedTuple):
    """The buffers of one thread."""

    window: Window
    sorting: SortBuffers
    batch: Batch


class AllowedMask(NamedTuple):
    """A mask that C is confined to, with a thread's hash table for a row of it.

    Between rows totals are the semiring's zero, and hits are 0.
    """

    indptr: Int64Array
    indices: IndexArray
    keys: IndexArray
    places: IndexArray
    totals: ValueArray
    """A total for each column of the longest row of the mask."""
    hits: Bytes


class ForbiddenMask(NamedTuple):
    """A mask that C is kept out of, with a thread's hash table for a row of it."""

    indptr: Int64Array
    indices: IndexArray
    keys: IndexArray
    places: IndexArray
    shift: Words
    """(1,): the shift of the table's hash."""


class EpilogueArguments(NamedTuple):
    """An epilogue as `fused.finish_row` takes it."""

    rows: ValueArray | None
    """Factor for each row."""
    columns: ValueArray | None
    """Factor for each column."""
    function: Any
    """Compiled function of one value, or None."""
    norm: int
    """0 for none, else 1 more than the position in `product_spec.NORMS`."""
    drop_zeros: bool


class Selection(NamedTuple):
    """How a row is cut to its largest entries."""

    least: Any
    """Smallest value to keep."""
    top: int
    """Most entries to keep."""
    heap: ValueArray
    """(top + 1,)."""
    skips_below: bool
    """Whether values below `least` may be left out while a row is made: `least` is above the semiring's zero, and no
    epilogue changes values."""
