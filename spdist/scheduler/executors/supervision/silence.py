"""Workers without a sign of life: others get their blocks, they write nothing more, and they start anew.

A network that is cut leaves its connections open; the system gives them up after half a minute, and Dask then ends the
worker for good. Here the client takes a worker's blocks away after `MonitorTuning.silent_seconds` (`SignsOfLife`). A
worker asks its scheduler before it writes to C (`wait_until_known`), so that it has stopped to write by then: every
Zarr chunk keeps one writer. When the scheduler can be reached again, the worker's nanny starts it anew (`come_back`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from distributed import Reschedule, Worker
from distributed.comm.addressing import get_address_host_port
from distributed.utils import sync
from distributed.worker import WORKER_ANY_RUNNING

logger = logging.getLogger("spdist")

KNOWN_SECONDS = 5.0
"""Seconds for which a worker may begin to write after its scheduler said that it knows the worker: half of the silence
after which others get its blocks, so that a write that has begun can end."""
ASK_SECONDS = 2.0
"""Seconds to wait for an answer of the scheduler, and for a connection to it."""
REJOIN_SECONDS = 600.0
"""Seconds in which a scheduler that was out of reach must be back; a worker that waited for longer ends."""
CUT = "worker-handle-scheduler-connection-broken", "worker-heartbeat-missing"
"""Dask's reasons to close a worker that was cut off, or that its scheduler has removed."""

_KNOWN_AT: dict[str, float] = {}
"""When each worker of this process last asked its scheduler and was known, by address; in `time.monotonic` seconds."""


class SignsOfLife:
    """Tells from times of heartbeats which workers are silent while others are heard.

    `now`: seconds of the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._heard: Mapping[str, float] = {}
        self._quiet: dict[str, float] = {}
        self._all_quiet = 0.0

    def find_silent(self, heard: Mapping[str, float], held: Mapping[str, int], now: float, seconds: float) -> list[str]:
        """Return the workers that held blocks and were silent for `seconds`; an empty list if nobody is heard.

        `heard` has the scheduler's time of each worker's last heartbeat. If nobody is heard, the scheduler hangs. A
        worker without blocks may load kernels, and sends no heartbeat meanwhile. A long pause between two calls counts
        little: this process, or the whole machine, was stopped.
        """
        passed, self._now = min(now - self._now, seconds / 4), now
        speaking = {address for address, at in heard.items() if at != self._heard.get(address)}
        self._heard = dict(heard)
        self._all_quiet = 0.0 if speaking else self._all_quiet + passed
        self._quiet = {
            address: self._quiet.get(address, 0.0) + passed if held.get(address) and address not in speaking else 0.0
            for address in heard
        }
        if self._all_quiet > seconds / 4:
            return []
        return [address for address, quiet in self._quiet.items() if quiet >= seconds]


def wait_until_known(worker: Worker) -> None:
    """Return once the scheduler has said, within the last `KNOWN_SECONDS`, that it knows this worker.

    Raises `Reschedule` if the scheduler has removed the worker, or the worker ends.
    """
    while (asked := time.monotonic()) - _KNOWN_AT.get(worker.address, -KNOWN_SECONDS) >= KNOWN_SECONDS:
        with contextlib.suppress(OSError):  # no connection, or no answer in time
            if worker.address not in sync(worker.loop, _known_to_scheduler, worker):
                raise Reschedule
            _KNOWN_AT[worker.address] = asked
        if worker.status not in WORKER_ANY_RUNNING:
            raise Reschedule


async def _known_to_scheduler(worker: Worker) -> dict[str, int]:
    """Ask the scheduler which it knows of this one worker."""
    scheduler: Any = worker.scheduler
    async with asyncio.timeout(ASK_SECONDS):
        return dict(await scheduler.ncores(workers=[worker.address]))


def come_back(worker: Worker) -> None:
    """Have a worker's nanny start it anew after it was cut off from its scheduler; Dask would end both for good."""
    if not worker.nanny or "close" in vars(worker):
        return
    close: Any = worker.close

    async def close_or_restart(*args: Any, nanny: bool = True, reason: str = "worker-close", **options: Any) -> Any:
        if nanny and reason in CUT and await _is_reachable_again(worker):
            nanny = False
            logger.warning(
                "worker %s was cut off from its scheduler %s, which can be reached again: the worker starts anew",
                worker.address, worker.scheduler.address,
            )  # fmt: skip
        return await close(*args, nanny=nanny, reason=reason, **options)

    worker.close = close_or_restart  # type: ignore[method-assign]


async def _is_reachable_again(worker: Worker) -> bool:
    """Wait until the scheduler can be reached; return False if it has ended, stays away, or lets the worker go."""
    host, port = get_address_host_port(worker.scheduler.address)
    deadline = time.monotonic() + REJOIN_SECONDS
    while time.monotonic() < deadline:
        await asyncio.sleep(ASK_SECONDS / 2)  # Dask's message that ends a worker may be on its way
        if worker.status not in WORKER_ANY_RUNNING:
            return False
        try:
            async with asyncio.timeout(ASK_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return False
        except OSError:
            continue
        writer.close()
        return True
    return False
