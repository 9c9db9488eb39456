"""Tunings and plans for products that are small enough for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spdist.scheduler.planner import planner
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.tuning import BlockTuning, ChunkTuning, PlannerTuning

SHORT_CHUNKS = PlannerTuning(chunks=ChunkTuning(length=1 << 10))
SMALL_GPU_BLOCKS = PlannerTuning(blocks=BlockTuning(gpu_products=1000, small_nnz=0))


def in_grid(grid: tuple[int, int, int] | None) -> Callable[..., Plan]:
    """Return `make_plan` with a forced grid."""
    make = planner.make_plan
    return lambda request, *rest: make(replace(request, grid=grid), *rest)
