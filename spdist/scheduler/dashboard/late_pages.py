"""Dask's own pages on a scheduler of this process, loaded on the first request for one of them.

Loading Bokeh, which draws them, takes as long as loading everything else that a small product needs.
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
    """Loads the pages, then redirects the browser to the requested page."""

    def initialize(self, load: Callable[[], Any]) -> None:
        """Take what Tornado passes to each handler."""
        self.load = load

    async def get(self) -> None:
        """Answer once the pages are loaded; if Bokeh is missing, say how to install it."""
        try:
            await self.load()
        except ImportError as error:
            self.set_status(503)
            self.finish(f"Dask needs {BOKEH_REQUIREMENT} for its pages ({error}): pip install '{BOKEH_REQUIREMENT}'")
            return
        self.redirect(self.request.uri or "/status")


class LatePages(web.Application):
    """Answers every request that no other application answers, until Dask's pages are loaded.

    `scheduler`: started without a dashboard.
    `loaded`: called with the scheduler once the pages are loaded.
    """

    def __init__(self, scheduler: Scheduler, loaded: Callable[[Scheduler], None]) -> None:
        self.scheduler, self.loaded = scheduler, loaded
        self._loading = asyncio.Lock()
        super().__init__([(r".*", LoadingHandler, {"load": self.load})])

    async def load(self) -> None:
        """Load the pages in a thread, and replace this application by them."""
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

    `scheduler`: of this process.
    `loaded`: called with the scheduler once the pages are loaded.
    """
    scheduler.http_application.add_application(LatePages(scheduler, loaded))
