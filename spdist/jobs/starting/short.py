"""Whether a product is so short that this process makes it itself, and on how many GPUs."""

from __future__ import annotations

import math

from spdist.foundation.memory import host_memory, resident_memory
from spdist.scheduler.execution import worker_process
from spdist.scheduler.executors.gpus import READERS, WRITERS
from spdist.scheduler.planner.plan import START_SECONDS, Plan

SHORT_SECONDS = START_SECONDS
"""Predicted seconds of a product's stages on all cores up to which this process makes it: those that workers take to
start."""
GPU_SHORT_SECONDS = 10.0
"""The same for a product on all GPUs of this host: to start a worker takes longer there, and one process reads,
multiplies and writes blocks at the same time as a worker for each GPU does."""

SECONDS_PER_GPU = 1.0
"""Predicted seconds of multiplication that are worth the start of a GPU."""


def is_short(plan: Plan) -> bool:
    """Whether workers would take longer to start than this process takes for the whole product.

    It depends on no measured rates: the way that a product is made is the same on every machine of as many cores.
    """
    if len(plan.blocks) <= 1:
        return True
    stages = plan.stage_seconds()
    del stages["schedule"]
    if plan.on_gpu:
        seconds = sum(stages.values())
        return seconds <= GPU_SHORT_SECONDS or seconds <= GPU_SHORT_SECONDS * count_gpus_for(plan)
    at_once = plan.threads if plan.threads_share_blocks else 1  # otherwise each block has one core
    return sum(stages.values()) <= SHORT_SECONDS * at_once


def count_gpus_for(plan: Plan) -> int:
    """Return how many GPUs this process multiplies on: those that gain time, as far as memory allows; 1 without one."""
    return max(1, min(count_gaining_gpus(plan), room() // max(plan.projected_host_memory, 1)))


def count_gaining_gpus(plan: Plan) -> int:
    """Return how many GPUs make a product sooner than fewer do.

    The host reads the operands and writes C for all of them, at its own pace: while that takes as long as one GPU
    multiplies, a second one gains nothing.
    """
    if not plan.on_gpu or len(plan.blocks) <= 1:
        return 1
    stages = plan.stage_seconds()
    of_host = stages["preprocess"] / READERS + stages["commit"] / WRITERS
    each = max(SECONDS_PER_GPU, of_host)
    return max(1, min(worker_process.count_gpus(), len(plan.blocks), math.ceil(stages["multiply"] / each)))


def room() -> int:
    """Return the bytes of memory that this host or its control group leaves this process."""
    return max(host_memory() - resident_memory(), 0)
