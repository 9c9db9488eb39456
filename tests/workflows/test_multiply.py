"""The batch entry: job files, refusals before anything starts, signals and resumption, the script without SLURM."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

import spdist
from spdist.api import products as api
from spdist.scheduler.executors.clients.local_cluster import SETTINGS
from tests.conftest import assert_is_product, load_workflow, random_matrix
from tests.scheduler.execution.test_driver import files, read
from tests.test_cli import wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "workflows" / "multiply.py"
SBATCH = ROOT / "deploy" / "slurm" / "multiply.sbatch"
STOPPED = 75


@pytest.fixture(scope="module")
def workflow():
    """Return workflows/multiply.py as a module."""
    return load_workflow("multiply")


@pytest.fixture(scope="module")
def jobs(workflow):
    """Return workflows/job.py, on which it rests, as a module."""
    return sys.modules["job"]


@pytest.fixture
def run(workflow, jobs, tmp_path, monkeypatch):
    """Return a function that runs a job file of some text in a folder with A.zarr, in this process."""
    monkeypatch.setattr(jobs, "catch_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    api.save("A.zarr", random_matrix(300, 300, 8, 1))

    def call(text: str | bytes | dict, *settings: str) -> int:
        text = yaml.safe_dump(text) if isinstance(text, dict) else text
        Path("job.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return workflow.main(["job.yaml", *(word for setting in settings for word in ("--set", setting))])

    return call


GOOD = {"a": "A.zarr", "b": "A.zarr", "out": "C.zarr"}


def refusal(capsys) -> str:
    """Return the one line on stderr; nothing was written, and nothing said but what the job is."""
    said = capsys.readouterr()
    assert said.out.count("\n") <= 1
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    assert {path.name for path in Path().iterdir()} - {"there.json", "folder"} == {"A.zarr", "job.yaml"}
    return lines[0]


# -- a job that runs ---------------------------------------------------------------------------------------------------


def test_job_gives_the_product_and_a_report(run, scheduler, capsys):
    Path("scheduler.json").write_text(json.dumps({"address": scheduler}))
    job = {**GOOD, "grid": [5, 1, 1], "memory_limit": "64MiB", "scheduler_file": "scheduler.json"}
    assert run(job) == 0
    m = random_matrix(300, 300, 8, 1)
    assert_is_product(read("C.zarr"), m, m, 1e-12)
    report = json.loads(Path("job.report.json").read_text())
    assert (report["state"], report["exit_code"]) == ("done", 0)
    assert report["result"]["blocks"] == 5
    assert report["result"]["verification"]["ok"]
    assert report["job"]["memory_limit"] == "64MiB"
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d \S", line) for line in lines)
    assert "\r" not in "".join(lines)

    assert run(job, "report=again.json") == 0  # as after a requeue that came too late
    assert json.loads(Path("again.json").read_text())["result"]["state"] == "already finished"


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"PBS_ARRAY_INDEX": "1"},
        {"LSB_JOBINDEX": "1"},
    ],
)
def test_tasks_of_an_array_job_make_parts(run, monkeypatch, capsys, variables):
    """Each task makes the part of its number, with a report of its own; the last one makes C whole."""
    for name, first in variables.items():
        monkeypatch.setenv(name, first)
    assert run({**GOOD, "part": "array/2"}) == 0
    assert "part 1/2" in capsys.readouterr().out
    assert json.loads(Path("job.report.part-1-of-2.json").read_text())["result"]["missing"] == [2]
    number = next(iter(variables))
    monkeypatch.setenv(number, str(int(variables[number]) + 1))
    assert run({**GOOD, "part": "array/2"}, "report=said.json") == 0
    assert "part 2/2" in capsys.readouterr().out
    assert json.loads(Path("said.part-2-of-2.json").read_text())["result"]["missing"] == []
    m = random_matrix(300, 300, 8, 1)
    assert_is_product(read("C.zarr"), m, m, 1e-12)


def test_settings_replace_the_file(run, scheduler):
    text = "a: nowhere.zarr\nb: A.zarr\nout: C.zarr\nworkers: 3\n"
    settings = ("a=A.zarr", "workers=null", f"scheduler={scheduler}", "verify=false", "grid=3,1,1", "report=r.json")
    assert run(text, *settings) == 0
    report = json.loads(Path("r.json").read_text())
    assert report["job"]["workers"] is None
    assert report["result"]["grid"]["row_blocks"] == 3
    assert report["result"]["verification"] is None


def test_one_block_and_one_entry_are_singular(jobs):
    result = {"blocks": 1, "nnz": 1, "seconds": 0.5, "state": "computed", "verification": None}
    assert jobs.product_summary(result, "entry") == "computed: 1 entry, 1 block, 0.5 s"
    assert (
        jobs.product_summary({**result, "blocks": 1234, "nnz": 2}, "entry")
        == "computed: 2 entries, 1,234 blocks, 0.5 s"
    )


def test_progress_is_a_line_now_and_then(jobs, capsys):
    log = jobs.Log()
    assert log.every == 30
    for done in range(100):
        log.log_progress(f"{done}")
    log.written -= 31
    log.log_progress("later")
    assert capsys.readouterr().out.split()[1:] == ["later"]


@pytest.mark.parametrize(
    ("settings", "given", "says"),
    [
        ((), None, "2GiB per worker"),
        (("memory_limit=1GiB",), "1GiB", "1GiB per worker"),
        (("engine=cuda",), None, "0.9 of the free memory of each GPU"),
        (("engine=hybrid", "memory_limit=8GiB"), "8GiB", "8GiB per worker"),
        (("engine=cuda", "memory_limit=null"), None, "0.9 of the free memory of each GPU"),
    ],
)
def test_without_a_memory_limit_spdist_chooses_it(run, monkeypatch, capsys, settings, given, says):
    """A limit of 2GiB for every engine would leave most of a GPU unused."""
    calls = []

    def multiply(*matrices, **options):
        calls.append(options["memory_limit"])
        raise spdist.SpdistError("far enough")

    monkeypatch.setattr(spdist, "multiply", functools.wraps(spdist.multiply)(multiply))
    assert run(GOOD, *settings) == 1
    assert calls == [given]
    assert capsys.readouterr().out.splitlines()[0].endswith(f"A.zarr and A.zarr to C.zarr, {says}")
    assert json.loads(Path("job.report.json").read_text())["job"]["memory_limit"] == given


def test_example_names_every_key(workflow, tmp_path, monkeypatch):
    example = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    keys = sys.modules["job_file"].readers_of(workflow.Job)
    assert set(example) == set(keys)
    for kind in workflow.Job.__mro__[:-1]:
        own = [key for key in keys if key in kind.__annotations__]
        assert [key for key in example if key in own] == own
    defaults = {one.name: one.default for one in dataclasses.fields(workflow.Job) if one.name not in (*GOOD, "report")}
    assert {key: value for key, value in example.items() if key in defaults} == defaults


# -- refusals ----------------------------------------------------------------------------------------------------------

BAD = {
    "unknown key": ({**GOOD, "memory": "2GiB"}, r"unknown key 'memory'; did you mean 'memory_limit'\?"),
    "no key at all": ({**GOOD, "c": "C.zarr"}, r"unknown key 'c'; a job needs out, a, b, and may have grid.*"),
    "missing key": ({"a": "A.zarr", "out": "C.zarr"}, r"b is missing; add a line `b: PATH`"),
    "empty key": ("a: A.zarr\nb:\nout: C.zarr\n", r"b is missing"),
    "same key twice": ("a: A.zarr\nb: A.zarr\nout: C.zarr\na: A.zarr\n", r"key 'a' is there twice; keep one"),
    "no YAML": ("a: [A.zarr\n", r"is not YAML: .*line 2.*correct that line"),
    "no date": ("a: 2026-13-01\nb: A.zarr\nout: C.zarr\n", r"is not YAML: month .*"),
    "not text": (b"a: \xff\n", r"is not YAML: .*decode"),
    "no mapping": ("- a\n", r"holds list where `key: value` lines belong"),
    "empty file": ("", r"holds NoneType where"),
    "a is no text": ({**GOOD, "a": 7}, r"a: 7 is int, not a text; write it in quotes"),
    "a is blank": ({**GOOD, "a": " "}, r"a: ' ' is "),
    "a not there": ({**GOOD, "a": "B.zarr"}, r"a: 'B.zarr' does not exist in .*; correct it, or create it"),
    "b is no matrix": ({**GOOD, "b": "job.yaml"}, r"b: 'job.yaml'.* "),
    "unknown protocol": ({**GOOD, "a": "nowhere://A.zarr"}, r"a: 'nowhere://A.zarr'.*nowhere"),
    "engine": ({**GOOD, "engine": "fast"}, r"engine: 'fast' is no engine; write one of auto, scipy, numba"),
    "engine is a list": ({**GOOD, "engine": ["numba"]}, r"engine: \['numba'\] is no engine"),
    "memory_limit": (
        {**GOOD, "memory_limit": "lots"},
        r"memory_limit: 'lots' is not a size; write for instance 512MiB",
    ),
    "memory_limit zero": ({**GOOD, "memory_limit": 0}, r"memory_limit: 0 is not a size"),
    "memory_limit true": ({**GOOD, "memory_limit": True}, r"memory_limit: True is not a size"),
    "memory_limit small": ({**GOOD, "memory_limit": "1kiB"}, r"memory"),
    "grid short": ({**GOOD, "grid": [2, 2]}, r"grid: \[2, 2\] is not three numbers of at least 1; write .*\[8, 1, 1\]"),
    "grid zero": ({**GOOD, "grid": [0, 1, 1]}, r"grid: \[0, 1, 1\] is not three"),
    "grid text": ({**GOOD, "grid": "a,b,c"}, r"grid: 'a,b,c' is not three"),
    "grid number": ({**GOOD, "grid": 4}, r"grid: 4 is not three"),
    "workers text": ({**GOOD, "workers": "two"}, r"workers: 'two' is not a whole number of at least 1; .*null"),
    "workers none": ({**GOOD, "workers": 0}, r"workers: 0 is not"),
    "workers true": ({**GOOD, "workers": True}, r"workers: True is not"),
    "no array job": ({**GOOD, "part": "array/2"}, r"part: 'array/2' needs an array job, which sets one of SLURM_"),
    "part": ({**GOOD, "part": "3/2"}, r"part='3/2': write K/N, part K of N"),
    "verify": (
        {**GOOD, "verify": "yes"},
        r"verify: 'yes' is neither true nor false; write one of them, without quotes",
    ),
    "resume": ({**GOOD, "resume": 1}, r"resume: 1 is neither"),
    "two schedulers": (
        {**GOOD, "scheduler": "tcp://127.0.0.1:1", "scheduler_file": "s"},
        r"scheduler: 'tcp://127.0.0.1:1' and scheduler_file: 's' exclude each other.*keep one",
    ),
    "workers of a scheduler": ({**GOOD, "workers": 2, "scheduler": "tcp://127.0.0.1:1"}, r"workers: 2 and scheduler"),
    "no scheduler file": ({**GOOD, "scheduler_file": "s.json"}, r"scheduler_file: 's.json': No such file.*start `dask"),
    "false scheduler file": ({**GOOD, "scheduler_file": "there.json"}, r"'there.json': it holds no address; start"),
    "no folder for C": ({**GOOD, "out": "no/C.zarr"}, r"out: 'no/C.zarr': .*/no is not a folder; create it"),
    "no folder for the report": ({**GOOD, "report": "no/r.json"}, r"report: 'no/r.json': .* is not a folder"),
    "report is a folder": ({**GOOD, "report": "folder"}, r"report: 'folder' is a folder; name a file in it"),
    "report is the job": ({**GOOD, "report": "job.yaml"}, r"report: 'job.yaml' exists and is no report of a job"),
    "C is there": ({**GOOD, "out": "folder", "resume": False}, r"out: 'folder' exists; remove it.*resume: true"),
    "C is something else": (
        {**GOOD, "out": "folder"},
        r"folder exists and is no product.*remove C, or name another out",
    ),
    "C is A": ({**GOOD, "out": "A.zarr"}, r"C may not be A or B"),
}


@pytest.mark.parametrize(("job", "message"), BAD.values(), ids=BAD)
def test_bad_job_is_refused_before_anything_is_written(run, capsys, job, message):
    Path("there.json").write_text("{}")
    Path("folder").mkdir()
    assert run(job) == 2
    line = refusal(capsys)
    assert re.fullmatch(f"job.yaml: .*{message}.*", line), line


def test_shapes_that_do_not_fit_are_refused(run, capsys):
    api.save("folder", random_matrix(200, 10, 2, 1))
    assert run({**GOOD, "b": "folder"}) == 2
    assert "300" in refusal(capsys)
    assert run({**GOOD, "mask": "folder"}) == 2
    assert re.search("mask.* 200 x 10", refusal(capsys))


@pytest.mark.parametrize(
    ("setting", "message"),
    [("workers", "is not key=value; write"), ("x=1", "unknown key 'x'"), ("grid=[1", "not YAML; put it in quotes")],
)
def test_bad_setting_is_refused(run, capsys, setting, message):
    assert run(GOOD, setting) == 2
    assert message in refusal(capsys)


def test_missing_job_file_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "no.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "no.yaml: cannot be read: No such file or directory; name a job file, a copy of one in workflows"
    )
    assert not list(tmp_path.iterdir())


def test_job_that_fails_says_so_in_its_report(run, workflow, monkeypatch, capsys):
    def break_down(job, log):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workflow, "run", break_down)
    assert run(GOOD) == 1
    report = json.loads(Path("job.report.json").read_text())
    assert (report["state"], report["exit_code"]) == ("failed", 1)
    assert "No space left" in report["error"]
    assert "run it again" in capsys.readouterr().out.splitlines()[-1]


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_job(tmp_path_factory):
    """Return the folder of a job of some seconds, and the files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("long")
    api.save(folder / "A.zarr", random_matrix(3000, 3000, 40, 7))
    text = "a: A.zarr\nb: A.zarr\nout: R.zarr\ngrid: [150, 1, 1]\nmemory_limit: 32MiB\nworkers: 1\nverify: false\n"
    (folder / "job.yaml").write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, "job.yaml"], capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder, files(folder / "R.zarr")


def begin(folder: Path, *words: str | Path, **options) -> subprocess.Popen[str]:
    """Start a command whose product goes to C.zarr, and wait until some of it is written."""
    shutil.rmtree(folder / "C.zarr", ignore_errors=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, words), "--set", "out=C.zarr"], cwd=folder, **pipes, **options)
    wait_for(lambda: list((folder / "C.zarr" / "data").glob("c/*")) or process.poll() is not None)
    return process


def test_a_signal_while_an_object_is_finalized_is_heard_later(jobs, monkeypatch):
    monkeypatch.setattr(jobs, "RECEIVED_SIGNALS", [])
    kept = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)

    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)

    try:
        jobs.catch_signals()
        Dying()
        with pytest.raises(jobs.Stopped, match="SIGUSR1"):
            jobs.Log().log_progress("later")
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGUSR1, kept[0])
        signal.signal(signal.SIGTERM, kept[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_signal_leaves_what_a_second_run_finishes(long_job, number):
    folder, reference = long_job
    process = begin(folder, sys.executable, SCRIPT, "job.yaml")
    process.send_signal(number)
    process.send_signal(number)  # an impatient batch system
    out, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED, errors
    assert errors == ""
    assert "run it again to go on" in out.splitlines()[-1]
    assert api.info(folder / "C.zarr")["state"] == "unfinished"
    report = json.loads((folder / "job.report.json").read_text())
    assert (report["state"], report["exit_code"]) == ("stopped", STOPPED)

    command = [sys.executable, SCRIPT, "job.yaml", "--set", "out=C.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "resuming by the stored plan" in done.stdout
    assert json.loads((folder / "job.report.json").read_text())["result"]["state"] == "resumed"
    assert files(folder / "C.zarr") == reference


def test_error_of_the_clean_up_counts_as_stopped(run, workflow, jobs, monkeypatch):
    def break_down(job, log):
        try:
            raise jobs.Stopped("SIGTERM")
        finally:
            Path("gone").unlink()

    monkeypatch.setattr(workflow, "run", break_down)
    assert run(GOOD) == STOPPED


# -- deployment --------------------------------------------------------------------------------------------------------


def test_dask_settings_are_those_of_our_own_clusters():
    def flat(tree: dict, prefix: str = "") -> dict:
        items = ((f"{prefix}{key}", value) for key, value in tree.items())
        return {
            k: v
            for key, value in items
            for k, v in (flat(value, f"{key}.") if isinstance(value, dict) else {key: value}).items()
        }

    assert flat(yaml.safe_load((ROOT / "deploy" / "dask.yaml").read_text())) == SETTINGS


def test_sbatch_script_parses():
    subprocess.run(["bash", "-n", SBATCH], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SBATCH], check=True)


@pytest.fixture
def slurm(tmp_path):
    """Return an environment with stand-ins: srun runs one task here, scontrol notes what it is asked."""
    stubs = {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
        "scontrol": (
            'if [[ $1 == show ]]; then echo "JobId=7 JobName=spdist TimeLimit=${TIME_LIMIT:-01:00:00} Nodes=1"; else\n'
            f'echo "$*" >> {tmp_path}/asked; fi'
        ),
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    names = {"SPDIST_ROOT": str(ROOT), "SPDIST_PYTHON": sys.executable, "SPDIST_SCRATCH": str(tmp_path)}
    return {**os.environ, **names, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(("limit", "notice", "code"), [
    ("00:01:00", "120", 2), ("00:02:59", "120", 2), ("00:08:08", "429", 2), ("00:08:09", "429", 9),
    ("00:01:30", "25", 9), ("1-00:00:30", "120", 9), ("UNLIMITED", "120", 9),
])  # fmt: skip
def test_sbatch_script_refuses_a_time_limit_without_time_for_work(slurm, tmp_path, limit, notice, code):
    """A job that is not refused asks for its keys, which ends with code 9 here."""
    (tmp_path / "python").write_text("#!/usr/bin/env bash\nexit 9\n")
    (tmp_path / "python").chmod(0o755)
    environment = {**slurm, "SPDIST_PYTHON": str(tmp_path / "python"), "TIME_LIMIT": limit, "SPDIST_NOTICE": notice}
    done = subprocess.run(["bash", SBATCH, "job.yaml"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    refused = f"a time limit of {limit} leaves less than a minute" in done.stderr
    assert (done.returncode == 2, refused) == (code == 2, code == 2), done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "asked").exists()
    assert not list(tmp_path.glob(".spdist-*"))


@pytest.mark.slow
def test_sbatch_script_stops_requeues_and_goes_on(long_job, slurm, tmp_path):
    folder, reference = long_job
    process = begin(folder, "bash", SBATCH, "job.yaml", env=slurm)
    process.send_signal(signal.SIGUSR1)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == STOPPED, out + errors
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert not list(folder.glob(".spdist-*"))

    command = ["bash", SBATCH, "job.yaml", "--set", "out=C.zarr"]
    again = {**slurm, "SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100, env=again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming by the stored plan" in done.stdout
    assert files(folder / "C.zarr") == reference


@pytest.mark.slow
def test_sbatch_script_requeues_where_the_notice_comes_first(long_job, slurm, tmp_path):
    folder, _ = long_job
    process = subprocess.Popen(["bash", SBATCH, "job.yaml"], cwd=folder, env=slurm, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: (folder / ".spdist-7-0" / "scheduler.log").exists())
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == STOPPED, out
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert not list(folder.glob(".spdist-*"))


@pytest.mark.slow
def test_sbatch_script_leaves_requeueing_to_slurm_at_its_end(long_job, slurm, tmp_path):
    folder, _ = long_job
    process = begin(folder, "bash", SBATCH, "job.yaml", env=slurm)
    process.send_signal(signal.SIGTERM)  # scancel, or a requeue from outside
    out, errors = process.communicate(timeout=100)
    assert process.returncode == STOPPED, out + errors
    assert not (tmp_path / "asked").exists()
    assert not list(folder.glob(".spdist-*"))


@pytest.mark.slow
def test_sbatch_script_ends_when_its_workers_do(long_job, slurm, tmp_path):
    folder, _ = long_job
    (tmp_path / "srun").write_text("#!/usr/bin/env bash\necho no such node; exit 1\n")
    shutil.rmtree(folder / "C.zarr", ignore_errors=True)
    command = ["bash", SBATCH, "job.yaml", "--set", "out=C.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100, env=slurm)
    assert done.returncode == 1
    assert "no such node" in done.stderr
    assert "ended before the job" in done.stderr
    assert not list(folder.glob(".spdist-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "most", "code"), [("dask scheduler", 3, 0), ("dask worker", 3, 0), ("dask worker", 0, 1)]
)
def test_sbatch_script_goes_on_after_a_loss(long_job, slurm, tmp_path, words, most, code):
    """Nobody is asked: scheduler and workers start again, within a bound, and the job resumes."""
    folder, reference = long_job
    process = begin(folder, "bash", SBATCH, "job.yaml", env={**slurm, "SPDIST_MAX_LOSSES": str(most)})
    lost = [child for child in psutil.Process(process.pid).children() if words in " ".join(child.cmdline())]
    assert len(lost) == 1
    for victim in [*lost[0].children(recursive=True), *lost]:
        victim.kill()
    out, errors = process.communicate(timeout=200)
    assert process.returncode == code, out + errors
    assert not list(folder.glob(".spdist-*"))
    if code:
        assert "were lost 1 times (SPDIST_MAX_LOSSES)" in errors
    else:
        assert "starting them again (1 of 3)" in out
        assert files(folder / "C.zarr") == reference


@pytest.mark.slow
def test_sbatch_script_refuses_a_scheduler_that_other_nodes_cannot_reach(long_job, slurm, tmp_path):
    folder, _ = long_job
    environment = {**slurm, "SLURM_JOB_NUM_NODES": "2", "SPDIST_INTERFACE": "lo"}
    command = ["bash", SBATCH, "job.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100, env=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "listens on 127.0.0.1" in done.stderr
    assert not list(folder.glob(".spdist-*"))


def test_an_answer_instead_of_the_product(run, capsys):
    options = {"semiring": "min_plus", "mask": "A.zarr", "complement": True, "top_n": 3, "threshold": -1}
    assert run(GOOD | options) == 0
    assert "computed again by min_plus" in capsys.readouterr().out
    assert np.diff(read("C.zarr").indptr).max() == 3
    for wrong in ("top_n=0", "threshold=high", "complement=maybe", "mask=none.zarr", "semiring=plus_plus"):
        assert run(GOOD | {"out": "D.zarr"}, wrong) == 2
        assert wrong.split("=")[0] in capsys.readouterr().err


def test_an_epilogue_from_a_job_file(run, capsys):
    a = read("A.zarr")
    np.save("f.npy", np.arange(1.0, a.shape[0] + 1))
    assert run(GOOD | {"scale_columns": "f.npy", "normalize": "l1", "drop_zeros": True}) == 0
    c = read("C.zarr").to_scipy()
    expected = (a.to_scipy() @ a.to_scipy()).toarray() * np.arange(1.0, a.shape[0] + 1)
    norms = abs(expected).sum(axis=1, keepdims=True)
    assert c.nnz == np.count_nonzero(expected)
    np.testing.assert_allclose(c.toarray() * norms, expected, rtol=1e-10, atol=1e-10)
    np.save("g.npy", np.ones(3))
    capsys.readouterr()
    for wrong in ("scale_rows=g.npy", "scale_rows=none.npy", "normalize=l7", "drop_zeros=perhaps"):
        assert run(GOOD | {"out": "D.zarr"}, wrong) == 2
        assert wrong.split("=")[1] in capsys.readouterr().err or wrong == "scale_rows=g.npy"
