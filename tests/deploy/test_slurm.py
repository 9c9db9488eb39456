"""deploy/slurm/multiply.sbatch on a real SLURM of two nodes: `make slurm ON="words in front of sbatch"`.

All nodes see this checkout, and this process sees the processes of all nodes, as where nodes are network namespaces of
one machine: tests kill them. A loss costs blocks, not the job, and nobody is asked.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import spdist
from tests.conftest import random_matrix
from tests.scheduler.execution.test_driver import files

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "multiply.sbatch"
JOB = "a: A.zarr\nb: A.zarr\nout: C.zarr\ngrid: [600, 1, 1]\nmemory_limit: 64MiB\nengine: numba\n"


def slurm(*words: str | Path, cwd: Path = ROOT) -> str:
    """Return what a command of SLURM prints."""
    on = shlex.split(os.environ.get("SPDIST_SLURM", ""))
    environment = os.environ | {"SPDIST_ROOT": str(ROOT), "SPDIST_PYTHON": sys.executable}
    return subprocess.run(
        [*on, "env", "-C", str(cwd), *map(str, words)], check=True, capture_output=True, text=True, env=environment
    ).stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with A.zarr and job.yaml that all nodes see."""
    place = ROOT / "build" / f"slurm-{os.getpid()}"
    place.mkdir(parents=True)
    spdist.save(place / "A.zarr", random_matrix(20_000, 20_000, 40, 7))
    (place / "job.yaml").write_text(JOB)
    yield place
    slurm("scancel", "--me")
    shutil.rmtree(place)


@pytest.fixture
def reference(folder: Path) -> dict[str, bytes]:
    """Return the files of C, made in this process."""
    a = folder / "A.zarr"
    spdist.multiply(a, a, folder / "R.zarr", grid=(600, 1, 1), memory_limit="64MiB", engine="numba")
    return files(folder / "R.zarr")


def submit(folder: Path, *words: str) -> str:
    """Submit a job of two tasks on two nodes; return its number."""
    options = ["--parsable", "--nodes=2", "--ntasks=2", "--time=20"]
    return slurm("sbatch", *options, SBATCH, "job.yaml", *words, cwd=folder).strip()


def wait_for(holds: Callable[[], object], seconds: float = 600) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def end_of(job: str, folder: Path) -> str:
    """Wait until a job and its tasks have left the queue; return their log."""
    wait_for(lambda: not slurm("squeue", "--noheader", "--job", job).strip() if is_queued(job) else True)
    return "\n".join(path.read_text() for path in sorted(folder.glob("spdist-*.log")))


def is_queued(job: str) -> bool:
    """Whether SLURM knows the job among those that wait or run."""
    return job in slurm("squeue", "--noheader", "--format=%A %F")


def running(job: str, words: str, node: str = "") -> list[psutil.Process]:
    """Return the job's processes but srun with some words in their command, on a node or on all."""
    found = []
    for process in psutil.process_iter():
        try:
            given = process.environ()
            if given.get("SLURM_JOB_ID") == job and words in " ".join(process.cmdline()) and process.name() != "srun":
                found += [process] if given.get("SLURMD_NODENAME", "").startswith(node) else []
        except psutil.Error:
            continue
    return found


def test_a_job_left_alone(folder: Path, reference: dict[str, bytes]) -> None:
    log = end_of(submit(folder), folder)
    assert "exit code 0" in log
    assert files(folder / "C.zarr") == reference
    assert not list(folder.glob(".spdist-*"))


@pytest.mark.parametrize("lost", ["scheduler", "a worker", "all workers", "the second node"])
def test_a_loss_does_not_cost_the_job(lost: str, folder: Path, reference: dict[str, bytes]) -> None:
    job = submit(folder)
    wait_for(lambda: list((folder / "C.zarr" / "data").glob("c/*")))
    nodes = slurm("scontrol", "show", "hostnames", slurm("squeue", "--noheader", "--job", job, "--format=%N").strip())
    second = nodes.split()[1]
    victims = {
        "scheduler": lambda: running(job, "dask scheduler"),
        "a worker": lambda: running(job, "dask worker")[:1],
        "all workers": lambda: running(job, "dask worker"),
        "the second node": lambda: running(job, "", second),
    }[lost]()
    assert victims, "this process does not see the processes of the nodes"
    for victim in [child for one in victims for child in one.children(recursive=True)] + victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    log = end_of(job, folder)
    assert "exit code 0" in log, log
    assert ("starting them again (1 of 3)" in log) == (lost in ("scheduler", "all workers"))
    assert files(folder / "C.zarr") == reference
    assert not list(folder.glob(".spdist-*"))


def test_a_requeued_job_goes_on(folder: Path, reference: dict[str, bytes]) -> None:
    job = submit(folder)
    wait_for(lambda: list((folder / "C.zarr" / "data").glob("c/*")))
    slurm("scontrol", "requeue", job)
    wait_for(lambda: "PENDING" in slurm("squeue", "--noheader", "--job", job, "--format=%T"))
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    log = end_of(job, folder)
    assert "resuming by the stored plan" in log
    assert "exit code 0" in log
    assert files(folder / "C.zarr") == reference


def test_an_array_job_makes_one_product_in_parts(folder: Path, reference: dict[str, bytes]) -> None:
    job = submit(folder, "--set", "part=%a/3", "--set", "grid=null")
    end_of(job, folder)
    assert not (folder / "C.zarr").exists()  # %a stays where there is no array

    options = ["--parsable", "--array=1-3", "--ntasks=1", "--time=20"]
    job = slurm("sbatch", *options, SBATCH, "job.yaml", "--set", "part=%a/3", "--set", "grid=null", cwd=folder).strip()
    log = end_of(job, folder)
    assert log.count("exit code 0") == 3, log
    reports = [json.loads(path.read_text()) for path in folder.glob("job.report.part-*-of-3.json")]
    assert sorted(one["result"]["part"] for one in reports) == ["1/3", "2/3", "3/3"]
    c = spdist.open(folder / "C.zarr")
    assert spdist.check(folder / "C.zarr").ok
    assert abs(c.to_scipy() - spdist.open(folder / "R.zarr").to_scipy()).max() < 1e-9
