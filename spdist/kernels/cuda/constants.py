"""Sizes that all CUDA kernels share."""

from __future__ import annotations

SCAN_ROWS = 2048
"""Rows that a thread block of the kernel `offsets` adds up."""
ALLOCATION = 512
"""Every device allocation is a multiple of so many bytes."""
ALIGNMENT = 256
"""Bytes to whose multiples the arrays of a block on the GPU are placed."""


def aligned(size: int) -> int:
    """Return `size` rounded up to `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
