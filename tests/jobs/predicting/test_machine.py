"""What is known of this machine: kept for each host, read again, never a reason to fail."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spdist import cli
from spdist.api import products as api
from spdist.jobs.predicting import machine as machines
from spdist.jobs.predicting import measure
from spdist.jobs.predicting.machine import Machine, remember, this_machine, typical_machine
from spdist.jobs.predicting.run_time import paced_seconds, run_seconds, seen_in, stage_seconds
from spdist.jobs.report import Report
from spdist.scheduler.planner.plan import Rates
from tests.conftest import random_matrix


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Begin with a machine that was not measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_measured_machine_is_kept_for_its_host_and_cpus(monkeypatch):
    assert this_machine() == typical_machine()
    found = replace(typical_machine(), measured="2026-01-31", core=Rates(read=1.5), gains={"read": 2.5})
    remember(found)
    assert this_machine() == found
    monkeypatch.setattr(machines, "count_cpus", lambda: 77)
    assert this_machine().measured == "", "with other CPUs it is another machine"


@pytest.mark.parametrize("text", ["", "{}", '{"version": 0}', '{"version": 1, "host": 3}', "[1]"])
def test_a_file_that_is_not_understood_is_as_none(text):
    remember(typical_machine())
    machines._file().write_text(text)
    assert this_machine() == typical_machine()


def test_where_nothing_can_be_kept_nothing_fails(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember(typical_machine())
    assert this_machine() == typical_machine()


def test_waits_are_medians_of_the_newest():
    found = typical_machine()
    for seconds in (90.0, 80.0, *range(1, machines.NEWEST + 1)):
        found = found.with_seen({"start": float(seconds)})
    assert found.wait("start") == 5.0, "of 1 to 9"
    assert len(found.seen["start"]) == machines.NEWEST
    assert Machine.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_finished_command_is_learnt_from(tmp_path, stored, monkeypatch):
    a = stored("A", random_matrix(300, 300, 5, 8))
    api.multiply(a, a, tmp_path / "C.zarr")
    assert not this_machine().seen, "of a call, which is a part of a process"
    monkeypatch.setattr(
        "sys.argv", ["spdist", "multiply", a.url, a.url, str(tmp_path / "D.zarr"), "--verify", "--json"]
    )
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main() == 0
    learnt = {"start of a short product", "run", "close", "verify a million entries"}
    assert set(this_machine().seen) - {"compile"} == learnt  # it compiles where no test before did


@pytest.fixture
def small_measurement(monkeypatch):
    """Measure with small matrices, and multiply in this process."""
    monkeypatch.setattr(measure, "SIDE", 14)
    monkeypatch.setattr(measure, "COMMAND_SIDE", 20)
    monkeypatch.setattr(measure, "SCATTERED_ROWS", 1 << 10)
    monkeypatch.setattr(measure, "STORED_ENTRIES", 1 << 18)
    monkeypatch.setattr(measure, "_run", lambda a, target, engine: api.multiply(a, a, target, overwrite=True))


@pytest.mark.parametrize("busy", [0.0, 1e9])
def test_info_measures_this_machine(small_measurement, tmp_path, capsys, monkeypatch, busy):
    monkeypatch.setattr(measure, "BUSY", busy)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(["info", "--machine", "--folder", str(tmp_path), "--json"]) == 0
    found = Machine.from_json(json.loads(capsys.readouterr().out))
    assert found == this_machine()
    assert found.measured
    assert all(rate > 0 for rate in (found.core.read, found.core.write, found.core.product, found.core.entry))
    assert all(1 <= gain <= found.cpus for gain in found.gains.values())
    assert found.is_busy == (busy == 0.0)
    assert bool(found.seen) == (not found.is_busy), "what others' programs delayed is not kept"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "nothing is left behind"


def finished(plan, machine, run: float, state: str = "computed") -> dict[str, float]:
    """Return what is seen in a command whose run took `run` seconds."""
    report = Report(4, 8, run, "numba", 0, 0, {}, state, {}, phases={"start": 0.5, "run": run, "close": 0.01})
    return seen_in(report, plan, machine)


def test_a_long_run_shows_its_pace(stored):
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    plan = api.plan(a, a, grid=(8, 1, 1))
    slow = replace(typical_machine(), core=Rates(read=1e6, write=1e6, product=1e5))
    stages = run_seconds(plan, slow, *stage_seconds(plan, slow))
    found = finished(plan, slow, slow.wait("run") + 2 * stages)
    assert found["pace"] == pytest.approx(2.0)
    assert "run" not in found
    assert slow.with_seen(found).pace(False) == slow.pace(False), "one run is no rule"
    learnt = slow.with_seen(found).with_seen(found).with_seen(found)
    assert learnt.pace(False) == pytest.approx(2.0)
    assert learnt.pace(True) == slow.pace(True)
    predicted = paced_seconds(plan, learnt, *stage_seconds(plan, learnt))
    assert predicted == pytest.approx(learnt.wait("run") + 2 * stages)


def test_what_shows_no_pace(stored):
    a = stored("A", random_matrix(2_000, 2_000, 10, 5))
    plan, quick = api.plan(a, a), typical_machine()
    slow = replace(quick, core=Rates(read=1e6, write=1e6, product=1e5))
    assert "pace" not in finished(plan, slow, 50.0, state="resumed")
    assert "pace" not in finished(plan, slow, 1e4), "something else was waited for"
    assert finished(plan, quick, 0.3)["run"] == 0.3
    assert "pace" not in finished(plan, quick, 0.3)


def test_measuring_needs_a_folder(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert cli.main(["info", "--machine", "--folder", str(missing)]) == 2
    assert f"folder={missing} cannot be written to" in capsys.readouterr().err
    assert cli.main(["info"]) == 2
    assert "needs a MATRIX, or --machine" in capsys.readouterr().err
