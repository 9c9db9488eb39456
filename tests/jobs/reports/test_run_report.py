"""Reports of runs: what is in them, of runs that failed or were resumed too, and records that are none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

import spdist
from spdist.api import products as api
from spdist.cli import main
from spdist.errors import InputError, SpdistError
from spdist.jobs.reports.run_report import write_report
from spdist.scheduler.execution import stages
from tests.conftest import random_matrix

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def a(tmp_path_factory):
    place = tmp_path_factory.mktemp("report") / "A.zarr"
    api.save(place, random_matrix(500, 500, 8, 1))
    return place


def data_of(report) -> dict:
    text = report.read_text()
    assert len(text) < 1 << 20
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def test_a_report_says_what_was_planned_and_what_happened(a, tmp_path, scheduler):
    file = tmp_path / "run.html"
    seen = []
    api.save(tmp_path / "C.zarr", random_matrix(5, 5, 2, 1))
    callbacks = spdist.Callbacks(on_timings=seen.extend)
    report = api.multiply(
        a,
        a,
        tmp_path / "C.zarr",
        grid=(12, 1, 1),
        scheduler=scheduler,
        report=file,
        callbacks=callbacks,
        overwrite=True,
    )
    (run,) = data_of(file)["runs"]
    assert (run["state"], run["progress"]["blocks"]) == ("finished", 12)
    assert run["start"]["target"] == str(tmp_path / "C.zarr")
    assert run["stages"]["multiply"]["tasks"] == report.stages["multiply"]["tasks"]
    assert run["stages"]["multiply"]["seconds"] == pytest.approx(report.stages["multiply"]["seconds"])
    assert run["start"]["seconds"].keys() >= {"multiply", "commit"}
    assert set(run["cells"]) == {3}
    assert len(run["gantt"]) >= 24
    assert "run" in run["phases"]
    assert set(run["density"]) == {"A", "B", "C"}
    assert all(one["image"].startswith("data:image/png;base64,") for one in run["density"].values())
    assert seen, "a caller's own callback hears the timings too"
    assert [path.name for path in tmp_path.iterdir() if "jsonl" in path.name] == []


def test_a_failed_run_and_its_continuation_in_one_report(a, tmp_path, scheduler, monkeypatch, capsys):
    c, records = tmp_path / "C.zarr", [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    with monkeypatch.context() as patch:
        patch.setitem(stages.STAGES, "multiply", lambda *args: 1 / 0)
        with pytest.raises(SpdistError, match="division"):
            api.multiply(a, a, c, scheduler=scheduler, record=records[0], report=tmp_path / "failed.html")
    (failed,) = data_of(tmp_path / "failed.html")["runs"]
    assert failed["state"] == "failed"
    assert "division" in failed["error"]
    api.multiply(a, a, c, resume=True, scheduler=scheduler, record=records[1])
    assert main(["report", *map(str, records), str(tmp_path / "both.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 2
    assert [run["state"] for run in data_of(tmp_path / "both.html")["runs"]] == ["finished", "failed"]


def test_a_record_that_a_kill_cut_off(a, tmp_path, scheduler):
    record = tmp_path / "run.jsonl"
    api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, record=record)
    lines = record.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"what": "end"' not in line]
    record.write_text("".join(kept[:-1]) + kept[-1][:20])
    write_report([record], tmp_path / "cut.html")
    assert data_of(tmp_path / "cut.html")["runs"][0]["state"] == "running"


def test_names_are_text(a, tmp_path, scheduler):
    target = tmp_path / "<!--<script>C.zarr"
    api.multiply(a, a, target, scheduler=scheduler, report=tmp_path / "run.html")
    assert data_of(tmp_path / "run.html")["runs"][0]["start"]["target"] == str(target)
    assert (tmp_path / "run.html").read_text().count("<script") == 2


@pytest.mark.parametrize("content", ["", "text\n", "[1]\n", '{"what": "start"}\n', '{"stage": "multiply"}\n', "\0\n"])
def test_a_file_that_is_no_record(tmp_path, content):
    record = tmp_path / "run.jsonl"
    record.write_text(content)
    with pytest.raises(InputError, match=r"run\.jsonl is no record of a run"):
        write_report([record], tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


def test_a_record_that_is_missing_and_a_report_that_cannot_be_written(a, tmp_path, scheduler):
    with pytest.raises(InputError, match="cannot be read"):
        write_report([tmp_path / "no.jsonl"], tmp_path / "run.html")
    with pytest.raises(InputError, match="is inside the matrix"):
        api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, report=a / "run.html")
    with pytest.raises(InputError, match="cannot be written"):
        api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, report=tmp_path / "no" / "run.html")
    assert not (tmp_path / "C.zarr").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_opens_the_report_as_a_file(a, tmp_path, scheduler):
    api.multiply(a, a, tmp_path / "C.zarr", scheduler=scheduler, report=tmp_path / "run.html")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    drawn = subprocess.run(
        [*command, "--enable-logging=stderr", f"file://{tmp_path / 'run.html'}"], capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert "CONSOLE" not in drawn.stderr
    assert "Phases of the call" in drawn.stdout
    assert "Map of blocks" in drawn.stdout
