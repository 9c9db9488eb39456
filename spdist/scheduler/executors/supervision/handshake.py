"""The handshake with workers before anything is written: equal spdist, enough memory, equal A, B and C.

One call asks all workers at once; workers that this process started are only asked for their memory, because they have
its software and its file systems. A worker that cannot do the job would otherwise show it late and badly: as an error
from unpickling, as restarts without end, or as Zarr chunks of C in a folder that nobody else sees.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed import Client
from distributed.protocol import pickle

from spdist.errors import InputError, SpdistError
from spdist.foundation import memory
from spdist.foundation.units import format_bytes
from spdist.scheduler.execution.worker import CONTEXTS
from spdist.scheduler.executors.supervision import probe
from spdist.scheduler.executors.supervision.calls import (
    ATTEMPTS,
    LOST,
    PAUSE_SECONDS,
    addresses,
    describe,
    is_connected,
    lost_scheduler,
    started_here,
)
from spdist.scheduler.executors.supervision.nonce import VISIBLE_SECONDS, NonceFolder
from spdist.storage.chunked_array import ChunkedArray
from spdist.storage.matrix import StoredMatrix, open_matrix
from spdist.storage.parts.arrays import arrays_of
from spdist.stores.registry import at

logger = logging.getLogger("spdist")

ANSWER_SECONDS = 60.0
"""Seconds in which workers that this process started must answer: a busy worker answers between two tasks, a hung file
system never. For others `clusters.client` says how long."""
LEAST_ROOM = 16 << 20
"""Bytes below which no product is planned for what a worker has left."""
POLL_SECONDS = 0.1
"""Seconds between two looks for workers while no worker is there."""
EXACT = "dask", "distributed"
"""Packages whose versions must be equal."""
MINOR = "python", "zarr"
"""Packages whose versions must be equal up to the minor version."""
STEALS = (
    "the scheduler has distributed.scheduler.work-stealing=True, wanted is False: it moves blocks to workers for whose "
    "memory they were not planned; start it with DASK_CONFIG=deploy/dask.yaml"
)
_CALL = "(exec(memory, scope), exec(source, scope), scope['answer'](expected, question))[2]"

Sums = tuple[tuple[int, ...], ...]
"""Checksums of some Zarr chunks of each array of a matrix."""


class StorageView(NamedTuple):
    """What a worker sees of the job's storage."""

    problem: str  # empty if the worker sees what the client sees
    nonce: str  # name of the file that the worker wrote next to C; empty if there is no C


@dataclass(frozen=True)
class StorageQuestion:
    """What a worker is asked about the job's storage."""

    # operands and mask: what each is called, as the client sees it, and some of its checksums
    matrices: tuple[tuple[str, StoredMatrix, Sums], ...] = ()
    target: str = ""  # where C goes; empty if C is not stored, or not yet known

    @staticmethod
    def about(named: Iterable[tuple[str, StoredMatrix]]) -> StorageQuestion:
        """Return the question about some matrices; matrices in the memory of this process are left out."""
        return StorageQuestion(tuple((name, m, sums_of(m)) for name, m in named if not at(m.url).is_private))


def sums_of(m: StoredMatrix) -> Sums:
    """Return checksums of each array: of the first, the middle and the last Zarr chunk, and so of the parts."""

    def sums(array: ChunkedArray) -> tuple[int, ...]:
        found = [(one, k) for one in _some(arrays_of(array)) for k in _some(range(one.nchunks))]
        return tuple(int(one.stored_checksums(k, k + 1)[0]) for one, k in found)

    return sums(m.indptr), sums(m.indices), sums(m.data)


def _some(things: Sequence[Any]) -> list[Any]:
    """Return the first, the middle and the last one."""
    return [things[i] for i in sorted({0, len(things) // 2, len(things) - 1})] if things else []


def _is_same(one: StoredMatrix, other: StoredMatrix) -> bool:
    """Whether two matrices, or rows of them, are read from the same arrays."""
    names = ("indptr", "indices", "data")
    return one.ncols == other.ncols and all(
        arrays_of(getattr(one, name)) == arrays_of(getattr(other, name)) for name in names
    )


def inspect_storage(question: StorageQuestion) -> StorageView:
    """Compare the operands that this worker sees with the client's, and write a file next to C."""
    for name, expected, sums in question.matrices:
        try:
            found = open_matrix(expected.url)
            is_same = _is_same(found, expected) and sums_of(found) == sums
        except (SpdistError, OSError) as error:
            return StorageView(f"cannot read {name}: {error}", "")
        if not is_same:
            return StorageView(f"sees another matrix than the client as {name} at {expected.url}", "")
    if not question.target:
        return StorageView("", "")
    try:
        return StorageView("", NonceFolder(question.target).write())
    except (OSError, ValueError, ImportError) as error:
        return StorageView(f"cannot write next to C, to the folder of {question.target}: {describe(error)}", "")


class Handshake:
    """Knows which workers fit a job, and asks those that it does not know.

    `name`: of the job; workers that join get blocks when they have it. Empty if no job is installed.
    `accepted, refused`: addresses.
    """

    def __init__(self, client: Client, name: str = "") -> None:
        self.client, self.name = client, name
        self._loading: set[str] = set()
        self.accepted: set[str] = set()
        self.refused: set[str] = set()
        self._need = 0
        self._question: StorageQuestion | None = None

    def check_installation(self) -> None:
        """Refuse workers, and a scheduler, that have another spdist than this client; ask nothing of storage.

        Raises `InputError` Names a worker, and what to install.
        """
        if not started_here(self.client):
            self._refuse(self._check_scheduler() | self._find_problems(addresses(self.client)))

    def check(self, need: int, question: StorageQuestion) -> None:
        """Refuse workers that do not fit the job; wait until there is a worker.

        `need`: bytes of memory that the plan needs on a worker, besides what the idle worker takes.
        Raises `InputError` Names a worker, what is wrong with it, and the remedy.
        Raises `SpdistError` if no worker answers.
        """
        self._need, self._question = need, None if started_here(self.client) else question
        self.accepted.clear()
        self._refuse(self._check_scheduler())
        for _ in range(ATTEMPTS):
            self._refuse(self._find_problems(self._wait_for_workers()))
            if self.accepted:
                return
            time.sleep(PAUSE_SECONDS)
        raise SpdistError("no worker answers: look at the workers' logs, and continue with --resume")

    def admit(self, workers: Sequence[str]) -> list[str]:
        """Return the workers that fit; ask those that joined, and warn of those that do not fit."""
        self.accepted &= set(workers)
        self.refused &= set(workers)
        new = [address for address in workers if address not in self.accepted | self.refused]
        for problem in (self._find_problems(new) if new else {}).values():
            logger.warning("%s; it is not used", problem)
        self._loading = self.accepted & (self._loading | set(new)) if self.name else set()
        if self._loading:  # kernels, in the thread that sends heartbeats
            has = self.client.run(has_job, self.name, workers=list(self._loading), on_error="ignore")
            self._loading -= {address for address, loaded in has.items() if loaded}
        return [address for address in workers if address in self.accepted - self._loading]

    def _wait_for_workers(self) -> list[str]:
        while not (found := addresses(self.client)):
            time.sleep(POLL_SECONDS)
        return found

    def _refuse(self, problems: dict[str, str]) -> None:
        if problems:
            others = len(problems) - 1
            first = problems[min(problems)]
            raise InputError(first + (f" (and {others:,} more workers do not fit)" if others else ""))

    def _find_problems(self, workers: list[str]) -> dict[str, str]:
        """Ask workers and remember which fit; return the problems of the others, by address.

        Workers that died meanwhile are in neither group.
        """
        question = b"" if self._question is None else pickle.dumps(functools.partial(inspect_storage, self._question))
        folder = NonceFolder(self._question.target) if self._question is not None and self._question.target else None
        try:
            if folder is not None:
                folder.clear()  # what a killed run left
            answers = ask_workers(self.client, workers, question)
            problems = self._problems_in(answers, folder)
        finally:
            if folder is not None:
                folder.clear()
        self.refused |= problems.keys()
        self.accepted |= {one for one, answer in answers.items() if isinstance(answer, dict)} - problems.keys()
        return problems

    def _problems_in(self, answers: dict[str, Any], folder: NonceFolder | None) -> dict[str, str]:
        """Return the problems of workers, by address, from their answers."""
        infos = self.client.scheduler_info(n_workers=-1).get("workers", {})
        deadline = time.monotonic() + VISIBLE_SECONDS
        problems = {}
        for address, answer in answers.items():
            if isinstance(answer, (*LOST, OSError)):
                continue  # it died
            if isinstance(answer, Exception):
                problem = f"does not answer as it should ({describe(answer)}): look at its log"
            elif "error" in answer:
                problem = f"on {answer['host']} cannot load spdist ({answer['error']}): install there what is missing"
            else:
                problem = (
                    ("" if started_here(self.client) else installation_problem(answer))
                    or memory_problem(answer, infos.get(address, {}), self._need)
                    or storage_problem(answer, folder, deadline)
                )
            if problem:
                problems[address] = f"worker {address} {problem}"
        return problems

    def _check_scheduler(self) -> dict[str, str]:
        """Return the problem of the scheduler, if it is another process that has spdist."""
        if started_here(self.client):
            return {}
        try:
            answer = self.client.run_on_scheduler(eval, _CALL, _names(b"", probe.source_digest()))
        except (*LOST, OSError) as error:
            raise lost_scheduler(self.client) from error
        if not answer["source"]:  # the client has said that it takes no plugin
            if answer["steals"]:
                logger.warning(STEALS)
            return {}
        problem = installation_problem(answer)
        return {"": f"the scheduler {problem}"} if problem else {}


def has_job(name: str) -> bool:
    """Whether this worker has loaded a job; for `Client.run`."""
    return name in CONTEXTS


def _names(question: bytes, expected: str) -> dict[str, Any]:
    """Return the names that `_CALL` uses."""
    lines = inspect.getsource(probe).splitlines(keepends=True)
    source = "".join(line for line in lines if not line.startswith("from spdist"))  # what `memory` has defined
    texts = {"memory": inspect.getsource(memory), "source": source}
    return {**texts, "scope": {}, "expected": expected, "question": question}


def ask_workers(client: Client, workers: list[str], question: bytes) -> dict[str, Any]:
    """Ask workers `probe.answer`, in one call.

    Returns by address: the answer, or an exception.
    Raises `SpdistError` if a worker does not answer in time, or the scheduler is gone.
    """
    expected = "" if started_here(client) else probe.source_digest()
    seconds = ANSWER_SECONDS if started_here(client) else None  # of other clusters the client knows how long it waits
    run = {"workers": workers, "on_error": "return", "callback_timeout": seconds}
    try:
        return dict(client.sync(client._run, eval, _CALL, _names(question, expected), **run))
    except (*LOST, OSError) as error:
        if not is_connected(client):
            raise lost_scheduler(client) from error
        infos = client.scheduler_info(n_workers=-1).get("workers", {})
        silent = min(infos, key=lambda address: infos[address].get("last_seen", 0.0), default="")
        raise SpdistError(
            f"worker {silent} does not answer in time ({describe(error)}): its storage may hang; stop it, and continue "
            f"with --resume"
        ) from error


def installation_problem(answer: dict[str, Any]) -> str:
    """Return how a process's spdist, Dask, Zarr and Python differ from this client's; empty if they fit."""
    own, found = probe.versions(), answer["versions"]
    if not answer["source"]:
        return f"has no spdist (Python {found['python']} on {answer['host']}): install there what the client has"
    if answer["source"] != probe.source_digest():
        return (
            f"has spdist {found.get('spdist', '')} of another source ({answer['source']}), the client has "
            f"{own.get('spdist', '')} ({probe.source_digest()}): install the same on both, and restart it"
        )
    for name in (*EXACT, *MINOR):
        theirs, ours = found.get(name, "none"), own.get(name, "none")
        length = None if name in EXACT else 2
        if theirs.split(".")[:length] != ours.split(".")[:length]:
            return f"has {name} {theirs}, the client has {ours}: install the same on both"
    return ""


def memory_problem(answer: dict[str, Any], info: dict[str, Any], need: int) -> str:
    """Return why a worker has too little memory, or no threads; empty if it fits.

    `answer`: from `probe.answer`.
    `info`: what the scheduler knows of the worker.
    `need`: bytes that the plan needs, besides what the idle worker takes.
    """
    if info.get("nthreads", 1) < 1:
        return "has no threads: start it with --nthreads 1 or more"
    limit, of, usable = answer["host_limit"], "of its host or control group", 1.0
    share = int(answer["memory_share"] * (info.get("memory_limit") or 0))
    if 0 < share < limit:
        usable = answer["memory_share"]
        limit, of = share, f"({answer['memory_share']:.0%} of its --memory-limit, where Dask pauses it)"
    if need + answer["resident"] <= limit:
        return ""
    least = math.ceil((need + answer["resident"]) / usable)
    room = limit - answer["resident"]
    smaller = f", or plan with memory_limit={format_bytes(room)}" if room >= LEAST_ROOM else ""
    return (
        f"has {format_bytes(limit)} of memory {of}, {format_bytes(answer['resident'])} of it in use, and the plan "
        f"needs {format_bytes(need)} more: start it with {format_bytes(least)} or more{smaller}"
    )


def storage_problem(answer: dict[str, Any], folder: NonceFolder | None, deadline: float) -> str:
    """Return how a worker's view of A, B, the mask or C's folder differs from the client's; empty if it does not.

    `answer`: the worker's answer.
    `folder`: the folder next to C in which the worker wrote a file; None if C is not stored.
    `deadline`: time, by `time.monotonic`, until which to look for the file.
    """
    view: StorageView | None = answer.get("answer")
    if view is None:
        return ""
    where = f"on {answer['host']}"
    if view.problem:
        return f"{where} {view.problem}: give it the same file systems and credentials as the client"
    if folder is not None and not folder.is_there(view.nonce, deadline):
        return (
            f"{where} sees another folder than the client at the place of {folder.target}: mount the same file system "
            f"on both"
        )
    return ""
