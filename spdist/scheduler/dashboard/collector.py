"""The scheduler plugin that collects the messages of runs, and adds the page and the metrics to the HTTP server."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from spdist.scheduler.dashboard.messages import RUNS, TIMINGS
from spdist.scheduler.dashboard.routes import add_page
from spdist.scheduler.dashboard.runs import Runs

GROUPS = "preprocess", "multiply", "merge", "hold", "commit", "assemble"
"""Names of the groups of tasks that depend on others, each followed by the name of the job."""

logger = logging.getLogger("spdist")


class RunCollector(SchedulerPlugin):
    """Collects the newest runs of one scheduler; keeps Dask's page of groups working while they run."""

    name = "spdist-runs"
    idempotent = True  # one for all clients of a scheduler

    async def start(self, scheduler: Scheduler) -> None:
        """Serve the page ``/spdist``, and metrics if prometheus-client is installed."""
        self.runs = Runs(scheduler)
        add_page(scheduler, self.runs)
        if importlib.util.find_spec("prometheus_client") is not None:
            from spdist.scheduler.dashboard.metrics import serve_metrics

            serve_metrics(self.runs)

    def log_event(self, topic: str, msg: Any) -> None:
        """Fold one event; Dask calls this. An event of another version must not disturb the scheduler."""
        if topic in (RUNS, TIMINGS):
            try:
                self.runs.fold(topic, msg)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                logger.debug("ignored an event of topic %s in an unknown format: %r", topic, error)

    def update_graph(self, scheduler: Scheduler, *, keys: set[Any], **kwargs: Any) -> None:
        """Cut the cycle of task groups that parts of split blocks form: Dask's page of groups fails on cycles."""
        for name in {str(key[0]) for key in keys if isinstance(key, tuple)}:
            if name.startswith("preprocess-") and name in scheduler.task_groups:
                scheduler.task_groups[name].dependencies.clear()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Remove a task group from the dependencies of others before Dask removes the group, which breaks its page.

        Dask removes groups early here, because only blocks in flight are tasks.
        """
        if finish != "forgotten" or not isinstance(key, tuple):
            return
        name = str(key[0])
        job = name.rpartition("-")[2]
        groups = self.runs.scheduler.task_groups
        gone = groups.get(name) if job in self.runs.by_name else None
        if gone is not None and all(state == "forgotten" or not count for state, count in gone.states.items()):
            for other in filter(None, (groups.get(f"{stage}-{job}") for stage in GROUPS)):
                other.dependencies.discard(gone)
