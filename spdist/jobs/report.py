"""How a product reports to its caller: calls while it runs, a report at the end, a record of every stage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spdist.errors import InputError
from spdist.phases import PhaseClock
from spdist.scheduler.execution.telemetry import RunCallbacks
from spdist.scheduler.planner.plan import Plan

if TYPE_CHECKING:  # loads Dask
    from spdist.scheduler.execution.supervision.supervisor import Supervisor

Timings = list[dict[str, Any]]
"""Seconds and bytes of stages of blocks, each a JSON object."""

_NO_STAGE = {"stage": "", "row": -1, "begin": 0.0, "seconds": 0.0, "nbytes": 0, "worker": ""}
"""Fields that every line of a record has."""


@dataclass(frozen=True)
class Report:
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

    def to_json(self) -> dict[str, Any]:
        """Return the report as ``spdist multiply --json`` prints it."""
        return asdict(self)


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
    timed : callable, optional
        Called with a list of dictionaries, one for each stage of each block.
    heard : callable, optional
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
    timed: Callable[[Timings], None] | None = None
    heard: Callable[[dict[str, Any]], None] = lambda message: None
    connecting: Callable[[], None] = lambda: None


@contextlib.contextmanager
def recorder(record: str | Path | None, callbacks: Callbacks) -> Iterator[Callbacks]:
    """Open a file for the timings and messages of a run, one JSON object a line.

    Parameters
    ----------
    record : str or Path or None
        The file; None to record nothing.
    callbacks : Callbacks

    Yields
    ------
    Callbacks
        They write to the file as well.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    if record is None:
        yield callbacks
        return
    try:
        Path(record).write_text("")
    except OSError as error:
        raise InputError(f"record={record} cannot be written ({error.strerror}): choose another name") from None
    with Path(record).open("w") as file:

        def write(lines: Timings) -> None:
            file.writelines(json.dumps(line) + "\n" for line in lines)

        yield replace(
            callbacks,
            timed=_both(write, callbacks.timed),
            heard=_both(lambda message: write([_NO_STAGE | message]), callbacks.heard),
        )


def run_callbacks(callbacks: Callbacks, supervisor: Supervisor | None = None) -> RunCallbacks:
    """Return what a run calls on the driver.

    Parameters
    ----------
    callbacks : Callbacks
    supervisor : Supervisor, optional
        Of the run's workers, if it has any.
    """
    reports = RunCallbacks(callbacks.started, callbacks.progress, callbacks.timed, heard=callbacks.heard)
    if supervisor is None:
        return reports
    return replace(reports, admit=supervisor.handshake.admit, note=supervisor.monitor.note)


def _both(one: Callable[[Any], None], other: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Return a function that calls two functions, if there are two."""
    if other is None:
        return one

    def call(argument: Any) -> None:
        one(argument)
        other(argument)

    return call


def record_phases(record: str | Path, clock: PhaseClock) -> None:
    """Append the phases of a call to a file of timings, a line each; ``worker`` is empty, as of no stage.

    Parameters
    ----------
    record : str or Path
        That `recorder` wrote.
    clock : PhaseClock
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
    with Path(record).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
