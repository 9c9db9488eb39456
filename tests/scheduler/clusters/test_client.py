"""Stops take seconds, whatever happened to the scheduler and the workers; nobody stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spdist.api import products as api
from spdist.scheduler.clusters import client
from tests.conftest import random_matrix
from tests.test_cli import wait_for, workers_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a matrix whose product takes some seconds."""
    place = tmp_path_factory.mktemp("stop")
    api.save(place / "A.zarr", random_matrix(4000, 4000, 40, 7))
    return place


@contextlib.contextmanager
def product(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a product, and wait until some of it is written."""
    target = folder / f"C{time.monotonic_ns()}.zarr"
    command = [sys.executable, "-m", "spdist", "multiply", "A.zarr", "A.zarr", target.name, "--grid", "300,1,1", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, **pipes) as process:
        try:
            wait_for(lambda: list((target / "data").glob("c/*")) or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()


def last_line(process: subprocess.Popen[str]) -> str:
    """Wait for the end, which comes in seconds; return the last line on stderr."""
    errors = process.communicate(timeout=90)[1]
    assert "Traceback" not in errors
    assert "leaked" not in errors
    return [line for line in errors.splitlines() if line.startswith("spdist:")][-1]


@contextlib.contextmanager
def foreign(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a scheduler and a worker as processes of their own; yield the address and the scheduler."""
    file = folder / f"scheduler{time.monotonic_ns()}.json"
    dask, quiet = [sys.executable, "-m", "dask"], {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    words = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", file]
    scheduler = subprocess.Popen([*dask, "scheduler", *words], **quiet)
    options = ["--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--no-nanny", "--local-directory", folder]
    worker = subprocess.Popen([*dask, "worker", "--scheduler-file", file, *options], **quiet)
    try:
        wait_for(lambda: file.exists() and file.read_text())
        yield json.loads(file.read_text())["address"], scheduler
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_scheduler_that_dies_ends_the_run_at_once(folder):
    with foreign(folder) as (address, scheduler), product(folder, "--scheduler", address) as process:
        scheduler.kill()
        assert last_line(process) == (
            f"spdist: the connection to the scheduler at {address} broke: see whether it still runs; durable rows "
            f"stay, continue with --resume"
        )
        assert process.returncode == 1


@pytest.mark.slow
def test_ctrl_c_while_the_scheduler_does_not_answer(folder):
    with foreign(folder) as (address, scheduler), product(folder, "--scheduler", address) as process:
        scheduler.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert last_line(process) == "spdist: interrupted; continue with --resume"


def is_gone(worker: psutil.Process) -> bool:
    try:
        return worker.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_ctrl_c_while_workers_do_not_answer(folder):
    with product(folder, "--workers", "2") as process:
        workers = workers_of(process)
        for worker in workers:
            worker.suspend()
        process.send_signal(signal.SIGINT)
        assert last_line(process) == "spdist: interrupted; continue with --resume"
        assert all(is_gone(worker) for worker in workers)


@pytest.mark.slow
def test_workers_of_a_killed_client_are_gone(folder):
    with product(folder, "--workers", "2") as process:
        workers = workers_of(process)
        assert workers
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: all(is_gone(worker) for worker in workers))


@pytest.mark.slow
def test_ctrl_c_while_workers_start(folder):
    words = ["multiply", "A.zarr", "A.zarr", "N.zarr", "--workers", "2", "--grid", "9,1,1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "spdist", *words], cwd=folder, **pipes) as process:
        wait_for(lambda: workers_of(process))
        process.send_signal(signal.SIGINT)
        assert last_line(process).startswith("spdist: interrupted")


def test_a_scheduler_that_does_not_answer_a_client_is_given_up(monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        client.RunClient(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=60)
