"""A scheduler of its own that is killed: one line, a C that is continued, and no silence while there are no workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spdist.api import products as api
from tests.conftest import random_matrix
from tests.support.worker_processes import ROOT, worker_process
from tests.test_cli import SPDIST, wait_for

LINE_SECONDS = 90.0
"""Seconds in which an awaited line is written, and a command ends; the longest takes 15."""


@pytest.fixture
def start_scheduler(tmp_path) -> Iterator:
    """Return a function that starts a scheduler at one port; it returns its process and its address."""
    started: list[subprocess.Popen] = []
    port: list[str] = ["0"]

    def start() -> tuple[subprocess.Popen, str]:
        file = tmp_path / f"scheduler{len(started)}.json"
        words = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", port[0], "--no-dashboard"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *words, "--scheduler-file", str(file)]
        log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **log))
        wait_for(lambda: file.exists() and '"address"' in file.read_text())
        address = re.search(r"tcp://127\.0\.0\.1:(\d+)", file.read_text())
        assert address is not None
        port[0] = address[1]
        return started[-1], address[0]

    yield start
    for process in started:
        process.kill()
        process.wait()


def begin(folder: Path, address: str, *options: str) -> subprocess.Popen[str]:
    """Start a product of some seconds on a scheduler."""
    words = [*SPDIST, "multiply", folder / "A.zarr", folder / "A.zarr", folder / "C.zarr", "--scheduler", address]
    grid = ["--grid", "150,1,1", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*map(str, words), *grid], cwd=ROOT, env=environment, **pipes)


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Read stderr up to a line that begins so; a process that does not write one in time is killed."""
    timer = threading.Timer(LINE_SECONDS, process.kill)
    timer.start()
    read: list[str] = []
    try:
        for text in process.stderr or ():
            read.append(text)
            if re.match(line, text):
                return
    finally:
        timer.cancel()
    pytest.fail(f"no line {line!r} in {read}")


@pytest.mark.slow
def test_a_scheduler_that_dies_and_comes_back_without_workers(tmp_path, start_scheduler):
    api.save(tmp_path / "A.zarr", random_matrix(8000, 8000, 40, 7))
    scheduler, address = start_scheduler()
    with worker_process(address):
        first = begin(tmp_path, address)
        wait_for(lambda: list((tmp_path / "C.zarr" / "data").glob("c/*")) or first.poll() is not None)
        scheduler.kill()
        _, errors = first.communicate(timeout=LINE_SECONDS)
    assert first.returncode == 1, errors
    said = rf"spdist: the (connection to the )?scheduler at {address} (is gone|broke).*continue with --resume"
    assert re.fullmatch(said, errors.splitlines()[-1])
    assert "Traceback" not in errors

    _, address = start_scheduler()
    second = begin(tmp_path, address, "--resume", "--json")
    read_until(second, rf"spdist: warning: no workers at {address} for 1\d s: waiting; start some with `dask worker")
    with worker_process(address):
        read_until(second, ".*has joined")
        wait_for(lambda: (tmp_path / "C.zarr" / "spdist-journal").exists() or second.poll() is not None)
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=LINE_SECONDS)
        third = begin(tmp_path, address, "--resume", "--json")
        _, errors = third.communicate(timeout=120)
    assert third.returncode == 0, errors
    assert re.fullmatch(rf"(spdist: warning: the scheduler at {address} has no keys: .*\n)?", errors)
    assert api.verify(tmp_path / "A.zarr", tmp_path / "A.zarr", tmp_path / "C.zarr").ok
    assert not list(tmp_path.glob(".spdist-*"))
