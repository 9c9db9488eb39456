"""The class of workers that are started here: they open no HTTP port, which every user of the machine could read."""

from __future__ import annotations

from typing import Any

from distributed import Worker


class PagelessWorker(Worker):
    """A worker without pages and metrics of its own; the scheduler's pages show it."""

    def start_http_server(
        self, routes: Any, dashboard_address: str | None, default_port: int = 0, ssl_options: Any = None
    ) -> None:
        """Start nothing: Dask's own would listen on a network, whatever the configuration says."""
