"""A progress bar below the cell of a Jupyter notebook, while a call of the API multiplies."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from spdist.foundation.units import counted
from spdist.scheduler.dashboard.pace import Pace

if TYPE_CHECKING:
    from spdist.jobs.report import Callbacks
    from spdist.scheduler.execution.telemetry import Progress
    from spdist.scheduler.planner.plan import Plan

SECONDS_BETWEEN = 0.2
"""Seconds between two updates of the bar at least."""


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook: Jupyter's kernel has loaded IPython and set up a shell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


@contextlib.contextmanager
def shown(callbacks: Callbacks | None) -> Iterator[Callbacks]:
    """Show a product's progress in a notebook, unless the caller passes callbacks.

    `callbacks`: the caller's.
    Yields the caller's callbacks, else the callbacks of a progress bar; outside of notebooks callbacks that do nothing.
    """
    from spdist.jobs.report import Callbacks

    if callbacks is not None or not in_notebook():
        yield callbacks or Callbacks()
        return
    bar = NotebookBar()
    try:
        yield Callbacks(
            resumed=bar.resumed, planned=bar.planned, started=bar.started, progress=bar.moved, verifying=bar.verifying,
            on_message=bar.on_message,
        )  # fmt: skip
    finally:
        bar.close()


class NotebookBar:
    """A line about the plan, a link to the dashboard and a progress bar; gone at the end."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._updated = time.monotonic()
        self._pace = Pace(self._updated)
        self._above: list[str] = []
        self._handle: Any = display(HTML(""), display_id=True)

    def resumed(self, durable: str) -> None:
        """Say how much is durable already."""
        self._add(escape(f"resuming by the stored plan: {durable} are there already"))

    def planned(self, plan: Plan) -> None:
        """Show the plan's line."""
        self._add(escape(repr(plan).strip("<>")))

    def started(self, link: str) -> None:
        """Show the link to the dashboard."""
        self._add(f'<a href="{escape(link)}" target="_blank">dashboard</a>')

    def on_message(self, message: dict[str, Any]) -> None:
        """Store the expected duration of the run."""
        if message["what"] == "start":
            self._pace = Pace(time.monotonic(), message["content"]["expected"])

    def moved(self, now: Progress) -> None:
        """Move the bar to the products that are done."""
        clock = time.monotonic()
        self._pace.add(clock, now.multiplied, now.written, now.work)
        left = self._pace.estimate_time_left(clock)
        text = f"{now.blocks:,}/{counted(now.blocks_total, 'block')}, {now.nnz:.2e} entries"
        self._move(now.products, now.products_total, text + (f", {left.in_words}" if left else ""))

    def verifying(self, done: int, total: int) -> None:
        """Move the bar of the verification."""
        self._move(done, total, "verifying")

    def close(self) -> None:
        """Remove the bar: the report says what came of it."""
        self._handle.update(self._html(""))

    def _add(self, line: str) -> None:
        self._above.append(line)
        self._show("")

    def _move(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if now - self._updated < SECONDS_BETWEEN:
            return
        self._updated = now
        self._show(f'<progress value="{done}" max="{max(total, 1)}"></progress> {escape(text)}')

    def _show(self, bar: str) -> None:
        lines = "<br>".join([*self._above, bar] if bar else self._above)
        self._handle.update(self._html(f'<div style="margin: 0.3em 0">{lines}</div>'))
