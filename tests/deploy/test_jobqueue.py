"""deploy/jobqueue/multiply.py with stand-ins for the commands of PBS and LSF, which run each job on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import spdist
from tests.conftest import assert_is_product, random_matrix
from tests.scheduler.execution.test_driver import read
from tests.test_cli import wait_for

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "jobqueue"
SUBMIT = {"pbs": 'cat "$1" >"$job"; echo "$$.server"', "lsf": 'cat >"$job"; echo "Job <$$> is submitted to queue"'}
"""What each system's command does with the script of a job, and says."""
RUN = 'setsid bash "$job" >"$TMPDIR/job-$$.log" 2>&1 & echo $! >"$TMPDIR/pid-$$"; echo "$0 $$" >>"$TMPDIR/asked"'
END = 'number=${1%%.*}; echo "$0 $number" >>"$TMPDIR/asked"; kill -- -"$(cat "$TMPDIR/pid-$number")"'
COMMANDS = {"pbs": ("qsub", "qdel"), "lsf": ("bsub", "bkill")}


def queue(system: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of a template, for jobs of one worker of this machine."""
    settings = yaml.safe_load((FOLDER / f"{system}.yaml").read_text())["jobqueue"][system]
    small = {"most_jobs": 2, "cores": 1, "processes": 1, "memory": "2GB", "interface": "lo", "local_directory": None}
    return {"jobqueue": {system: settings | small | changes}}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the stand-ins, and a folder with A.zarr, job.yaml and the settings of each system."""
    for system, names in COMMANDS.items():
        (tmp_path / f"{system}.yaml").write_text(yaml.safe_dump(queue(system)))
        for name, text in zip(names, (f'job="$TMPDIR/job-$$"\n{SUBMIT[system]}\n{RUN}', END), strict=True):
            (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
    spdist.save(tmp_path / "A.zarr", random_matrix(2000, 2000, 30, 7))
    job = "a: A.zarr\nb: A.zarr\nout: C.zarr\ngrid: [100, 1, 1]\nmemory_limit: 32MiB\n"
    (tmp_path / "job.yaml").write_text(job)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}


def command(system: str) -> list[str]:
    return [sys.executable, str(FOLDER / "multiply.py"), f"{system}.yaml", "job.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("system", COMMANDS)
def test_jobs_of_a_batch_system_multiply(system: str, environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(command(system), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    m = random_matrix(2000, 2000, 30, 7)
    assert_is_product(read(tmp_path / "C.zarr"), m, m, 1e-12)
    report = json.loads((tmp_path / "job.report.json").read_text())
    assert report["result"]["verification"]["ok"]
    asked = [line.split()[0].rpartition("/")[2] for line in (tmp_path / "asked").read_text().splitlines()]
    submit, end = COMMANDS[system]
    assert 1 <= asked.count(submit) <= 2
    assert asked.count(end) == asked.count(submit)
    assert not list(tmp_path.glob(".spdist-*"))  # the keys are gone


@pytest.mark.slow
def test_a_signal_stops_the_job_and_ends_its_workers(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(command("pbs"), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: list((tmp_path / "C.zarr" / "data").glob("c/*")) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 75, out
    assert "qdel" in (tmp_path / "asked").read_text()
    again = subprocess.run(command("pbs"), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming by the stored plan" in again.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("jobqueue: {}", "holds no settings of one batch system"),
        ("jobqueue: {pbs: {}, lsf: {}}", "holds no settings of one batch system"),
        ("a: [", "holds no settings of one batch system"),
        ("jobqueue: {cron: {cores: 1}}", "cron is no batch system of dask-jobqueue: write one of htcondor, "),
    ],
)
def test_wrong_settings_are_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "pbs.yaml").write_text(text)
    done = subprocess.run(command("pbs"), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pbs.yaml"]
