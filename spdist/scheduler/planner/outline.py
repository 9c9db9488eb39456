"""A rough plan of a product whose rows are not cut yet."""

from __future__ import annotations

import itertools

import numpy as np

from spdist.matrices.dtypes import blocksize
from spdist.scheduler.planner.estimate import Survey
from spdist.scheduler.planner.plan import GPU_BLOCK_PRODUCTS, MAX_BLOCK_PRODUCTS, Block, Plan, PlannedOperand
from spdist.scheduler.planner.request import PlanRequest, operand
from spdist.storage.chunked_array import CHUNK_LENGTH

RESIDENT_SHARE = 0.4
"""Share of the host's memory that a worker may use up to which an outline expects B to stay there."""


def outline(request: PlanRequest, found: Survey) -> Plan:
    """Return a plan of equal blocks, from which to predict how long a product takes; it is not for running."""
    a, b, limits, estimate = operand(request.a), operand(request.b), found.limits, found.estimate
    dtype = request.spec.dtype(request.a, request.b)
    products = a.nnz * estimate.entry_products * float(estimate.share[0].mean())
    nnz = min(a.nnz * estimate.entry_products * estimate.kept * float(estimate.share[1].mean()),
              a.shape[0] * min(limits.top_n, b.shape[1]))  # fmt: skip
    if limits.inside:
        nnz = min(nnz, float(np.sum(limits.mask_lengths, dtype=np.int64)))
    c = PlannedOperand((a.shape[0], b.shape[1]), int(nnz), dtype.itemsize, 0, blocksize(dtype) or (1, 1))
    most = GPU_BLOCK_PRODUCTS if request.on_gpu else MAX_BLOCK_PRODUCTS
    count = max(1, min(-(-int(products) // most), a.shape[0]))
    resident = b.nbytes <= RESIDENT_SHARE * request.host_bytes
    bounds = np.linspace(0, a.shape[0], count + 1).astype(np.int64).tolist()
    blocks = tuple(
        Block(start, stop, False, int(products) // count, c.nnz // count, c.nnz // count, a.nbytes // count,
              0 if resident else b.nbytes // count, c.nbytes // count)
        for start, stop in itertools.pairwise(bounds)
    )  # fmt: skip
    return Plan(
        a, b, c, request.engine, request.memory_limit, 0, 1, resident, CHUNK_LENGTH, (0, a.shape[1]), (0, b.shape[1]),
        blocks, int(products), request.host_bytes, threads=request.threads,
        threads_share_blocks=request.threads_share_blocks,
    )  # fmt: skip
