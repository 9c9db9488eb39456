"""How far a target is: what of it is durable, and whether a run writes it."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spdist.errors import CorruptError, MatrixError, ResumeError
from spdist.foundation.units import counted
from spdist.jobs.target import replacement_path
from spdist.scheduler.execution.unfinished import Checkpoint, read_events, read_journal, read_plan
from spdist.storage import groups
from spdist.storage.notes import UNFINISHED_NOTES, note_path
from spdist.storage.targets.holder import Holder, holder_of
from spdist.stores.registry import at, normalise


def durable_part(url: str) -> str:
    """Return in words how much of an unfinished C is durable: block rows or rows, and entries."""
    plan = read_plan(url)
    try:
        front = read_journal(url).checkpoint
    except CorruptError:
        front = Checkpoint()
    row, entry = ("row", "entry") if plan is None or plan.c.block == (1, 1) else ("block row", "dense block")
    rows = f"{front.row:,} of {counted(plan.a.shape[0], row)}" if plan else counted(front.row, row)
    return f"{rows}, {counted(front.nnz, entry)}"


def status(target: str | Path) -> dict[str, Any]:
    """Say how far a target is; `spdist.status` lists the facts. Reads small files, writes nothing."""
    url = normalise(target)
    holder, complete = holder_of(url), _is_complete(at(url).whole_url())
    place = next((place for place in (url, replacement_path(url)) if _is_unfinished(place)), None)
    running = holder is not None and holder.is_process_alive
    if not (running or complete or place is not None):
        raise MatrixError(f"no matrix at {url}, and no run that writes one: correct the path")
    state = "running" if running else "complete" if complete else "stopped"
    facts: dict[str, Any] = {"matrix": url, "state": state}
    if complete and (running or place is not None):
        facts["replaces"] = "a complete matrix, which stays until the new one is whole"
    if place is not None:
        facts |= _progress(place)
    elif running:
        facts["phase"] = "planning, reading or finishing: nothing of C is durable yet"
    if holder is not None:
        facts["run"] = str(holder.owner or "not named by its lock")
        facts["sign_of_life"] = f"{holder.age:,.0f} s ago"
    return {**facts, "remedy": _remedy(state, holder, place is not None)}


def _is_complete(url: str) -> bool:
    return at(url).exists() and not _is_unfinished(url)


def _is_unfinished(url: str) -> bool:
    return bool(groups.read_facts(url).get("state") == "unfinished")


def _progress(url: str) -> dict[str, Any]:
    """Return what of an unfinished C is durable by its plan and its journal; a matrix of `save` has neither."""
    plan = read_plan(url)
    try:
        front = read_journal(url).checkpoint
    except CorruptError:
        front = Checkpoint()
    written = [time for name in UNFINISHED_NOTES if (time := at(note_path(url, name)).modified()) is not None]
    facts: dict[str, Any] = {}
    if plan is not None:
        done = sum(block.stop <= front.row for block in plan.blocks)
        facts |= {"blocks_done": done, "blocks": len(plan.blocks), "rows_done": front.row, "rows": plan.a.shape[0]}
    facts["entries_durable"] = front.nnz
    if written:
        facts["last_write"] = _time(max(written))
    with contextlib.suppress(CorruptError, ResumeError):
        if events := read_events(url):
            facts["events"] = [f"{_time(event['at'])} {event['text']}" for event in events]
    return facts


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _remedy(state: str, holder: Holder | None, is_unfinished: bool) -> str:
    """Return what to do next."""
    if state == "running":
        return "wait for it, or stop it with Ctrl-C or SIGTERM; --resume continues it"
    if holder is not None and not holder.is_near:
        return (
            "its run is on another host and had no heartbeat for a while: if it is dead, --resume --steal continues it"
        )
    if is_unfinished:
        return "run the command that began it again, with --resume: it continues"
    return "none"
