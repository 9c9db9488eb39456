"""Bytes of a multiplication that streams through a GPU: shares of the GPU's memory, and C packed for the host.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

from spdist.kernels.rounding import ceil_div

# -- shares of the GPU's memory ----------------------------------------------------------------------------------------

BLOCKS_IN_FLIGHT = 4
"""Blocks on the GPU at once, np of hySpMM's equation 5: one is uploaded, one is multiplied, two are downloaded."""
RESIDENT_SHARE = 0.7
"""Share of the memory limit up to which B is resident."""
ROOM_BYTES = 2 << 30
"""A larger B is resident too if it leaves this many bytes for blocks."""
SLOT_BYTES = 768 << 20
"""Most bytes of a slot unless a single row needs more: larger blocks gain nothing and delay the first and the last."""
PAIR_BYTES = 4
"""Bytes for each entry of a resident B of dense blocks: they count the pairs of blocks of a product."""


class DeviceShares(NamedTuple):
    """Shares of the memory limit of a GPU."""

    kept: int  # bytes for a resident B; 0 if its rows are uploaded with each block
    slots: int  # number of slots
    slot: int  # bytes of each slot

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.kept + self.slots * self.slot


def device_shares(b_bytes: int, memory_limit: int, slots: int = BLOCKS_IN_FLIGHT) -> DeviceShares:
    """Divide the memory limit of a GPU in bytes among B and slots; a single slot gets all the room.

    `b_bytes`: bytes of the whole of B on the GPU; 0 if it is not to be resident.
    """
    is_resident = b_bytes <= RESIDENT_SHARE * memory_limit or b_bytes + ROOM_BYTES <= memory_limit
    kept = b_bytes if is_resident else 0
    room = memory_limit - kept
    return DeviceShares(kept, slots, room if slots == 1 else min(room // slots, SLOT_BYTES))


def staging_bytes(host_limit: int) -> int:
    """Return the bytes of a host memory limit that blocks on their way to the GPU may take."""
    return host_limit // 8


# -- C packed for the host ---------------------------------------------------------------------------------------------

PACKED_UNIT = 9, 12
"""Powers of 2: the fewest and the most rows and entries, together, of a unit of a packed matrix."""
PACKED_UNITS = 12
"""Power of 2: number of units that keeps the GPU busy."""
PACKED_HEAD = 6208
"""Bytes before the directory: three numbers, the dictionary and its hash table."""
PACKED_PLACES = 32
"""Bytes of the directory for each unit."""
PACKED_PADDING = 8
"""Bytes that may be read after the last one."""


def packed_unit(nrows: int, nnz: int) -> int:
    """Return the rows and entries, together, of a unit of a packed matrix before its ends move to ends of rows.

    Always a power of 2.
    """
    low, high = PACKED_UNIT
    return 1 << max(low, min(high, (nrows + nnz).bit_length() - 1 - PACKED_UNITS))


def packed_units(nrows: int, nnz: int) -> int:
    """Return the number of units of a packed matrix, at least 1; threads share them."""
    return max(1, ceil_div(nrows + nnz, packed_unit(nrows, nnz)))


def packed_start(nrows: int, nnz: int) -> int:
    """Return the byte of a packed matrix at which the units start, after the head and the directory."""
    return PACKED_HEAD + (packed_units(nrows, nnz) + 1) * PACKED_PLACES


def packed_bound(shape: tuple[int, int], nnz: int, index_itemsize: int, value_itemsize: int = 0) -> int:
    """Bound the bytes of a packed matrix; columns always fit.

    Groups of columns take as many bits as their largest difference. The differences of a row add up to no more than the
    number of columns, and the sum of their bits is largest if all are equal.
    `value_itemsize`: bytes of a value; 0 if only columns are packed. Values get a quarter of their size; if they need
    more, they are not packed.
    """
    pieces = shape[0] + packed_units(shape[0], nnz)
    groups = nnz // 32 + pieces
    heads = pieces * (3 + index_itemsize) + groups
    gap = shape[0] * shape[1] // groups + 2
    bits = ((gap**16).bit_length() + 16) // 16 + 1  # of the mean: log2(gap) to a sixteenth, and less than 1 more
    columns = min(nnz * index_itemsize, 4 * groups * bits)
    values = nnz * value_itemsize // 4 + 2 * pieces if value_itemsize else 0
    return packed_start(shape[0], nnz) + heads + columns + values + PACKED_PADDING
