"""The page ``/spdist`` and its data, added to a scheduler's HTTP server while it runs."""

from __future__ import annotations

import json
from typing import Any

from distributed import Scheduler

from spdist.scheduler.dashboard.hosts import CheckedHandler
from spdist.scheduler.dashboard.page import PAGE
from spdist.scheduler.dashboard.runs import Runs


class PageHandler(CheckedHandler):
    """The page: one file with its script and style."""

    def get(self) -> None:
        """Answer with the page."""
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        self.write(PAGE.read_bytes())


class DataHandler(CheckedHandler):
    """The state of all runs as JSON."""

    def initialize(self, runs: Runs) -> None:
        """Take what Tornado passes to each handler."""
        self.runs = runs

    def get(self) -> None:
        """Answer with the state of all runs; ``?run=NAME`` selects one run and adds its details."""
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.write(json.dumps(self.runs.to_json(self.get_query_argument("run", "")), separators=(",", ":")))


def add_page(scheduler: Scheduler, runs: Runs) -> None:
    """Add the page to the routes of a scheduler and, if its dashboard is there, to the dashboard's menu."""
    application: Any = scheduler.http_application
    prefix = next((app.prefix for app in application.applications if getattr(app, "prefix", "")), "")
    application.add_handlers(
        r".*",
        [
            (rf"{prefix}/spdist/?", PageHandler),
            (rf"{prefix}/spdist/data\.json", DataHandler, {"runs": runs}),
        ],
    )
    if any(hasattr(app, "prefix") for app in application.applications):
        add_to_menu(scheduler)


def add_to_menu(scheduler: Scheduler) -> None:
    """Add a link to the menu of Dask's pages, which all read one list.

    `scheduler`: its dashboard is there.
    """
    try:
        from distributed.dashboard.scheduler import template_variables

        pages = template_variables(scheduler)["pages"]
    except (ImportError, KeyError):  # another version of Dask: the page is there, its link is not
        return
    if "spdist" not in pages:
        pages.append("spdist")
