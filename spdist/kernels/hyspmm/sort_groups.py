"""Groups of rows of C by their products, and the kernels of hySpMM that multiply, sort and compress each group."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.kernels.cuda.constants import SCAN_ROWS, SHARED_NARROW, SHARED_WIDE, SortGroup
from spdist.kernels.cuda.module import Module, module
from spdist.kernels.hyspmm.workspace import BlockLayout, BlockSizes
from spdist.kernels.rounding import ceil_div

FILE, OFFSETS_FILE = "hyspmm/hyspmm.cu", "rowwise_gpu/rows.cu"
MOST_BLOCKS = 1 << 13
"""Thread blocks of a launch at most; each sorts one row after the other."""
MOST_BLOCKS_UNKNOWN = 528
"""Thread blocks at most for a list that may be empty, as only the GPU knows its length: 4 on each multiprocessor."""
SHARED_WARPS, GLOBAL_WARPS = 4, 8
"""Warps of a thread block that sorts in shared memory, and in device memory."""
WORD = 4
"""Bytes of a row number and of a count."""
GATHER_LANES = (4, 32)
"""Lanes that copy a row of C: of short rows, and of rows of more than 64 products in the mean."""


class RegisterClass(NamedTuple):
    """Rows of up to ``group * items`` products: `group` lanes a row, `items` a lane, `warps` a thread block."""

    group: int
    items: int
    warps: int

    @property
    def max_products(self) -> int:
        """Products of the longest row."""
        return self.group * self.items


REGISTER_CLASSES = (
    RegisterClass(4, 4, 4), RegisterClass(4, 8, 4), RegisterClass(8, 8, 4), RegisterClass(16, 8, 4),
    RegisterClass(32, 8, 4), RegisterClass(32, 12, 4), RegisterClass(32, 16, 2), RegisterClass(32, 32, 1),
)  # fmt: skip
"""By the number of their `SortGroup`."""
SHARED_COLUMNS = {SortGroup.NARROW: SHARED_NARROW, SortGroup.WIDE: SHARED_WIDE}
LENGTH_GROUPS = len(REGISTER_CLASSES) + 1
"""Groups that the CPU distinguishes by products alone; the GPU splits the last two further, by their columns."""


class KernelNames:
    """Name expressions of the kernels for C types of values, columns, offsets and sort keys."""

    def __init__(self, value: str, index: str, pointer: str, key: str) -> None:
        vip, ip = f"{value},{index},{pointer}", f"{index},{pointer}"
        self.check, self.group, self.offsets = f"check_rows<{ip}>", f"group_rows<{ip}>", f"offsets<{pointer}>"
        self.registers = [f"sort_registers<{vip},{key},{c.group},{c.items},{c.warps}>" for c in REGISTER_CLASSES]
        self.shared = {g: f"sort_shared<{vip},{columns},{SHARED_WARPS}>" for g, columns in SHARED_COLUMNS.items()}
        self.long = f"sort_global<{vip}>"
        self.gather = {lanes: f"gather_rows<{vip},{lanes}>" for lanes in GATHER_LANES}

    @property
    def by_file(self) -> dict[str, tuple[str, ...]]:
        """The expressions by file."""
        names = (self.check, self.group, *self.registers, *self.shared.values(), self.long, *self.gather.values())
        return {FILE: names, OFFSETS_FILE: (self.offsets,)}


class SortKernels(KernelNames):
    """The compiled kernels; parameters as for `KernelNames`."""

    def __init__(self, value: str, index: str, pointer: str, key: str) -> None:
        super().__init__(value, index, pointer, key)
        names = self.by_file
        self.own: Module = module(FILE, names[FILE])
        self.rows: Module = module(OFFSETS_FILE, names[OFFSETS_FILE])


@functools.cache
def kernels_of(device: int, value: str, index: str, pointer: str, key: str) -> SortKernels:
    """Return the compiled kernels of a device, which must be current; later calls return the same object."""
    return SortKernels(value, index, pointer, key)


@functools.cache
def group_table() -> npt.NDArray[np.uint8]:
    """Return the group of each number of products that registers hold; 0 products have the group after all others."""
    from spdist.kernels.hyspmm.prepare import TABLE

    limits = [row_class.max_products for row_class in REGISTER_CLASSES]
    table = np.searchsorted(limits, np.arange(TABLE)).astype(np.uint8)
    table[0] = LENGTH_GROUPS
    return table


def launch_block(kernels: SortKernels, block: BlockSizes, lengths: list[int], at: BlockLayout, ncols: int) -> None:
    """Launch the GPU stages of a block on the current stream: multiply, sort and compress its rows, and gather C.

    `lengths`: (LENGTH_GROUPS,): rows of each group. `at`: device addresses. The arrays before ``at.sent`` are in place;
    the bytes from ``at.counts`` on are zero. `ncols`: of B.
    """
    rows = np.int64(block.rows)
    a_rows = at.a_rows if block.distinct else 0
    if block.b_rows:
        arguments = np.int64(block.b_rows), np.int64(ncols), at.b_starts, at.b_columns, at.status
        kernels.own(kernels.check, ceil_div(block.b_rows, 32), 256, arguments)
    group = rows, at.row_entries, at.row_products, a_rows, at.b_starts, at.b_columns
    kernels.own(kernels.group, ceil_div(block.rows, 256), 256, (*group, at.counts, at.lists, at.lengths))
    _launch_sorts(kernels, block, lengths, at)
    scan = rows, at.lengths, at.scan, at.c_indptr, at.status, None
    kernels.rows(kernels.offsets, ceil_div(block.rows, SCAN_ROWS), 256, scan)
    lanes = GATHER_LANES[block.products > 64 * block.rows]
    gather = rows, at.row_products, at.c_indptr, at.columns, at.values, at.c_columns, at.c_values
    kernels.own(kernels.gather[lanes], ceil_div(block.rows, 256 // lanes), 256, gather)


def _launch_sorts(kernels: SortKernels, block: BlockSizes, lengths: list[int], at: BlockLayout) -> None:
    """Launch the sort of each group that may have rows, the longest rows first."""
    a_rows = at.a_rows if block.distinct else 0
    operands = at.row_entries, at.row_products, a_rows, at.a_values, at.b_starts, at.b_columns, at.b_values

    def sort(name: str, group: int, grid: int, warps: int, *targets: int) -> None:
        lists = at.counts + WORD * group, at.lists + WORD * group * block.rows
        kernels.own(name, grid, 32 * warps, (*lists, *operands, *targets, at.lengths))

    if lengths[-1]:
        grid = min(lengths[-1], MOST_BLOCKS_UNKNOWN)
        sort(kernels.long, SortGroup.GLOBAL, grid, GLOBAL_WARPS, at.columns, at.values, at.c_columns, at.c_values)
    if lengths[-1] + lengths[-2]:
        for group, name in reversed(kernels.shared.items()):
            grid = ceil_div(lengths[-1] + lengths[-2], SHARED_WARPS)
            grid = min(grid, MOST_BLOCKS if group == SortGroup.NARROW else 2 * MOST_BLOCKS_UNKNOWN)
            sort(name, group, grid, SHARED_WARPS, at.columns, at.values, at.c_values)
    for number, row_class in reversed(list(enumerate(REGISTER_CLASSES))):
        if lengths[number]:
            grid = ceil_div(lengths[number] * row_class.group, 32 * row_class.warps)
            grid = min(grid, MOST_BLOCKS if number < len(REGISTER_CLASSES) - 1 else 2 * MOST_BLOCKS_UNKNOWN)
            sort(kernels.registers[number], number, grid, row_class.warps, at.columns, at.values)
