"""Multiply with hySpMM: C = A @ B with operands and result on the host, through the GPU by blocks of rows.

X. Wu, "Optimizing Sparse Matrix-Matrix Multiplication on a Heterogeneous CPU-GPU Platform", thesis, Georgia State
University, 2015. The thesis' steps:

1. The CPU cuts A into blocks of rows whose operands, triples and result fit in device memory (equations 3 and 5).
2. For each entry of the block of A, in order, the CPU copies the row of B that the entry multiplies to the block of B
   (algorithm 2).
3. The GPU multiplies each entry with its row of B, reading the block of B from end to end.
4. The GPU sorts the products of each row of C by column: the rows need no sort, as the CPU has put A's rows in order.
5. The GPU adds the products of equal columns, and the block of C is copied back.
6. Two pairs of blocks alternate: the CPU prepares and copies one while the GPU multiplies the other.

This code departs from the thesis in four ways:

- Step 2 has two variants. *duplicated*, as in the thesis, sends a row of B for each entry that multiplies it.
  *distinct* sends each row once, and the GPU finds it by number. ``variant="auto"`` chooses the variant that sends
  fewer bytes.
- Steps 3 to 5 are one kernel for each group of rows (`hyspmm.cu`): rows are sorted in registers, in shared memory or in
  device memory, by their products and the span of their columns.
- Several threads prepare blocks ahead, in a ring of page-locked memory (`preparation`), and the number of pairs of
  blocks on the device is an option (`pipeline`).
- The first block is small, so that the GPU starts soon; later blocks grow.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from spdist.kernels.cuda.constants import BlockStatus
from spdist.kernels.hyspmm.pipeline import BlockPipeline
from spdist.kernels.hyspmm.plan import TUNING, HyspmmPlan, HyspmmTuning, VariantOrAuto, plan_product
from spdist.kernels.hyspmm.preparation import PreparedBlock
from spdist.matrices.csr import CSR, empty


def multiply(
    a: CSR,
    b: CSR,
    *,
    variant: VariantOrAuto = "auto",
    memory_limit: int | None = None,
    pairs: int = 2,
    threads: int | None = None,
    tuning: HyspmmTuning = TUNING,
) -> CSR:
    """Return ``a @ b`` for matrices on the host, through the GPU by blocks of rows (Wu 2015); variants give equal bits.

    Rows of A need not be sorted and may hold duplicates; rows of B are canonical. C's arrays are page-locked; once they
    are deleted, later products reuse their memory.
    `variant`: how rows of B are sent; "auto" sends fewer bytes. `memory_limit`: bytes of device memory, by default all
    that is free. `pairs`: pairs of blocks on the device at once. `threads`: prepare blocks; all cores by default.
    Raises `MatrixError` if operands do not fit, or B is not canonical; `MemoryBoundError` with the bytes if the longest
    row alone does not fit in the limit.
    """
    import cupy

    if memory_limit is None:
        memory_limit = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    plan = plan_product(a, b, variant=variant, memory_limit=memory_limit, pairs=pairs, threads=threads, tuning=tuning)
    if plan.total == 0:
        return empty((a.nrows, b.ncols), plan.dtype)
    return BlockPipeline(plan).run()


def multiply_block(prepared: PreparedBlock, plan: HyspmmPlan) -> CSR:
    """Multiply one prepared block of `plan`; arrays of CuPy out, offsets from 0."""
    import cupy

    pipeline = BlockPipeline(plan)
    slot = pipeline.slots[0]
    pipeline.start(slot, prepared)
    slot.stream.synchronize()
    nnz, layout, block = int(slot.status[BlockStatus.ENTRIES_OF_C]), prepared.layout, prepared.block

    def array(offset: int, count: int, dtype: npt.DTypeLike) -> Any:
        return cupy.ndarray((count,), dtype, slot.memory + offset).copy()

    indptr = array(layout.c_indptr, block.rows + 1, plan.pointer)
    indices, data = array(layout.c_columns, nnz, plan.b.indices.dtype), array(layout.c_values, nnz, plan.dtype)
    return CSR(indptr, indices, data, (block.rows, plan.b.ncols))
