"""What the terminal shows of the package's log."""

from __future__ import annotations

import io
import json
import logging
from types import SimpleNamespace

import pytest
import scipy.sparse as sp
from rich.console import Console

from spdist import cli
from spdist.api import products as api
from spdist.cli import console
from spdist.cli.entry import show_warnings
from spdist.cli.facts import show_facts
from spdist.scheduler.execution.telemetry import Progress
from tests.conftest import random_matrix


@pytest.fixture(autouse=True)
def without_handlers():
    """Remove the handler of the command line afterwards."""
    yield
    logging.getLogger("spdist").handlers[:] = []


def test_a_warning_is_one_line_on_stderr(capsys):
    show_warnings()
    show_warnings()
    logging.getLogger("spdist").warning("worker %s has\njoined [red]", "tcp://w:1")
    logging.getLogger("spdist").info("not shown")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "spdist: warning: worker tcp://w:1 has joined [red]\n")


def test_a_warning_goes_above_a_bar(monkeypatch):
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=True, soft_wrap=True, width=80)
    monkeypatch.setattr(console, "_console", lambda stderr: shown)
    show_warnings()
    with console.transfer_bar("multiplying") as bar:
        bar(1, 2)
        logging.getLogger("spdist").warning("said")
        bar(2, 2)
    lines = [line for line in screen.getvalue().replace("\r", "\n").splitlines() if "said" in line]
    assert len(lines) == 1
    assert lines[0].endswith("spdist: warning: said")


def test_the_time_left_begins_with_what_was_expected(monkeypatch):
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=True, soft_wrap=True, width=200)
    monkeypatch.setattr(console, "_console", lambda stderr: shown)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=iter([50.0, 60.0]).__next__))
    with console.RunDisplay(quiet=False) as display:
        display.callbacks.on_message({"what": "start", "content": {"expected": 100.0}})
        display.callbacks.progress(Progress(1, 8, 10, 80, 99, multiplied=10, work=80))
        display.callbacks.on_message({"what": "progress", "content": {}})
    assert "88 s left (" in screen.getvalue()


def test_warnings_leave_json_alone(tmp_path, capsys, monkeypatch, scheduler):
    a = api.save(tmp_path / "A.zarr", random_matrix(50, 50, 3, 1))

    def check_values(*_) -> None:
        logging.getLogger("spdist").warning("said")

    monkeypatch.setattr("spdist.kernels.engine.Engine.check_values", check_values)
    words = ["multiply", a.url, a.url, str(tmp_path / "C.zarr"), "--scheduler", scheduler, "--json"]
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["blocks"] == 1
    assert "spdist: warning: said" in shown.err.splitlines()


def test_one_block_and_one_entry_are_singular(tmp_path, capsys):
    api.save(tmp_path / "A.zarr", sp.eye_array(1).tocsr())
    place = str(tmp_path / "A.zarr")
    assert cli.main(["plan", place, place]) == 0
    assert "1 product, about 1 entry in C" in capsys.readouterr().out
    assert cli.main(["multiply", place, place, str(tmp_path / "C.zarr"), "--verify", "--engine", "scipy"]) == 0
    said = capsys.readouterr().out
    assert "C.zarr: 1 entry in " in said
    assert " s, 1 block, engine scipy" in said
    assert "in all 1 row within" in said
    assert cli.main(["check", place]) == 0
    assert "nothing is wrong, 1 entry, 3 Zarr chunks read" in capsys.readouterr().out


def test_facts_go_on_below_their_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = {"min": 1, "mean": 2.5, "max": 4, "empty": 0}
    show_facts({"matrix": "/data/" + "x" * 40, "shape": [2000, 3], "nnz": 5000, "rows": rows, "block_size": [2, 3]})
    assert capsys.readouterr().out.splitlines() == [
        "matrix      /data/xxxxxxxxxxxxxxxxxxxxxx",
        "            xxxxxxxxxxxxxxxxxx",
        "shape       2,000 x 3",
        "nnz         5,000",
        "rows        1 to 4 dense blocks, mean",
        "            2.50; 0 empty",
        "block size  2 x 3",
    ]
