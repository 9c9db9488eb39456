"""How long the run of a plan should take on a machine, from the first read to the last write: arithmetic.

The stages of a run overlap: it takes as long as the CPUs are busy, or as the slowest stage, with a share of the others
before the first block and after the last. B is read before anything else if it stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from spdist.jobs.predicting.machine import Machine, is_short_here, this_machine
from spdist.options import ExecutionOptions
from spdist.scheduler.planner.plan import Plan, Rates
from spdist.scheduler.planner.request import PlanRequest

if TYPE_CHECKING:
    from spdist.jobs.predicting.pilot import Pilot

COMPRESSED_GAIN = 2.0
"""How many times as quick values are stored that compress: fewer bytes are checked and copied."""


def expectation(request: PlanRequest, execution: ExecutionOptions) -> Callable[[Plan], float]:
    """Return what predicts the wall seconds of a run before it begins, without a pilot; 0.0 for workers elsewhere.

    `request`: of the run's plan.
    """

    def expects(made: Plan) -> float:
        if execution.scheduler is not None:
            return 0.0
        machine = this_machine()
        return paced_seconds(made, machine, *stage_seconds(request, made, machine, None))

    return expects


def paced_seconds(made: Plan, machine: Machine, core: Mapping[str, float], wall: Mapping[str, float]) -> float:
    """Return the wall seconds of a run, by what runs took here before; parameters as of `run_seconds`."""
    if is_short_here(made) and len(made.blocks) <= 1:
        return machine.wait(f"one block{' on GPUs' if made.on_gpu else ''}")
    return machine.paces["gpu" if made.on_gpu else "cpu"] * run_seconds(made, machine, core, wall)


def stage_seconds(
    request: PlanRequest, made: Plan, machine: Machine, tried: Pilot | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what each stage takes in all.

    `tried`: without one, rates measured on other matrices are used.
    Returns `core`: CPU seconds of each stage.
    Returns `wall`: wall seconds of each stage if it has the machine for itself; on a GPU also of bus and kernels.
    """
    rates, gains = machine.core, machine.gains
    if tried is not None:
        write = rates.write * (COMPRESSED_GAIN if tried.compresses else 1.0)
        slow = max(tried.slowness, 1e-3)
        rates = replace(rates, product=rates.product / slow, entry=rates.entry / slow, write=write)
    core = made.stage_seconds(rates)
    if made.resident and request.a == request.b:  # A is a part of B that is in memory
        core["preprocess"] -= made.a.nbytes / rates.read
    if not request.writes_c:
        core["commit"] = 0.0
    if made.on_gpu:
        core["multiply"] = 0.0
    apart = 1 if is_short_here(made) else min(made.threads, max(len(made.blocks), 1))
    at_once = made.threads if made.threads_share_blocks else apart
    gain = {
        "preprocess": gains["read"],
        "multiply": max(1.0, gains["multiply"] * at_once / machine.cpus),
        "merge": gains["multiply"],
        "commit": gains["write"],
    }
    wall = {stage: seconds / gain.get(stage, 1.0) for stage, seconds in core.items()}
    return core, wall | (_gpu_seconds(made, machine.gpu, request.writes_c) if made.on_gpu else {})


def _gpu_seconds(made: Plan, gpu: Rates, writes_c: bool) -> dict[str, float]:
    """Return the seconds of the bus, each way, and of the kernels."""
    moved = made.stage_bytes()
    return {
        "gpu upload": moved["preprocess"] / gpu.read,
        "gpu multiply": made.expansion / gpu.product + made.c.nnz / gpu.entry,
        "gpu download": moved["commit"] / gpu.write if writes_c else 0.0,
    }


def run_seconds(made: Plan, machine: Machine, core: Mapping[str, float], wall: Mapping[str, float]) -> float:
    """Return the wall seconds of a run, from the first read to the last write.

    `core, wall`: of `stage_seconds`.
    """
    stages, head = dict(wall), 0.0
    if made.resident:  # B is read before all else
        head = min(wall["preprocess"], made.b.nbytes / machine.core.read / machine.gains["read"])
        stages["preprocess"] -= head
    longest, total = max(stages.values()), sum(stages.values())
    overlapped = longest + (total - longest) / max(len(made.blocks), 1)
    busy = (sum(core.values()) + (machine.strain - 1.0) * core["multiply"]) / machine.cpus
    return max(busy, head + overlapped)
