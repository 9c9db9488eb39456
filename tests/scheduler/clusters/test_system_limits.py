"""Small limits of the machine: one line, before anything waits."""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import sys
import tempfile

import dask.config
import psutil
import pytest

from spdist.errors import InputError, SpdistError
from spdist.foundation.processes import name_of_writer
from spdist.scheduler.clusters import system_limits
from spdist.scheduler.executors.clients.cluster import connect
from tests.conftest import random_matrix

NAME = "from spdist.foundation.processes import name_of_writer; print(name_of_writer())"
"""Python that prints the name of its process, which has ended then."""


@pytest.mark.parametrize(("limit", "code"), [("-n 40", 2), ("-Sn 40", 0)])
def test_few_open_files(stored, tmp_path, limit, code):
    """The soft limit is raised; the hard one is named, with what is needed."""
    stored("A", random_matrix(300, 300, 4, 1))
    words = f"ulimit {limit}; exec {sys.executable} -m spdist multiply A.zarr A.zarr C.zarr --workers 2 --json"
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.startswith("spdist: 2 workers need ")
        assert "open files, and the limit is 40: raise it (ulimit -n " in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "C.zarr").exists()


def test_the_open_files_of_a_run_are_within_what_is_asked():
    before = psutil.Process().num_fds()
    with connect(workers=3, scheduler=None, processes=True, blocks=9):
        used = psutil.Process().num_fds() - before
    assert used < system_limits.FILES_OF_RUN + 3 * system_limits.FILES_PER_WORKER


def test_no_locks(monkeypatch):
    def no_lock(self):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(multiprocessing.context.SpawnContext, "Lock", no_lock)
    with pytest.raises(InputError, match=r"need locks in /dev/shm, and none can be made \(.*Read-only"):
        system_limits.check_limits(2)


def test_no_temporary_folder(monkeypatch):
    def no_folder():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    with pytest.raises(InputError, match="No usable temporary directory found; name one in TMPDIR"):
        system_limits.check_limits(2)


def test_processes_that_cannot_start_are_one_line():
    """As with no room for another process: each dies before it connects."""
    executable = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable("/bin/false")
    try:
        with pytest.raises(SpdistError, match=r"2 workers of this machine did not start .*: start fewer") as caught:
            connect(workers=2, scheduler=None, processes=True, blocks=9).__enter__()
    finally:
        multiprocessing.set_executable(executable)
    assert "\n" not in str(caught.value)


def test_the_limit_is_never_lowered(monkeypatch):
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: calls.append(limits))
    system_limits.check_limits(2)
    assert not calls


def test_the_cause_is_named_if_no_process_starts(monkeypatch):
    def broken(self):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(multiprocessing.context.SpawnContext, "Lock", broken)
    with pytest.raises(InputError, match="does not run as a new process of this user"):
        system_limits.check_limits(2)


def test_little_address_space_is_one_line(tmp_path):
    words = f"ulimit -v 1100000; exec {sys.executable} -m spdist multiply A.zarr A.zarr C.zarr"
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("spdist: the limit of address space is 1,126,400,000 bytes")
    assert done.stderr.count("\n") == 1


def test_folders_of_workers_go_and_so_do_those_of_killed_runs(tmp_path):
    dead = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / f"spdist-workers.{dead}" / "dask-scratch-space").mkdir(parents=True)
    (tmp_path / f"spdist-workers.{name_of_writer()}").mkdir()  # of another run of this process
    mine = [path.name for path in tmp_path.iterdir() if dead not in path.name]
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        with connect(workers=1, scheduler=None, processes=False, blocks=9):
            assert len(list(tmp_path.iterdir())) == 2
        assert [path.name for path in tmp_path.iterdir()] == mine  # that of a live process
    with (
        dask.config.set({"temporary-directory": "/dev/null/x"}),
        pytest.raises(InputError, match="no folder for workers can be made there"),
        connect(workers=1, scheduler=None, processes=False, blocks=9),
    ):
        pass
