"""Messages of a run, sent to the scheduler of a client. A failure here never stops a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from distributed import Client
from distributed.protocol.pickle import dumps

from spdist.scheduler.dashboard.messages import RUNS, Message
from spdist.scheduler.executors.supervision.calls import LOST, describe, is_connected

CALL_SECONDS = 5.0
"""Seconds that the scheduler may take to hear that a run began, or ended."""

logger = logging.getLogger("spdist")


def publish(client: Client, messages: Sequence[Message]) -> None:
    """Send messages; the first of a run also lets the scheduler collect them. Nobody waits for progress or an event."""
    kinds = [message["what"] for message in messages]
    if kinds in (["progress"], ["event"]):
        if client.loop is not None:
            client.loop.add_callback(_log, client, messages[0])
    elif kinds == ["start"]:
        try:
            client.sync(_register, client, callback_timeout=CALL_SECONDS)
            _send(client, messages)
        except (*LOST, OSError, ImportError, ValueError, TypeError) as error:  # no spdist there, or no answer
            logger.info("the scheduler shows no page /spdist for this run: %s", describe(error))
    elif is_connected(client):
        with contextlib.suppress(*LOST, OSError):
            _send(client, messages)


def _send(client: Client, messages: Sequence[Message]) -> None:
    for message in messages:
        client.sync(_log, client, message, callback_timeout=CALL_SECONDS)


async def _register(client: Client) -> None:
    """Install the collector on the scheduler; imported here because only a scheduler needs its page."""
    from spdist.scheduler.dashboard.collector import RunCollector

    scheduler: Any = client.scheduler
    plugin = dumps(RunCollector())
    await scheduler.register_scheduler_plugin(plugin=plugin, name=RunCollector.name, idempotent=True)


async def _log(client: Client, message: Message) -> None:
    """Publish a message; ignore a lost scheduler, which the driver reports."""
    with contextlib.suppress(*LOST, OSError):
        scheduler: Any = client.scheduler
        await scheduler.log_event(topic=RUNS, msg=message)


def totals_of_lost(client: Client, name: str) -> list[dict[str, tuple[float, int, int, float]]]:
    """Return what the scheduler knows of the stages of workers that a run has lost; see `Runs.totals_of_lost`."""
    with contextlib.suppress(*LOST, OSError, ImportError, AttributeError, KeyError):  # a scheduler without our page
        found: list[dict[str, tuple[float, int, int, float]]] = client.run_on_scheduler(_totals_of_lost, name)
        return found
    return []


def _totals_of_lost(name: str, dask_scheduler: Any) -> list[dict[str, tuple[float, int, int, float]]]:
    from spdist.scheduler.dashboard.collector import RunCollector

    collector: RunCollector = dask_scheduler.plugins[RunCollector.name]
    return collector.runs.totals_of_lost(name)
