"""The host's part of `packing`, compiled by Numba; `packing` imports it when it is first needed.

Any thread unpacks any unit; ``packing.cu`` defines their bytes. All numbers are int64: any difference fits, and Numba
would turn a sum of int64 and uint64 into a float.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from spdist.kernels.cpu.numba_compile import compiled, inlined, instruction
from spdist.kernels.cuda import constants

if TYPE_CHECKING:
    from spdist.kernels.cuda.pinned import Bytes
    from spdist.matrices.dtypes import IndexArray, Int64Array, ValueArray

SAME, CONTINUES = constants.PACKED_SAME, constants.PACKED_CONTINUES
"""Flags of a piece's head: it has the pattern of the piece before, and it begins inside its row."""
EACH, EACH_BITS = 2, 28
"""Two numbers of at most 28 bits each are read by one load, in which at least 57 bits are usable."""
ROW, ENTRY, COLUMNS_AT, VALUES_AT = map(int, constants.PackedPlace)
"""Words of the directory: first row and entry of a unit, and where the bytes of its columns and values start."""


@instruction
def load(context: Any, packed: Any, at: Any) -> Any:
    """Return the 8 bytes ``packed[at:at + 8]``, at any byte, as a number; Numba passes its typing context."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        word = ir.IntType(64)
        return builder.load(builder.bitcast(builder.gep(array.data, [args[1]]), word.as_pointer()), align=1)

    return types.int64(packed, types.int64), generate


@inlined
def low_bits(width: np.int64) -> np.int64:
    """Return a number whose `width` lowest bits are set."""
    return np.int64(-1) if width == 64 else (np.int64(1) << width) - np.int64(1)


@inlined
def bits(packed: Bytes, at: np.int64, number: np.int64, width: np.int64, mask: np.int64) -> Any:
    """Return one number of an array of `width`-bit numbers, 57 at most, that starts at byte `at`.

    `mask`: ``low_bits(width)``.
    """
    bit = number * width
    return (load(packed, at + (bit >> np.int64(3))) >> (bit & np.int64(7))) & mask


@inlined
def signed(packed: Bytes, at: np.int64, size: np.int64) -> Any:
    """Return the signed number of `size` bytes, 8 at most, at byte `at`; 0 bytes are the number 0."""
    if size == 0:
        return np.int64(0)
    unused = np.int64(64) - np.int64(8) * size
    return (load(packed, at) << unused) >> unused


@inlined
def put_group(
    packed: Bytes,
    at: np.int64,
    numbers: tuple[int | np.int64, int | np.int64],
    each: int,
    width: np.int64,
    column: np.int64,
    first: np.int64,
    indices: IndexArray,
) -> Any:
    """Write the columns of numbers [start, stop) of a group; return the last column.

    `at`: byte at which the group's numbers start. `each`: numbers that one load reads; divides ``stop - start``.
    `width`: bits of a number: the difference to the column before it, less 1. `column`: column before the first written
    one. `first`: entry of the group's number 0.
    """
    mask = low_bits(width)
    for number in range(numbers[0], numbers[1], each):
        bit = np.int64(number) * width
        word = load(packed, at + (bit >> np.int64(3))) >> (bit & np.int64(7))
        for k in range(each):
            column += (word & mask) + np.int64(1)
            word >>= width
            indices[np.uintp(first + number + k)] = column
    return column


@inlined
def put_columns(
    packed: Bytes, at: np.int64, column: np.int64, first: np.int64, last: np.int64, indices: IndexArray
) -> Any:
    """Write the columns of entries [first, last), a piece of a row, group by group; return the byte after the groups.

    `at`: byte at which the piece's groups start. `column`: column of the first entry.
    """
    indices[np.uintp(first)] = column
    first += np.int64(1)
    while first < last:
        width = np.int64(packed[at])
        at += np.int64(1)
        size = min(np.int64(32), last - first)
        done = np.int64(0)
        if width <= EACH_BITS:
            done = size - size % EACH
            column = put_group(packed, at, (0, done), EACH, width, column, first, indices)
        column = put_group(packed, at, (done, size), 1, width, column, first, indices)
        at += (size * width + np.int64(7)) >> np.int64(3)
        first += size
    return at


@compiled
def unpack_columns(
    packed: Bytes, stream: int, directory: Int64Array, start: int, stop: int, indptr: IndexArray, indices: IndexArray
) -> None:
    """Write the offsets and columns of units [start, stop); the units begin at byte `stream`.

    `directory`: (units + 1, 4): see `ROW`, `ENTRY`, `COLUMNS_AT` and `VALUES_AT`.
    """
    for unit in range(start, stop):
        row, entry = directory[unit, ROW], directory[unit, ENTRY]
        last_row, last_entry = directory[unit + 1, ROW], directory[unit + 1, ENTRY]
        at = stream + directory[unit, COLUMNS_AT]
        base, before = np.int64(0), np.int64(0)
        while row < last_row or entry < last_entry:
            word = load(packed, at)
            if not word & CONTINUES:
                indptr[np.uintp(row)] = entry
                row += np.int64(1)
            size_bytes, base_bytes = (word >> np.int64(4)) & np.int64(3), word & np.int64(15)
            at += np.int64(1) + size_bytes
            base += signed(packed, at, base_bytes)
            at += base_bytes
            if word & SAME:
                shift = base - np.int64(indices[np.uintp(entry - before)])
                for i in range(before):
                    indices[np.uintp(entry + i)] = indices[np.uintp(entry - before + i)] + shift
            else:
                before = (word >> np.int64(8)) & low_bits(np.int64(8) * size_bytes)
                if before:
                    at = put_columns(packed, at, base, entry, entry + before, indices)
            entry += before


@inlined
def put_values(
    packed: Bytes, at: np.int64, first: np.int64, last: np.int64, dictionary: ValueArray, words: ValueArray
) -> Any:
    """Write words [first, last), a piece that does not repeat the piece before; return the byte after the piece."""
    kind, size = np.int64(packed[at]), last - first
    at += np.int64(1)
    if kind >= 32:
        for i in range(size):
            words[np.uintp(first + i)] = load(packed, at + np.int64(i) * (kind >> np.int64(3)))
        return at + size * (kind >> np.int64(3))
    width = kind - np.int64(1)
    mask = low_bits(width)
    for i in range(size):
        words[np.uintp(first + i)] = dictionary[np.uintp(bits(packed, at, np.int64(i), width, mask))]
    for start in range(0, size, 32):
        at += (min(np.int64(32), size - start) * width + np.int64(7)) >> np.int64(3)
    return at


@compiled
def unpack_values(packed: Bytes, stream: int, directory: Int64Array, start: int, stop: int, indptr: IndexArray,
                  parts: int, dictionary: ValueArray, words: ValueArray) -> None:  # fmt: skip
    """Write the words of units [start, stop); call `unpack_columns` first.

    `parts`: words of a value: 2 for complex128, else 1.
    """
    for unit in range(start, stop):
        row, entry = directory[unit, ROW], directory[unit, ENTRY]
        last_row, last_entry = directory[unit + 1, ROW], directory[unit + 1, ENTRY]
        at = stream + directory[unit, VALUES_AT]
        before = np.int64(0)
        while entry < last_entry:
            # The first piece may end before the unit's first mark, the last where the unit ends.
            end = last_entry if row == last_row else np.int64(indptr[np.uintp(row)])
            size = (end - entry) * parts
            if size:
                first = entry * parts
                if packed[at] == 0:
                    at += np.int64(1)
                    for i in range(size):
                        words[np.uintp(first + i)] = words[np.uintp(first - before + i)]
                else:
                    at = put_values(packed, at, first, first + size, dictionary, words)
            before = size
            entry = end
            row += np.int64(1)
