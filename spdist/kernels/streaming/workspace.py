"""Shares of a GPU's memory: a resident B, and the slots of blocks in flight.

The planner and the kernels call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

PAIRS = 4
"""Blocks on the GPU at once, np of hySpMM's equation 5: one is sent, one is computed, the C of two comes back."""
RESIDENT_SHARE, ROOM_BYTES = 0.7, 2 << 30
"""Of the memory limit, what B may take to stay on the GPU; and it may take more if so much is left for blocks."""
SLOT_BYTES = 768 << 20
"""The most a slot takes unless a single row needs more: larger blocks gain nothing, and the first and last wait."""


class DeviceShares(NamedTuple):
    """How the memory limit of a GPU is shared out.

    Attributes
    ----------
    kept : int
        Bytes for a B that stays; 0 if its rows come block by block.
    pairs : int
        Slots for block pairs.
    slot : int
        Bytes of each.
    """

    kept: int
    pairs: int
    slot: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.kept + self.pairs * self.slot


def device_shares(b_bytes: int, memory_limit: int, pairs: int = PAIRS) -> DeviceShares:
    """Share out the memory limit of a GPU: what both the plan and the GPU itself go by.

    Parameters
    ----------
    b_bytes : int
        Of the whole of B on the GPU; 0 if it is not to stay there.
    memory_limit : int
    pairs : int
        A single one gets all the room.

    Examples
    --------
    >>> device_shares(1 << 30, 8 << 30).total
    4294967296
    >>> device_shares(7 << 30, 8 << 30).kept
    0
    """
    stays = b_bytes <= RESIDENT_SHARE * memory_limit or b_bytes + ROOM_BYTES <= memory_limit
    kept = b_bytes if stays else 0
    room = memory_limit - kept
    return DeviceShares(kept, pairs, room if pairs == 1 else min(room // pairs, SLOT_BYTES))


PAIR_BYTES = 4
"""Bytes, for each entry of a B of dense blocks that stays on the GPU, by which pairs of blocks are counted."""
