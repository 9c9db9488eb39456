"""The report of a run as one HTML file, made from its record: the page of the dashboard with the data inside."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spdist.errors import InputError
from spdist.options import OutputOptions
from spdist.scheduler.dashboard.messages import Message
from spdist.scheduler.dashboard.page import page_with
from spdist.scheduler.dashboard.run_state import RunState

_FOREIGN = (ValueError, TypeError, KeyError, AttributeError, IndexError)
"""Errors that a file makes which is no record, or one of another version."""


def write_report(records: Sequence[str | Path], file: str | Path) -> None:
    """Write the report of runs.

    `records`: files that ``--record`` wrote, each of one run; of a run that was resumed, in any order.
    `file`: the HTML file; replaced if it exists.
    Raises `InputError` if a record cannot be read or is invalid, or the file cannot be written.
    """
    runs = sorted((_fold(Path(record)) for record in records), key=lambda run: -float(run["start"]["begun"]))
    try:
        Path(file).write_text(page_with({"now": 0.0, "runs": runs, "memory": {}}))
    except OSError as error:
        raise InputError(f"report={file} cannot be written ({error.strerror}): choose another name") from None


def _fold(record: Path) -> dict[str, Any]:
    """Return the state of a run by its record, as the page reads it."""
    try:
        with record.open() as file:
            lines: list[Message] = [json.loads(line) for line in file if line.endswith("\n")]  # a kill may cut the last
        return _folded(lines)
    except OSError as error:
        raise InputError(f"{record} cannot be read ({error.strerror}): correct the path") from None
    except _FOREIGN as error:
        raise InputError(
            f"{record} is no record of a run ({type(error).__name__}: {error}); multiply --record writes one"
        ) from None


def _folded(lines: list[Message]) -> dict[str, Any]:
    messages = [line for line in lines if "what" in line]
    begin = next((line for line in messages if line["what"] == "start"), None)
    if begin is None:
        raise ValueError("no line says what began")
    run = RunState(begin["product"], begin["content"])
    phases: dict[str, float] = {}
    density: dict[str, Any] = {}
    last = run.start["begun"]
    for line in lines:
        if "what" not in line and not line["worker"]:
            phases[line["stage"]] = line["seconds"]
        elif "what" not in line:
            run.add_timings(line["worker"], [line], {})
            last = max(last, line["begin"] + line["seconds"])
        elif line["what"] == "progress":
            run.add_progress(line["at"], line["content"])
        elif line["what"] == "event":
            run.add_event(line["at"], line["content"]["text"])
        elif line["what"] == "density":
            density = {str(name): dict(one) for name, one in line["content"].items()}
    for line in messages:  # its totals hold the timings that came late
        if line["what"] == "end":
            run.finish(line["at"], line["content"])
    return run.to_json(run.ended or last) | {"phases": phases, "density": density}


@contextlib.contextmanager
def reported(output: OutputOptions) -> Iterator[OutputOptions]:
    """Write the report that was asked for at the end of a ``with`` block, of a run that failed too.

    Yields with a record, if a report is made of it.
    Raises `InputError` if the report cannot be written.
    """
    if output.report is None:
        yield output
        return
    record = Path(output.record or f"{output.report}.jsonl")
    before = _stamp(record)
    try:
        yield replace(output, record=record)
    finally:
        if _stamp(record) != before and record.stat().st_size:
            write_report([record], output.report)
        if output.record is None:
            record.unlink(missing_ok=True)


def _stamp(path: Path) -> int:
    """Return when a file was written last, in ns; -1 without a file."""
    return path.stat().st_mtime_ns if path.exists() else -1
