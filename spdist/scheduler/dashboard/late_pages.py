"""Dask's own pages on a scheduler of this process, loaded when somebody first asks for one of them.

Bokeh, which draws them, takes as long to load as everything else that a small product needs.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

from distributed import Scheduler
from distributed.versions import BOKEH_REQUIREMENT
from tornado import web

PAGES = "distributed.dashboard.scheduler"
"""Dask's module of pages; it loads Bokeh."""


class LoadingHandler(web.RequestHandler):
    """Loads the pages, and lets the browser ask again."""

    def initialize(self, load: Callable[[], Any]) -> None:
        """Take what Tornado passes to each handler."""
        self.load = load

    async def get(self) -> None:
        """Answer once the pages are there, or say what is missing."""
        try:
            await self.load()
        except ImportError as error:
            self.set_status(503)
            self.finish(f"Dask needs {BOKEH_REQUIREMENT} for its pages ({error}): pip install '{BOKEH_REQUIREMENT}'")
            return
        self.redirect(self.request.uri or "/status")


class LatePages(web.Application):
    """Takes every request that nobody else answers, until Dask's pages are there.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Started without a dashboard.
    loaded : callable
        Called with the scheduler once the pages are there.
    """

    def __init__(self, scheduler: Scheduler, loaded: Callable[[Scheduler], None]) -> None:
        self.scheduler, self.loaded = scheduler, loaded
        self._loading = asyncio.Lock()
        super().__init__([(r".*", LoadingHandler, {"load": self.load})])

    async def load(self) -> None:
        """Load the pages in a thread, and put them in the place of this application."""
        applications = self.scheduler.http_application.applications
        async with self._loading:
            if self not in applications:
                return
            pages = await asyncio.to_thread(importlib.import_module, PAGES)
            applications.remove(self)
            scheduler: Any = self.scheduler
            pages.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix="")
            self.loaded(self.scheduler)


def load_pages_late(scheduler: Scheduler, loaded: Callable[[Scheduler], None]) -> None:
    """Let a scheduler that was started without a dashboard load Dask's pages on the first request for one.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Of this process.
    loaded : callable
        Called with the scheduler once the pages are there.
    """
    scheduler.http_application.add_application(LatePages(scheduler, loaded))
