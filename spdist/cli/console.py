"""Progress bars and tables in the terminal. Tables go to stdout, bars to stderr."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spdist.cli.facts import entries_in_words
from spdist.foundation.display import Part, Table, print_parts
from spdist.foundation.units import counted, format_bytes
from spdist.jobs.report import Callbacks
from spdist.scheduler.dashboard.pace import Pace
from spdist.scheduler.planner.plan import Plan
from spdist.shown import printable
from spdist.verification.stored_matrix import MatrixCheck

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from spdist.jobs.predicting.machine import Machine
    from spdist.scheduler.execution.telemetry import Progress as RunProgress

LEAK_FILTER = "ignore:resource_tracker:UserWarning"
"""Filter of warnings that killed workers left semaphores; they are removed then."""


@functools.cache
def _console(*, stderr: bool = False) -> Console:
    """Return what prints; rich is loaded when there is something to print."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def line(text: str) -> None:
    """Print one line."""
    show(text)


def warning(text: str) -> None:
    """Print one warning to stderr, above a progress bar."""
    notice(f"warning: {text}")


def notice(text: str) -> None:
    """Print one line to stderr above a progress bar, not marked as a warning."""
    print_parts([f"spdist: {' '.join(text.split())}"], _console(stderr=True))


def _silence_dask() -> None:
    """Keep log lines of Dask and Python off the terminal; the package reports the problems that matter."""
    import distributed  # sets the levels of its loggers when it is loaded

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == distributed.__name__]
    for name in (*names, "asyncio", "tornado", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if LEAK_FILTER not in sys.warnoptions:
        sys.warnoptions.append(LEAK_FILTER)  # for the process that cleans up after killed workers


def _bar(*, tells_left: bool = False) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    err = _console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[left]}") if tells_left else TimeRemainingColumn(compact=True),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def transfer_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar during a ``with`` block.

    `what`: text before the bar.
    `quiet`: show nothing.
    Yields a function that moves the bar: ``progress(done, total)``.
    """
    if quiet:
        yield lambda done, total: None
        return
    with _bar() as bar:
        task = bar.add_task(printable(what), total=None, rate="")
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


class RunDisplay:
    """Shows a running multiplication: one line for the plan, the link to the dashboard, one progress bar.

    Pass `callbacks` to `spdist.multiply` inside a ``with`` block.

    `quiet`: show nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.pace = Pace(0.0)
        self.task: Any = None
        self.entries = "entries"
        self.callbacks = Callbacks(connecting=_silence_dask)
        if not quiet:
            self.bar = _bar(tells_left=True)
            shown = self._resumed, self._planned, self._started, self._moved, self._verifying
            self.callbacks = Callbacks(*shown, on_message=self._on_message, connecting=_silence_dask)

    def __enter__(self) -> RunDisplay:
        if not self.quiet:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.quiet:
            self.bar.stop()

    def _resumed(self, durable: str) -> None:
        print_parts([f"resuming by the stored plan: {durable} are there already"], self.bar.console)

    def _planned(self, plan: Plan) -> None:
        grid = plan.grid
        self.entries = entries_in_words(plan.c.block)
        line = (
            f"{plan.a.size} times {plan.b.size}: "
            f"{plan.products} in {grid['row_blocks']:,} x {grid['inner_blocks']} x {grid['column_blocks']} "
            f"blocks, up to {format_bytes(plan.projected_memory)} of {format_bytes(plan.memory_limit)} a worker"
        )
        print_parts([line], self.bar.console)

    def _started(self, link: str) -> None:
        print_parts([f"dashboard: {link}"], self.bar.console)

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["what"] == "start":
            self.pace = Pace(time.monotonic(), message["content"]["expected"])

    def _moved(self, now: RunProgress) -> None:
        clock = time.monotonic()
        if self.task is None:
            self.task = self.bar.add_task("multiplying", total=None, rate="", left="")
        self.pace.add(clock, now.multiplied, now.written, now.work)
        elapsed = clock - self.pace.begun
        rate = f"{now.nnz / elapsed / 1e6:.1f} M/s" if elapsed > 0 else ""
        text = f"{now.blocks:,}/{counted(now.blocks_total, 'block')}, {now.nnz:.2e} {self.entries}, {rate}"
        left = self.pace.estimate_time_left(clock)
        said, total = "" if left is None else left.in_words, max(now.products_total, 1)
        self.bar.update(self.task, completed=now.products, total=total, rate=text, left=said)

    def _verifying(self, done: int, total: int) -> None:
        if self.task is None:
            self.task = self.bar.add_task("verifying", total=None, rate="", left="")
        self.bar.update(self.task, description="verifying", completed=done, total=max(total, 1), rate="", left="")


def measured_machine(folder: str | None, *, quiet: bool = False) -> Machine:
    """Measure this machine with a progress bar, and print the rates.

    `folder`: where matrices are written meanwhile.
    `quiet`: print nothing.
    """
    from spdist.jobs.predicting.measure import measure_machine

    with transfer_bar("measuring this machine", quiet=quiet) as bar:
        machine = measure_machine(folder, bar)
    if not quiet:
        show(*machine.description())
    return machine


def histogram_table(edges: list[float], counts: list[int]) -> None:
    """Print how many values lie in each bin.

    `edges`: edges of the bins; one more than `counts`.
    """
    ends = [")"] * (len(counts) - 1) + ["]"]
    ranges = [f"[{low:.15g}, {high:.15g}{end}" for (low, high), end in zip(pairwise(edges), ends, strict=True)]
    rows = tuple((text, f"{count:,}") for text, count in zip(ranges, counts, strict=True))
    show(Table(("values", "entries"), rows, right=("values", "entries")))


def show(*parts: Part) -> None:
    """Print lines and tables."""
    print_parts(parts, _console())


def check_lines(found: MatrixCheck) -> None:
    """Print each problem of a stored matrix on a line, or that it has none."""
    show(*found.problems)
    read = f"{counted(found.nchunks, 'Zarr chunk')} read in {found.seconds:.2f} s"
    if found.ok:
        seal = "" if found.sealed else "; it has no seal, so altered values and swapped Zarr chunks may go unseen"
        line(f"{found.matrix}: nothing is wrong, {counted(found.nnz, 'entry')}, {read}{seal}")
    else:
        line(f"{found.matrix}: {counted(found.count, 'problem')}, {read}")
