"""Multiply two matrices of dense blocks whose arrays are on the GPU: C = A @ B, block by block.

L. Polok, V. Ila, P. Smrz, "Fast Sparse Matrix Multiplication on GPU", HPC 2015, expands pointers to the operands rather
than products; here the pointers are pairs of blocks, and the expansion of a task stays in shared memory.

1. The product of two matrices of ones, an entry for each block, gives C's pattern and the number of pairs of blocks
   that meet in each block of C.
2. Each thread block takes a task; tasks have about equal numbers of pairs. It multiplies the pairs, adds them up in
   registers, and writes each block of C once. Float64 blocks of 6 x 6 and more are multiplied on the tensor cores.
3. If blocks are up to 3 x 3 and rows are short, whole rows of C are added up in shared memory instead of step 2.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdist.errors import InputError, MatrixError, MemoryBoundError
from spdist.foundation.units import format_bytes
from spdist.kernels.cuda.constants import ROW_THREADS, TASK_PAIRS
from spdist.kernels.cuda.module import c_type, module
from spdist.kernels.rounding import ceil_div
from spdist.kernels.rowwise_gpu import multiply as rowwise_gpu
from spdist.matrices.bsr import BSR, check_fit
from spdist.matrices.csr import CSR
from spdist.matrices.dtypes import ValueArray, result_dtype

logger = logging.getLogger("spdist")

FILE = "bsr/bsr.cu"
MOST_BLOCKS = 1 << 32
"""Exclusive upper bound on the blocks of an operand: kernels number blocks in 32 bits."""
LONGEST_SIDE = 16
"""Longest side of blocks for which a kernel is compiled; larger blocks share one kernel, which takes any size."""
TILE_SIDES = (1, 2, 3, 4)
"""Rows, and columns, of the tile of a block of C that a lane may take."""
LEAST_SHARE = 0.4
"""Least share of useful multiplications on tensor cores, which pad blocks with zeros: 6 x 6 reaches it, 4 x 4 not."""
MOST_OF_LANE = 6
"""Values of a block of C that a lane computes at most, if a warp has enough lanes."""
ROW_SIDE = 3
"""Longest side of blocks whose short rows are multiplied whole: faster at 3 x 3, not at 4 x 4."""
ROW_PAIRS = 8
"""Rows are short up to this many pairs of blocks for each block of C that a row has room for."""
ROW_ROOM = 1.1
"""Blocks of C that a row has room for, as a multiple of their mean."""
ROW_SHARED = 48 << 10
"""Bytes of shared memory of a thread block that multiplies whole rows, at most."""
EXACT = 1 << 24
"""Entries in a row of A from which float32 may count the pairs of a block of C wrongly."""
VALUE_ALIGNMENT = 16
"""Bytes to which the kernels need the arrays of values aligned."""


def multiply(a: BSR, b: BSR, *, ones: ValueArray | None = None, tf32: bool = False) -> BSR:
    """Multiply two matrices of dense blocks, r x s times s x t, on the current GPU; C has equal bits on every run.

    Block rows of B are sorted and free of duplicates; block rows of A need not be. Workspace beyond C: some 20 bytes
    for each block, and the workspace of the pattern's product (`workspace.rowwise_workspace`).
    `ones`: (b.blocks,) float32, from a caller that multiplies by B more than once.
    `tf32`: whether to multiply float32 blocks that fill tensor cores on these: values are first rounded to 11
    significant bits, so that each product has a relative error of 2^-10 at most. Other blocks keep full precision.
    Raises `MatrixError` if operands do not fit or are damaged, or a block row of B is not sorted; `InputError` if
    `tf32` is set and values are not float32; `MemoryBoundError` with the bytes needed if the GPU has too little memory.
    """
    import cupy

    check_fit(a, b)
    dtype = result_dtype(a.dtype, b.dtype)
    c_type(dtype)
    if tf32 and dtype != np.float32:
        raise InputError(f"tf32 is for float32, and C is {dtype}: convert both operands, or multiply in full")
    for name, m in (("A", a), ("B", b)):
        if m.blocks >= MOST_BLOCKS:
            raise MatrixError(f"{name} has {m.blocks:,} blocks, the GPU takes fewer than {MOST_BLOCKS:,}: cut its rows")
    shape, (r, t) = (a.shape[0], b.shape[1]), (a.blocksize[0], b.blocksize[1])
    counts, pairs, longest = _count_pairs(a, b, ones)
    blocks = counts.nnz
    try:
        c = BSR(counts.indptr, counts.indices, cupy.empty((blocks, r, t), dtype), shape)
        if blocks:
            _fill(a, b, c, counts.data, pairs, longest, tf32)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise MemoryBoundError(
            f"C takes {format_bytes(blocks * r * t * dtype.itemsize)} in {blocks:,} blocks of {r} x {t}, more than the "
            f"GPU has left besides A and B ({error}): multiply ranges of A's block rows one after another"
        ) from None
    return c


def _count_pairs(a: BSR, b: BSR, ones: ValueArray | None = None) -> tuple[CSR, int, int]:
    """Return C's pattern with the pairs of each block as values, all pairs, and the blocks of A's longest block row."""
    import cupy

    def count(dtype: npt.DTypeLike, ones: ValueArray | None) -> tuple[CSR, int, int]:
        left = a.pattern(cupy.ones(a.blocks, dtype))
        if b is a:
            return rowwise_gpu.multiply_counted(left, left)
        return rowwise_gpu.multiply_counted(left, b.pattern(cupy.ones(b.blocks, dtype) if ones is None else ones))

    counts, pairs, longest = count(np.float32, ones)
    if longest >= EXACT:
        counts, pairs, longest = count(np.float64, None)
    return counts, pairs, longest


def _fill(a: BSR, b: BSR, c: BSR, counts: ValueArray, pairs: int, longest: int, tf32: bool) -> None:
    """Write the values of C, given the pairs of each block (`counts`) and the blocks of A's longest row (`longest`)."""
    index = c.indices.dtype
    pointer = np.result_type(a.indptr.dtype, b.indptr.dtype, c.indptr.dtype)
    arrays = [
        (m.indptr.astype(pointer, copy=False), m.indices.astype(index, copy=False), _values(m, c.dtype))
        for m in (a, b, c)
    ]
    operands = tuple(x for m in arrays for x in m)
    sizes = a.blocksize[0], *b.blocksize
    types = c_type(c.dtype), c_type(index), c_type(pointer)
    mean_b, mean_c = (m.blocks / m.block_shape[0] for m in (b, c))
    whole = whole_rows(longest, mean_b, mean_c, sizes, c.dtype.itemsize, index.itemsize)
    if whole is not None:
        name, rows = row_kernel(*types, sizes, whole.group), c.block_shape[0]
        grid = ceil_div(rows, ROW_THREADS // whole.group)
        module(FILE, (name,))(name, grid, ROW_THREADS, (rows, whole.room, *operands), whole.shared)
    else:
        method = method_of(types[0], sizes, _has_tensor_cores(_device()), tf32)
        if tf32 and "Rounded" not in method:
            logger.info("blocks of %d x %d by %d are too small for tf32, or too large: multiplied in full", *sizes)
        _fill_by_tasks(c, counts, pairs, kernels(*types, method), sizes, operands)


def _fill_by_tasks(
    c: BSR,
    counts: ValueArray,
    pairs: int,
    names: tuple[str, str],
    sizes: tuple[int, int, int],
    operands: tuple[Any, ...],
) -> None:
    """Write the values of C by tasks of about equal numbers of pairs."""
    import cupy

    compiled, tasks, rows = module(FILE, names), ceil_div(pairs, TASK_PAIRS), c.block_shape[0]
    ends = cupy.cumsum(counts.astype(np.int64))
    firsts, at = cupy.empty(tasks + 1, np.int64), cupy.empty(2 * tasks, np.int64)
    compiled(names[0], ceil_div(tasks, 256), 256, (tasks, c.blocks, rows, ends, operands[6], firsts, at))
    compiled(names[1], tasks, 256, (firsts, at, *sizes, *operands))


class WholeRows(NamedTuple):
    """How whole rows of C are multiplied: lanes of a row, room for its blocks, bytes of shared memory."""

    group: int
    room: int
    shared: int


def whole_rows(
    longest: int, mean_b: float, mean_c: float, sizes: tuple[int, int, int], value: int, index: int
) -> WholeRows | None:
    """Choose how whole rows of C are multiplied; None if blocks are too large, or some rows have too many pairs.

    `longest`: blocks in the longest block row of A. `mean_b, mean_c`: mean number of blocks in a block row of B, and of
    C. `sizes`: (r, s, t). `value, index`: bytes of a value, and of a block column.
    """
    room = int(ROW_ROOM * mean_c) + 8
    if max(sizes) > ROW_SIDE or longest * mean_b > ROW_PAIRS * room:
        return None
    for group in (4, 8, 16, 32):
        shared = ROW_THREADS // group * room * (sizes[0] * sizes[2] * value + index)
        if shared <= ROW_SHARED and (group >= mean_b or group == 32):
            return WholeRows(group, room, shared)
    return None


def _values(m: BSR, dtype: np.dtype[Any]) -> Any:
    """Return the values of the dtype, aligned; a copy if they are not."""
    import cupy

    data = cupy.ascontiguousarray(m.data, dtype)
    return data if data.data.ptr % VALUE_ALIGNMENT == 0 else data.copy()


CORES = {"double": ("Double", 8, 4), "float": ("Rounded", 16, 8)}
"""For each C type: the name in bsr.cu of its tensor core instruction, and the rows and columns of A that it takes."""


def method_of(value: str, sizes: tuple[int, int, int], tensor_cores: bool, tf32: bool = False) -> str:
    """Return the C++ type in bsr.cu that multiplies two blocks of r x s and s x t values; `sizes` is (r, s, t).

    `tf32`: whether float32 values may be rounded to 11 significant bits.
    """
    r, s, t = sizes
    if max(sizes) > LONGEST_SIDE:
        return f"AnySize<{value}>"
    if tensor_cores and (value == "double" or (tf32 and value == "float")):
        core, rows, columns = CORES[value]
        filled = (ceil_div(r, rows) * rows) * (ceil_div(s, columns) * columns) * (ceil_div(t, 8) * 8)
        if r * s * t >= LEAST_SHARE * filled:
            return f"Tensor<{core},{r},{s},{t}>"
    tile = best_tile(r, t)
    return f"Tiles<{value},{r},{s},{t},{tile[0]},{tile[1]}>" if tile else f"AnySize<{value}>"


def kernels(value: str, index: str, pointer: str, method: str) -> tuple[str, str]:
    """Return the name expressions of the kernels that cut C into tasks, and multiply by a type of `method_of`."""
    return f"bsr_cut<{pointer}>", f"bsr_multiply<{value},{index},{pointer},{method}>"


def row_kernel(value: str, index: str, pointer: str, sizes: tuple[int, int, int], group: int) -> str:
    """Return the name expression of the kernel that multiplies whole rows, `group` lanes each; `sizes` is (r, s, t)."""
    return f"bsr_rows<{value},{index},{pointer},{','.join(map(str, (*sizes, group)))}>"


def best_tile(r: int, t: int) -> tuple[int, int] | None:
    """Choose rows and columns of the tile of an r x t block that each lane takes; None if a warp has too few lanes.

    Measured: the best tile leaves the fewest lanes idle, has two columns, which are loaded at once, and is small, but
    smaller than the block.
    """
    tiles = [(i, j) for i in TILE_SIDES for j in TILE_SIDES if r % i == t % j == 0 and r * t <= 32 * i * j]
    few = [(i, j) for i, j in tiles if i * j <= MOST_OF_LANE and i * j < r * t] or tiles
    if not few:
        return None

    def rank(tile: tuple[int, int]) -> tuple[int, bool, int, int]:
        lanes = r * t // (tile[0] * tile[1])
        return 32 // lanes * lanes, tile[1] == 2, -tile[0] * tile[1], tile[1]

    return max(few, key=rank)


def _device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def _has_tensor_cores(device: int) -> bool:
    """Whether the GPU multiplies matrices of doubles."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability) >= 80
