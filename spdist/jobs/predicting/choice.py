"""Which engine makes a product that the user left to spdist: cores, or GPUs where these should be quicker."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spdist.errors import InputError, MatrixError
from spdist.foundation.units import format_bytes
from spdist.jobs.predicting.machine import Machine, start_of, this_machine
from spdist.jobs.predicting.run_time import paced_seconds, stage_seconds
from spdist.jobs.starting.libraries import load_early
from spdist.jobs.starting.short import room
from spdist.kernels.cpu.product_counts import estimate_products
from spdist.kernels.engine import Engine, find_engine
from spdist.kernels.product_spec import ProductSpec
from spdist.matrices.csr import arrays_of
from spdist.matrices.dtypes import blocksize, index_dtype, is_on_gpu
from spdist.scheduler.execution import worker_process
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.estimate import Survey
from spdist.scheduler.planner.outline import outline
from spdist.scheduler.planner.plan import DEFAULT_HOST_LIMIT
from spdist.scheduler.planner.request import PlanRequest

logger = logging.getLogger("spdist")

BUS_SHARE = 0.35
"""Share of the bus's rate at which a product of matrices in memory moves its bytes the first time it is made."""
FOLD = 3.0
"""Products of an entry of C that are expected on the cores; on a GPU one, so that it is taken if it wins clearly."""
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
        _say_why_not(str(error))
        return request
    if not _is_enough(chosen.memory_limit):
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


def quickest_in_memory(a: Any, b: Any, spec: ProductSpec, engine: Engine) -> Engine:
    """Return the engine that multiplies two matrices in memory: `engine`, or GPUs if they should be quicker.

    Only whole products of two `csr` matrices of the host move to a GPU.
    """
    if not engine.gpu_counterpart or not worker_process.may_have_gpu():
        return engine
    if not (spec.plain and spec.sorts and _is_csr_of_host(a) and _is_csr_of_host(b)):
        return engine
    rival, machine = find_engine(engine.gpu_counterpart), this_machine()
    dtype = spec.semiring.result_dtype(a.dtype, b.dtype)
    try:
        rival.check_values(dtype)
        products = estimate_products(arrays_of(a), arrays_of(b))
    except (InputError, MatrixError, IndexError):  # whoever multiplies says what is wrong with the matrices
        return engine
    on_cores = (products / machine.core.product + products / FOLD / machine.core.entry) / machine.gains["multiply"]
    entry = dtype.itemsize + index_dtype(b.shape[1]).itemsize
    moved = (a.nnz + b.nnz + products) * entry / (BUS_SHARE * min(machine.gpu.read, machine.gpu.write))
    start = 0.0 if "cupy" in sys.modules else machine.wait("start of a short product on GPUs")
    if on_cores <= start + moved + products / machine.gpu.product or not _has_free_gpu():
        return engine
    logger.info("engine %s: the product should take %.1f s on the cores, and less on a GPU", rival.name, on_cores)
    return rival


def _is_csr_of_host(matrix: Any) -> bool:
    return getattr(matrix, "format", "") == "csr" and not is_on_gpu(matrix.data)


def _has_free_gpu() -> bool:
    """Whether there is a GPU with memory left; a warning says why not."""
    try:
        worker_process.count_gpus()
    except InputError as error:
        _say_why_not(str(error))
        return False
    from spdist.kernels.streaming.gpu_device import free_memory

    return _is_enough(free_memory())


def _is_enough(free: int) -> bool:
    if free < LEAST_MEMORY:
        _say_why_not(f"it has {format_bytes(free)} of memory left, which is less than {format_bytes(LEAST_MEMORY)}")
    return free >= LEAST_MEMORY


def _say_why_not(reason: str) -> None:
    logger.warning("the cores multiply, though a GPU should be quicker: %s", reason)
