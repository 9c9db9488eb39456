"""Every second of a command is in one phase."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time

import numba
import pytest

from spdist import cli
from spdist.api import products as api
from spdist.cli.entry import show_warnings
from spdist.foundation import phases
from spdist.foundation.phases import Compilations, PhaseClock
from tests.conftest import random_matrix

SPDIST = [sys.executable, "-m", "spdist"]


@pytest.fixture
def a(tmp_path):
    return api.save(tmp_path / "A.zarr", random_matrix(300, 300, 6, 1))


def test_compilations_are_taken_out_of_the_phases_they_fell_into(monkeypatch):
    monkeypatch.setattr(phases, "COMPILATIONS", Compilations())
    clock = PhaseClock(100.0)
    clock.marks += [(103.0, "plan"), (104.0, "run"), (106.0, "start")]
    clock.add_compiled([(103.0, 104.5), (102.0, 103.5), (90.0, 95.0), (200.0, 201.0)])
    monkeypatch.setattr(time, "time", lambda: 110.0)
    assert clock.seconds() == {"start": 6.0, "compile": 2.5, "run": 1.5}


def test_phases_of_a_call_inside_a_call_are_its_own():
    phases.enter("run")  # no clock: nothing to say it to
    with phases.clocked(time.time() - 5) as clock, phases.clocked() as inner:
        assert inner is clock
        phases.enter("plan")
        with phases.during("verify"):
            assert clock.phase == "verify"
        assert clock.phase == "plan"
    with phases.clocked() as other:
        assert other is not clock


def test_a_process_knows_when_it_began():
    before = time.time()
    program = "import time; time.sleep(1); from spdist.foundation import phases; print(phases.process_begin())"
    told = float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert before - 0.02 < told < before + 0.9  # ticks of 0.01 s
    assert phases.process_begin(fields=["not", "linux"]) == pytest.approx(time.time(), abs=0.1)


@pytest.mark.parametrize(("is_kept", "words"), [(True, "once for this machine"), (False, "in this process alone")])
def test_a_long_compilation_is_said_once_while_it_lasts(is_kept, words, monkeypatch, caplog):
    monkeypatch.setattr(phases, "SAY_SECONDS", 0.05)
    found = Compilations()
    with caplog.at_level(logging.WARNING, "spdist"):
        for _ in range(2):
            with found.around("kernel", is_kept=is_kept):
                begin = time.monotonic()
                while (lasted := time.monotonic() - begin) < 0.2 or (not caplog.messages and lasted < 90):
                    time.sleep(0.01)
            assert len(caplog.messages) == 1
    assert words in caplog.text
    assert len(found.spans) == 2
    with found.around("code that a cache had", least=60.0):
        pass
    assert len(found.spans) == 2


def test_a_compilation_is_a_line_on_stderr_that_is_no_warning(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("spdist"), "handlers", [])
    show_warnings()
    Compilations()._say("multiply_slices", True)
    assert capsys.readouterr().err.startswith("spdist: compiling kernels (first multiply_slices), once")


def test_numba_says_when_it_compiles(monkeypatch):
    from spdist.kernels.cpu import numba_compile

    own = Compilations()
    monkeypatch.setattr(numba_compile, "COMPILATIONS", own)
    part = numba_compile.part(lambda x: 2 * x)

    def add(x):
        return part(x) + 1

    assert numba.njit(lambda x: 2 * x)(3) == 6  # another package's function
    assert own.spans == []
    monkeypatch.setattr(add, "__module__", "spdist.kernels")
    kernel = numba_compile.unsaved(numba_compile.part(add))
    begin = time.time()
    assert kernel(3) == 7
    assert kernel(4) == 9
    assert [begin <= start < end for start, end in own.spans] == [True]  # the part is compiled meanwhile


def test_phases_of_a_call_add_up_and_are_recorded(a, tmp_path):
    begin = time.perf_counter()
    report = api.multiply(a, a, tmp_path / "C.zarr", engine="scipy", record=tmp_path / "run.jsonl", check=True)
    wall = time.perf_counter() - begin
    assert {"start", "plan", "run", "verify", "close"} <= set(report.phases)
    assert sum(report.phases.values()) == pytest.approx(wall, abs=0.2 + 0.1 * wall)  # the import of Dask included
    assert report.to_json()["phases"] == report.phases
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines() if '"what"' not in line]
    assert {frozenset(line) for line in lines} == {frozenset(lines[0])}
    own = {line["stage"]: line["seconds"] for line in lines if not line["worker"]}
    assert own.keys() == report.phases.keys()
    assert sum(own.values()) == pytest.approx(wall, abs=0.2 + 0.1 * wall)
    assert {line["stage"] for line in lines if line["worker"]} == {"preprocess", "multiply", "commit", "join"}


@pytest.mark.parametrize(
    "words",
    [
        ("multiply", "A.zarr", "A.zarr", "C.zarr", "--workers", "1", "--verify", "--transpose-b"),
        ("reduce", "frobenius", "A.zarr", "A.zarr", "--engine", "numba"),
    ],
    ids=lambda words: words[0],
)
def test_phases_of_a_command_add_up_to_what_the_shell_shows(words, a, tmp_path):
    begin = time.perf_counter()
    done = subprocess.run([*SPDIST, *words, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=200)
    wall = time.perf_counter() - begin
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["phases"]
    assert set(found) >= {"start", "plan", "run", "close"}
    assert ("transpose" in found, "verify" in found) == (words[0] == "multiply",) * 2
    assert sum(found.values()) == pytest.approx(wall, abs=0.2 + 0.05 * wall)  # the machine may be busy
    assert list(found) == [phase for phase in phases.WHAT_PHASES_DO if phase in found]


def test_the_closing_table_has_the_phases(a, tmp_path, capsys):
    assert cli.main(["multiply", a.url, a.url, str(tmp_path / "C.zarr"), "--engine", "scipy"]) == 0
    text = capsys.readouterr().out
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("│")]
    assert rows[:5] == ["start", "plan", "run", "close", "all"]
    assert {"preprocess", "multiply", "commit", "join"} <= set(rows[5:])
    assert cli.main(["reduce", "nnz", a.url, a.url]) == 0
    assert "│ close" in capsys.readouterr().out


def test_the_end_of_a_process_waits_for_threads_and_runs_what_was_registered():
    program = (
        "import atexit, sys, threading, time; from spdist import cli; atexit.register(print, 'registered')\n"
        "if sys.argv[1] == 'thread': threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()\n"
        "cli.end_process(3)"
    )
    for case, text in (("thread", "late\nregistered\n"), ("", "registered\n")):
        done = subprocess.run([sys.executable, "-c", program, case], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3, text)


def test_clocks_of_threads_are_apart():
    seen = []
    with phases.clocked():
        thread = threading.Thread(target=lambda: seen.append(phases.call_begin()))
        thread.start()
        thread.join()
        assert seen[0] != phases.call_begin()
