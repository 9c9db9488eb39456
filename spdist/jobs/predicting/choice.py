"""Which engine makes a product that the user left to spdist: cores, or GPUs where these should be quicker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from spdist.errors import InputError
from spdist.foundation.units import format_bytes
from spdist.jobs.predicting.machine import Machine, start_of, this_machine
from spdist.jobs.predicting.run_time import paced_seconds, stage_seconds
from spdist.jobs.starting.libraries import load_early
from spdist.jobs.starting.short import room
from spdist.kernels.engine import find_engine
from spdist.matrices.dtypes import blocksize
from spdist.scheduler.execution import worker_process
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.estimate import Survey
from spdist.scheduler.planner.outline import outline
from spdist.scheduler.planner.plan import DEFAULT_HOST_LIMIT
from spdist.scheduler.planner.request import PlanRequest

logger = logging.getLogger("spdist")

LEAST_MEMORY = 1 << 30
"""Bytes of memory, of a GPU and of the host, below which a product stays on the cores."""


def quickest(request: PlanRequest, for_gpus: Callable[[], PlanRequest]) -> PlanRequest:
    """Return the request, or the one for GPUs if they should be quicker; with what was learned on the way.

    `request`: for the cores. `for_gpus`: makes the other one; it loads CuPy and creates a context on a GPU.
    """
    if not worker_process.may_have_gpu() or not _fits_gpus(request):
        return request
    found, machine = planner.survey(request), this_machine()
    rival = replace(request, engine=find_engine(request.engine).gpu_counterpart, threads=1)
    seconds = {one.engine: predicted_seconds(one, found, machine) for one in (request, rival)}
    request = replace(request, survey=found, choice=seconds)
    if seconds[request.engine] <= seconds[rival.engine]:
        return request
    load_early(rival.engine)
    try:
        chosen = for_gpus()
    except InputError as error:
        logger.warning("the cores multiply, though a GPU should be quicker: %s", error)
        return request
    if chosen.memory_limit < LEAST_MEMORY:
        logger.warning(
            "the cores multiply, though a GPU should be quicker: it has %s of memory left, which is less than %s",
            format_bytes(chosen.memory_limit), format_bytes(LEAST_MEMORY),
        )  # fmt: skip
        return request
    return replace(chosen, survey=found, choice=seconds)


def _fits_gpus(request: PlanRequest) -> bool:
    """Whether GPUs of this host can make the product at all: its values, its options, and the host's memory."""
    engine = find_engine(find_engine(request.engine).gpu_counterpart)
    dtype = request.spec.dtype(request.a, request.b)
    if blocksize(dtype) is not None:
        return False
    try:
        engine.check_values(dtype)
        request.spec.check(request.a, request.b, engine.name)
    except InputError:
        return False

    return request.memory_limit >= LEAST_MEMORY and room() >= max(request.host_bytes, DEFAULT_HOST_LIMIT)


def predicted_seconds(request: PlanRequest, found: Survey, machine: Machine) -> float:
    """Return the seconds that start and run of a product should take, before it is planned."""
    made = outline(request, found)
    return machine.wait(start_of(made)) + paced_seconds(
        made, machine, *stage_seconds(made, machine, writes_c=request.writes_c)
    )
