"""Calls to workers that outlive the death of a worker, and one line for the loss of the scheduler."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from distributed import Client, Scheduler, WorkerPlugin
from distributed.client import ClosedClientError
from distributed.comm.core import CommClosedError
from distributed.core import clean_exception
from distributed.protocol import pickle
from distributed.scheduler import KilledWorker

from spdist.errors import SpdistError

logger = logging.getLogger("spdist")

Result = TypeVar("Result")

ATTEMPTS = 5
"""How often a call is repeated for workers that are there and do not answer."""
PAUSE_SECONDS = 0.5
"""Seconds between two attempts."""
CLEAN_UP_SECONDS = 3.0
"""Seconds that cleaning up on the workers may take."""
STIMULUS = "spdist-silent-worker"
"""Cause of the removal of a worker, for Dask's logs."""
LOST = CommClosedError, CancelledError, KilledWorker, ClosedClientError
"""Exceptions of Dask that say that a worker, or the scheduler, is gone."""


def describe(error: BaseException) -> str:
    """Return the message of an exception, or its type if it has none.

    Examples
    --------
    >>> describe(CommClosedError()), describe(OSError("no route"))
    ('CommClosedError', 'OSError: no route')
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_cause(error: BaseException) -> BaseException:
    """Return the exception from which others were raised in turn."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def is_connected(client: Client) -> bool:
    """Whether a client has its scheduler; the futures of one that had to connect again are lost."""
    return bool(client.status == "running")


def started_here(client: Client) -> bool:
    """Whether this process started the client's workers, on this host and with its own interpreter."""
    return getattr(client, "cluster", None) is not None


def lost_scheduler(client: Client) -> SpdistError:
    """Return the error to raise when the scheduler is gone."""
    address = getattr(client.scheduler, "address", None) or client._start_arg or "its address"
    return SpdistError(
        f"the scheduler at {address} ended, or was restarted: finished rows are kept; start a scheduler and "
        f"workers, and continue with --resume"
    )


@contextmanager
def clear_of_dask(client: Client) -> Iterator[None]:
    """Replace Dask's exceptions for lost workers and schedulers by one line; others pass.

    Raises `SpdistError` if workers or the scheduler were lost.
    """
    try:
        yield
    except SpdistError:
        raise
    except (*LOST, OSError) as error:
        if not is_connected(client):
            raise lost_scheduler(client) from error
        if isinstance(error, LOST):
            raise SpdistError(f"workers were lost ({describe(error)}): continue with --resume") from error
        raise


def register(client: Client, plugin: WorkerPlugin, name: str) -> None:
    """Register a plugin on all workers, also if some of them die meanwhile.

    The scheduler sends it to workers that join later. If a worker dies while it loads the plugin, Dask gives up on all;
    then the plugin is sent again to the workers that are left, which replace the plugin they have.

    Raises `SpdistError` if the scheduler is gone, or a worker is there and does not take the plugin.
    Raises `Exception` whatever the plugin raised on a worker.
    """
    try:
        client.register_plugin(plugin, name=name)
        return
    except (*LOST, OSError) as error:
        if not is_connected(client):
            raise lost_scheduler(client) from error
        logger.warning("a worker was lost while it loaded the product (%s): the others load it again", describe(error))
    failed: dict[str, Exception] = {}
    for _ in range(ATTEMPTS):
        failed = _add_plugin(client, plugin, name, failed or None)
        time.sleep(PAUSE_SECONDS if failed else 0.0)
        failed = {address: failed[address] for address in failed.keys() & set(addresses(client))}
        if not failed:
            return
    address, reason = failed.popitem()
    raise SpdistError(
        f"worker {address} does not load the product ({describe(reason)}): stop it, and continue with --resume"
    )


def _add_plugin(client: Client, plugin: WorkerPlugin, name: str, workers: Iterable[str] | None) -> dict[str, Exception]:
    """Send a plugin to some workers, by default all; return what went wrong on the way, by address."""
    scheduler: Any = client.scheduler
    message = {"op": "plugin-add", "plugin": pickle.dumps(plugin), "name": name}
    workers = None if workers is None else list(workers)
    try:
        answers = client.sync(scheduler.broadcast, msg=message, workers=workers, on_error="return_pickle")
    except (*LOST, OSError) as error:
        if is_connected(client):
            raise
        raise lost_scheduler(client) from error
    for answer in answers.values():
        if not isinstance(answer, bytes) and answer["status"] == "error":
            _, problem, trace = clean_exception(answer["exception"], answer["traceback"])
            assert problem is not None
            raise problem.with_traceback(trace)
    return {address: pickle.loads(answer) for address, answer in answers.items() if isinstance(answer, bytes)}


def unregister(client: Client, name: str) -> None:
    """Remove a plugin from all workers; ignore failures, as workers that end drop the plugin anyway.

    `name`: name under which the plugin was registered.
    """
    if not is_connected(client):
        return
    try:
        client.sync(client._unregister_worker_plugin, name=name, callback_timeout=CLEAN_UP_SECONDS)
    except (*LOST, OSError) as error:  # a worker, or the scheduler, has just died or does not answer
        logger.info("the product was not removed from all workers: %s", describe(error))
    except Exception as error:  # whatever a worker raised
        logger.warning("a worker did not remove the product: %s", describe(error))


def addresses(client: Client) -> list[str]:
    """Return the addresses of the workers that the scheduler knows.

    Raises `SpdistError` if the scheduler is gone.
    """
    info = client.scheduler_info(n_workers=-1) if is_connected(client) else {}
    if not is_connected(client) or "workers" not in info:
        raise lost_scheduler(client)
    return list(info["workers"])


def remove_worker(client: Client, worker: str, seconds: float) -> None:
    """Let the scheduler forget a worker, within some seconds: its tasks run elsewhere, its late results are ignored.

    The worker gets no message to end: it learns from its next heartbeat that it was removed, and its nanny starts it
    anew (`silence.come_back`). A scheduler without spdist ends the worker, and its nanny.
    """
    scheduler: Any = client.scheduler
    with suppress(*LOST, OSError):
        try:
            client.sync(client._run_on_scheduler, _forget, worker, callback_timeout=seconds)
        except (ImportError, ValueError):
            unregister = {"address": worker, "stimulus_id": STIMULUS, "expected": True}
            client.sync(scheduler.unregister, **unregister, callback_timeout=seconds)


async def _forget(worker: str, dask_scheduler: Scheduler) -> None:
    """Remove a worker; runs on the scheduler, as no message of Dask leaves the worker alive."""
    await dask_scheduler.remove_worker(worker, stimulus_id=STIMULUS, expected=True, close=False)


def persistent(call: Callable[[], Result], what: str) -> Result:
    """Repeat a call as long as it fails because a process died while it started, a few times.

    `what`: what the call does, for the messages: "workers did not start".
    Returns what the call returns.
    Raises `SpdistError` if every attempt failed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except (RuntimeError, *LOST, TimeoutError) as error:  # Dask's "Nanny failed to start" is a RuntimeError
            if attempt == ATTEMPTS:
                raise SpdistError(
                    f"{what} ({describe(first_cause(error))}): start fewer (workers=1), or raise the limits of "
                    f"processes and memory (ulimit -a)"
                ) from error
            logger.warning("%s (%s): trying again, attempt %d of %d", what, describe(error), attempt + 1, ATTEMPTS)
            time.sleep(PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Keep the levels of the caller's log handlers, which a cluster that is started silences with its own."""
    levels = [(handler, handler.level) for handler in logging.root.handlers]
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


SLOW_FOLDER = "Creating scratch directories is taking"
"""How a warning of Dask's begins, about folders that workers make and never use."""


@contextmanager
def silenced_dask() -> Iterator[None]:
    """Let Dask log nothing in this process during a ``with`` block: what matters is an error of the package."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "distributed.gc")]
    levels = [logger.level for logger in loggers]
    warnings.filterwarnings("ignore", SLOW_FOLDER)
    for one in loggers:
        one.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


def within(seconds: float, call: Callable[[], Result], what: str) -> Result:
    """Return what a call returns; give up on it after a while, and leave it to its daemon thread.

    `what`: what the call does, for the message: "workers did not start".
    Raises `SpdistError` if the call took too long.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise  # the call's own
        raise SpdistError(
            f"{what} within {seconds:.0f} s: look for what stops them, as a full disk or a hung one"
        ) from None
