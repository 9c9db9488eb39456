"""Two commands on one target: one wins, the other says who holds it; C is one product or the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import spdist
from spdist.api import products as api
from spdist.cli import main
from spdist.errors import InputError
from spdist.storage import lock
from spdist.storage.lock import hold_target
from spdist.storage.matrix import open_matrix
from tests.conftest import assert_is_product, random_matrix

A, B = random_matrix(60, 60, 5, 1, "int64"), random_matrix(60, 60, 5, 2, "int64")


def read(path: Path):
    c = open_matrix(path)
    return c.rows(0, c.nrows)


@pytest.mark.parametrize("command", [
    "multiply A.zarr B.zarr C.zarr", "multiply A.zarr B.zarr C.zarr --axis 0 --top-n 2", "transpose A.zarr C.zarr",
    "multiply A.zarr B.zarr C.zarr --resume --transpose-a", "generate poisson C.zarr --dims 4,4 --points 5",
    "export A.zarr C.npz", "symmetrize A.zarr C.zarr", "import a.npz C.zarr",
])  # fmt: skip
def test_every_command_that_writes_says_who_holds_its_target(command, stored, tmp_path, monkeypatch, capsys):
    stored("A", A)
    stored("B", B)
    spdist.export_matrix(tmp_path / "A.zarr", tmp_path / "a.npz")
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    held = [lock.TargetLock(str(tmp_path / name)) for name in ("C.zarr", "C.npz")]
    for one in held:
        one.acquire(steal=False)
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert "is being written by run" in said
    assert said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} - before == {"C.zarr.spdist-lock", "C.npz.spdist-lock"}
    for one in held:
        one.release()


def test_two_threads_on_one_target(stored, tmp_path, scheduler):
    a, b = stored("A", A), stored("B", B)

    def make(left, right) -> str:
        try:
            return api.multiply(left, right, tmp_path / "C.zarr", overwrite=True, scheduler=scheduler).state
        except InputError as error:
            assert "is being written by run" in str(error)  # noqa: PT017
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(make, (a, b), (b, a)))
    assert "computed" in done
    left, right = (A, B) if done == ["computed", "refused"] else (B, A)
    if done.count("computed") == 1:
        assert_is_product(read(tmp_path / "C.zarr"), left, right)
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "B.zarr", "C.zarr"}


def test_a_chain_holds_its_target(stored, tmp_path):
    matrices = [stored("A", A), stored("B", B), tmp_path / "A.zarr"]
    with hold_target(tmp_path / "C.zarr"), ThreadPoolExecutor(1) as pool:
        with pytest.raises(InputError, match="is being written by run"):
            pool.submit(spdist.multi_matmul, matrices, tmp_path / "C.zarr").result()
        with pytest.raises(InputError, match="is being written by run"):
            pool.submit(spdist.multi_matmul, matrices, tmp_path / "C.zarr", memory_limit="1MiB").result()


def test_after_a_kill_the_next_run_takes_over(stored, tmp_path, scheduler, caplog):
    """The first is killed as soon as C is begun; the second makes another product."""
    a, b, c = stored("A", A), stored("B", B), tmp_path / "C.zarr"
    call = [sys.executable, "-m", "spdist", "multiply", a.url, b.url, str(c), "--workers", "1"]
    first = subprocess.Popen(call, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while not (c / "zarr.json").exists():
        assert first.poll() is None
        time.sleep(0.001)
    first.send_signal(signal.SIGKILL)
    first.wait()
    api.multiply(b, a, c, overwrite=True, scheduler=scheduler)
    assert_is_product(read(c), B, A)
    assert f"process {first.pid}" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"A.zarr", "B.zarr", "C.zarr"}
