"""The notes of an unfinished C: its plan, and the journal of what is durable; both sealed.

The journal holds the crc32c of every durable Zarr chunk, so that a resumed run can compare them with what lies there.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from spdist.errors import SpdistError
from spdist.matrices.dtypes import Int64Array
from spdist.scheduler.planner.plan import Plan
from spdist.storage import groups, notes
from spdist.storage.checksums import Checksums, digest_of

PLAN, JOURNAL, EVENTS = notes.UNFINISHED_NOTES
"""Names of the notes in an unfinished C that hold its plan, its journal, and what was said of its runs."""
MOST_EVENTS = 100
"""Events that are kept; the oldest are left out."""

_EVENTS_LOCK = threading.Lock()

_FOREIGN = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors that whole notes of another version of spdist make."""


@dataclass(frozen=True)
class Checkpoint:
    """The durable part of C, and where work continues after it."""

    # first row that is not durable, and the position of its first entry in C
    row: int = 0
    nnz: int = 0
    chunks: int = 0  # Zarr chunks of `indices` and `data` that are written, from the first one on
    compressed: bool = False  # whether the values are compressed


def _no_checksums() -> Checksums:
    return Checksums(*(np.empty(0, np.uint32) for _ in groups.ARRAYS))


@dataclass(frozen=True)
class DurablePart:
    """What a journal holds."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    # (n,) int64: row offsets since the last whole Zarr chunk of `indptr`
    offsets: Int64Array = field(default_factory=lambda: np.zeros(1, np.int64))
    # of the whole Zarr chunks of `indptr`, and of the first `checkpoint.chunks` Zarr chunks of `indices` and `data`
    checksums: Checksums = field(default_factory=_no_checksums)

    @property
    def is_whole(self) -> bool:
        """Whether the parts fit each other."""
        front, sums, count = self.checkpoint, self.checksums, len(self.offsets)
        fits = front.row + 1 >= count if len(sums.indptr) else front.row + 1 == count
        ends = not count or int(self.offsets[-1]) == front.nnz
        return fits and ends and len(sums.indices) == len(sums.data) == front.chunks


def write_plan(url: str, plan: Plan, product: object) -> None:
    """Write the plan of an unfinished C.

    `product`: what C is a product of, as JSON; `read_plan` must be given an equal one.
    """
    notes.write_note(url, PLAN, f"{digest_of(_json(product))}\n{plan.to_json()}".encode())


def has_plan_of(url: str, product: object) -> bool:
    """Whether an unfinished C has a plan that was written for this product.

    `product`: as for `write_plan`.
    """
    content = notes.read_note(url, PLAN)
    return content is not None and content.partition(b"\n")[0] == digest_of(_json(product)).encode()


def read_plan(url: str, product: object = None) -> Plan | None:
    """Read the plan of an unfinished C; None if it has no plan.

    `product`: as for `write_plan`; None takes the plan of any product.
    Raises `CorruptError` if the plan is damaged, or belongs to another C.
    Raises `ResumeError` if another version of spdist wrote it.
    """
    content = notes.read_note(url, PLAN)
    if content is None:
        return None
    owner, _, text = content.partition(b"\n")
    try:
        plan = Plan.from_json(text)
    except _FOREIGN as error:
        raise notes.foreign_note(url, PLAN) from error
    if product is not None and owner != digest_of(_json(product)).encode():
        raise notes.damaged_note(url, PLAN, "it is the plan of another product")
    return plan


def write_journal(url: str, part: DurablePart, plan: str) -> None:
    """Write the journal of an unfinished C, in one file and one step.

    `plan`: from `plan_digest`.
    """
    head = asdict(part.checkpoint) | {"plan": plan, "offsets": len(part.offsets)}
    body = part.offsets.astype("<i8").tobytes() + part.checksums.to_bytes()
    notes.write_note(url, JOURNAL, _json(head) + b"\n" + body)


def read_journal(url: str) -> DurablePart:
    """Read the journal of an unfinished C.

    Returns without a journal, the checkpoint of an empty C, with its single offset.
    Raises `CorruptError` if the journal is damaged, or belongs to another plan.
    Raises `ResumeError` if another version of spdist wrote it.
    """
    content = notes.read_note(url, JOURNAL)
    if content is None:
        return DurablePart()
    head, _, body = content.partition(b"\n")
    try:
        facts = json.loads(head)
        plan, size = facts.pop("plan"), 8 * facts.pop("offsets")
        offsets = np.frombuffer(body[:size], "<i8").astype(np.int64)
        part = DurablePart(Checkpoint(**facts), offsets, Checksums.from_bytes(body[size:]))
    except _FOREIGN as error:
        raise notes.foreign_note(url, JOURNAL) from error
    if plan != plan_digest(url):
        raise notes.damaged_note(url, JOURNAL, "it belongs to another plan")
    if not part.is_whole:
        raise notes.damaged_note(url, JOURNAL, "its parts do not fit each other")
    return part


def _json(facts: object) -> bytes:
    return json.dumps(facts, sort_keys=True).encode()


def plan_digest(url: str) -> str:
    """Return a digest of the plan of an unfinished C, to which its journal belongs."""
    return digest_of(notes.read_note(url, PLAN) or b"")


def note_event(url: str, at: float, text: str) -> None:
    """Add what was said of a run to an unfinished C; a place that cannot be written is for the run itself to report.

    `at`: seconds since 1970.
    """
    with _EVENTS_LOCK, contextlib.suppress(OSError, SpdistError):
        events = [*read_events(url), {"at": at, "text": text}][-MOST_EVENTS:]
        notes.write_note(url, EVENTS, _json({"events": events}))


def read_events(url: str) -> list[dict[str, Any]]:
    """Return what was said of the runs of an unfinished C: ``at``, seconds since 1970, and ``text``.

    Raises `CorruptError` if the note is damaged.
    Raises `ResumeError` if another version of spdist wrote it.
    """
    content = notes.read_note(url, EVENTS)
    try:
        found = [] if content is None else json.loads(content)["events"]
        return [{"at": float(event["at"]), "text": str(event["text"])} for event in found]
    except _FOREIGN as error:
        raise notes.foreign_note(url, EVENTS) from error
