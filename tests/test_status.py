"""How far a target is: while it runs, after a stop, during a replacement, and from other hosts."""

from __future__ import annotations

import json
import logging
import os
import re

import pytest
import scipy.sparse as sp

import spdist
from spdist.api import products as api
from spdist.cli import main
from spdist.errors import MatrixError
from spdist.scheduler.execution import journal, unfinished
from spdist.scheduler.execution.journal import JournalTuning
from spdist.scheduler.execution.unfinished import read_plan
from spdist.storage import lock
from spdist.storage.targets.owner import this_process
from tests.conftest import random_matrix
from tests.support.planning import SHORT_CHUNKS

EYE = sp.eye_array(3, format="csr")


class StopError(Exception):
    """Ends a run."""


@pytest.fixture
def stopped_run(tmp_path, scheduler, monkeypatch):
    """Return a function that stops a product once rows are durable; it returns C and its status before the stop."""
    monkeypatch.setattr(journal, "TUNING", JournalTuning(seconds=0.0, share=1.0))
    monkeypatch.setattr("spdist.scheduler.planner.planner.DEFAULT_TUNING", SHORT_CHUNKS)
    a, c = tmp_path / "A.zarr", tmp_path / "C.zarr"
    api.save(a, random_matrix(400, 400, 5, 1))

    def run(said=lambda now: None, **options):
        seen = []

        def progress(now):
            said(now)
            seen.append(api.status(c))
            if seen[-1].get("rows_done"):
                raise StopError

        callbacks = spdist.Callbacks(progress=progress)
        with pytest.raises(StopError):
            api.multiply(a, a, c, grid=(20, 1, 1), scheduler=scheduler, callbacks=callbacks, **options)
        return c, seen[-1]

    return run


def stops(c) -> list[int]:
    plan = read_plan(str(c))
    assert plan is not None
    return [block.stop for block in plan.blocks]


def test_a_run_is_running_then_stopped_then_complete(stopped_run, scheduler, capsys):
    c, running = stopped_run()
    assert running["state"] == "running"
    assert f"process {os.getpid()}" in running["run"]
    assert "wait for it" in running["remedy"]

    found = api.status(c)
    assert found["state"] == "stopped"
    assert found["blocks"] == 20
    assert 0 < found["rows_done"] < found["rows"] == 400
    assert found["blocks_done"] == sum(stop <= found["rows_done"] for stop in stops(c))
    assert found["blocks_done"] > 0
    assert found["entries_durable"] > 0
    assert "run" not in found
    assert "--resume" in found["remedy"]
    assert main(["status", str(c), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["status", str(c)]) == 0
    assert "blocks_done" in capsys.readouterr().out

    a = c.with_name("A.zarr")
    api.multiply(a, a, c, resume=True, scheduler=scheduler)
    assert api.status(c) == {"matrix": str(c), "state": "complete", "remedy": "none"}


def test_what_was_said_of_a_run_is_told_until_c_is_whole(stopped_run, scheduler, capsys):
    def told(now):
        logging.getLogger("spdist").warning("worker %s was lost: its 2 blocks are computed again", "tls://w:1")

    c, _ = stopped_run(said=told)
    events = api.status(c)["events"]
    assert re.fullmatch(r"\S+T\S+ worker tls://w:1 was lost: its 2 blocks are computed again", events[0])
    assert main(["status", str(c)]) == 0
    assert "worker tls://w:1 was lost" in " ".join(capsys.readouterr().out.split())

    a = c.with_name("A.zarr")
    api.multiply(a, a, c, resume=True, scheduler=scheduler)
    assert api.status(c) == {"matrix": str(c), "state": "complete", "remedy": "none"}
    assert not list(c.glob("spdist-*"))


def test_events_are_few_and_of_no_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "MOST_EVENTS", 3)
    for number in range(5):
        unfinished.note_event(str(tmp_path), number, str(number))
    assert [event["text"] for event in unfinished.read_events(str(tmp_path))] == ["2", "3", "4"]
    (tmp_path / "spdist-events").write_text("damaged")
    unfinished.note_event(str(tmp_path), 6.0, "not told, and no error")


def test_a_replacement_leaves_a_complete_matrix(stopped_run, tmp_path):
    api.save(tmp_path / "C.zarr", EYE)
    c, running = stopped_run(overwrite=True)
    assert running["state"] == "running"
    found = api.status(c)
    assert (found["state"], found["blocks"]) == ("complete", 20)
    assert "stays until the new one is whole" in found["replaces"]
    assert "--resume" in found["remedy"]


@pytest.mark.parametrize(("age", "state"), [(0.0, "running"), (3600.0, "complete")])
def test_a_run_on_another_host_is_judged_by_its_sign_of_life(tmp_path, age, state):
    c = tmp_path / "C.zarr"
    api.save(c, EYE)
    path = tmp_path / "C.zarr.spdist-lock"
    owner = json.loads(this_process("abc123").to_bytes())
    path.write_text(json.dumps(owner | {"host": "node7", "boot": "another"}))
    seconds = path.stat().st_mtime - age
    os.utime(path, (seconds, seconds))
    found = api.status(c)
    assert found["state"] == state
    assert "node7" in found["run"]
    assert ("--steal" in found["remedy"]) == (state == "complete")
    assert path.exists()


def test_a_run_that_has_written_nothing_yet(tmp_path):
    with lock.hold_target(tmp_path / "C.zarr"):
        found = api.status(tmp_path / "C.zarr")
    assert found["state"] == "running"
    assert "nothing of C is durable yet" in found["phase"]


def test_nothing_is_there(tmp_path):
    with pytest.raises(MatrixError, match=r"no matrix at .*C\.zarr"):
        api.status(tmp_path / "C.zarr")


def test_a_url(tmp_path):
    api.save("memory://status/C.zarr", EYE, overwrite=True)
    assert api.status("memory://status/C.zarr")["state"] == "complete"
