"""How long the run of a plan should take on a machine, from the first read to the last write: arithmetic.

The stages of a run overlap: it takes as long as the CPUs are busy, or as the slowest stage, with a share of the others
before the first block and after the last. B is read before anything else if it stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from spdist.jobs.predicting.machine import (
    LEAST_COMPILED,
    LEAST_PACED,
    MOST_UNPACED,
    PACE_BOUNDS,
    PACES,
    Machine,
    is_short_here,
    remember,
    start_of,
    this_machine,
)
from spdist.jobs.report import Report
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
        return paced_seconds(made, machine, *stage_seconds(made, machine, writes_c=request.writes_c))

    return expects


def paced_seconds(made: Plan, machine: Machine, core: Mapping[str, float], wall: Mapping[str, float]) -> float:
    """Return the wall seconds of a run, by what runs took here before; parameters as of `run_seconds`."""
    return machine.wait("run" + " on GPUs" * made.on_gpu) + machine.pace(made.on_gpu) * run_seconds(
        made, machine, core, wall
    )


def record_seen(report: Report, plan: Plan) -> None:
    """Add what a finished command shows to what is known of this machine.

    `report`: of a whole command, on the workers that it has by default.
    """
    machine = this_machine()
    if found := seen_in(report, plan, machine):
        remember(machine.with_seen(found))


def seen_in(report: Report, plan: Plan, machine: Machine) -> dict[str, float]:
    """Return what a finished command waited for, and the pace of its run, by the names of `WAITS` and `PACES`."""
    took, on_gpu = report.phases, " on GPUs" * plan.on_gpu
    found = {start_of(plan): took.get("start", 0.0), "close": took.get("close", 0.0)}
    if report.state == "computed":
        run, wait = took.get("run", 0.0), machine.wait(f"run{on_gpu}")
        predicted = run_seconds(plan, machine, *stage_seconds(plan, machine))
        if predicted <= MOST_UNPACED:
            found[f"run{on_gpu}"] = run
        elif predicted >= LEAST_PACED and PACE_BOUNDS[0] <= (pace := (run - wait) / predicted) <= PACE_BOUNDS[1]:
            found[PACES[plan.on_gpu]] = pace
    if took.get("compile", 0.0) > LEAST_COMPILED:
        found["compile"] = took["compile"]
    if took.get("verify"):
        found["verify a million entries"] = 1e6 * took["verify"] / max(plan.a.nnz + plan.b.nnz + report.nnz, 1)
    return found


def stage_seconds(
    made: Plan, machine: Machine, tried: Pilot | None = None, *, writes_c: bool = True
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what each stage takes in all.

    `tried`: without one, rates measured on other matrices are used.
    `writes_c`: whether C is stored, and not only reduced.
    Returns `core`: CPU seconds of each stage.
    Returns `wall`: wall seconds of each stage if it has the machine for itself; on a GPU also of bus and kernels.
    """
    rates, gains = machine.core, machine.gains
    if tried is not None:
        write = rates.write * (COMPRESSED_GAIN if tried.compresses else 1.0)
        slow = max(tried.slowness, 1e-3)
        rates = replace(rates, product=rates.product / slow, entry=rates.entry / slow, write=write)
    core = made.stage_seconds(rates)
    if made.resident and made.a == made.b:  # A is a part of B that is in memory
        core["preprocess"] -= made.a.nbytes / rates.read
    if not writes_c:
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
    return core, wall | (_gpu_seconds(made, machine.gpu, writes_c) if made.on_gpu else {})


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
