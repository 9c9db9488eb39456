"""How a product reports to its caller: calls while it runs, a report at the end, a record of every stage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spdist.errors import InputError
from spdist.foundation.display import Displayed, Part, Table, as_text
from spdist.foundation.phases import WHAT_PHASES_DO, PhaseClock
from spdist.foundation.units import counted, format_bytes
from spdist.scheduler.execution.telemetry import RunCallbacks
from spdist.scheduler.planner.plan import Plan

if TYPE_CHECKING:  # loads Dask
    from spdist.scheduler.executors.supervision.supervisor import Supervisor

Timings = list[dict[str, Any]]
"""Seconds and bytes of stages of blocks, each a JSON object."""

GPU_STAGES = ("gpu prepare", "gpu upload", "gpu multiply", "gpu pack", "gpu download")
"""Parts of the stage multiply; they overlap."""

_NO_STAGE = {"stage": "", "row": -1, "begin": 0.0, "seconds": 0.0, "nbytes": 0, "worker": ""}
"""Fields that every line of a record has."""


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """What a multiplication did.

    Attributes
    ----------
    nnz : int
        Entries of C; dense blocks if C is stored in dense blocks.
    blocks : int
        Row blocks that were computed.
    seconds : float
        Wall time, planning and the start of the workers included.
    engine : str
    peak_memory : int
        Most bytes that a worker took of the memory that `memory_limit` limits: with "cuda" and "hybrid" GPU memory,
        else host memory besides the memory of the idle worker.
    memory_limit : int
        Bytes.
    grid : dict
        Numbers of row, inner and column blocks.
    state : str
        ``"computed"``, ``"resumed"`` or ``"already finished"``.
    stages : dict
        Seconds, bytes and tasks by stage, over all workers.
    peak_host_memory : int
        Most bytes of host memory that a worker took, with any engine.
    workers : int
    verification : dict or None
        The JSON form of a `Verification`; None without `check`.
    block_size : (int, int) or None
        Rows and columns of C's dense blocks.
    phases : dict
        Wall seconds of consecutive phases: "start", "plan", "compile", "transpose", "run", "verify" and "close", those
        that took any time. They add up to the wall time of the call; of the command line, from the start of the
        process. Stages are parts of "run", and overlap.
    part : str
        The part of C that was made, as ``"3/8"``; empty for all of C. Entries and blocks are of the part.
    missing : list of int
        The parts that are still to be made, by this or other runs; C is whole when none is.

    Examples
    --------
    >>> report = Report(4, 1, 0.5, "numba", 1 << 20, 1 << 31, {"row_blocks": 1}, "computed", {})
    >>> report.to_json()["nnz"]
    4
    """

    nnz: int
    blocks: int
    seconds: float
    engine: str
    peak_memory: int
    memory_limit: int
    grid: dict[str, int]
    state: str
    stages: dict[str, dict[str, float]]
    peak_host_memory: int = 0
    workers: int = 0
    verification: dict[str, Any] | None = None
    block_size: tuple[int, int] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    part: str = ""
    missing: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the report as ``spdist multiply --json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"<Report: C has {self.entries}, {self.state} in {self.seconds:.2f} s, engine {self.engine}>"

    def __str__(self) -> str:
        return as_text(self.description())

    @property
    def entries(self) -> str:
        """What C stores, in words."""
        return counted(self.nnz, "entry" if self.block_size in (None, (1, 1)) else "dense block")

    @property
    def bound_by(self) -> str:
        """The stage that took the workers longest."""
        seconds = {name: stage["seconds"] for name, stage in self.stages.items() if name not in GPU_STAGES}
        return max(seconds, key=lambda name: seconds[name], default="nothing")

    def description(self, target: str = "C") -> list[Part]:
        """Return the report in words: where the time went, what C holds, whether it is right."""
        if self.state == "already finished":
            parts: list[Part] = [f"{target} is finished already: {self.entries}"]
        else:
            used, limit = self.peak_memory, self.memory_limit
            over = f", {format_bytes(used - limit)} above its limit of" if used > limit else " of"
            memory = f"{format_bytes(used)}{over} {format_bytes(limit)}"
            line = (
                f"{target}: {self.entries} in {sum(self.phases.values()):.2f} s, {counted(self.blocks, 'block')}, "
                f"engine {self.engine}; worst worker used {memory}; bounded by {self.bound_by}"
            )
            parts = [phase_table(self.phases), self._stage_table(), line]
        if self.part:
            left = ", ".join(map(str, self.missing[:12])) + (", ..." if len(self.missing) > 12 else "")
            parts.append(
                f"part {self.part}; " + (f"still to be made: {left}" if left else "all parts are made: C is whole")
            )
        if self.verification is not None:
            parts.append(verification_line(self.verification))
        return parts

    def _stage_table(self) -> Table:
        """Return the time and bytes of each stage; stages of the GPU are parts of multiply and overlap."""
        total = sum(stage["seconds"] for name, stage in self.stages.items() if name not in GPU_STAGES) or 1.0
        rows = []
        for name, stage in sorted(self.stages.items(), key=lambda item: (item[0] in GPU_STAGES, -item[1]["seconds"])):
            rate = stage["bytes"] / stage["seconds"] if stage["seconds"] else 0.0
            share = "" if name in GPU_STAGES else f"{stage['seconds'] / total:.0%}"
            of_limit = f"{rate / stage['limit']:.0%}" if stage["limit"] else ""
            figures = f"{stage['tasks']:,.0f}", f"{stage['seconds']:.2f}", share, format_bytes(stage["bytes"])
            rows.append((name, *figures, f"{rate / 1e9:.2f}", of_limit))
        numbers = ("tasks", "worker seconds", "share", "moved", "GB/s", "of limit")
        return Table(("stage of run", *numbers), tuple(rows), right=numbers)


def phase_table(seconds: dict[str, float]) -> Table:
    """Return where the wall time went.

    `seconds`: wall seconds of consecutive phases, of `PhaseClock.seconds`.
    """
    total = sum(seconds.values())
    rows = tuple(
        (phase, f"{each:.2f}", f"{each / total:.0%}", WHAT_PHASES_DO[phase]) for phase, each in seconds.items()
    )
    columns = ("phase", "wall seconds", "share", "what it is")
    return Table(columns, rows, right=columns[1:3], last=("all", f"{total:.2f}", "", ""))


def verification_line(found: dict[str, Any]) -> str:
    """Return whether C is right, and why; `found` is the JSON form of a `Verification`."""
    return f"{'verified' if found['ok'] else 'FALSE'}: {found['reason']}"


@dataclass(frozen=True)
class Callbacks:
    """Functions that `multiply` and `reduce` call while they run.

    Parameters
    ----------
    resumed : callable, optional
        Called with a text that says how much of an unfinished C is durable.
    planned : callable, optional
        Called with the `Plan`.
    connecting : callable, optional
        Called before workers are started or found; not for a small product, which needs none.
    started : callable, optional
        Called with the link to the Dask dashboard; not for a small product.
    progress : callable, optional
        Called with a `Progress`: blocks, products and entries so far, and their totals.
    verifying : callable, optional
        Called as ``verifying(done, total)``.
    on_timings : callable, optional
        Called with a list of dictionaries, one for each stage of each block.
    on_message : callable, optional
        Called with a dictionary when a run begins, now and then on its way, and when it ends.

    Examples
    --------
    >>> import spdist
    >>> spdist.Callbacks(started=print).started("http://127.0.0.1:8787/status")
    http://127.0.0.1:8787/status
    """

    resumed: Callable[[str], None] = lambda durable: None
    planned: Callable[[Plan], None] = lambda plan: None
    started: Callable[[str], None] = lambda link: None
    progress: Callable[[Any], None] | None = None
    verifying: Callable[[int, int], None] | None = None
    on_timings: Callable[[Timings], None] | None = None
    on_message: Callable[[dict[str, Any]], None] = lambda message: None
    connecting: Callable[[], None] = lambda: None

    def with_planned(self, planned: Callable[[Plan], Any]) -> Callbacks:
        """Return the callbacks with another function that takes the plan."""
        return replace(self, planned=_chained(planned, self.planned))


@contextlib.contextmanager
def recorder(record: str | Path | None, callbacks: Callbacks) -> Iterator[Callbacks]:
    """Open a file for the timings and messages of a run, one JSON object a line.

    `record`: the file; None to record nothing.
    Yields they write to the file as well.
    Raises `InputError` if the file cannot be written.
    """
    if record is None:
        yield callbacks
        return
    try:
        Path(record).write_text("")
    except OSError as error:
        raise InputError(f"record={record} cannot be written ({error.strerror}): choose another name") from None
    with Path(record).open("ab", buffering=0) as file:

        def write(lines: Timings) -> None:
            # Timings come in the call's thread, messages in the connection's: without a buffer, each call
            # appends whole lines in one step of the system, and waits for no other.
            rest = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
            while rest:
                rest = rest[file.write(rest) or 0 :]

        yield replace(
            callbacks,
            on_timings=_chained(write, callbacks.on_timings),
            on_message=_chained(lambda message: write([_NO_STAGE | message]), callbacks.on_message),
        )


def run_callbacks(
    callbacks: Callbacks, expects: Callable[[Plan], float], supervisor: Supervisor | None = None
) -> RunCallbacks:
    """Return what a run calls on the driver.

    `expects`: see `RunCallbacks`.
    `supervisor`: of the run's workers, if it has any.
    """
    calls = callbacks.started, callbacks.progress, callbacks.on_timings
    reports = RunCallbacks(*calls, on_message=callbacks.on_message, expects=expects)
    if supervisor is None:
        return reports
    return replace(reports, admit=supervisor.handshake.admit, on_step=supervisor.monitor.record_in_flight)


def _chained(one: Callable[[Any], None], other: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Return a function that calls two functions, if there are two."""
    if other is None:
        return one

    def call(argument: Any) -> None:
        one(argument)
        other(argument)

    return call


def record_phases(record: str | Path, clock: PhaseClock) -> None:
    """Append the phases of a call to a file of timings, a line each; ``worker`` is empty, as of no stage.

    `record`: that `recorder` wrote.
    """
    begins = {phase: begin for begin, phase in reversed(clock.marks)}
    lines = [
        {
            "stage": phase,
            "row": -1,
            "begin": begins.get(phase, clock.begin),
            "seconds": seconds,
            "nbytes": 0,
            "worker": "",
        }
        for phase, seconds in clock.seconds().items()
    ]
    _append(record, lines)


def record_density(record: str | Path, maps: dict[str, dict[str, str]]) -> None:
    """Append pictures of the matrices to a file of timings.

    `record`: that `recorder` wrote.
    `maps`: of `density_maps`.
    """
    _append(record, [_NO_STAGE | {"what": "density", "content": maps}])


def _append(record: str | Path, lines: Timings) -> None:
    with Path(record).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
