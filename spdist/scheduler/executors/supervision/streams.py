"""Connections that are open and carry nothing: a proxy or a tunnel that hangs takes what is sent, and delivers nothing.

Dask sends tasks and their ends over one connection for each client and each worker, its streams, and asks questions
over others. Nobody notices a stream that is silent. Where nothing finishes for a while, words are sent over the streams
that must come back; a scheduler or a worker that answers questions meanwhile has lost its stream. Workers fetch results
from each other, too, without a limit of time.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker

from spdist.scheduler.executors.supervision.calls import LOST, is_connected, remove_worker

logger = logging.getLogger("spdist")


@dataclass(frozen=True)
class StreamTuning:
    """How streams are tried."""

    tries: int = 6  # words that are sent; a stream is lost if none of them came back
    pause_seconds: float = 2.0  # seconds between two words
    call_seconds: float = 5.0  # seconds that a question may take


TUNING = StreamTuning()


Fetches = set[tuple[str, Any]]
"""Workers, and tasks whose results they are fetching from other workers."""


@dataclass
class StreamFindings:
    """What a client learned of its workers by several questions."""

    answered: set[str]  # workers that answered each time
    lacking: dict[str, set[Any]]  # tasks that were given to a worker and never came to it, by worker
    fetching: Fetches  # fetches that were under way each time


def repair_streams(client: Client, before: Fetches | None = None, tuning: StreamTuning | None = None) -> Fetches:
    """Try the connections of a client and of its workers; give up those that carry nothing.

    A client without its stream has lost its scheduler, which ends the run. A worker without its stream, or one that
    still fetches what it fetched when nothing had finished the time before, is removed: its tasks run elsewhere, and
    its nanny starts it anew.

    `client`: of a scheduler that this process did not start.
    `before`: what the call before returned, if nothing has finished since.
    """
    if client.cluster is not None or not is_connected(client):
        return set()
    tuning = tuning or TUNING
    try:
        with _words(client) as (topic, heard):
            found = _question_workers(client, topic, tuning)
    except (*LOST, OSError):  # the scheduler does not answer at all: it may be busy, or stopped
        return set()
    if "" not in heard:
        logger.warning("the scheduler answers questions, but tells this client nothing any more: giving it up")
        _abort(client)
        return set()
    stuck = {worker for worker, _ in found.fetching & (before or set())}
    for worker in sorted(found.answered):
        if worker not in heard or found.lacking.get(worker) or worker in stuck:
            what = "hears another one" if worker in stuck else "hears and is heard"
            logger.warning(
                "worker %s answers questions, but no longer %s: a connection carries nothing; the worker is removed, "
                "and its blocks are computed again", worker, what,
            )  # fmt: skip
            remove_worker(client, worker, tuning.call_seconds)
    return found.fetching


@contextlib.contextmanager
def _words(client: Client) -> Iterator[tuple[str, set[str]]]:
    """Yield a topic for words, and the set of those who were heard on it: workers, and "" for the client itself."""
    topic, heard = f"spdist-words-{uuid.uuid4().hex[:12]}", set[str]()
    client.subscribe_topic(topic, lambda event: heard.add(event[1].get("worker", "")))
    try:
        yield topic, heard
    finally:
        if is_connected(client):
            client.unsubscribe_topic(topic)


def _question_workers(client: Client, topic: str, tuning: StreamTuning) -> StreamFindings:
    """Send words over the streams, and ask for what each worker knows, several times."""
    scheduler: Any = client.scheduler
    found: StreamFindings | None = None
    for _ in range(tuning.tries):
        client.sync(scheduler.log_event, topic=topic, msg={}, callback_timeout=tuning.call_seconds)
        given = client.sync(scheduler.processing, workers=None, callback_timeout=tuning.call_seconds)
        with contextlib.suppress(TimeoutError):  # one worker may be stopped
            said = client.sync(
                client._run, speak_and_list_tasks, topic, on_error="ignore", callback_timeout=tuning.call_seconds
            )
            lacking = {worker: set(given.get(worker, ())) - set(known) for worker, (known, _) in said.items()}
            fetching = {(worker, key) for worker, (_, fetched) in said.items() for key in fetched}
            if found is None:
                found = StreamFindings(set(said), lacking, fetching)
            found.answered &= said.keys()
            found.lacking = {worker: keys & found.lacking.get(worker, set()) for worker, keys in lacking.items()}
            found.fetching &= fetching
        time.sleep(tuning.pause_seconds)
    return found or StreamFindings(set(), {}, set())


def speak_and_list_tasks(topic: str, dask_worker: Worker) -> tuple[list[Any], list[Any]]:
    """Send a word over the stream of this worker, and return the tasks that it knows and fetches; for `Client.run`.

    `dask_worker`: passed by Dask, which knows this parameter by its name.
    """
    dask_worker.log_event(topic, {"worker": dask_worker.address})
    tasks = dask_worker.state.tasks
    return list(tasks), [key for key, task in tasks.items() if task.state == "flight"]


def _abort(client: Client) -> None:
    """Break the stream of a client, which ends whatever waits for it."""
    stream: Any = client.scheduler_comm
    if stream is not None and client.loop is not None:
        client.loop.add_callback(stream.comm.abort)
