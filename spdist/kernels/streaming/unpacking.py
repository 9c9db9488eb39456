"""The host's part of `packing`, compiled by Numba: `packing` imports it when it is first needed.

Units are unpacked one by one, by any thread; ``packing.cu`` says what their bytes mean. Numbers are int64 throughout:
any difference fits, and Numba makes floats of int64 beside uint64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from spdist.kernels.cpu.numba_compile import compiled, inlined, instruction
from spdist.kernels.cuda import constants

SAME, CONTINUES = constants.PACKED_SAME, constants.PACKED_CONTINUES
"""Flags of a piece's head."""
EACH, EACH_BITS = 2, 28
"""So many numbers of so many bits are surely among 57 bits."""
ROW, ENTRY, COLUMNS_AT, VALUES_AT = map(int, constants.PackedPlace)
"""Words of the directory: first mark and entry of a unit, where its bytes start."""


@instruction
def load(context: Any, packed: Any, at: Any) -> Any:
    """Return the 8 bytes ``packed[at:at + 8]`` as a number; `at` need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        word = ir.IntType(64)
        return builder.load(builder.bitcast(builder.gep(array.data, [args[1]]), word.as_pointer()), align=1)

    return types.int64(packed, types.int64), generate


@inlined
def low_bits(width: Any) -> Any:
    """Return a number whose `width` lowest bits are set."""
    return np.int64(-1) if width == 64 else (np.int64(1) << width) - np.int64(1)


@inlined
def bits(packed: Any, at: Any, number: Any, width: Any, mask: Any) -> Any:
    """Return number `number` of those of `width` bits that start at byte `at`."""
    bit = number * width
    return (load(packed, at + (bit >> np.int64(3))) >> (bit & np.int64(7))) & mask


@inlined
def signed(packed: Any, at: Any, size: Any) -> Any:
    """Return the signed number of `size` bytes at byte `at`."""
    if size == 0:
        return np.int64(0)
    unused = np.int64(64) - np.int64(8) * size
    return (load(packed, at) << unused) >> unused


@inlined
def put_group(packed: Any, at: Any, numbers: Any, each: Any, width: Any, column: Any, first: Any, indices: Any) -> Any:
    """Write the columns that numbers [start, stop) of a group make, `each` of them from one load; return the last."""
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
def put_columns(packed: Any, at: Any, column: Any, first: Any, last: Any, indices: Any) -> Any:
    """Write columns [first, last) of a piece that starts with `column`; return where its groups end."""
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
def unpack_columns(packed: Any, stream: Any, directory: Any, start: Any, stop: Any, indptr: Any, indices: Any) -> None:
    """Write the offsets and columns of units [start, stop), whose bytes are ``packed[stream:]``."""
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
def put_values(packed: Any, at: Any, first: Any, last: Any, dictionary: Any, words: Any) -> Any:
    """Write the words [first, last) of a piece that is not that before it; return where its bytes end."""
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
def unpack_values(packed: Any, stream: Any, directory: Any, start: Any, stop: Any, indptr: Any, parts: Any,
                  dictionary: Any, words: Any) -> None:  # fmt: skip
    """Write the words of units [start, stop), `parts` a value; `unpack_columns` has written their offsets."""
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
