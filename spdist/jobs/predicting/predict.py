"""How long a product will take here, from prompt to prompt: its plan, the rates of this machine, and a pilot.

The command is start + plan + compilation + run + close; `run_time` has the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spdist.errors import InputError
from spdist.foundation import phases
from spdist.jobs.compiling.ahead import is_noted, note_of
from spdist.jobs.operands import MatrixLike
from spdist.jobs.planning import PlanSource, planned_request
from spdist.jobs.predicting.machine import Machine, is_short_here, start_of, this_machine
from spdist.jobs.predicting.pilot import pilot
from spdist.jobs.predicting.run_time import paced_seconds, stage_seconds
from spdist.jobs.reduce import is_by_vectors, request_to_reduce
from spdist.kernels.engine import find_engine
from spdist.kernels.reduction_spec import Reduction
from spdist.options import ExecutionOptions, ProductOptions
from spdist.scheduler.execution.records import JobSpec
from spdist.scheduler.execution.worker import tiny_product
from spdist.scheduler.planner import planner
from spdist.scheduler.planner.plan import Plan
from spdist.scheduler.planner.request import PlanRequest

SURE, UNSURE = 0.2, 0.5
"""Share of the run by which it may differ from its prediction: with measured rates and a pilot, and without."""
WAIT_SHARE = 0.1
"""Share of the other phases by which they may differ."""


@dataclass(frozen=True)
class Prediction:
    """What ``spdist multiply`` of a plan should take here.

    Examples
    --------
    >>> found = Prediction({"start": 1.0, "run": 2.0}, 0.5, {"multiply": 4.0}, 2, 0.2, "2026-01-31")
    >>> found.seconds, [round(x, 2) for x in found.bounds]
    (3.0, [2.5, 3.5])
    """

    phases: Mapping[str, float]  # wall seconds of each phase of the command
    verify: float  # wall seconds that ``--verify`` takes besides; 0.0 for a reduction, which has no C to verify
    core_seconds: Mapping[str, float]  # CPU seconds of each stage of the run; on a GPU also "gpu"
    cpus: int
    doubt: float  # share of the run by which it may be longer or shorter
    measured: str  # day on which this machine was measured; empty for typical rates
    # predicted seconds of start and run with each engine among which the plan's was chosen
    choice: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Wall seconds from prompt to prompt."""
        return sum(self.phases.values())

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and most of them that would not surprise."""
        run = self.phases.get("run", 0.0)
        doubt = self.doubt * run + WAIT_SHARE * (self.seconds - run)
        return self.seconds - doubt, self.seconds + doubt

    @property
    def bound_by(self) -> str:
        """The stage that should take longest."""
        return max(self.core_seconds, key=lambda stage: self.core_seconds[stage])

    def to_json(self) -> dict[str, Any]:
        """Return what ``spdist plan --json`` adds to the plan, and replaces in it."""
        return {
            "seconds": round(self.seconds, 3),
            "seconds_range": [round(bound, 3) for bound in self.bounds],
            "phases": {phase: round(seconds, 4) for phase, seconds in self.phases.items()},
            "verify_seconds": round(self.verify, 3),
            "stage_seconds": {stage: round(seconds, 4) for stage, seconds in self.core_seconds.items()},
            "bound_by": self.bound_by,
            "cpus": self.cpus,
            "engine_seconds": {engine: round(seconds, 3) for engine, seconds in self.choice.items()},
            "rates": f"measured on {self.measured}" if self.measured else "typical",
        }

    def lines(self) -> list[str]:
        """Return the prediction in words."""
        low, high = self.bounds
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        verify = f"; --verify {self.verify:.1f} s more" if self.verify else ""
        found = [
            f"spdist {'multiply' if self.verify else 'reduce'} should take about {self.seconds:.1f} s here "
            f"({low:.1f} to {high:.1f}): {parts}{verify}; bounded by {self.bound_by}"
        ]
        if len(self.choice) > 1:
            compared = " and ".join(f"{seconds:.1f} s with {engine}" for engine, seconds in self.choice.items())
            found.insert(0, f"engine {min(self.choice, key=self.choice.__getitem__)}: start and run {compared}")
        if not self.measured:
            found.append("at the rates of a typical core; `spdist info --machine` measures this machine")
        return found


def plan_and_predict(
    operands: tuple[MatrixLike, MatrixLike],
    product: ProductOptions,
    execution: ExecutionOptions,
    what: Reduction | None = None,
) -> tuple[Plan, Prediction]:
    """Plan ``A @ B`` as `planning.plan`, or a reduction of it, and predict what it takes here.

    `operands`: (A, B), each a path, URL or StoredMatrix.
    `what`: that is made of the product, which is not stored then.
    Returns (Plan, Prediction).
    Raises `InputError, MatrixError, MemoryBoundError` As `planning.plan`; InputError also if the reduction needs no
    plan.
    """
    with phases.clocked() as clock:
        with phases.during("plan"):
            request = (
                planned_request(*operands, product, execution)
                if what is None
                else _reducing(operands, what, product, execution)
            )
        # Asking a GPU for its free memory makes its context, for which a product waits when it starts.
        of_start = clock.seconds()["plan"] if find_engine(execution.engine).uses_gpu else 0.0
        with phases.during("plan"):
            made = planner.make_plan(request)
        planning = clock.seconds()["plan"] - of_start
    return made, predict(PlanSource(request, made), made, planning, this_machine())


def _reducing(
    operands: tuple[MatrixLike, MatrixLike], what: Reduction, product: ProductOptions, execution: ExecutionOptions
) -> PlanRequest:
    request = request_to_reduce(operands, what, product, execution)
    if is_by_vectors(request, what):
        raise InputError(
            f"{what} of A @ B comes from products with vectors and needs no plan: ask spdist reduce for it"
        )
    return request


def predict(source: PlanSource, made: Plan, planning: float, machine: Machine) -> Prediction:
    """Predict what a product takes.

    `made`: its plan.
    `planning`: seconds that it took to make.
    """
    job, request = source.draft().with_plan(made, ""), source.request
    short = is_short_here(made)
    one_block = short and len(made.blocks) <= 1
    compiling = 0.0 if are_compiled(job, one_block) else machine.wait("compile")
    tried = None if made.on_gpu or compiling or one_block else pilot(job, made, machine.core)
    is_sure = made.on_gpu or one_block or tried is not None
    core, wall = stage_seconds(made, machine, tried, writes_c=request.writes_c)
    run = paced_seconds(made, machine, core, wall)
    start = machine.wait(start_of(made))
    if made.on_gpu and not short:
        planning = max(0.0, planning - start)  # it is planned while the GPUs start
    waits = {"start": start, "plan": planning, "compile": compiling, "run": run, "close": machine.wait("close")}
    entries = (made.a.nnz + made.b.nnz + made.c.nnz) / 1e6
    return Prediction(
        {phase: seconds for phase, seconds in waits.items() if seconds},
        entries * machine.wait("verify a million entries") if request.writes_c else 0.0,
        core,
        machine.cpus,
        SURE if machine.measured and is_sure else UNSURE,
        machine.measured,
        request.choice,
    )


def are_compiled(job: JobSpec, one_block: bool) -> bool:
    """Whether the kernels of a job are there: in the cache of those for CPUs, or none are needed."""
    engine = find_engine(job.engine)
    if one_block:
        engine = engine.at_first(job.product.plain)
    if engine.uses_gpu or not engine.compiles:
        return True
    a, b, spec = tiny_product(job)
    return is_noted(note_of(a, b, spec, merges=len(job.pieces) > 1))
