"""Progress bars and tables in the terminal. Tables go to stdout, bars to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from spdist.jobs.report import Callbacks, Report
from spdist.phases import WHAT_PHASES_DO
from spdist.scheduler.planner.plan import Operand, Plan
from spdist.units import format_bytes
from spdist.verification.stored_matrix import MatrixCheck

if TYPE_CHECKING:
    from spdist.scheduler.execution.telemetry import Progress as RunProgress

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

WHAT_STAGES_DO = {
    "preprocess": "read A, and the rows of B each block needs",
    "multiply": "products, sorted and summed",
    "merge": "sums of partial products",
    "commit": "write C",
    "join": "write the Zarr chunks of C that blocks share",
    "schedule": "submit the blocks",
}
"""Text for each stage in a plan's table."""

GPU_STAGES = ("gpu prepare", "gpu upload", "gpu multiply", "gpu pack", "gpu download")
"""Parts of the stage multiply; they overlap."""


LEAK_FILTER = "ignore:resource_tracker:UserWarning"
"""Filter of warnings that killed workers left semaphores; they are removed then."""


def line(text: str) -> None:
    """Print one line."""
    _out.print(text, markup=False)


def warning(text: str) -> None:
    """Print one line to stderr, above a progress bar that is shown there."""
    _err.print(f"spdist: warning: {' '.join(text.split())}", markup=False)


def notice(text: str) -> None:
    """Print one line to stderr that is no warning, above a progress bar that is shown there."""
    _err.print(f"spdist: {' '.join(text.split())}", markup=False)


def _silence_dask() -> None:
    """Keep what Dask and Python log for themselves off the terminal: the package says what matters of it."""
    import distributed  # sets the levels of its loggers when it is loaded

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == distributed.__name__]
    for name in (*names, "asyncio", "tornado", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if LEAK_FILTER not in sys.warnoptions:
        sys.warnoptions.append(LEAK_FILTER)  # for the process that cleans up after killed workers


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=_err,
        transient=True,
        disable=not _err.is_terminal,
    )


@contextmanager
def transfer_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar for the time of a ``with`` block.

    Parameters
    ----------
    what : str
        Text before the bar.
    quiet : bool
        Show nothing.

    Yields
    ------
    callable
        Moves the bar: ``progress(done, total)``.
    """
    if quiet:
        yield lambda done, total: None
        return
    with _bar() as bar:
        task = bar.add_task(what, total=None, rate="")
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


class RunDisplay:
    """Shows a running multiplication: one line for the plan, the link to the dashboard, one progress bar.

    Pass `callbacks` to `spdist.multiply` inside a ``with`` block.

    Parameters
    ----------
    quiet : bool
        Show nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.bar = _bar()
        self.task: Any = None
        self.entries = "entries"
        self.callbacks = Callbacks(connecting=_silence_dask)
        if not quiet:
            shown = self._resumed, self._planned, self._started, self._moved, self._verifying
            self.callbacks = Callbacks(*shown, connecting=_silence_dask)

    def __enter__(self) -> RunDisplay:
        if not self.quiet:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.quiet:
            self.bar.stop()

    def _resumed(self, durable: str) -> None:
        self.bar.console.print(f"resuming by the stored plan: {durable} are there already", markup=False)

    def _planned(self, plan: Plan) -> None:
        grid = plan.grid
        self.entries = _entries(plan.c.block)
        self.bar.console.print(
            f"{_size(plan.a)} times {_size(plan.b)}: "
            f"{_products(plan)} in {grid['row_blocks']:,} x {grid['inner_blocks']} x {grid['column_blocks']} "
            f"blocks, up to {format_bytes(plan.projected_memory)} of {format_bytes(plan.memory_limit)} a worker",
            markup=False,
        )

    def _started(self, link: str) -> None:
        self.bar.console.print(f"dashboard: {link}", markup=False)

    def _moved(self, now: RunProgress) -> None:
        if self.task is None:
            self.task = self.bar.add_task("multiplying", total=None, rate="")
        elapsed = self.bar.tasks[0].elapsed or 0
        rate = f"{now.nnz / elapsed / 1e6:.1f} M/s" if elapsed > 0 else ""
        text = f"{now.blocks:,}/{now.blocks_total:,} blocks, {now.nnz:.2e} {self.entries}, {rate}"
        self.bar.update(self.task, completed=now.products, total=max(now.products_total, 1), rate=text)

    def _verifying(self, done: int, total: int) -> None:
        if self.task is None:
            self.task = self.bar.add_task("verifying", total=None, rate="")
        self.bar.update(self.task, description="verifying", completed=done, total=max(total, 1), rate="")


def matrix_table(facts: dict[str, Any]) -> None:
    """Print the facts that `spdist.api.info` returns."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if name == "rows" and isinstance(value, dict):
            what = _entries(facts.get("block_size"))
            text = f"{value['min']:,} to {value['max']:,} {what}, mean {value['mean']:.2f}; {value['empty']:,} empty"
        elif name == "bytes":
            text = f"{format_bytes(value['memory'])} in memory, {format_bytes(value['stored'])} stored"
        elif name == "shape":
            text = " x ".join(f"{size:,}" for size in value)
        elif name == "block_size":
            name, text = "block size", f"{value[0]} x {value[1]}"
        else:
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        table.add_row(name, text)
    _out.print(table)


def histogram_table(edges: list[float], counts: list[int]) -> None:
    """Print how many values lie in each bin.

    Parameters
    ----------
    edges : list of float
        Edges of the bins; one more than `counts`.
    counts : list of int
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column(justify="right")
    for i, count in enumerate(counts):
        end = "]" if i == len(counts) - 1 else ")"
        table.add_row(escape(f"[{edges[i]:.15g}, {edges[i + 1]:.15g}{end}"), f"{count:,}")
    _out.print(table)


def _entries(block_size: Sequence[int] | None) -> str:
    """Return the name of the items that a matrix with blocks of this size stores."""
    return "entries" if block_size is None or tuple(block_size) == (1, 1) else "dense blocks"


def _size(m: Operand) -> str:
    """Return the size of a matrix in words."""
    blocks = "" if m.block == (1, 1) else f" blocks of {m.block[0]} x {m.block[1]}"
    return f"{m.shape[0]:,} x {m.shape[1]:,}{blocks}"


def _products(plan: Plan) -> str:
    """Return the number of products in words."""
    return f"{'' if plan.counted else 'about '}{plan.expansion:,} products"


def plan_table(plan: Plan) -> None:
    """Print a plan: the grid, bytes and seconds of each stage, memory of a worker, and which stage takes longest."""
    _out.print(f"A {_size(plan.a)} with {plan.a.nnz:,} {_entries(plan.a.block)}, B {_size(plan.b)} with {plan.b.nnz:,}")
    _out.print(
        f"{_products(plan)}, about {plan.c.nnz:,} {_entries(plan.c.block)} in C ({format_bytes(plan.c.nbytes)}), "
        f"compression {plan.compression:.1f}"
    )
    grid = plan.grid
    _out.print(
        f"grid: {grid['row_blocks']:,} row x {grid['inner_blocks']} inner x {grid['column_blocks']} column blocks, "
        f"{plan.blocks_in_flight} in flight on each worker; "
        f"B {'stays in memory' if plan.resident else 'is read block by block'}"
    )
    table = Table(title=None)
    for name in ("stage", "moves", "core seconds", "bounds", "what it does"):
        table.add_column(name, justify="right" if name in ("moves", "core seconds") else "left")
    moved = plan.stage_bytes()
    for stage, seconds in plan.stage_seconds().items():
        mark = "the run" if stage == plan.bound_by else ""
        table.add_row(
            stage, format_bytes(moved[stage]) if stage in moved else "", f"{seconds:.2f}", mark, WHAT_STAGES_DO[stage]
        )  # fmt: skip
    _out.print(table)
    _out.print(_memory_table(plan))
    cores = "" if plan.on_gpu else f" of {plan.threads} {'thread' if plan.threads == 1 else 'threads'}"
    _out.print(
        f"about {plan.seconds(1):.1f} s with one worker{cores}, {plan.seconds(4):.1f} s with 4 of them; bounded by "
        f"{plan.bound_by}"
    )


def _memory_table(plan: Plan) -> Table:
    """Return a table of the uses of a worker's memory, and of its GPU's memory."""
    table = Table(title=None)
    for name in ("memory of a worker", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    largest = max(plan.blocks, key=lambda block: block.needed, default=None)
    table.add_row(
        "held throughout: buffers, workspace" + (", B" if plan.resident else ""), format_bytes(plan.reserved_memory)
    )
    if largest is not None:
        for what, size in (("A", largest.a_bytes), ("B", largest.b_bytes), ("C", largest.c_bytes)):
            count = plan.blocks_in_flight
            table.add_row(f"largest block's {what}, times {count}", format_bytes(count * size))
    table.add_row("projected", format_bytes(plan.projected_host_memory))
    table.add_row("limit", format_bytes(plan.host_limit or plan.memory_limit))
    if plan.on_gpu:
        table.add_row("on the GPU, projected", format_bytes(plan.device_memory))
        table.add_row("on the GPU, limit", format_bytes(plan.memory_limit))
    return table


def phase_table(seconds: dict[str, float]) -> None:
    """Print where the wall time went.

    Parameters
    ----------
    seconds : dict
        Wall seconds of consecutive phases, of `PhaseClock.seconds`.
    """
    table = Table(title=None)
    for name in ("phase", "wall seconds", "share", "what it is"):
        table.add_column(name, justify="right" if name in ("wall seconds", "share") else "left")
    total = sum(seconds.values())
    for phase, each in seconds.items():
        table.add_row(phase, f"{each:.2f}", f"{each / total:.0%}", WHAT_PHASES_DO[phase])
    table.add_row("all", f"{total:.2f}", "", "", end_section=True)
    _out.print(table)


def _stage_table(report: Report) -> Table:
    """Return a table of the time and bytes of each stage; stages of the GPU are parts of multiply and overlap."""
    table = Table(title=None)
    for name in ("stage of run", "tasks", "worker seconds", "share", "moved", "GB/s", "of limit"):
        table.add_column(name, justify="left" if name == "stage of run" else "right")
    total = sum(stage["seconds"] for name, stage in report.stages.items() if name not in GPU_STAGES) or 1.0
    for name, stage in sorted(report.stages.items(), key=lambda item: (item[0] in GPU_STAGES, -item[1]["seconds"])):
        rate = stage["bytes"] / stage["seconds"] / 1e9 if stage["seconds"] else 0.0
        share = "" if name in GPU_STAGES else f"{stage['seconds'] / total:.0%}"
        figures = f"{stage['tasks']:,.0f}", f"{stage['seconds']:.2f}", share, format_bytes(stage["bytes"])
        of_limit = f"{1e9 * rate / stage['limit']:.0%}" if stage["limit"] else ""
        table.add_row(name, *figures, f"{rate:.2f}", of_limit)
    return table


def _bound_by(report: Report) -> str:
    """Return the stage that took longest."""
    stages = {name: stage["seconds"] for name, stage in report.stages.items() if name not in GPU_STAGES}
    return max(stages, key=lambda name: stages[name], default="nothing")


def report_table(report: Report, target: str) -> None:
    """Print the report of a multiplication.

    Parameters
    ----------
    report : Report
    target : str
        Name of C in the text.
    """
    entries = f"{report.nnz:,} {_entries(report.block_size)}"
    if report.state == "already finished":
        _out.print(f"{target} is finished already: {entries}", markup=False)
    else:
        phase_table(report.phases)
        _out.print(_stage_table(report))
        memory = f"{format_bytes(report.peak_memory)} of {format_bytes(report.memory_limit)}"
        _out.print(
            f"{target}: {entries} in {sum(report.phases.values()):.2f} s, {report.blocks:,} blocks, "
            f"engine {report.engine}; worst worker used {memory}; bounded by {_bound_by(report)}",
            markup=False,
        )
    if report.verification is not None:
        verification_line(report.verification)


def verification_line(found: dict[str, Any]) -> None:
    """Print whether C is right, and why; `found` is the JSON form of a `Verification`."""
    _out.print(f"{'verified' if found['ok'] else 'FALSE'}: {found['reason']}", markup=False)


def check_lines(found: MatrixCheck) -> None:
    """Print what is wrong with a stored matrix, a line each, or that nothing is."""
    for problem in found.problems:
        _out.print(problem, markup=False, soft_wrap=True)
    read = f"{found.nchunks:,} Zarr chunks read in {found.seconds:.2f} s"
    if found.ok:
        seal = "" if found.sealed else "; it has no seal, so altered values and swapped Zarr chunks may go unseen"
        line(f"{found.matrix}: nothing is wrong, {found.nnz:,} entries, {read}{seal}")
    else:
        line(f"{found.matrix}: {found.count:,} {'problem' if found.count == 1 else 'problems'}, {read}")
