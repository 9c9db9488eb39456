"""Rows of B that a block of A refers to: marked, numbered and copied next to each other; compiled by Numba."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from spdist.kernels.cpu.arrays import CsrArrays, Integer
from spdist.kernels.cpu.numba_compile import compiled, inlined, instruction
from spdist.kernels.cpu.rowwise.instructions import lowest_bit
from spdist.matrices.dtypes import IndexArray, ValueArray

if TYPE_CHECKING:
    from numba.core.base import BaseContext

Bits: TypeAlias = npt.NDArray[np.uint64]
"""A bit for each row of B, 64 a word."""
Places: TypeAlias = npt.NDArray[np.uint32]
"""For each word of `Bits`, the number of marked rows before it."""

ONE = np.uint64(1)
WORD = np.uint64(64)


class MarkedRows(NamedTuple):
    """Rows of B that `mark_rows` and `number_rows` have marked and numbered."""

    bits: Bits
    places: Places
    low: Integer  # first word of `bits` that has marks
    high: Integer  # word after the last that has marks


class RowCopies(NamedTuple):
    """Where copies of rows of B go, each array from its first place on."""

    starts: IndexArray  # start of each row
    columns: IndexArray
    values: ValueArray
    width: int  # values of an entry, side by side


@instruction
def ones(context: BaseContext, bits: types.Type) -> Any:
    """Count the set bits of a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@compiled
def mark_rows(a_indices: IndexArray, first: Integer, last: Integer, nrows: Integer, bits: Bits) -> Any:
    """Set the bit of each row of B that entries [first, last) of A refer to; return the range of words with such bits.

    If the column of an entry is out of range, return -1 and that entry.
    """
    low, high, end = np.uint64(len(bits)), np.uint64(0), np.uint64(nrows)
    for at in range(np.uintp(first), np.uintp(last)):
        k = np.uint64(np.int64(a_indices[at]))
        if k >= end:
            return np.int64(-1), np.int64(at)
        word = k >> np.uint64(6)
        bits[word] |= ONE << (k & np.uint64(63))
        low, high = min(low, word), max(high, word + ONE)
    return np.int64(min(low, high)), np.int64(high)


@inlined
def next_run(bits: np.uint64, base: np.uint64) -> Any:
    """Return the first run of set bits of a word: its first row, the row after its last, and the bits after the run.

    `bits`: not 0; the lowest stands for row `base`.
    """
    start = lowest_bit(bits)
    filled = bits | ((ONE << start) - ONE)
    if filled + ONE == np.uint64(0):
        return base + start, base + WORD, np.uint64(0)
    stop = lowest_bit(~filled)
    return base + start, base + stop, bits & ~((ONE << stop) - ONE)


@compiled
def number_rows(bits: Bits, places: Places, low: Integer, high: Integer, b_indptr: IndexArray) -> Any:
    """Give the marked rows of B numbers from 0 on; return how many rows are marked, and how many entries they have.

    `places`: receives the first number of each word of `bits`; words ``[low:high)`` have marks. If offsets fall or
    exceed the last one, -1 entries are returned.
    """
    rows: Any = np.uint64(0)
    entries, end, sound = np.int64(0), b_indptr[len(b_indptr) - 1], True
    for word in range(np.uintp(low), np.uintp(high)):
        left = bits[word]
        places[word] = rows
        rows += ones(left)
        while left:
            first, last, left = next_run(left, np.uint64(word) * WORD)
            sound &= 0 <= b_indptr[first] <= b_indptr[last] <= end
            entries += b_indptr[last] - b_indptr[first]
    return np.int64(rows), entries if sound else np.int64(-1)


@inlined
def copy_rows(b: CsrArrays, source: Integer, stop: Integer, out: RowCopies, at: Integer) -> None:
    """Copy entries [source, stop) of B to the copies, from entry `at` on."""
    width = np.uintp(out.width)
    for j in range(np.uintp(stop - source)):
        out.columns[np.uintp(at) + j] = b.indices[np.uintp(source) + j]
    target, first = np.uintp(at) * width, np.uintp(source) * width
    for j in range(np.uintp(stop - source) * width):
        out.values[target + j] = b.data[first + j]


@compiled
def send_distinct(a_indices: IndexArray, b: CsrArrays, marks: MarkedRows, numbers: IndexArray, out: RowCopies) -> None:
    """Write the number of the row of B for each entry of A, copy the marked rows of B in order, and clear the marks."""
    bits = marks.bits
    for at in range(np.uintp(len(a_indices))):
        k: Any = np.uint64(a_indices[at])
        word = k >> np.uint64(6)
        numbers[at] = np.uint64(marks.places[word]) + ones(bits[word] & ((ONE << (k & np.uint64(63))) - ONE))
    row: Any = np.uintp(0)
    copied: Any = np.int64(0)
    for word in range(np.uintp(marks.low), np.uintp(marks.high)):
        left = bits[word]
        bits[word] = np.uint64(0)
        while left:
            begin, end, left = next_run(left, np.uint64(word) * WORD)
            source, stop = b.indptr[begin], b.indptr[end]
            for k in range(begin, end):
                out.starts[row] = copied + b.indptr[k] - source
                row += np.uintp(1)
            copy_rows(b, source, stop, out, copied)
            copied += stop - source
    out.starts[row] = copied


@compiled
def send_duplicated(a_indices: IndexArray, b: CsrArrays, out: RowCopies) -> None:
    """Copy the row of B of each entry of A, in order."""
    copied: Any = np.int64(0)
    for at in range(np.uintp(len(a_indices))):
        k = np.uintp(a_indices[at])
        source, stop = b.indptr[k], b.indptr[k + np.uintp(1)]
        out.starts[at] = copied
        copy_rows(b, source, stop, out, copied)
        copied += stop - source
    out.starts[np.uintp(len(a_indices))] = copied
